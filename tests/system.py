"""Small system for tests on one log, with an owner, mock workers and an event-level client."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from types import UnionType
from typing import Any

import msgspec

from forebay.core.block_hashes import sequence_hashes
from forebay.engine_model.model import EngineConfig
from forebay.events.base import Event, pack_u32, unpack_u32
from forebay.events.codec import decode, encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.fleet import WorkerLease, WorkerSpec
from forebay.events.requests import RequestCancelled, RequestSubmitted, Sampling
from forebay.events.tokens import ResponseEnded, TokensEmitted
from forebay.events.topics import DECISIONS, REQUESTS, TOKENS, Topic
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.standby import Standby
from forebay.transport.base import Draft, Leases, Log
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.worker import Worker

MODEL = "model"
BLOCK = 4
SLOT = 3
PATIENCE_S = 20.0
READ_MAX = 100_000
SPEEDUP = 100_000.0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - records set no event
            await asyncio.sleep(0.001)


def submitted(name: str, prompt: list[int], max_tokens: int = 3, **changes: Any) -> RequestSubmitted:
    packed = pack_u32(prompt)
    fields: dict[str, Any] = {
        "request_id": name,
        "model": MODEL,
        "token_ids": packed,
        "sequence_hashes": sequence_hashes(packed, BLOCK),
        "reply_slot": SLOT,
        "timeout_us": 60_000_000,
        "tie_seed": len(name) * 7919 + sum(name.encode()),
        "sampling": Sampling(max_tokens=max_tokens, temperature=0.0),
        **changes,
    }
    return RequestSubmitted(**fields)


def settings(**changes: Any) -> GroupSettings:
    """Return settings of an owner for quick tests. `pool` is the only pool; None derives the pools from leases."""
    pool = PoolConfigured(pool="default", model=MODEL, block_size=BLOCK, router=RouterConfig())
    pool = changes.pop("pool", pool)
    fields: dict[str, Any] = {
        "group": MODEL,
        "partition": 0,
        "owner_id": "test",
        "pools": () if pool is None else (pool,),
        "poll_s": 0.005,
    }
    return GroupSettings(**{**fields, **changes})


class System:
    """The parts of a system that outlive an owner: log, leases and workers."""

    def __init__(self, log: SqliteLog, *, ttl_s: float = 30.0) -> None:
        self.log = log
        self.leases = embedded_leases()
        self.keeper = LeaseKeeper(self.leases, ttl_s=ttl_s)
        self.workers: dict[str, Worker] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._group: asyncio.TaskGroup | None = None

    @asynccontextmanager
    async def started(self, workers: int, *, card: str = "") -> AsyncIterator["System"]:
        """Run the workers. If a worker dies, the body is cancelled and an exception group with its error is raised."""
        self.keeper.start()
        try:
            async with asyncio.TaskGroup() as self._group:
                for number in range(workers):
                    self.start_worker(f"w{number}", card=card)
                yield self
                for name in list(self._tasks):
                    await self.stop_worker(name)
        finally:
            await self.keeper.stop()

    def start_worker(self, name: str, *, speedup: float = SPEEDUP, block_size: int = BLOCK, card: str = "") -> None:
        config = EngineConfig(
            block_size=block_size,
            kv_blocks_total=256,
            max_num_seqs=16,
            max_num_batched_tokens=256,
            vocabulary=tuple(range(50)),
        )
        spec = WorkerSpec(
            worker_id=name,
            model=MODEL,
            block_size=config.block_size,
            kv_blocks_total=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            card=card,
        )
        engine = MockEngine(config, speedup=speedup)
        token = f"{name}-{len(self._tasks)}-{id(engine)}"
        worker = self.workers[name] = Worker(self.log, self.keeper, spec, engine, token=token, group=MODEL)
        assert self._group is not None, "the system is started first"
        self._tasks[name] = self._group.create_task(worker.run(), name=name)

    async def stop_worker(self, name: str) -> None:
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    def join(self, name: str, **changes: Any) -> None:
        """Acquire a lease for a worker that does nothing."""
        size = {"block_size": BLOCK, "kv_blocks_total": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        spec = WorkerSpec(**{"worker_id": name, "model": MODEL, **size, **changes})
        self.leases.acquire(spec.model, name, f"{name}-1", msgspec.msgpack.encode(WorkerLease(spec=spec)), 60_000)

    @asynccontextmanager
    async def owned(
        self,
        log: Log | None = None,
        ingress_leases: Leases | None = None,
        *,
        fleet: int = 0,
        dies: bool = False,
        standby: Standby | None = None,
        clock_us: Callable[[], int] | None = None,
        **changes: Any,
    ) -> AsyncIterator[Owner]:
        """Run an owner until it stops as planned.

        Args:
            log: By default the log of the system.
        """
        owner = Owner(log or self.log, self.leases, settings(**changes), clock_us, ingress_leases)
        await owner.start(standby)
        running = asyncio.create_task(owner.run())
        try:
            if fleet:
                await until(lambda: len(owner.world.fleet) == fleet)
            yield owner
        finally:
            if dies:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
                owner.drop()
            else:
                await owner.stop()
                await running
                await owner.close()

    def append(self, topic: Topic, *events: Event) -> None:
        """Append events to the group's partition of a topic, without waiting."""
        self.log.append_soon([Draft(topic.name, 0, encode(topic, event)) for event in events])

    def send(self, event: Event) -> None:
        """Append an event to `requests`."""
        self.append(REQUESTS, event)

    async def serve(self, name: str, prompt: list[int], max_tokens: int = 3, **changes: Any) -> None:
        """Send a request, and wait until it has ended."""
        self.send(submitted(name, prompt, max_tokens, **changes))
        await until_ended(self, name)

    def cancel(self, name: str) -> None:
        self.send(RequestCancelled(request_id=name))

    def events(self, topic: Topic, kind: type | UnionType | None = None, partition: int = 0) -> list[Any]:
        records = self.log.records(topic.name, partition, 0, READ_MAX)
        found = [decode(topic, record.value) for record in records]
        return [event for event in found if kind is None or isinstance(event, kind)]

    def decisions(self, kind: type | UnionType | None = None) -> list[Any]:
        return self.events(DECISIONS, kind)

    def ends(self) -> dict[str, list[ResponseEnded]]:
        """Return the `ResponseEnded` events by request id."""
        found: dict[str, list[ResponseEnded]] = {}
        for event in self.events(TOKENS, ResponseEnded, SLOT):
            found.setdefault(event.request_id, []).append(event)
        return found

    def answer(self, name: str) -> list[int]:
        """Return the tokens of a response by position, without duplicates, as a client assembles them."""
        tokens: list[int] = []
        for event in self.events(TOKENS, TokensEmitted, SLOT):
            for chunk in event.chunks:
                if chunk.request_id == name:
                    new = unpack_u32(chunk.token_ids)[max(0, len(tokens) - chunk.first_index) :]
                    tokens += new
        return tokens


async def until_ended(system: System, name: str) -> None:
    await until(lambda: name in system.ends())


async def take_snapshot(owner: Owner) -> None:
    """Take a snapshot of the current state, and wait until it is complete. The owner must not run meanwhile."""
    wanted = owner.snapshots.taken + 1 + owner.snapshots.sealed
    while owner.snapshots.taken < wanted:
        owner.snapshots.begin(owner.world)
        await owner.turn(())
        await owner.snapshots.settle()
