"""Method `load`: one worker more or less, from the load of the workers."""

from collections.abc import Sequence
from math import inf, nan

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.scaling.load import LATENCY_MS_MAX, propose
from forebay.core.scaling.proposal import SIZE_MAX, Proposal
from forebay.events.scaling import PoolObserved, PoolScaling, WorkerObserved
from tests.core.scaling.profiles import observation, pool, settings, worker

PREFILL, DECODE, BOTH = (pool(role=role) for role in ("prefill", "decode", "aggregated"))


def size(one: PoolScaling, history: Sequence[PoolObserved], current: int | None = None, **fields: object) -> Proposal:
    return propose(one, settings(one, **fields), history, history[-1].ready if current is None else current)


def intervals(*workers: Sequence[WorkerObserved], **fields: object) -> list[PoolObserved]:
    return [observation(len(one), tuple(one), requests=1, **fields) for one in workers]


def prefills(*loads: Sequence[int]) -> list[PoolObserved]:
    """Return intervals in which each worker has 100 ms + 0.1 ms per token."""
    return intervals(*([worker(prefill_tokens=load, ttft_ms=100 + load / 10) for load in one] for one in loads))


def decodes(*loads: Sequence[int], room: int = 0, waiting: int = 0) -> list[PoolObserved]:
    """Return intervals in which each worker has 10 ms + 0.01 ms per token."""
    return intervals(
        *(
            [worker(kv_tokens=load, itl_ms=10 + load / 100, kv_tokens_max=room, waiting=waiting) for load in one]
            for one in loads
        )
    )


PAST = [(0, 500), (1_000, 1_500), (2_000, 2_500), (3_000, 3_500)]


@pytest.mark.parametrize(
    ("loads", "proposal"),
    [
        ((4_010, 4_200), Proposal(3)),
        ((4_000, 4_200), Proposal(2, "consolidation_refused")),
        ((4_200, 0), Proposal(2, "consolidation_refused")),
        # 500 - 100 ms may come from waiting, and 0.8 of them with twice the tokens: 1,600 tokens each.
        ((1_600, 0), Proposal(2, "consolidation_refused")),
        ((1_590, 0), Proposal(1)),
    ],
)
def test_prefill_grows_if_all_workers_miss_the_target_and_shrinks_with_a_margin(
    loads: tuple[int, int], proposal: Proposal
) -> None:
    assert size(PREFILL, prefills(*PAST, loads)) == proposal


@pytest.mark.parametrize(
    ("loads", "proposal"),
    [
        ((4_010, 4_200), Proposal(3)),
        ((4_000, 4_200), Proposal(2, "consolidation_refused")),
        # Twice the tokens must stay below 0.8 * 50 ms: 1,500 tokens each.
        ((1_500, 0), Proposal(2, "consolidation_refused")),
        ((1_490, 0), Proposal(1)),
    ],
)
def test_decode_grows_if_all_workers_miss_the_target_and_shrinks_with_a_margin(
    loads: tuple[int, int], proposal: Proposal
) -> None:
    assert size(DECODE, decodes(*PAST, loads)) == proposal


def test_workers_whose_kv_would_not_fit_are_not_consolidated() -> None:
    history = decodes(*PAST, (1_000, 1_000), room=2_000)
    assert size(DECODE, history) == Proposal(2, "consolidation_refused")
    assert size(DECODE, decodes(*PAST, (1_000, 1_000), room=2_001)) == Proposal(1)
    known = pool(role="decode", kv_tokens=2_000)
    assert size(known, decodes(*PAST, (1_000, 1_000))) == Proposal(2, "consolidation_refused")


def test_queued_requests_count_as_load() -> None:
    assert size(DECODE, decodes(*PAST, (2_100, 2_100), waiting=1)) == Proposal(3)
    (*past, last) = decodes(*PAST, (2_100, 2_100))
    assert size(DECODE, [*past, msgspec.structs.replace(last, queued=2)]) == Proposal(3)
    (*past, last) = prefills(*PAST, (100, 100))
    past[-1] = msgspec.structs.replace(past[-1], isl=1_000.0)
    assert size(PREFILL, [*past, msgspec.structs.replace(last, queued=8)]) == Proposal(3)
    assert size(PREFILL, [*past, msgspec.structs.replace(last, queued=7)]) == Proposal(2, "consolidation_refused")
    past[-1] = msgspec.structs.replace(past[-1], kv_hit_rate=0.5)
    assert size(PREFILL, [*past, msgspec.structs.replace(last, queued=16)]) == Proposal(3)
    assert size(PREFILL, [*past, msgspec.structs.replace(last, queued=15)]) == Proposal(2, "consolidation_refused")


def test_workers_without_a_running_request_have_their_kv_as_load() -> None:
    idle = [worker(kv_tokens=2_100, running=0, waiting=5)] * 2
    assert size(DECODE, [*decodes(*PAST, (5, 5)), *intervals(idle)]) == Proposal(2, "consolidation_refused")


def test_an_aggregated_pool_grows_for_one_target_and_shrinks_for_both() -> None:
    def past(*loads: tuple[int, int]) -> list[PoolObserved]:
        return intervals(
            *(
                [worker(prefill_tokens=a, ttft_ms=100 + a / 10, kv_tokens=b, itl_ms=10 + b / 100)] * 2
                for a, b in [(0, 100), (400, 0), (800, 900), (1_200, 600), *loads]
            )
        )

    assert size(BOTH, past((5_000, 10))) == Proposal(3)
    assert size(BOTH, past((10, 5_000))) == Proposal(3)
    assert size(BOTH, past((10, 10))) == Proposal(1)
    assert size(BOTH, past((10, 1_600))) == Proposal(2, "consolidation_refused")
    assert size(BOTH, past((1_700, 10))) == Proposal(2, "consolidation_refused")


def test_a_latency_that_no_request_has_does_not_matter() -> None:
    assert size(BOTH, prefills(*PAST, (10, 10))) == Proposal(1)
    (first, *rest) = prefills(*PAST, (10, 10))
    known = msgspec.structs.replace(first, workers=(*first.workers[:1], worker(kv_tokens=5, itl_ms=10)))
    assert size(BOTH, [known, *rest]) == Proposal(2, "insufficient_data"), "an interval is not enough"


def test_a_regression_needs_enough_intervals_with_a_possible_latency() -> None:
    history = prefills(*PAST, (4_200, 4_200))
    assert size(PREFILL, history[1:]) == Proposal(2, "insufficient_data")
    assert size(PREFILL, history[1:], min_observations=4) == Proposal(3)
    for impossible in (None, nan, inf, -1.0, LATENCY_MS_MAX * 2):
        broken = msgspec.structs.replace(
            history[0], workers=(worker(prefill_tokens=1, ttft_ms=impossible), worker(ttft_ms=impossible))
        )
        assert size(PREFILL, [broken, *history[1:]]) == Proposal(2, "insufficient_data")


def test_missing_metrics_change_nothing() -> None:
    (*past, last) = prefills(*PAST, (4_200, 4_200))
    assert propose(PREFILL, settings(PREFILL), [], 2) == Proposal(2, "insufficient_data")
    assert size(PREFILL, [*past, msgspec.structs.replace(last, workers=())]) == Proposal(2, "insufficient_data")
    assert size(PREFILL, [*past, msgspec.structs.replace(last, workers=last.workers[:1])]).size == 2
    assert size(PREFILL, [observation(0)] * 9) == Proposal(0, "insufficient_data")


def test_an_idle_pool_shrinks_to_one_worker_without_a_regression() -> None:
    idle = observation(2, (worker(running=0), worker(running=0)))
    assert size(BOTH, [idle] * 5) == Proposal(1)
    assert size(BOTH, [idle] * 4) == Proposal(2, "insufficient_data")
    assert size(pool(min_size=0), [observation(1, (worker(running=0),))] * 5) == Proposal(1)
    assert size(pool(min_size=2), [idle] * 5) == Proposal(2)
    assert size(BOTH, [idle] * 5, current=0) == Proposal(0)
    for changes in (
        {"requests": 1},
        {"queued": 1},
        {"workers": (worker(running=0), worker(running=1))},
        {"workers": (worker(running=0), worker(running=0, waiting=1))},
        {"workers": (worker(running=0), worker(running=0, prefill_tokens=1))},
        {"workers": ()},
    ):
        busy = msgspec.structs.replace(idle, **changes)
        assert size(BOTH, [idle, idle, busy, idle, idle]) == Proposal(2, "insufficient_data")


def test_a_pool_at_its_lowest_size_or_with_one_worker_does_not_shrink() -> None:
    history = prefills(*PAST, (10, 10))
    assert size(pool(role="prefill", min_size=2), history) == Proposal(2)
    assert size(PREFILL, prefills(*PAST, (10,)), current=2) == Proposal(2)


def test_a_target_that_a_request_alone_misses_counts_from_twice_its_latency() -> None:
    def prompts(history: list[PoolObserved], **fields: object) -> list[PoolObserved]:
        return [msgspec.structs.replace(history[0], isl=1_000.0, **fields), *history[1:]]

    # By the profile, a prompt of 1,000 tokens takes 80 ms. The estimate of 160 ms has 600 tokens.
    assert size(PREFILL, prompts(prefills(*PAST, (610, 610))), ttft_ms=80.0) == Proposal(3, "target_unattainable")
    assert size(PREFILL, prompts(prefills(*PAST, (600, 0))), ttft_ms=80.0) == Proposal(2, "target_unattainable")
    assert size(PREFILL, prompts(prefills(*PAST, (230, 0))), ttft_ms=80.0) == Proposal(1, "target_unattainable")
    assert size(PREFILL, prompts(prefills(*PAST, (10, 10))), ttft_ms=81.0) == Proposal(3)
    assert size(PREFILL, prompts(prefills(*PAST, (10, 10)), kv_hit_rate=0.75), ttft_ms=40.0) == Proposal(3)
    # By the profile, a token takes 10 ms. The estimate of 20 ms has 1,000 tokens.
    assert size(DECODE, prompts(decodes(*PAST, (1_010, 1_010))), itl_ms=9.0) == Proposal(3, "target_unattainable")
    assert size(DECODE, prompts(decodes(*PAST, (1_000, 0))), itl_ms=9.0) == Proposal(2, "target_unattainable")


def test_without_a_profile_the_pool_grows_for_any_target() -> None:
    for one in (pool(role="prefill", prefill=()), PREFILL):  # without a prompt, the profile does not help either
        assert size(one, prefills(*PAST, (10, 10)), ttft_ms=90.0) == Proposal(3, "target_unattainable")
        assert size(one, prefills(*PAST, (10, 10)), ttft_ms=101.5) == Proposal(2, "consolidation_refused")


def test_latency_that_does_not_rise_with_load_is_proportional_to_it() -> None:
    same = intervals(*([[worker(kv_tokens=1_000, itl_ms=25)] * 2] * 5))
    assert size(DECODE, same) == Proposal(2, "consolidation_refused"), "twice the load would have 50 ms"
    assert size(DECODE, same, itl_ms=63.0) == Proposal(1)
    falling = intervals(*([worker(kv_tokens=1_000 + i, itl_ms=25 - i / 10)] * 2 for i in range(5)))
    assert size(DECODE, falling) == Proposal(2, "consolidation_refused")
    unloaded = intervals(*([[worker(kv_tokens=0, itl_ms=25)] * 2] * 5))
    assert size(DECODE, unloaded) == Proposal(1)


def test_a_pool_of_the_largest_size_does_not_grow() -> None:
    assert size(PREFILL, prefills(*PAST, (4_200, 4_200)), current=SIZE_MAX) == Proposal(SIZE_MAX)


NUMBERS = st.integers(0, (1 << 63) - 1)
LATENCY = st.none() | st.floats()
WORKERS = st.builds(
    worker,
    prefill_tokens=NUMBERS,
    kv_tokens=NUMBERS,
    running=NUMBERS,
    waiting=NUMBERS,
    kv_tokens_max=NUMBERS,
    ttft_ms=LATENCY,
    itl_ms=LATENCY,
)
OBSERVED = st.lists(WORKERS, min_size=1, max_size=3).flatmap(
    lambda workers: st.builds(observation, st.just(len(workers)), st.just(tuple(workers)), isl=LATENCY, queued=NUMBERS)
)


@given(
    st.sampled_from(["prefill", "decode", "aggregated", "encode"]),
    st.lists(OBSERVED, min_size=1, max_size=6),
    st.integers(0, SIZE_MAX),
    st.floats(0, 1),
)
def test_any_number_changes_the_size_by_one_at_most(
    role: str, history: list[PoolObserved], current: int, sensitivity: float
) -> None:
    proposal = size(pool(role=role), history, current, min_observations=1, down_sensitivity=sensitivity)
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
    if size(DECODE, history, down_sensitivity=sensitivity, itl_ms=itl_ms).size == 1:
        both = [worker(kv_tokens=2 * load) for load in loads[-1]]
        for one in both:
            after = [*history, observation(1, (one,))]
            assert size(DECODE, after, down_sensitivity=sensitivity, itl_ms=itl_ms).size == 1
