"""Derive decisions again from the recorded order of events, and compare them with the recorded decisions.

Recovery, `verify` and standbys all use this module. The same events, applied in the same order at the same clock
readings, must give the same journal records, field by field.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import assert_never

import msgspec

from forebay.core.step import CLOCK, AnyDecision, InputEvent, advance, claim, open_run, step
from forebay.core.world import World
from forebay.events.decisions import (
    AdapterPlaced,
    Advanced,
    CacheResyncRequested,
    CommandEnded,
    CommandSent,
    JournalRecord,
    KvReleased,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRepeated,
    RequestRouted,
    RouteAnswered,
    Sealed,
    SnapshotRecord,
    SnapshotTaken,
)

CLOCK_US_MAX = 1 << 57  # the year 6536: later due times are still valid dates and fit in 64 bits
SEALS_MAX = 1_024  # the seals of a minute or more are remembered; an owner writes a snapshot of any size in that time

RecordedEvents = Mapping[str, Sequence[InputEvent | None]]
OnApplied = Callable[[str, InputEvent | None, int, Sequence[AnyDecision]], None]


@dataclass(frozen=True, slots=True)
class Divergence:
    """First journal record that does not follow from the recorded events.

    The events lead to the record `derived` instead; None if they lead to no decision here.
    """

    offset: int
    reason: str
    recorded: JournalRecord
    derived: JournalRecord | None


class Rederivation:
    """Applies the recorded events to a world, journal record by journal record, and checks each decision.

    Attributes:
        world: state after the last journal record.
        pending: derived decisions that are not in the journal. An owner that died between two decisions of one event
            leaves them. The next owner writes exactly these first.
        on_applied: called with topic, event, clock reading and decisions when a run opens (topic `CLOCK`, no event),
            and after every event; None for no call. The function may read the world and must not change it.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.pending: deque[AnyDecision] = deque()
        self.on_applied: OnApplied | None = None
        self._seals: dict[int, str] = {}
        self._seals_from: int | None = None  # seals up to this offset are unknown

    def apply(self, offset: int, record: JournalRecord, events: RecordedEvents) -> Divergence | None:
        """Apply the next journal record, and return the divergence, or None if the record follows from the events.

        `events` has, by topic, exactly the events that `consumed` of the record counts. Raises PolicyMissing if the
        owner used a custom policy whose class the world does not have.
        """
        if self._seals_from is None:
            self._seals_from = offset
        if isinstance(record, OwnerClaimed):
            if record.consumed:
                return Divergence(offset, "an ownership claim must not consume events", record, None)
            claim(self.world, offset, record.policies, record.events_version, record.owner_nonce)
            owner = {"owner_epoch": offset, "owner_nonce": record.owner_nonce}
            self.pending = deque(msgspec.structs.replace(decided, **owner) for decided in self.pending)
            return None
        if (missing := self.missing_before(offset, record)) is not None:
            return missing
        times = [self.world.now_us, *(run.now_us for run in record.consumed)]
        if times != sorted(times):
            return Divergence(offset, "the clock runs backwards", record, None)
        if times[-1] > CLOCK_US_MAX:
            return Divergence(offset, f"the clock reading is above {CLOCK_US_MAX}", record, None)
        self._consume(record, events)
        match record:
            case (
                RequestRouted()
                | RequestHeld()
                | RequestRejected()
                | RequestRepeated()
                | RequestAborted()
                | KvReleased()
                | RouteAnswered()
                | CacheResyncRequested()
                | CommandSent()
                | CommandEnded()
                | AdapterPlaced()
            ):
                derived = self.pending.popleft() if self.pending else None
                return self._compare(offset, record, derived)
            case Advanced() | SnapshotTaken() | Sealed():
                return self._follow_seal(offset, record)
            case _:
                assert_never(record)

    def missing_before(self, offset: int, record: JournalRecord) -> Divergence | None:
        """Return the divergence of a record before which the journal lacks records of its owner, otherwise None."""
        missing = record.seq - self.next_seq
        if isinstance(record, OwnerClaimed) or missing <= 0:
            return None
        text = f"the log lost {missing} journal records before it: its seq is {record.seq}, expected {self.next_seq}"
        return Divergence(offset, text, record, None)

    @property
    def next_seq(self) -> int:
        return self.pending[0].seq if self.pending else self.world.seq

    def _follow_seal(self, offset: int, record: Advanced | SnapshotRecord) -> Divergence | None:
        if self.pending:
            return Divergence(offset, "a decision is missing before this record", record, self.pending[0])
        sealed = advance(self.world)
        if isinstance(record, Advanced):
            self._seals[offset + 1] = sealed.digest
            if len(self._seals) > SEALS_MAX:
                self._seals_from = next(iter(self._seals))
                del self._seals[self._seals_from]
            return self._compare(offset, record, sealed)
        if not self._may_be_sealed(record):
            return Divergence(offset, "the snapshot does not match the seal it names", record, sealed)
        expected = msgspec.structs.replace(
            record,
            owner_epoch=sealed.owner_epoch,
            seq=sealed.seq,
            consumed=sealed.consumed,
            owner_nonce=sealed.owner_nonce,
        )
        if isinstance(record, Sealed):  # an owner that stops applies nothing after the seal
            expected = msgspec.structs.replace(expected, digest=sealed.digest)
        return self._compare(offset, record, expected)

    def _may_be_sealed(self, record: SnapshotRecord) -> bool:
        """Return whether the journal has the seal that a snapshot names, or the seal is too old to be remembered."""
        assert self._seals_from is not None
        if record.journal_offset <= self._seals_from:
            return True
        return self._seals.get(record.journal_offset) == record.digest

    def _consume(self, record: JournalRecord, events: RecordedEvents) -> None:
        cursors: dict[str, int] = {}
        on_applied = self.on_applied
        for run in record.consumed:
            decided = open_run(self.world, run.now_us)
            self.pending.extend(decided)
            if on_applied is not None:
                on_applied(CLOCK, None, run.now_us, decided)
            if run.topic == CLOCK:
                continue
            start = cursors.get(run.topic, 0)
            cursors[run.topic] = start + run.count
            for event in events[run.topic][start : start + run.count]:
                decided = step(self.world, run.topic, event, run.now_us)
                self.pending.extend(decided)
                if on_applied is not None:
                    on_applied(run.topic, event, run.now_us, decided)

    @staticmethod
    def _compare(offset: int, recorded: JournalRecord, derived: JournalRecord | None) -> Divergence | None:
        if recorded == derived:
            return None
        if derived is None:
            return Divergence(offset, "the events lead to no decision here", recorded, None)
        if type(recorded) is not type(derived):
            return Divergence(offset, "the events lead to another kind of decision", recorded, derived)
        fields = [field for field in recorded.__struct_fields__ if getattr(recorded, field) != getattr(derived, field)]
        return Divergence(offset, "differs in " + ", ".join(fields), recorded, derived)
