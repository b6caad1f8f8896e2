"""A journal derived again from events that are told anew: what it decides must be what the original decided."""

from typing import Self

import msgspec

from forebay.core.rederive import SEALS_MAX, RecordedEvents, Rederivation
from forebay.core.world import restore
from forebay.events.base import hex_digest
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, JournalRecord, SnapshotTaken
from forebay.events.topics import DECISIONS
from forebay.replay.anonymize.events import Disguise, told
from forebay.replay.anonymize.masks import NotAnonymizable
from forebay.replay.walk import Start, oldest
from forebay.transport.base import Log, Record
from forebay.transport.history.reader import RecordedOrder, Validity, decode_journal

TOLD_ANEW = frozenset({"message", "digest"})  # fields that name what is masked, or whole states


class Retelling:
    """Tells the journal of one group anew, record after record. `offset` is that of the next one."""

    def __init__(self, inputs: Log, disguise: Disguise, start: Start, offset: int) -> None:
        self.offset = offset
        self._disguise = disguise
        self._start = start.offset
        self._followed = Rederivation(start.world)
        self._order = RecordedOrder(inputs, disguise.partition, start.world.view)
        self._validity = Validity(start.world.owner_epoch)
        self._seals = {start.offset: hex_digest(start.world.digest())}

    @classmethod
    async def begin(cls, log: Log, inputs: Log, disguise: Disguise) -> Self:
        """Before the first record of the original `log`; `inputs` has its events as they are told. Raises LogError."""
        begin, end = [await of(DECISIONS.name, disguise.partition) for of in (log.begin, log.end)]
        start = await oldest(log, disguise.partition, end)
        world = restore(map(disguise.part, start.world.snapshot()))
        return cls(inputs, disguise, Start(world, start.offset), begin)

    async def tell(self, record: Record) -> Record:
        """The next record.

        Raises:
            NotAnonymizable: it would decide something else.
            LogError: events that it consumed are missing.
        """
        assert record.offset == self.offset, "records come in order"
        self.offset += 1
        decision = decode_journal(record)
        is_ours = record.offset >= self._start and self._validity.admits(decision, record.offset)
        if decision is None:
            return told(record, self._disguise.masks.undecodable(DECISIONS, record.value))
        anew = self._disguise.record(decision)
        # Of void records, and those before the start, nothing can be derived: they are there to be looked at.
        if is_ours:
            anew = self._derive(record.offset, anew, await self._order.events_of(decision.consumed))
        return told(record, encode(DECISIONS, anew))

    def _derive(self, offset: int, expected: JournalRecord, events: RecordedEvents) -> JournalRecord:
        if isinstance(expected, SnapshotTaken) and expected.journal_offset in self._seals:
            expected = msgspec.structs.replace(expected, digest=self._seals[expected.journal_offset])
        divergence = self._followed.apply(offset, expected, events)
        derived = expected
        if divergence is not None:
            found = divergence.derived
            if found is None or not _alike(expected, found):
                raise NotAnonymizable(
                    f"told anew, the events do not lead to the decision at journal offset {offset}: "
                    f"{divergence.reason}; record without --anonymize, if a policy looks at what is masked"
                )
            derived = found
        if isinstance(derived, Advanced):
            self._seals[offset + 1] = derived.digest
            if len(self._seals) > SEALS_MAX:
                del self._seals[next(iter(self._seals))]
        return derived


def _alike(expected: JournalRecord, derived: JournalRecord) -> bool:
    """Whether two records say the same, but for the texts of messages and the digests of states."""
    if type(expected) is not type(derived) or isinstance(expected, SnapshotTaken):
        return False
    fields = (name for name in expected.__struct_fields__ if name not in TOLD_ANEW)
    return all(getattr(expected, name) == getattr(derived, name) for name in fields)
