"""Predictors: they forecast the demand of the next interval from the observations of the planner, by name."""

from collections.abc import Callable, Sequence

from forebay.core.scaling.virtual_planner import Forecast
from forebay.events.names import unknown_name
from forebay.events.scaling import DemandForecast, ScalingObserved
from forebay.planner.predictors.demand import Predict, demand_of, last_value, moving_average

NEEDED_BY_EXTRA = ("numpy", "statsmodels", "threadpoolctl")


class PredictorUnusable(Exception):
    """A predictor is unknown or cannot be used. The message says why."""


def _arima() -> Predict:
    from forebay.planner.predictors.statistical import arima  # noqa: PLC0415 - an extra, which takes a second

    return arima


def _kalman() -> Predict:
    from forebay.planner.predictors.statistical import kalman  # noqa: PLC0415 - an extra, which takes a second

    return kalman


# Each function returns the predictor, so that only the predictor in use imports its libraries.
PREDICTORS: dict[str, Callable[[], Predict]] = {
    "constant": lambda: last_value,
    "moving-average": lambda: moving_average,
    "arima": _arima,
    "kalman": _kalman,
}


def predictor(name: str) -> Forecast:
    """Return the function that forecasts the next interval. Raises PredictorUnusable if there is none."""
    if name not in PREDICTORS:
        raise PredictorUnusable(unknown_name("predictor", name, PREDICTORS))
    try:
        predict = PREDICTORS[name]()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in NEEDED_BY_EXTRA:
            raise
        install = "install it with: pip install 'forebay[planner]'"
        raise PredictorUnusable(f"predictor {name!r} needs {package}; {install}") from error

    def forecast(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
        return DemandForecast(predictor=name, observed=observed, pools=demand_of(history, predict))

    return forecast
