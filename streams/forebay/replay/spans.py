"""Divide a journal into spans. The records of a span follow from one another under one version of the decision rules.

A span begins at the beginning of the log, or at a claim whose owner continued from a snapshot: after an owner with
other decision rules had stopped as planned, or because an operator accepted a loss.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

import msgspec

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.world import CORE_VERSION
from forebay.events.decisions import OwnerClaimed
from forebay.events.topics import DECISIONS
from forebay.journal.claims import read_claim, valid_claims, validity_at
from forebay.journal.records import OtherRules, Validity, journal, journal_records
from forebay.journal.snapshots import (
    load_continued,
    load_snapshot,
    newest_snapshot,
    owner_state,
    release_at,
    snapshots_taken,
)
from forebay.journal.start import StoredState, begins_of, oldest_state, usable_state
from forebay.replay.walk import Start, Walk, oldest
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

    async def start(self, log: Log, partition: int, end: int, custom: CustomPolicies) -> Start:
        """Return the state before the span, of a journal that ends at offset `end`. Raises LogError if it is lost."""
        if self.claim is None:
            return await oldest(log, partition, end, custom)
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


class OwnSpanSearch:
    """Search for the next owner with this program's rules, after a walk that raised `error`. Each record is read once.

    Attributes:
        blocked: journal offset of the first record that the walk could not derive.
        position: journal offset of the next record that the search reads.
    """

    def __init__(self, walk: Walk, error: OtherRules) -> None:
        self.error = error
        self.blocked = self.position = walk.position
        self._walk = walk
        self._validity: Validity | None = None

    async def next_start(
        self, log: Log, partition: int, end: int, custom: CustomPolicies, breathe: Callable[[], Awaitable[None]]
    ) -> Start | None:
        """Return the state from which such an owner continued, or None if there is no such owner before offset `end`.

        `breathe` is called after each record. Raises LogError if the state is lost. The search may be continued then.
        """
        if self._validity is None:
            world, rules = self._walk.world, self._walk.validity.rules
            self._validity = await validity_at(log, partition, self.position, world, rules)
        async for record in journal_records(log, partition, self.position, end):
            self.position = record.offset
            claim = read_claim(self._validity, record)
            if claim is not None and claim.core_version == CORE_VERSION:
                return Start(await load_continued(log, partition, claim, custom), record.offset, begins_span=True)
            self.position += 1
            await breathe()
        return None


async def oldest_of_any_rules(log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Start:
    """Return the oldest usable state (see `oldest`), whose owner may have had other decision rules."""
    begins, end = await begins_of(log, partition), await log.end(DECISIONS.name, partition)
    if any(begins.values()):
        async for _, taken in snapshots_taken(log, partition, begins[DECISIONS.name], end):
            if await usable_state(log, partition, taken, begins) is not None:
                world = await load_snapshot(log, partition, taken, custom, any_rules=True)
                return Start(world, taken.journal_offset, rules=taken.core_version)
    return await oldest(log, partition, end, custom)
