"""The recorded order, read back from a log: journal records, the events that they consumed, snapshots.

Readers of a journal skip void records: those of an owner epoch that a later claim ended. Nothing here changes
state while it waits, so whoever follows a live journal may be cancelled at any time and go on later.
"""

import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from typing import TypeGuard

from forebay.core.rederive import RecordedEvents
from forebay.core.step import CLOCK, InputEvent
from forebay.core.world import CORE_VERSION, World, restore
from forebay.events.base import hex_digest
from forebay.events.codec import DecodeError, decode
from forebay.events.decisions import JournalRecord, OwnerClaimed, Run, SnapshotTaken
from forebay.events.snapshots import Chunk, SnapshotChunk, WorldState
from forebay.events.topics import DECISIONS, SNAPSHOTS, Topic, topic_named
from forebay.transport.base import Log, LogError, Record

logger = logging.getLogger(__name__)

PAGE_RECORDS = 512  # read at once: bounds memory whatever the length of the log
CHUNKS_READ = 8  # snapshot chunks read at once, of at most 1 MiB each


class OtherRules(LogError):
    """The journal was decided by rules that this program does not have: it can derive nothing of it."""

    def __init__(self, offset: int, version: int) -> None:
        super().__init__(
            f"journal record {offset} was decided by version {version} of the rules, this program has version "
            f"{CORE_VERSION}: use the program that wrote it, or begin a new log (a new namespace on Kafka)"
        )


class EventReader:
    """One input topic partition, read forward page by page; records that do not decode come as None."""

    def __init__(self, log: Log, topic: Topic, partition: int, offset: int) -> None:
        self._log = log
        self._topic = topic
        self._partition = partition
        self._offset = offset
        self._ready: deque[InputEvent | None] = deque()

    async def fill(self, count: int) -> None:
        """Have at least `count` events ready for `take`. Raises LogError when the log ends before."""
        while len(self._ready) < count:
            records = await self._log.read(self._topic.name, self._partition, self._offset, PAGE_RECORDS)
            if not records:
                where = f"{self._topic.name}/{self._partition} ends at offset {self._offset}"
                raise LogError(f"{where}, but the journal says that more was applied")
            self._offset = records[-1].offset + 1
            self._ready.extend(decode_or_none(self._topic, record.value) for record in records)

    def take(self, count: int) -> list[InputEvent | None]:
        """The next `count` events, which are ready."""
        return [self._ready.popleft() for _ in range(count)]


class RecordedOrder:
    """The events that journal records consumed, topic by topic, from a view on."""

    def __init__(self, log: Log, partition: int, view: Mapping[str, int]) -> None:
        self._log = log
        self._partition = partition
        self._view = dict(view)
        self._readers: dict[str, EventReader] = {}

    async def events_of(self, consumed: tuple[Run, ...]) -> RecordedEvents:
        """The next events of each topic, as many as `consumed` counts. Raises LogError when they are missing."""
        counts: dict[str, int] = {}
        for run in consumed:
            if run.topic != CLOCK:
                counts[run.topic] = counts.get(run.topic, 0) + run.count
        for topic, count in counts.items():
            await self._reader(topic).fill(count)
        return {topic: self._reader(topic).take(count) for topic, count in counts.items()}

    def _reader(self, topic: str) -> EventReader:
        reader = self._readers.get(topic)
        if reader is None:
            try:
                known = topic_named(topic)
            except KeyError as error:
                raise LogError(f"the journal names the topic {topic}, which this version does not know") from error
            offset = self._view.get(topic, 0)
            reader = self._readers[topic] = EventReader(self._log, known, self._partition, offset)
        return reader


def decode_or_none(topic: Topic, value: bytes) -> InputEvent | None:
    """The event of an input topic, None when it does not decode: it counts, and does nothing."""
    try:
        event: InputEvent = decode(topic, value)
    except DecodeError:
        return None
    return event


def decode_journal(record: Record) -> JournalRecord | None:
    """The journal record in `record`; None for one that is none, which somebody else wrote there.

    Passing over a damaged or newer record of an owner is no danger: the `seq` after it gives it away.
    """
    try:
        decision: JournalRecord = decode(DECISIONS, record.value)
    except DecodeError as error:
        logger.warning(
            "record %d of %s/%d is no journal record: %s", record.offset, record.topic, record.partition, error
        )
        return None
    return decision


class Validity:
    """Tells valid journal records from void and foreign ones, from an offset on.

    `epoch` is the owner epoch there; its owner decides by our rules, as the snapshot is checked to say.
    """

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        self._rules = CORE_VERSION
        self.void = 0
        self.foreign = 0

    def admits(self, decision: JournalRecord | None, offset: int) -> TypeGuard[JournalRecord]:
        """Whether the next record in the journal is valid. Raises LogError for one of an owner that never claimed."""
        if decision is None:
            self.foreign += 1
            return False
        if isinstance(decision, OwnerClaimed):
            self.epoch = offset
            self._rules = decision.core_version
        elif decision.owner_epoch < self.epoch:
            self.void += 1
            return False
        elif decision.owner_epoch > self.epoch:
            raise LogError(
                f"journal record {offset} is of the owner epoch {decision.owner_epoch}, whose claim is missing"
            )
        return True

    def require_own_rules(self, decision: JournalRecord, offset: int) -> None:
        """Raises OtherRules for a record, just admitted, that this program cannot derive.

        A claim is none: an owner that found itself in the wrong log left it behind, and nothing else.
        """
        if not isinstance(decision, OwnerClaimed) and self._rules != CORE_VERSION:
            raise OtherRules(offset, self._rules)


async def journal(
    log: Log, partition: int, start: int, end: int, validity: Validity
) -> AsyncIterator[tuple[int, JournalRecord]]:
    """The valid journal records in [start, end) with their offsets, as `validity` tells them from others.

    Raises LogError for a record whose claim is missing.
    """
    async for record in journal_records(log, partition, start, end):
        decision = decode_journal(record)
        if validity.admits(decision, record.offset):
            yield record.offset, decision


async def journal_records(log: Log, partition: int, start: int, end: int) -> AsyncIterator[Record]:
    """What stands in [start, end) of the journal, void records too, read page by page."""
    while start < end:
        records = await log.read(DECISIONS.name, partition, start, min(PAGE_RECORDS, end - start))
        if not records:
            return
        for record in records:
            if record.offset < end:
                yield record
        start = records[-1].offset + 1


async def newest_snapshot(log: Log, partition: int, end: int) -> SnapshotTaken | None:
    """The last valid `SnapshotTaken` before offset `end` of the journal, searched backwards."""
    begin = await log.begin(DECISIONS.name, partition)
    while end > begin:
        start = max(begin, end - PAGE_RECORDS)
        page = [(record.offset, decode_journal(record)) async for record in journal_records(log, partition, start, end)]
        for offset, record in reversed(page):
            if isinstance(record, SnapshotTaken) and not await _overtaken(log, partition, record, offset):
                return record
        end = start
    return None


async def _overtaken(log: Log, partition: int, taken: SnapshotTaken, offset: int) -> bool:
    """Whether a claim made the `SnapshotTaken` at `offset` void.

    No need to look back to its owner's claim: the owner saw its seal, right before `journal_offset`, stand unclaimed.
    """
    records = journal_records(log, partition, taken.journal_offset, offset)
    between = [decode_journal(record) async for record in records]
    return any(isinstance(record, OwnerClaimed) for record in between)


async def recorded_view(log: Log, partition: int) -> dict[str, int]:
    """The offset up to which the owner applied each input topic, as the journal says. Raises LogError."""
    end = await log.end(DECISIONS.name, partition)
    taken = await newest_snapshot(log, partition, end)
    start, epoch = 0, -1
    view: Counter[str] = Counter()
    if taken is not None:
        async for chunk in _chunks(log, partition, taken):
            state = next((part for part in chunk.parts if isinstance(part, WorldState)), None)
            if state is not None:
                view.update({run.topic: run.count for run in state.view})
                start, epoch = taken.journal_offset, state.owner_epoch
                break
    async for _, record in journal(log, partition, start, end, Validity(epoch)):
        for run in record.consumed:
            view[run.topic] += run.count
    del view[CLOCK]
    return dict(view)


async def load_snapshot(log: Log, partition: int, taken: SnapshotTaken) -> World:
    """The world of a snapshot.

    Raises:
        OtherRules: it was taken by an owner with other rules, as far as its claim is still there to say so.
        LogError: a chunk is missing, or the digest is another.
    """
    if taken.owner_epoch >= await log.begin(DECISIONS.name, partition):
        for record in await log.read(DECISIONS.name, partition, taken.owner_epoch, 1):
            claimed = decode_journal(record)
            if isinstance(claimed, OwnerClaimed) and claimed.core_version != CORE_VERSION:
                raise OtherRules(taken.journal_offset, claimed.core_version)
    parts: list[Chunk] = []
    async for chunk in _chunks(log, partition, taken):
        parts += chunk.parts
    world = restore(parts)
    digest = hex_digest(world.digest())
    if digest != taken.digest:
        raise LogError(f"the snapshot at offset {taken.first_offset} has digest {digest}, sealed as {taken.digest}")
    return world


async def _chunks(log: Log, partition: int, taken: SnapshotTaken) -> AsyncIterator[SnapshotChunk]:
    """The chunks of a snapshot; those of an owner that was not told yet may stand between them."""
    number, offset = 0, taken.first_offset
    while number < taken.chunks:
        records = await log.read(SNAPSHOTS.name, partition, offset, min(CHUNKS_READ, taken.chunks - number))
        if not records:
            raise LogError(f"chunk {number} of the snapshot at offset {taken.first_offset} is missing")
        for record in records:
            try:
                chunk: SnapshotChunk = decode(SNAPSHOTS, record.value)
            except DecodeError as error:
                raise LogError(f"chunk {number} of the snapshot at offset {taken.first_offset}: {error}") from error
            if (chunk.owner_epoch, chunk.number) == (taken.owner_epoch, number):
                yield chunk
                number += 1
        offset = records[-1].offset + 1
