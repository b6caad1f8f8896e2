"""Divide a journal into spans. The records of a span follow from one another under one version of the decision rules.

A span begins at the beginning of the log, or at a claim whose owner continued from a snapshot: after an owner with
other decision rules had stopped as planned, or because an operator accepted a loss.
"""

from collections.abc import AsyncIterator
from typing import NamedTuple

import msgspec

from forebay.core.routing.policies import CustomPolicies
from forebay.core.world import CORE_VERSION
from forebay.events.codec import MALFORMED
from forebay.events.decisions import OwnerClaimed, Sealed
from forebay.replay.walk import Start, oldest
from forebay.transport.base import Log, Record
from forebay.transport.history.reader import can_continue, decode_journal, journal_records
from forebay.transport.history.snapshots import load_continued
from forebay.transport.history.start import StoredState


class RulesSpan(NamedTuple):
    """Part of a journal.

    Attributes:
        rules: version of the decision rules of its owners.
        first: journal offset of its first record.
        end: journal offset after its last record.
        claim: claim with which the span begins; None for the beginning of the log.
    """

    rules: int
    first: int
    end: int
    claim: OwnerClaimed | None

    @property
    def is_own(self) -> bool:
        """Whether this program has the decision rules of the span."""
        return self.rules == CORE_VERSION

    async def start(self, log: Log, partition: int, end: int, custom: CustomPolicies) -> Start:
        """Return the state before the span, of a journal that ends at offset `end`. Raises LogError if it is lost."""
        if self.claim is None:
            return await oldest(log, partition, end, custom)
        return Start(await load_continued(log, partition, self.claim, custom), self.first)


async def spans_of(log: Log, partition: int, begin: StoredState, end: int) -> list[RulesSpan]:
    """Return the spans of a journal from the state `begin` to offset `end`. Raises LogError if it is damaged."""
    rules = (begin.core_version or CORE_VERSION) if begin.owner_epoch >= 0 else -1
    first, start = begin.offset, None
    found: list[RulesSpan] = []
    async for offset, claim in _valid_claims(log, partition, begin, end):
        if rules >= 0 and (claim.core_version != rules or claim.snapshot >= 0):
            found.append(RulesSpan(rules, first, offset, start))
            first, start = offset, claim
        rules = claim.core_version
    return [*found, RulesSpan(CORE_VERSION if rules < 0 else rules, first, end, start)]


async def _valid_claims(
    log: Log, partition: int, begin: StoredState, end: int
) -> AsyncIterator[tuple[int, OwnerClaimed]]:
    epoch, rules, seal = begin.owner_epoch, begin.core_version or CORE_VERSION, -1
    async for record in journal_records(log, partition, begin.offset, end):
        stamp = _stamp_of(record)
        if stamp is None:
            continue
        if stamp.type == _CLAIMED:
            claim = decode_journal(record)
            if isinstance(claim, OwnerClaimed) and (epoch < 0 or can_continue(claim, rules, seal)):
                epoch, rules, seal = record.offset, claim.core_version, -1
                yield record.offset, claim
        elif stamp.owner_epoch == epoch:
            seal = record.offset if stamp.type == _SEALED else -1


class _Stamp(msgspec.Struct):
    """Fields by which records are assigned to owners, without decoding the other fields."""

    type: str
    owner_epoch: int = -1


_STAMP = msgspec.json.Decoder(_Stamp)
_CLAIMED = OwnerClaimed.__struct_config__.tag
_SEALED = Sealed.__struct_config__.tag


def _stamp_of(record: Record) -> _Stamp | None:
    try:
        return _STAMP.decode(record.value)
    except MALFORMED:
        return None
