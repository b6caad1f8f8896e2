"""`forebay planner status`: read the decisions of the planner, and derive them again."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import TypeVar

import click
from rich.console import Console

from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Source
from forebay.cli.common.tables import print_result, results, shown_reading, span, titled_table
from forebay.cli.common.terminal import counted, printable
from forebay.cli.common.times import time_us
from forebay.cli.common.unverified import DIVERGED
from forebay.cli.planner.command import LIMIT, PlannerStatusCommand
from forebay.cli.replay.verify import verification_lines
from forebay.cli.status import clock, recent_time
from forebay.core.scaling.decide import MethodProposal
from forebay.core.scaling.proposal import DecodeNeed, LoadSignal, PrefillNeed, SimulatedAttainment
from forebay.events.scaling import PlannerSettings, PoolDemand, PoolObserved, PoolScaling
from forebay.planner.orders import scaling_on_kafka
from forebay.replay.scaling.decisions import (
    REASONS,
    DecisionEntry,
    PoolEntry,
    PoolExplanation,
    ScalingDecisions,
    ScalingExplanation,
    explain_decision,
    read_decisions,
)
from forebay.replay.scaling.reader import OnProgress
from forebay.replay.scaling.status import ObservedDemand, PlannerStatus, ScaledPoolStatus, read_planner_status
from forebay.transport.base import Log

VERIFIED = {"equal": "equal", "different": "DIFFERENT", "stale": "", "other_rules": "other rules"}


def show_status(console: Console, status: PlannerStatus) -> None:
    for name, text in _facts(status):
        console.print(printable(f"{name:<10} {text}"), markup=False)
    console.print()
    columns = ("pool", "size", "ready", "draining", "limits", "manual", "TTFT", "ITL", "queued", "demand", "forecast")
    rows = [_pool_row(pool) for pool in status.pools]
    texts = {"pool", "limits", "manual", "demand", "forecast"}
    console.print(titled_table("pools", columns, rows, texts, "none"))
    console.print()
    entries = [(pool, entry) for pool in status.pools for entry in _newest(pool)]
    choices = [_decision_row(entry, _of(pool, entry)) for pool, entry in entries]
    console.print(titled_table("newest decision and newest change of each pool", COLUMNS, choices, TEXTS, "none"))


def show_decisions(console: Console, found: ScalingDecisions) -> None:
    """Print decisions, oldest first, and the verification of all decisions."""
    rows = [_decision_row(entry, choice) for entry in found.decisions for choice in entry.pools]
    shown = len(found.decisions)
    title = "decisions" if shown == found.selected else f"the {shown} newest of {found.selected:,} decisions"
    console.print(titled_table(title, COLUMNS, rows, TEXTS, "none", rows_max=len(rows)))
    for line in verification_lines(found.verification):
        console.print(printable(line), markup=False)


COLUMNS = ("decision", "time", "pool", "size", "proposed", "reason", "outcome", "derived again")
TEXTS = {"time", "pool", "reason", "outcome", "derived again"}


def outcome_text(entry: DecisionEntry) -> str:
    """Return what became of a decision, with the actuators and their messages."""
    text = entry.outcome.replace("_", " ")
    if entry.replies:
        text += f" by {' and '.join(one.actuator for one in entry.replies)}"
    named = len(entry.replies) > 1
    messages = [f"{one.actuator}: {one.message}" if named else one.message for one in entry.replies if one.message]
    return f"{text}: {'; '.join(messages)}" if messages else text


def _decision_row(entry: DecisionEntry, choice: PoolEntry) -> tuple[str, ...]:
    size = f"{choice.from_size} -> {choice.to_size}" if choice.to_size != choice.from_size else str(choice.to_size)
    if choice.reached is not None and choice.reached != choice.to_size:
        size += f" (reached {choice.reached})"
    return (
        str(entry.offset),
        clock(entry.at_us),
        f"{choice.group}/{choice.pool}",
        size,
        str(choice.proposed),
        choice.reason,
        outcome_text(entry),
        VERIFIED[entry.verification],
    )


def _facts(status: PlannerStatus) -> Iterator[tuple[str, str]]:
    active = "stopped" if status.stopped_us is not None else "active"
    times = f"since {recent_time(status.stopped_us or status.since_us)}, newest record {recent_time(status.newest_us)}"
    yield "planner", f"{status.planner_id}, {active} {times}"
    for problem in status.problems:
        yield "problem", problem
    mode = "advisory: decisions are only recorded" if status.advisory else "decisions are executed"
    if status.paused:
        mode += f"; paused by {status.paused_by or 'an unnamed operator'} since {recent_time(status.paused_us or 0)}"
    yield "mode", mode
    details = [f"equations {status.equations}"] if status.method in {"throughput", "both"} else []
    details += [f"predictor {status.predictor}"] if status.method != "load" else []
    yield "method", ", ".join([status.method, *details, f"every {status.interval_s:g} s"])
    yield "targets", f"TTFT {status.ttft_ms:g} ms, ITL {status.itl_ms:g} ms"
    budget = f"at most {status.gpu_budget}" if status.gpu_budget else "no limit"
    yield "GPUs", f"{status.gpus}, {budget}" + (f", at least {status.min_gpus}" if status.min_gpus else "")
    if not status.open:
        yield "open", "no decision waits for a reply"
    for one in status.open:
        yield "open", f"decision {one.decision} since {recent_time(one.since_us)}: {one.pool} to {one.size}"
    if status.undecodable:
        yield "ignored", f"{status.undecodable} records that do not decode"


def _pool_row(pool: ScaledPoolStatus) -> tuple[str, ...]:
    manual = "" if pool.manual_size is None else f"{pool.manual_size} by {pool.manual_by or 'unnamed'}"
    return (
        f"{pool.group}/{pool.pool}",
        _number(pool.size),
        _number(pool.ready),
        _number(pool.draining),
        f"{pool.min_size} to {pool.max_size}",
        manual,
        _latency(pool.ttft_ms),
        _latency(pool.itl_ms),
        _number(pool.queued),
        _demand(pool.observed),
        _demand(pool.forecast),
    )


def _newest(pool: ScaledPoolStatus) -> Iterator[DecisionEntry]:
    if pool.change is not None and (pool.decision is None or pool.change.offset != pool.decision.offset):
        yield pool.change
    if pool.decision is not None:
        yield pool.decision


def _of(pool: ScaledPoolStatus, entry: DecisionEntry) -> PoolEntry:
    return next(one for one in entry.pools if (one.group, one.pool) == (pool.group, pool.pool))


def _number(value: int | None) -> str:
    return "-" if value is None else str(value)


def _latency(value_ms: float | None) -> str:
    return "-" if value_ms is None else span(round(value_ms * 1_000))


def _demand(demand: ObservedDemand | None) -> str:
    return "-" if demand is None else f"{demand.requests_per_s:.4g}/s"


# --- one decision -----------------------------------------------------------------------------------------------------

DERIVED = {
    "equal": "derived again: equal",
    "different": "DIFFERENT: the decision does not follow from the records before it; the steps are those derived",
    "stale": "not derived again, because the decision has no effect",
    "other_rules": "not derived again, because a planner of another version made it",
}
Line = tuple[str, str]


def show_explanation(console: Console, found: ScalingExplanation) -> None:
    """Print a decision and how it follows from its inputs."""
    for line in _lines(found):
        console.print(printable(_text(line)), markup=False)
    for pool in found.pools:
        decided = pool.decided
        console.print()
        title = f"{pool.group}/{pool.pool}: {decided.from_size} -> {decided.to_size} ({decided.reason})"
        console.print(printable(title), markup=False, style="bold")
        for line in _pool_lines(pool, found):
            console.print(printable(f"  {_text(line)}"), markup=False)


def _text(line: Line) -> str:
    return f"{line[0]:<11}{line[1]}"


def _lines(found: ScalingExplanation) -> Iterator[Line]:
    entry = found.decision
    yield "decision", f"{entry.offset} at {clock(entry.at_us)} by {entry.planner_id or 'an unknown planner'}"
    replied_us = [one.at_us for one in entry.replies if one.at_us]
    after = f", after {span(max(replied_us) - entry.at_us)}" if replied_us else ""
    yield "outcome", f"{outcome_text(entry)}{after}"
    yield "", found.meaning
    yield "verified", DERIVED[entry.verification]
    for name, values in found.differs.items():
        yield "", f"{name}: recorded {values['recorded']}, derived {values['derived']}"
    if found.settings is not None:
        yield "method", f"{found.settings.method}, equations {found.settings.equations}"
        yield "targets", f"TTFT {found.settings.ttft_ms:g} ms, ITL {found.settings.itl_ms:g} ms"
    if found.observed_us is not None:
        yield "observed", f"{found.interval_s:g} s up to {clock(found.observed_us)}"
    if found.forecast_by:
        yield "forecast", f"by predictor {found.forecast_by}"


def _pool_lines(pool: PoolExplanation, found: ScalingExplanation) -> Iterator[Line]:
    yield "reason", pool.meaning
    yield "observed", "not observed" if pool.observed is None else _observed(pool.observed, found.interval_s)
    if pool.demand is not None:
        yield "forecast", _described(pool.demand)
    for made in pool.proposals:
        assert found.settings is not None, "a proposal follows from settings"
        yield from _proposal(made, pool, found.settings)
    if found.settings is not None and pool.limited is not None and pool.guarded is not None:
        yield from _limits(pool, found.settings, found.gpus)
    yield "decided", counted(pool.decided.to_size, "worker")


def _observed(pool: PoolObserved, interval_s: float | None) -> str:
    parts = [f"{pool.ready} ready", f"{pool.draining} draining"]
    if interval_s:
        parts.append(f"{_rounded(pool.requests / interval_s)} requests/s")
    parts += [
        f"{name} {_rounded(value)}" for name, value in (("ISL", pool.isl), ("OSL", pool.osl)) if value is not None
    ]
    latencies = (("TTFT", pool.ttft_ms), ("ITL", pool.itl_ms))
    parts += [f"{name} {_rounded(value)} ms" for name, value in latencies if value is not None]
    if pool.kv_hit_rate is not None:
        parts.append(f"{pool.kv_hit_rate:.1%} of prompt tokens cached")
    return ", ".join([*parts, f"{pool.queued} queued"])


def _described(demand: PoolDemand) -> str:
    return (
        f"{demand.requests_per_s:.4g} requests/s, ISL {_rounded(demand.isl)}, OSL {_rounded(demand.osl)},"
        f" {demand.kv_hit_rate:.1%} of prompt tokens cached"
    )


def _proposal(made: MethodProposal, pool: PoolExplanation, settings: PlannerSettings) -> Iterator[Line]:
    proposal = made.proposal
    workers = []
    for basis in proposal.basis:
        match basis:
            case PrefillNeed() | DecodeNeed():
                workers.append(f"{basis.workers:.2f}")
                yield from _stage(basis, pool, settings)
            case LoadSignal():
                yield from _signal(basis)
            case SimulatedAttainment():
                attained = ", ".join(f"{size}: {share:.1%}" for size, share in basis.sizes)
                yield "simulated", f"requests that meet both targets, by size: {attained}"
                yield "", f"needed: {basis.target:.1%}"
    formula = f": {' + '.join(workers)}, rounded up, and at least min_size" if workers else ""
    yield made.method, f"proposes {counted(proposal.size, 'worker')}{formula}"
    if proposal.reason is not None:
        yield "", f"{proposal.reason}: {REASONS[proposal.reason]}"


def _stage(need: PrefillNeed | DecodeNeed, pool: PoolExplanation, settings: PlannerSettings) -> Iterator[Line]:
    demand = pool.demand
    assert demand is not None, "method throughput needs a forecast"
    if isinstance(need, PrefillNeed):
        stage, factor = "prefill", f" x correction {need.correction:.3g}" if need.correction != 1 else ""
        tokens, length = f"{_rounded(need.isl)} uncached prompt tokens", f"{_rounded(need.isl)} tokens"
        latency = f"TTFT of a request alone {_rounded(need.ttft_ms)} ms, target {settings.ttft_ms:g} ms"
    else:
        stage, factor = "decode", ""
        tokens, length = f"{_rounded(demand.osl)} output tokens", f"context {_rounded(need.context)}"
        corrected = f" x correction {need.correction:.3g}" if need.correction != 1 else ""
        room = "" if need.concurrency_max is None else f", KV for {_rounded(need.concurrency_max)} requests"
        latency = f"within ITL {settings.itl_ms:g} ms{corrected}{room}"
    asked = f"{demand.requests_per_s:.4g} requests/s x {tokens}{factor}"
    yield stage, f"{asked} = {_rounded(need.tokens_per_s)} tokens/s"
    gpus = _scaling(pool, settings).gpus_per_worker
    per_gpu = f" ({_rounded(need.worker_tokens_per_s / gpus)} per GPU)" if gpus != 1 else ""
    speed = f"{_rounded(need.worker_tokens_per_s)} tokens/s{per_gpu}"
    outside = "" if need.covered else ", nearest point of the profile"
    yield "", f"one worker at {length}: {speed}, {latency}{outside}"
    yield "", f"{_rounded(need.tokens_per_s)} / {_rounded(need.worker_tokens_per_s)} = {need.workers:.2f} workers"


def _scaling(pool: PoolExplanation, settings: PlannerSettings) -> PoolScaling:
    return next(one for one in settings.pools if (one.group, one.pool) == (pool.group, pool.pool))


def _signal(signal: LoadSignal) -> Iterator[Line]:
    name = signal.latency.upper()
    if not signal.known:
        yield name, f"measured in {signal.intervals} observations, which are too few"
        return
    estimates = f"{_range(signal.estimates_ms)} now, {_range(signal.fewer_ms)} with one worker less"
    yield name, f"{estimates}, by a regression over {signal.intervals} observations"
    yield "", f"{signal.base_ms:.4g} ms + {signal.slope_ms:.4g} ms per token of load"
    grows = f"grows if all workers are above {signal.target_ms:.4g} ms: {_answer(signal.above)}"
    yield "", f"{grows}; shrinks if all stay below {signal.shrink_below_ms:.4g} ms: {_answer(signal.below)}"


def _limits(pool: PoolExplanation, settings: PlannerSettings, gpus: int | None) -> Iterator[Line]:
    assert pool.guarded is not None
    scaling = _scaling(pool, settings)
    sizes = f"{scaling.min_size} to {scaling.max_size} workers"
    yield "limits", f"change of at most {settings.max_change}, {sizes}: {pool.limited}"
    if pool.guarded.to_size != pool.limited:
        kept = counted(pool.guarded.to_size, "worker")
        yield "guard", f"{pool.guarded.reason} keeps {kept}: {REASONS[pool.guarded.reason]}"
    if gpus is not None and (settings.gpu_budget or settings.min_gpus):
        budget = f"at most {settings.gpu_budget}" if settings.gpu_budget else "no limit"
        least = f", at least {settings.min_gpus}" if settings.min_gpus else ""
        yield "GPUs", f"{pool.gpus} for this pool, {gpus} for all pools; {budget}{least}"


def _range(values_ms: Sequence[float]) -> str:
    low, high = min(values_ms), max(values_ms)
    return f"{low:.4g} ms" if low == high else f"{low:.4g} to {high:.4g} ms"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _answer(value: bool) -> str:
    return "yes" if value else "no"


LATEST = "latest"
NOT_ACTIVE = 1
OFFSET = re.compile(r"\d{1,18}")
FRACTION = re.compile(r"\.(\d{1,6})")
US_PER_S = 1_000_000

FoundT = TypeVar("FoundT")


def run_status(options: PlannerStatusCommand) -> None:
    given = options.pool or options.start or options.changes or options.limit != LIMIT
    if given and not options.history:
        fail("--pool, --from, --changes and --limit require --history")
    if options.history and options.decision:
        fail("--history and --decision exclude each other")
    if options.decision:
        _explain(options)
    elif options.history:
        _show_history(options)
    else:
        _show_status(options)


def _show_status(options: PlannerStatusCommand) -> None:
    now_us = time.time_ns() // 1000 if options.source.log is None else None
    found = _read(options, lambda opened, on_progress: read_planner_status(opened, now_us, on_progress))
    print_result(found, options.json, lambda: show_status(results(soft_wrap=True), found))
    if found.problems:
        raise click.exceptions.Exit(NOT_ACTIVE)


def _show_history(options: PlannerStatusCommand) -> None:
    since_us = time_us("--from", options.start, time.time_ns() // 1000) if options.start else None
    found = _read(
        options,
        lambda opened, on_progress: read_decisions(
            opened, options.limit, options.pool, since_us, is_change=options.changes, on_progress=on_progress
        ),
    )
    print_result(found, options.json, lambda: show_decisions(results(), found))


def _explain(options: PlannerStatusCommand) -> None:
    decision = options.decision
    offset = int(decision) if OFFSET.fullmatch(decision) else None
    window_us = _window_us(decision) if offset is None and decision != LATEST else None
    found = _read(options, lambda opened, on_progress: explain_decision(opened, offset, window_us, on_progress))
    print_result(found, options.json, lambda: show_explanation(results(soft_wrap=True), found))
    if found.decision.verification == "different":
        raise click.exceptions.Exit(DIVERGED)


def _read(options: PlannerStatusCommand, read: Callable[[Log, OnProgress], Awaitable[FoundT]]) -> FoundT:
    """Return what `read` finds on the topic `scaling`."""
    options.source.require_one_source()

    async def run(on_progress: OnProgress) -> FoundT:
        async with _scaling_log(options.source) as opened:
            return await read(opened, on_progress)

    with explained(), shown_reading("deriving decisions") as on_progress:
        return asyncio.run(run(on_progress))


@asynccontextmanager
async def _scaling_log(source: Source) -> AsyncIterator[Log]:
    """Open the log file, or the topic `scaling` on Kafka, to read. Raises LogError if it is unreadable."""
    if source.log is not None:
        async with source.source() as log:
            yield log
        return
    async with scaling_on_kafka(source.settings()) as kafka:
        yield kafka


def _window_us(text: str) -> tuple[int, int]:
    """Return the first microsecond of a time, and the one after its last. A time to the second lasts a second."""
    at_us = time_us("--decision", text, time.time_ns() // 1000)
    fraction = FRACTION.search(text)
    return at_us, at_us + US_PER_S // 10 ** (len(fraction[1]) if fraction is not None else 0)
