"""Planners of one pool for tests, with an observer of fixed demand and an actuator that records its calls."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from forebay.events.scaling import (
    DemandForecast,
    PlannerSettings,
    PoolDemand,
    PoolObserved,
    PoolScaling,
    PrefillPoint,
    ScalingObserved,
)
from forebay.live.planner.actuator import ActuatorService
from forebay.live.planner.planner import Planner
from forebay.transport.sqlite.log import SqliteLog
from tests.core.scaling.scene import GROUP, POOL
from tests.live.planner.topic import PATIENCE_S, RecordingActuator

RPS_PER_WORKER = 10.0
ISL = 100.0
SETTINGS = PlannerSettings(
    pools=(
        PoolScaling(
            group=GROUP,
            pool=POOL,
            role="prefill",
            startup_s=0,
            prefill=(PrefillPoint(isl=ISL, ttft_ms=10, tokens_per_s=ISL * RPS_PER_WORKER),),
        ),
    ),
    interval_s=0.02,
    gpu_budget=0,
)


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


@asynccontextmanager
async def planning(log: SqliteLog, planner: Planner) -> AsyncIterator[Planner]:
    """Run a planner while the body runs, and stop it in order."""
    task = asyncio.create_task(planner.run())
    try:
        yield planner
        planner.stop()
        await asyncio.wait_for(task, PATIENCE_S)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@asynccontextmanager
async def actuating(log: SqliteLog) -> AsyncIterator[RecordingActuator]:
    actuator = RecordingActuator()
    task = asyncio.create_task(ActuatorService(log, actuator).run())
    try:
        yield actuator
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def planner_of(log: SqliteLog, name: str, observer: FakeObserver, settings: PlannerSettings = SETTINGS) -> Planner:
    return Planner(log, name, settings, observer, forecast)
