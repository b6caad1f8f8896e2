"""Read journal records, and the input events that the owner applied before them, from a log.

Readers of a journal skip stale records, which are records of an owner epoch that a later claim ended. State changes
only between two awaits, so a task that follows a live journal may be cancelled at any time and continue later.
"""

import logging
from collections import deque
from collections.abc import AsyncIterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import msgspec

from forebay.core.rederive import RecordedEvents
from forebay.core.step import CLOCK, InputEvent
from forebay.core.world import CORE_VERSION
from forebay.events.codec import DecodeError, decode, unknown_tag
from forebay.events.decisions import ConsumedRun, JournalRecord, OwnerClaimed, Sealed
from forebay.events.topics import DECISIONS, INPUTS, Topic
from forebay.events.versions import EVENTS_VERSION
from forebay.transport.base import Log, LogError, Record
from forebay.transport.history.release import rules_text

logger = logging.getLogger(__name__)

PAGE_RECORDS = 512  # records per read; bounds memory whatever the length of the log


class SpanEnds(LogError):
    """The next journal records do not follow from the earlier ones under this program's rules."""


class OtherRules(SpanEnds):
    """A program with other decision rules (`core_version`) wrote the journal, so this program cannot derive it."""

    def __init__(self, offset: int, version: int, release: str = "") -> None:
        super().__init__(
            f"journal record {offset} was decided by {rules_text(version, release)}, this program has version "
            f"{CORE_VERSION}: use the program that wrote it, and stop it as planned before you start this one"
        )


class HistoryAbandoned(SpanEnds):
    """An operator let an owner continue from an earlier snapshot, so its records do not follow from those before."""

    def __init__(self, claim: OwnerClaimed, offset: int) -> None:
        super().__init__(
            f"router {claim.owner_id} continued from the snapshot at journal offset {claim.snapshot}, so the records"
            f" from {offset} on do not follow from those before"
        )


class UnreadableDecision(LogError):
    """A journal record of the owner has a type or a value that this version does not know."""

    def __init__(self, offset: int, tag: str, error: DecodeError) -> None:
        super().__init__(
            f"journal record {offset} is a {tag} that this version cannot read ({error}): use the version that wrote it"
        )


class Undecoded(NamedTuple):
    """Record of an input topic that does not decode.

    Attributes:
        offset: Offset of the record.
        tag: Event tag of the record if the tag is unknown, for example of a newer version. None if it is malformed.
    """

    offset: int
    tag: str | None


class EventReader:
    """Reads the events in one partition of an input topic in order. A record that does not decode is read as None.

    Attributes:
        malformed: Number of records returned so far that had no effect, because their owner could not decode them.
        unknown: Number of records returned so far with an event tag that their owner may have known, but not this
            version.
        first_unknown: First record with an unknown event tag, None if there is none.
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
        """Offset of the next event to take."""
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
                raise LogError(f"{where}: {end - begin - len(records)} records between {begin} and {end} are missing")
            self._offset = end
            for record in records:
                event = decode_or_none(self._topic, record.value)
                if event is None:
                    self._undecoded.append(Undecoded(record.offset, unknown_tag(self._topic, record.value)))
                self._ready.append(event)

    def take(self, count: int, owner_events: int) -> list[InputEvent | None]:
        """Return the next `count` events. The caller must have called `fill` with at least this count.

        Args:
            count: Number of events.
            owner_events: Version of the event types that the owner which applied these events could read.
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

    def _ends_at(self, offset: int) -> LogError:
        where = f"{self._topic.name}/{self._partition} ends at offset {offset}"
        return LogError(f"{where}, but according to the journal the owner applied more records")


class RecordedOrder:
    """Reads the input events that the owner applied, journal record by journal record.

    Attributes:
        readers: Reader of each topic from which the owner applied an event so far. A topic begins at its offset in the
            argument `view`, by default at 0.
    """

    def __init__(self, log: Log, partition: int, view: Mapping[str, int]) -> None:
        self._log = log
        self._partition = partition
        self._view = dict(view)
        self.readers: dict[str, EventReader] = {}

    def offset(self, topic: str) -> int:
        """Return the offset of the next event of a topic."""
        reader = self.readers.get(topic)
        return self._view.get(topic, 0) if reader is None else reader.offset

    async def events_of(self, consumed: tuple[ConsumedRun, ...], owner_events: int = EVENTS_VERSION) -> RecordedEvents:
        """Return the events that the next record's `consumed` counts, by topic. Raises LogError if any is missing.

        `owner_events` is the version of the event types that the owner could read.
        """
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
    """Return the event in a record value of an input topic, or None if it does not decode."""
    try:
        event: InputEvent = decode(topic, value)
    except DecodeError:
        return None
    return event


def decode_journal(record: Record, *, warn: bool = False) -> JournalRecord | None:
    """Return the journal record in `record`, or None if `record` does not decode, for example a foreign record.

    A caller may skip a record that does not decode. If an owner wrote it, the `seq` of the next record shows the gap.
    With `warn`, it is logged. Searches do not log it, because owners of other versions may have written many of them.
    """
    try:
        decision: JournalRecord = decode(DECISIONS, record.value)
    except DecodeError as error:
        level = logging.WARNING if warn else logging.DEBUG
        text = "ignored record %d of %s/%d, not a journal record: %s"
        logger.log(level, text, record.offset, record.topic, record.partition, error)
        return None
    return decision


def require_readable(record: Record, epoch: int) -> None:
    """Raise UnreadableDecision for a record that does not decode although the owner of `epoch` wrote it."""
    try:
        stamped = _STAMPED.decode(record.value)
        decode(DECISIONS, record.value)
    except DecodeError as error:
        if stamped.owner_epoch == epoch:
            raise UnreadableDecision(record.offset, stamped.type, error) from error
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return


class _Stamped(msgspec.Struct):
    """Fields that every journal record of an owner has, in every version."""

    type: str
    owner_epoch: int


_STAMPED = msgspec.json.Decoder(_Stamped)


class Validity:
    """Filter that admits the valid records of a journal, in order. It rejects stale and foreign records.

    Attributes:
        epoch: Owner epoch so far, which is the offset of the newest valid claim; -1 before the first claim.
        rules: Version of the decision rules of this owner. `rules` of the constructor is that of the first owner.
        seal: Offset of the last valid record if it is a `Sealed`, otherwise -1.
        release: Package version of this owner; empty if unknown.
        void: Number of stale records and of invalid claims so far.
        foreign: Number of records so far that are not journal records.
    """

    def __init__(self, epoch: int, rules: int | None = None, seal: int = -1) -> None:
        self.epoch = epoch
        self.rules = CORE_VERSION if rules is None else rules
        self.seal = seal
        self.release = ""
        self.void = 0
        self.foreign = 0

    def admits(self, decision: JournalRecord | None, offset: int) -> TypeGuard[JournalRecord]:
        """Return whether the next record, None if undecodable, is valid. Raises LogError if its claim is missing."""
        if decision is None:
            self.foreign += 1
            return False
        if isinstance(decision, OwnerClaimed):
            if self.epoch >= 0 and not can_continue(decision, self.rules, self.seal):
                self.void += 1
                return False
            self.epoch = offset
            self.rules = decision.core_version
            self.release = decision.release
        elif decision.owner_epoch < self.epoch:
            self.void += 1
            return False
        elif decision.owner_epoch > self.epoch or self.epoch < 0:
            raise LogError(
                f"journal record {offset} has the owner epoch {decision.owner_epoch}, whose claim is missing"
            )
        self.seal = offset if isinstance(decision, Sealed) else -1
        return True

    def require_own_rules(self, decision: JournalRecord, offset: int) -> None:
        """Raise OtherRules for an admitted record of an owner with other decision rules.

        Claims are accepted, because a claim alone contains no decision.
        """
        if not isinstance(decision, OwnerClaimed) and self.rules != CORE_VERSION:
            raise OtherRules(offset, self.rules, self.release)


def can_continue(claim: OwnerClaimed, rules: int, seal: int = -1) -> bool:
    """Return whether a claim is valid after the records of an earlier owner.

    Of two routers that claim after the same seal, one may have other rules than the other. The claim of the second one
    is invalid, because this router could not derive the decisions of the first one.

    Args:
        claim: The claim.
        rules: Version of the decision rules of the earlier owner.
        seal: Offset of the last valid record before the claim if it is a `Sealed`, otherwise -1.
    """
    return claim.core_version == rules or claim.snapshot >= 0 or -1 < claim.seal == seal


async def journal(
    log: Log, partition: int, start: int, end: int, validity: Validity
) -> AsyncIterator[tuple[int, JournalRecord]]:
    """Yield the valid journal records in [start, end) with their offsets.

    Raises LogError for a record whose claim is missing.
    """
    async for record in journal_records(log, partition, start, end):
        decision = decode_journal(record)
        if validity.admits(decision, record.offset):
            yield record.offset, decision


def journal_records(log: Log, partition: int, start: int, end: int) -> AsyncIterator[Record]:
    """Yield all records in [start, end) of the journal, including stale ones, read page by page."""
    return records_of(log, DECISIONS, partition, start, end)


async def events_of(log: Log, topic: Topic, partition: int) -> AsyncIterator[tuple[int, Any]]:
    """Yield every event of a topic that decodes, with its offset."""
    start, end = await log.begin(topic.name, partition), await log.end(topic.name, partition)
    async for record in records_of(log, topic, partition, start, end):
        if (event := decode_or_none(topic, record.value)) is not None:
            yield record.offset, event


async def records_of(log: Log, topic: Topic, partition: int, start: int, end: int) -> AsyncIterator[Record]:
    """Yield the records in [start, end) of a topic, read page by page."""
    while start < end:
        records = await log.read(topic.name, partition, start, min(PAGE_RECORDS, end - start))
        if not records:
            return
        for record in records:
            if record.offset < end:
                yield record
        start = records[-1].offset + 1
