"""Predictors forecast the demand of each pool from the observations of the planner."""

import pytest

from forebay.events.scaling import PoolDemand, PoolObserved, ScalingObserved
from forebay.planner.predictors import PredictorUnusable, predictor
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
