"""Read a journal record by record, and derive the owner's world and every decision again.

Theory of operation. A reader begins at a state, and derives each valid record from the events that the owner applied.
Three kinds of records do not follow from the records before them: those of an owner with other decision rules, those
of an owner that continued from a snapshot, and those after a record that cannot be derived, for example because the
log lost events. `_TRANSITIONS` decides what a reader does with such a record. A user of a reader only decides how far
the reader goes on (`Past`), and when it stops to derive.

State changes only between two awaits, and `position` only together with the state. So a task that reads may be
cancelled, and a reader may be continued after a LogError. Nothing is skipped silently: invalid records are counted.
"""

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from enum import Enum, IntEnum, auto
from typing import NamedTuple

from forebay.core.rederive import Divergence, RecordedEvents, Rederivation
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies, PolicyMissing
from forebay.core.step import InputEvent
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import encode
from forebay.events.decisions import ConsumedRun, JournalRecord, OwnerClaimed, Sealed, SnapshotTaken
from forebay.events.topics import DECISIONS
from forebay.journal.checks import FOREIGN_RECORDS, UNKNOWN_EVENTS, UNREAD_FIELDS
from forebay.journal.records import (
    HistoryAbandoned,
    JournalBroken,
    OtherRules,
    RecordedOrder,
    Validity,
    journal_records,
    record_at,
    unreadable,
)
from forebay.journal.snapshots import load_continued, load_sealed
from forebay.journal.start import Start, oldest
from forebay.transport.base import Log, LogError, PolicyNotAllowed, Record


class Past(IntEnum):
    """How far a reader goes on at records that do not follow from those before. Otherwise it raises SpanEnds."""

    NOTHING = auto()
    ABANDONED_HISTORY = auto()  # continues from the snapshot from which the owner continued
    OTHER_RULES = auto()  # also skips records of owners with other decision rules


class Reading(Enum):
    """What a reader does with the records of the newest owner."""

    DERIVING = auto()
    FOREIGN = auto()  # skips them, because the owner has other decision rules
    STOPPED = auto()  # skips them, because an earlier record could not be derived


class Kind(Enum):
    """Kind of a valid record. The names of claims say from where the owner continued."""

    RECORD = auto()
    CLAIM = auto()  # from the record before, or from the state at which the reader begins
    CLAIM_AT_SEAL = auto()
    CLAIM_AT_SNAPSHOT = auto()
    FOREIGN_RECORD = auto()  # needs other decision rules
    FOREIGN_CLAIM = auto()  # by an owner with other decision rules, from the record before
    FOREIGN_CLAIM_AT_SNAPSHOT = auto()


class _Action(Enum):
    DERIVE = auto()
    RESTORE = auto()  # load the state from which the owner continued, and derive the claim
    SKIP = auto()


_DERIVING, _FOREIGN, _STOPPED = Reading
_TRANSITIONS = {
    (_DERIVING, Kind.RECORD): (_Action.DERIVE, _DERIVING),
    (_DERIVING, Kind.CLAIM): (_Action.DERIVE, _DERIVING),
    (_DERIVING, Kind.CLAIM_AT_SEAL): (_Action.DERIVE, _DERIVING),
    (_DERIVING, Kind.CLAIM_AT_SNAPSHOT): (_Action.RESTORE, _DERIVING),
    (_DERIVING, Kind.FOREIGN_RECORD): (_Action.SKIP, _FOREIGN),
    (_DERIVING, Kind.FOREIGN_CLAIM): (_Action.DERIVE, _FOREIGN),  # a claim contains no decision
    (_DERIVING, Kind.FOREIGN_CLAIM_AT_SNAPSHOT): (_Action.RESTORE, _FOREIGN),
    (_FOREIGN, Kind.CLAIM): (_Action.RESTORE, _DERIVING),
    (_FOREIGN, Kind.CLAIM_AT_SEAL): (_Action.RESTORE, _DERIVING),
    (_FOREIGN, Kind.CLAIM_AT_SNAPSHOT): (_Action.RESTORE, _DERIVING),
    (_FOREIGN, Kind.FOREIGN_RECORD): (_Action.SKIP, _FOREIGN),
    (_FOREIGN, Kind.FOREIGN_CLAIM): (_Action.SKIP, _FOREIGN),
    (_FOREIGN, Kind.FOREIGN_CLAIM_AT_SNAPSHOT): (_Action.SKIP, _FOREIGN),
    (_STOPPED, Kind.RECORD): (_Action.SKIP, _STOPPED),
    (_STOPPED, Kind.CLAIM): (_Action.SKIP, _STOPPED),
    (_STOPPED, Kind.CLAIM_AT_SEAL): (_Action.RESTORE, _DERIVING),
    (_STOPPED, Kind.CLAIM_AT_SNAPSHOT): (_Action.RESTORE, _DERIVING),
    (_STOPPED, Kind.FOREIGN_RECORD): (_Action.SKIP, _FOREIGN),
    (_STOPPED, Kind.FOREIGN_CLAIM): (_Action.SKIP, _FOREIGN),
    (_STOPPED, Kind.FOREIGN_CLAIM_AT_SNAPSHOT): (_Action.SKIP, _FOREIGN),
}


class Step(NamedTuple):
    """A derived journal record. `divergence` is None if the derived decision is equal.

    `events` are the events that `record.consumed` counts, by topic; None for an event that did not decode. `begins` has
    the offset of the first of these events, by topic.
    """

    offset: int
    record: JournalRecord
    events: RecordedEvents
    divergence: Divergence | None
    begins: dict[str, int]

    def runs(self) -> Iterator[tuple[ConsumedRun, Iterable[tuple[int, InputEvent | None]]]]:
        """Yield each run, with the offset and the event of each record that it counts."""
        taken: Counter[str] = Counter()
        for run in self.record.consumed:
            begin = taken[run.topic]
            taken[run.topic] += run.count
            events = self.events.get(run.topic, ())[begin : begin + run.count]
            yield run, enumerate(events, self.begins.get(run.topic, 0) + begin)


async def _ignore(*_: object) -> None:
    """Do nothing; the default callback."""


class JournalReader:
    """Derives the journal records from `start` up to journal offset `end`, exclusive, and yields one step per record.

    When a reader has reached `end`, `end` may be raised, and iterating again continues with the next record. The same
    is possible after a LogError other than PolicyNotAllowed. After a divergence the world is invalid.

    Attributes:
        state: whether the reader derives the records of the newest owner.
        followed: derives the decisions. Its callback `on_applied` may be set before the first step, and in
            `on_restored`.
        start: journal offset of the state from which the derived records follow.
        position: journal offset of the next record to read.
        derived: journal offset of the first record that is not part of the state: `position` while the reader derives.
        at_us: append time of the newest derived record; 0 before the first one.
        claim: the newest valid claim that was read; None if there is none.
        sealed_us: `at_us` of the newest valid `Sealed` that was read; 0 if there is none.
        left: error of the first record that was skipped because of its rules; None once records are derived again.
        validity: counts stale and foreign records.
        order: position in the input topics, and counts of events that did not decode.
        encoded: the record of the last step, encoded by this version.
        on_restored: awaited after the world was replaced by that of a snapshot, with the value of `derived` before. The
            claim of the owner that continued from the snapshot is derived next.
        on_skipped: awaited after each record that leads to no step.
    """

    def __init__(self, log: Log, partition: int, start: Start, end: int = 0, past: Past = Past.NOTHING) -> None:
        self.end = end
        self.at_us = 0
        self.claim: OwnerClaimed | None = None
        self.sealed_us = 0
        self.encoded = b""
        self.on_restored: Callable[[int], Awaitable[None]] = _ignore
        self.on_skipped: Callable[[], Awaitable[None]] = _ignore
        self._log = log
        self._partition = partition
        self._past = past
        self._stop_reason = ""
        self._skipped = Counter(start.unverified)
        self.begin_at(start, Validity.after(start.world, start.rules))
        self._first: Start | None = start  # until its validity is read from the log

    def begin_at(self, start: Start, validity: Validity) -> None:
        """Continue at a state, with a filter of the records after it."""
        self.validity, self._first = validity, None
        self.validity.warns = True
        self.position = start.offset
        self._enter(start.world, start.offset if start.begins_span else -1)

    def _enter(self, world: World, claim_at: int = -1) -> None:
        self._restored_for = claim_at  # offset of the claim of an owner that continued from this world
        self.state = Reading.DERIVING
        self.left: OtherRules | None = None
        self.start = self.derived = self.position
        self.followed = Rederivation(world)
        self.order = RecordedOrder(self._log, self._partition, world.view)

    @property
    def world(self) -> World:
        return self.followed.world

    @property
    def pending(self) -> int:
        """Number of derived decisions that the journal does not contain yet."""
        return len(self.followed.pending)

    @property
    def stopped(self) -> str | None:
        """Why the records of an owner with this program's rules are not derived; None if they are."""
        return self._stop_reason if self.state is Reading.STOPPED else None

    @property
    def unverified(self) -> dict[str, int]:
        """Number of skipped records and events since `start`, or before it as far as `Start.unverified` counts them.

        They had no effect, or this version does not know it.
        """
        skipped = self._skipped.copy()
        skipped[FOREIGN_RECORDS] += self.validity.foreign
        skipped[UNKNOWN_EVENTS] += sum(reader.unknown for reader in self.order.readers.values())
        return {name: skipped[name] for name in (FOREIGN_RECORDS, UNREAD_FIELDS, UNKNOWN_EVENTS) if skipped[name]}

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Derive and yield one record after another. A divergence is the last step."""
        if self._first is not None:
            self.validity, self._first = await self._first.validity(self._log, self._partition), None
            self.validity.warns = True
        async for stored in journal_records(self._log, self._partition, self.position, self.end):
            step = await self.read(stored)
            if step is None:
                await self.on_skipped()
                continue
            self.encoded = encode(DECISIONS, step.record)
            self._skipped[UNREAD_FIELDS] += self.encoded != stored.value
            yield step
            if step.divergence is not None:
                return
        if self.position < self.end:
            raise LogError(
                f"journal {self._partition} lost records: it ends at offset {self.position}, expected {self.end}"
            )

    async def read(self, stored: Record) -> Step | None:
        """Read the record at `position`, and return a step if it was derived.

        Raises SpanEnds at a record after which this reader does not go on, JournalBroken for a record that cannot be
        read, PolicyNotAllowed, or LogError.
        """
        record, offset = self.validity.read(stored), stored.offset
        if self.validity.last != offset:
            self._advance(offset)
            return None
        if isinstance(record, OwnerClaimed):
            self.claim = record
        elif isinstance(record, Sealed):
            self.sealed_us = record.at_us
        kind = self._kind(offset, record)
        action, state = _TRANSITIONS[self.state, kind]
        if action is _Action.SKIP:
            self._check_skipped(offset, record, kind)
            self.state = state
            self._advance(offset)
            return None
        if action is _Action.RESTORE:
            assert isinstance(record, OwnerClaimed), "only a claim names a snapshot"
            await self._restore(offset, record)
        if record is None:
            raise unreadable(stored)
        step = await self._derive(offset, record)
        if step.divergence is None:
            self.at_us = stored.at_us
            self._advance(offset)
            self.state = state
        return step

    def _kind(self, offset: int, record: JournalRecord | None) -> Kind:
        is_own = self.validity.rules == CORE_VERSION
        if not isinstance(record, OwnerClaimed):
            return Kind.RECORD if is_own else Kind.FOREIGN_RECORD
        if record.snapshot >= 0 and offset != self._restored_for:
            return Kind.CLAIM_AT_SNAPSHOT if is_own else Kind.FOREIGN_CLAIM_AT_SNAPSHOT
        if not is_own:
            return Kind.FOREIGN_CLAIM
        return Kind.CLAIM_AT_SEAL if record.seal >= 0 else Kind.CLAIM

    def _advance(self, offset: int) -> None:
        self.position = offset + 1
        if self.state is Reading.DERIVING:
            self.derived = self.position

    def _check_skipped(self, offset: int, record: JournalRecord | None, kind: Kind) -> None:
        if kind is Kind.FOREIGN_RECORD:
            other = OtherRules(offset, self.validity.rules, self.validity.release)
            if self._past < Past.OTHER_RULES:
                raise other
            self.left = self.left or other
        elif isinstance(record, SnapshotTaken) and record.journal_offset > self.derived:
            raise JournalBroken(f"{self.stopped}; a snapshot after these records is at journal offset {offset}")

    async def _restore(self, offset: int, claim: OwnerClaimed) -> None:
        """Load the state from which the owner of the claim at `offset` continued."""
        if self._past < Past.ABANDONED_HISTORY:
            raise HistoryAbandoned(claim, offset)
        await self._replace(await load_continued(self._log, self._partition, claim, self.world.custom), offset)

    async def _replace(self, world: World, claim_at: int = -1) -> None:
        self._skipped = Counter({FOREIGN_RECORDS: -self.validity.foreign})  # the world has no part of earlier records
        blocked = self.derived
        self._enter(world, claim_at)
        await self.on_restored(blocked)

    async def _derive(self, offset: int, record: JournalRecord) -> Step:
        try:
            events = await self.order.events_of(record.consumed, self.world.owner_events)
        except LogError:
            missing = self.followed.missing_before(offset, record)
            if missing is None:
                raise
            return Step(offset, record, {}, missing, {})
        begins = {topic: self.order.offset(topic) - len(taken) for topic, taken in events.items()}
        # No await from here on, so that cancelling loses no events.
        try:
            divergence = self.followed.apply(offset, record, events)
        except PolicyMissing as missing_policy:
            raise PolicyNotAllowed(str(missing_policy)) from missing_policy
        if divergence is None and isinstance(record, OwnerClaimed):
            self.validity.seq = self.followed.next_seq
        return Step(offset, record, events, divergence, begins)

    def stop(self, reason: str) -> None:
        """Skip the records from `position` on, because one of them cannot be derived."""
        self.state, self._stop_reason, self.derived = Reading.STOPPED, reason, self.position

    async def load_seal(self) -> None:
        """If records were skipped, but the last valid record is a `Sealed`, continue from its state."""
        if self.state is Reading.DERIVING or self.validity.seal < 0:
            return
        sealed = await record_at(self._log, self._partition, self.validity.seal)
        if isinstance(sealed, Sealed):
            await self._replace(await load_sealed(self._log, self._partition, sealed, self.world.custom))


async def read_whole(log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> JournalReader:
    """Return a reader from the oldest usable state (see `oldest`) to the journal's current end."""
    return JournalReader(log, partition, await oldest(log, partition, custom), await log.end(DECISIONS.name, partition))
