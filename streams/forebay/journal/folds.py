"""Read a journal for a fold: each record after the events that the owner applied before it, without deriving decisions.

So a fold reads the records of owners with any decision rules and any policy.
"""

from collections.abc import Callable
from typing import Protocol

from forebay.events.decisions import JournalRecord, OwnerClaimed
from forebay.events.positions import JournalPosition
from forebay.events.topics import DECISIONS, FLEET, PROGRESS, REQUESTS
from forebay.journal.claims import validity_at
from forebay.journal.reader import Step
from forebay.journal.records import JournalBroken, RecordedOrder, Validity, journal_records, unreadable
from forebay.journal.start import continued_view, oldest_state
from forebay.transport.base import Log

OFFSETS = {topic.name: f"{topic.name}_offset" for topic in (REQUESTS, PROGRESS, FLEET)}  # fields of a position


class Fold(Protocol):
    """What a `FoldReader` calls.

    Attributes:
        now_us: newest clock reading of the owner.
        submitted: offset after the newest submission.
        fleet_epoch: highest owner epoch that `fleet` has announced.
    """

    now_us: int
    submitted: int
    fleet_epoch: int

    def oldest(self) -> JournalPosition | None:
        """Return the position before the oldest submission of a request in flight, or None if there is none."""

    def begin_record(self, offset: int, *, has_events: bool) -> None:
        """Begin the journal record at `offset`. The reader then applies its events, and at last the record."""

    def apply_event(self, event: object, offset: int, begin: JournalPosition) -> None:
        """Apply an event at its `offset`, after `now_us` was set. `begin` is the position before the journal record."""

    def apply_record(self, record: JournalRecord) -> None:
        """Apply a decision, after the events before it."""


class FoldReader:
    """Reads a journal from a position on. `read` may be called again with a higher end, but not after a LogError.

    Attributes:
        position: journal offset of the next record to read.
    """

    def __init__(self, log: Log, partition: int, begin: JournalPosition, fold: Fold) -> None:
        self.position = begin.journal_offset
        self._fold = fold
        self._log = log
        self._partition = partition
        self._begin = begin
        self._order = RecordedOrder(log, partition, {topic: getattr(begin, name) for topic, name in OFFSETS.items()})
        self._validity: Validity | None = None

    async def read(self, end: int, is_full: Callable[[], bool] = lambda: False) -> None:
        """Read the journal up to offset `end`, or until the fold `is_full` after a record. Raises LogError."""
        log, partition, begin = self._log, self._partition, self._begin
        if self._validity is None:
            self._validity = await validity_at(log, partition, begin.journal_offset, begin, begin.core_version)
        validity = self._validity
        async for stored in journal_records(log, partition, self.position, end):
            here, offset, expected = self.here(), stored.offset, validity.seq
            record = validity.read(stored)
            if validity.last == offset:
                if record is None:
                    raise unreadable(stored)
                if isinstance(record, OwnerClaimed):
                    if record.snapshot >= 0:
                        self._order = RecordedOrder(log, partition, await continued_view(log, partition, record))
                elif expected is not None and record.seq > expected:
                    raise JournalBroken(f"the log lost {record.seq - expected} journal records before offset {offset}")
                await self._apply(offset, record, here)
            self.position = offset + 1
            if is_full():
                return

    async def _apply(self, offset: int, record: JournalRecord, here: JournalPosition) -> None:
        runs, fold = tuple(run for run in record.consumed if run.topic in OFFSETS), self._fold
        events = await self._order.events_of(runs)
        begins = {topic: self._order.offset(topic) - len(found) for topic, found in events.items()}
        fold.begin_record(offset, has_events=bool(record.consumed))
        for run, found in Step(offset, record, events, None, begins).runs():
            fold.now_us = max(fold.now_us, run.now_us)
            for at, event in found:
                fold.apply_event(event, at, here)
        fold.apply_record(record)

    def here(self) -> JournalPosition:
        """Return the position after the records read so far."""
        validity, fold = self._validity, self._fold
        assert validity is not None, "call read first"
        return JournalPosition(
            journal_offset=self.position,
            submitted=fold.submitted,
            now_us=fold.now_us,
            owner_epoch=validity.epoch,
            owner_nonce=validity.nonce,
            seq=validity.seq,
            core_version=validity.rules,
            fleet_epoch=fold.fleet_epoch,
            **{name: self._order.offset(topic) for topic, name in OFFSETS.items()},
        )

    def next_begin(self) -> JournalPosition:
        """Return where a reader must begin that knows the requests in flight at `position`."""
        return self._fold.oldest() or self.here()


async def begin_of(log: Log, partition: int) -> JournalPosition:
    """Return the oldest position from which the log can be read. Raises LogError."""
    state = await oldest_state(log, partition)
    return JournalPosition(
        journal_offset=state.offset,
        submitted=state.view.get(REQUESTS.name, 0),
        now_us=state.now_us,
        owner_epoch=state.owner_epoch,
        owner_nonce=state.owner_nonce,
        seq=state.seq,
        core_version=state.core_version,
        fleet_epoch=state.owner_epoch,
        **{name: state.view.get(topic, 0) for topic, name in OFFSETS.items()},
    )


async def is_readable(log: Log, partition: int, begin: JournalPosition) -> bool:
    """Return whether the log still has every record after a position. Raises LogError."""
    wanted = {topic: getattr(begin, name) for topic, name in OFFSETS.items()} | {DECISIONS.name: begin.journal_offset}
    return all([await log.begin(topic, partition) <= offset for topic, offset in wanted.items()])
