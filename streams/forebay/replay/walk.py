"""Read a recorded journal record by record, and derive the owner's world and every decision again.

All tools that analyse a recorded log use this walk, so they see what verification sees: the same start, the same order
and the same errors. Nothing is skipped silently; stale and foreign records are counted.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from forebay.core.rederive import Divergence, RecordedEvents, Rederivation
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies, PolicyMissing
from forebay.core.step import CLOCK, AnyDecision
from forebay.core.world import World
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, SnapshotTaken
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS
from forebay.replay.checks import FOREIGN_RECORDS, UNKNOWN_EVENTS, UNREAD_FIELDS
from forebay.transport.base import Log, LogError, PolicyNotAllowed
from forebay.transport.history.reader import (
    RecordedOrder,
    Validity,
    decode_journal,
    journal_records,
    load_snapshot,
    newest_snapshot,
    require_readable,
    snapshots_taken,
)
from forebay.transport.history.start import begins_of


@dataclass(frozen=True, slots=True)
class Start:
    """A state at which a `Walk` can begin: the world right before the journal record at `offset`."""

    world: World
    offset: int


class Step(NamedTuple):
    """One step of a `Walk`: a valid journal record, and the result of deriving it again.

    Attributes:
        offset: journal offset of the record.
        record: the decoded record.
        events: the input events that `record.consumed` counts, by topic; None for an event that did not decode.
        divergence: difference between the recorded and the derived decision; None if they are equal.
    """

    offset: int
    record: JournalRecord
    events: RecordedEvents
    divergence: Divergence | None


class Walk:
    """Derives the journal records from `start` up to journal offset `end`, exclusive, and yields one step per record.

    A walk can be iterated once.

    Attributes:
        world: the state after the last step. The callback `world.on_plan` may be set before the first step.
        followed: derives the decisions. Its callback `on_applied` may be set before the first step.
        start: journal offset of the first step.
        end: journal offset at which the walk ends, for progress reports.
        validity: counts stale and foreign records.
        order: position in the input topics, and counts of events that did not decode.
        encoded: the record of the last step, encoded by this version.
        unread: number of valid records whose stored bytes differ from their encoding by this version.
    """

    def __init__(self, log: Log, partition: int, start: Start, end: int) -> None:
        self.world = start.world
        self.start = start.offset
        self.end = end
        self.validity = Validity(start.world.owner_epoch)
        self.order = RecordedOrder(log, partition, start.world.view)
        self.encoded = b""
        self.unread = 0
        self._log = log
        self._partition = partition
        self.followed = Rederivation(start.world)

    @property
    def unwritten(self) -> Iterable[AnyDecision]:
        """Derived decisions that the journal does not contain yet."""
        return self.followed.pending

    @property
    def pending(self) -> int:
        """Number of derived decisions that the journal does not contain yet."""
        return len(self.followed.pending)

    @property
    def unverified(self) -> dict[str, int]:
        """Number of skipped records and events, by name. They had no effect, or this version does not know it."""
        unknown = sum(reader.unknown for reader in self.order.readers.values())
        found = {FOREIGN_RECORDS: self.validity.foreign, UNREAD_FIELDS: self.unread, UNKNOWN_EVENTS: unknown}
        return {name: count for name, count in found.items() if count}

    def consumed_from(self, record: JournalRecord) -> dict[str, int]:
        """Return the offset of the first event that `record.consumed` counts, by topic. `record` is the last step's."""
        counts: Counter[str] = Counter()
        for run in record.consumed:
            counts[run.topic] += run.count
        del counts[CLOCK]
        return {topic: self.order.offset(topic) - count for topic, count in counts.items()}

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Derive and yield one record after another. A divergence ends the walk, and the world is then invalid.

        Raises:
            OtherRules: a program with other decision rules wrote the journal.
            PolicyNotAllowed: the owner ran a custom policy that this walk does not have.
            LogError: the log is damaged, or lacks events that the journal consumed.
        """
        read_up_to = self.start
        async for stored in journal_records(self._log, self._partition, self.start, self.end):
            offset, read_up_to = stored.offset, stored.offset + 1
            record = decode_journal(stored)
            if record is None:
                require_readable(stored, self.validity.epoch)
            if not self.validity.admits(record, offset):
                continue
            self.validity.require_own_rules(record, offset)
            self.encoded = encode(DECISIONS, record)
            self.unread += self.encoded != stored.value
            try:
                events = await self.order.events_of(record.consumed)
            except LogError:
                if self.followed.is_next(record):
                    raise
                yield Step(offset, record, {}, Divergence(offset, "its seq is not the next one", record, None))
                return
            try:
                divergence = self.followed.apply(offset, record, events)
            except PolicyMissing as missing:
                raise PolicyNotAllowed(str(missing)) from missing
            yield Step(offset, record, events, divergence)
            if divergence is not None:
                return
        if read_up_to < self.end:
            raise LogError(
                f"journal {self._partition} lost records: it ends at offset {read_up_to}, expected {self.end}"
            )


async def walk_all(log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Walk:
    """Return a walk from the oldest usable state (see `oldest`) to the journal's current end.

    Raises:
        LogError: the log holds no usable state.
    """
    end = await log.end(DECISIONS.name, partition)
    return Walk(log, partition, await oldest(log, partition, end, custom), end)


async def oldest(log: Log, partition: int, end: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Start:
    """Return the oldest usable state: one after which the log still holds all records that a derivation reads.

    Raises:
        LogError: the log holds no usable state.
    """
    begins = await begins_of(log, partition)
    if not any(begins.values()):
        return Start(World(custom), 0)
    async for _, taken in snapshots_taken(log, partition, begins[DECISIONS.name], end):
        start = await _start_of(log, partition, taken, begins, custom)
        if start is not None:
            return start
    text = f"control partition {partition} cannot be replayed: the log has neither the beginning of the partition nor a"
    text += " snapshot with all events after it"
    raise LogError(text)


async def before(log: Log, partition: int, offset: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Start:
    """Return the newest usable state (see `oldest`) from which the journal record at `offset` can be derived.

    Raises:
        LogError: the log holds no usable state before that record.
    """
    begins = await begins_of(log, partition)
    end = await log.end(DECISIONS.name, partition)
    taken = await newest_snapshot(log, partition, min(offset + 1, end))
    if taken is not None:
        start = await _start_of(log, partition, taken, begins, custom)
        if start is not None:
            return start
    start = await oldest(log, partition, end, custom)
    if start.offset > offset:
        text = f"journal offset {offset} is before the oldest state that can be restored; give {start.offset} or higher"
        raise LogError(text)
    return start


async def _start_of(
    log: Log, partition: int, taken: SnapshotTaken, begins: dict[str, int], custom: CustomPolicies
) -> Start | None:
    """Return the state of a snapshot, or None if retention removed events after it."""
    if taken.journal_offset < begins[DECISIONS.name] or taken.first_offset < begins[SNAPSHOTS.name]:
        return None
    world = await load_snapshot(log, partition, taken, custom)
    if all(world.view.get(topic.name, 0) >= begins[topic.name] for topic in INPUTS):
        return Start(world, taken.journal_offset)
    return None
