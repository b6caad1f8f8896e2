"""A planner, its standby and a supervisor of mock workers on one cluster, and a client whose rate changes.

The demo and the test of scaling start these parts and read the outcome from the topic `scaling`.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

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

POOL = "default"
READ_MAX = 1_000
TIMEOUT_S = 300.0
TOKEN_IDS = 1_000  # valid in every vocabulary


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

    log: KafkaLog
    state: PlannerState = field(default_factory=PlannerState)
    changes: list[Change] = field(default_factory=list)
    claims: list[tuple[float, str]] = field(default_factory=list)

    async def set_size(self, size: int | None) -> None:
        """Set the size of the pool as an operator, or release it."""
        event = PoolSizeSet(group=GROUP, pool=POOL, size=size, operator="test", at_us=time.time_ns() // 1000)
        await self.log.append([Draft(SCALING.name, 0, encode(SCALING, event))])

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
        """Note a claim or a change."""
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
    scaling = Scaling(log)
    topic = ScalingTopic(log, scaling.on_record)
    scaling.state = topic.state
    following = asyncio.create_task(topic.follow())
    try:
        yield scaling
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
        await log.close()


def where(cluster: Cluster) -> list[str]:
    return ["--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace]


def start_planner(cluster: Cluster, name: str, settings: Mapping[str, object], pool: Mapping[str, object]) -> None:
    file = cluster.processes.folder / f"{name}.toml"
    tables = [*_toml(settings), "[[pools]]", f'group = "{GROUP}"', f'pool = "{POOL}"', *_toml(pool)]
    file.write_text("\n".join(tables) + "\n")
    cluster.processes.start(name, [FOREBAY, "planner", "run", str(file), *where(cluster), "--id", name])


@asynccontextmanager
async def supervised(cluster: Cluster, name: str, redis_url: str, *options: str) -> AsyncIterator[Path]:
    """Run a supervisor of mock workers with these options. Yield its state directory, and kill its workers at the end.

    Workers outlive their supervisor, so nothing else would end them.
    """
    folder = cluster.processes.folder
    command = [FOREBAY, "worker", *where(cluster), "--redis", redis_url, *options]
    file = folder / f"{name}.toml"
    head = ['actuator = "processes"', f'state = "{name}"', "[[pools]]", f'group = "{GROUP}"', f'pool = "{POOL}"']
    file.write_text("\n".join([*head, f"command = {json.dumps(command)}"]) + "\n")
    cluster.processes.start(name, [FOREBAY, "planner", "supervise", str(file), *where(cluster)])
    try:
        yield folder / name
    finally:
        if name in cluster.processes:
            cluster.processes.kill(name)
        for path in (folder / name).glob("*/*.process"):
            identity = recorded_identity(path)
            if identity is not None:
                kill_session(identity)


def _toml(values: Mapping[str, object]) -> list[str]:
    return [f"{key} = {json.dumps(value)}" for key, value in values.items()]


@dataclass(slots=True)
class Sent:
    """A request of the client.

    Attributes:
        at_s: wall clock at which it was due.
        ttft_s: seconds until its first token; None before.
        problem: why it failed; empty for no reason.
    """

    at_s: float
    ttft_s: float | None = None
    ended: bool = False
    problem: str = ""


class SteppedLoad:
    """Client that sends streamed requests with random prompts, evenly spaced in time.

    Attributes:
        rate: requests per second; may be changed at any time.
        sent: all requests so far.
    """

    def __init__(self, url: str, *, isl: int, osl: int, seed: int) -> None:
        self.rate = 0.0
        self.sent: list[Sent] = []
        self._url = f"{url}/v1/completions"
        self._isl = isl
        self._osl = osl
        self._random = random.Random(seed)
        self._requests: set[asyncio.Task[None]] = set()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Send requests while the body runs, then wait for their responses."""
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=64)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            sending = asyncio.create_task(self._send_all(client))
            try:
                yield
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)
                await asyncio.gather(*self._requests)
            finally:
                for task in (sending, *self._requests):
                    task.cancel()
                await asyncio.gather(sending, *self._requests, return_exceptions=True)

    async def _send_all(self, client: httpx.AsyncClient) -> None:
        due_s = time.time()
        while True:
            # A late request does not delay the later ones, so the rate is kept.
            due_s = due_s + 1 / self.rate if self.rate else time.time() + 0.05
            await asyncio.sleep(max(0.0, due_s - time.time()))
            if self.rate:
                one = Sent(due_s)
                self.sent.append(one)
                task = asyncio.create_task(self._send(client, one))
                self._requests.add(task)
                task.add_done_callback(self._requests.discard)

    async def _send(self, client: httpx.AsyncClient, one: Sent) -> None:
        try:
            await self._stream(client, one)
        except httpx.HTTPError as error:
            one.problem = f"{type(error).__name__} {error}"

    async def _stream(self, client: httpx.AsyncClient, one: Sent) -> None:
        body = {
            "model": GROUP,
            "prompt": [self._random.randrange(TOKEN_IDS) for _ in range(self._isl)],
            "max_tokens": self._osl,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tokens, is_done = 0, False
        async with client.stream("POST", self._url, json=body) as response:
            if response.status_code != httpx.codes.OK:
                one.problem = f"{response.status_code} {(await response.aread()).decode()}"
                return
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        one.problem = line
                        return
                    if chunk["choices"] and one.ttft_s is None:
                        one.ttft_s = time.time() - one.at_s
                    tokens = (chunk.get("usage") or {}).get("completion_tokens", tokens)
        one.ended = is_done and tokens == self._osl
        if not one.ended:
            one.problem = f"{tokens} of {self._osl} tokens" + ("" if is_done else ", without an end")
