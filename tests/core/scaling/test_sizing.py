"""The sizes of pools: by throughput from the forecast and the profile, by load, and within the GPU budget."""

from collections.abc import Sequence
from math import ceil, inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.scaling import load, throughput
from forebay.core.scaling.budget import Fitted, Wanted, fit
from forebay.core.scaling.interpolation import DecodeCapacity, decode_capacity, decode_itl_ms, prefill_speed
from forebay.core.scaling.load import LATENCY_MS_MAX
from forebay.core.scaling.proposal import SIZE_MAX, Proposal
from forebay.events.scaling import (
    DecodePoint,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PrefillPoint,
    Reason,
    WorkerObserved,
)
from tests.core.scaling.scene import DECODE, PREFILL, demand, observation, pool, settings, worker


def size(
    one: PoolScaling, wanted: PoolDemand | None, observed: PoolObserved | None = None, **fields: object
) -> Proposal:
    return throughput.propose(one, settings(one, **fields), wanted, observed, current=3)


@pytest.mark.parametrize(
    ("one", "wanted", "itl_ms", "proposal"),
    [
        (pool(role="prefill"), demand(100), 50.0, Proposal(8)),  # of which each carries 12.5 requests per second
        (pool(role="prefill"), demand(100, kv_hit_rate=0.5), 50.0, Proposal(4)),
        (pool(role="prefill"), demand(100, kv_hit_rate=1.0), 50.0, Proposal(1, "profile_exceeded")),
        (pool(role="prefill"), demand(100, kv_hit_rate=7.0), 50.0, Proposal(8)),  # an impossible rate counts as 0
        # The context is 900 + 200 / 2. A worker generates 1,000 tokens per second within 50 ms, and 750 within 35 ms.
        (pool(role="decode"), demand(20, isl=900), 50.0, Proposal(4)),
        (pool(role="decode"), demand(20, isl=900), 35.0, Proposal(6)),
        (pool(role="decode"), demand(20, isl=900), 5.0, Proposal(40, "target_unattainable")),
        (pool(role="decode"), demand(20, isl=9_000), 50.0, Proposal(16, "profile_exceeded")),
        # 30,000 tokens have room for 30 requests, with which a worker generates 750 tokens per second.
        (pool(role="decode", kv_tokens=30_000), demand(20, isl=900), 50.0, Proposal(6)),
        # 100 * 1,000 / 12,500 = 8 workers prefill, 100 * 200 / 975 = 20.5 generate.
        (pool(), demand(100, isl=900), 50.0, Proposal(28)),
        (pool(decode=()), demand(100, osl=0), 50.0, Proposal(8)),  # embeddings need no decode profile
        (pool(min_size=2), demand(0, isl=0, osl=0), 50.0, Proposal(2)),
        (pool(min_size=2), demand(1e-9), 50.0, Proposal(2)),
        (pool(), demand(1e300, isl=1e300, osl=1e300), 50.0, Proposal(SIZE_MAX, "profile_exceeded")),
    ],
)
def test_the_size_for_a_forecast(one: PoolScaling, wanted: PoolDemand, itl_ms: float, proposal: Proposal) -> None:
    assert size(one, wanted, itl_ms=itl_ms) == proposal


def test_a_missed_ttft_adds_no_workers() -> None:
    """Dynamo 1.2.1 had a floor of ceil(ttft / target), here 3. 1.6.1 has none."""
    slow = pool(role="prefill", prefill=(PrefillPoint(isl=1_000, ttft_ms=1_200, tokens_per_s=12_500),))
    assert size(slow, demand(1)) == Proposal(1, "target_unattainable")


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


# Method `load`


PREFILLS, DECODES, BOTH = (pool(role=role) for role in ("prefill", "decode", "aggregated"))


def load_size(
    one: PoolScaling, history: Sequence[PoolObserved], current: int | None = None, **fields: object
) -> Proposal:
    return load.propose(one, settings(one, **fields), history, history[-1].ready if current is None else current)


def intervals(*workers: Sequence[WorkerObserved], **fields: object) -> list[PoolObserved]:
    return [observation(len(one), tuple(one), requests=1, **fields) for one in workers]


def prefills(*loads: Sequence[int]) -> list[PoolObserved]:
    """Return intervals in which each worker has 100 ms + 0.1 ms per token."""
    return intervals(*([worker(prefill_tokens=load, ttft_ms=100 + load / 10) for load in one] for one in loads))


def decodes(*loads: Sequence[int], room: int = 0, waiting: int = 0) -> list[PoolObserved]:
    """Return intervals in which each worker has 10 ms + 0.01 ms per token."""
    fields = {"kv_tokens_max": room, "waiting": waiting}
    return intervals(*([worker(kv_tokens=load, itl_ms=10 + load / 100, **fields) for load in one] for one in loads))


PAST = [(0, 500), (1_000, 1_500), (2_000, 2_500), (3_000, 3_500)]


@pytest.mark.parametrize(
    ("one", "loads", "proposal"),
    [
        (PREFILLS, (4_010, 4_200), Proposal(3)),
        (PREFILLS, (4_000, 4_200), Proposal(2, "consolidation_refused")),
        (PREFILLS, (4_200, 0), Proposal(2, "consolidation_refused")),
        # 500 - 100 ms may come from waiting, and 0.8 of them with twice the tokens: 1,600 tokens each.
        (PREFILLS, (1_600, 0), Proposal(2, "consolidation_refused")),
        (PREFILLS, (1_590, 0), Proposal(1)),
        (DECODES, (4_010, 4_200), Proposal(3)),
        (DECODES, (4_000, 4_200), Proposal(2, "consolidation_refused")),
        # Twice the tokens must stay below 0.8 * 50 ms: 1,500 tokens each.
        (DECODES, (1_500, 0), Proposal(2, "consolidation_refused")),
        (DECODES, (1_490, 0), Proposal(1)),
    ],
)
def test_a_pool_grows_if_all_workers_miss_the_target_and_shrinks_with_a_margin(
    one: PoolScaling, loads: tuple[int, int], proposal: Proposal
) -> None:
    assert load_size(one, (prefills if one is PREFILLS else decodes)(*PAST, loads)) == proposal


def test_workers_whose_kv_would_not_fit_are_not_consolidated() -> None:
    history = decodes(*PAST, (1_000, 1_000), room=2_000)
    assert load_size(DECODES, history) == Proposal(2, "consolidation_refused")
    assert load_size(DECODES, decodes(*PAST, (1_000, 1_000), room=2_001)) == Proposal(1)
    known = pool(role="decode", kv_tokens=2_000)
    assert load_size(known, decodes(*PAST, (1_000, 1_000))) == Proposal(2, "consolidation_refused")


def test_queued_requests_count_as_load() -> None:
    assert load_size(DECODES, decodes(*PAST, (2_100, 2_100), waiting=1)) == Proposal(3)
    (*past, last) = decodes(*PAST, (2_100, 2_100))
    assert load_size(DECODES, [*past, msgspec.structs.replace(last, queued=2)]) == Proposal(3)
    (*past, last) = prefills(*PAST, (100, 100))
    past[-1] = msgspec.structs.replace(past[-1], isl=1_000.0)
    assert load_size(PREFILLS, [*past, msgspec.structs.replace(last, queued=8)]) == Proposal(3)
    assert load_size(PREFILLS, [*past, msgspec.structs.replace(last, queued=7)]) == Proposal(2, "consolidation_refused")
    past[-1] = msgspec.structs.replace(past[-1], kv_hit_rate=0.5)
    assert load_size(PREFILLS, [*past, msgspec.structs.replace(last, queued=16)]) == Proposal(3)
    assert load_size(PREFILLS, [*past, msgspec.structs.replace(last, queued=15)]) == Proposal(
        2, "consolidation_refused"
    )


def test_workers_without_a_running_request_have_their_kv_as_load() -> None:
    idle = [worker(kv_tokens=2_100, running=0, waiting=5)] * 2
    assert load_size(DECODES, [*decodes(*PAST, (5, 5)), *intervals(idle)]) == Proposal(2, "consolidation_refused")


def test_an_aggregated_pool_grows_for_one_target_and_shrinks_for_both() -> None:
    def found(*last: int) -> Proposal:
        past = [(0, 100), (400, 0), (800, 900), (1_200, 600), last]
        pairs = ([worker(a, ttft_ms=100 + a / 10, kv_tokens=b, itl_ms=10 + b / 100)] * 2 for a, b in past)
        return load_size(BOTH, intervals(*pairs))

    assert found(5_000, 10) == found(10, 5_000) == Proposal(3)
    assert found(10, 10) == Proposal(1)
    assert found(10, 1_600) == found(1_700, 10) == Proposal(2, "consolidation_refused")


def test_a_latency_that_no_request_has_does_not_matter() -> None:
    assert load_size(BOTH, prefills(*PAST, (10, 10))) == Proposal(1)
    (first, *rest) = prefills(*PAST, (10, 10))
    known = msgspec.structs.replace(first, workers=(*first.workers[:1], worker(kv_tokens=5, itl_ms=10)))
    assert load_size(BOTH, [known, *rest]) == Proposal(2, "insufficient_data"), "an interval is not enough"


def test_a_regression_needs_enough_intervals_with_a_possible_latency() -> None:
    history = prefills(*PAST, (4_200, 4_200))
    assert load_size(PREFILLS, history[1:]) == Proposal(2, "insufficient_data")
    assert load_size(PREFILLS, history[1:], min_observations=4) == Proposal(3)
    for impossible in (None, nan, inf, -1.0, LATENCY_MS_MAX * 2):
        broken = msgspec.structs.replace(
            history[0], workers=(worker(prefill_tokens=1, ttft_ms=impossible), worker(ttft_ms=impossible))
        )
        assert load_size(PREFILLS, [broken, *history[1:]]) == Proposal(2, "insufficient_data")


def test_missing_metrics_change_nothing() -> None:
    (*past, last) = prefills(*PAST, (4_200, 4_200))
    assert load.propose(PREFILLS, settings(PREFILLS), [], 2) == Proposal(2, "insufficient_data")
    assert load_size(PREFILLS, [*past, msgspec.structs.replace(last, workers=())]) == Proposal(2, "insufficient_data")
    assert load_size(PREFILLS, [*past, msgspec.structs.replace(last, workers=last.workers[:1])]).size == 2
    assert load_size(PREFILLS, [observation(0)] * 9) == Proposal(0, "insufficient_data")


def test_an_idle_pool_shrinks_to_one_worker_without_a_regression() -> None:
    idle = observation(2, (worker(running=0), worker(running=0)))
    assert load_size(BOTH, [idle] * 5) == Proposal(1)
    assert load_size(BOTH, [idle] * 4) == Proposal(2, "insufficient_data")
    assert load_size(pool(min_size=0), [observation(1, (worker(running=0),))] * 5) == Proposal(1)
    assert load_size(pool(min_size=2), [idle] * 5) == Proposal(2)
    assert load_size(BOTH, [idle] * 5, current=0) == Proposal(0)
    for changes in (
        {"requests": 1},
        {"queued": 1},
        {"workers": (worker(running=0), worker(running=1))},
        {"workers": (worker(running=0), worker(running=0, waiting=1))},
        {"workers": (worker(running=0), worker(running=0, prefill_tokens=1))},
        {"workers": ()},
    ):
        busy = msgspec.structs.replace(idle, **changes)
        assert load_size(BOTH, [idle, idle, busy, idle, idle]) == Proposal(2, "insufficient_data")


def test_a_pool_at_its_lowest_size_or_with_one_worker_does_not_shrink() -> None:
    history = prefills(*PAST, (10, 10))
    assert load_size(pool(role="prefill", min_size=2), history) == Proposal(2)
    assert load_size(PREFILLS, prefills(*PAST, (10,)), current=2) == Proposal(2)


def test_a_target_that_a_request_alone_misses_counts_from_twice_its_latency() -> None:
    def prompts(history: list[PoolObserved], **fields: object) -> list[PoolObserved]:
        return [msgspec.structs.replace(history[0], isl=1_000.0, **fields), *history[1:]]

    # By the profile, a prompt of 1,000 tokens takes 80 ms. The estimate of 160 ms has 600 tokens.
    assert load_size(PREFILLS, prompts(prefills(*PAST, (610, 610))), ttft_ms=80.0) == Proposal(3, "target_unattainable")
    assert load_size(PREFILLS, prompts(prefills(*PAST, (600, 0))), ttft_ms=80.0) == Proposal(2, "target_unattainable")
    assert load_size(PREFILLS, prompts(prefills(*PAST, (230, 0))), ttft_ms=80.0) == Proposal(1, "target_unattainable")
    assert load_size(PREFILLS, prompts(prefills(*PAST, (10, 10))), ttft_ms=81.0) == Proposal(3)
    assert load_size(PREFILLS, prompts(prefills(*PAST, (10, 10)), kv_hit_rate=0.75), ttft_ms=40.0) == Proposal(3)
    # By the profile, a token takes 10 ms. The estimate of 20 ms has 1,000 tokens.
    assert load_size(DECODES, prompts(decodes(*PAST, (1_010, 1_010))), itl_ms=9.0) == Proposal(3, "target_unattainable")
    assert load_size(DECODES, prompts(decodes(*PAST, (1_000, 0))), itl_ms=9.0) == Proposal(2, "target_unattainable")


def test_without_a_profile_the_pool_grows_for_any_target() -> None:
    for one in (pool(role="prefill", prefill=()), PREFILLS):  # without a prompt, the profile does not help either
        assert load_size(one, prefills(*PAST, (10, 10)), ttft_ms=90.0) == Proposal(3, "target_unattainable")
        assert load_size(one, prefills(*PAST, (10, 10)), ttft_ms=101.5) == Proposal(2, "consolidation_refused")


def test_latency_that_does_not_rise_with_load_is_proportional_to_it() -> None:
    same = intervals(*([[worker(kv_tokens=1_000, itl_ms=25)] * 2] * 5))
    assert load_size(DECODES, same) == Proposal(2, "consolidation_refused"), "twice the load would have 50 ms"
    assert load_size(DECODES, same, itl_ms=63.0) == Proposal(1)
    falling = intervals(*([worker(kv_tokens=1_000 + i, itl_ms=25 - i / 10)] * 2 for i in range(5)))
    assert load_size(DECODES, falling) == Proposal(2, "consolidation_refused")
    unloaded = intervals(*([[worker(kv_tokens=0, itl_ms=25)] * 2] * 5))
    assert load_size(DECODES, unloaded) == Proposal(1)


def test_a_pool_of_the_largest_size_does_not_grow() -> None:
    assert load_size(PREFILLS, prefills(*PAST, (4_200, 4_200)), current=SIZE_MAX) == Proposal(SIZE_MAX)


COUNTS = st.integers(0, (1 << 63) - 1)
WORKERS = st.builds(
    worker,
    prefill_tokens=COUNTS,
    kv_tokens=COUNTS,
    running=COUNTS,
    waiting=COUNTS,
    kv_tokens_max=COUNTS,
    ttft_ms=LATENCY,
    itl_ms=LATENCY,
)
OBSERVED_LOADS = st.lists(WORKERS, min_size=1, max_size=3).flatmap(
    lambda workers: st.builds(observation, st.just(len(workers)), st.just(tuple(workers)), isl=LATENCY, queued=COUNTS)
)


@given(
    st.sampled_from(["prefill", "decode", "aggregated", "encode"]),
    st.lists(OBSERVED_LOADS, min_size=1, max_size=6),
    st.integers(0, SIZE_MAX),
    st.floats(0, 1),
)
def test_any_number_changes_the_size_by_one_at_most(
    role: str, history: list[PoolObserved], current: int, sensitivity: float
) -> None:
    proposal = load_size(pool(role=role), history, current, min_observations=1, down_sensitivity=sensitivity)
    assert max(current - 1, 0) <= proposal.size <= min(current + 1, SIZE_MAX)


@given(
    st.lists(st.tuples(st.integers(0, 5_000), st.integers(0, 5_000)), min_size=5, max_size=9),
    st.floats(0, 1),
    st.floats(1, 500),
)
def test_the_load_of_one_worker_less_does_not_let_the_pool_grow_again(
    loads: list[tuple[int, int]], sensitivity: float, itl_ms: float
) -> None:
    history = decodes(*loads)
    if load_size(DECODES, history, down_sensitivity=sensitivity, itl_ms=itl_ms).size == 1:
        both = [worker(kv_tokens=2 * load) for load in loads[-1]]
        for one in both:
            after = [*history, observation(1, (one,))]
            assert load_size(DECODES, after, down_sensitivity=sensitivity, itl_ms=itl_ms).size == 1


# The GPU budget of all pools


SIZES = st.integers(0, 40)
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


@given(SIZES, SIZES, GPUS, GPUS, st.integers(0, 3), st.integers(0, 3), st.integers(0, 200))
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


@given(SIZES, SIZES, GPUS, GPUS, st.integers(0, 200))
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


@pytest.mark.parametrize(
    ("pools", "budget", "floor", "sizes"),
    [
        # Sizes above the budget shrink by the same share.
        ([wanted(8), wanted(8)], 8, 0, (4, 4)),
        ([wanted(9), wanted(3)], 8, 0, (6, 2)),
        ([wanted(1), wanted(15)], 8, 0, (1, 7)),
        ([wanted(4, gpus=2), wanted(4, gpus=1)], 8, 0, (2, 4)),
        ([wanted(16), wanted(8), wanted(8)], 8, 0, (4, 2, 2)),
        ([wanted(6)], 4, 0, (4,)),
        # Growth to the lowest number of GPUs passes on what a pool must not get.
        ([wanted(1, 1), wanted(1, 1, high=1)], None, 8, (7, 1)),
        ([wanted(1, 1, high=2), wanted(1, 1, high=1)], None, 8, (2, 1)),
        # The budget comes before the lowest number of GPUs.
        ([wanted(1, 1, gpus=2)], 5, 5, (2,)),
        ([wanted(1, 1)], 4, 9, (4,)),
        ([wanted(1, current=9), wanted(1, current=9)], 4, 9, (2, 2)),
        # Growth takes nothing from another pool: by shares both would get 4, and the second would lose 2.
        ([wanted(8, current=2), wanted(8, current=6)], 8, 0, (2, 6)),
        ([wanted(8, current=2), wanted(8, current=4)], 8, 0, (4, 4)),
        ([wanted(8, current=2), wanted(1, current=6)], 8, 0, (7, 1)),
        # A reduction stops at the lowest number of GPUs and grows nothing.
        ([wanted(4, current=4), wanted(1, current=2)], None, 6, (4, 2)),
        ([wanted(2, current=4), wanted(2, current=4)], None, 6, (3, 3)),
        # Present sizes above the budget shrink, and none grows.
        ([wanted(9, current=6), wanted(6, current=6)], 8, 0, (4, 4)),
        ([wanted(9, current=4, gpus=2), wanted(9, current=4, gpus=3)], 17, 0, (4, 3)),
        ([wanted(9, current=6), wanted(6, current=6, low=6)], 8, 0, (2, 6)),
    ],
)
def test_sizes_fit_the_budget_and_the_lowest_number_of_gpus(
    pools: list[Wanted], budget: int | None, floor: int, sizes: tuple[int, ...]
) -> None:
    assert fit(pools, budget, floor) == Fitted(sizes, feasible=True)


def test_an_infeasible_minimum_gives_zero() -> None:
    assert fit([wanted(4, low=3), wanted(4, low=3)], 5, 0) == Fitted((0, 0), feasible=False)


POOLS = st.lists(st.builds(wanted, SIZES, SIZES, SIZES, SIZES, GPUS), max_size=5)


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
        second = fit(resized(pools, first), budget, floor)
        for one, now, later in zip(pools, first.sizes, second.sizes, strict=True):
            assert (now - one.current) * (later - now) >= 0
        assert fit(resized(pools, second), budget, floor) == second


def resized(pools: list[Wanted], fitted: Fitted) -> list[Wanted]:
    return [Wanted(size, one.size, one.low, one.high, one.gpus) for one, size in zip(pools, fitted.sizes, strict=True)]
