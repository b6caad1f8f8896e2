"""Divide a journal into spans. The records of a span follow from one another under one version of the decision rules.

A span begins at the beginning of the log, or at a claim whose owner continued from a snapshot: after an owner with
other decision rules had stopped as planned, or because an operator accepted a loss.
"""

from typing import NamedTuple

import msgspec

from forebay.core.routing.policies import CustomPolicies
from forebay.core.world import CORE_VERSION
from forebay.events.decisions import OwnerClaimed
from forebay.journal.claims import valid_claims, validity_at
from forebay.journal.records import Validity, journal
from forebay.journal.snapshots import load_continued, newest_snapshot, owner_state, release_at
from forebay.journal.start import Start, StoredState, oldest, oldest_state
from forebay.transport.base import Log


class OtherSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a journal with other decision rules, which only forebay `release` can derive; empty if it is unknown."""

    rules: int
    release: str = ""
    first: int
    end: int


class RulesSpan(NamedTuple):
    """Part of a journal. It begins with `claim`, or at the beginning of the log."""

    rules: int
    first: int
    end: int
    claim: OwnerClaimed | None
    release: str = ""

    @property
    def is_own(self) -> bool:
        return self.rules == CORE_VERSION

    async def start(self, log: Log, partition: int, custom: CustomPolicies) -> Start:
        """Return the state before the span. Raises LogError if it is lost."""
        if self.claim is None:
            return await oldest(log, partition, custom)
        return Start(await load_continued(log, partition, self.claim, custom), self.first, begins_span=True)


async def spans_of(log: Log, partition: int, begin: StoredState, end: int) -> list[RulesSpan]:
    """Return the spans of a journal from the state `begin` to offset `end`. Raises LogError if it is damaged."""
    rules = begin.core_version if begin.owner_epoch >= 0 else -1
    span = RulesSpan(rules, begin.offset, end, None)
    found: list[RulesSpan] = []
    async for valid in valid_claims(log, partition, begin.offset, end, begin, rules):
        if valid.begins_span:
            found.append(span._replace(end=valid.offset))
            span = RulesSpan(valid.claim.core_version, valid.offset, end, valid.claim)
        span = span._replace(rules=valid.claim.core_version, release=valid.claim.release)
    if span.claim is None and not span.release and begin.owner_epoch >= 0:
        span = span._replace(release=await release_at(log, partition, begin.owner_epoch))
    return [*found, span if span.rules >= 0 else span._replace(rules=CORE_VERSION)]


async def valid_offsets(log: Log, partition: int, start: int, end: int) -> set[int]:
    """Return the offsets of the valid records in [start, end) of a journal. Raises LogError if it is damaged.

    The search reads the journal from the newest snapshot before `start`.
    """
    taken = await newest_snapshot(log, partition, start)
    if taken is None:
        begin = await oldest_state(log, partition)
        first, validity = begin.offset, Validity.after(begin, begin.core_version)
    else:
        state, rules = await owner_state(log, partition, taken), taken.core_version
        first, validity = taken.journal_offset, await validity_at(log, partition, taken.journal_offset, state, rules)
    return {offset async for offset, _ in journal(log, partition, first, end, validity) if offset >= start}
