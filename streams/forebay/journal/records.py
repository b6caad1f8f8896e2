"""Read journal records, and the input events that the owner applied before them, from a log.

Readers of a journal skip stale records, which are records of an owner epoch that a later claim ended. State changes
only between two awaits, so a task that follows a live journal may be cancelled at any time and continue later.
"""

import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import NamedTuple, Protocol

import msgspec

from forebay.core.rederive import RecordedEvents
from forebay.core.step import CLOCK, InputEvent
from forebay.core.world import CORE_VERSION
from forebay.events.codec import MALFORMED, DecodeError, decode, unknown_tag
from forebay.events.decisions import ConsumedRun, JournalRecord, OwnerClaimed, Sealed
from forebay.events.topics import DECISIONS, INPUTS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.journal.release import rules_text
from forebay.transport.base import PAGE_RECORDS, Log, LogError, Record, event_at, records_of

logger = logging.getLogger(__name__)

UNREAD_MAX = 4_096  # offsets of undecodable records that are remembered; far more than an owner appends at once


class SpanEnds(LogError):
    """The next journal records do not follow from the earlier ones under this program's rules."""


class OtherRules(SpanEnds):
    """A program with other decision rules (`core_version`) wrote the journal, so this program cannot derive it."""

    def __init__(self, offset: int, version: int, release: str = "") -> None:
        super().__init__(
            f"journal record {offset} was decided by {rules_text(version, release)}, this program has version "
            f"{CORE_VERSION}: use the program that wrote it; a router of this version can continue once that owner has "
            "stopped as planned"
        )


class HistoryAbandoned(SpanEnds):
    """An operator let an owner continue from an earlier snapshot, so its records do not follow from those before."""

    def __init__(self, claim: OwnerClaimed, offset: int) -> None:
        self.claim = claim
        self.offset = offset
        super().__init__(
            f"router {claim.owner_id} continued from the snapshot at journal offset {claim.snapshot}, so the records"
            f" from {offset} on do not follow from those before"
        )


class JournalBroken(LogError):
    """The journal cannot be followed any further, because records are missing or changed. A later try fails, too."""


class UnreadableDecision(JournalBroken):
    """A journal record of the owner has a type or a value that this version does not know."""

    def __init__(self, offset: int, tag: str, error: DecodeError) -> None:
        super().__init__(
            f"journal record {offset} is a {tag} that this version cannot read ({error}): use the version that wrote it"
        )


class Undecoded(NamedTuple):
    """Record of an input topic that does not decode. `tag` is its unknown event tag, None if it is malformed."""

    offset: int
    tag: str | None


class EventReader:
    """Reads the events in one partition of an input topic in order. A record that does not decode is read as None.

    Attributes:
        malformed: Number of records returned so far that had no effect, because their owner could not decode them.
        unknown: Number of records returned so far with an event tag that only their owner may have known.
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
        return self._offset - len(self._ready)

    async def fill(self, count: int) -> None:
        """Read until at least `count` events are ready for `take`. Raises LogError if the partition has fewer."""
        if count > PAGE_RECORDS:
            await self._require(count)
        while len(self._ready) < count:
            records = await self._log.read(self._topic.name, self._partition, self._offset, PAGE_RECORDS)
            if not records:
                raise self._ends_at(self._offset)
            begin, end = self._offset, records[-1].offset + 1
            if end - begin != len(records):
                where = f"{self._topic.name}/{self._partition}"
                missing = end - begin - len(records)
                raise JournalBroken(f"{where}: {missing} records between {begin} and {end} are missing")
            self._offset = end
            for record in records:
                event = decode_or_none(self._topic, record.value)
                if event is None:
                    self._undecoded.append(Undecoded(record.offset, unknown_tag(self._topic, record.value)))
                self._ready.append(event)

    def take(self, count: int, owner_events: int) -> list[InputEvent | None]:
        """Return the next `count` events, for which the caller has called `fill`.

        `owner_events` is the version of the event types that the owner of these events could read.
        """
        taken = [self._ready.popleft() for _ in range(count)]
        while self._undecoded and self._undecoded[0].offset < self.offset:
            undecoded = self._undecoded.popleft()
            if undecoded.tag is None or owner_events <= EVENTS_VERSION:
                self.malformed += 1
            else:
                self.unknown += 1
                self.first_unknown = self.first_unknown or undecoded
        return taken

    async def _require(self, count: int) -> None:
        """Check that `count` more records exist, before they are read into memory."""
        end = await self._log.end(self._topic.name, self._partition)
        if self.offset + count > end:
            raise self._ends_at(end)

    def _ends_at(self, offset: int) -> JournalBroken:
        where = f"{self._topic.name}/{self._partition} ends at offset {offset}"
        return JournalBroken(f"{where}, but according to the journal the owner applied more records")


class RecordedOrder:
    """Reads the input events that the owner applied. Each topic begins at its offset in `view`, by default at 0."""

    def __init__(self, log: Log, partition: int, view: Mapping[str, int]) -> None:
        self._log = log
        self._partition = partition
        self._view = dict(view)
        self.readers: dict[str, EventReader] = {}

    def offset(self, topic: str) -> int:
        reader = self.readers.get(topic)
        return self._view.get(topic, 0) if reader is None else reader.offset

    async def events_of(self, consumed: tuple[ConsumedRun, ...], owner_events: int = EVENTS_VERSION) -> RecordedEvents:
        """Return the events that a record's `consumed` counts, by topic. Raises LogError if any is missing."""
        counts: dict[str, int] = {}
        for run in consumed:
            if run.topic != CLOCK:
                counts[run.topic] = counts.get(run.topic, 0) + run.count
        for topic, count in counts.items():
            await self._reader(topic).fill(count)
        return {topic: self._reader(topic).take(count, owner_events) for topic, count in counts.items()}

    def _reader(self, topic: str) -> EventReader:
        reader = self.readers.get(topic)
        if reader is None:
            known = _INPUTS.get(topic)
            if known is None:
                raise LogError(f"the journal names the input topic {topic}, which only a newer forebay reads")
            offset = self._view.get(topic, 0)
            reader = self.readers[topic] = EventReader(self._log, known, self._partition, offset)
        return reader


_INPUTS = {topic.name: topic for topic in INPUTS}


def decode_or_none(topic: Topic, value: bytes) -> InputEvent | None:
    """Return the event of an input topic, or None if it does not decode."""
    try:
        event: InputEvent = decode(topic, value)
    except DecodeError:
        return None
    return event


def decode_journal(record: Record) -> JournalRecord | None:
    """Return the journal record in `record`, valid or not, or None if it does not decode, like a foreign record."""
    try:
        decision: JournalRecord = decode(DECISIONS, record.value)
    except DecodeError:
        return None
    return decision


async def record_at(log: Log, partition: int, offset: int) -> JournalRecord | None:
    """Return the journal record at an offset, or None if the log does not have it or it does not decode."""
    if offset < max(0, await log.begin(DECISIONS.name, partition)):
        return None
    decision: JournalRecord | None = await event_at(log, DECISIONS, partition, offset)
    return decision


class RecordStamp(msgspec.Struct):
    """Fields by which records are assigned to owners, without decoding the other fields. Every version has them."""

    type: str
    owner_epoch: int = -1
    seq: int = 0
    owner_nonce: str = ""


_STAMP = msgspec.json.Decoder(RecordStamp)
_CLAIMED = OwnerClaimed.__struct_config__.tag
_SEALED = Sealed.__struct_config__.tag


def stamp_of(record: Record) -> RecordStamp | None:
    """Return the stamp of a journal record of any version, or None for a foreign record or a claim."""
    try:
        stamp = _STAMP.decode(record.value)
    except MALFORMED:
        return None
    return None if stamp.type == _CLAIMED else stamp


class OwnedState(Protocol):
    """State of a group at a journal offset, for example a `World`."""

    @property
    def owner_epoch(self) -> int:
        """Epoch of the owner, -1 before the first claim."""
        ...

    @property
    def owner_nonce(self) -> str | None:
        """None if it is unknown."""
        ...

    @property
    def seq(self) -> int | None:
        """Sequence number of the next record; None if it is unknown."""
        ...


class Validity:
    """Filter that admits the valid records of a journal, in order. All readers of journals decide by it.

    Theory of operation. Any process may append to a journal: a former owner that was paused, a tool that repeats
    records, a mirror that mixes up topics. The valid records form a chain, which each reader follows from the state at
    which it begins. A claim names the nonce of the previous claim. Every other record names the epoch and the nonce of
    its claim, and has the next sequence number. A record that does not continue the chain has no effect. A record with
    a sequence number that is too high is admitted, because only the log can have lost the records before it. Those who
    derive the journal then report a divergence.

    Attributes:
        epoch: Owner epoch so far, which is the offset of the newest valid claim; -1 before the first claim.
        nonce: `owner_nonce` of this owner; None if it is unknown, so that its next record shows it.
        seq: Sequence number of the owner's next record; None if it is unknown.
        rules: Version of the decision rules of this owner. `rules` of the constructor is that of the first owner.
        seal: Offset of the last valid record if it is a `Sealed`, otherwise -1.
        last: Offset of the last valid record that was read; -1 if there is none.
        void: Number of stale records and of invalid claims so far.
        repeated: Number of records so far that an earlier valid record of the same owner repeats.
        foreign: Number of records so far that are not journal records of this group.
        warns: Whether repeated and foreign records are logged as warnings. Searches only log them for debugging.
    """

    def __init__(
        self,
        epoch: int = -1,
        rules: int | None = None,
        seal: int = -1,
        *,
        nonce: str | None = "",
        seq: int | None = 0,
    ) -> None:
        self.epoch = epoch
        self.nonce = nonce
        self.seq = seq
        self.rules = CORE_VERSION if rules is None else rules
        self.seal = seal
        self.last = -1
        self.release = ""
        self.void = 0
        self.repeated = 0
        self.foreign = 0
        self.warns = False
        self._next = -1
        self._unread: deque[int] = deque(maxlen=UNREAD_MAX)  # offsets at which a claim may have been lost

    @classmethod
    def after(cls, state: OwnedState, rules: int | None = None, seal: int = -1) -> "Validity":
        """Return the filter of the records after a state, whose owner has this version of the decision rules."""
        return cls(state.owner_epoch, rules, seal, nonce=state.owner_nonce, seq=state.seq)

    def read(self, record: Record) -> JournalRecord | None:
        """Return the next record of the journal if it is valid and decodes, otherwise None.

        The record that was read last may be read again, for example after a read of its events was cancelled. Raises
        LogError if the claim of the record's owner is missing.
        """
        decision = decode_journal(record)
        if decision is None:
            self.admits_unknown(record)
            return None
        is_valid = (
            self._admits_claim(decision, record.offset)
            if isinstance(decision, OwnerClaimed)
            else self._admits(decision, record.offset, is_sealed=isinstance(decision, Sealed))
        )
        return decision if is_valid else None

    def admits_unknown(self, record: Record) -> bool:
        """Return whether the next record, which does not decode, is a valid record of an owner of another version."""
        stamp = stamp_of(record)
        return self._admits(stamp, record.offset, is_sealed=stamp is not None and stamp.type == _SEALED)

    def _admits_claim(self, claim: OwnerClaimed, offset: int) -> bool:
        if offset == self.last:
            return True
        self._note_place(offset)
        if not self.is_next_claim(claim):
            self.void += 1
            return False
        self.epoch, self.nonce, self.last = offset, claim.owner_nonce, offset
        self._unread.clear()  # the claim names the owner before it, so no claim between them was valid
        if claim.snapshot >= 0:
            self.seq = None  # continues from the snapshot
        self.rules, self.release, self.seal = claim.core_version, claim.release, -1
        return True

    def is_next_claim(self, claim: OwnerClaimed) -> bool:
        if self.epoch < 0:
            # A first claim continues from nothing. With an unknown owner, the reader begins in the middle of a journal.
            return self.nonce is None or not claim.previous_nonce
        return follows(claim, self.nonce) and can_continue(claim, self.rules, self.seal)

    def _admits(self, record: JournalRecord | RecordStamp | None, offset: int, *, is_sealed: bool) -> bool:
        if offset == self.last:
            return True
        self._note_place(offset)
        if record is None:
            self._unread.append(offset)
            self._skip_foreign(offset, "is not a journal record")
            return False
        if record.owner_epoch != self.epoch or self.epoch < 0:
            self._skip_other(record, offset)
            return False
        if self.nonce is None:
            self.nonce = record.owner_nonce
        if record.owner_nonce != self.nonce:
            self._skip_foreign(offset, "belongs to another journal")
            return False
        if self.seq is not None and record.seq < self.seq:
            self.repeated += 1
            self._log_skipped(offset, f"repeats the record with seq {record.seq}")
            return False
        self.seq, self.last = record.seq + 1, offset
        self.seal = offset if is_sealed else -1
        return True

    def _note_place(self, offset: int) -> None:
        if self._next < 0:
            self._next = offset
        self._unread.extend(range(max(self._next, offset - UNREAD_MAX), offset))  # the log lacks these offsets
        self._next = offset + 1

    def _skip_other(self, record: JournalRecord | RecordStamp, offset: int) -> None:
        """Count a record of another owner. Raises LogError if this owner may be the newest one, but lacks its claim."""
        epoch, is_unknown = record.owner_epoch, self.epoch < 0 and self.nonce is None
        may_be_newest = epoch in self._unread or (epoch < 0 and not is_unknown)
        if may_be_newest and not isinstance(record, RecordStamp):
            raise JournalBroken(f"journal record {offset} has the owner epoch {epoch}, whose claim is missing")
        if isinstance(record, RecordStamp):
            self._skip_foreign(offset, "is not a journal record")
        elif epoch < self.epoch or is_unknown:
            self.void += 1
        else:
            self._skip_foreign(offset, f"names the owner epoch {epoch}, which is not the offset of a valid claim")

    def _skip_foreign(self, offset: int, reason: str) -> None:
        self.foreign += 1
        self._log_skipped(offset, reason)

    def _log_skipped(self, offset: int, reason: str) -> None:
        level = logging.WARNING if self.warns else logging.DEBUG
        logger.log(level, "skipped record %d of %s, which %s", offset, DECISIONS.name, reason)


def unreadable(record: Record) -> UnreadableDecision:
    """Return the error of a valid record that does not decode."""
    try:
        decode(DECISIONS, record.value)
    except DecodeError as error:
        return UnreadableDecision(record.offset, _STAMP.decode(record.value).type, error)
    raise AssertionError("the record decodes")


def follows(claim: OwnerClaimed, nonce: str | None) -> bool:
    """Return whether a claim names the nonce of the previous owner, as far as it is known."""
    return nonce is None or claim.previous_nonce == nonce


def can_continue(claim: OwnerClaimed, rules: int, seal: int = -1) -> bool:
    """Return whether the router of a claim could derive the records of an earlier owner with these `rules`.

    Of two routers that claim after the same seal, one may have other rules than the other. The claim of the second one
    is invalid, because this router could not derive the decisions of the first one. `seal` is the offset of the last
    valid record before the claim if it is a `Sealed`, otherwise -1.
    """
    return claim.core_version == rules or claim.snapshot >= 0 or -1 < claim.seal == seal


async def journal(
    log: Log, partition: int, start: int, end: int, validity: Validity
) -> AsyncIterator[tuple[int, JournalRecord]]:
    """Yield the valid journal records in [start, end) with their offsets. Raises LogError."""
    async for record in journal_records(log, partition, start, end):
        decision = validity.read(record)
        if decision is not None:
            yield record.offset, decision


def journal_records(log: Log, partition: int, start: int, end: int) -> AsyncIterator[Record]:
    """Yield all records in [start, end) of the journal, including stale ones."""
    return records_of(log, DECISIONS, partition, start, end)


async def last_append_us(log: Log, partition: int) -> int:
    """Return when the last input event was appended, in microseconds since 1970; 0 if there is none."""
    latest_us = 0
    for topic in INPUTS:
        end = await log.end(topic.name, partition)
        if end > await log.begin(topic.name, partition):
            latest_us = max([latest_us, *(one.at_us for one in await log.read(topic.name, partition, end - 1, 1))])
    return latest_us
