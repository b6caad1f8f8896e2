"""A system on Kafka with a console and a planner, used by tests whose thread runs the loop of a browser.

Two routers, three workers, an ingress, a planner with its supervisor, and a console run as processes. The event loop
that controls them has a thread of its own.
"""

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import httpx

from forebay.events.topics import Topic
from forebay.replay.at_time import seek_time
from forebay.replay.moment import Moment
from forebay.replay.read_only import ReadOnlyLog
from forebay.transport.base import Log, Record
from forebay.transport.kafka.log import KafkaLog
from tests.console.pages import read, wait_indexed, wait_until
from tests.console.serving import TOKEN
from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster, Ownership
from tests.harness.local import free_ports
from tests.harness.scaling import start_planner, supervised
from tests.integration.stream_clients import TIMEOUT_S, post, prompt

ROUTERS = ("r1", "r2")
WORKERS = ("w1", "w2", "w3")
PROMPTS = 4
ROUNDS = 4  # requests per prompt: a policy without a cache index sends them to several workers
TAKEOVER_WITHIN_S = 60.0
READ_MAX = 1_000
T = TypeVar("T")
# Method `load` never has enough observations, so only an operator changes the size of the pool.
PLANNER = {"interval_s": 1.0, "method": "load", "min_observations": 1_000}
POOL = {"max_size": 4, "startup_s": 0}


class LoopThread:
    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class CopiedLog(ReadOnlyLog):
    """View of a log that reads each partition once, because reading a part of one from Kafka takes 0.1 s."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._records: dict[tuple[str, int], tuple[int, list[Record]]] = {}

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Return up to `limit` records from `offset` on."""
        _, records = await self._partition(topic, partition)
        return [record for record in records if record.offset >= offset][:limit]

    async def begin(self, topic: str, partition: int) -> int:
        return (await self._partition(topic, partition))[0]

    async def end(self, topic: str, partition: int) -> int:
        """Return the offset after the last record."""
        begin, records = await self._partition(topic, partition)
        return records[-1].offset + 1 if records else begin

    async def _partition(self, topic: str, partition: int) -> tuple[int, list[Record]]:
        if (topic, partition) not in self._records:
            position, end = await self._log.begin(topic, partition), await self._log.end(topic, partition)
            self._records[topic, partition] = found = (position, list[Record]())
            while position < end:
                page = await self._log.read(topic, partition, position, READ_MAX)
                found[1].extend(page)
                position = page[-1].offset + 1
        return self._records[topic, partition]


class ConsoleSystem:
    """A running system with its console.

    Args:
        url: origin of the console's page.
        thread: runs the loop of `cluster` and `log`.
    """

    def __init__(self, cluster: Cluster, log: KafkaLog, url: str, thread: LoopThread) -> None:
        self.cluster = cluster
        self.url = url
        self.source = ("--kafka", cluster.settings.bootstrap, "--namespace", cluster.namespace)
        self._log = log
        self._thread = thread

    @property
    def partition(self) -> int:
        partition = self.cluster.partition()
        assert partition is not None, "the system serves"
        return partition

    def complete(self, *numbers: int) -> None:
        """Send a request per number, one after another, and wait for the responses."""
        self._thread.run(complete(self.cluster, *numbers))

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self._thread.run(coroutine)

    def finished(self) -> int:
        return len(read(self.url, "/v1/console/requests", state="finished", limit=500)["requests"])

    def owner(self) -> str:
        owner = self.run(self.cluster.owner())
        assert owner is not None, "the system serves"
        return owner

    def events(self, topic: Topic, kind: type[T]) -> list[T]:
        """Return the events of a type on a topic, whose partition is that of the group."""
        found = self.run(self.cluster.events(topic))
        return [one for one in found if isinstance(one, kind)]

    def copy(self) -> "CopiedLog":
        """Return a view of the log, whose partitions do not grow after their first use."""
        return CopiedLog(self._log)

    def moment_at(self, log: Log, at_us: int) -> Moment:
        """Return the state that `forebay replay at --time` derives from a log of this system."""

        async def derived() -> Moment:
            return await (await seek_time(log, self.partition, at_us)).moment()

        return self.run(derived())

    def forebay(self, name: str, *arguments: str) -> str:
        """Run a command that succeeds on the log of the system, and return its output."""
        code, output = self.run(self.cluster.command(name, *arguments, *self.source, within_s=TIMEOUT_S))
        assert code == 0, (self.cluster.processes.folder / f"{name}.log").read_text()
        return output

    def kill_owner(self) -> Ownership:
        """Kill the owner, wait until another router has routed a request, and return its ownership."""

        async def replace() -> Ownership:
            owner = await self.cluster.owner()
            assert owner is not None, "the system serves"
            self.cluster.kill(owner)
            await complete(self.cluster, PROMPTS)
            return await self.cluster.taken_over(owner, within_s=TAKEOVER_WITHIN_S)

        return self.run(replace())


@contextmanager
def console_system(kafka: str, redis_url: str, namespace: str, folder: Path) -> Iterator[ConsoleSystem]:
    """Run a system with a console, and send requests of which the caches have some."""
    thread, stack = LoopThread(), AsyncExitStack()
    cluster = Cluster(kafka, redis_url, namespace, folder, spawn=fork_server.spawn)
    try:
        system = thread.run(_start(stack, cluster, redis_url, thread))
        wait_indexed(system.url)
        system.complete(*[*range(PROMPTS)] * ROUNDS)
        wait_until(lambda: system.finished() == PROMPTS * ROUNDS, "the console shows all requests as finished")
        yield system
    finally:
        thread.run(stack.aclose())
        thread.close()


async def complete(cluster: Cluster, *numbers: int) -> None:
    """Send a request per number, one after another, and wait for the responses."""
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for number in numbers:
            body = {"model": GROUP, "prompt": prompt(number), "max_tokens": 4}
            response = await post(client, f"{cluster.urls['i1']}/v1/completions", json=body)
            response.raise_for_status()


async def _start(stack: AsyncExitStack, cluster: Cluster, redis_url: str, thread: LoopThread) -> ConsoleSystem:
    await stack.enter_async_context(cluster)
    for name in ROUTERS:
        cluster.router(name)
    for name in WORKERS:
        cluster.worker(name)
    ingress = cluster.ingress("i1")
    await cluster.until_serving(len(WORKERS))
    start_planner(cluster, "planner", PLANNER, POOL)
    await stack.enter_async_context(supervised(cluster, "supervisor", redis_url))
    log = await KafkaLog.open(cluster.settings)
    stack.push_async_callback(log.close)
    port, token_file = free_ports(1), cluster.processes.folder / "console-token"
    token_file.write_text(TOKEN)
    system = ConsoleSystem(cluster, log, f"http://127.0.0.1:{port}", thread)
    served = ("--port", str(port), "--token-file", str(token_file), "--url", ingress)
    cluster.begin("console", "console", *system.source, "--cache-dir", str(cluster.processes.folder), *served)
    return system
