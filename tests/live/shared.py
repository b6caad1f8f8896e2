"""Shared helpers of the owner tests: a log shared by several processes, and invariants of the final log."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import msgspec

from forebay.core.state.fleet import Fleet
from forebay.core.state_machine import IllegalTransition
from forebay.events.codec import decode
from forebay.events.decisions import JournalRecord
from forebay.events.topics import DECISIONS, FLEET
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import Owner
from forebay.live.owner.start_check import open_checked
from forebay.live.router.standby import Standby
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.transport.base import Draft, Log, Record, Tail, Wake
from forebay.transport.history.reader import Validity, journal
from forebay.transport.sqlite.log import SqliteLog
from tests.system import MODEL, System

Kind = TypeVar("Kind", bound=JournalRecord)
Hook = Callable[[Draft | None], Awaitable[None]]


def applied_fleet(log: SqliteLog, partition: int = 0) -> Fleet:
    """Return the fleet after all records of `fleet`."""
    fleet = Fleet()
    for record in log.records(FLEET.name, partition, 0, 1_000):
        with suppress(IllegalTransition):
            fleet.apply(decode(FLEET, record.value), record.offset)
    return fleet


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

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> Tail:
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
    """A tail that is empty at first, like one that fetches over the network."""

    def __init__(self, tail: Tail, wake: Wake) -> None:
        self._tail = tail
        self._fetched = False
        self._wake = wake
        self._fetching = asyncio.create_task(self._fetch())

    async def _fetch(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)
        self._fetched = True
        self._wake.set()

    def take(self, limit: int) -> list[Record]:
        return self._tail.take(limit) if self._fetched else []

    def __len__(self) -> int:
        return len(self._tail) if self._fetched else 0

    def close(self) -> None:
        self._fetching.cancel()
        self._tail.close()


async def proven(log: SqliteLog) -> VerifyReport:
    """Verify that every decision of the log can be derived again, and return the report."""
    report = await verify(log)
    assert report.divergence is None, report.divergence
    assert report.verified == report.decisions
    return report


async def admit(system: System, workers: int) -> None:
    """Run a first owner until it has admitted the workers."""
    async with system.owned(fleet=workers):
        pass


async def valid(log: SqliteLog, kind: type[Kind]) -> list[Kind]:
    """Return the valid journal records of a kind, oldest first."""
    end = log.next_offset(DECISIONS.name, 0)
    return [record async for _, record in journal(log, 0, 0, end, Validity()) if isinstance(record, kind)]


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


def samples(owner: Owner) -> dict[tuple[str, ...], float]:
    """Return the metrics of an owner by their names and labels, without the model."""
    return {
        (sample.name, *(value for label, value in sample.labels.items() if label != "model")): sample.value
        for metric in OwnerMetrics(owner, MODEL).collect()
        for sample in metric.samples
    }


def journal_end(log: SqliteLog) -> int:
    return log.next_offset(DECISIONS.name, 0)


async def followed(log: SqliteLog, end: int | None = None) -> Standby:
    """Return a new standby that has followed the journal, by default to its end."""
    cold = Standby(log, 0)
    await cold.catch_up(journal_end(log) if end is None else end)
    return cold


async def opened_one(path: Path) -> tuple[SqliteLog, Standby | None]:
    opened = await open_checked(path, ["m"])
    return opened.log, opened.groups["m"].standby
