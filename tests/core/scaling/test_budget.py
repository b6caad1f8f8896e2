"""The GPU budget of all pools."""

from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.scaling.budget import Fitted, Wanted, fit

SIZE = st.integers(0, 40)
GPUS = st.sampled_from([1, 2, 3, 4, 8])


def wanted(size: int, current: int = 0, low: int = 1, high: int = 100, gpus: int = 1) -> Wanted:
    return Wanted(current, size, min(low, size), max(high, size), gpus)


def total(pools: list[Wanted], sizes: tuple[int, ...]) -> int:
    return sum(one.gpus * size for one, size in zip(pools, sizes, strict=True))


def test_sizes_within_the_limits_stay() -> None:
    pools = [wanted(3), wanted(2, gpus=2)]
    assert fit(pools, 7, 7) == fit(pools, None, 0) == fit(pools, 100, 0) == Fitted((3, 2), feasible=True)
    assert fit([], 0, 8) == Fitted((), feasible=True)


def test_two_gpus_per_worker_cannot_have_exactly_5() -> None:
    """With a tolerance of one worker, 4 GPUs count as 5."""
    pair = [wanted(1, gpus=2), wanted(1, gpus=2)]
    assert fit(pair, 5, 5).sizes == (1, 1)
    assert total(pair, fit([wanted(1, gpus=2), wanted(0, gpus=2)], 5, 5).sizes) == 4
    assert fit(pair, 100, 6).sizes == (1, 1)
    assert total(pair, fit(pair, None, 6).sizes) == 6, "without a budget, nothing is in the way of 6"


@pytest.mark.parametrize(
    ("pools", "budget", "sizes"),
    [
        ([wanted(8), wanted(8)], 8, (4, 4)),
        ([wanted(9), wanted(3)], 8, (6, 2)),
        ([wanted(1), wanted(15)], 8, (1, 7)),
        ([wanted(4, gpus=2), wanted(4, gpus=1)], 8, (2, 4)),
        ([wanted(16), wanted(8), wanted(8)], 8, (4, 2, 2)),
        ([wanted(6)], 4, (4,)),
    ],
)
def test_sizes_above_the_budget_shrink_by_the_same_share(
    pools: list[Wanted], budget: int, sizes: tuple[int, ...]
) -> None:
    assert fit(pools, budget, 0) == Fitted(sizes, feasible=True)


def test_an_infeasible_minimum_gives_zero() -> None:
    assert fit([wanted(4, low=3), wanted(4, low=3)], 5, 0) == Fitted((0, 0), feasible=False)


@given(SIZE, SIZE, GPUS, GPUS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 200))
def test_two_pools_shrink_as_in_dynamo(p: int, d: int, gp: int, gd: int, low_p: int, low_d: int, budget: int) -> None:
    """`proportional_clamp_pair` of Dynamo, in whole numbers. There, decode may also get more than it wants."""
    p, d = max(p, low_p), max(d, low_d)
    all_gpus = p * gp + d * gd
    fitted = fit([wanted(p, 0, low_p, gpus=gp), wanted(d, 0, low_d, gpus=gd)], budget, 0)
    if all_gpus <= budget:
        assert fitted.sizes == (p, d)
    elif budget < low_p * gp + low_d * gd:
        assert fitted == Fitted((0, 0), feasible=False)
    else:
        new_p = max(low_p, min((budget - low_d * gd) // gp, p * budget // all_gpus))
        assert fitted.sizes == (new_p, min(d, max(low_d, (budget - new_p * gp) // gd)))


@given(SIZE, SIZE, GPUS, GPUS, st.integers(0, 200))
def test_two_pools_grow_as_in_dynamo(p: int, d: int, gp: int, gd: int, floor: int) -> None:
    pools = [wanted(p, p, 0, 1_000, gp), wanted(d, d, 0, 1_000, gd)]
    all_gpus = p * gp + d * gd
    expected = (p, d)
    if 0 < all_gpus < floor:
        new_p = -(-p * floor // all_gpus)
        expected = (new_p, max(d, -(-(floor - new_p * gp) // gd)))
    elif all_gpus < floor:
        new_p = ceil(floor / 2 / gp)
        expected = (new_p, max(0, ceil((floor - new_p * gp) / gd)))
    assert fit(pools, None, floor).sizes == expected


def test_growth_passes_on_what_a_pool_must_not_get() -> None:
    assert fit([wanted(1, 1), wanted(1, 1, high=1)], None, 8).sizes == (7, 1)
    assert fit([wanted(1, 1, high=2), wanted(1, 1, high=1)], None, 8).sizes == (2, 1)


def test_the_budget_comes_before_the_lowest_number_of_gpus() -> None:
    assert fit([wanted(1, 1, gpus=2)], 5, 5).sizes == (2,)
    assert fit([wanted(1, 1)], 4, 9).sizes == (4,)
    assert fit([wanted(1, current=9), wanted(1, current=9)], 4, 9).sizes == (2, 2)


def test_growth_of_one_pool_takes_nothing_from_another() -> None:
    # By shares both would get 4, and the second would lose 2 although it wants more.
    assert fit([wanted(8, current=2), wanted(8, current=6)], 8, 0).sizes == (2, 6)
    assert fit([wanted(8, current=2), wanted(8, current=4)], 8, 0).sizes == (4, 4)
    assert fit([wanted(8, current=2), wanted(1, current=6)], 8, 0).sizes == (7, 1)


def test_reduction_stops_at_the_lowest_number_of_gpus_and_grows_nothing() -> None:
    assert fit([wanted(4, current=4), wanted(1, current=2)], None, 6).sizes == (4, 2)
    assert fit([wanted(2, current=4), wanted(2, current=4)], None, 6).sizes == (3, 3)


def test_present_sizes_above_the_budget_shrink_and_none_grows() -> None:
    assert fit([wanted(9, current=6), wanted(6, current=6)], 8, 0).sizes == (4, 4)
    assert fit([wanted(9, current=4, gpus=2), wanted(9, current=4, gpus=3)], 17, 0).sizes == (4, 3)
    assert fit([wanted(9, current=6), wanted(6, current=6, low=6)], 8, 0).sizes == (2, 6)


POOLS = st.lists(
    st.builds(
        lambda current, size, low, high, gpus: Wanted(current, size, min(low, size), max(high, size), gpus),
        SIZE, SIZE, SIZE, SIZE, GPUS,
    ),
    max_size=5,
)  # fmt: skip


@given(POOLS, st.none() | st.integers(0, 300), st.integers(0, 300))
def test_sizes_stay_within_all_limits(pools: list[Wanted], budget: int | None, floor: int) -> None:
    fitted = fit(pools, budget, floor)
    if not fitted.feasible:
        assert budget is not None and total(pools, tuple(one.low for one in pools)) > budget
        return
    used = total(pools, fitted.sizes)
    assert budget is None or used <= budget
    assert all(one.low <= size <= one.high for one, size in zip(pools, fitted.sizes, strict=True))
    tolerance = 0 if budget is None else max((one.gpus for one in pools), default=0)
    least = floor if budget is None else min(floor, budget)
    if used < least - tolerance:
        spare = least if budget is None else budget - used
        for one, size in zip(pools, fitted.sizes, strict=True):
            assert size == one.high or one.gpus > spare


@given(POOLS, st.none() | st.integers(0, 300), st.integers(0, 300))
def test_present_sizes_within_the_limits_move_only_towards_the_proposal(
    pools: list[Wanted], budget: int | None, floor: int
) -> None:
    current = total(pools, tuple(one.current for one in pools))
    if (
        (budget is None or current <= budget)
        and current >= floor
        and all(one.low <= one.current <= one.high for one in pools)
    ):
        for one, size in zip(pools, fit(pools, budget, floor).sizes, strict=True):
            assert min(one.current, one.size) <= size <= max(one.current, one.size)


@given(POOLS, st.none() | st.integers(0, 300), st.integers(0, 300))
def test_a_second_fit_reverses_nothing_and_a_third_changes_nothing(
    pools: list[Wanted], budget: int | None, floor: int
) -> None:
    first = fit(pools, budget, floor)
    if first.feasible:
        after = [
            Wanted(size, one.size, one.low, one.high, one.gpus) for one, size in zip(pools, first.sizes, strict=True)
        ]
        second = fit(after, budget, floor)
        for one, now, later in zip(pools, first.sizes, second.sizes, strict=True):
            assert (now - one.current) * (later - now) >= 0
        last = [
            Wanted(size, one.size, one.low, one.high, one.gpus) for one, size in zip(pools, second.sizes, strict=True)
        ]
        assert fit(last, budget, floor) == second
