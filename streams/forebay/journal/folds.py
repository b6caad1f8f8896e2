"""Read a journal for a fold: each record after the events that the owner applied before it, without deriving decisions.

So a fold reads the records of owners with any decision rules and any policy.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

from forebay.events.decisions import JournalRecord, OwnerClaimed
from forebay.events.fleet import OwnershipAnnounced
from forebay.events.positions import JournalPosition
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, FLEET, PROGRESS, REQUESTS
from forebay.journal.claims import validity_at
from forebay.journal.reader import Step
from forebay.journal.records import JournalBroken, RecordedOrder, Validity, journal_records, unreadable
from forebay.journal.start import continued_view, oldest_state
from forebay.transport.base import Log

logger = logging.getLogger(__name__)

OFFSETS = {topic.name: f"{topic.name}_offset" for topic in (REQUESTS, PROGRESS, FLEET)}  # fields of a position


class FoldReader(ABC):
    """Reads a journal from a position on. `read` may be called again with a higher end, but not after a LogError.

    Attributes:
        position: journal offset of the next record to read.
        now_us: newest clock reading of the owner.
        submitted: offset after the newest submission. An owner that continued from a snapshot applies earlier ones
            again, which a fold does not get.
        fleet_epoch: highest owner epoch that `fleet` has announced.
    """

    def __init__(self, log: Log, partition: int, begin: JournalPosition) -> None:
        self.position = begin.journal_offset
        self.now_us = begin.now_us
        self.submitted = begin.submitted
        self.fleet_epoch = begin.fleet_epoch
        self._log = log
        self._partition = partition
        self._begin = begin
        self._order = RecordedOrder(log, partition, {topic: getattr(begin, name) for topic, name in OFFSETS.items()})
        self._validity: Validity | None = None

    @abstractmethod
    def oldest(self) -> JournalPosition | None:
        """Return the position before the oldest submission of a request in flight, or None if there is none."""

    @abstractmethod
    def begin_record(self, offset: int, *, has_events: bool) -> None:
        """Begin the journal record at `offset`. Its events follow, and at last the record."""

    @abstractmethod
    def apply_event(self, event: object, offset: int, begin: JournalPosition) -> None:
        """Apply an event at its `offset`, after `now_us` was set. `begin` is the position before the journal record."""

    @abstractmethod
    def apply_record(self, record: JournalRecord) -> None:
        """Apply a decision, after the events before it."""

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
        runs = tuple(run for run in record.consumed if run.topic in OFFSETS)
        events = await self._order.events_of(runs)
        begins = {topic: self._order.offset(topic) - len(found) for topic, found in events.items()}
        self.begin_record(offset, has_events=bool(record.consumed))
        for run, found in Step(offset, record, events, None, begins).runs():
            self.now_us = max(self.now_us, run.now_us)
            for at, event in found:
                match event:
                    case RequestSubmitted() if at < self.submitted:
                        continue
                    case RequestSubmitted():
                        self.submitted = at + 1
                    case OwnershipAnnounced():
                        self.fleet_epoch = max(self.fleet_epoch, event.owner_epoch)
                    case _:
                        pass
                self.apply_event(event, at, here)
        self.apply_record(record)

    def here(self) -> JournalPosition:
        """Return the position after the records read so far."""
        validity = self._validity
        assert validity is not None, "call read first"
        return JournalPosition(
            journal_offset=self.position,
            submitted=self.submitted,
            now_us=self.now_us,
            owner_epoch=validity.epoch,
            owner_nonce=validity.nonce,
            seq=validity.seq,
            core_version=validity.rules,
            fleet_epoch=self.fleet_epoch,
            **{name: self._order.offset(topic) for topic, name in OFFSETS.items()},
        )

    def next_begin(self) -> JournalPosition:
        """Return where a reader must begin that knows the requests in flight at `position`."""
        return self.oldest() or self.here()


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


async def begin_after(
    log: Log, partition: int, begin: JournalPosition | None, covered: int, what: str
) -> JournalPosition:
    """Return `begin` if the log still has every record after it, otherwise the oldest position. Raises LogError.

    The offsets that the log lacks after `covered` are an error about `what`.
    """
    if begin is not None and await is_readable(log, partition, begin):
        return begin
    begin = await begin_of(log, partition)
    if begin.journal_offset > covered:
        text = "%s lack the journal offsets %d to %d of control partition %d, which retention removed"
        logger.error(text, what, covered, begin.journal_offset - 1, partition)
    return begin


async def is_readable(log: Log, partition: int, begin: JournalPosition) -> bool:
    """Return whether the log still has every record after a position. Raises LogError."""
    wanted = {topic: getattr(begin, name) for topic, name in OFFSETS.items()} | {DECISIONS.name: begin.journal_offset}
    return all([await log.begin(topic, partition) <= offset for topic, offset in wanted.items()])
