"""A worker: one engine instance as the log knows it. It never decides; it obeys the items of its own epoch.

Theory of operation. The worker takes a lease and follows the fleet until the owner admits that incarnation;
the offset of the admission is its epoch. Then it reads its slot of the pool's work topic. When the log says
that the epoch is lost, everything is dropped and a new incarnation takes the lease: the log is the truth.
`forebay.workers.runtime.requests` runs the work events. A worker that has to stop marks its lease as draining. Once the
owner has recorded that, it sends no new work, and requests that do not finish in time continue on other workers.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from forebay.events.codec import DecodeError
from forebay.events.fleet import (
    AnyFleetEvent,
    IngressJoined,
    IngressLost,
    OwnershipAnnounced,
    WorkerDraining,
    WorkerJoined,
    WorkerLease,
    WorkerLost,
    WorkerRecovered,
    WorkerSpec,
    WorkerSuspect,
)
from forebay.events.tokens import ResponseError
from forebay.events.topics import FLEET, work_topic
from forebay.events.work import AnyWorkEvent, ReannounceCache, ReleaseKv, WorkCancelled, WorkerCommand, WorkItem
from forebay.transport.base import Draft, Log, LogError, Record, Tail
from forebay.transport.dead_letters import dead_letter
from forebay.transport.decoding import event_of
from forebay.workers.engine import Engine, EngineBatch, EngineError
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime.commands import CommandRunner
from forebay.workers.runtime.health import HealthWatch, tell_failure
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.life_cycle import Drain, Life, Move, State
from forebay.workers.runtime.media_feed import MediaFeed
from forebay.workers.runtime.outbox import LOAD_INTERVAL_S, Outbox
from forebay.workers.runtime.requests import Orders, WorkerCounters, no_such_rank
from forebay.workers.runtime.resume import Spawn

logger = logging.getLogger(__name__)

READ_MAX = 256  # records taken before the event loop is given back
ENGINE_STOP_S = 30.0
KEPT_S = 0.1  # who drains looks this often whether what it keeps was fetched: no engine has to tell


class WorkerReplaced(Exception):
    """Another incarnation of the same worker id holds the lease; two cannot serve."""


@dataclass(slots=True)
class _Epoch:
    """One membership of the fleet."""

    number: int
    work: Tail
    outbox: Outbox
    orders: Orders


class Worker:
    """Runs `engine` for the group at `partition`. `token` is unique to this worker in this process."""

    def __init__(
        self,
        log: Log,
        keeper: LeaseKeeper,
        spec: WorkerSpec,
        engine: Engine,
        *,
        token: str,
        group: str,
        partition: int = 0,
    ) -> None:
        self.spec = spec
        self.started = False  # the engine runs, and `spec` is what it made of it
        self.life = Life()
        self.health = HealthWatch(engine)
        self.counters = WorkerCounters()
        self._log = log
        self._keeper = keeper
        self._engine = engine
        self._group = group
        self._partition = partition
        self._work_topic = work_topic(spec.pool)
        self._first_token = self._token = token
        self._incarnations = 0
        self._replaced_by: str | None = None
        self._wake = asyncio.Event()
        self._stopping = asyncio.Event()
        self._drain: Drain | None = None
        self._owner_epoch = -1
        self._epoch: _Epoch | None = None
        self._load_timer: asyncio.TimerHandle | None = None
        self.media = MediaFeed(engine, spec.worker_id, self._on_media_failed)
        self.commands = CommandRunner(engine, spec.model, self._answer)

    @property
    def worker_epoch(self) -> int | None:
        """The epoch in which the worker is a member; None when it is not."""
        return None if self._epoch is None else self._epoch.number

    @property
    def under_way(self) -> Collection[str]:
        """The ids of the requests that it has."""
        return () if self._epoch is None else self._epoch.orders.active

    @property
    def engine(self) -> Engine:
        """What it runs."""
        return self._engine

    async def run(self) -> None:
        """Serve until cancelled, or until a drain is over.

        Raises EngineError when the engine cannot start; else a group with WorkerReplaced, LogError or its error.
        """
        try:
            # An engine that dies on its way up may have left processes behind.
            if await self._start_engine():
                async with asyncio.TaskGroup() as tasks:
                    parts = self._run_engine(), self.health.run(self._passed), self.commands.run()
                    others = [tasks.create_task(part) for part in parts]
                    await self._follow(tasks.create_task)
                    self._leave()
                    for task in others:
                        task.cancel()
        except (EngineError, BaseExceptionGroup) as error:
            # Before anything that waits for the log: the owner moves the requests as soon as it sees the release.
            self._keeper.release(self._group, self.spec.worker_id)
            await tell_failure(self._log, self._partition, self.spec, self.worker_epoch, error)
            raise
        finally:
            self._leave()
            self._keeper.release(self._group, self.spec.worker_id)
            self.life.move(Move.LEAVE)
            await self._stop_engine()

    def drain(self, within_s: float) -> None:
        """Take nothing new and let `run` end when what is under way has, or after so long; the rest is handed back."""
        if self._drain is None:
            self._drain = Drain(within_s)
            self._stopping.set()
            self._wake.set()

    async def _start_engine(self) -> bool:
        """False when the worker was told to stop before the engine had started."""
        starting = asyncio.create_task(self._engine.start(self.spec))
        stopping = asyncio.create_task(self._stopping.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self._drain is not None:
                return False
            self.spec = starting.result()
            self.commands.loras = self.spec.loras
            self.started = True
            self.health.checked_s = time.monotonic()
            return True
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)

    async def _run_engine(self) -> None:
        await self._engine.run(self._publish)
        raise EngineError("the engine stopped serving by itself")

    def _passed(self) -> None:
        """The engine is well."""
        if self.life.state is State.RUNNING:
            self.life.move(Move.PASS)

    async def _stop_engine(self) -> None:
        try:
            async with asyncio.timeout(ENGINE_STOP_S):
                await self._engine.stop()
        except TimeoutError:
            logger.error("the engine did not stop within %g s", ENGINE_STOP_S)  # noqa: TRY400

    async def _follow(self, spawn: Spawn) -> None:
        # The end is read before the lease is taken, so the admission cannot be missed.
        end = await self._log.end(FLEET.name, self._partition)
        fleet = self._log.tail(FLEET.name, self._partition, end, self._wake)
        self._take_lease()
        self.life.move(Move.REGISTER)
        try:
            while True:
                self._wake.clear()
                if self._replaced_by is not None:
                    raise WorkerReplaced(
                        f"worker {self.spec.worker_id}: incarnation {self._replaced_by} holds the lease now"
                    )
                for record in fleet.take(READ_MAX):
                    self._on_fleet(record, spawn)
                if self._epoch is not None:
                    for record in self._epoch.work.take(READ_MAX):
                        self._on_work(record, self._epoch)
                if self._drain is not None and self._drained(self._drain):
                    return
                if len(fleet) or (self._epoch is not None and len(self._epoch.work)):
                    await asyncio.sleep(0)
                else:
                    await self._sleep()
        finally:
            fleet.close()

    async def _sleep(self) -> None:
        left_s = None if self._drain is None else self._drain.left_s(time.monotonic())
        if left_s is not None and self.media.kept():
            left_s = min(left_s, KEPT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._wake.wait()

    def _drained(self, drain: Drain) -> bool:
        """Whether nothing is left to wait for; says that the worker stops when it is asked for the first time."""
        if self.life.state is not State.STOPPING:
            self.life.move(Move.STOP)
            if self._epoch is not None:
                under_way, kept = len(self.under_way), self.media.kept()
                logger.info(
                    "%s is draining: %d requests under way, KV of %d kept", self.spec.worker_id, under_way, kept
                )
                self._hold_lease(draining=True)
        now = time.monotonic()
        if self._epoch is None:
            return True
        if now >= drain.ends_s:
            self.counters.handed_back += len(self.under_way)
            logger.warning("worker %s hands back %d requests", self.spec.worker_id, len(self.under_way))
            return True
        return not self._busy and (drain.announced or now >= drain.fact_ends_s)

    def _take_lease(self) -> None:
        self._incarnations += 1
        if self._incarnations > 1:
            self._token = f"{self._first_token}.{self._incarnations}"
        self.spec = msgspec.structs.replace(self.spec, loras=self.commands.loras)
        self._hold_lease()

    def _hold_lease(self, *, draining: bool = False) -> None:
        payload = msgspec.msgpack.encode(WorkerLease(spec=self.spec, draining=draining))
        self._keeper.hold(self._group, self.spec.worker_id, self._token, payload, self._on_replaced)

    def _on_replaced(self, other: str) -> None:
        self._replaced_by = other
        self._wake.set()

    def _on_fleet(self, record: Record, spawn: Spawn) -> None:
        try:
            event: AnyFleetEvent = event_of(FLEET, record)
        except DecodeError as error:
            self.counters.fleet_undecodable += 1
            logger.warning("fleet record %s not understood: %s", record.offset, error)
            return
        if event.owner_epoch < self._owner_epoch:
            return
        match event:
            case OwnershipAnnounced():
                self._owner_epoch = event.owner_epoch
            case WorkerJoined():
                if event.spec.worker_id == self.spec.worker_id and event.lease == self._token:
                    self._join(event, record.offset, spawn)
            case WorkerLost():
                if event.worker_id == self.spec.worker_id and event.worker_epoch == self.worker_epoch:
                    logger.warning("worker %s lost its epoch: %s", event.worker_id, event.reason)
                    self._leave()
                    if self.life.state is not State.STOPPING:
                        self.life.move(Move.LOSE)
                        self._take_lease()
            case WorkerDraining():
                if self._drain is not None and event.worker_epoch == self.worker_epoch:
                    self._drain.announced |= event.worker_id == self.spec.worker_id
            case WorkerSuspect() | WorkerRecovered() | IngressJoined() | IngressLost():
                pass  # the owner's business: it sends nothing new meanwhile, or cancels work
            case _:
                assert_never(event)

    def _join(self, event: WorkerJoined, worker_epoch: int, spawn: Spawn) -> None:
        if self.life.state is State.STOPPING:
            return
        if self._epoch is not None:
            self._leave()
            self.life.move(Move.LOSE)
        work = self._log.tail(self._work_topic.name, event.slot, event.from_offset, self._wake)
        outbox = Outbox(self.spec, worker_epoch, self._group, self._partition)
        orders = Orders(self._log, self._group, self.spec, outbox, self.media, self.counters, spawn, self._settled)
        self._epoch = _Epoch(worker_epoch, work, outbox, orders)
        self.commands.join(outbox)
        held = [draft for rank in self.spec.ranks for draft in outbox.cache.announcement(rank, self._engine.held(rank))]
        if held:
            self._log.append_soon(held)
        self.life.move(Move.ADMIT)
        self.health.ask()
        logger.info("worker %s serves slot %s in epoch %s", self.spec.worker_id, event.slot, worker_epoch)

    def _leave(self) -> None:
        """Drop everything of the epoch: others have its requests now, the owner forgot its cache."""
        if self._epoch is None:
            return
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        self._epoch.work.close()
        self._epoch.orders.close()
        self._epoch = None
        self.commands.leave()

    def _on_work(self, record: Record, epoch: _Epoch) -> None:
        try:
            event: AnyWorkEvent = event_of(self._work_topic, record)
        except DecodeError as error:
            self._bury(record, str(error))
            return
        if not self._is_addressed(event, epoch):
            return
        match event:
            case WorkItem():
                epoch.orders.start(event)
            case WorkCancelled():
                epoch.orders.cancel(event)
                self._settled()
            case ReleaseKv():
                epoch.orders.release(event)
                self._settled()
            case ReannounceCache():
                self._reannounce(event, epoch)
            case WorkerCommand():
                self.commands.add(event)
            case _:
                assert_never(event)

    def _is_addressed(self, event: AnyWorkEvent, epoch: _Epoch) -> bool:
        """Whether an event is for this worker in this epoch. Anything else on its slot is counted and not run."""
        counters = self.counters
        if event.group != self._group:
            counters.other_group += 1
            first = counters.other_group == 1
        elif event.worker_id != self.spec.worker_id:
            counters.other_worker += 1
            first = counters.other_worker == 1
        else:
            # An epoch before: what was sent before the worker was lost and joined again.
            counters.other_epoch += event.worker_epoch != epoch.number
            return event.worker_epoch == epoch.number
        if first:
            logger.error(
                "%s is addressed to worker %r of group %r, but arrived at worker %r of group %r, which does not run "
                "it: two workers share a slot of %s; forebay_worker_items_skipped_total counts further ones",
                type(event).__struct_config__.tag,
                event.worker_id,
                event.group,
                self.spec.worker_id,
                self._group,
                self._work_topic.name,
            )
        return False

    def _reannounce(self, asked: ReannounceCache, epoch: _Epoch) -> None:
        if asked.rank not in self.spec.ranks:
            self.counters.unknown_rank += 1
            logger.warning("a cache cannot be announced: %s", no_such_rank(self.spec, asked.rank))
            return
        self.counters.reannounced += 1
        if drafts := epoch.outbox.cache.reannouncement(asked.rank, asked.above_seq):
            self._log.append_soon(drafts)

    def _on_media_failed(self, item: WorkItem, error: ResponseError | TransferError) -> None:
        if self._epoch is not None:
            self._epoch.orders.not_submitted(item, error)

    def _answer(self, drafts: Sequence[Draft]) -> None:
        """Say what came of a command."""
        self._log.append_soon(drafts)
        self._settled()

    @property
    def _busy(self) -> bool:
        return (self._epoch is not None and self._epoch.orders.busy) or self.commands.busy

    def _settled(self) -> None:
        """A drain ends with the last request, or command."""
        if self._drain is not None and not self._busy:
            self._wake.set()

    def _bury(self, record: Record, reason: str) -> None:
        self.counters.dead_letters += 1
        logger.warning("dead letter: %s at offset %s: %s", record.topic, record.offset, reason)
        self._log.append_soon([dead_letter(record, self._partition, reason)])

    def _publish(self, batch: EngineBatch) -> None:
        if self._epoch is None:
            return
        outbox = self._epoch.outbox
        if drafts := self._epoch.orders.batch(batch):
            self._log.append_soon(drafts)
        self._settled()
        if outbox.holds_load and self._load_timer is None:
            self._load_timer = asyncio.get_running_loop().call_later(LOAD_INTERVAL_S, self._publish_load)

    def _publish_load(self) -> None:
        """The last word on a load is said, if late."""
        self._load_timer = None
        if self._epoch is not None:
            # A log that failed ends the worker at its next token, or at its next look at the fleet.
            with contextlib.suppress(LogError):
                self._log.append_soon(self._epoch.outbox.held_load())
