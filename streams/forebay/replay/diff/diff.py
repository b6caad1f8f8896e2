"""Compare history with an alternative configuration, in one pass over a recorded group or a span of it.

The comparison is open loop: the alternative gets history's events (`forebay.replay.diff.comparison`). The pass also
verifies history.
"""

from typing import NamedTuple

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.selection.counterfactual import Alternative
from forebay.core.step import AnyDecision
from forebay.events.topics import DECISIONS
from forebay.journal.reader import JournalReader
from forebay.journal.records import journal
from forebay.journal.start import Start, oldest
from forebay.replay.at import NoSuchRecord, last_clock, offset_at
from forebay.replay.diff.comparison import Comparison
from forebay.replay.diff.counterfactual_world import Named, names_nothing
from forebay.replay.diff.report import DiffReport, notes
from forebay.replay.states import States
from forebay.replay.verify.divergence import DivergenceReport, DivergenceTrail
from forebay.replay.verify.verify import PROGRESS_EVERY, OnProgress
from forebay.transport.base import Log, LogError
from forebay.transport.sqlite.recording import utc


class EmptySpan(LogError):
    """Raised if the time span contains no decision."""


class Span(NamedTuple):
    """Part of a journal that a comparison covers.

    The derivation begins at `start`, at or before `first`, and the comparison changes its world.
    """

    start: Start
    first: int
    end: int


async def span_of(
    log: Log,
    partition: int,
    from_us: int | None = None,
    to_us: int | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> Span:
    """Return the part of the journal that an owner wrote in a time span.

    Args:
        from_us: beginning of the span on the owner's clock, in microseconds since 1970. None begins at the oldest
            usable state of the log.
        to_us: end of the span on the owner's clock, exclusive. None ends at the journal's current end.
        custom: custom policies that may run.

    Raises:
        EmptySpan: the span contains no decision.
        SpanEnds: an owner with other decision rules decided, or history was abandoned, within the span.
        LogError: the span begins before the oldest usable state, or the log is damaged.
    """
    end = await log.end(DECISIONS.name, partition)
    start = await (
        oldest(log, partition, custom) if from_us is None else _state_before(log, partition, from_us, custom)
    )
    if from_us is None and to_us is None:
        return Span(start, start.offset, end)
    first, last, decisions = start.offset if from_us is None else end, end, 0
    async for offset, record in journal(log, partition, start.offset, end, await start.validity(log, partition)):
        if record.consumed:
            now_us = record.consumed[-1].now_us
            if from_us is not None and now_us >= from_us:
                first = min(first, offset)
            if to_us is not None and now_us >= to_us:
                last = offset
                break
        decisions += isinstance(record, AnyDecision) and first <= offset
    if not decisions:
        raise EmptySpan(f"no decision was made in the time span; {await _extent(log, partition)}")
    return Span(start, first, last)


async def derive_up_to(
    log: Log, partition: int, span: Span, progress: OnProgress | None = None
) -> Start | DivergenceReport:
    reader = JournalReader(log, partition, span.start, span.first)
    trail, records = DivergenceTrail(reader), 0
    async for step in reader:
        if step.divergence is not None:
            return trail.report(step.divergence, step)
        trail.add_verified(step)
        records += 1
        if progress is not None and records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, span.end, 0)
    return Start(reader.world, span.first)


async def _state_before(log: Log, partition: int, from_us: int, custom: CustomPolicies) -> Start:
    states = States(log, partition, custom)
    try:
        return await states.before(await offset_at(states, from_us - 1) + 1)
    except NoSuchRecord:
        start = await oldest(log, partition, custom)
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
    span: Span | None = None,
) -> DiffReport:
    """Compare a group's recorded history with its history under the pool configurations that `alter` returns.

    A record that does not follow from the events ends the comparison and is part of the report. Raises SpanEnds if an
    owner with other decision rules decided, or history was abandoned, within the span.

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
    reader = JournalReader(log, partition, begin, span.end)
    trail = DivergenceTrail(reader)
    comparison = Comparison(reader, alter, named)
    report, verified = comparison.report, 0
    async for step in reader:
        if step.divergence is not None:
            report.divergence = trail.report(step.divergence, step)
            break
        trail.add_verified(step)
        comparison.follow(step.offset, step.record)
        verified += isinstance(step.record, AnyDecision)
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, reader.end, verified)
    report.unverified = reader.unverified
    return comparison.finish()
