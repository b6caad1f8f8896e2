"""Method `throughput`: sizes from the forecast and the profile."""

from math import inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.scaling.interpolation import DecodeCapacity, decode_capacity, decode_itl_ms, prefill_speed
from forebay.core.scaling.proposal import SIZE_MAX, Proposal
from forebay.core.scaling.throughput import propose
from forebay.events.scaling import DecodePoint, PoolDemand, PoolObserved, PoolScaling, PrefillPoint, Reason
from tests.core.scaling.profiles import DECODE, PREFILL, demand, observation, pool, settings, worker


def size(
    one: PoolScaling, wanted: PoolDemand | None, observed: PoolObserved | None = None, **fields: object
) -> Proposal:
    return propose(one, settings(one, **fields), wanted, observed, current=3)


def test_100_requests_per_second_need_8_workers_of_12_5() -> None:
    assert size(pool(role="prefill"), demand(100)) == Proposal(8)


def test_cached_tokens_need_no_prefill() -> None:
    assert size(pool(role="prefill"), demand(100, kv_hit_rate=0.5)) == Proposal(4)
    assert size(pool(role="prefill"), demand(100, kv_hit_rate=1.0)) == Proposal(1, "profile_exceeded")
    assert size(pool(role="prefill"), demand(100, kv_hit_rate=7.0)) == Proposal(8), "an impossible rate counts as 0"


def test_a_missed_ttft_adds_no_workers() -> None:
    """Dynamo 1.2.1 had a floor of ceil(ttft / target), here 3. 1.6.1 has none."""
    slow = pool(role="prefill", prefill=(PrefillPoint(isl=1_000, ttft_ms=1_200, tokens_per_s=12_500),))
    assert size(slow, demand(1)) == Proposal(1, "target_unattainable")


def test_decode_counts_output_tokens_at_the_context_of_half_the_output() -> None:
    # The context is 900 + 200 / 2. One worker generates 1,000 tokens per second within 50 ms, and 750 within 35 ms.
    assert size(pool(role="decode"), demand(20, isl=900)) == Proposal(4)
    assert size(pool(role="decode"), demand(20, isl=900), itl_ms=35.0) == Proposal(6)
    assert size(pool(role="decode"), demand(20, isl=900), itl_ms=5.0) == Proposal(40, "target_unattainable")
    assert size(pool(role="decode"), demand(20, isl=9_000)) == Proposal(16, "profile_exceeded")


def test_the_kv_cache_bounds_the_concurrency() -> None:
    # 30,000 tokens have room for 30 requests, with which a worker generates 750 tokens per second.
    assert size(pool(role="decode", kv_tokens=30_000), demand(20, isl=900)) == Proposal(6)


def test_an_aggregated_worker_shares_its_time_between_both_stages() -> None:
    # 100 * 1,000 / 12,500 = 8 workers prefill, 100 * 200 / 975 = 20.5 generate.
    assert size(pool(), demand(100, isl=900)) == Proposal(28)


def test_an_embedding_pool_needs_no_decode_profile() -> None:
    assert size(pool(decode=()), demand(100, osl=0)) == Proposal(8)


def test_corrected_scales_prefill_by_the_observed_ttft_but_never_up() -> None:
    prefill = pool(role="prefill")
    observed = observation(isl=1_000.0, ttft_ms=40.0)
    assert size(prefill, demand(100), observed, equations="corrected") == Proposal(4)
    assert size(prefill, demand(100), observed, equations="plain") == Proposal(8)
    cached = msgspec.structs.replace(observed, kv_hit_rate=0.75)  # a TTFT of 30 ms is expected for 250 tokens
    assert size(prefill, demand(100), cached, equations="corrected") == Proposal(8)


def test_corrected_lowers_the_itl_target_by_the_observed_itl() -> None:
    # With 10 requests per worker the profile has 20 ms. 40 ms were observed, so a target of 50 ms becomes 25 ms.
    observed = observation(isl=900.0, osl=200.0, itl_ms=40.0, workers=(worker(running=5), worker(running=15)))
    assert size(pool(role="decode"), demand(20, isl=900), observed, equations="corrected") == Proposal(7)
    fast = msgspec.structs.replace(observed, itl_ms=16.0)  # 62.5 ms, more than the profile has
    assert size(pool(role="decode"), demand(20, isl=900), fast, equations="corrected") == Proposal(4)


@pytest.mark.parametrize(
    "changes",
    [
        {"isl": None},
        {"osl": None},
        {"itl_ms": None},
        {"ttft_ms": None},
        {"workers": ()},
        {"itl_ms": 0.0, "ttft_ms": 0.0},
        {"isl": nan, "ttft_ms": nan, "itl_ms": nan},
        {"isl": inf, "ttft_ms": inf, "itl_ms": inf},
        {"isl": -1.0, "itl_ms": -1.0},
    ],
)
def test_an_observation_without_usable_numbers_corrects_nothing(changes: dict[str, object]) -> None:
    exact = observation(isl=900.0, osl=200.0, itl_ms=20.0, ttft_ms=500.0, workers=(worker(running=10),))
    for role in ("prefill", "decode", "aggregated"):
        one = pool(role=role)
        expected = size(one, demand(20), equations="plain")
        assert size(one, demand(20), msgspec.structs.replace(exact, **changes), equations="corrected") == expected
        assert size(one, demand(20), None, equations="corrected") == expected


@pytest.mark.parametrize(
    ("one", "wanted", "reason"),
    [
        (pool(), None, "no_demand"),
        (pool(), demand(nan), "no_demand"),
        (pool(), demand(inf), "no_demand"),
        (pool(), demand(-1), "no_demand"),
        (pool(), demand(1, isl=0), "no_demand"),
        (pool(), demand(1, osl=0), "no_demand"),
        (pool(role="decode", decode=()), demand(1, osl=0), "no_demand"),
        (pool(), demand(1, isl=nan), "no_demand"),
        (pool(), demand(1, osl=inf), "no_demand"),
        (pool(prefill=()), demand(1), "no_profile"),
        (pool(decode=()), demand(1), "no_profile"),
        (pool(role="prefill", prefill=()), demand(1), "no_profile"),
        (pool(role="decode", decode=()), demand(1), "no_profile"),
        (pool(role="encode"), demand(1), "no_profile"),
    ],
)
def test_without_an_input_the_size_is_the_present_one(
    one: PoolScaling, wanted: PoolDemand | None, reason: Reason
) -> None:
    assert size(one, wanted) == Proposal(3, reason)


def test_no_requests_need_the_smallest_size() -> None:
    assert size(pool(min_size=2), demand(0, isl=0, osl=0)) == Proposal(2)
    assert size(pool(min_size=2), demand(1e-9)) == Proposal(2)


def test_the_size_fits_an_event_for_any_demand() -> None:
    assert size(pool(), demand(1e300, isl=1e300, osl=1e300)) == Proposal(SIZE_MAX, "profile_exceeded")


ABSURD = st.floats(allow_nan=True, allow_infinity=True)
LATENCY = st.none() | ABSURD


OBSERVED = st.builds(
    observation,
    isl=LATENCY,
    osl=LATENCY,
    ttft_ms=LATENCY,
    itl_ms=LATENCY,
    kv_hit_rate=LATENCY,
    workers=st.lists(st.builds(worker, running=st.integers(0, 1 << 62)), max_size=2).map(tuple),
)


@given(
    st.sampled_from(["prefill", "decode", "aggregated", "encode"]),
    st.builds(demand, ABSURD, ABSURD, ABSURD, ABSURD),
    OBSERVED,
    st.sampled_from(["plain", "corrected"]),
    st.integers(0, 1 << 62),
)
def test_any_number_gives_a_size(
    role: str, wanted: PoolDemand, observed: PoolObserved, equations: str, kv_tokens: int
) -> None:
    proposal = size(pool(role=role, kv_tokens=kv_tokens), wanted, observed, equations=equations)
    assert 0 <= proposal.size <= SIZE_MAX


@given(st.floats(0, 1e4), st.floats(0, 1e4), st.floats(1, 1e4), st.floats(1, 1e4))
def test_more_requests_never_need_fewer_workers(few: float, many: float, isl: float, osl: float) -> None:
    sizes = [size(pool(), demand(rate, isl=isl, osl=osl)).size for rate in sorted([few, many])]
    assert sizes == sorted(sizes)


def test_points_of_the_profile_may_be_in_any_order() -> None:
    ordered = pool(prefill=tuple(sorted(PREFILL, key=lambda point: point.isl)))
    assert size(ordered, demand(77, isl=700)) == size(pool(), demand(77, isl=700))


# Interpolation between the points of a profile


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
