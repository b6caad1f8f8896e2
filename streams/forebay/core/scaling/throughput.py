"""Method `throughput`: the size at which the profile of one worker carries the forecast.

    prefill = requests_per_s * isl * (1 - kv_hit_rate) / prefill tokens per second of one worker
    decode = requests_per_s * osl / decode tokens per second of one worker within the target of the ITL
    size = max(ceil(prefill + decode), min_size)

A pool of one stage has only its own term. A worker of an aggregated pool spends a part of its time on each stage.

A pool shrinks only as far as its workers would use at most the share `down_sensitivity` of their capacity. Otherwise
the noise of a constant load would change the size in each interval, if the load is near the capacity of a whole number
of workers.
Source: Dynamo's throughput scaling, 1.6.1 for the equations `plain` and 0.x for `corrected`.
"""

from math import ceil, inf

from forebay.core.scaling.interpolation import decode_capacity, decode_itl_ms, prefill_speed, uncached
from forebay.core.scaling.proposal import SIZE_MAX, DecodeNeed, PrefillNeed, Proposal
from forebay.events.scaling import PlannerSettings, PoolDemand, PoolObserved, PoolScaling, Reason

# Lowest share for method `both`, which uses the result as a lower bound, and `down_sensitivity` for the load. A low
# value suits the load, but would keep the bound at a multiple of the need.
BOUND_SHARE = 0.8


def propose(
    pool: PoolScaling, settings: PlannerSettings, demand: PoolDemand | None, observed: PoolObserved | None, current: int
) -> Proposal:
    """Return the size that carries the demand. Only the equations `corrected` use the newest observation."""
    if demand is None or not _is_usable(pool, demand):
        return Proposal(current, "no_demand")
    if demand.requests_per_s == 0:
        return Proposal(pool.min_size)
    prefills = pool.role in {"prefill", "aggregated"}
    decodes = pool.role == "decode" or (pool.role == "aggregated" and demand.osl > 0)
    if not (prefills or decodes) or (prefills and not pool.prefill) or (decodes and not pool.decode):
        return Proposal(current, "no_profile")
    if settings.equations == "plain":
        observed = None
    needs: list[PrefillNeed | DecodeNeed] = []
    if prefills:
        needs.append(_prefill(pool, settings, demand, observed))
    if decodes:
        needs.append(_decode(pool, settings, demand, observed))
    workers = 0.0
    for need in needs:
        workers += need.workers
    size = max(ceil(workers) if workers < SIZE_MAX else SIZE_MAX, pool.min_size)
    reason: Reason | None = None
    if size < current:
        share = max(settings.down_sensitivity, BOUND_SHARE if settings.method == "both" else 0.0)
        size = min(current, max(size, ceil(workers / share))) if share else current
        reason = "consolidation_refused" if size == current else None
    if not all(need.attainable for need in needs):
        reason = "target_unattainable"
    elif not all(need.covered for need in needs):
        reason = "profile_exceeded"
    return Proposal(size, reason, tuple(needs))


def _is_usable(pool: PoolScaling, demand: PoolDemand) -> bool:
    """Return whether the numbers are finite and the requests have the tokens that the pool computes."""
    if demand.requests_per_s == 0:
        return True
    if not (0 < demand.requests_per_s < inf and 0 < demand.isl < inf and 0 <= demand.osl < inf):
        return False
    # Requests of an embedding model have no output. Its pool is an aggregated one without a decode profile.
    generates = pool.role == "decode" or (pool.role == "aggregated" and bool(pool.decode))
    return demand.osl > 0 or not generates


def _prefill(
    pool: PoolScaling, settings: PlannerSettings, demand: PoolDemand, observed: PoolObserved | None
) -> PrefillNeed:
    isl = uncached(demand.isl, demand.kv_hit_rate)
    speed = prefill_speed(pool.prefill, isl)
    correction = _ttft_share(pool, observed)
    tokens_per_s = demand.requests_per_s * isl * correction
    return PrefillNeed(
        isl=isl,
        ttft_ms=speed.ttft_ms,
        correction=correction,
        tokens_per_s=tokens_per_s,
        worker_tokens_per_s=speed.tokens_per_s,
        workers=tokens_per_s / speed.tokens_per_s,
        attainable=speed.ttft_ms <= settings.ttft_ms,
        covered=speed.covered,
    )


def _ttft_share(pool: PoolScaling, observed: PoolObserved | None) -> float:
    """Return the observed TTFT divided by the one that the profile predicts, at most 1; 1 if unknown."""
    if observed is None:
        return 1.0
    isl, ttft_ms = _positive(observed.isl), _positive(observed.ttft_ms)
    if isl is None or ttft_ms is None:
        return 1.0
    expected_ms = prefill_speed(pool.prefill, uncached(isl, observed.kv_hit_rate)).ttft_ms
    # A longer TTFT comes from waiting, which does not slow the prefill itself.
    return ttft_ms / expected_ms if ttft_ms < expected_ms else 1.0


def _decode(
    pool: PoolScaling, settings: PlannerSettings, demand: PoolDemand, observed: PoolObserved | None
) -> DecodeNeed:
    context = _context(demand.isl, demand.osl)
    concurrency_max = pool.kv_tokens / context if pool.kv_tokens else None
    correction = _itl_expected_share(pool, observed)
    itl_ms = settings.itl_ms * correction
    capacity = decode_capacity(pool.decode, context, itl_ms, concurrency_max)
    tokens_per_s = demand.requests_per_s * demand.osl
    return DecodeNeed(
        context=context,
        concurrency_max=concurrency_max,
        correction=correction,
        itl_ms=itl_ms,
        tokens_per_s=tokens_per_s,
        worker_tokens_per_s=capacity.tokens_per_s,
        workers=tokens_per_s / capacity.tokens_per_s,
        attainable=capacity.attainable,
        covered=capacity.covered,
    )


def _itl_expected_share(pool: PoolScaling, observed: PoolObserved | None) -> float:
    """Return the ITL that the profile predicts for the observed load, divided by the observed ITL; 1 if unknown."""
    if observed is None or not observed.workers:
        return 1.0
    isl, osl, itl_ms = _positive(observed.isl), _positive(observed.osl), _positive(observed.itl_ms)
    if isl is None or osl is None or itl_ms is None:
        return 1.0
    running = sum(worker.running for worker in observed.workers) / len(observed.workers)
    return decode_itl_ms(pool.decode, _context(isl, osl), running) / itl_ms


def _context(isl: float, osl: float) -> float:
    return isl + osl / 2


def _positive(measured: float | None) -> float | None:
    return measured if measured is not None and 0 < measured < inf else None
