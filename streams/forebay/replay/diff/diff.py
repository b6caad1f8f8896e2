"""Compare history with an alternative configuration, on one walk over a recorded group or a span of it.

The comparison is open loop: the alternative gets history's events (`forebay.replay.diff.comparison`). The walk also
verifies history.
"""

from collections.abc import Sequence
from typing import NamedTuple

from forebay.core.routing.counterfactual import Alternative
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import AnyDecision
from forebay.core.world import CORE_VERSION
from forebay.events.topics import DECISIONS
from forebay.replay.at import NoSuchRecord, last_clock, offset_at
from forebay.replay.diff.comparison import Comparison
from forebay.replay.diff.counterfactual_world import RECORDED_RULES, Named, OtherPoolRules, names_nothing
from forebay.replay.diff.report import DiffReport, notes
from forebay.replay.spans import OtherSpan, RulesSpan, spans_of
from forebay.replay.verify.divergence import DivergenceReport, DivergenceTrail
from forebay.replay.verify.verify import PROGRESS_EVERY, OnProgress
from forebay.replay.walk import Start, Walk, before, oldest
from forebay.transport.base import Log, LogError, NotDerivable
from forebay.transport.history.claims import validity_at
from forebay.transport.history.reader import journal
from forebay.transport.history.release import rules_text
from forebay.transport.history.start import oldest_state
from forebay.transport.recording.manifest import utc


class EmptySpan(LogError):
    """Raised if the time span contains no decision."""


class Span(NamedTuple):
    """Part of a journal that a comparison covers. The parts in `left_out` are by owners with other rules.

    The derivation begins at `start`, at or before `first`, and the comparison changes its world. `later` has further
    parts by owners with this program's rules.
    """

    start: Start
    first: int
    end: int
    later: tuple[RulesSpan, ...] = ()
    left_out: tuple[OtherSpan, ...] = ()

    @property
    def last(self) -> int:
        return self.later[-1].end if self.later else self.end


async def span_of(
    log: Log,
    partition: int,
    from_us: int | None = None,
    to_us: int | None = None,
    start: Start | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> Span:
    """Return the part of the journal that an owner wrote in a time span.

    Args:
        from_us: beginning of the span on the owner's clock, in microseconds since 1970. None begins at `start`.
        to_us: end of the span on the owner's clock, exclusive. None ends at the journal's current end.
        start: state at or before the beginning of the span, at which the derivation begins. None selects the newest
            usable state of the log before the span, or the oldest one if the span has no beginning.
        custom: custom policies that may run, if `start` is None.

    Raises:
        EmptySpan: the span contains no decision.
        NotDerivable: owners with other decision rules made all decisions of the span.
        LogError: the span begins before the oldest usable state, or the log is damaged.
    """
    end = await log.end(DECISIONS.name, partition)
    if start is None:
        spans = await spans_of(log, partition, await oldest_state(log, partition), end)
        if len(spans) > 1 or not spans[0].is_own:
            return await _among(log, partition, spans, from_us, to_us, custom)
        start = await (
            oldest(log, partition, end, custom) if from_us is None else _state_before(log, partition, from_us, custom)
        )
    if from_us is None and to_us is None:
        return Span(start, start.offset, end)
    first, last, decisions = start.offset if from_us is None else end, end, 0
    validity = await validity_at(log, partition, start.offset, start.world)
    async for offset, record in journal(log, partition, start.offset, end, validity):
        if record.consumed:
            now_us = record.consumed[-1].now_us
            if from_us is not None and now_us >= from_us:
                first = min(first, offset)
            if to_us is not None and now_us >= to_us:
                last = offset
                break
        if isinstance(record, AnyDecision) and first <= offset:
            decisions += 1
            validity.require_own_rules(offset)
    if not decisions:
        raise EmptySpan(f"no decision was made in the time span; {await _extent(log, partition)}")
    return Span(start, first, last)


async def _among(
    log: Log,
    partition: int,
    spans: Sequence[RulesSpan],
    from_us: int | None,
    to_us: int | None,
    custom: CustomPolicies,
) -> Span:
    """Return the parts of a time span by owners with this program's rules. Raises the errors of `span_of`."""
    end = spans[-1].end
    first = spans[0].first if from_us is None else await _offset_from(log, partition, spans[0], end, from_us)
    last = end if to_us is None else await _offset_from(log, partition, spans[0], end, to_us)
    compared: list[RulesSpan] = []
    left_out: list[OtherSpan] = []
    others = 0
    for span in spans:
        decisions = await span.decisions(log, partition, first, last)
        if decisions and span.is_own:
            compared.append(span._replace(first=max(first, span.first), end=min(last, span.end)))
        elif decisions:
            others += decisions
            left_out.append(
                OtherSpan(rules=span.rules, release=span.release, first=span.first, end=span.end, decisions=decisions)
            )
    if not compared and not left_out:
        raise EmptySpan(f"no decision was made in the time span; {await _extent(log, partition)}")
    if not compared:
        made = " and ".join(sorted({rules_text(part.rules, part.release) for part in left_out}))
        raise NotDerivable(
            f"nothing to compare: {made} made all {others} decisions, this program"
            f" has version {CORE_VERSION}; compare with that version of forebay"
        )
    start = await start_of(log, partition, compared[0], custom)
    return Span(start, compared[0].first, compared[0].end, tuple(compared[1:]), tuple(left_out))


async def start_of(log: Log, partition: int, span: RulesSpan, custom: CustomPolicies) -> Start:
    """Return a state from which the first record of a part can be derived. Raises LogError if there is none."""
    end = await log.end(DECISIONS.name, partition)
    if span.claim is None and span.first == 0:
        return await oldest(log, partition, end, custom)
    return await before(log, partition, span.first, custom)


async def _offset_from(log: Log, partition: int, first: RulesSpan, end: int, time_us: int) -> int:
    """Return the offset of the first record whose owner's clock is at least `time_us`; `end` if there is none."""
    async for offset, record in journal(log, partition, first.first, end, first.validity()):
        if record.consumed and record.consumed[-1].now_us >= time_us:
            return offset
    return end


async def derive_up_to(
    log: Log, partition: int, span: Span, progress: OnProgress | None = None
) -> Start | DivergenceReport:
    walk = Walk(log, partition, span.start, span.first)
    trail, records = DivergenceTrail(walk), 0
    async for step in walk:
        if step.divergence is not None:
            return trail.report(step.divergence, step)
        trail.add_verified(step)
        records += 1
        if progress is not None and records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, span.end, 0)
    return Start(walk.world, span.first)


async def _state_before(log: Log, partition: int, from_us: int, custom: CustomPolicies) -> Start:
    try:
        return await before(log, partition, await offset_at(log, partition, from_us - 1) + 1, custom)
    except NoSuchRecord:
        start = await oldest(log, partition, await log.end(DECISIONS.name, partition), custom)
    if start.world.now_us > from_us:  # 0 at the beginning of the log
        earliest = utc(start.world.now_us)
        raise LogError(f"the time span begins too early: decisions can be compared from {earliest} on")
    return start


async def _extent(log: Log, partition: int) -> str:
    clock_us = await last_clock(log, partition) if await log.end(DECISIONS.name, partition) else 0
    return f"the journal ends at {utc(clock_us)}" if clock_us else "the journal is empty"


async def diff(
    log: Log,
    partition: int,
    alter: Alternative,
    progress: OnProgress | None = None,
    named: Named = names_nothing,
    rules: OtherPoolRules = RECORDED_RULES,
    span: Span | None = None,
) -> DiffReport:
    """Compare a group's recorded history with its history under the pool configurations that `alter` returns.

    A record that does not follow from the events ends the comparison and is part of the report. Raises NotDerivable if
    owners with other decision rules made all decisions.

    Args:
        progress: called regularly with the offset after the last journal record done, the offset at which the
            comparison ends, and the number of compared decisions.
        named: returns the `router.disagg` fields that take precedence over an operator's change, even if `alter` leaves
            them unchanged.
        span: part of the journal to compare, and custom policies that may run, as returned by `span_of`. The states of
            both worlds are equal at its beginning. None compares the whole journal, with built-in policies only.
    """
    span = span or await span_of(log, partition)
    begin = await derive_up_to(log, partition, span, progress)
    if isinstance(begin, DivergenceReport):
        report = DiffReport(start=span.first, divergence=begin)
        report.notes = notes(report)
        return report
    walk = Walk(log, partition, begin, span.end)
    trail = DivergenceTrail(walk)
    comparison = Comparison(walk, alter, named, rules)
    report = comparison.report
    report.left_out = list(span.left_out)
    await _compare(log, partition, comparison, walk, trail, progress)
    for part in span.later:
        if report.divergence is not None:
            break
        walk = Walk(log, partition, await start_of(log, partition, part, begin.world.custom), part.end)
        trail = DivergenceTrail(walk)
        comparison.begin_again(walk)
        await _compare(log, partition, comparison, walk, trail, progress)
    return comparison.finish()


async def _compare(
    log: Log,
    partition: int,
    comparison: Comparison,
    walk: Walk,
    trail: DivergenceTrail,
    progress: OnProgress | None,
) -> None:
    report, verified = comparison.report, 0
    async for step in walk:
        if step.divergence is not None:
            report.divergence = trail.report(step.divergence, step)
            break
        trail.add_verified(step)
        comparison.follow(step.offset, step.record)
        verified += isinstance(step.record, AnyDecision)
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, walk.end, verified)
    for name, count in walk.unverified.items():
        report.unverified[name] = report.unverified.get(name, 0) + count
