"""Read a recorded journal record by record, and derive the owner's world and every decision again.

All tools that analyse a recorded log use this walk, so they see what verification sees. Nothing is skipped silently;
stale and foreign records are counted.
"""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from forebay.core.rederive import Divergence, RecordedEvents, Rederivation
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies, PolicyMissing
from forebay.core.step import AnyDecision, InputEvent
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import encode
from forebay.events.decisions import ConsumedRun, JournalRecord, OwnerClaimed, SnapshotRecord
from forebay.events.topics import DECISIONS, INPUTS, SNAPSHOTS
from forebay.journal.claims import ValidClaim, valid_claims, validity_at
from forebay.journal.records import HistoryAbandoned, OtherRules, RecordedOrder, Validity, journal_records
from forebay.journal.snapshots import (
    load_continued,
    load_snapshot,
    newest_snapshot,
    owner_state,
    release_at,
    snapshots_taken,
)
from forebay.journal.start import begins_of
from forebay.replay.checks import FOREIGN_RECORDS, UNKNOWN_EVENTS, UNREAD_FIELDS
from forebay.replay.moment import LossFacts
from forebay.transport.base import Log, LogError, PolicyNotAllowed


@dataclass(frozen=True, slots=True)
class Start:
    """A state at which a `Walk` can begin: the world right before the journal record at `offset`.

    Attributes:
        lost: workers that were lost before this state; None to read them from the log.
        unverified: number of records and events skipped before this state, as in `Walk.unverified`.
        rules: version of the decision rules of the owner before this state.
        begins_span: whether the record at `offset` is the claim of an owner that continued from this state.
    """

    world: World
    offset: int
    lost: tuple[LossFacts, ...] | None = None
    unverified: Mapping[str, int] = field(default_factory=dict)
    rules: int = field(default_factory=lambda: CORE_VERSION)  # when created: the fault simulator changes it
    begins_span: bool = False

    async def validity(self, log: Log, partition: int) -> Validity:
        """Return the filter of the journal records from this state on. Raises LogError."""
        if self.begins_span:
            return Validity(-1, self.rules, nonce=None, seq=self.world.seq)
        return await validity_at(log, partition, self.offset, self.world, self.rules)


class StateTime(NamedTuple):
    """Where a state is in the journal. `owner_nonce` is None to read it from the log.

    `seq` is the sequence number of the first record after the state; None if it is unknown.
    """

    offset: int
    now_us: int
    owner_epoch: int
    rules: int = CORE_VERSION
    owner_nonce: str | None = None
    seq: int | None = None


class States(Protocol):
    """States of one group, at which a derivation can begin. `LogStates` reads them from the log."""

    async def before(self, offset: int) -> Start:
        """Return the newest usable state from which the journal record at `offset` can be derived.

        Raises OtherRules if the owner of this record had other decision rules, and LogError if there is no such state.
        """
        ...

    def by_time(self, time_us: int) -> StateTime | None:
        """Return the newest known state whose clock is set and at most `time_us`; None if no such state is known."""
        ...


class LogStates:
    def __init__(self, log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> None:
        self._log = log
        self._partition = partition
        self._custom = custom

    async def before(self, offset: int) -> Start:
        """Return the newest snapshot from which the journal record at `offset` can be derived, or the empty state."""
        return await before(self._log, self._partition, offset, self._custom)

    def by_time(self, time_us: int) -> StateTime | None:
        """Return None, because the times of snapshots are not known without a search."""
        return None


class Step(NamedTuple):
    """One step of a `Walk`: a valid journal record. `divergence` is None if the derived decision is equal.

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


class Walk:
    """Derives the journal records from `start` up to journal offset `end`, exclusive, and yields one step per record.

    When a walk has reached `end`, `end` may be raised, and iterating again continues with the next record. The same is
    possible after a LogError other than PolicyNotAllowed. After a divergence the walk is invalid.

    Attributes:
        followed: derives the decisions. Its callback `on_applied` may be set before the first step.
        position: journal offset of the first record that is not part of the state.
        validity: counts stale and foreign records.
        order: position in the input topics, and counts of events that did not decode.
        encoded: the record of the last step, encoded by this version.
        unread: number of valid records whose stored bytes differ from their encoding by this version.
    """

    def __init__(self, log: Log, partition: int, start: Start, end: int) -> None:
        self.world = start.world
        self.start = start.offset
        self.end = end
        self.position = start.offset
        self.at_us = 0
        self.validity = Validity.after(start.world, start.rules)
        self.order = RecordedOrder(log, partition, start.world.view)
        self.encoded = b""
        self.unread = 0
        self._log = log
        self._partition = partition
        self._begin = start
        self.followed = Rederivation(start.world)

    @property
    def unwritten(self) -> Iterable[AnyDecision]:
        """Derived decisions that the journal does not contain yet."""
        return self.followed.pending

    @property
    def pending(self) -> int:
        return len(self.followed.pending)

    @property
    def unverified(self) -> dict[str, int]:
        """Number of skipped records and events, by name. They had no effect, or this version does not know it."""
        unknown = sum(reader.unknown for reader in self.order.readers.values())
        found = {FOREIGN_RECORDS: self.validity.foreign, UNREAD_FIELDS: self.unread, UNKNOWN_EVENTS: unknown}
        totals = {name: count + self._begin.unverified.get(name, 0) for name, count in found.items()}
        return {name: count for name, count in totals.items() if count}

    async def __aiter__(self) -> AsyncIterator[Step]:
        """Derive and yield one record after another. A divergence is the last step."""
        if self.position == self.start:
            self.validity = await self._begin.validity(self._log, self._partition)
        self.validity.warns = True
        async for stored in journal_records(self._log, self._partition, self.position, self.end):
            # `position` changes only together with the state, so that a walk can be continued after a LogError.
            offset = stored.offset
            record = self.validity.read_own(stored)
            if record is None:
                self.position = offset + 1
                continue
            if isinstance(record, OwnerClaimed) and record.snapshot >= 0 and offset != self.start:
                raise HistoryAbandoned(record, offset)
            self.encoded = encode(DECISIONS, record)
            try:
                events = await self.order.events_of(record.consumed, self.world.owner_events)
            except LogError:
                missing = self.followed.missing_before(offset, record)
                if missing is None:
                    raise
                yield Step(offset, record, {}, missing, {})
                return
            begins = {topic: self.order.offset(topic) - len(taken) for topic, taken in events.items()}
            try:
                divergence = self.followed.apply(offset, record, events)
            except PolicyMissing as missing:
                raise PolicyNotAllowed(str(missing)) from missing
            self.unread += self.encoded != stored.value
            if divergence is None:
                self.position, self.at_us = offset + 1, stored.at_us
                if isinstance(record, OwnerClaimed):
                    self.validity.seq = self.followed.next_seq
            yield Step(offset, record, events, divergence, begins)
            if divergence is not None:
                return
        if self.position < self.end:
            raise LogError(
                f"journal {self._partition} lost records: it ends at offset {self.position}, expected {self.end}"
            )


async def walk_all(log: Log, partition: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Walk:
    """Return a walk from the oldest usable state (see `oldest`) to the journal's current end."""
    end = await log.end(DECISIONS.name, partition)
    return Walk(log, partition, await oldest(log, partition, end, custom), end)


async def oldest(log: Log, partition: int, end: int, custom: CustomPolicies = ONLY_BUILT_IN) -> Start:
    """Return the oldest usable state: one after which the log still holds all records that a derivation reads."""
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

    If the owner of that record continued from a snapshot, for example from the seal of an owner with other decision
    rules, the state is that of the snapshot, and `Start.offset` is the offset of the claim.

    Raises OtherRules if the owner of that record had other decision rules, except for a claim after a `Sealed`, because
    a claim alone contains no decision. Raises LogError if the log holds no usable state before that record.
    """
    begins = await begins_of(log, partition)
    end = await log.end(DECISIONS.name, partition)
    taken = await newest_snapshot(log, partition, min(offset + 1, end))
    continued = await _continued(log, partition, taken, min(offset + 1, end))
    if continued is not None:
        world = await load_continued(log, partition, continued.claim, custom)
        return Start(world, continued.offset, begins_span=True)
    if taken is not None:
        start = await _start_of(log, partition, taken, begins, custom)
        if start is not None:
            return start
    start = await oldest(log, partition, end, custom)
    if start.offset > offset:
        text = f"journal offset {offset} is before the oldest state that can be restored; give {start.offset} or higher"
        raise LogError(text)
    return start


async def continue_after(
    log: Log, partition: int, ended: HistoryAbandoned, custom: CustomPolicies = ONLY_BUILT_IN
) -> Start:
    """Return the state from which an owner continued after an abandoned history. Raises LogError if it is lost."""
    world = await load_continued(log, partition, ended.claim, custom)
    return Start(world, ended.offset, begins_span=True)


async def _continued(log: Log, partition: int, taken: SnapshotRecord | None, end: int) -> ValidClaim | None:
    """Return the claim with which the last span before `end` began, or None if `taken` is in the same span.

    Raises OtherRules if the owner of the record right before `end` had other decision rules.
    """
    begin, state, rules = await log.begin(DECISIONS.name, partition), None, -1
    if taken is not None:
        begin, state = taken.journal_offset, await owner_state(log, partition, taken)
        rules = taken.core_version
    found = release = None
    async for valid in valid_claims(log, partition, begin, end, state, rules):
        claim = valid.claim
        is_own = claim.core_version == CORE_VERSION
        if valid.offset == end - 1 and not is_own and valid.rules_before in (-1, CORE_VERSION) and claim.snapshot < 0:
            break
        rules, release = claim.core_version, claim.release
        if valid.begins_span:
            found = valid if is_own else None
    if rules not in (-1, CORE_VERSION):
        if release is None and taken is not None:
            release = await release_at(log, partition, taken.owner_epoch)
        raise OtherRules(end - 1, rules, release or "")
    return found


async def _start_of(
    log: Log, partition: int, taken: SnapshotRecord, begins: dict[str, int], custom: CustomPolicies
) -> Start | None:
    """Return the state of a snapshot, or None if retention removed events after it."""
    if taken.journal_offset < begins[DECISIONS.name] or taken.first_offset < begins[SNAPSHOTS.name]:
        return None
    world = await load_snapshot(log, partition, taken, custom)
    if all(world.view.get(topic.name, 0) >= begins[topic.name] for topic in INPUTS):
        return Start(world, taken.journal_offset)
    return None
