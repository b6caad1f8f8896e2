"""The capacity search finds the known breaking point of a service."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.simulate.capacity import DOUBLINGS_MAX, TOLERANCE, Capacity, SpeedTrial, search


def found(breaks_at: float, start: float = 1.0, tolerance: float = TOLERANCE) -> Capacity:
    """Search the capacity of a service that meets its SLO at every speed up to `breaks_at`."""

    def measure(speed: float) -> SpeedTrial:
        holds = speed <= breaks_at
        return SpeedTrial(speed=speed, requests_per_s=3 * speed, attained=1.0 if holds else 0.5, holds=holds)

    return search(measure, start, tolerance)


@given(st.floats(0.002, 900.0), st.floats(0.001, 0.3))
def test_capacity_is_found_to_the_tolerance_in_few_trials(breaks_at: float, tolerance: float) -> None:
    capacity = found(breaks_at, tolerance=tolerance)
    assert capacity.answer == "found"
    assert capacity.step is not None
    assert capacity.step.speed <= breaks_at < capacity.step.speed * (1 + tolerance)
    assert capacity.step in capacity.steps
    assert capacity.step.holds
    assert len(capacity.steps) <= DOUBLINGS_MAX + 3 + 10
    assert len({step.speed for step in capacity.steps}) == len(capacity.steps), "no speed is tried twice"
    assert capacity.monotone


def test_search_starts_at_nearly_zero_load_and_the_given_speed() -> None:
    speeds = [step.speed for step in found(breaks_at=40.0, start=10.0).steps]
    assert speeds[:5] == [10.0 / 1024, 10.0, 20.0, 40.0, 80.0]


def test_search_brackets_from_the_given_speed_down_to_nearly_zero_load() -> None:
    low = found(breaks_at=0.0015, start=1.0)
    assert low.answer == "found"
    assert [step.speed for step in low.steps[:12]] == [0.5**10, *(0.5**halving for halving in range(10)), 3 * 0.5**11]


def test_search_reports_unlimited_and_zero_capacity() -> None:
    always = found(breaks_at=1e9)
    assert (always.answer, always.step) == ("always", always.steps[-1])
    assert always.steps[-1].speed == 2.0**DOUBLINGS_MAX
    never = found(breaks_at=0.0)
    assert (never.answer, never.step) == ("never", None)
    assert [step.speed for step in never.steps] == [0.5**DOUBLINGS_MAX]


@pytest.mark.parametrize(("dip", "monotone"), [(0.7, True), (0.6, False)])
def test_search_detects_non_monotone_attainment(dip: float, monotone: bool) -> None:
    def measure(speed: float) -> SpeedTrial:
        attained = 1.0 if speed <= 1.0 else dip if speed < 1.3 else 0.65
        return SpeedTrial(speed=speed, requests_per_s=speed, attained=attained, holds=attained >= 0.9)

    capacity = search(measure, 1.0)
    assert capacity.step is not None
    assert capacity.step.speed == 1.0
    assert capacity.monotone is monotone
