"""A planner, its standby and a supervisor of mock workers on one cluster, and clients whose rate changes.

The demo and the tests of scaling start these parts and read the outcome from the topic `scaling`.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from forebay.core.scaling.rederive import RecordedDecision
from forebay.core.scaling.state import Outcome, PlannerState
from forebay.events.codec import decode, encode
from forebay.events.scaling import PlannerClaimed, PoolSizeSet, ScalingDecided, ScalingEvent
from forebay.events.topics import SCALING
from forebay.live.planner.topic import ScalingTopic
from forebay.planner.actuators.os_processes import kill_session, recorded_identity
from forebay.transport.base import Draft
from forebay.transport.kafka.log import KafkaLog
from tests.harness.cluster import FOREBAY, GROUP, Cluster
from tests.harness.scaling_decisions import decisions_of
from tests.integration.stream_clients import TOKEN_IDS, StreamClients, StreamResult, stream_clients

POOL = "default"
READ_MAX = 1_000
WITHIN_S = 120.0


@dataclass(slots=True)
class Change:
    """A decision that changed the size of the pool, with the planner's wall clock in seconds."""

    at_s: float
    from_size: int
    to_size: int
    reason: str


@dataclass(slots=True)
class Scaling:
    """The topic `scaling` of a cluster, as it grows.

    Attributes:
        state: state after the records so far.
        changes: decisions that changed the size of the pool, oldest first.
        claims: wall clock in seconds and name of each planner that has claimed the topic.
    """

    cluster: Cluster
    log: KafkaLog
    state: PlannerState = field(default_factory=PlannerState)
    changes: list[Change] = field(default_factory=list)
    claims: list[tuple[float, str]] = field(default_factory=list)

    async def set_size(self, size: int | None) -> None:
        """Set the size of the pool as an operator, or release it."""
        event = PoolSizeSet(group=GROUP, pool=POOL, size=size, operator="test", at_us=time.time_ns() // 1000)
        await self.log.append([Draft(SCALING.name, 0, encode(SCALING, event))])

    async def until_claimed(self, claims: int = 0) -> None:
        """Wait until planners have claimed the topic more than `claims` times. Raises ProcessError."""
        await self.cluster.until("a planner claims the topic", lambda: len(self.claims) > claims, within_s=WITHIN_S)

    async def until_decided(self, size: int) -> None:
        """Wait until the last change of the size led to `size`. Raises ProcessError."""
        last = lambda: self.changes[-1:]  # noqa: E731
        await self.cluster.until(
            f"{size} workers are decided", last, lambda ch: ch and ch[0].to_size == size, within_s=WITHIN_S
        )

    async def until_members(self, count: int) -> float:
        """Wait until the pool has `count` members, and return the time. Raises ProcessError."""
        await self.cluster.until_members(count=count, within_s=WITHIN_S)
        return time.time()

    async def decisions(self) -> list[RecordedDecision]:
        """Derive all decisions of the topic again and return them."""
        events: list[tuple[int, ScalingEvent]] = []
        end = await self.log.end(SCALING.name, 0)
        while not events or events[-1][0] + 1 < end:
            at = events[-1][0] + 1 if events else 0
            records = await self.log.read(SCALING.name, 0, at, READ_MAX)
            events += [(record.offset, decode(SCALING, record.value)) for record in records]
        return decisions_of(events)

    def on_record(self, _offset: int, event: ScalingEvent, outcome: Outcome) -> None:
        if isinstance(event, PlannerClaimed):
            self.claims.append((event.at_us / 1e6, event.planner_id))
        if isinstance(event, ScalingDecided) and outcome == "applied":
            for one in event.pools:
                if one.from_size != one.to_size:
                    self.changes.append(Change(event.at_us / 1e6, one.from_size, one.to_size, one.reason))


@asynccontextmanager
async def scaling_of(cluster: Cluster) -> AsyncIterator[Scaling]:
    """Follow the topic `scaling` while the body runs."""
    log = await KafkaLog.open(cluster.settings)
    scaling = Scaling(cluster, log)
    topic = ScalingTopic(log, scaling.on_record)
    scaling.state = topic.state
    following = asyncio.create_task(topic.follow())
    try:
        yield scaling
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await log.close()


def start_planner(cluster: Cluster, name: str, settings: Mapping[str, object], pool: Mapping[str, object]) -> None:
    """Start a planner, whose settings are files in the folder of the cluster."""
    _start(cluster, name, settings, pool, "run", "--id", name)


def start_supervisor(cluster: Cluster, name: str, *options: str) -> None:
    """Start a supervisor of mock workers of the pool with these options. Its state is in the folder of the cluster."""
    command = [*cluster.command_of("worker"), "--pool", POOL, *options]
    settings = {"actuator": "processes", "state": f"{name}-state"}
    _start(cluster, name, settings, {"command": command}, "supervise")


def _start(
    cluster: Cluster, name: str, settings: Mapping[str, object], pool: Mapping[str, object], kind: str, *options: str
) -> None:
    file = cluster.processes.folder / f"{name}.toml"
    tables = [*_toml(settings), "[[pools]]", *_toml({"group": GROUP, "pool": POOL, **pool})]
    file.write_text("\n".join(tables) + "\n")
    cluster.processes.start(name, [FOREBAY, "planner", kind, str(file), *cluster.where, *options])


def _toml(values: Mapping[str, object]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]


@asynccontextmanager
async def supervised(cluster: Cluster, name: str, *options: str) -> AsyncIterator[None]:
    """Run a supervisor of mock workers with these options, and kill its workers at the end."""
    start_supervisor(cluster, name, *options)
    try:
        yield
    finally:
        if name in cluster.processes:
            cluster.processes.kill(name)
        kill_supervised(cluster.processes.folder)


def kill_supervised(folder: Path) -> None:
    """Kill the workers of supervisors whose states are in a folder. Nothing else ends them."""
    for path in folder.rglob("*.process"):
        identity = recorded_identity(path)
        if identity is not None:
            kill_session(identity)


class SteppedLoad:
    """Client that sends streamed requests with random prompts, evenly spaced in time.

    Attributes:
        rate: requests per second; may be changed at any time.
    """

    def __init__(self, clients: StreamClients, *, isl: int, osl: int, seed: int) -> None:
        self.rate = 0.0
        self.osl = osl
        self._clients = clients
        self._isl = isl
        self._random = random.Random(seed)

    @property
    def sent(self) -> list[StreamResult]:
        return self._clients.results

    def failed(self) -> list[StreamResult]:
        """Return the requests that have not ended with all their tokens."""
        return [
            one for one in self.sent if one.problem or one.ends != 1 or one.usage.get("completion_tokens") != self.osl
        ]

    async def send(self) -> None:
        """Send requests until cancelled. A late request does not delay the later ones, so the rate is kept."""
        due_s = time.time()
        while True:
            due_s = due_s + 1 / self.rate if self.rate else time.time() + 0.05
            await asyncio.sleep(max(0.0, due_s - time.time()))
            if self.rate:
                prompt = [self._random.randrange(TOKEN_IDS) for _ in range(self._isl)]
                self._clients.submit(prompt, self.osl).at_s = due_s


@asynccontextmanager
async def stepped_load(url: str, *, isl: int, osl: int, seed: int) -> AsyncIterator[SteppedLoad]:
    """Send requests while the body runs, then wait for their responses."""
    async with stream_clients([url], f"load-{seed}") as clients:
        load = SteppedLoad(clients, isl=isl, osl=osl, seed=seed)
        sending = asyncio.create_task(load.send())
        try:
            yield load
        finally:
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
        await clients.all()
