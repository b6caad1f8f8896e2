"""The recorded order, read back from a log: journal records, the events that they consumed, snapshots.

Readers of a journal skip void records: those of an owner epoch that a later claim ended. Nothing here changes
state while it waits, so whoever follows a live journal may be cancelled at any time and go on later.
"""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple, TypeGuard

import msgspec

from forebay.core.rederive import RecordedEvents
from forebay.core.step import CLOCK, InputEvent
from forebay.core.world import CORE_VERSION, World, digest_of_snapshot, restore
from forebay.events.base import hex_digest
from forebay.events.codec import DecodeError, decode, unknown_tag
from forebay.events.decisions import Advanced, ConsumedRun, JournalRecord, OwnerClaimed, SnapshotTaken
from forebay.events.snapshots import Chunk, SnapshotChunk, WorldState
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS, Topic
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


class UnreadableDecision(LogError):
    """A journal record of the owner is of a kind, or has a value, that this version does not know."""

    def __init__(self, offset: int, tag: str, error: DecodeError) -> None:
        super().__init__(
            f"journal record {offset} is a {tag} that this version cannot read ({error}): use the version that wrote it"
        )


class MissingChunk(LogError):
    """The journal names a snapshot, and a part of it is not there."""


class OtherState(LogError):
    """The chunks of a snapshot give another state than the one that was sealed."""


class Undecoded(NamedTuple):
    """A record of an input topic that is no event here: malformed, or with a tag that a newer version may have."""

    offset: int
    tag: str | None


class EventReader:
    """One input topic partition, read forward page by page; records that do not decode come as None.

    Attributes:
        malformed: records taken that no version can read.
        unknown: records taken that have a tag which is not known here, `first_unknown` the first of them.
    """

    def __init__(self, log: Log, topic: Topic, partition: int, offset: int) -> None:
        self._log = log
        self._topic = topic
        self._partition = partition
        self._offset = offset
        self._ready: deque[InputEvent | None] = deque()
        self._undecoded: deque[Undecoded] = deque()
        self.malformed = 0
        self.unknown = 0
        self.first_unknown: Undecoded | None = None

    @property
    def offset(self) -> int:
        """Where the next event to take stands."""
        return self._offset - len(self._ready)

    async def fill(self, count: int) -> None:
        """Have at least `count` events ready for `take`. Raises LogError when the log ends before."""
        if count > PAGE_RECORDS:
            await self._require(count)
        while len(self._ready) < count:
            records = await self._log.read(self._topic.name, self._partition, self._offset, PAGE_RECORDS)
            if not records:
                raise self._ends_at(self._offset)
            begin, end = self._offset, records[-1].offset + 1
            if end - begin != len(records):
                where = f"{self._topic.name}/{self._partition}"
                raise LogError(f"{where}: {end - begin - len(records)} records between {begin} and {end} are missing")
            self._offset = end
            for record in records:
                event = decode_or_none(self._topic, record.value)
                if event is None:
                    self._undecoded.append(Undecoded(record.offset, unknown_tag(self._topic, record.value)))
                self._ready.append(event)

    def take(self, count: int) -> list[InputEvent | None]:
        """The next `count` events, which are ready."""
        taken = [self._ready.popleft() for _ in range(count)]
        while self._undecoded and self._undecoded[0].offset < self.offset:
            undecoded = self._undecoded.popleft()
            if undecoded.tag is None:
                self.malformed += 1
            else:
                self.unknown += 1
                self.first_unknown = self.first_unknown or undecoded
        return taken

    async def _require(self, count: int) -> None:
        """Before so many are held in memory: they must be there."""
        end = await self._log.end(self._topic.name, self._partition)
        if self.offset + count > end:
            raise self._ends_at(end)

    def _ends_at(self, offset: int) -> LogError:
        where = f"{self._topic.name}/{self._partition} ends at offset {offset}"
        return LogError(f"{where}, but the journal says that more was applied")


class RecordedOrder:
    """The events that journal records consumed, topic by topic, from a view on.

    `readers` are those of the topics that something was consumed of.
    """

    def __init__(self, log: Log, partition: int, view: Mapping[str, int]) -> None:
        self._log = log
        self._partition = partition
        self._view = dict(view)
        self.readers: dict[str, EventReader] = {}

    def offset(self, topic: str) -> int:
        """Where the next event of a topic stands."""
        reader = self.readers.get(topic)
        return self._view.get(topic, 0) if reader is None else reader.offset

    async def events_of(self, consumed: tuple[ConsumedRun, ...]) -> RecordedEvents:
        """The next events of each topic, as many as `consumed` counts. Raises LogError when they are missing."""
        counts: dict[str, int] = {}
        for run in consumed:
            if run.topic != CLOCK:
                counts[run.topic] = counts.get(run.topic, 0) + run.count
        for topic, count in counts.items():
            await self._reader(topic).fill(count)
        return {topic: self._reader(topic).take(count) for topic, count in counts.items()}

    def _reader(self, topic: str) -> EventReader:
        reader = self.readers.get(topic)
        if reader is None:
            known = _INPUTS.get(topic)
            if known is None:
                raise LogError(f"the journal names {topic} as a topic of inputs, which this version does not know")
            offset = self._view.get(topic, 0)
            reader = self.readers[topic] = EventReader(self._log, known, self._partition, offset)
        return reader


_INPUTS = {topic.name: topic for topic in INPUTS}


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


def require_readable(record: Record, epoch: int) -> None:
    """Raises UnreadableDecision for a record that is no journal record here, though the owner of `epoch` wrote it."""
    try:
        stamped = _STAMPED.decode(record.value)
        decode(DECISIONS, record.value)
    except DecodeError as error:
        if stamped.owner_epoch == epoch:
            raise UnreadableDecision(record.offset, stamped.type, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return


class _Stamped(msgspec.Struct):
    """What every journal record of an owner says, whatever its kind and version."""

    type: str
    owner_epoch: int


_STAMPED = msgspec.json.Decoder(_Stamped)


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
        elif decision.owner_epoch > self.epoch or self.epoch < 0:
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


async def snapshots_taken(log: Log, partition: int, start: int, end: int) -> AsyncIterator[tuple[int, SnapshotTaken]]:
    """The `SnapshotTaken` in [start, end) of the journal with their offsets, as far as claims there void none.

    An owner that had lost the group before `start` may have left one; what it says is sealed before `start`, too.
    """
    epoch = -1
    async for record in journal_records(log, partition, start, end):
        decision = decode_journal(record)
        if isinstance(decision, OwnerClaimed):
            epoch = record.offset
        elif isinstance(decision, SnapshotTaken) and decision.owner_epoch >= epoch:
            yield record.offset, decision


async def _overtaken(log: Log, partition: int, taken: SnapshotTaken, offset: int) -> bool:
    """Whether a claim made the `SnapshotTaken` at `offset` void, or what came after its seal is no longer there.

    No need to look back to its owner's claim: the owner saw its seal, right before `journal_offset`, stand unclaimed.
    """
    if taken.journal_offset < await log.begin(DECISIONS.name, partition):
        return True
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
        state = await state_of(log, partition, taken)
        view.update({run.topic: run.count for run in state.view})
        start, epoch = taken.journal_offset, state.owner_epoch
    async for _, record in journal(log, partition, start, end, Validity(epoch)):
        for run in record.consumed:
            view[run.topic] += run.count
    del view[CLOCK]
    return dict(view)


async def state_of(log: Log, partition: int, taken: SnapshotTaken) -> WorldState:
    """What a snapshot says beside its machines, read without restoring it. Raises LogError when it is not there."""
    async for _, chunk in _chunks(log, partition, taken):
        for part in chunk.parts:
            if isinstance(part, WorldState):
                return part
    raise LogError(f"the snapshot at offset {taken.first_offset} does not say how far its owner was")


async def chunks_end(log: Log, partition: int, taken: SnapshotTaken) -> int:
    """The offset after the last chunk of a snapshot. Raises LogError when one is missing."""
    end = taken.first_offset
    async for offset, _ in _chunks(log, partition, taken):
        end = offset + 1
    return end


async def load_snapshot(log: Log, partition: int, taken: SnapshotTaken) -> World:
    """The world of a snapshot.

    Raises:
        OtherRules: it was taken by an owner with other rules, as far as its claim is still there to say so.
        MissingChunk: a part of it is not there.
        OtherState: its digest is another than the one sealed.
        LogError: it cannot be read.
    """
    parts = await _parts(log, partition, taken)
    await _require_of_seal(log, partition, taken, parts)
    with _of_state(taken):
        world = restore(parts)
    _require_sealed(taken, world.digest())
    return world


async def check_snapshot(log: Log, partition: int, taken: SnapshotTaken) -> None:
    """As `load_snapshot`, where nobody wants the world: much quicker."""
    parts = await _parts(log, partition, taken)
    await _require_of_seal(log, partition, taken, parts)
    with _of_state(taken):
        digest = digest_of_snapshot(parts)
    _require_sealed(taken, digest)


async def check_snapshot_beside(log: Log, partition: int, taken: SnapshotTaken) -> WorldState:
    """As `check_snapshot`, beside other tasks of a live event loop; return what the snapshot says beside its machines.

    Chunks are read one at a time, and a thread computes the digest: a large index takes some tenths of a second.
    """
    parts: list[Chunk] = []
    async for _, chunk in _chunks(log, partition, taken, at_once=1):
        parts += chunk.parts
        await asyncio.sleep(0)
    await _require_of_seal(log, partition, taken, parts)

    def digest() -> int:
        with _of_state(taken):
            return digest_of_snapshot(parts)

    _require_sealed(taken, await asyncio.to_thread(digest))
    return next(part for part in parts if isinstance(part, WorldState))


async def _parts(log: Log, partition: int, taken: SnapshotTaken) -> list[Chunk]:
    version = taken.core_version or await _version_claimed(log, partition, taken.owner_epoch)
    if version not in (0, CORE_VERSION):
        raise OtherRules(taken.journal_offset, version)
    parts: list[Chunk] = []
    async for _, chunk in _chunks(log, partition, taken):
        parts += chunk.parts
    return parts


@contextmanager
def _of_state(taken: SnapshotTaken) -> Iterator[None]:
    """Chunks that were changed may break any rule that a state keeps."""
    try:
        yield
    except Exception as error:
        text = f"the snapshot at offset {taken.first_offset} holds no state: {type(error).__name__}: {error}"
        raise OtherState(text) from error


async def _require_of_seal(log: Log, partition: int, taken: SnapshotTaken, parts: list[Chunk]) -> None:
    """The snapshot is of the state that its owner sealed right before `journal_offset`.

    Raises OtherState when it is not, as far as the seal is still there to say so.
    """
    snapshot = f"the snapshot at offset {taken.first_offset}"
    states = [part for part in parts if isinstance(part, WorldState)]
    if [state.owner_epoch for state in states] != [taken.owner_epoch]:
        raise OtherState(f"{snapshot} is not of the state of one owner, that of epoch {taken.owner_epoch}")
    begin = await log.begin(DECISIONS.name, partition)
    if taken.journal_offset == begin > 0:
        return  # a recording that begins there: the seal is what stood before
    records = (
        await log.read(DECISIONS.name, partition, taken.journal_offset - 1, 1) if taken.journal_offset > begin else []
    )
    sealed = decode_journal(records[0]) if records else None
    if not isinstance(sealed, Advanced) or (sealed.owner_epoch, sealed.digest, sealed.seq + 1) != (
        taken.owner_epoch,
        taken.digest,
        states[0].seq,
    ):
        raise OtherState(
            f"{snapshot} is of no state that was sealed right before journal offset {taken.journal_offset}"
        )


def _require_sealed(taken: SnapshotTaken, digest: int) -> None:
    if hex_digest(digest) != taken.digest:
        raise OtherState(
            f"the snapshot at offset {taken.first_offset} has digest {hex_digest(digest)}, sealed as {taken.digest}"
        )


async def _version_claimed(log: Log, partition: int, owner_epoch: int) -> int:
    """The version of the rules that an owner claimed to have; 0 when its claim is not there any more."""
    if owner_epoch >= await log.begin(DECISIONS.name, partition):
        for record in await log.read(DECISIONS.name, partition, owner_epoch, 1):
            claimed = decode_journal(record)
            if isinstance(claimed, OwnerClaimed):
                return claimed.core_version
    return 0


async def _chunks(
    log: Log, partition: int, taken: SnapshotTaken, at_once: int = CHUNKS_READ
) -> AsyncIterator[tuple[int, SnapshotChunk]]:
    """The chunks of a snapshot with their offsets; those of an owner that was not told yet may stand between them."""
    number, offset = 0, taken.first_offset
    damaged: DecodeError | None = None
    while number < taken.chunks:
        records = await log.read(SNAPSHOTS.name, partition, offset, min(at_once, taken.chunks - number))
        if not records:
            name = f"chunk {number} of the snapshot at offset {taken.first_offset}"
            if damaged is not None:
                raise LogError(f"{name} is damaged or missing: {damaged}") from damaged
            raise MissingChunk(f"{name} is missing")
        for record in records:
            try:
                chunk: SnapshotChunk = decode(SNAPSHOTS, record.value)
            except DecodeError as error:
                damaged = error  # or written by somebody else, and then the chunk follows
                continue
            if (chunk.owner_epoch, chunk.number) == (taken.owner_epoch, number):
                yield record.offset, chunk
                number, damaged = number + 1, None
        offset = records[-1].offset + 1
