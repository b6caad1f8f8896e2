"""Terminal output of `forebay planner status` and `history`."""

from collections.abc import Iterator

from rich.console import Console

from forebay.cli.common.scaling_lines import verification_lines
from forebay.cli.common.terminal import printable
from forebay.cli.replay.at_view import span, titled_table
from forebay.cli.status_view import recent_time
from forebay.replay.scaling.decisions import DecisionEntry, PoolEntry, ScalingHistory
from forebay.replay.scaling.status import ObservedDemand, PlannerStatus, ScaledPoolStatus
from forebay.transport.recording.manifest import utc

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


def show_history(console: Console, history: ScalingHistory) -> None:
    """Print decisions, oldest first, and the verification of all decisions."""
    rows = [_decision_row(entry, choice) for entry in history.decisions for choice in entry.pools]
    shown = len(history.decisions)
    title = "decisions" if shown == history.selected else f"the {shown} newest of {history.selected:,} decisions"
    console.print(titled_table(title, COLUMNS, rows, TEXTS, "none", rows_max=len(rows)))
    for line in verification_lines(history.verification):
        console.print(printable(line), markup=False)


COLUMNS = ("decision", "time", "pool", "size", "proposed", "reason", "outcome", "derived again")
TEXTS = {"time", "pool", "reason", "outcome", "derived again"}


def clock(at_us: int) -> str:
    """Return a time to the second."""
    try:
        return f"{utc(at_us).partition('.')[0]}Z"
    except OverflowError:  # the clock of a damaged record
        return f"{at_us} us"


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
