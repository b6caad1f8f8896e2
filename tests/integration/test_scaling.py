"""A planner and supervisors scale worker processes on Kafka: by load, by orders of an operator, and after a kill."""

import json
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from forebay.core.scaling.state import RULES_VERSION
from forebay.events.codec import decode, encode
from forebay.events.scaling import (
    PlannerClaimed,
    PlannerSettings,
    PoolDecision,
    PoolScaling,
    ReachedSize,
    ScalingApplied,
    ScalingDecided,
    ScalingEvent,
)
from forebay.events.topics import SCALING
from forebay.planner.actuators.os_processes import is_running, recorded_identity
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from tests.harness.cluster import GROUP, Cluster
from tests.harness.scaling import POOL, kill_supervised, scaling_of, start_planner, start_supervisor, stepped_load
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import problems, stream_clients

ISL, OSL = 64, 4
RATE = 20.0  # requests per second
LARGEST = 3
# A worker carries one request per second, so the rate needs far more workers than the largest size.
PROFILE = {
    "prefill": [{"isl": ISL, "ttft_ms": 10.0, "tokens_per_s": ISL}],
    "decode": [{"context": ISL + OSL / 2, "concurrency": 8, "itl_ms": 5.0, "tokens_per_s": 1e6}],
}
BY_LOAD = {"interval_s": 2.0, "gpu_budget": 0}
PROFILED = {"max_size": LARGEST, "startup_s": 5.0, "profile": "profile.json"}
# Method `load` never has enough observations, so only an operator changes sizes.
BY_OPERATOR = {"interval_s": 0.5, "method": "load", "min_observations": 1000}
ORDERED = f"{GROUP}/{POOL}"
TOKENS = 40
REQUEST_EVERY_S = 0.1
SLOW = ("--speedup", "0.2")  # about 28 ms per token, so that workers drain during responses
PATIENCE_S = 60.0

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400)]


@pytest.fixture
def cluster(make_cluster: MakeCluster) -> Iterator[Cluster]:
    """Yield a cluster to open. At the end, the workers of its supervisors are killed, because they outlive these."""
    made = make_cluster(f"scaling-{uuid.uuid4().hex[:8]}")
    yield made
    kill_supervised(made.processes.folder)


async def test_a_load_step_scales_up_and_down_although_the_planner_is_killed(cluster: Cluster) -> None:
    (cluster.processes.folder / "profile.json").write_text(json.dumps(PROFILE))
    async with cluster, scaling_of(cluster) as scaling:
        start_supervisor(cluster, "s", "--speedup", "10")
        await cluster.serve(workers=())
        start_planner(cluster, "p1", BY_LOAD, PROFILED)
        await scaling.until_claimed()
        start_planner(cluster, "p2", BY_LOAD, PROFILED)
        await scaling.set_size(1)
        await cluster.until_serving(1)
        await scaling.set_size(None)
        async with stepped_load(cluster.urls["i1"], isl=ISL, osl=OSL, seed=7) as load:
            load.rate = RATE
            await scaling.until_decided(LARGEST)
            await scaling.until_members(LARGEST)
            # On a busy machine the planner that started first may have been replaced already.
            claims, (_, active) = len(scaling.claims), scaling.claims[-1]
            cluster.kill(active)
            load.rate = 0.0
            await scaling.until_claimed(claims)
            await scaling.until_decided(1)
            await scaling.until_members(1)
        assert len(load.sent) > 0
        assert [one.problem for one in load.failed()] == []
        decisions = await scaling.decisions()
        (_, standby) = scaling.claims[-1]
        await cluster.stop(standby)
        await cluster.until("it records that it has stopped", lambda: scaling.state.claim is None)
    assert {active, standby} == {"p1", "p2"}
    sizes = [one.to_size for one in scaling.changes]
    assert (sizes[0], max(sizes), sizes[-1]) == (1, LARGEST, 1)
    effective = [one for one in decisions if one.outcome == "applied"]
    assert [one.offset for one in effective if not one.is_verified] == []
    assert sum(bool(one.replies) for one in effective) == len(sizes)


async def test_orders_of_an_operator_take_effect_and_their_decisions_are_derived_again(cluster: Cluster) -> None:
    async def order(*arguments: str) -> tuple[int, str, str]:
        """Run a command of `forebay planner`, and return its exit code, output and errors."""
        name = arguments[0]
        code, out = await cluster.command(name, "planner", *arguments, *cluster.where, within_s=2 * PATIENCE_S)
        return code, out, (cluster.processes.folder / f"{name}.log").read_text()

    async def status(*options: str) -> Any:
        code, out, _ = await order("status", *options, "--json")
        return json.loads(out) if code == 0 else None

    async with cluster:
        code, _, errors = await order("set", ORDERED, "2")
        assert (code, "no planner has claimed the topic scaling" in errors) == (2, True)
        await cluster.serve(workers=("first",))  # a router places the group, and the planner observes the pool
        start_planner(cluster, "run", BY_OPERATOR, {"max_size": 4, "startup_s": 0})
        is_observed = lambda found: found and found["pools"][0]["ready"] is not None  # noqa: E731
        await cluster.until("the planner has observed the pool", status, is_observed)
        code, _, errors = await order("set", f"{GROUP}/defaults", "2")
        assert (code, f"did you mean {ORDERED}?" in errors) == (2, True)
        code, out, errors = await order("set", ORDERED, "2", "--timeout-s", "2")
        assert (code, "1 -> 2 (manual)" in out) == (1, True), out + errors
        assert f"no actuator of {ORDERED} has replied to decision" in errors
        start_supervisor(cluster, "supervise")
        code, out, errors = await order("set", ORDERED, "3", "--operator", "alice")
        assert code == 0, out + errors
        assert "2 -> 3 (manual)" in out
        assert f"applied by processes: {ORDERED} has 3 workers" in out
        await cluster.until_members(count=4)
        assert "recorded   pause the planner, at offset" in (await order("set", "--pause"))[1]
        code, out, errors = await order("set", ORDERED, "auto")
        assert (code, "3 (paused)" in out) == (0, True), out + errors
        paused = await status()
        assert (paused["paused"], paused["problems"], paused["pools"][0]["size"]) == (True, [], 3)
        assert (await order("set", "--resume"))[0] == 0
        history = await status("--history", "--changes")
        changes = history["decisions"]
        assert [(one["outcome"], one["pools"][0]["reason"]) for one in changes] == [("applied", "manual")] * 2
        verification = history["verification"]
        assert verification["equal"] + verification["stale"] == verification["decisions"] > 3
        explained = await status("--decision", str(changes[-1]["offset"]))
        assert explained["decision"]["verification"] == "equal"
        await cluster.stop("run", within_s=PATIENCE_S)
        code, _, errors = await order("set", ORDERED, "1")
        assert (code, "no planner is active; the next one follows the record" in errors) == (1, True)
        assert (await order("status"))[0] == 1
        start_planner(cluster, "run", BY_OPERATOR, {"max_size": 4, "startup_s": 0})
        await cluster.until_members("first", "default-0")


class PlannerStub:
    """Writes decisions to the topic `scaling`, as a planner would."""

    def __init__(self, cluster: Cluster, log: KafkaLog) -> None:
        self._cluster = cluster
        self._log = log
        self._epoch = -1

    async def claim(self) -> None:
        settings = PlannerSettings(pools=(PoolScaling(group=GROUP, pool=POOL),))
        self._epoch = await self._append(PlannerClaimed(planner_id="p", rules_version=RULES_VERSION, settings=settings))

    async def decide(self, from_size: int, to_size: int) -> None:
        sizes: dict[str, Any] = {"from_size": from_size, "to_size": to_size, "proposed": to_size}
        decided = PoolDecision(group=GROUP, pool=POOL, **sizes, reason="manual")
        after = await self._log.end(SCALING.name, 0)
        await self._append(ScalingDecided(planner_epoch=self._epoch, after=after, pools=(decided,)))

    async def reached(self) -> list[tuple[ReachedSize, ...]]:
        """Return the sizes in the replies of the supervisor, oldest first."""
        records = await self._log.read(SCALING.name, 0, 0, 1_000)
        events = [decode(SCALING, record.value) for record in records]
        return [event.pools for event in events if isinstance(event, ScalingApplied)]

    async def until_replies(self, count: int) -> None:
        """Wait for replies. A planner decides about a pool again only after the reply."""
        await self._cluster.until(f"{count} replies", self.reached, lambda replies: len(replies) == count)

    async def _append(self, event: ScalingEvent) -> int:
        (offset,) = await self._log.append([Draft(SCALING.name, 0, encode(SCALING, event))])
        return offset


@asynccontextmanager
async def planner_of(cluster: Cluster) -> AsyncIterator[PlannerStub]:
    log = await KafkaLog.open(cluster.settings)
    try:
        planner = PlannerStub(cluster, log)
        await planner.claim()
        yield planner
    finally:
        await log.close()


def running(folder: Path) -> dict[str, int]:
    """Return the process id of each running worker of the supervisors."""
    found = {path.stem: recorded_identity(path) for path in folder.rglob("*.process")}
    return {name: identity.pid for name, identity in found.items() if identity is not None and is_running(identity)}


async def test_a_supervisor_that_is_killed_finds_its_workers_and_no_request_fails(cluster: Cluster) -> None:
    folder = cluster.processes.folder
    async with cluster, planner_of(cluster) as planner:
        await cluster.serve(workers=())
        start_supervisor(cluster, "s", *SLOW)
        await planner.decide(0, 1)
        await cluster.until_serving(1)
        await planner.until_replies(1)
        async with stream_clients(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as clients:
            async with clients.load(REQUEST_EVERY_S, TOKENS, first=0):
                await planner.decide(1, 3)
                await cluster.until_members("default-0", "default-1", "default-2")
                await planner.until_replies(2)
                before = running(folder)
                cluster.kill("s")
                await planner.decide(3, 1)
                assert running(folder) == before
                start_supervisor(cluster, "s", *SLOW)
                await cluster.until_members("default-0")
                await planner.until_replies(3)
            assert len(clients.results) > 3
            assert problems(clients.results, TOKENS) == []
            assert {one.attempts for one in clients.results} == {1}, "a drain finishes the requests of its worker"
            served_by = {one.worker for one in clients.results}
        assert [[one.size for one in pools] for pools in await planner.reached()] == [[1], [3], [1]]
        assert served_by == set(before) == {"default-0", "default-1", "default-2"}
        first = {"default-0": before["default-0"]}
        await cluster.until("the drained workers have ended", lambda: running(folder) == first)
        assert "found 3 running workers" in cluster.processes["s"].output()
        await cluster.stop("s")
        assert running(folder) == first
        os.kill(before["default-0"], signal.SIGTERM)
        await cluster.until_members()
        await cluster.until("the last worker has ended", lambda: not running(folder))
