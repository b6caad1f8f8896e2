"""Find the valid claims of a journal, and the seals that they name, without decoding the other records.

A claim with other rules than those of the current owner is void, unless it names the last valid record, a `Sealed`. So
whether a claim is valid depends on the records before it. The functions here work on journals of any version.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from forebay.events.codec import MALFORMED
from forebay.events.decisions import OwnerClaimed, Sealed
from forebay.events.topics import DECISIONS
from forebay.transport.base import Log, Record
from forebay.transport.history.reader import Validity, can_continue, decode_journal, journal_records

SEAL_RECORDS = 4  # per read of the last records before an offset, of which the very last one usually decides


class ValidClaim(NamedTuple):
    """A valid claim in a journal.

    Attributes:
        offset: Offset of the claim.
        claim: The claim.
        rules_before: Version of the decision rules of the previous owner; -1 for the first owner.
    """

    offset: int
    claim: OwnerClaimed
    rules_before: int

    @property
    def begins_span(self) -> bool:
        """Whether the records of the owner do not follow from the earlier records, but from a snapshot."""
        changed = self.claim.core_version != self.rules_before
        return self.rules_before >= 0 and (changed or self.claim.snapshot >= 0)


async def valid_claims(
    log: Log, partition: int, start: int, end: int, epoch: int = -1, rules: int = -1
) -> AsyncIterator[ValidClaim]:
    """Yield the valid claims in [start, end) of a journal.

    Args:
        log: The log.
        partition: Control partition of the group.
        start: Journal offset.
        end: Journal offset.
        epoch: Owner epoch before `start`; -1 if there was no owner.
        rules: Version of the decision rules of that owner; -1 if there was none.

    Raises:
        LogError: The log is damaged.
    """
    seal = -1 if epoch < 0 else await seal_before(log, partition, start, epoch)
    async for record in journal_records(log, partition, start, end):
        stamp = stamp_of(record)
        if stamp is None:
            continue
        if stamp.is_claim:
            claim = decode_journal(record)
            if isinstance(claim, OwnerClaimed) and (epoch < 0 or can_continue(claim, rules, seal)):
                yield ValidClaim(record.offset, claim, rules)
                epoch, rules, seal = record.offset, claim.core_version, -1
        elif stamp.owner_epoch == epoch:
            seal = record.offset if stamp.is_sealed else -1


async def validity_at(log: Log, partition: int, offset: int, epoch: int, rules: int | None = None) -> Validity:
    """Return a filter of the journal records from `offset` on, of which `epoch` is the owner epoch before.

    Args:
        log: The log.
        partition: Control partition of the group.
        offset: Journal offset.
        epoch: Owner epoch before this offset; -1 before the first claim.
        rules: Version of the decision rules of that owner; None for this program's version.
    """
    return Validity(epoch, rules, await seal_before(log, partition, offset, epoch))


class RecordStamp(msgspec.Struct):
    """Fields by which records are assigned to owners, without decoding the other fields."""

    type: str
    owner_epoch: int = -1

    @property
    def is_claim(self) -> bool:
        """Whether the record is a claim."""
        return self.type == _CLAIMED

    @property
    def is_sealed(self) -> bool:
        """Whether the record is a `Sealed`."""
        return self.type == _SEALED


_STAMP = msgspec.json.Decoder(RecordStamp)
_CLAIMED = OwnerClaimed.__struct_config__.tag
_SEALED = Sealed.__struct_config__.tag


def stamp_of(record: Record) -> RecordStamp | None:
    """Return the stamp of a journal record of any version, or None for a foreign record."""
    try:
        return _STAMP.decode(record.value)
    except MALFORMED:
        return None


async def seal_before(log: Log, partition: int, offset: int, epoch: int) -> int:
    """Return the offset of the last valid journal record before `offset` if it is a `Sealed`, otherwise -1.

    Args:
        log: The log.
        partition: Control partition of the group.
        offset: Journal offset.
        epoch: Owner epoch of that record.
    """
    begin = max(epoch, await log.begin(DECISIONS.name, partition))
    while offset > begin >= 0:
        start = max(begin, offset - SEAL_RECORDS)
        records = [record async for record in journal_records(log, partition, start, offset)]
        for record in reversed(records):
            stamp = stamp_of(record)
            if stamp is not None and not stamp.is_claim and stamp.owner_epoch == epoch:
                return record.offset if stamp.is_sealed else -1
        offset = start
    return -1
