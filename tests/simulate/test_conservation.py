"""Every request ends exactly once and every run is reproducible, for random systems and workloads."""

import pickle
import random
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from forebay.core.routing.policies import BUILT_IN
from forebay.simulate import cluster
from forebay.simulate.outcome import summary
from forebay.simulate.settings import (
    DELAYS,
    Delays,
    LifeCycleSettings,
    Settings,
    SettingsUnusable,
    Transfer,
    validate_settings,
)
from forebay.simulate.tiers.settings import DiskTier, FleetTiers, HostTier, StoreTier, TierModel
from forebay.simulate.workload import Turn
from tests.depth import examples
from tests.simulate.scene import comparable, crash_at, fleet, latency, run, split, start_at, turn

Tier = TypeVar("Tier", bound=TierModel)

MS = 1_000
TIMES = st.integers(0, 20_000).map(lambda ms: ms * MS)
POLICIES = [
    *sorted(set(BUILT_IN) - {"direct"}),
    "kv:disagg.policy=classic,disagg.max_local_prefill_length=150",
    "kv:disagg.enforce=true,queue.threshold=0.05",
    "kv:queue.threshold=0.01",
    "kv:temperature=0.5,session_ttl_s=1",
    "kv:tier_credit=measured",
    "kv:busy.active_decode_blocks_threshold=0.4",
    "tests.simulate.scene.LeastUsed",
]


@st.composite
def workloads(draw: st.DrawFn) -> tuple[Turn, ...]:
    """Generate turns with fixed arrival times and turns that depend on one or several earlier responses."""
    turns: list[Turn] = []
    at_us = 0
    for number in range(draw(st.integers(1, 30))):
        after: tuple[int, ...] = ()
        if number and draw(st.booleans()):
            after = tuple(draw(st.sets(st.integers(max(0, number - 5), number - 1), min_size=1, max_size=3)))
        else:
            at_us += draw(st.sampled_from([0, 1, 700, 30 * MS, 2_000 * MS]))
        blocks = draw(st.integers(0, 5))
        turns.append(
            turn(
                number,
                prompt=draw(st.integers(1, 400)),
                output=draw(st.integers(1, 120)),
                block_ids=tuple(range(blocks * 100, blocks * 100 + 7)) if blocks else (),
                at_us=at_us,
                after=tuple(sorted(after)),
                delay_us=draw(st.sampled_from([0, 1, 5 * MS, 3_000 * MS])) if after else 0,
                session_id=draw(st.sampled_from(["", "a", "b"])),
            )
        )
    return tuple(turns)


DELAY = st.builds(
    latency, fixed_us=st.sampled_from([0, 0, 900, 40 * MS]), jitter_us=st.sampled_from([0, 0, 500, 9 * MS])
)
TRANSFERS = st.builds(
    Transfer,
    kv_transfer_bandwidth=st.sampled_from([0.0, 0.01, 64.0]),
    kv_transfer_latency_us=st.sampled_from([0, 0, 3_000]),
)
WAYS = st.builds(Delays, submit=DELAY, work=DELAY, tokens=DELAY, kv_events=DELAY, progress=DELAY, metrics=DELAY)
LIVES = st.builds(
    LifeCycleSettings,
    faults=st.lists(
        st.builds(
            crash_at,
            worker=st.sampled_from(["mock-0", "mock-1", "mock-2"]),
            at_us=TIMES,
            back_us=st.one_of(st.none(), TIMES),
        ),
        max_size=4,
    ).map(tuple),
    starts=st.lists(
        st.builds(start_at, at_us=TIMES, count=st.integers(1, 2), pool=st.sampled_from(["default", "prefill"])),
        max_size=2,
    ).map(tuple),
    mtbf_s=st.sampled_from([0.0, 0.0, 2.0, 30.0]),
    repair_s=st.sampled_from([0.0, 1.0]),
    cold_start_s=st.sampled_from([0.0, 0.5]),
    lease_ttl_s=st.sampled_from([0.0, 0.2, 10.0]),
)


def tier_of(kind: Callable[..., Tier]) -> st.SearchStrategy[Tier | None]:
    return st.one_of(
        st.none(),
        st.builds(
            kind,
            size=st.sampled_from(["0", "3blocks", "20blocks", "400blocks"]),
            bandwidth=st.sampled_from([0.0, 0.01, 0.5, 25.0]),
            latency_us=st.sampled_from([0, 1, 5_000]),
            filter=st.sampled_from([None, False, True]),
        ),
    )


TIERS = st.builds(FleetTiers, host=tier_of(HostTier), disk=tier_of(DiskTier), store=tier_of(StoreTier))


@st.composite
def systems(draw: st.DrawFn) -> Settings:
    sizes = {"kv_blocks": draw(st.sampled_from([6, 12, 200])), "max_num_batched_tokens": 512}
    life = draw(LIVES)
    timeout_s = draw(st.sampled_from([0.05, 3.0, 600.0, 86_400.0]))
    more: dict[str, Any] = {"delays": draw(WAYS), "timeout_s": timeout_s, "seed": draw(st.integers(0, 9))}
    if draw(st.booleans()):
        more["tiers"] = draw(TIERS)
    if draw(st.booleans()):
        chosen = fleet(draw(st.integers(1, 3)), life, sizes, **more)
    else:
        chosen = split(draw(st.integers(1, 2)), draw(st.integers(1, 2)), life, sizes, transfer=draw(TRANSFERS), **more)
    try:
        validate_settings(chosen)
    except SettingsUnusable:
        chosen = msgspec.structs.replace(chosen, life=LifeCycleSettings(mtbf_s=life.mtbf_s, repair_s=life.repair_s))
    return chosen


@given(system=systems(), turns=workloads(), name=st.sampled_from(POLICIES))
def test_every_request_ends_once_and_every_run_is_reproducible(
    system: Settings, turns: tuple[Turn, ...], name: str
) -> None:
    outcome = run(system, *turns, router=name)
    found = list(outcome.requests)
    event(f"failed: {any(one.failure for one in found)}, again: {any(one.attempts > 1 for one in found)}")
    if outcome.tiers is not None:
        event(f"loaded: {sorted(outcome.tiers.loaded)}, stale: {outcome.tiers.counters.get('stale_store', 0) > 0}")
    event(f"prefilled elsewhere: {any(one.prefiller is not None for one in found)}")
    assert sorted(one.number for one in found) == list(range(len(turns)))
    by_number = {one.number: one for one in found}
    arrived_us = [one.arrived_us for one in found]
    assert arrived_us == sorted(arrived_us)
    for one in found:
        submitted = turns[one.number]
        assert one.arrived_us >= submitted.at_us
        assert (one.prompt_tokens, one.output_tokens) == (submitted.prompt_tokens, submitted.output_tokens)
        if not one.failure:
            assert one.arrived_us < one.first_us <= one.last_us <= outcome.lasted_us
            # A later attempt computes at least the tokens that earlier attempts emitted.
            assert 0 <= one.cached_tokens < one.prompt_tokens + (one.attempts > 1)
            assert 0 <= one.host_tokens + one.disk_tokens + one.store_tokens <= one.cached_tokens
        for earlier in (by_number[number] for number in submitted.after):
            assert one.arrived_us >= max(earlier.arrived_us, earlier.last_us) + submitted.delay_us
        if not submitted.after:
            assert one.arrived_us == submitted.at_us
    figures = summary(outcome, system.workers)
    assert figures["requests"] + figures["failed"] == len(turns)
    if outcome.tiers is not None:
        assert sum(figures["tiers"]["tokens"].values()) == figures["prompt_tokens"]
    timeline = outcome.timeline
    assert sum(timeline.arrived) == len(turns)
    assert {*map(len, (timeline.queued, timeline.workers, *timeline.computed, *timeline.running))} == {
        len(timeline.arrived)
    }
    assert comparable(run(system, *turns, router=name)) == comparable(outcome)


@examples(0.6)
@given(system=systems(), turns=workloads(), name=st.sampled_from(POLICIES[:-2]))
def test_looking_ahead_changes_no_request(system: Settings, turns: tuple[Turn, ...], name: str) -> None:
    # Without load reports: these are made at the end of a step, and a policy may read them.
    outcome = run(system, *turns, router=name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.SimulatedCluster, "lookahead_us", lambda self, *, alone: 0)
        step_by_step = run(system, *turns, router=name)
    assert list(outcome.requests) == list(step_by_step.requests)


@pytest.mark.parametrize("seed", [1, 11, 15, 100])
def test_looking_ahead_changes_no_request_where_caches_are_full(seed: int) -> None:
    # Decoding evicts prompts that are sent again later, so the selection depends on the KV events received by then.
    rng = random.Random(seed)
    turns: list[Turn] = []
    at_us = 0
    for number in range(40):
        at_us += rng.choice([0, MS, 50 * MS, 300 * MS, 1_500 * MS]) + rng.randrange(MS)
        first = 100 * rng.randrange(6)
        prompt, output = rng.choice([64, 200, 330, 448]), rng.randrange(1, 250)
        turns.append(turn(number, prompt, output, block_ids=tuple(range(first, first + 7)), at_us=at_us))
    delays = DELAYS[rng.choice(["none", "kafka"])]
    system = fleet(2, sizes={"kv_blocks": rng.choice([14, 20, 30])}, delays=delays)
    outcome = run(system, *turns)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster.SimulatedCluster, "lookahead_us", lambda self, *, alone: 0)
        assert list(run(system, *turns).requests) == list(outcome.requests)


def test_settings_give_the_same_run_in_another_process() -> None:
    turns = (turn(0), turn(1, at_us=5 * MS))
    for system in (fleet(2, delays=DELAYS["kafka"]), split(1, 1, delays=DELAYS["kafka"])):
        assert comparable(run(pickle.loads(pickle.dumps(system)), *turns)) == comparable(run(system, *turns))
