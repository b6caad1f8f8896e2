"""Speeds of one worker, read from its measured profile."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.scaling.interpolation import DecodeCapacity, decode_capacity, decode_itl_ms, prefill_speed
from forebay.events.scaling import DecodePoint, PrefillPoint
from tests.core.scaling.profiles import DECODE, PREFILL


@pytest.mark.parametrize(
    ("isl", "ttft_ms", "tokens_per_s", "covered"),
    [
        (250, 30, 12_500, True),
        (625, 55, 12_500, True),
        (1_000, 80, 12_500, True),
        (2_500, 290, 10_250, True),
        (4_000, 500, 8_000, True),
        (100, 30, 12_500, False),
        (4_001, 500, 8_000, False),
    ],
)
def test_prefill_is_linear_between_points_and_constant_beyond(
    isl: float, ttft_ms: float, tokens_per_s: float, covered: bool
) -> None:
    speed = prefill_speed(PREFILL, isl)
    assert (speed.ttft_ms, speed.tokens_per_s, speed.covered) == (ttft_ms, tokens_per_s, covered)


@pytest.mark.parametrize(
    ("context", "concurrency", "itl_ms"),
    [
        (1_000, 10, 20),
        (1_000, 30, 35),
        (1_000, 0, 10),
        (1_000, 90, 50),
        (2_000, 10, 30),
        (2_000, 50, 45),
        (9_000, 1, 30),
    ],
)
def test_the_itl_is_linear_in_concurrency_and_context(context: float, concurrency: float, itl_ms: float) -> None:
    assert decode_itl_ms(DECODE, context, concurrency) == itl_ms


@pytest.mark.parametrize(
    ("context", "itl_ms", "concurrency_max", "capacity"),
    [
        (1_000, 50, None, DecodeCapacity(1_000, attainable=True, covered=True)),
        (1_000, 90, None, DecodeCapacity(1_000, attainable=True, covered=True)),
        (1_000, 35, None, DecodeCapacity(750, attainable=True, covered=True)),
        (1_000, 5, None, DecodeCapacity(100, attainable=False, covered=True)),
        (2_000, 50, None, DecodeCapacity(625, attainable=True, covered=True)),
        (2_000, 20, None, DecodeCapacity(266.5, attainable=True, covered=True)),
        (5_000, 50, None, DecodeCapacity(250, attainable=True, covered=False)),
        (500, 50, None, DecodeCapacity(1_000, attainable=True, covered=False)),
        (1_000, 50, 30, DecodeCapacity(750, attainable=True, covered=True)),
        (1_000, 50, 0.5, DecodeCapacity(100, attainable=True, covered=False)),
    ],
)
def test_the_decode_capacity_is_the_best_one_within_the_target_and_the_kv_cache(
    context: float, itl_ms: float, concurrency_max: float | None, capacity: DecodeCapacity
) -> None:
    assert decode_capacity(DECODE, context, itl_ms, concurrency_max) == capacity


def test_one_point_counts_everywhere() -> None:
    assert prefill_speed((PrefillPoint(isl=100, ttft_ms=5, tokens_per_s=7),), 300).tokens_per_s == 7
    assert decode_itl_ms((DecodePoint(context=10, concurrency=2, itl_ms=3, tokens_per_s=4),), 99, 99) == 3


def test_points_measured_twice_do_not_divide_by_zero() -> None:
    twice = (*PREFILL, PrefillPoint(isl=1_000, ttft_ms=90, tokens_per_s=12_000))
    assert 80 <= prefill_speed(twice, 1_000).ttft_ms <= 90


NUMBERS = st.floats(min_value=1e-300, max_value=1e300)


@given(
    st.lists(
        st.builds(DecodePoint, context=NUMBERS, concurrency=NUMBERS, itl_ms=NUMBERS, tokens_per_s=NUMBERS), min_size=1
    ),
    st.floats(0, 1e300),
    NUMBERS,
    st.none() | NUMBERS,
)
def test_a_capacity_is_a_measured_one_or_lies_between_two(
    points: list[DecodePoint], context: float, itl_ms: float, concurrency_max: float | None
) -> None:
    capacity = decode_capacity(points, context, itl_ms, concurrency_max)
    speeds = [point.tokens_per_s for point in points]
    assert min(speeds) * 0.999 <= capacity.tokens_per_s <= max(speeds) * 1.001
