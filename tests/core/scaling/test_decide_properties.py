"""Properties of the planner's decisions for any settings and observations."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.scaling.decide import decide
from forebay.core.scaling.state import HISTORY_MAX, PlannerState
from forebay.events.codec import decode, encode
from forebay.events.scaling import PlannerSettings, PoolDemand, PoolObserved, PoolScaling, ScalingDecided
from forebay.events.topics import SCALING
from tests.core.scaling import profiles
from tests.core.scaling.loop import Loop
from tests.core.scaling.records import GROUP, S
from tests.depth import examples

SIZES_MAX = 12
ROLES = st.sampled_from(["prefill", "decode", "aggregated"])
RATE = st.floats(0, 400) | st.floats(0, 1e300)
TOKENS = st.floats(0, 20_000) | st.floats(0, 1e300)
LATENCY = st.none() | st.floats(0, 5_000) | st.floats(0, 1e300)
COUNT = st.integers(0, 5_000) | st.integers(0, (1 << 63) - 1)

POOLS = st.lists(
    st.builds(
        lambda role, least, more, gpus, startup_s: {
            "role": role,
            "min_size": least,
            "max_size": least + more,
            "gpus_per_worker": gpus,
            "startup_s": startup_s,
        },
        ROLES,
        st.integers(0, 3),
        st.integers(0, SIZES_MAX - 3),
        st.sampled_from([1, 2, 4]),
        st.sampled_from([0.0, 25.0]),
    ),
    min_size=1,
    max_size=3,
).map(lambda found: tuple(profiles.pool(pool=f"p{index}", **fields) for index, fields in enumerate(found)))

SETTINGS = st.builds(
    PlannerSettings,
    pools=POOLS,
    method=st.sampled_from(["throughput", "load", "both"]),
    equations=st.sampled_from(["plain", "corrected"]),
    ttft_ms=st.sampled_from([10.0, 200.0, 1_000.0]),
    itl_ms=st.sampled_from([5.0, 30.0, 60.0]),
    gpu_budget=st.sampled_from([0, 2, 7, 16]),
    min_gpus=st.sampled_from([0, 3, 9]),
    max_change=st.sampled_from([1, 4, 100]),
    min_observations=st.integers(1, 3),
    cooldown_s=st.sampled_from([0.0, 15.0, 40.0]),
    action_timeout_s=st.sampled_from([15.0, 1_000.0]),
)

WORKERS = st.lists(
    st.builds(
        profiles.worker,
        prefill_tokens=COUNT,
        kv_tokens=COUNT,
        running=COUNT,
        waiting=COUNT,
        ttft_ms=LATENCY,
        itl_ms=LATENCY,
    ),
    max_size=3,
).map(tuple)


@dataclass
class Round:
    """What happens to each pool in one interval."""

    observed: list[PoolObserved | None]
    wanted: list[PoolDemand | None]
    manual: list[int | None]
    reached: int | None
    replies: bool


def pool_observed(ready: int, workers: tuple[object, ...], complete: bool, **fields: object) -> PoolObserved:
    return profiles.observation(len(workers) if complete else ready, workers, **fields)  # type: ignore[arg-type]


OBSERVED = st.builds(
    pool_observed,
    st.integers(0, SIZES_MAX),
    WORKERS,
    st.booleans(),
    requests=COUNT,
    queued=COUNT,
    isl=LATENCY,
    osl=LATENCY,
    ttft_ms=LATENCY,
    itl_ms=LATENCY,
    kv_hit_rate=st.none() | st.floats(0, 1),
)
DEMAND = st.builds(profiles.demand, RATE, TOKENS, TOKENS, st.floats(0, 1))
ROUNDS = st.builds(
    Round,
    st.lists(st.just(None) | OBSERVED | OBSERVED | OBSERVED, min_size=3, max_size=3),
    st.lists(st.none() | DEMAND | DEMAND | DEMAND, min_size=3, max_size=3),
    st.lists(st.sampled_from([None] * 9 + [0, 5, 20]), min_size=3, max_size=3),
    st.none() | st.none() | st.integers(0, SIZES_MAX),
    st.sampled_from([True, True, True, False]),
)


Record = TypeVar("Record", PoolObserved, PoolDemand)


def named(one: Record | None, pool: PoolScaling) -> list[Record]:
    return [] if one is None else [msgspec.structs.replace(one, pool=pool.pool)]


def play(loop: Loop, pools: tuple[PoolScaling, ...], one: Round) -> ScalingDecided:
    for pool, size in zip(pools, one.manual, strict=False):
        if (GROUP, pool.pool) in loop.state.manual or size is not None:
            loop.set_size(pool, size)
    loop.observe(*(found for pool, part in zip(pools, one.observed, strict=False) for found in named(part, pool)))
    loop.forecast(*(found for pool, part in zip(pools, one.wanted, strict=False) for found in named(part, pool)))
    decision = loop.decide()
    if one.replies:
        loop.reply({} if one.reached is None else {(GROUP, pools[0].pool): one.reached})
    return decision


@given(SETTINGS, st.lists(ROUNDS, max_size=8))
def test_decisions_respect_operators_limits_budget_and_cool_down(
    settings: PlannerSettings, rounds: list[Round]
) -> None:
    loop = Loop(settings)
    last: dict[str, tuple[bool, int]] = {}
    for each in rounds:
        decision = play(loop, settings.pools, each)
        gpus = 0
        grown = False
        for pool, one in zip(settings.pools, decision.pools, strict=True):
            manual = loop.state.manual.get((GROUP, pool.pool))
            if manual is not None and one.reason not in {"in_progress", "no_observation"}:
                assert (one.to_size, one.reason) == (manual, "manual")
            gpus += pool.gpus_per_worker * one.to_size
            if one.to_size == one.from_size:
                continue
            up = one.to_size > one.from_size
            if one.reason != "manual":
                grown = grown or up
                low, high = sorted([one.from_size, one.to_size])
                assert pool.min_size <= high and low <= pool.max_size
                assert one.to_size <= pool.max_size if up else one.to_size >= pool.min_size
                if pool.pool in last and last[pool.pool][0] != up:
                    assert decision.at_us - last[pool.pool][1] >= settings.cooldown_s * S
            last[pool.pool] = (up, decision.at_us)
        assert not (grown and settings.gpu_budget) or gpus <= settings.gpu_budget
    assert_derived_from_records(loop)


def assert_derived_from_records(loop: Loop) -> None:
    """Assert that the decoded records alone lead to the same decisions and the same state."""
    again = PlannerState()
    for offset, event in enumerate(loop.records):
        if isinstance(event, ScalingDecided):
            derived = decide(again)
            assert derived is not None
            assert msgspec.structs.replace(derived, at_us=event.at_us) == event
        again.apply(offset, decode(SCALING, encode(SCALING, event)))
    assert again == loop.state


def reversals(sizes: list[int]) -> int:
    """Count the changes of direction."""
    moves = [later > now for now, later in pairwise(sizes) if later != now]
    return sum(now != later for now, later in pairwise(moves))


def settled(
    loop: Loop, pools: tuple[PoolScaling, ...], observe: Callable[[], list[PoolObserved]], wanted: list[PoolDemand]
) -> list[list[int]]:
    """Play rounds in which the workers follow the decisions at once. Return the sizes of each pool over time."""
    sizes = []
    for _ in range(HISTORY_MAX + 2 * SIZES_MAX):
        loop.observe(*observe())
        loop.forecast(*wanted)
        sizes.append([loop.state.size(pool) or 0 for pool in pools])
        loop.decide()
        loop.reply()
    return [list(one) for one in zip(*sizes, strict=True)]


@given(SETTINGS, st.lists(st.integers(0, SIZES_MAX), min_size=3, max_size=3), st.lists(DEMAND, min_size=3, max_size=3))
@examples(0.3)
def test_a_constant_forecast_ends_in_constant_sizes_with_one_reversal_at_most(
    settings: PlannerSettings, starts: list[int], wanted: list[PoolDemand]
) -> None:
    loop = Loop(msgspec.structs.replace(settings, method="throughput"))
    forecast = [found for pool, one in zip(settings.pools, wanted, strict=False) for found in named(one, pool)]
    ready = dict(zip([pool.pool for pool in settings.pools], starts, strict=False))

    def observe() -> list[PoolObserved]:
        sizes = [(pool.pool, loop.state.sizes.get((GROUP, pool.pool), ready[pool.pool])) for pool in settings.pools]
        return [PoolObserved(group=GROUP, pool=name, ready=size) for name, size in sizes]

    for sizes in settled(loop, settings.pools, observe, forecast):
        assert reversals(sizes) <= 1, sizes
        assert len(set(sizes[-SIZES_MAX:])) == 1, sizes


@given(SETTINGS, st.integers(1, SIZES_MAX), st.integers(0, 40_000), st.floats(1, 300), st.floats(0.0001, 1))
@examples(0.3)
def test_a_constant_load_ends_in_a_constant_size_with_one_reversal_at_most(
    settings: PlannerSettings, start: int, load: int, alone_ms: float, ms_per_token: float
) -> None:
    (first, *_) = settings.pools
    loop = Loop(msgspec.structs.replace(settings, pools=(first,), method="load", down_sensitivity=1.0))

    def observe() -> list[PoolObserved]:
        size = loop.state.sizes.get((GROUP, first.pool), start)
        tokens = load // max(size, 1)
        latency = alone_ms + ms_per_token * tokens
        one = profiles.worker(prefill_tokens=tokens, kv_tokens=tokens, ttft_ms=latency, itl_ms=latency)
        return named(profiles.observation(size, (one,) * size, requests=1), first)

    (sizes,) = settled(loop, (first,), observe, [])
    assert reversals(sizes) <= 1, sizes
    assert len(set(sizes[-SIZES_MAX:])) == 1, sizes
