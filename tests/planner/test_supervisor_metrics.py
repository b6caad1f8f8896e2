"""A scrape of a supervisor has its replies by result and its workers by status."""

import asyncio

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from forebay.core.scaling.state import RULES_VERSION
from forebay.events.scaling import PlannerClaimed, PlannerSettings, PoolDecision, PoolScaling, ScalingDecided
from forebay.events.topics import SCALING
from forebay.live.planner.actuator import ActuatorService, Reached
from forebay.planner.actuators.processes import supervisor_metrics
from forebay.transport.sqlite.log import SqliteLog
from tests.live.planning import RecordingActuator, append
from tests.planner.supervised import GROUP, KEY, POOL, Supervised, until

pytestmark = pytest.mark.asyncio


def decided(log: SqliteLog, from_size: int, to_size: int, pool: str = POOL) -> ScalingDecided:
    """Return a decision about a pool, to append next."""
    one = PoolDecision(group=GROUP, pool=pool, from_size=from_size, to_size=to_size, proposed=to_size, reason="manual")
    return ScalingDecided(planner_epoch=0, after=len(log.records(SCALING.name, 0, 0, 1_000)), pools=(one,))


def claimed() -> PlannerClaimed:
    settings = PlannerSettings(pools=(PoolScaling(group=GROUP, pool=POOL),))
    return PlannerClaimed(planner_id="p", rules_version=RULES_VERSION, settings=settings)


def scraped(*metrics: Collector) -> dict[str, float]:
    """Return the value of each series by the values of its labels."""
    registry = CollectorRegistry()
    for one in metrics:
        registry.register(one)
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {"/".join(one.labels.values()): one.value for family in families for one in family.samples}


async def test_metrics_count_decisions_by_result(log: SqliteLog) -> None:
    actuator = RecordingActuator(pools=frozenset({KEY}))
    service = ActuatorService(log, actuator)
    metrics = supervisor_metrics(service, None)
    running = asyncio.create_task(service.run())
    try:
        await append(log, claimed())
        await append(log, decided(log, 0, 1))
        await until(lambda: scraped(metrics) == {"applied": 1})
        actuator.reaches = Reached({KEY: 2}, "no room")
        await append(log, decided(log, 1, 3))
        await until(lambda: scraped(metrics) == {"applied": 1, "partial": 1})
        actuator.fails = "no connection"
        await append(log, decided(log, 2, 3))
        await until(lambda: scraped(metrics) == {"applied": 1, "partial": 1, "failed": 1})
        stale = ScalingDecided(planner_epoch=0, after=0, pools=decided(log, 1, 2).pools)
        await append(log, stale)
        await until(lambda: scraped(metrics).get("stale") == 1)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_metrics_count_workers_by_status(log: SqliteLog, supervised: Supervised) -> None:
    (supervised.folder / "hold").touch()
    async with supervised.supervisor() as actuator:
        metrics = supervisor_metrics(ActuatorService(log, actuator), actuator)
        await actuator.scale({KEY: 3})
        await supervised.started_count(3)
        await actuator.scale({KEY: 1})
        shown = scraped(metrics)
    name = f"{GROUP}/{POOL}"
    assert shown == {f"{name}/running": 1, f"{name}/draining": 2, f"{name}/restarting": 0}
