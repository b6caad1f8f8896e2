"""Find the valid claims of a journal, and the seals that they name, without decoding the other records.

A claim with other rules than those of the current owner is void, unless it names the last valid record, a `Sealed`. So
whether a claim is valid depends on the records before it. The functions here work on journals of any version.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple

from forebay.events.decisions import OwnerClaimed, Sealed
from forebay.events.topics import DECISIONS
from forebay.journal.records import OwnedState, RecordStamp, Validity, decode_journal, journal_records, stamp_of
from forebay.journal.snapshots import claim_at
from forebay.transport.base import Log, Record

SEAL_RECORDS = 4  # per read of the last records before an offset, of which the very last one usually decides


class ValidClaim(NamedTuple):
    """A valid claim in a journal. `rules_before` is the rules version of the previous owner, -1 for the first owner."""

    offset: int
    claim: OwnerClaimed
    rules_before: int

    @property
    def begins_span(self) -> bool:
        """Whether the records of the owner do not follow from the earlier records, but from a snapshot."""
        changed = self.claim.core_version != self.rules_before
        return self.rules_before >= 0 and (changed or self.claim.snapshot >= 0)


async def valid_claims(
    log: Log, partition: int, start: int, end: int, state: OwnedState | None = None, rules: int = -1
) -> AsyncIterator[ValidClaim]:
    """Yield the valid claims in [start, end) of a journal. Raises LogError.

    `state` is the state before `start`, None if it is unknown or there was no owner. `rules` is the version of the
    decision rules of its owner, -1 if there was none.
    """
    if state is None or state.owner_epoch < 0:
        validity = Validity(-1, -1, nonce=None if start else "", seq=None if start else 0)
    else:
        validity = await validity_at(log, partition, start, state, rules)
    async for record in journal_records(log, partition, start, end):
        rules_before = validity.rules
        if stamp_of(record) is not None:  # only claims are decoded
            validity.admits_unknown(record)
        elif isinstance(claim := validity.read(record), OwnerClaimed):
            yield ValidClaim(record.offset, claim, rules_before)


async def validity_at(log: Log, partition: int, offset: int, state: OwnedState, rules: int | None = None) -> Validity:
    """Return a filter of the journal records from `offset` on. Raises LogError.

    `rules` is the version of the decision rules of the owner in that state, None for this program's version.
    """
    epoch, nonce, seq = state.owner_epoch, state.owner_nonce, state.seq
    if nonce is None and (claim := await claim_at(log, partition, epoch)) is not None:
        nonce = claim.owner_nonce
    seal = -1 if epoch < 0 else await _seal_before(log, partition, offset, epoch, nonce, seq)
    return Validity(epoch, rules, seal, nonce=nonce, seq=seq)


async def _seal_before(log: Log, partition: int, offset: int, epoch: int, nonce: str | None, seq: int | None) -> int:
    """Return the offset of the last valid journal record before `offset` if it is a `Sealed`, otherwise -1."""
    begin = max(epoch, await log.begin(DECISIONS.name, partition))
    while offset > begin >= 0:
        start = max(begin, offset - SEAL_RECORDS)
        records = [record async for record in journal_records(log, partition, start, offset)]
        for record in reversed(records):
            stamp = stamp_of(record)
            if stamp is None or stamp.owner_epoch != epoch or (nonce is not None and stamp.owner_nonce != nonce):
                continue
            if seq is None or stamp.seq == seq - 1:
                return await _first_seal(log, partition, record, stamp)
        offset = start
    return -1


async def _first_seal(log: Log, partition: int, record: Record, stamp: RecordStamp) -> int:
    """Return the offset of a `Sealed` that `record` is or repeats, or -1 if it is another record."""
    sealed = decode_journal(record)
    if not isinstance(sealed, Sealed):
        return -1
    async for earlier in journal_records(log, partition, sealed.journal_offset, record.offset):
        if stamp_of(earlier) == stamp:
            return earlier.offset
    return record.offset
