"""The recorded order, read back from a log: journal records, the events that they consumed, snapshots.

Readers of a journal skip void records: those of an owner epoch that a later claim ended.
"""

from collections.abc import AsyncIterator

from forebay.core.rederive import RecordedEvents
from forebay.core.step import CLOCK, InputEvent
from forebay.core.world import World, restore
from forebay.events.base import hex_digest
from forebay.events.codec import DecodeError, decode
from forebay.events.decisions import JournalRecord, OwnerClaimed, Run, SnapshotTaken
from forebay.events.snapshots import Chunk, SnapshotChunk
from forebay.events.topics import DECISIONS, SNAPSHOTS, Topic, topic_named
from forebay.transport.base import Log, LogError

PAGE_RECORDS = 512  # read at once: bounds memory whatever the length of the log


class EventReader:
    """One input topic partition, read forward page by page; records that do not decode come as None."""

    def __init__(self, log: Log, topic: Topic, partition: int, offset: int) -> None:
        self._log = log
        self._topic = topic
        self._partition = partition
        self._offset = offset
        self._page: list[InputEvent | None] = []

    async def take(self, count: int) -> list[InputEvent | None]:
        """The next `count` events. Raises LogError when the log ends before."""
        taken: list[InputEvent | None] = []
        while len(taken) < count:
            if not self._page:
                self._page = await self._read()
            need = count - len(taken)
            taken += self._page[:need]
            del self._page[:need]
        return taken

    async def _read(self) -> list[InputEvent | None]:
        records = await self._log.read(self._topic.name, self._partition, self._offset, PAGE_RECORDS)
        if not records:
            where = f"{self._topic.name}/{self._partition} ends at offset {self._offset}"
            raise LogError(f"{where}, but the journal says that more was applied")
        self._offset += len(records)
        return [decode_or_none(self._topic, record.value) for record in records]


class RecordedOrder:
    """The events that journal records consumed, topic by topic, from a view on."""

    def __init__(self, log: Log, partition: int, view: dict[str, int]) -> None:
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
        return {topic: await self._reader(topic).take(count) for topic, count in counts.items()}

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


async def journal(
    log: Log, partition: int, start: int, end: int, epoch: int
) -> AsyncIterator[tuple[int, JournalRecord]]:
    """The valid journal records in [start, end) with their offsets; `epoch` is the owner epoch at `start`.

    Raises LogError for a record that does not decode: a journal has one writer, so it is damaged or newer.
    """
    while start < end:
        records = await log.read(DECISIONS.name, partition, start, min(PAGE_RECORDS, end - start))
        if not records:
            return
        for record in records:
            try:
                decision: JournalRecord = decode(DECISIONS, record.value)
            except DecodeError as error:
                text = f"journal record {record.offset} is damaged or newer than this version: {error}"
                raise LogError(text) from error
            if isinstance(decision, OwnerClaimed):
                epoch = record.offset
            elif decision.owner_epoch < epoch:
                continue
            yield record.offset, decision
        start = records[-1].offset + 1


async def newest_snapshot(log: Log, partition: int, end: int) -> SnapshotTaken | None:
    """The last `SnapshotTaken` before offset `end` of the journal, searched backwards."""
    while end > 0:
        start = max(0, end - PAGE_RECORDS)
        page = journal(log, partition, start, end, -1)
        taken = [record async for _, record in page if isinstance(record, SnapshotTaken)]
        if taken:
            return taken[-1]
        end = start
    return None


async def load_snapshot(log: Log, partition: int, taken: SnapshotTaken) -> World:
    """The world of a snapshot. Raises LogError when a chunk is missing or the digest is another."""
    world = restore(await _chunks(log, partition, taken))
    digest = hex_digest(world.digest())
    if digest != taken.digest:
        raise LogError(f"the snapshot at offset {taken.first_offset} has digest {digest}, sealed as {taken.digest}")
    return world


async def _chunks(log: Log, partition: int, taken: SnapshotTaken) -> list[Chunk]:
    parts: list[Chunk] = []
    for number in range(taken.chunks):
        records = await log.read(SNAPSHOTS.name, partition, taken.first_offset + number, 1)
        if not records:
            raise LogError(f"chunk {number} of the snapshot at offset {taken.first_offset} is missing")
        try:
            chunk: SnapshotChunk = decode(SNAPSHOTS, records[0].value)
        except DecodeError as error:
            raise LogError(f"chunk {number} of the snapshot at offset {taken.first_offset}: {error}") from error
        parts += chunk.parts
    return parts
