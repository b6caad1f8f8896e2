"""Planners observe, forecast and decide, standbys take over, and actuators execute each valid decision once."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from itertools import pairwise
from operator import contains
from typing import Any

import msgspec
import pytest

from forebay import runtime
from forebay.core.scaling.rederive import RecordedDecision
from forebay.core.scaling.state import RULES_VERSION
from forebay.core.scaling.virtual_planner import SIMULATED_TARGET
from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.decisions import OwnerClaimed, SnapshotTaken
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.groups import GroupPlaced
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    PlannerPaused,
    PlannerRecord,
    PlannerSettings,
    PlannerStopped,
    PoolObserved,
    PoolScaling,
    PoolSizeSet,
    ReachedSize,
    ScalingApplied,
    ScalingDecided,
    ScalingObserved,
    ScalingRefused,
    SimulatedSize,
    SizesSimulated,
)
from forebay.events.topics import DECISIONS, FLEET, GROUPS, METRICS, PROGRESS, REQUESTS, SCALING
from forebay.live.owner.owner import Owner
from forebay.live.planner.actuator import Reached
from forebay.live.planner.observer import PoolObserver
from forebay.live.planner.planner import Planner, Simulate
from forebay.transport.base import Draft, Log, LogError, Wake
from forebay.transport.sqlite.log import SqliteLog
from tests.core.scaling.scene import GROUP, POOL, claimed, decided, observed, routed
from tests.harness.fake_runtime import FakeRuntime
from tests.harness.scaling_decisions import decisions_of
from tests.live.planning import (
    PATIENCE_S,
    SETTINGS,
    FakeObserver,
    RecordingActuator,
    actuating,
    append,
    eventually,
    forecast,
    planner_of,
    planning,
    records,
    until,
)
from tests.live.shared import PREFIX, LateTail, SharedLog, background, flush
from tests.system import MODEL, System, submitted


def derived(log: SqliteLog) -> list[RecordedDecision]:
    """Derive all decisions of the topic again and return them."""
    events = [(one.offset, decode(SCALING, one.value)) for one in log.records(SCALING.name, 0, 0, 10_000)]
    decisions = decisions_of(events)
    assert all(one.is_verified for one in decisions if one.outcome == "applied")
    return decisions


async def test_a_load_step_scales_up_and_down_and_every_decision_is_derived_again(log: SqliteLog) -> None:
    observer = FakeObserver()
    async with actuating(log) as actuator, planning(planner_of(log, "p1", observer)) as planner:
        for requests, size in ((55, 6), (15, 2)):
            observer.requests = requests
            await eventually(partial(contains, actuator.calls, {(GROUP, POOL): size}))
            observer.ready = size
        assert planner.is_active
    assert not planner.is_active
    assert records(log, PlannerStopped)
    decisions = derived(log)
    changed = [one.decided.pools[0] for one in decisions if one.replies]
    assert [(one.from_size, one.to_size, one.reason) for one in changed] == [(2, 6, "scale_up"), (6, 2, "scale_down")]


async def test_a_manual_size_is_decided_at_once_and_kept_until_it_is_released(log: SqliteLog) -> None:
    observer = FakeObserver()
    async with planning(planner_of(log, "p1", observer)):
        await until(log, ScalingObserved, 1)
    slow = PlannerSettings(pools=SETTINGS.pools, interval_s=3600.0, gpu_budget=0)
    async with actuating(log) as actuator, planning(planner_of(log, "p2", observer, slow)):
        await until(log, PlannerClaimed, 2)
        await append(log, PoolSizeSet(group=GROUP, pool=POOL, size=3, operator="ops"))
        await eventually(lambda: actuator.calls == [{(GROUP, POOL): 3}])
    observer.requests, observer.ready = 55, 3
    async with actuating(log) as actuator, planning(planner_of(log, "p3", observer)):
        await until(log, ScalingObserved, 4)
        assert actuator.calls == []
        await append(log, PoolSizeSet(group=GROUP, pool=POOL, size=None, operator="ops"))
        await eventually(lambda: {(GROUP, POOL): 6} in actuator.calls)
    derived(log)


async def test_a_command_right_after_a_decision_is_decided_at_once(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    to_log = log.append
    command = PoolSizeSet(group=GROUP, pool=POOL, size=3, operator="ops")

    async def append_with_command(drafts: Sequence[Draft]) -> list[int]:
        if isinstance(decode(SCALING, drafts[0].value), ScalingDecided):
            monkeypatch.setattr(log, "append", to_log)
            drafts = [*drafts, Draft(SCALING.name, 0, encode(SCALING, command))]
        return (await to_log(drafts))[:1]

    monkeypatch.setattr(log, "append", append_with_command)
    slow = msgspec.structs.replace(SETTINGS, interval_s=3600.0)
    async with planning(planner_of(log, "p1", FakeObserver(), slow)):
        decided = await until(log, ScalingDecided, 2)
    assert [one.pools[0].reason for one in decided] == ["no_observation", "manual"]


async def test_a_paused_planner_observes_but_changes_nothing(log: SqliteLog) -> None:
    observer = FakeObserver()
    observer.requests = 55
    await append(log, PlannerPaused(paused=True, operator="ops"))
    async with actuating(log) as actuator, planning(planner_of(log, "p1", observer)):
        await until(log, ScalingObserved, 3)
        assert {one.pools[0].reason for one in records(log, ScalingDecided)} <= {"paused", "no_observation"}
        assert actuator.calls == []
        await append(log, PlannerPaused(paused=False, operator="ops"))
        await eventually(lambda: {(GROUP, POOL): 6} in actuator.calls)
    derived(log)


@pytest.mark.parametrize("reply", ["part", "failed"])
async def test_the_planner_decides_once_per_interval_if_the_actuator_falls_short(log: SqliteLog, reply: str) -> None:
    observer = FakeObserver()
    observer.requests = 55
    async with actuating(log) as actuator, planning(planner_of(log, "p1", observer)):
        if reply == "part":
            actuator.reaches = Reached({(GROUP, POOL): 3}, "the program ends at once")
        else:
            actuator.fails = "no space left"
        await eventually(lambda: len(actuator.calls) >= 3)
    written = [one for one in records(log, PlannerRecord) if isinstance(one, ScalingObserved | ScalingDecided)]
    pairs = [(type(first), type(second)) for first, second in pairwise(written)]
    assert (ScalingDecided, ScalingDecided) not in pairs, "each decision follows an observation of its own"


async def test_a_standby_takes_over_from_a_planner_that_stops(log: SqliteLog) -> None:
    observer = FakeObserver()
    async with AsyncExitStack() as stack:
        async with planning(planner_of(log, "p1", observer)) as first:
            await until(log, ScalingObserved, 1)
            second = await stack.enter_async_context(planning(planner_of(log, "p2", observer)))
            await until(log, ScalingObserved, 3)
            assert (first.is_active, second.is_active) == (True, False)
        await eventually(lambda: second.is_active)
    assert [one.planner_id for one in records(log, PlannerClaimed)] == ["p1", "p2"]
    derived(log)


async def test_a_standby_takes_over_from_a_planner_that_falls_silent(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("forebay.live.planner.planner.SILENT_MORE_S", 0.0)
    await append(log, PlannerClaimed(planner_id="p1", rules_version=RULES_VERSION, settings=SETTINGS))
    async with planning(planner_of(log, "p2", FakeObserver())):
        decision = (await until(log, ScalingDecided, 2))[-1]
    assert decision.planner_epoch == 1
    derived(log)


async def test_an_observation_has_the_length_of_its_interval_also_after_a_stall(log: SqliteLog) -> None:
    clock = FakeRuntime()

    class StallingObserver(FakeObserver):
        def observe(self) -> tuple[PoolObserved, ...]:
            clock.monotonic_shift_s += 10.0
            return super().observe()

    with runtime.use(clock):
        async with planning(planner_of(log, "p1", StallingObserver())):
            observed = await until(log, ScalingObserved, 3)
    assert min(one.interval_s for one in observed) >= 10.0


async def test_a_replaced_planner_stands_by(log: SqliteLog) -> None:
    async with planning(planner_of(log, "p1", FakeObserver())) as first:
        await until(log, ScalingObserved, 1)
        await append(log, PlannerClaimed(planner_id="p2", rules_version=RULES_VERSION, settings=SETTINGS))
        before = len(records(log, ScalingDecided))
        await eventually(lambda: not first.is_active)
    assert not records(log, PlannerStopped), "only an active planner writes that it stops"
    assert len(records(log, ScalingDecided)) <= before + 1, "one decision may have been in flight during the claim"


async def test_a_failing_predictor_leaves_the_planner_running(log: SqliteLog) -> None:
    def failing(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
        raise ZeroDivisionError

    planner = Planner(log, "p1", SETTINGS, FakeObserver(), failing)
    async with planning(planner):
        decisions = await until(log, ScalingDecided, 3)
    assert planner.forecast_failures >= 1
    assert {one.pools[0].reason for one in decisions[1:]} == {"no_demand"}


SIMULATING = msgspec.structs.replace(SETTINGS, method="simulate")


def simulating_planner(log: SqliteLog, simulate: Simulate) -> Planner:
    return planner_of(log, "p1", FakeObserver(), SIMULATING, simulate)


def sizes(**attained: float) -> tuple[SimulatedSize, ...]:
    """Return simulated sizes, for example `sizes(w3=0.9)` for 3 workers."""
    return tuple(
        SimulatedSize(group=GROUP, pool=POOL, size=int(name[1:]), attained=share) for name, share in attained.items()
    )


async def test_method_simulate_decides_the_smallest_simulated_size_that_attains_the_target(log: SqliteLog) -> None:
    demands: list[DemandForecast] = []

    async def simulate(demand: DemandForecast, target: float) -> tuple[SimulatedSize, ...]:
        demands.append(demand)
        return sizes(w7=1.0, w5=target, w4=target - 0.01)

    async with actuating(log) as actuator, planning(simulating_planner(log, simulate)):
        await eventually(lambda: actuator.calls == [{(GROUP, POOL): 5}])
    simulated = records(log, SizesSimulated)[0]
    forecasts = [
        (one.offset, event)
        for one in log.records(SCALING.name, 0, 0, 10_000)
        if isinstance(event := decode(SCALING, one.value), DemandForecast)
    ]
    assert (simulated.forecast, simulated.target) == (forecasts[0][0], SIMULATED_TARGET)
    assert demands[0].pools == forecasts[0][1].pools
    changed = [one.decided.pools[0] for one in derived(log) if one.replies]
    assert [(one.from_size, one.to_size, one.reason) for one in changed] == [(2, 5, "scale_up")]


async def test_after_a_failed_simulation_or_forecast_no_older_simulation_counts(log: SqliteLog) -> None:
    rounds = iter(["simulated", "failed simulation", "simulated", "failed forecast"])
    now = ""

    def predict(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
        nonlocal now
        now = next(rounds, "failed forecast")
        if now == "failed forecast":
            raise ZeroDivisionError
        return forecast(history, observed)

    async def simulate(demand: DemandForecast, target: float) -> tuple[SimulatedSize, ...]:
        if now == "failed simulation":
            raise ZeroDivisionError
        return sizes(w2=1.0)

    planner = Planner(log, "p1", SIMULATING, FakeObserver(), predict, simulate)
    async with planning(planner):
        decisions = await until(log, ScalingDecided, 6)
    assert [one.pools[0].reason for one in decisions[1:6]] == ["hold", "no_demand", "hold", "no_demand", "no_demand"]
    assert planner.simulation_failures == 1
    assert all(one.is_verified for one in derived(log))


class EndlessSimulation:
    """A simulation that ends only if it is cancelled."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.cancelled = False

    async def __call__(self, demand: DemandForecast, target: float) -> tuple[SimulatedSize, ...]:
        self.began.set()
        try:
            await asyncio.Event().wait()
        finally:
            self.cancelled = True
        return ()


async def test_commands_and_the_end_of_the_planner_do_not_wait_for_a_simulation(log: SqliteLog) -> None:
    simulate = EndlessSimulation()
    async with actuating(log) as actuator, planning(simulating_planner(log, simulate)):
        await asyncio.wait_for(simulate.began.wait(), PATIENCE_S)
        await append(log, PoolSizeSet(group=GROUP, pool=POOL, size=3, operator="ops"))
        await eventually(lambda: actuator.calls == [{(GROUP, POOL): 3}])
    assert simulate.cancelled
    assert records(log, PlannerStopped)
    assert not records(log, SizesSimulated)


async def test_a_stop_while_a_decision_is_written_ends_a_simulation(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulate = EndlessSimulation()
    planner, to_log = simulating_planner(log, simulate), log.append

    async def stop_and_append(drafts: Sequence[Draft]) -> list[int]:
        if isinstance(decode(SCALING, drafts[0].value), ScalingDecided):
            planner.stop()
        return await to_log(drafts)

    async with background(planner.run()) as running:
        await asyncio.wait_for(simulate.began.wait(), PATIENCE_S)
        monkeypatch.setattr(log, "append", stop_and_append)
        await append(log, PoolSizeSet(group=GROUP, pool=POOL, size=3, operator="ops"))
        await asyncio.wait_for(running, PATIENCE_S)
    assert records(log, PlannerStopped)


async def test_a_planner_whose_simulation_is_replaced_stands_by(log: SqliteLog) -> None:
    simulate = EndlessSimulation()
    async with planning(simulating_planner(log, simulate)) as planner:
        await asyncio.wait_for(simulate.began.wait(), PATIENCE_S)
        slow = msgspec.structs.replace(SIMULATING, interval_s=3600.0)
        await append(log, PlannerClaimed(planner_id="p2", rules_version=RULES_VERSION, settings=slow))
        await eventually(lambda: not planner.is_active)
    assert not records(log, PlannerStopped)
    assert not records(log, SizesSimulated)


async def test_method_simulate_needs_a_function_that_simulates(log: SqliteLog) -> None:
    with pytest.raises(ValueError, match="simulate"):
        Planner(log, "p1", SIMULATING, FakeObserver(), forecast)


# An actuator executes each valid decision once and records the result

KEY, OTHER = (GROUP, POOL), (GROUP, "other")


async def test_a_decision_is_executed_once_also_after_a_restart(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    await append(log, claimed(), observed(0, 2), decided(0, 1, 2, 6))
    async with actuating(log, actuator):
        (reply,) = await until(log, ScalingApplied, 1)
        assert (reply.decision, reply.actuator, reply.message) == (2, "recording", "")
        assert reply.pools == (ReachedSize(group=GROUP, pool=POOL, size=6),)
        await append(log, decided(0, 3, 6, 4))
        await until(log, ScalingApplied, 2)
    async with actuating(log, actuator):
        await append(log, decided(0, 5, 4, 5))
        await until(log, ScalingApplied, 3)
    assert actuator.calls == [{KEY: 6}, {KEY: 4}, {KEY: 5}]


async def test_a_stale_decision_is_refused_and_not_executed(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    await append(log, claimed(), observed(0, 2))
    async with actuating(log, actuator):
        await append(log, decided(0, 1, 2, 3))
        await until(log, ScalingApplied, 1)
        await append(log, PoolSizeSet(group=GROUP, pool=POOL, size=9), decided(0, 3, 3, 6))
        (refused,) = await until(log, ScalingRefused, 1)
    assert (refused.decision, refused.reason) == (5, "stale")
    assert actuator.calls == [{KEY: 3}]


async def test_old_stale_decisions_are_not_refused_again(log: SqliteLog) -> None:
    await append(log, claimed(), decided(0, 0, 2, 6), claimed("p2"), decided(0, 1, 2, 9), decided(2, 2, 6, 7))
    async with actuating(log, RecordingActuator()):
        await until(log, ScalingApplied, 1)
    assert records(log, ScalingRefused) == []


async def test_actuators_of_one_decision_reply_for_their_own_pools(log: SqliteLog) -> None:
    """An actuator without a pool of the decision does nothing, and does not reply."""
    mine, other = RecordingActuator(), RecordingActuator(pools=frozenset({OTHER}))
    idle = RecordingActuator(pools=frozenset({(GROUP, "third")}))
    other.fails = "no space left"
    first = decided(0, 1, 2, 6)
    second = msgspec.structs.replace(first.pools[0], pool=OTHER[1])
    both = msgspec.structs.replace(first, pools=(*first.pools, second))
    await append(log, claimed(), observed(0, 2))
    async with actuating(log, idle), actuating(log, mine), actuating(log, other):
        await append(log, both)
        (reply,) = await until(log, ScalingApplied, 1)
        (refused,) = await until(log, ScalingRefused, 1)
        await append(log, msgspec.structs.replace(both, planner_epoch=9))
        stale = (await until(log, ScalingRefused, 3))[1:]
    assert (mine.calls, other.calls, idle.calls) == ([{KEY: 6}], [{OTHER: 6}], [])
    assert [one.pool for one in reply.pools] == [POOL]
    assert [one.pool for one in refused.pools] == [OTHER[1]]
    assert (refused.decision, refused.reason, refused.message) == (2, "failed", "no space left")
    assert len(records(log, ScalingRefused)) == 3
    assert {(one.reason, one.pools[0].pool) for one in stale} == {("stale", POOL), ("stale", OTHER[1])}


async def test_a_partial_success_names_the_reached_size_and_the_cause(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    actuator.reaches = Reached({KEY: 4}, "2 workers do not start")
    await append(log, claimed(), observed(0, 2), decided(0, 1, 2, 6))
    async with actuating(log, actuator):
        (reply,) = await until(log, ScalingApplied, 1)
    assert (reply.pools[0].size, reply.message) == (4, "2 workers do not start")


async def test_advisory_decisions_and_undecodable_records_have_no_effect(log: SqliteLog) -> None:
    actuator = RecordingActuator()
    advisory = msgspec.structs.replace(decided(0, 1, 2, 6), advisory=True)
    await append(log, claimed(), observed(0, 2), advisory)
    async with actuating(log, actuator):
        await log.append([Draft("scaling", 0, b"{")])
        await append(log, decided(0, 2, 2, 3))
        await until(log, ScalingApplied, 1)
    assert actuator.calls == [{KEY: 3}]


# The planner's observer follows the topics of groups, from any moment of their history

SERVED = PoolScaling(group=MODEL, pool="default")


class TrimmedLog(SharedLog):
    """A log of which retention removed the records before these offsets of partition 0."""

    def __init__(self, log: Log, begins: Mapping[str, int]) -> None:
        super().__init__(log)
        self._begins = begins

    async def begin(self, topic: str, partition: int) -> int:
        return self._begins.get(topic, 0)


async def place(log: SqliteLog, group: str = MODEL, partition: int = 0) -> None:
    await log.append([Draft(GROUPS.name, 0, encode(GROUPS, GroupPlaced(group=group, partition=partition)))])


@asynccontextmanager
async def served(log: SqliteLog, *names: str) -> AsyncIterator[tuple[System, Owner]]:
    """Run a placed group with two workers that has served requests."""
    await place(log)
    async with System(log).started(2) as system, system.owned(snapshot_every=5, fleet=2) as owner:
        for name in names:
            await serve(system, name)
        yield system, owner


async def serve(system: System, name: str) -> None:
    """Serve a request of four output tokens."""
    await system.serve(name, PREFIX, max_tokens=4)


class Observed:
    """Everything that an observer has observed so far."""

    def __init__(self, observer: PoolObserver) -> None:
        self.observer = observer
        self.seen: list[PoolObserved] = []

    async def until(self, condition: Callable[[list[PoolObserved]], object]) -> list[PoolObserved]:
        """Observe until the observations meet the condition."""

        def is_met() -> object:
            self.seen += self.observer.observe()
            return condition(self.seen)

        await eventually(is_met)
        return self.seen


@asynccontextmanager
async def observing(log: Log, *pools: PoolScaling) -> AsyncIterator[Observed]:
    observer = PoolObserver(log, pools or (SERVED,))
    async with background(observer.run()):
        yield Observed(observer)


async def test_requests_and_workers_are_observed(log: SqliteLog) -> None:
    async with served(log) as (system, _), observing(SharedLog(log)) as observed:
        idle = (await observed.until(lambda seen: seen))[-1]
        assert (idle.ready, idle.requests, idle.isl) == (2, 0, None)
        assert [one.worker_id for one in idle.workers] == ["w0", "w1"]
        await serve(system, "r")
        seen = await observed.until(lambda seen: any(one.osl for one in seen))
        assert [(one.requests, one.isl) for one in seen if one.requests] == [(1, 12)]
        assert [one.osl for one in seen if one.osl] == [4]
        assert sum(one.ttft_ms is not None for one in seen) == 1
        assert sum(one.itl_ms is not None for one in seen) == 1
        await system.stop_worker("w0")
        await observed.until(lambda seen: [one.worker_id for one in seen[-1].workers] == ["w1"])
        assert observed.seen[-1].ready == 1
        assert observed.observer.forgotten == observed.observer.undecodable == 0


async def test_an_observer_that_starts_late_knows_the_workers_and_counts_only_new_requests(log: SqliteLog) -> None:
    async with served(log, *(f"r{number}" for number in range(8))) as (system, _):
        await eventually(lambda: system.decisions(SnapshotTaken))
        async with observing(TrimmedLog(log, {FLEET.name: 2, METRICS.name: 1})) as observed:
            assert (await observed.until(lambda seen: seen))[-1].ready == 2
            await serve(system, "late")
            seen = await observed.until(lambda seen: any(one.osl for one in seen))
            assert sum(one.requests for one in seen) == 1


async def test_a_request_in_flight_at_the_start_has_no_time_to_first_token(unproven_log: SqliteLog) -> None:
    log, system = unproven_log, System(unproven_log)
    await place(log)
    spec = WorkerSpec(
        worker_id="w", model=MODEL, block_size=4, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=64
    )
    ids: dict[str, Any] = {"request_id": "r", "attempt": 1, "worker_id": "w", "worker_epoch": 0, "owner_epoch": 0}
    system.append(FLEET, WorkerJoined(owner_epoch=0, spec=spec, lease="l", slot=0, from_offset=0))
    system.append(REQUESTS, submitted("r", PREFIX, max_tokens=10))
    system.append(DECISIONS, OwnerClaimed(owner_id="o", core_version=CORE_VERSION), routed("r", "w"))
    await flush(log)
    async with observing(log) as observed:
        await observed.until(lambda seen: seen)
        finished = RequestFinished(**ids, finish_reason="stop", output_tokens=9)
        system.append(PROGRESS, FirstTokenEmitted(**ids), finished)
        seen = await observed.until(lambda seen: any(one.osl for one in seen))
        assert [one.osl for one in seen if one.osl] == [9]
        assert not any(one.requests or one.ttft_ms is not None for one in seen)


async def test_an_interval_that_was_not_followed_from_its_beginning_is_not_observed(log: SqliteLog) -> None:
    tails: dict[str, int] = {}

    class NotingLog(SharedLog):
        def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> LateTail:
            tails[topic] = offset
            return super().tail(topic, partition, offset, wake)

    async with served(log, "before") as (system, _):
        ends = {topic.name: log.next_offset(topic.name, 0) for topic in (REQUESTS, FLEET)}
        async with observing(NotingLog(log)) as observed:
            await eventually(lambda: PROGRESS.name in tails)
            assert {topic: tails[topic] for topic in ends} == ends
            await serve(system, "r")
            assert observed.observer.observe() == ()
            await observed.until(lambda seen: seen)
        assert observed.observer.observe() == (), "nobody follows the topics any more"


async def test_a_group_is_observed_once_it_is_placed(log: SqliteLog) -> None:
    other = PoolScaling(group="other", pool="default")
    async with served(log, "r"), observing(log, other, SERVED) as observed:
        seen = await observed.until(lambda seen: seen)
        assert {one.group for one in seen} == {MODEL}
        await place(log, "other", 1)
        await observed.until(lambda seen: seen[-1].group == MODEL and len(seen) > 1 and seen[-2].group == "other")
        assert [one.ready for one in observed.seen[-2:]] == [0, 2]


async def test_records_that_do_not_decode_are_counted(log: SqliteLog) -> None:
    async with served(log) as (system, _), observing(log) as observed:
        await observed.until(lambda seen: seen)
        await log.append([Draft(topic.name, 0, b"?") for topic in (REQUESTS, PROGRESS, METRICS)])
        await serve(system, "r")
        await observed.until(lambda seen: any(one.osl for one in seen))
        await eventually(lambda: observed.observer.undecodable == 3)


async def test_a_log_without_the_beginning_of_the_fleet_is_refused(log: SqliteLog) -> None:
    async with served(log):
        with pytest.raises(LogError, match="fleet/0 begins at offset 1"):
            await PoolObserver(TrimmedLog(log, {FLEET.name: 1}), (SERVED,)).run()


async def test_a_log_that_fails_ends_the_observer(log: SqliteLog) -> None:
    class FailingLog(SharedLog):
        async def end(self, topic: str, partition: int) -> int:
            if topic == PROGRESS.name:
                raise LogError("Kafka cannot be read")
            return await super().end(topic, partition)

    async with served(log):
        with pytest.raises(LogError, match="Kafka"):
            await PoolObserver(FailingLog(log), (SERVED,)).run()
