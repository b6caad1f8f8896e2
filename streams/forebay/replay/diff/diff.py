"""Compare history with an alternative configuration, on one walk over a recorded group or a span of it.

The comparison is open loop: the alternative gets history's events (`forebay.replay.diff.comparison`). The walk also
verifies history.
"""

from forebay.core.routing.counterfactual import Alternative
from forebay.core.step import AnyDecision
from forebay.replay.diff.comparison import Comparison
from forebay.replay.diff.counterfactual_world import Named, names_nothing
from forebay.replay.diff.notes import notes
from forebay.replay.diff.other_rules import RECORDED_RULES, OtherPoolRules
from forebay.replay.diff.report import DiffReport
from forebay.replay.diff.span import Span, derive_up_to, span_of, start_of
from forebay.replay.verify.divergence import DivergenceReport, DivergenceTrail
from forebay.replay.verify.verify import PROGRESS_EVERY, OnProgress
from forebay.replay.walk import Walk
from forebay.transport.base import Log


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
            report.divergence = await trail.report(log, partition, step.divergence, step)
            break
        trail.add_verified(step)
        comparison.follow(step.offset, step.record)
        verified += isinstance(step.record, AnyDecision)
        if progress is not None and report.records % PROGRESS_EVERY == 0:
            progress(step.offset + 1, walk.end, verified)
    for name, count in walk.unverified.items():
        report.unverified[name] = report.unverified.get(name, 0) + count
