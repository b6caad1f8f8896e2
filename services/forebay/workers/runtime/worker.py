"""Worker: runs one engine instance for the log. It makes no decisions; it runs the items of its own epoch.

Theory of operation. The worker acquires a lease and follows the topic `fleet` until the owner admits this incarnation.
The offset of the admission is the worker epoch. Then the worker reads its work from its work slot, a partition of
`work.<pool>`; `forebay.workers.runtime.work_items` runs it. When the log says that the epoch is lost, the worker drops
all requests and acquires the lease as a new incarnation.

A worker that has to stop, or that an operator drains, marks its lease as draining. Once the owner has recorded the
drain, it sends the worker no new work. Requests that do not finish in time continue on other workers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from forebay import runtime
from forebay.engine_model.steps import Stored
from forebay.events.codec import DecodeError, encode
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
from forebay.events.progress import EngineFailed
from forebay.events.topics import FLEET, PROGRESS, work_topic
from forebay.events.work import AnyWorkEvent, ReannounceCache, ReleaseKv, WorkCancelled, WorkerCommand, WorkItem
from forebay.runtime.errors import cause_of
from forebay.transport.base import Draft, Log, LogError, Record, Tail, event_of
from forebay.transport.dead_letters import dead_letter
from forebay.transport.patience import until_available
from forebay.workers.engine import AttemptFailed, CacheChange, Engine, EngineBatch, EngineError, StoreEngine, TierEngine
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime.commands import CommandRunner
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.life_cycle import State, Transition, WorkerDrain, WorkerLifeCycle
from forebay.workers.runtime.media_feed import MediaFeed
from forebay.workers.runtime.outbox import LOAD_INTERVAL_S, Outbox, append_output
from forebay.workers.runtime.resume import Spawn
from forebay.workers.runtime.work_items import WorkerCounters, WorkItems, no_such_rank

logger = logging.getLogger(__name__)

READ_MAX = 256  # records processed before other tasks may run
ENGINE_STOP_S = 30.0
CHECK_S = 2.0  # interval between two health checks
CHECK_TIMEOUT_S = 10.0  # a live engine replies at once; the machine may be busy
REPORT_TIMEOUT_S = 5.0  # timeout for reporting the cause of the failure; the lease is kept as long
ERROR_CHARS_MAX = 2_000
DRAIN_S = 60.0  # as of the option --drain-s of `forebay worker`
KEPT_S = 0.1  # how often a drain checks whether kept KV was fetched, because engines do not report that


class HealthWatch:
    """Checks the health of one engine periodically. `checked_s` is on the monotonic clock.

    `healthy_s` are the seconds from the first to the last successful check of `run`.
    """

    def __init__(self, engine: Engine) -> None:
        self.checked_s = runtime.monotonic_s()
        self.healthy_s = 0.0
        self._engine = engine
        self._wanted = asyncio.Event()

    def check_now(self) -> None:
        self._wanted.set()

    async def run(self, passed: Callable[[], None]) -> None:
        """Check the engine until cancelled, and call `passed` after each successful check.

        Raises EngineError if the engine is broken or does not reply in time.
        """
        first_s: float | None = None
        while True:
            try:
                async with asyncio.timeout(CHECK_TIMEOUT_S):
                    await self._engine.check()
            except TimeoutError:
                text = f"the engine did not reply to a health check within {CHECK_TIMEOUT_S:g} s"
                raise EngineError(text) from None
            self.checked_s = runtime.monotonic_s()
            first_s = self.checked_s if first_s is None else first_s
            self.healthy_s = self.checked_s - first_s
            passed()
            self._wanted.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await self._wanted.wait()


class WorkerReplaced(Exception):
    """Another process with the same worker id has taken the lease, so this process must not serve."""


@dataclass(slots=True)
class _Epoch:
    number: int
    owner_epoch: int  # of the owner that admitted the worker
    work: Tail
    outbox: Outbox
    items: WorkItems


class Worker:
    """Runs one engine: passes work items from the log to the engine, and appends the engine's output to the log.

    Args:
        token: value of the lease that identifies this incarnation; unique among the workers of this process.
        partition: partition of the control topics of the group.
        drain_s: maximum seconds to wait for requests in flight after an operator's command to drain.

    Attributes:
        spec: description of the worker. After the start of the engine it has the engine's actual sizes.
        owner_events: version of the event types that the newest owner can read.
    """

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
        drain_s: float = DRAIN_S,
    ) -> None:
        self.spec = spec
        self.life = WorkerLifeCycle()
        self.health = HealthWatch(engine)
        self.counters = WorkerCounters()
        self._log = log
        self._keeper = keeper
        self.engine = engine
        self._group = group
        self._partition = partition
        self._work_topic = work_topic(spec.pool)
        self._first_token = self._token = token
        self._incarnations = 0
        self._replaced_by: str | None = None
        self._wake = asyncio.Event()
        self._drain: WorkerDrain | None = None
        self._owner_epoch = -1
        self.owner_events = 1
        self._epoch: _Epoch | None = None
        self._load_timer: asyncio.TimerHandle | None = None
        self.media = MediaFeed(engine, spec.worker_id, self._on_media_failed)
        self.commands = CommandRunner(engine, spec.model, self._append_result, lambda: self.drain(drain_s))

    @property
    def worker_epoch(self) -> int | None:
        """Epoch of the worker; None while it is not a member of the fleet."""
        return None if self._epoch is None else self._epoch.number

    @property
    def active_requests(self) -> Collection[str]:
        return () if self._epoch is None else self._epoch.items.active

    @property
    def is_draining(self) -> bool:
        """Whether the worker was asked to drain, so that it must not come back after a failure of its engine."""
        return self._drain is not None

    async def run(self) -> None:
        """Start the engine and serve until cancelled, or until a drain ends.

        Raises EngineError if the engine cannot start, otherwise a group with WorkerReplaced, LogError or the engine's
        error.
        """
        try:
            # An engine that fails during its start may leave processes behind.
            if await self._start_engine():
                async with asyncio.TaskGroup() as tasks:
                    parts = self._run_engine(), self.health.run(self._on_health_check), self.commands.run()
                    others = [tasks.create_task(part) for part in parts]
                    await self._follow(tasks.create_task)
                    self._leave()
                    for task in others:
                        task.cancel()
        except (EngineError, BaseExceptionGroup) as error:
            # Release first, before waiting for the log: the owner moves the requests as soon as it sees the release.
            self._keeper.release(self._group, self.spec.worker_id)
            await report_failure(self._log, self._partition, self.spec, self.worker_epoch, error)
            raise
        finally:
            self._leave()
            self._keeper.release(self._group, self.spec.worker_id)
            self.life.move(Transition.LEAVE)
            logger.info("worker %s left", self.spec.worker_id)
            await self._stop_engine()

    def drain(self, within_s: float) -> None:
        """Begin to drain: get no new work, and end `run` once all requests have finished, or after `within_s` seconds.

        Unfinished requests then continue on other workers.
        """
        if self._drain is None:
            self._drain = WorkerDrain(within_s)
            self._wake.set()

    async def _start_engine(self) -> bool:
        """Start the engine. Return False if the worker was stopped before the engine had started."""
        starting = asyncio.create_task(self.engine.start(self.spec))
        stopping = asyncio.create_task(self._wake.wait())
        try:
            await asyncio.wait((starting, stopping), return_when=asyncio.FIRST_COMPLETED)
            if self._drain is not None:
                return False
            self.spec = starting.result()
            self.commands.loras = self.spec.loras
            self.health.checked_s = runtime.monotonic_s()
            return True
        finally:
            for task in (starting, stopping):
                task.cancel()
            await asyncio.gather(starting, stopping, return_exceptions=True)

    async def _run_engine(self) -> None:
        await self.engine.run(self._publish)
        raise EngineError("the engine stopped serving on its own")

    def _on_health_check(self) -> None:
        if self.life.state is State.RUNNING:
            self.life.move(Transition.PASS)

    async def _stop_engine(self) -> None:
        try:
            async with asyncio.timeout(ENGINE_STOP_S):
                await self.engine.stop()
        except TimeoutError:
            logger.error("the engine did not stop within %g s", ENGINE_STOP_S)  # noqa: TRY400

    async def _follow(self, spawn: Spawn) -> None:
        # The end is read before the lease is acquired, so the admission cannot be missed.
        end = await until_available(lambda: self._log.end(FLEET.name, self._partition))
        fleet = self._log.tail(FLEET.name, self._partition, end, self._wake)
        self._take_lease()
        self.life.move(Transition.REGISTER)
        try:
            while True:
                self._wake.clear()
                if self._replaced_by is not None:
                    raise WorkerReplaced(
                        f"worker {self.spec.worker_id} was replaced: incarnation {self._replaced_by} holds its lease;"
                        " give each worker its own --id"
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
        left_s = None if self._drain is None else self._drain.left_s(runtime.monotonic_s())
        if left_s is not None and self.media.kept():
            left_s = min(left_s, KEPT_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(left_s):
                await self._wake.wait()

    def _drained(self, drain: WorkerDrain) -> bool:
        """Return whether the drain is over. The first call marks the lease as draining."""
        if self.life.state is not State.STOPPING:
            self.life.move(Transition.STOP)
            if self._epoch is not None:
                active, kept = len(self.active_requests), self.media.kept()
                logger.info(
                    "worker %s is draining: %d requests in flight, KV of %d kept", self.spec.worker_id, active, kept
                )
                self._hold_lease(draining=True)
        now = runtime.monotonic_s()
        if self._epoch is None:
            return True
        if now >= drain.ends_s:
            self.counters.handed_back += len(self.active_requests)
            logger.warning(
                "worker %s hands over %d unfinished requests", self.spec.worker_id, len(self.active_requests)
            )
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
            logger.warning("cannot decode fleet record %s: %s", record.offset, error)
            return
        if event.owner_epoch < self._owner_epoch:
            return
        # A worker that starts after the announcement of the owner learns the owner's epoch from any other event.
        self._owner_epoch = event.owner_epoch
        match event:
            case WorkerJoined():
                self._set_owner_events(event.events_version)
                is_own = event.spec.worker_id == self.spec.worker_id and event.lease == self._token
                # A repeated record does not start another epoch. But the worker may have joined by an owner that was
                # replaced before, and whose records no owner applies.
                if is_own and (self._epoch is None or event.owner_epoch > self._epoch.owner_epoch):
                    self._join(event, record.offset, spawn)
            case WorkerLost():
                if event.worker_id == self.spec.worker_id and event.worker_epoch == self.worker_epoch:
                    logger.warning("worker %s is lost and joins again: %s", event.worker_id, event.reason)
                    self._leave()
                    if self.life.state is not State.STOPPING:
                        self.life.move(Transition.LOSE)
                        self._take_lease()
            case WorkerDraining():
                if self._drain is not None and event.worker_epoch == self.worker_epoch:
                    self._drain.announced |= event.worker_id == self.spec.worker_id
            case OwnershipAnnounced():
                self._set_owner_events(event.events_version)
            case WorkerSuspect() | WorkerRecovered() | IngressJoined() | IngressLost():
                pass  # handled by the owner, which sends no new work meanwhile, or cancels it
            case _:
                assert_never(event)

    def _set_owner_events(self, version: int) -> None:
        self.owner_events = version
        if self._epoch is not None:
            self._epoch.outbox.owner_events = version

    def _join(self, event: WorkerJoined, worker_epoch: int, spawn: Spawn) -> None:
        if self.life.state is State.STOPPING:
            return
        if self._epoch is not None:
            self._leave()
            self.life.move(Transition.LOSE)
        work = self._log.tail(self._work_topic.name, event.slot, event.from_offset, self._wake)
        outbox = Outbox(self.spec, worker_epoch, self._group, self._partition, self.owner_events)
        items = WorkItems(self._log, self._group, self.spec, outbox, self.media, self.counters, spawn, self._settled)
        self._epoch = _Epoch(worker_epoch, event.owner_epoch, work, outbox, items)
        self.commands.join(outbox)
        if held := self._held(outbox):
            self._log.append_soon(held)
        self.life.move(Transition.ADMIT)
        self.health.check_now()
        logger.info(
            "worker %s joined the pool %s in slot %d, epoch %d",
            self.spec.worker_id,
            self.spec.pool,
            event.slot,
            worker_epoch,
        )

    def _held(self, outbox: Outbox) -> list[Draft]:
        """Return the records that announce the caches of all ranks, and the shared store."""
        drafts: list[Draft] = []
        for rank in self.spec.ranks:
            held: list[CacheChange] = [Stored(None, tuple(self.engine.held(rank)))]
            if isinstance(self.engine, TierEngine):
                held += self.engine.held_in_tiers(rank)
            drafts += outbox.cache.changes(rank, held)
        if isinstance(self.engine, StoreEngine):
            drafts += outbox.store.announcement(self.engine.stored())
        return drafts

    def _leave(self) -> None:
        """End the worker epoch and drop its requests.

        The owner has moved the requests to other workers, and has removed the worker's cache from the prefix index.
        """
        if self._epoch is None:
            return
        if self._load_timer is not None:
            self._load_timer.cancel()
            self._load_timer = None
        self._epoch.work.close()
        self._epoch.items.close()
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
                epoch.items.start(event)
            case WorkCancelled():
                epoch.items.cancel(event)
                self._settled()
            case ReleaseKv():
                epoch.items.release(event)
                self._settled()
            case ReannounceCache():
                self._reannounce(event, epoch)
            case WorkerCommand():
                self.commands.add(event)
            case _:
                assert_never(event)

    def _is_addressed(self, event: AnyWorkEvent, epoch: _Epoch) -> bool:
        """Return whether an event is for this worker in this epoch. If not, count the event, which is then skipped."""
        counters = self.counters
        if event.group != self._group:
            counters.other_group += 1
            first = counters.other_group == 1
        elif event.worker_id != self.spec.worker_id:
            counters.other_worker += 1
            first = counters.other_worker == 1
        else:
            # Work for an earlier epoch was sent before the worker was lost and rejoined.
            counters.other_epoch += event.worker_epoch != epoch.number
            return event.worker_epoch == epoch.number
        if first:
            logger.error(
                "skipped an event: %s for worker %r of group %r arrived at worker %r of group %r, because two workers"
                " read one partition of %s; restart one of them. The metric forebay_worker_items_skipped_total counts"
                " further events",
                type(event).__struct_config__.tag,
                event.worker_id,
                event.group,
                self.spec.worker_id,
                self._group,
                self._work_topic.name,
            )
        return False

    def _reannounce(self, event: ReannounceCache, epoch: _Epoch) -> None:
        if event.rank not in self.spec.ranks:
            self.counters.unknown_rank += 1
            logger.warning("cannot re-announce a cache: %s", no_such_rank(self.spec, event.rank))
            return
        self.counters.reannounced += 1
        if drafts := epoch.outbox.cache.reannouncement(event.rank, event.above_seq):
            self._log.append_soon(drafts)

    def _on_media_failed(self, item: WorkItem, error: AttemptFailed | TransferError) -> None:
        if self._epoch is not None:
            self._epoch.items.not_submitted(item, error)

    def _append_result(self, drafts: Sequence[Draft]) -> None:
        append_output(self._log, drafts)
        self._settled()

    @property
    def _busy(self) -> bool:
        return (self._epoch is not None and self._epoch.items.busy) or self.commands.busy

    def _settled(self) -> None:
        """Wake up a drain after the last request or command has ended."""
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
        if drafts := self._epoch.items.batch(batch):
            append_output(self._log, drafts)
        self._settled()
        if outbox.holds_load and self._load_timer is None:
            self._load_timer = asyncio.get_running_loop().call_later(LOAD_INTERVAL_S, self._publish_load)

    def _publish_load(self) -> None:
        """Append load reports that the rate limit delayed."""
        self._load_timer = None
        if self._epoch is not None:
            # A failed log ends the worker at its next token, or at its next read of the fleet topic.
            with contextlib.suppress(LogError):
                self._log.append_soon(self._epoch.outbox.held_load())


async def report_failure(
    log: Log, partition: int, spec: WorkerSpec, worker_epoch: int | None, error: BaseException
) -> None:
    """Append an `EngineFailed` event if an EngineError, alone or in an exception group, has ended a worker.

    `worker_epoch` is None if the worker was not a member of the fleet.
    """
    error = cause_of(error, EngineError)
    if not isinstance(error, EngineError):
        return
    event = EngineFailed(
        worker_id=spec.worker_id,
        pool=spec.pool,
        engine=spec.engine,
        error=str(error)[:ERROR_CHARS_MAX],
        worker_epoch=worker_epoch,
        at_us=runtime.wall_us(),
    )
    # If the log fails, other tasks of the worker report that.
    with contextlib.suppress(LogError, TimeoutError):
        async with asyncio.timeout(REPORT_TIMEOUT_S):
            await log.append([Draft(PROGRESS.name, partition, encode(PROGRESS, event))])
