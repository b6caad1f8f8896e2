"""A worker on a real log, with an owner that each test controls."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.engine_model.model import EngineConfig
from forebay.events.base import Event, pack_u32, unpack_u32
from forebay.events.codec import decode, encode
from forebay.events.fleet import WorkerJoined, WorkerLost, WorkerSpec
from forebay.events.progress import RequestFailed, RequestFinished
from forebay.events.requests import Sampling
from forebay.events.tokens import ResponseEnded, TokenChunk, TokensEmitted
from forebay.events.topics import DEAD_LETTERS, FLEET, KV_EVENTS, METRICS, PROGRESS, TOKENS, Topic, work_topic
from forebay.events.work import AnyWorkEvent, WorkCancelled, WorkItem
from forebay.transport.base import Draft, Lease, Leases, Log, Record
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engine import Engine
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.worker import Worker

VOCABULARY = tuple(range(1000, 1100))
GROUP = "model"
PARTITION = 0
WORK = work_topic("default")
WORK_SLOT = 5
PATIENCE_S = 55.0  # less than the timeout of a test, whose message is less specific
READ_MAX = 10_000


async def until(condition: Callable[[], object]) -> None:
    """Run other tasks until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions are about the log
            await asyncio.sleep(0.001)


def engine_config(**changes: Any) -> EngineConfig:
    sizes: dict[str, Any] = {"block_size": 4, "kv_blocks_total": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return EngineConfig(vocabulary=VOCABULARY, **{**sizes, **changes})


def work_item(name: str, prompt: list[int], max_tokens: int, **changes: Any) -> WorkItem:
    packed = pack_u32(prompt)
    salt = hash_seed(changes.get("lora_name", ""), changes.get("cache_namespace", ""))
    item = WorkItem(
        request_id=name,
        attempt=1,
        owner_epoch=0,
        worker_epoch=0,
        rank=0,
        token_ids=packed,
        sequence_hashes=sequence_hashes(packed, 4, salt),
        reply_slot=3,
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0),  # the output follows from the prompt
        group=GROUP,
        worker_id="w1",
    )
    return msgspec.structs.replace(item, **changes)


class Scene:
    """A log, leases and one worker; the methods act as the owner."""

    def __init__(self, log: SqliteLog, leases: Leases, keeper: LeaseKeeper) -> None:
        self.log = log
        self.leases = leases
        self.keeper = keeper
        self.epoch = -1  # of the worker that was admitted last
        self._members: dict[int, str] = {}

    def spec(self, dp_size: int = 1, name: str = "w1", **changes: Any) -> WorkerSpec:
        config = engine_config()
        spec = WorkerSpec(
            worker_id=name,
            model="model",
            block_size=config.block_size,
            kv_blocks_total=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            dp_size=dp_size,
        )
        return msgspec.structs.replace(spec, **changes)

    def worker(
        self,
        *,
        speedup: float = 1000.0,
        dp_size: int = 1,
        name: str = "w1",
        token: str = "t1",
        log: Log | None = None,
        engine: Engine | None = None,
        **changes: Any,
    ) -> Worker:
        spec = self.spec(dp_size, name, **changes)
        if engine is None:
            engine = MockEngine(engine_config(), dp_size=dp_size, dp_start_rank=spec.dp_start_rank, speedup=speedup)
        return Worker(log or self.log, self.keeper, spec, engine, token=token, group=GROUP, partition=PARTITION)

    @asynccontextmanager
    async def serving(self, worker: Worker, token: str = "t1", slot: int = WORK_SLOT) -> AsyncIterator[int]:
        task = asyncio.create_task(worker.run())
        try:
            epoch = await self.admit(worker, token, slot=slot)
            yield epoch
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    @asynccontextmanager
    async def running(self, worker: Worker, token: str = "t1") -> AsyncIterator["asyncio.Task[None]"]:
        """Yield the task of an admitted worker, for tests in which it ends by itself."""
        task = asyncio.create_task(worker.run())
        try:
            await self.admit(worker, token)
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def lease(self) -> Lease | None:
        return next((lease for lease in self.leases.poll(GROUP) if not lease.released), None)

    def released(self) -> list[str]:
        """The tokens of released leases."""
        return [lease.token for lease in self.leases.poll(GROUP) if lease.released]

    def holds(self, token: str) -> bool:
        return any(lease.token == token and not lease.released for lease in self.leases.poll(GROUP))

    async def admit(
        self, worker: Worker, token: str, *, owner_epoch: int = 0, slot: int = WORK_SLOT, events_version: int = 1
    ) -> int:
        await until(lambda: self.holds(token))
        joined = WorkerJoined(
            spec=worker.spec,
            lease=token,
            slot=slot,
            from_offset=self.log.next_offset(WORK.name, slot),
            owner_epoch=owner_epoch,
            events_version=events_version,
        )
        epoch = await self.append(FLEET, PARTITION, joined)
        self._members[epoch] = worker.spec.worker_id
        self.epoch = epoch
        await until(lambda: worker.worker_epoch == epoch)
        return epoch

    async def lose(self, epoch: int, worker_id: str = "w1") -> None:
        await self.append(FLEET, PARTITION, WorkerLost(owner_epoch=0, worker_id=worker_id, worker_epoch=epoch))

    async def read_by(self, worker: Worker) -> None:
        """Wait until a worker has read the whole fleet topic."""
        undecodable = worker.counters.fleet_undecodable
        await self.log.append([Draft(FLEET.name, PARTITION, b"\xff")])
        await until(lambda: worker.counters.fleet_undecodable > undecodable)

    async def append(self, topic: Topic, partition: int, event: Event) -> int:
        if topic is TOKENS:
            event = msgspec.structs.replace(event, group=GROUP)
        return (await self.log.append([Draft(topic.name, partition, encode(topic, event))]))[0]

    async def send(self, event: AnyWorkEvent, slot: int = WORK_SLOT) -> None:
        """Append an event to a slot, addressed to the worker that was admitted in its epoch."""
        worker_id = self._members.get(event.worker_epoch, "w1")
        await self.append(WORK, slot, msgspec.structs.replace(event, group=GROUP, worker_id=worker_id))

    def item(self, name: str, prompt: Sequence[int], max_tokens: int = 2, **changes: Any) -> WorkItem:
        """Return an item for the worker that was admitted last."""
        return work_item(name, list(prompt), max_tokens, **{"worker_epoch": self.epoch, **changes})

    async def ask(self, name: str, prompt: Sequence[int], max_tokens: int = 2, **changes: Any) -> WorkItem:
        item = self.item(name, prompt, max_tokens, **changes)
        await self.send(item)
        return item

    async def finish(self, name: str, prompt: Sequence[int], max_tokens: int = 2, **changes: Any) -> list[int]:
        """Send an item, wait for its end, and return its output."""
        await self.ask(name, prompt, max_tokens, **changes)
        await self.ended(name)
        return self.output(name)

    async def cancel(self, name: str, attempt: int = 1) -> None:
        await self.send(WorkCancelled(request_id=name, attempt=attempt, owner_epoch=0, worker_epoch=self.epoch))

    async def ended(self, *names: str) -> None:
        """Wait until the owner has heard of the end of these requests."""
        await until(lambda: self.over(*names))

    def over(self, *names: str) -> bool:
        ends = self.progress(RequestFinished) + self.progress(RequestFailed)
        return {end.request_id for end in ends}.issuperset(names)

    def chunks(self, name: str, attempt: int | None = None, slot: int = 3) -> list[TokenChunk]:
        found = [chunk for event in self.tokens(TokensEmitted, slot) for chunk in event.chunks]
        return [one for one in found if one.request_id == name and attempt in (None, one.attempt)]

    def output(self, name: str, attempt: int | None = None) -> list[int]:
        return [token for chunk in self.chunks(name, attempt) for token in unpack_u32(chunk.token_ids)]

    def end(self, name: str) -> Any:
        """Return the end of a response; None before it."""
        return next((end for end in self.tokens(ResponseEnded) if end.request_id == name), None)

    def records(self, topic: Topic, partition: int = PARTITION) -> list[Record]:
        return self.log.records(topic.name, partition, 0, READ_MAX)

    def events(self, topic: Topic, kind: type | None = None, partition: int = PARTITION) -> list[Any]:
        found = [decode(topic, record.value) for record in self.records(topic, partition)]
        return [event for event in found if kind is None or type(event) is kind]

    def tokens(self, kind: type | None = None, slot: int = 3) -> list[Any]:
        return self.events(TOKENS, kind, slot)

    def progress(self, kind: type | None = None) -> list[Any]:
        return self.events(PROGRESS, kind)

    def kv(self) -> list[Any]:
        return self.events(KV_EVENTS)

    def loads(self) -> list[Any]:
        return self.events(METRICS)

    def dead_letters(self) -> list[Record]:
        return self.records(DEAD_LETTERS)


@pytest.fixture
def leases() -> Leases:
    return embedded_leases()


@pytest.fixture
def log() -> Iterator[SqliteLog]:
    log = SqliteLog.open(None)
    yield log
    log.close()


@pytest.fixture
async def scene(log: SqliteLog, leases: Leases) -> AsyncIterator[Scene]:
    keeper = LeaseKeeper(leases, ttl_s=5.0)
    keeper.start()
    yield Scene(log, leases, keeper)
    await keeper.stop()


@pytest.fixture
def worker(scene: Scene) -> Worker:
    return scene.worker()


@pytest.fixture
async def epoch(scene: Scene, worker: Worker) -> AsyncIterator[int]:
    """The epoch of the worker, which runs during the test."""
    async with scene.serving(worker) as number:
        yield number
