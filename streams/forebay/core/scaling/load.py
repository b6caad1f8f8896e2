"""Method `load`: one worker more or less, from the load of the workers and the latency at earlier loads.

A regression over the history estimates the latency of each worker from its load: the TTFT from prompt tokens to
prefill, and the ITL from tokens in the KV cache. Prefill pools follow the TTFT, decode pools the ITL, and aggregated
pools both. Queued requests count as load.

The pool grows by one if the estimates of all workers exceed a target. It shrinks by one if the estimates for the load
with one worker less stay below the targets by the margin `down_sensitivity`, or if no request came for some time.
Source: Dynamo's load scaling (1.6.1) for the optimization target `sla`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from forebay.core.scaling.interpolation import decode_itl_ms, prefill_speed, uncached
from forebay.core.scaling.proposal import SIZE_MAX, LoadSignal, Proposal
from forebay.events.scaling import PlannerSettings, PoolObserved, PoolScaling, Reason, WorkerObserved

LATENCY_MS_MAX = 86_400_000.0  # a day; a longer latency is a fault of the measurement
# If a request alone misses the target, no size attains it, and the pool would grow to its largest one. Instead it grows
# once load has doubled the latency. Only the profile shows this: regressions extrapolate poorly to a request alone, and
# a mistake would keep an overloaded pool from growing.
UNATTAINABLE_FACTOR = 2.0


@dataclass(frozen=True, slots=True)
class _Line:
    """Latency in milliseconds as a linear function of the load in tokens."""

    base: float
    slope: float

    def at(self, load: float) -> float:
        return max(self.base + self.slope * load, 0.0)


def propose(pool: PoolScaling, settings: PlannerSettings, history: Sequence[PoolObserved], current: int) -> Proposal:
    """Return the present size, or one more or less. `history` has the observations of the pool, oldest first."""
    if not history or not _is_complete(history[-1]):
        return Proposal(current, "insufficient_data")
    found = []
    if pool.role in {"prefill", "aggregated"}:
        found.append(_ttft(pool, settings, history))
    if pool.role in {"decode", "aggregated"}:
        found.append(_itl(pool, settings, history))
    signals = tuple(one for one in found if one is not None)
    size, reason = _step(pool, settings, history, current, signals)
    return Proposal(size, reason, signals)


def _step(
    pool: PoolScaling,
    settings: PlannerSettings,
    history: Sequence[PoolObserved],
    current: int,
    signals: Sequence[LoadSignal],
) -> tuple[int, Reason | None]:
    reason: Reason | None = None if all(one.attainable for one in signals) else "target_unattainable"
    if any(one.above for one in signals):
        return min(current + 1, SIZE_MAX), reason
    # A pool without workers has no load that could start one again.
    least = max(pool.min_size, 1)
    if not signals or not all(one.known for one in signals):
        if _is_idle(settings, history):
            return max(current - 1, min(current, least)), None
        return current, "insufficient_data"
    if current <= least or len(history[-1].workers) < 2:
        return current, reason
    if all(one.below for one in signals):
        return current - 1, reason
    return current, reason or "consolidation_refused"


def _is_complete(observed: PoolObserved) -> bool:
    return 0 < len(observed.workers) == observed.ready


def _is_idle(settings: PlannerSettings, history: Sequence[PoolObserved]) -> bool:
    """Return whether there was no request during the newest `min_observations` observations."""
    newest = history[-settings.min_observations :]
    return len(newest) == settings.min_observations and all(
        _is_complete(observed)
        and observed.requests == observed.queued == 0
        and all(worker.running == worker.waiting == worker.prefill_tokens == 0 for worker in observed.workers)
        for observed in newest
    )


def _ttft(pool: PoolScaling, settings: PlannerSettings, history: Sequence[PoolObserved]) -> LoadSignal | None:
    intervals = _samples(history, lambda worker: worker.prefill_tokens, lambda worker: worker.ttft_ms)
    if len(intervals) < settings.min_observations:
        return LoadSignal("ttft", len(intervals), known=False) if intervals else None
    line, last, isl = _line(intervals), history[-1], _isl(history)
    tokens = uncached(isl, next((one.kv_hit_rate for one in reversed(history) if one.kv_hit_rate is not None), None))
    queued = last.queued * tokens / len(last.workers)
    loads = [worker.prefill_tokens + queued for worker in last.workers]
    profiled = prefill_speed(pool.prefill, tokens).ttft_ms if pool.prefill and isl else None
    target, attainable = _target(settings.ttft_ms, line, profiled)
    # More workers only shorten the part of the TTFT that comes from waiting.
    alone = line.at(0)
    margin = (target - alone) * settings.down_sensitivity
    estimates, fewer = _estimates(line, loads), _estimates(line, _consolidated(loads))
    return LoadSignal(
        "ttft",
        len(intervals),
        known=True,
        above=all(estimate > target for estimate in estimates),
        below=all(estimate - alone < margin for estimate in fewer),
        attainable=attainable,
        target_ms=target,
        shrink_below_ms=alone + margin,
        base_ms=line.base,
        slope_ms=line.slope,
        estimates_ms=estimates,
        fewer_ms=fewer,
    )


def _itl(pool: PoolScaling, settings: PlannerSettings, history: Sequence[PoolObserved]) -> LoadSignal | None:
    intervals = _samples(history, lambda worker: worker.kv_tokens, lambda worker: worker.itl_ms)
    if len(intervals) < settings.min_observations:
        return LoadSignal("itl", len(intervals), known=False) if intervals else None
    line, workers = _line(intervals), history[-1].workers
    queued = history[-1].queued / len(workers)
    loads = [_kv_tokens(worker, queued) for worker in workers]
    isl = _isl(history)
    profiled = decode_itl_ms(pool.decode, isl, 0) if pool.decode and isl else None
    target, attainable = _target(settings.itl_ms, line, profiled)
    rooms = [worker.kv_tokens_max or pool.kv_tokens or inf for worker in workers]
    consolidated, limit = _consolidated(loads), target * settings.down_sensitivity
    estimates, fewer = _estimates(line, loads), _estimates(line, consolidated)
    return LoadSignal(
        "itl",
        len(intervals),
        known=True,
        above=all(estimate > target for estimate in estimates),
        below=all(estimate < limit for estimate in fewer)
        and all(load < room for load, room in zip(consolidated, rooms, strict=True)),
        attainable=attainable,
        target_ms=target,
        shrink_below_ms=limit,
        base_ms=line.base,
        slope_ms=line.slope,
        estimates_ms=estimates,
        fewer_ms=fewer,
    )


def _estimates(line: _Line, loads: Sequence[float]) -> tuple[float, ...]:
    return tuple(line.at(load) for load in loads)


def _isl(history: Sequence[PoolObserved]) -> float:
    lengths = (observed.isl for observed in reversed(history))
    return next((isl for isl in lengths if isl is not None and 0 < isl < inf), 0.0)


def _target(target_ms: float, line: _Line, profiled_ms: float | None) -> tuple[float, bool]:
    """Return the target to scale by, and whether a request alone meets the given one.

    Its latency is `profiled_ms`; None without a profile.
    """
    if profiled_ms is None:
        return target_ms, line.at(0) < target_ms
    if profiled_ms < target_ms:
        return target_ms, True
    return UNATTAINABLE_FACTOR * profiled_ms, False


def _kv_tokens(worker: WorkerObserved, queued: float) -> float:
    """Return the KV tokens of a worker once its waiting requests and `queued` further ones run."""
    if not worker.running:
        return worker.kv_tokens
    return worker.kv_tokens * (worker.running + worker.waiting + queued) / worker.running


def _consolidated(loads: Sequence[float]) -> list[float]:
    """Return the loads if there were one worker fewer; unchanged for a single worker."""
    factor = len(loads) / max(len(loads) - 1, 1)
    return [load * factor for load in loads]


def _samples(
    history: Sequence[PoolObserved],
    load: Callable[[WorkerObserved], int],
    latency_ms: Callable[[WorkerObserved], float | None],
) -> list[list[tuple[float, float]]]:
    """Return load and latency of the workers for each interval with a possible latency."""
    intervals = []
    for observed in history:
        samples = []
        for worker in observed.workers:
            measured = latency_ms(worker)
            if measured is not None and 0 <= measured <= LATENCY_MS_MAX:
                samples.append((float(load(worker)), measured))
        if samples:
            intervals.append(samples)
    return intervals


def _line(intervals: Sequence[Sequence[tuple[float, float]]]) -> _Line:
    """Return the least-squares line. Sums run in the order of the samples, because `sum` of floats varies by version.

    Latency does not fall with load. If the samples say so, or have all the same load, the line goes through the origin
    and the means: with twice the load, the latency is expected to double.
    """
    samples = [sample for interval in intervals for sample in interval]
    loads = latencies = 0.0
    for load, latency in samples:
        loads += load
        latencies += latency
    load_mean, latency_mean = loads / len(samples), latencies / len(samples)
    variance = covariance = 0.0
    for load, latency in samples:
        variance += (load - load_mean) * (load - load_mean)
        covariance += (load - load_mean) * (latency - latency_mean)
    if covariance > 0:  # so the variance is above 0
        slope = covariance / variance
        return _Line(latency_mean - slope * load_mean, slope)
    if load_mean > 0:
        return _Line(0.0, latency_mean / load_mean)
    return _Line(latency_mean, 0.0)
