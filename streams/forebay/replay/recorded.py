"""Read journal records and the events that they count, without deriving the decisions."""

from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import NamedTuple

import msgspec

from forebay.core.rederive import RecordedEvents
from forebay.core.step import CLOCK, InputEvent
from forebay.core.world import CORE_VERSION
from forebay.events.decisions import ConsumedRun, JournalRecord, OwnerClaimed
from forebay.events.topics import DECISIONS, INPUTS
from forebay.replay.walk import Walk
from forebay.transport.base import Log
from forebay.transport.history.claims import validity_at
from forebay.transport.history.reader import RecordedOrder, Validity, journal_records
from forebay.transport.history.snapshots import claim_at, newest_snapshot, state_of
from forebay.transport.history.start import continued_view

KNOWN_TOPICS = frozenset((CLOCK, *(topic.name for topic in INPUTS)))


class RecordedStep(NamedTuple):
    """One valid journal record, and the events that it counts. `record` is None if this version does not know its type.

    `consumed` lacks topics that this version does not know. `events` has None for an event that did not decode.
    `begins` has the offset of the first of these events, by topic.
    """

    offset: int
    record: JournalRecord | None
    consumed: tuple[ConsumedRun, ...]
    events: RecordedEvents
    begins: dict[str, int]

    def runs(self) -> Iterator[tuple[ConsumedRun, Iterable[tuple[int, InputEvent | None]]]]:
        """Yield each run, with the offset and the event of each record that it counts."""
        taken: Counter[str] = Counter()
        for run in self.consumed:
            begin = taken[run.topic]
            taken[run.topic] += run.count
            events = self.events.get(run.topic, ())[begin : begin + run.count]
            yield run, enumerate(events, self.begins.get(run.topic, 0) + begin)


class RecordedSteps:
    """Yields the records of a part of the journal by owners with other rules, up to a claim with this program's rules.

    A part that begins at a snapshot may begin with records of an owner with this program's rules.

    Attributes:
        first: journal offset of the first record of an owner with other rules, as far as read.
        position: journal offset of the next record; after the last step, that of `claim` or the journal's end.
        claim: the claim with this program's rules that ends the part; None while there is none.
    """

    def __init__(self, log: Log, partition: int, validity: Validity, order: RecordedOrder, start: int) -> None:
        self.first = start
        self.position = start
        self.claim: OwnerClaimed | None = None
        self.validity = validity
        self.order = order
        self._log = log
        self._partition = partition

    @classmethod
    def after(cls, log: Log, partition: int, walk: Walk) -> "RecordedSteps":
        """Return the part after a walk that has raised OtherRules."""
        steps = cls(log, partition, walk.validity, walk.order, walk.position)
        if walk.validity.rules != CORE_VERSION:
            steps.first = walk.validity.epoch  # the claim itself was a step of the walk
        return steps

    @classmethod
    async def before(cls, log: Log, partition: int, offset: int) -> "RecordedSteps":
        """Return a part that contains the journal record at `offset`, and begins at the newest snapshot before it."""
        taken = await newest_snapshot(log, partition, offset)
        if taken is None:
            begin = await log.begin(DECISIONS.name, partition)
            validity = Validity() if not begin else Validity(nonce=None, seq=None)
            return cls(log, partition, validity, RecordedOrder(log, partition, {}), begin)
        rules = taken.core_version
        state = await state_of(log, partition, taken)
        view = {run.topic: run.count for run in state.view}
        validity = await validity_at(log, partition, taken.journal_offset, state, rules)
        claim = await claim_at(log, partition, taken.owner_epoch)
        validity.release = "" if claim is None else claim.release
        return cls(log, partition, validity, RecordedOrder(log, partition, view), taken.journal_offset)

    async def read(self, end: int) -> AsyncIterator[RecordedStep]:
        """Yield the records up to journal offset `end`. May be called again with a higher one."""
        if self.claim is not None:
            return
        async for stored in journal_records(self._log, self._partition, self.position, end):
            was_other = self.validity.rules != CORE_VERSION
            record = self.validity.read(stored)
            consumed = None
            if self.validity.last == stored.offset:
                consumed = _COUNTED.decode(stored.value).consumed if record is None else record.consumed
            if isinstance(record, OwnerClaimed) and consumed is not None:
                if record.core_version == CORE_VERSION and (was_other or record.snapshot >= 0):
                    self.claim = record
                    return
                if record.snapshot >= 0:
                    view = await continued_view(self._log, self._partition, record)
                    self.order = RecordedOrder(self._log, self._partition, view)
            self.position = stored.offset + 1
            if consumed is not None:
                if not was_other and self.validity.rules != CORE_VERSION:
                    self.first = stored.offset
                yield await self._step(stored.offset, record, consumed)

    async def _step(self, offset: int, record: JournalRecord | None, consumed: tuple[ConsumedRun, ...]) -> RecordedStep:
        known = tuple(run for run in consumed if run.topic in KNOWN_TOPICS)
        begins = {run.topic: self.order.offset(run.topic) for run in known if run.topic != CLOCK}
        return RecordedStep(offset, record, known, await self.order.events_of(known), begins)


class _Counted(msgspec.Struct):
    """Fields by which a record counts events, in every version."""

    consumed: tuple[ConsumedRun, ...] = ()


_COUNTED = msgspec.json.Decoder(_Counted)
