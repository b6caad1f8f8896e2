"""Predictors with models of statsmodels. The module is imported only if one of them is used.

Theory of operation. A forecast depends on nothing but its series. Models
are fitted on one thread, because threads of the linear algebra cost more than they save for series of this length.
Too short series, failed fits and forecasts that are not finite fall back to the last value. Defaults are those of
Dynamo's predictors (components/src/dynamo/planner/utils/load_predictor.py).
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import dropwhile

import numpy as np
from statsmodels.tsa.arima.model import ARIMA, ARIMAResults
from statsmodels.tsa.statespace.kalman_filter import KalmanFilter
from statsmodels.tsa.stattools import kpss
from threadpoolctl import ThreadpoolController

FITTED_MAX = 64  # newest values of a series
WARM_UP = 5  # a shorter series is continued with its last value
GROWTH_MAX = 2.0  # a forecast is at most this often the highest value of its series

KALMAN_LEVEL_VARIANCE = 1.0
KALMAN_TREND_VARIANCE = 0.1
KALMAN_NOISE_VARIANCE = 10.0
KALMAN_FIRST_VARIANCE = 1_000.0

DIFFERENCES_MAX = 2
STATIONARY_P = 0.05
ORDERS = ((0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (0, 2))  # autoregressive and moving-average terms
ITERATIONS_MAX = 50

Model = Callable[[Sequence[float]], float]


def arima(series: Sequence[float]) -> float:
    """Return the forecast of the ARIMA model with the lowest AIC.

    The KPSS test selects the order of differences. If the best model has neither autoregressive nor moving-average
    terms, the logarithm of the series is modelled instead, which suits series with peaks better.
    """
    return _continued(series, _arima)


def kalman(series: Sequence[float]) -> float:
    """Return the forecast of a local linear trend, filtered with fixed variances."""
    return _continued(series, _kalman)


def _continued(series: Sequence[float], model: Model) -> float:
    """Return the model's forecast within its limits, or the last value.

    The model gets at least `WARM_UP` values that are not all equal. Values are ordered from the oldest to the newest.
    Zeros at the beginning are ignored: the system was not in use yet.
    """
    last, used = series[-1], list(dropwhile(lambda value: value == 0, series[-FITTED_MAX:]))
    if len(used) < WARM_UP or len(set(used)) == 1:
        return last
    try:
        with _quiet():
            found = model(used)
    except (ValueError, ArithmeticError, np.linalg.LinAlgError):
        return last
    return min(max(found, 0.0), GROWTH_MAX * max(used)) if math.isfinite(found) else last


@contextmanager
def _quiet() -> Iterator[None]:
    """Fit on one thread. Fits of short series often warn, and their results are checked anyway."""
    with warnings.catch_warnings(), np.errstate(all="ignore"), _threads().limit(limits=1):
        warnings.simplefilter("ignore")
        yield


@cache
def _threads() -> ThreadpoolController:
    return ThreadpoolController()  # it looks at all loaded libraries, which takes milliseconds


def _arima(series: Sequence[float]) -> float:
    terms, fitted = _best_arima(series)
    if terms != (0, 0):
        return _next_of(fitted)
    return math.expm1(_next_of(_best_arima([math.log1p(value) for value in series])[1]))


def _best_arima(series: Sequence[float]) -> tuple[tuple[int, int], ARIMAResults]:
    """Return the orders and the fit of the best model. Raises ValueError if no model can be fitted."""
    differences = _differences(series)
    best: tuple[float, tuple[int, int], ARIMAResults] | None = None
    for terms in ORDERS:
        model = ARIMA(series, order=(terms[0], differences, terms[1]), trend="n" if differences else "c")
        try:
            fitted = model.fit(method_kwargs={"maxiter": ITERATIONS_MAX, "disp": 0}, cov_type="none")
        except np.linalg.LinAlgError:
            continue
        if math.isfinite(fitted.aic) and (best is None or fitted.aic < best[0]):
            best = fitted.aic, terms, fitted
    if best is None:
        raise ValueError("no model can be fitted")
    return best[1:]


def _next_of(fitted: ARIMAResults) -> float:
    return float(fitted.forecast(1)[0])


def _differences(series: Sequence[float]) -> int:
    """Return how often to take differences until the KPSS test finds the series stationary."""
    values = np.asarray(series)
    for order in range(DIFFERENCES_MAX):
        if len(values) < WARM_UP or np.ptp(values) == 0:
            return order
        if kpss(values, regression="c", nlags=int(3 * math.sqrt(len(values)) / 13))[1] >= STATIONARY_P:
            return order
        values = np.diff(values)
    return DIFFERENCES_MAX


def _kalman(series: Sequence[float]) -> float:
    transition = np.array([[1.0, 1.0], [0.0, 1.0]])
    changes = np.diag([KALMAN_LEVEL_VARIANCE, KALMAN_TREND_VARIANCE])
    model = KalmanFilter(k_endog=1, k_states=2, transition=transition, state_cov=changes, selection=np.eye(2))
    model["design"] = np.array([[1.0, 0.0]])
    model["obs_cov"] = np.array([[KALMAN_NOISE_VARIANCE]])
    # The first value is the first level, with a trend of 0.
    first = transition @ (KALMAN_FIRST_VARIANCE * np.eye(2)) @ transition.T + changes
    model.initialize_known(np.array([series[0], 0.0]), first)
    model.bind(np.asarray(series[1:]))
    return float(model.filter().predicted_state[0, -1])
