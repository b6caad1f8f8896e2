"""A supervisor scales worker processes by decisions on Kafka. It is killed under load and finds its workers again."""

import functools
import json
import os
import signal
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

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
from forebay.planner.actuators.os_processes import is_running, kill_session, recorded_identity
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from tests.harness import fork_server
from tests.harness.cluster import FOREBAY, GROUP, Cluster
from tests.integration.conftest import RUN
from tests.integration.stream_clients import problems, stream_clients

POOL, SPARE = "default", "spare"
TOKENS = 40
REQUEST_EVERY_S = 0.1
SPEED = ("--speedup", "0.2")  # about 28 ms per token, so that workers drain during responses
PATIENCE_S = 60.0

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(300)]


class Planner:
    """Writes decisions to the topic `scaling`, as a planner would."""

    def __init__(self, log: KafkaLog) -> None:
        self._log = log
        self._epoch = -1

    async def claim(self) -> None:
        pools = tuple(PoolScaling(group=GROUP, pool=pool) for pool in (POOL, SPARE))
        settings = PlannerSettings(pools=pools)
        self._epoch = await self._append(PlannerClaimed(planner_id="p", rules_version=RULES_VERSION, settings=settings))

    async def decide(self, from_size: int, to_size: int, *pools: str) -> None:
        """Write a decision about these pools, or about the one pool."""
        decided = [
            PoolDecision(
                group=GROUP, pool=pool, from_size=from_size, to_size=to_size, proposed=to_size, reason="manual"
            )
            for pool in pools or (POOL,)
        ]
        after = await self._log.end(SCALING.name, 0)
        await self._append(ScalingDecided(planner_epoch=self._epoch, after=after, pools=tuple(decided)))

    async def reached(self) -> list[tuple[ReachedSize, ...]]:
        """Return the sizes in the replies of the supervisor, oldest first."""
        records = await self._log.read(SCALING.name, 0, 0, 1_000)
        events = [decode(SCALING, record.value) for record in records]
        return [event.pools for event in events if isinstance(event, ScalingApplied)]

    async def _append(self, event: ScalingEvent) -> int:
        (offset,) = await self._log.append([Draft(SCALING.name, 0, encode(SCALING, event))])
        return offset


@asynccontextmanager
async def planner_of(cluster: Cluster) -> AsyncIterator[Planner]:
    log = await KafkaLog.open(cluster.settings)
    try:
        planner = Planner(log)
        await planner.claim()
        yield planner
    finally:
        await log.close()


@pytest.fixture
def state(tmp_path: Path) -> Iterator[Path]:
    """Yield a state directory. Its workers, which outlive their supervisor, are killed at the end."""
    folder = tmp_path / "state"
    yield folder
    for path in folder.rglob("*.process"):
        identity = recorded_identity(path)
        if identity is not None:
            kill_session(identity)


def running(state: Path) -> dict[str, int]:
    """Return the process id of each running worker."""
    found = {path.stem: recorded_identity(path) for path in state.glob("*/*.process")}
    return {name: identity.pid for name, identity in found.items() if identity is not None and is_running(identity)}


def start_supervisor(cluster: Cluster, redis_url: str, state: Path, name: str = "s", pool: str = POOL) -> None:
    """Start a supervisor of one pool, whose workers it names `POOL-0`, `POOL-1` and so on."""
    where = ["--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace]
    command = [FOREBAY, "worker", *where, "--redis", redis_url, "--pool", pool, *SPEED]
    state.parent.mkdir(exist_ok=True)
    file = state.parent / f"{name}.toml"
    file.write_text(
        f'actuator = "processes"\nstate = "{state.name}"\n'
        f'[[pools]]\ngroup = "{GROUP}"\npool = "{pool}"\ncommand = {json.dumps(command)}\n'
    )
    cluster.processes.start(name, [FOREBAY, "planner", "supervise", str(file), *where])


async def test_a_supervisor_that_is_killed_finds_its_workers_and_no_request_fails(
    kafka: str, redis_url: str, tmp_path: Path, state: Path
) -> None:
    async with Cluster(kafka, redis_url, f"{RUN}-supervise", tmp_path, spawn=fork_server.spawn) as cluster:
        cluster.router("r1")
        cluster.ingress("i1")
        start_supervisor(cluster, redis_url, state)

        async def members(*names: str) -> bool:
            return set(await cluster.members()) == set(names)

        async def replies(count: int) -> bool:
            return len(await planner.reached()) == count

        async with planner_of(cluster) as planner:
            await planner.decide(0, 1)
            await cluster.until_serving(1)
            # A planner decides about a pool again only after the reply.
            await cluster.processes.until("the supervisor replied", functools.partial(replies, 1))
            async with stream_clients(list(cluster.urls.values()), uuid.uuid4().hex[:8]) as clients:
                async with clients.load(REQUEST_EVERY_S, TOKENS, first=0):
                    await planner.decide(1, 3)
                    three = functools.partial(members, "default-0", "default-1", "default-2")
                    await cluster.processes.until("three workers are members", three)
                    await cluster.processes.until("the supervisor replied", functools.partial(replies, 2))
                    before = running(state)
                    cluster.kill("s")
                    await planner.decide(3, 1)
                    assert running(state) == before
                    start_supervisor(cluster, redis_url, state)
                    await cluster.processes.until("one worker is a member", functools.partial(members, "default-0"))
                    await cluster.processes.until("the supervisor replied", functools.partial(replies, 3))
                assert len(clients.results) > 3
                assert problems(clients.results, TOKENS) == []
                assert {one.attempts for one in clients.results} == {1}, "a drain finishes the requests of its worker"
                served_by = {one.worker for one in clients.results}
            assert [[one.size for one in pools] for pools in await planner.reached()] == [[1], [3], [1]]
        assert served_by == set(before) == {"default-0", "default-1", "default-2"}

        async def one() -> bool:
            return running(state) == {"default-0": before["default-0"]}

        await cluster.processes.until("the drained workers have ended", one)
        assert "found 3 running workers" in cluster.processes["s"].output()
        await cluster.stop("s")
        assert running(state) == {"default-0": before["default-0"]}
        os.kill(before["default-0"], signal.SIGTERM)

        async def none() -> bool:
            return await members() and not running(state)

        await cluster.processes.until("the last worker has left", none, within_s=PATIENCE_S)


async def test_supervisors_execute_one_decision_for_their_own_pools(
    kafka: str, redis_url: str, tmp_path: Path, state: Path
) -> None:
    async with Cluster(kafka, redis_url, f"{RUN}-supervisors", tmp_path, spawn=fork_server.spawn) as cluster:
        cluster.router("r1")
        start_supervisor(cluster, redis_url, state / "s1", "s1")
        start_supervisor(cluster, redis_url, state / "s2", "s2", SPARE)

        async def members(*names: str) -> bool:
            return set(await cluster.members()) == set(names)

        async def replies(count: int) -> bool:
            return len(await planner.reached()) == count

        async with planner_of(cluster) as planner:
            for sizes, names, count in ((0, 1), ["default-0", "spare-0"], 2), ((1, 0), [], 4):
                await planner.decide(*sizes, POOL, SPARE)
                await cluster.processes.until(f"the members are {names}", functools.partial(members, *names))
                await cluster.processes.until(f"there are {count} replies", functools.partial(replies, count))
            reached = [sorted((one.pool, one.size) for one in pools) for pools in await planner.reached()]
        assert sorted(reached[:2]) == [[(POOL, 1)], [(SPARE, 1)]]
        assert sorted(reached[2:]) == [[(POOL, 0)], [(SPARE, 0)]]
