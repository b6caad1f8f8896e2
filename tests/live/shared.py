"""The scene of these tests: logs shared by processes, programs of other versions, routers, standbys, and a scenario."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.core.state.fleet import Fleet
from forebay.core.state_machine import IllegalTransition
from forebay.core.world import CORE_VERSION
from forebay.events.codec import decode, encode
from forebay.events.control import RouterConfig
from forebay.events.decisions import JournalRecord, OwnerClaimed, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.tokens import RequestLocated
from forebay.events.topics import DECISIONS, FLEET, TOKENS, topic_named
from forebay.events.versions import EVENTS_VERSION
from forebay.journal import reader, records
from forebay.journal import snapshots as recorded_snapshots
from forebay.journal.records import Validity, journal
from forebay.live import standby
from forebay.live.owner import owner, snapshot_writer
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import Owner
from forebay.live.owner.start_check import open_checked
from forebay.live.router.router import Router, RouterSettings
from forebay.live.standby import AbandonedTail, Standby
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft, Lease, Log, Record, Tail, Wake
from forebay.transport.directory import Directory
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import Driver
from tests.harness.faulty_log import Crashed, FaultyLog
from tests.system import MODEL, SLOT, System, settings, submitted, until

PREFIX = list(range(12))
SENT = {*(f"r{number}" for number in range(6)), "wrong", "gone"}

Hook = Callable[[Draft | None], Awaitable[None]]


@asynccontextmanager
async def background(work: Coroutine[Any, Any, None]) -> AsyncIterator["asyncio.Task[None]"]:
    """Run a coroutine until the body ends."""
    task = asyncio.create_task(work)
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def prompt(number: int) -> list[int]:
    """Return one of the prompts that share a prefix of three blocks."""
    return [*PREFIX, number, number, number, number]


async def flush(log: SqliteLog) -> None:
    """Wait until every pending append is in the log."""
    await log.append([Draft("dead-letters", 0, b"after it")])


# The log after a test


async def proven(log: SqliteLog) -> VerifyReport:
    """Verify that every decision of the log can be derived again, and return the report."""
    report = await verify(log)
    assert report.divergence is None, report.divergence
    assert report.verified == report.decisions
    return report


async def valid(log: SqliteLog, kind: type = object) -> list[Any]:
    """Return the valid journal records, of a kind if given, oldest first."""
    found = journal(log, 0, 0, journal_end(log), Validity())
    return [record async for _, record in found if isinstance(record, kind)]


def journal_end(log: SqliteLog) -> int:
    return log.next_offset(DECISIONS.name, 0)


def applied_fleet(log: SqliteLog, partition: int = 0) -> Fleet:
    """Return the fleet after all records of `fleet`."""
    fleet = Fleet()
    for record in log.records(FLEET.name, partition, 0, 1_000):
        with suppress(IllegalTransition):
            fleet.apply(decode(FLEET, record.value), record.offset)
    return fleet


# Logs


async def nothing(_: Draft | None) -> None:
    """Do nothing; the default append hook."""


class SharedLog:
    """A log shared by several processes: the records of one append are written one by one, as on Kafka.

    `hook` is awaited before each record of an `append`, and with None once all records are durable but before
    `append` returns. `appends` counts the calls of `append` and `append_soon`.
    """

    def __init__(self, log: Log, hook: Hook = nothing) -> None:
        self.log = log
        self.hook = hook
        self.appends = 0

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        self.appends += 1
        offsets = []
        for draft in drafts:
            await self.hook(draft)
            offsets += await self.log.append([draft])
        await self.hook(None)
        return offsets

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        self.appends += 1
        self.log.append_soon(drafts, then)

    async def flush(self) -> None:
        await asyncio.sleep(0)
        await self.log.flush()

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> "LateTail":
        return LateTail(self.log.tail(topic, partition, offset, wake), wake)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        await asyncio.sleep(0)
        return await self.log.read(topic, partition, offset, limit)

    async def begin(self, topic: str, partition: int) -> int:
        await asyncio.sleep(0)
        return await self.log.begin(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        await asyncio.sleep(0)
        return await self.log.end(topic, partition)


class LateTail:
    """A tail that is empty while it is not ready, for example at first, like one that fetches over the network."""

    def __init__(self, tail: Tail, wake: Wake) -> None:
        self.is_ready = False
        self._tail = tail
        self._wake = wake
        self._fetching = asyncio.create_task(self._fetch())

    async def _fetch(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self.is_ready = True
        self._wake.set()

    def take(self, limit: int) -> list[Record]:
        return self._tail.take(limit) if self.is_ready else []

    def __len__(self) -> int:
        return len(self._tail) if self.is_ready else 0

    def close(self) -> None:
        self._fetching.cancel()
        self._tail.close()


class Edited(SharedLog):
    """A log that returns other records of one topic, without those for which `edit` returns None."""

    def __init__(self, log: Log, topic: str, edit: Callable[[Record], Record | None]) -> None:
        super().__init__(log)
        self._topic = topic
        self._edit = edit

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        records = await super().read(topic, partition, offset, limit)
        if topic != self._topic:
            return records
        return [edited for record in records if (edited := self._edit(record)) is not None]


class Altered(Edited):
    """A log that returns altered values of one topic, by default of all its records."""

    def __init__(self, log: Log, topic: str, alter: Callable[[bytes], bytes], *, at: int | None = None) -> None:
        def edit(record: Record) -> Record:
            is_altered = at is None or record.offset == at
            return msgspec.structs.replace(record, value=alter(record.value)) if is_altered else record

        super().__init__(log, topic, edit)


def dearer(log: Log) -> Altered:
    """Return a log with higher costs of all routing decisions."""

    def alter(value: bytes) -> bytes:
        event = decode(DECISIONS, value)
        if not isinstance(event, RequestRouted):
            return value
        lie = msgspec.structs.replace(event, terms=msgspec.structs.replace(event.terms, cost=event.terms.cost + 1))
        return encode(DECISIONS, lie)

    return Altered(log, DECISIONS.name, alter)


# Owners


async def admit(system: System, workers: int) -> None:
    """Run a first owner until it has admitted the workers."""
    async with system.owned(fleet=workers):
        pass


def samples(owner: Owner) -> dict[tuple[str, ...], float]:
    """Return the metrics of an owner by their names and labels, without the model."""
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "model")): sample.value
        for metric in OwnerMetrics(owner, MODEL).collect()
        for sample in metric.samples
    }


class SteppedSystem(System):
    """A system whose owner takes a turn only when a test calls `turn`, at the clock of the test."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log)
        self.now_us = 1_000_000
        self.owner: Owner

    async def own(self, clock_us: Callable[[], int] | None = None, **changes: Any) -> None:
        """Start an owner that has admitted all workers with a lease."""
        self.owner = Owner(self.log, self.leases, settings(**changes), clock_us or (lambda: self.now_us))
        await self.owner.start()
        await self.admitted()

    async def admitted(self) -> None:
        owner = self.owner
        assert owner.admission is not None
        for _ in range(2):  # pools come first, then their workers
            world = owner.world
            await owner.admission.update(self.leases.poll(MODEL), world.pools, world.fleet, world.view["fleet"])
            await owner.turn()

    async def turn(self, passed_ms: int, emit: Callable[..., None], *arguments: Any, **fields: Any) -> None:
        """Advance the clock by `passed_ms`, call `emit`, and take a turn of the owner."""
        self.now_us += passed_ms * 1_000
        emit(*arguments, **fields)
        await flush(self.log)
        await self.owner.turn()

    def lose(self, *names: str) -> None:
        """Report the loss of workers, as the owner does."""
        for name in names:
            worker = self.owner.world.fleet.get(name)
            assert worker is not None
            self.leases.release(MODEL, name, f"{name}-1")
            epoch = self.owner.journal.epoch
            self.append(FLEET, WorkerLost(owner_epoch=epoch, worker_id=name, worker_epoch=worker.worker_epoch))


def lease_of(
    name: str, token: str, ttl_ms: int, *, left_ms: int | None = None, renewed: int = 0, **changes: Any
) -> Lease:
    """Return a lease that was renewed `renewed` times."""
    fields: dict[str, Any] = {"worker_id": name, "token": token, "payload": b"", "ttl_ms": ttl_ms, **changes}
    left_ms = ttl_ms if left_ms is None else left_ms
    return Lease(**{"expires_in_ms": left_ms, "deadline_ms": ttl_ms + renewed, **fields})


@asynccontextmanager
async def routing(
    system: System, name: str, log: Log | None = None, on_loss: Callable[[AbandonedTail], None] | None = None
) -> AsyncIterator[Router]:
    log = log or system.log
    directory = Directory(log)
    await directory.start()
    options = RouterSettings(
        router_id=name, partitions=1, slots_max=16, config=RouterConfig(), poll_s=0.005, retry_s=0.01, on_loss=on_loss
    )
    router = Router(log, system.leases, directory, options, CollectorRegistry())
    async with background(router.run()) as running:
        yield router
        await router.stop()
        await running


# Standbys and starts


async def serve(system: System, owner: Owner, *names: str) -> None:
    """Serve requests one after another, each followed by one that is rejected."""
    await until(lambda: len(owner.world.fleet) == 2)
    for number, name in enumerate(names):
        await system.serve(name, prompt(number))
        await system.serve(f"{name}-refused", PREFIX, model="another")
    await until(lambda: not len(owner.world.requests))


async def serve_unsealed(system: System, *names: str) -> None:
    """Serve requests with an owner that takes no final snapshot."""
    async with system.owned(dies=True) as owner:
        await serve(system, owner, *names)


async def followed(log: SqliteLog, end: int | None = None) -> Standby:
    """Return a new standby that has followed the journal, by default to its end."""
    cold = Standby(log, 0)
    await cold.catch_up(journal_end(log) if end is None else end)
    return cold


async def opened_one(path: Path) -> tuple[SqliteLog, Standby | None]:
    opened = await open_checked(path, ["m"])
    return opened.log, opened.groups["m"].standby


async def write(log: SqliteLog, drive: Driver, journal: Sequence[JournalRecord] | None = None) -> None:
    """Write the history of a driver to a log; `journal` replaces the driver's own decisions."""
    claimed = OwnerClaimed(owner_id="driver", core_version=CORE_VERSION, events_version=EVENTS_VERSION)
    for topic, event, _ in drive.applied:
        value = b"?" if event is None else encode(topic_named(topic), event)
        await log.append([Draft(topic, 0, value)])
    await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, one)) for one in journal or [claimed, *drive.decided]])


# A scenario in which the owner can die after any append


async def scenario(system: System) -> None:
    """Send requests that end in each possible way, one after another, under whichever owner runs."""
    for number in range(6):
        await system.serve(f"r{number}", prompt(number), nonce=number, idempotency_key=1 + number)
    system.send(submitted("r0", prompt(0), nonce=0, idempotency_key=1))
    system.send(submitted("repeated", PREFIX, idempotency_key=1))
    await system.serve("wrong", PREFIX, model="another")
    system.send(submitted("gone", PREFIX, max_tokens=100))
    system.cancel("gone")


def all_ended(system: System, owner: Owner) -> bool:
    return set(system.ends()) >= SENT and bool(located(system)) and not len(owner.world.requests)


def located(system: System) -> list[tuple[str, int, int]]:
    """Return id, partition and offset of each `RequestLocated`, without repetitions."""
    found = system.events(TOKENS, RequestLocated, SLOT)
    return list(dict.fromkeys((one.request_id, one.partition, one.offset) for one in found))


async def run_until_append(system: System, appends: int, **changes: int) -> bool:
    """Run an owner that is killed at append number `appends` + 1; return whether the kill happened."""
    owner = Owner(FaultyLog(system.log, appends), system.leases, settings(**changes))
    try:
        await owner.start()
        running = asyncio.create_task(owner.run())
        await until(lambda: running.done() or all_ended(system, owner))
        await owner.stop()
        await running
        await owner.close()
    except Crashed:
        return True
    return False


OTHER = CORE_VERSION + 1
OTHER_RELEASE = "0.9.9"
MODULES = (owner, snapshot_writer, standby, reader, records, recorded_snapshots)


class Program:
    """A program with a version of the decision rules."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, version: int) -> None:
        self._monkeypatch = monkeypatch
        self._version = version

    async def serve(self, system: System, *names: str, seals: bool) -> None:
        """Serve requests with an owner of this program, which stops as planned if `seals`, and otherwise dies."""
        async with self.owning(system, seals=seals) as serving:
            for name in names:
                await system.serve(name, PREFIX)
            await until(lambda: not len(serving.world.requests))

    @asynccontextmanager
    async def owning(self, system: System, *, seals: bool) -> AsyncIterator[Owner]:
        """Run an owner of this program, which stops as planned if `seals`, and otherwise dies."""
        with self._monkeypatch.context() as patch:
            for module in MODULES:
                patch.setattr(module, "CORE_VERSION", self._version)
            if self._version != CORE_VERSION:
                patch.setattr(owner, "own_release", lambda: OTHER_RELEASE)
            async with system.owned(fleet=1, dies=not seals) as serving:
                yield serving
