"""Predictors: they forecast the demand of the next interval from the observations of the planner, by name."""

import math
from collections.abc import Callable, Sequence
from itertools import dropwhile

from forebay.core.scaling.virtual_planner import Forecast
from forebay.events.names import unknown_name
from forebay.events.scaling import DemandForecast, PoolDemand, PoolObserved, ScalingObserved

Predict = Callable[[Sequence[float]], float]
"""Returns the next value of a series with at least one value, oldest first."""


def demand_of(history: Sequence[ScalingObserved], predict: Predict) -> tuple[PoolDemand, ...]:
    """Return the expected demand of each pool of the newest observation that has had a request.

    The history is ordered from the oldest to the newest observation. Predictions below 0 count as 0.
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
    newest = series[-AVERAGED:]
    return sum(newest) / len(newest)


FILTERED_MAX = 64  # newest values of a series
WARM_UP = 5  # a shorter series is continued with its last value
GROWTH_MAX = 2.0  # a forecast is at most this often the highest value of its series

# Variances of Dynamo's Kalman predictor (components/src/dynamo/planner/utils/load_predictor.py).
LEVEL_VARIANCE = 1.0
TREND_VARIANCE = 0.1
NOISE_VARIANCE = 10.0
FIRST_VARIANCE = 1_000.0  # of the level and of the trend


def kalman(series: Sequence[float]) -> float:
    """Return the forecast of a local linear trend, filtered with fixed variances.

    Zeros at the beginning are ignored: the system was not in use yet. A short series, a constant one, and one whose
    forecast is not finite are continued with their last value.
    """
    last, used = series[-1], list(dropwhile(lambda value: value == 0, series[-FILTERED_MAX:]))
    if len(used) < WARM_UP or len(set(used)) == 1:
        return last
    found = _next_of_trend(used)
    return min(max(found, 0.0), GROWTH_MAX * max(used)) if math.isfinite(found) else last


def _next_of_trend(series: Sequence[float]) -> float:
    level, trend = series[0], 0.0
    level_variance, covariance, trend_variance = FIRST_VARIANCE, 0.0, FIRST_VARIANCE
    for value in series[1:]:
        level += trend
        level_variance += 2 * covariance + trend_variance + LEVEL_VARIANCE
        covariance += trend_variance
        trend_variance += TREND_VARIANCE
        error, error_variance = value - level, level_variance + NOISE_VARIANCE
        level_gain, trend_gain = level_variance / error_variance, covariance / error_variance
        level += level_gain * error
        trend += trend_gain * error
        trend_variance -= trend_gain * covariance
        covariance -= level_gain * covariance
        level_variance -= level_gain * level_variance
    return level + trend


class PredictorUnusable(Exception):
    """A predictor is unknown. The message lists the known ones."""


PREDICTORS: dict[str, Predict] = {"constant": last_value, "moving-average": moving_average, "kalman": kalman}


def predictor(name: str) -> Forecast:
    """Return the function that forecasts the next interval. Raises PredictorUnusable if there is none."""
    if name not in PREDICTORS:
        raise PredictorUnusable(unknown_name("predictor", name, PREDICTORS))
    predict = PREDICTORS[name]

    def forecast(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
        return DemandForecast(predictor=name, observed=observed, pools=demand_of(history, predict))

    return forecast
