"""Predictors forecast the demand of each pool from the observations of the planner."""

import math
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.scaling import PoolDemand, PoolObserved, ScalingObserved
from forebay.planner.predictors import predictor
from forebay.planner.predictors.statistical import FITTED_MAX, GROWTH_MAX, WARM_UP, arima, kalman
from forebay.runtime.errors import ConfigError
from tests.core.scaling.scene import GROUP, POOL
from tests.depth import examples

INTERVAL_S = 10.0


def observed(requests: int, isl: float | None = 100.0, osl: float | None = 20.0, pool: str = POOL) -> ScalingObserved:
    one = PoolObserved(group=GROUP, pool=pool, ready=1, requests=requests, isl=isl, osl=osl, kv_hit_rate=0.25)
    return ScalingObserved(interval_s=INTERVAL_S, pools=(one,))


def demand(name: str, *history: ScalingObserved) -> tuple[PoolDemand, ...]:
    forecast = predictor(name)(history, 7)
    assert (forecast.predictor, forecast.observed) == (name, 7)
    return forecast.pools


def expected(requests_per_s: float, isl: float, osl: float) -> PoolDemand:
    return PoolDemand(group=GROUP, pool=POOL, requests_per_s=requests_per_s, isl=isl, osl=osl, kv_hit_rate=0.25)


def test_constant_expects_the_last_interval_again() -> None:
    assert demand("constant", observed(30, isl=50), observed(60, isl=100, osl=40)) == (expected(6, 100, 40),)


def test_moving_average_expects_the_mean_of_the_last_five_intervals() -> None:
    history = [observed(requests, isl=requests * 10) for requests in (1000, 10, 20, 30, 40, 50)]
    assert demand("moving-average", *history) == (expected(3, 300, 20),)


@pytest.mark.parametrize("name", ["constant", "moving-average"])
def test_lengths_of_intervals_without_requests_are_those_of_earlier_ones(name: str) -> None:
    idle = observed(0, isl=None, osl=None)
    (found,) = demand(name, observed(50), idle, idle, idle, idle, idle)
    assert found == expected(0, 100, 20)


def test_output_that_was_never_observed_has_no_tokens() -> None:
    assert demand("constant", observed(10, osl=None)) == (expected(1, 100, 0),)


def test_a_pool_without_a_request_or_without_a_new_observation_has_no_forecast() -> None:
    assert demand("constant") == ()
    assert demand("constant", observed(0, isl=None, osl=None)) == ()
    (found,) = demand("constant", observed(10, pool="other"), observed(20))
    assert (found.pool, found.requests_per_s) == (POOL, 2)


def test_an_unknown_predictor_is_rejected() -> None:
    with pytest.raises(ConfigError, match="unknown predictor"):
        predictor("constant-value")


# Statistical predictors


BOTH = pytest.mark.parametrize("name", ["arima", "kalman"])
SERIES = st.lists(st.floats(0, 1e308), min_size=1, max_size=2 * WARM_UP)


def forecast(name: str, series: list[float]) -> float:
    return {"arima": arima, "kalman": kalman}[name](series)


@BOTH
@given(series=SERIES)
@examples(0.25)
def test_a_forecast_is_finite_and_within_its_limits(name: str, series: list[float]) -> None:
    found = forecast(name, series)
    assert 0 <= found <= GROWTH_MAX * max(series)
    assert forecast(name, series) == pytest.approx(found, rel=1e-6)


@BOTH
@given(value=st.floats(0, 1e308), count=st.integers(1, 2 * FITTED_MAX))
def test_a_constant_series_continues_with_its_value(name: str, value: float, count: int) -> None:
    assert forecast(name, [value] * count) == value


@BOTH
def test_before_the_warm_up_the_last_value_is_expected(name: str) -> None:
    assert forecast(name, [1.0, 2.0, 3.0, 7.0]) == 7
    assert forecast(name, [0.0] * 20 + [1.0, 2.0, 3.0, 7.0]) == 7, "the system was not in use before"


@BOTH
def test_only_the_newest_values_count(name: str) -> None:
    newest = [float(10 + at % 7) for at in range(FITTED_MAX)]
    assert forecast(name, [1_000.0] * 50 + newest) == forecast(name, newest)


@BOTH
def test_a_series_that_no_model_fits_continues_with_its_last_value(name: str) -> None:
    assert forecast(name, [math.inf, 1.0, 2.0, 3.0, 4.0, 5.0]) == 5


@BOTH
def test_a_trend_is_expected_to_continue(name: str) -> None:
    assert forecast(name, [10.0 + 2 * at for at in range(30)]) == pytest.approx(70, rel=0.01)


def test_arima_predicts_a_slow_wave_better_than_its_last_value() -> None:
    rng = np.random.default_rng(1)
    wave = [100 + 50 * math.sin(at / 8) + rng.normal(0, 1) for at in range(60)]
    ends = range(30, 59, 4)
    error = sum(abs(arima(wave[:end]) - wave[end]) for end in ends)
    assert error < sum(abs(wave[end - 1] - wave[end]) for end in ends)


def test_arima_expects_an_alternating_series_to_alternate() -> None:
    # With noise, because a perfect alternation has no best model, and the found one depends on the processor.
    rng = np.random.default_rng(1)
    series = [value + rng.normal(0, 0.1) for value in [10.0, 20.0] * 10]
    assert arima(series) == pytest.approx(10, abs=1)


def test_kalman_equals_the_equations_of_the_filter() -> None:
    series = [3.0, 8.0, 2.0, 9.0, 4.0, 4.5, 7.0]
    level, trend = series[0], 0.0
    a, b, c = 1_000.0, 0.0, 1_000.0  # covariance of level and trend: [[a, b], [b, c]]
    for value in series[1:]:
        level, (a, b, c) = level + trend, (a + 2 * b + c + 1.0, b + c, c + 0.1)
        gain_level, gain_trend, error = a / (a + 10.0), b / (a + 10.0), value - level
        level, trend = level + gain_level * error, trend + gain_trend * error
        a, b, c = (1 - gain_level) * a, (1 - gain_level) * b, c - gain_trend * b
    assert kalman(series) == pytest.approx(level + trend)


@BOTH
def test_without_the_extra_the_error_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "forebay.planner.predictors.statistical")
    monkeypatch.setitem(sys.modules, "statsmodels.tsa.arima.model", None)
    with pytest.raises(ConfigError, match=r"pip install 'PATH\[planner\]'"):
        predictor(name)
