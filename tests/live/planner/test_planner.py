"""A planner observes, forecasts and decides each interval; a standby takes over; decisions are derived again."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from itertools import pairwise
from operator import contains

import msgspec
import pytest

from forebay import runtime
from forebay.core.scaling.rederive import RecordedDecision
from forebay.core.scaling.state import RULES_VERSION
from forebay.core.scaling.virtual_planner import SIMULATED_TARGET
from forebay.events.codec import decode, encode
from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    PlannerPaused,
    PlannerRecord,
    PlannerSettings,
    PlannerStopped,
    PoolObserved,
    PoolSizeSet,
    ScalingDecided,
    ScalingObserved,
    SimulatedSize,
    SizesSimulated,
)
from forebay.events.topics import SCALING
from forebay.live.planner.actuator import Reached
from forebay.live.planner.planner import Planner, Simulate
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.scaling.scene import GROUP, POOL
from tests.harness.fake_runtime import FakeRuntime
from tests.harness.scaling_decisions import decisions_of
from tests.live.planner.planning import SETTINGS, FakeObserver, actuating, forecast, planner_of, planning
from tests.live.planner.topic import PATIENCE_S, append, eventually, records, until

pytestmark = pytest.mark.asyncio


def derived(log: SqliteLog) -> list[RecordedDecision]:
    """Derive all decisions of the topic again and return them."""
    events = [(one.offset, decode(SCALING, one.value)) for one in log.records(SCALING.name, 0, 0, 10_000)]
    decisions = decisions_of(events)
    assert all(one.is_verified for one in decisions if one.outcome == "applied")
    return decisions


async def test_a_load_step_scales_up_and_down_and_every_decision_is_derived_again(log: SqliteLog) -> None:
    observer = FakeObserver()
    async with actuating(log) as actuator, planning(log, planner_of(log, "p1", observer)) as planner:
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
    async with planning(log, planner_of(log, "p1", observer)):
        await until(log, ScalingObserved, 1)
    slow = PlannerSettings(pools=SETTINGS.pools, interval_s=3600.0, gpu_budget=0)
    async with actuating(log) as actuator, planning(log, planner_of(log, "p2", observer, slow)):
        await until(log, PlannerClaimed, 2)
        await append(log, PoolSizeSet(group=GROUP, pool=POOL, size=3, operator="ops"))
        await eventually(lambda: actuator.calls == [{(GROUP, POOL): 3}])
    observer.requests, observer.ready = 55, 3
    async with actuating(log) as actuator, planning(log, planner_of(log, "p3", observer)):
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
    async with planning(log, planner_of(log, "p1", FakeObserver(), slow)):
        decided = await until(log, ScalingDecided, 2)
    assert [one.pools[0].reason for one in decided] == ["no_observation", "manual"]


async def test_a_paused_planner_observes_but_changes_nothing(log: SqliteLog) -> None:
    observer = FakeObserver()
    observer.requests = 55
    await append(log, PlannerPaused(paused=True, operator="ops"))
    async with actuating(log) as actuator, planning(log, planner_of(log, "p1", observer)):
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
    async with actuating(log) as actuator, planning(log, planner_of(log, "p1", observer)):
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
        async with planning(log, planner_of(log, "p1", observer)) as first:
            await until(log, ScalingObserved, 1)
            second = await stack.enter_async_context(planning(log, planner_of(log, "p2", observer)))
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
    async with planning(log, planner_of(log, "p2", FakeObserver())):
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
        async with planning(log, planner_of(log, "p1", StallingObserver())):
            observed = await until(log, ScalingObserved, 3)
    assert min(one.interval_s for one in observed) >= 10.0


async def test_a_replaced_planner_stands_by(log: SqliteLog) -> None:
    async with planning(log, planner_of(log, "p1", FakeObserver())) as first:
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
    async with planning(log, planner):
        decisions = await until(log, ScalingDecided, 3)
    assert planner.forecast_failures >= 1
    assert {one.pools[0].reason for one in decisions[1:]} == {"no_demand"}


SIMULATING = msgspec.structs.replace(SETTINGS, method="simulate")


def simulating_planner(log: SqliteLog, simulate: Simulate, settings: PlannerSettings = SIMULATING) -> Planner:
    return Planner(log, "p1", settings, FakeObserver(), forecast, simulate)


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

    async with actuating(log) as actuator, planning(log, simulating_planner(log, simulate)):
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
    async with planning(log, planner):
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
    async with actuating(log) as actuator, planning(log, simulating_planner(log, simulate)):
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

    task = asyncio.create_task(planner.run())
    try:
        await asyncio.wait_for(simulate.began.wait(), PATIENCE_S)
        monkeypatch.setattr(log, "append", stop_and_append)
        await append(log, PoolSizeSet(group=GROUP, pool=POOL, size=3, operator="ops"))
        await asyncio.wait_for(task, PATIENCE_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert records(log, PlannerStopped)


async def test_a_planner_whose_simulation_is_replaced_stands_by(log: SqliteLog) -> None:
    simulate = EndlessSimulation()
    async with planning(log, simulating_planner(log, simulate)) as planner:
        await asyncio.wait_for(simulate.began.wait(), PATIENCE_S)
        slow = msgspec.structs.replace(SIMULATING, interval_s=3600.0)
        await append(log, PlannerClaimed(planner_id="p2", rules_version=RULES_VERSION, settings=slow))
        await eventually(lambda: not planner.is_active)
    assert not records(log, PlannerStopped)
    assert not records(log, SizesSimulated)


async def test_method_simulate_needs_a_function_that_simulates(log: SqliteLog) -> None:
    with pytest.raises(ValueError, match="simulate"):
        Planner(log, "p1", SIMULATING, FakeObserver(), forecast)
