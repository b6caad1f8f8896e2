"""Terminal output of `forebay planner explain`."""

from collections.abc import Iterator, Sequence

from rich.console import Console

from forebay.cli.common.terminal import counted, printable
from forebay.cli.planner.tables import clock, outcome_text
from forebay.cli.replay.at_view import span
from forebay.core.scaling.basis import LoadSignal
from forebay.events.scaling import PlannerSettings, PoolDemand, PoolObserved
from forebay.replay.scaling.decisions import REASONS, PoolExplanation, ProposalFacts, ScalingExplanation, StageBasis

VERIFIED = {
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
    yield "verified", VERIFIED[entry.verification]
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
        yield "forecast", _demand(pool.demand)
    for proposal in pool.proposals:
        yield from _proposal(proposal)
    if found.settings is not None and pool.limited is not None and pool.guarded is not None:
        yield from _limits(pool, found.settings, found.gpus)
    yield "decided", counted(pool.decided.to_size, "worker")


def _observed(pool: PoolObserved, interval_s: float | None) -> str:
    parts = [f"{pool.ready} ready", f"{pool.draining} draining"]
    if interval_s:
        parts.append(f"{_number(pool.requests / interval_s)} requests/s")
    parts += [f"{name} {_number(value)}" for name, value in (("ISL", pool.isl), ("OSL", pool.osl)) if value is not None]
    latencies = (("TTFT", pool.ttft_ms), ("ITL", pool.itl_ms))
    parts += [f"{name} {_number(value)} ms" for name, value in latencies if value is not None]
    if pool.kv_hit_rate is not None:
        parts.append(f"{pool.kv_hit_rate:.1%} of prompt tokens cached")
    return ", ".join([*parts, f"{pool.queued} queued"])


def _demand(demand: PoolDemand) -> str:
    return (
        f"{demand.requests_per_s:.4g} requests/s, ISL {_number(demand.isl)}, OSL {_number(demand.osl)},"
        f" {demand.kv_hit_rate:.1%} of prompt tokens cached"
    )


def _proposal(proposal: ProposalFacts) -> Iterator[Line]:
    for stage in proposal.stages:
        yield from _stage(stage)
    for signal in proposal.signals:
        yield from _signal(signal)
    if proposal.simulated is not None:
        attained = ", ".join(f"{size}: {share:.1%}" for size, share in proposal.simulated.attained.items())
        yield "simulated", f"requests that meet both targets, by size: {attained}"
        yield "", f"needed: {proposal.simulated.target:.1%}"
    sums = " + ".join(f"{stage.workers:.2f}" for stage in proposal.stages)
    formula = f": {sums}, rounded up, and at least min_size" if sums else ""
    yield proposal.method, f"proposes {counted(proposal.size, 'worker')}{formula}"
    if proposal.reason is not None:
        yield "", f"{proposal.reason}: {REASONS[proposal.reason]}"


def _stage(stage: StageBasis) -> Iterator[Line]:
    is_prefill = stage.stage == "prefill"
    tokens = "uncached prompt tokens" if is_prefill else "output tokens"
    factor = f" x correction {stage.correction:.3g}" if is_prefill and stage.correction != 1 else ""
    yield (
        stage.stage,
        (
            f"{stage.requests_per_s:.4g} requests/s x {_number(stage.tokens)} {tokens}{factor}"
            f" = {_number(stage.tokens_per_s)} tokens/s"
        ),
    )
    outside = "" if stage.covered else ", nearest point of the profile"
    length = f"{_number(stage.length)} tokens" if is_prefill else f"context {_number(stage.length)}"
    if is_prefill:
        latency = f"TTFT of a request alone {_number(stage.latency_ms)} ms, target {stage.target_ms:g} ms"
    else:
        corrected = f" x correction {stage.correction:.3g}" if stage.correction != 1 else ""
        room = "" if stage.concurrency_max is None else f", KV for {_number(stage.concurrency_max)} requests"
        latency = f"within ITL {stage.target_ms:g} ms{corrected}{room}"
    speed = f"{_number(stage.worker_tokens_per_s)} tokens/s"
    if stage.gpu_tokens_per_s != stage.worker_tokens_per_s:
        speed += f" ({_number(stage.gpu_tokens_per_s)} per GPU)"
    yield "", f"one worker at {length}: {speed}, {latency}{outside}"
    yield "", f"{_number(stage.tokens_per_s)} / {_number(stage.worker_tokens_per_s)} = {stage.workers:.2f} workers"


def _signal(signal: LoadSignal) -> Iterator[Line]:
    name = signal.latency.upper()
    if not signal.known:
        yield name, f"measured in {signal.intervals} observations, which are too few"
        return
    yield (
        name,
        (
            f"{_range(signal.estimates_ms)} now, {_range(signal.fewer_ms)} with one worker less, by a regression over"
            f" {signal.intervals} observations"
        ),
    )
    yield "", f"{signal.base_ms:.4g} ms + {signal.slope_ms:.4g} ms per token of load"
    yield (
        "",
        (
            f"grows if all workers are above {signal.target_ms:.4g} ms: {_answer(signal.above)}; shrinks if all stay"
            f" below {signal.shrink_below_ms:.4g} ms: {_answer(signal.below)}"
        ),
    )


def _limits(pool: PoolExplanation, settings: PlannerSettings, gpus: int | None) -> Iterator[Line]:
    assert pool.guarded is not None
    scaling = next(one for one in settings.pools if (one.group, one.pool) == (pool.group, pool.pool))
    yield (
        "limits",
        (f"change of at most {settings.max_change}, {scaling.min_size} to {scaling.max_size} workers: {pool.limited}"),
    )
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


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1_000 else f"{value:.4g}"


def _answer(value: bool) -> str:
    return "yes" if value else "no"
