"""Predictors forecast the demand of each pool from the observations of the planner."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.scaling import PoolDemand, PoolObserved, ScalingObserved
from forebay.planner.predictors import FILTERED_MAX, GROWTH_MAX, WARM_UP, PredictorUnusable, kalman, predictor
from tests.core.scaling.scene import GROUP, POOL

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
    with pytest.raises(PredictorUnusable, match="unknown predictor"):
        predictor("constant-value")


SERIES = st.lists(st.floats(0, 1e308), min_size=1, max_size=2 * WARM_UP)


@given(series=SERIES)
def test_a_forecast_is_finite_and_within_its_limits(series: list[float]) -> None:
    assert 0 <= kalman(series) <= GROWTH_MAX * max(series)


@given(value=st.floats(0, 1e308), count=st.integers(1, 2 * FILTERED_MAX))
def test_a_constant_series_continues_with_its_value(value: float, count: int) -> None:
    assert kalman([value] * count) == value


def test_before_the_warm_up_the_last_value_is_expected() -> None:
    assert kalman([1.0, 2.0, 3.0, 7.0]) == 7
    assert kalman([0.0] * 20 + [1.0, 2.0, 3.0, 7.0]) == 7, "the system was not in use before"


def test_only_the_newest_values_count() -> None:
    newest = [float(10 + at % 7) for at in range(FILTERED_MAX)]
    assert kalman([1_000.0] * 50 + newest) == kalman(newest)


def test_a_series_without_a_finite_forecast_continues_with_its_last_value() -> None:
    assert kalman([math.inf, 1.0, 2.0, 3.0, 4.0, 5.0]) == 5


def test_a_trend_is_expected_to_continue() -> None:
    assert kalman([10.0 + 2 * at for at in range(30)]) == pytest.approx(70, rel=0.01)


@given(series=st.lists(st.integers(100, 150), min_size=WARM_UP, max_size=FILTERED_MAX))
def test_kalman_equals_the_filter_in_matrices(series: list[int]) -> None:
    transition, noise = np.array([[1.0, 1.0], [0.0, 1.0]]), np.diag([1.0, 0.1])
    state, covariance = np.array([series[0], 0.0]), 1_000.0 * np.eye(2)
    for value in series[1:]:
        state, covariance = transition @ state, transition @ covariance @ transition.T + noise
        gain = covariance[:, 0] / (covariance[0, 0] + 10.0)
        state, covariance = state + gain * (value - state[0]), covariance - np.outer(gain, covariance[0])
    expected = min((transition @ state)[0], GROWTH_MAX * max(series))
    assert kalman(series) == pytest.approx(expected)
