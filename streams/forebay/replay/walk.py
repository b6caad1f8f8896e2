"""A recorded group, walked: its journal record by record, its world derived again beside it.

Everything that asks a recorded log something goes through here, so that all of them see what verification sees: the
same start, the same order, the same refusals. Nothing is skipped in silence; void and foreign records are counted.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from forebay.core.rederive import Divergence, RecordedEvents, Rederivation
from forebay.core.step import CLOCK, AnyDecision
from forebay.core.world import World
from forebay.events.codec import encode
from forebay.events.decisions import JournalRecord, OwnerClaimed, SnapshotTaken
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS
from forebay.transport.base import Log, LogError
from forebay.transport.history.reader import (
    RecordedOrder,
    Validity,
    decode_journal,
    journal_records,
    load_snapshot,
    newest_snapshot,
    require_readable,
)

# What a walk may pass over, by name.
FOREIGN_RECORDS, UNREAD_FIELDS, UNKNOWN_EVENTS = "foreign-records", "unread-fields", "unknown-events"


@dataclass(frozen=True, slots=True)
class Start:
    """A state that the log still holds, right before the journal record at `offset`."""

    world: World
    offset: int


class Step(NamedTuple):
    """One valid journal record, the input events that it consumed by topic (None: undecodable), and what it proves."""

    offset: int
    record: JournalRecord
    events: RecordedEvents
    divergence: Divergence | None


class Walk:
    """The steps from a start up to a journal offset, not included. Use once.

    Attributes:
        world: as it is after the step that came last; `world.on_selection` may be set before the first.
        followed: what derives the decisions; its `on_applied` may be set before the first step.
        start: the journal offset of the first step.
        end: where the walk ends, for progress.
        validity: counts void and foreign records.
        order: where the walk is in the input topics, and what did not decode there.
        encoded: the record of the last step as this version writes it.
        unread: how many of the valid records say more than that, or say it otherwise.
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
        """The decisions that the events lead to, and that the journal does not have up to here."""
        return self.followed.pending

    @property
    def pending(self) -> int:
        """How many those are."""
        return len(self.followed.pending)

    @property
    def unverified(self) -> dict[str, int]:
        """What it passed over so far, counted by name: it had no effect, or one that nobody knows."""
        unknown = sum(reader.unknown for reader in self.order.readers.values())
        found = {FOREIGN_RECORDS: self.validity.foreign, UNREAD_FIELDS: self.unread, UNKNOWN_EVENTS: unknown}
        return {name: count for name, count in found.items() if count}

    def consumed_from(self, record: JournalRecord) -> dict[str, int]:
        """Where the events stand that the record of the last step consumed: the first offset of each topic."""
        counts: Counter[str] = Counter()
        for run in record.consumed:
            counts[run.topic] += run.count
        del counts[CLOCK]
        return {topic: self.order.offset(topic) - count for topic, count in counts.items()}

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Apply record after record. A divergence is the last step: after it the world is nobody's.

        Raises:
            OtherRules: the journal was decided by another version of the rules.
            LogError: the log is damaged or misses a part that the journal says was applied.
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
            divergence = self.followed.apply(offset, record, events)
            yield Step(offset, record, events, divergence)
            if divergence is not None:
                return
        if read_up_to < self.end:
            raise LogError(f"the journal of control partition {self._partition} ends at {read_up_to}, not {self.end}")


async def walk_all(log: Log, partition: int) -> Walk:
    """From the earliest state that has everything after it, to the journal's end now. Raises LogError."""
    end = await log.end(DECISIONS.name, partition)
    return Walk(log, partition, await oldest(log, partition, end), end)


async def oldest(log: Log, partition: int, end: int) -> Start:
    """The earliest state from which everything after it is still there. Raises LogError when there is none."""
    begins = await _begins(log, partition)
    if not any(begins.values()):
        return Start(World(), 0)
    epoch = -1
    async for record in journal_records(log, partition, begins[DECISIONS.name], end):
        decision = decode_journal(record)
        if isinstance(decision, OwnerClaimed):
            epoch = record.offset
        if not isinstance(decision, SnapshotTaken) or decision.owner_epoch < epoch:
            continue
        start = await _start_of(log, partition, decision, begins)
        if start is not None:
            return start
    text = f"control partition {partition} no longer holds its beginning, nor a snapshot with all that came after it"
    raise LogError(text)


async def before(log: Log, partition: int, offset: int) -> Start:
    """The newest state at or before the journal record at `offset`. Raises LogError when there is none."""
    begins = await _begins(log, partition)
    end = await log.end(DECISIONS.name, partition)
    taken = await newest_snapshot(log, partition, min(offset + 1, end))
    if taken is not None:
        start = await _start_of(log, partition, taken, begins)
        if start is not None:
            return start
    start = await oldest(log, partition, end)
    if start.offset > offset:
        text = f"journal offset {offset} is before the oldest state that can be rebuilt, which is at {start.offset}"
        raise LogError(text)
    return start


async def _begins(log: Log, partition: int) -> dict[str, int]:
    return {topic.name: await log.begin(topic.name, partition) for topic in (*INPUTS, DECISIONS, SNAPSHOTS)}


async def _start_of(log: Log, partition: int, taken: SnapshotTaken, begins: dict[str, int]) -> Start | None:
    """The state of a snapshot; None when something that came after it is gone."""
    if taken.journal_offset < begins[DECISIONS.name] or taken.first_offset < begins[SNAPSHOTS.name]:
        return None
    world = await load_snapshot(log, partition, taken)
    if all(world.view.get(topic.name, 0) >= begins[topic.name] for topic in INPUTS):
        return Start(world, taken.journal_offset)
    return None
