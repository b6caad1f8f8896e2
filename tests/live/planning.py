"""The topic `scaling` of a log in memory, and the parts of a planner: fixed demand, and a noting actuator."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TypeVar

from forebay.core.scaling.state import PoolKey
from forebay.events.base import Event
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.scaling import (
    DemandForecast,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PrefillPoint,
    ScalingEvent,
    ScalingObserved,
)
from forebay.events.topics import SCALING
from forebay.live.planner.actuator import ActuatorError, ActuatorService, Reached
from forebay.live.planner.planner import Planner, Simulate
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.scaling.scene import GROUP, POOL
from tests.live.shared import background

PATIENCE_S = 50.0
RPS_PER_WORKER = 10.0
ISL = 100.0
PREFILL = (PrefillPoint(isl=ISL, ttft_ms=10, tokens_per_s=ISL * RPS_PER_WORKER),)
SETTINGS = PlannerSettings(
    pools=(PoolScaling(group=GROUP, pool=POOL, role="prefill", startup_s=0, prefill=PREFILL),),
    interval_s=0.02,
    gpu_budget=0,
)

EventT = TypeVar("EventT", bound=Event)


async def append(log: SqliteLog, *events: ScalingEvent) -> list[int]:
    return await log.append([Draft(SCALING.name, 0, encode(SCALING, event)) for event in events])


def records(log: SqliteLog, kind: type[EventT]) -> list[EventT]:
    found = []
    for record in log.records(SCALING.name, 0, 0, 10_000):
        with contextlib.suppress(DecodeError):
            found.append(decode(SCALING, record.value))
    return [event for event in found if isinstance(event, kind)]


async def eventually(condition: Callable[[], object]) -> None:
    """Run other tasks until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions are about several objects
            await asyncio.sleep(0.001)


async def until(log: SqliteLog, kind: type[EventT], count: int) -> list[EventT]:
    """Wait until the topic has `count` records of one kind, and return them."""
    await eventually(lambda: len(records(log, kind)) >= count)
    return records(log, kind)


class RecordingActuator:
    """Actuator that records its calls and reaches the sizes of `reaches`, by default those requested."""

    def __init__(self, *, pools: frozenset[PoolKey] = frozenset({(GROUP, POOL)})) -> None:
        self.name = "recording"
        self.pools = pools
        self.calls: list[Mapping[PoolKey, int]] = []
        self.reaches: Reached | None = None
        self.fails = ""

    async def scale(self, sizes: Mapping[PoolKey, int]) -> Reached:
        self.calls.append(sizes)
        if self.fails:
            raise ActuatorError(self.fails)
        return self.reaches or Reached(sizes)


@contextlib.asynccontextmanager
async def actuating(log: SqliteLog, actuator: RecordingActuator | None = None) -> AsyncIterator[RecordingActuator]:
    actuator = actuator or RecordingActuator()
    async with background(ActuatorService(log, actuator).run()):
        yield actuator


class FakeObserver:
    """Observer of one pool with `ready` workers and `requests` requests per interval."""

    def __init__(self) -> None:
        self.ready = 2
        self.requests = 15

    def observe(self) -> tuple[PoolObserved, ...]:
        return (PoolObserved(group=GROUP, pool=POOL, ready=self.ready, requests=self.requests, isl=ISL, osl=1.0),)


def forecast(history: Sequence[ScalingObserved], observed: int) -> DemandForecast:
    """Forecast the number of requests of the last interval as requests per second."""
    (pool,) = history[-1].pools
    demand = PoolDemand(group=GROUP, pool=POOL, requests_per_s=pool.requests, isl=ISL, osl=1.0)
    return DemandForecast(predictor="last", observed=observed, pools=(demand,))


def planner_of(
    log: SqliteLog,
    name: str,
    observer: FakeObserver,
    settings: PlannerSettings = SETTINGS,
    simulate: Simulate | None = None,
) -> Planner:
    return Planner(log, name, settings, observer, forecast, simulate)


@contextlib.asynccontextmanager
async def planning(planner: Planner) -> AsyncIterator[Planner]:
    """Run a planner while the body runs, and stop it in order."""
    async with background(planner.run()) as running:
        yield planner
        planner.stop()
        await asyncio.wait_for(running, PATIENCE_S)
