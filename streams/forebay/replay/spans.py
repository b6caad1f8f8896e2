"""Divide a journal into spans. The records of a span follow from one another under one version of the decision rules.

A span begins at the beginning of the log, or at a claim whose owner continued from a snapshot: after an owner with
other decision rules had stopped as planned, or because an operator accepted a loss.
"""

from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.world import CORE_VERSION
from forebay.events.decisions import OwnerClaimed, Sealed
from forebay.events.topics import DECISIONS
from forebay.replay.walk import Start, oldest
from forebay.transport.base import Log, NotDerivable
from forebay.transport.history.claims import valid_claims, validity_at
from forebay.transport.history.reader import PAGE_RECORDS, Validity, decode_journal, journal, journal_records
from forebay.transport.history.release import rules_text
from forebay.transport.history.snapshots import (
    claim_at,
    load_continued,
    load_sealed,
    load_snapshot,
    newest_snapshot,
    newest_snapshot_at,
    owner_state,
    snapshots_taken,
)
from forebay.transport.history.start import StoredState, begins_of, oldest_state, usable_state
from forebay.transport.recording.manifest import utc


class OtherSpan(msgspec.Struct, frozen=True, kw_only=True):
    """Part of a journal that only forebay `release` can derive, with other decision rules. Empty if unknown."""

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
        claim = await claim_at(log, partition, begin.owner_epoch)
        span = span._replace(release="" if claim is None else claim.release)
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


async def sealed_start(log: Log, partition: int, offset: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Start | None:
    """Return the state at journal offset `offset` from the seal of an owner with any rules.

    Returns None if the last valid record up to `offset` is not a `Sealed`. `Start.offset` is the offset after it.
    """
    found = await newest_snapshot_at(log, partition, offset + 1)
    if found is None or not isinstance(found[1], Sealed):
        return None
    sealed_at, sealed = found
    world = await load_sealed(log, partition, sealed, custom)
    validity = Validity.after(world, sealed.core_version, sealed_at)
    async for record in journal_records(log, partition, sealed_at + 1, offset + 1):
        claim = validity.read(record)
        if validity.last == record.offset and not (isinstance(claim, OwnerClaimed) and claim.snapshot < 0):
            return None
    return Start(world, sealed_at + 1, rules=sealed.core_version)


async def moment_error(log: Log, partition: int, offset: int) -> NotDerivable:
    """Return the error for a moment in a span of other rules, which names the nearest other moments."""
    end = await log.end(DECISIONS.name, partition)
    spans = await spans_of(log, partition, await oldest_state(log, partition), end)
    span = next((one for one in reversed(spans) if one.first <= offset), spans[0])
    near = [] if span.claim is None else [span.first]
    if span.end < end and spans[spans.index(span) + 1].is_own:
        near.append(span.end)
    elif await _ends_sealed(log, partition, span):
        near.append(span.end - 1)
    moments = [NearMoment(one, await clock_before(log, partition, one + 1)) for one in near]
    return not_derivable(offset, span.first, span.end, span.rules, span.release, moments)


class NearMoment(NamedTuple):
    offset: int
    now_us: int


def not_derivable(
    offset: int, first: int, end: int, rules: int, release: str, near: Sequence[NearMoment]
) -> NotDerivable:
    """Return the error for a moment at `offset` in the part [first, end) of a journal by owners with other rules."""
    shown = [f"offset {one.offset}" + (f" ({utc(one.now_us)})" if one.now_us else "") for one in near]
    remedy = f"use forebay {release}" if release else "use that version"
    if shown:
        nearest = f"nearest moment{'s' * (len(shown) > 1)} that this program can show"
        remedy += f", or show {' or '.join(shown)}, the {nearest}"
    return NotDerivable(
        f"journal offset {offset} is in a part ({first} to {end - 1}) that was decided by {rules_text(rules, release)},"
        f" this program has version {CORE_VERSION}: {remedy}"
    )


async def oldest_of_any_rules(log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Start:
    """Return the oldest usable state (see `oldest`), whose owner may have had other decision rules."""
    begins, end = await begins_of(log, partition), await log.end(DECISIONS.name, partition)
    if any(begins.values()):
        async for _, taken in snapshots_taken(log, partition, begins[DECISIONS.name], end):
            if await usable_state(log, partition, taken, begins) is not None:
                world = await load_snapshot(log, partition, taken, custom, any_rules=True)
                return Start(world, taken.journal_offset, rules=taken.core_version)
    return await oldest(log, partition, end, custom)


async def clock_before(log: Log, partition: int, end: int) -> int:
    """Return the owner's clock before journal offset `end` in microseconds, 0 if no event was applied by then."""
    begin = await log.begin(DECISIONS.name, partition)
    while begin < end:
        start = max(begin, end - PAGE_RECORDS)
        records = [decode_journal(one) async for one in journal_records(log, partition, start, end)]
        clocks = [record.consumed[-1].now_us for record in records if record is not None and record.consumed]
        if clocks:
            return max(clocks)  # a repeated record may be the last one
        end = start
    return 0


async def _ends_sealed(log: Log, partition: int, span: RulesSpan) -> bool:
    found = await newest_snapshot_at(log, partition, span.end)
    return found is not None and found[0] == span.end - 1 and isinstance(found[1], Sealed)
