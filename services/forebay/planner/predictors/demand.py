"""Forecast the demand of pools with a predictor of single numbers.

Theory of operation. The predictor sees the series of each number alone: requests per second, prompt tokens and output
tokens per request. An interval in which a pool was not observed is missing in its series. The lengths are unknown in
intervals without a request, so these are missing in the series of lengths. The KV hit rate is not predicted: the next
interval has that of the last one.
"""

from collections.abc import Callable, Sequence

from forebay.events.scaling import PoolDemand, PoolObserved, ScalingObserved

Predict = Callable[[Sequence[float]], float]
"""Returns the next value of a series with at least one value, oldest first."""


def demand_of(history: Sequence[ScalingObserved], predict: Predict) -> tuple[PoolDemand, ...]:
    """Return the expected demand of each pool of the newest observation that has had a request.

    Args:
        history: observations, oldest first.
        predict: predictor of each number. Results below 0 count as 0.
    """
    if not history:
        return ()
    found = [_pool_demand(pool.group, pool.pool, history, predict) for pool in history[-1].pools]
    return tuple(demand for demand in found if demand is not None)


def _pool_demand(group: str, name: str, history: Sequence[ScalingObserved], predict: Predict) -> PoolDemand | None:
    observed = [
        (one, past.interval_s) for past in history for one in past.pools if (one.group, one.pool) == (group, name)
    ]
    pools = [one for one, _ in observed]
    isl = _known(pools, "isl")
    if not isl:
        return None
    osl, hit_rates = _known(pools, "osl"), _known(pools, "kv_hit_rate")
    return PoolDemand(
        group=group,
        pool=name,
        requests_per_s=max(0.0, predict([one.requests / interval_s for one, interval_s in observed])),
        isl=max(0.0, predict(isl)),
        osl=max(0.0, predict(osl)) if osl else 0.0,
        kv_hit_rate=hit_rates[-1] if hit_rates else 0.0,
    )


def _known(pools: Sequence[PoolObserved], field: str) -> list[float]:
    values = [getattr(one, field) for one in pools]
    return [value for value in values if value is not None]


AVERAGED = 5  # values of a moving average


def last_value(series: Sequence[float]) -> float:
    return series[-1]


def moving_average(series: Sequence[float]) -> float:
    """Return the mean of the last values."""
    newest = series[-AVERAGED:]
    return sum(newest) / len(newest)
