"""Predictors: they forecast the demand of the next interval from the observations of the planner, by name."""

from collections.abc import Callable, Sequence

from forebay.events.names import unknown_name
from forebay.events.scaling import DemandForecast, ScalingObserved
from forebay.live.planner.planner import Forecast
from forebay.planner.predictors.demand import Predict, demand_of
from forebay.planner.predictors.plain import last_value, moving_average

# Each function returns the predictor, so that only the predictor in use imports its libraries.
PREDICTORS: dict[str, Callable[[], Predict]] = {
    "constant": lambda: last_value,
    "moving-average": lambda: moving_average,
}


class PredictorUnusable(Exception):
    """A predictor is unknown or cannot be used. The message says why."""


def predictor(name: str) -> Forecast:
    """Return the function that forecasts the next interval. Raises PredictorUnusable if there is none."""
    if name not in PREDICTORS:
        raise PredictorUnusable(unknown_name("predictor", name, PREDICTORS))
    predict = PREDICTORS[name]()

    def forecast(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
        return DemandForecast(predictor=name, observed=observed, pools=demand_of(history, predict))

    return forecast
