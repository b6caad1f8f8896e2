"""Predictors: they forecast the demand of the next interval from the observations of the planner, by name."""

from collections.abc import Callable, Sequence
from importlib import import_module

from forebay.core.scaling.virtual_planner import Forecast
from forebay.events.names import unknown_name
from forebay.events.scaling import DemandForecast, PoolDemand, PoolObserved, ScalingObserved
from forebay.runtime.errors import ConfigError, install_command

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


NEEDED_BY_EXTRA = ("statsmodels", "threadpoolctl")
STATISTICAL = "forebay.planner.predictors.statistical"  # imported if it is used, because it takes a second
PREDICTORS: dict[str, Predict | str] = {  # a text is the name of a function in `STATISTICAL`
    "constant": last_value,
    "moving-average": moving_average,
    "arima": "arima",
    "kalman": "kalman",
}


def predictor(name: str) -> Forecast:
    """Return the function that forecasts the next interval. Raises ConfigError if there is none."""
    if name not in PREDICTORS:
        raise ConfigError(unknown_name("predictor", name, PREDICTORS))
    try:
        known = PREDICTORS[name]
        predict: Predict = getattr(import_module(STATISTICAL), known) if isinstance(known, str) else known
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED_BY_EXTRA:
            raise
        raise ConfigError(
            f"predictor {name!r} needs {package}; install it with: {install_command('planner')}"
        ) from error

    def forecast(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
        return DemandForecast(predictor=name, observed=observed, pools=demand_of(history, predict))

    return forecast
