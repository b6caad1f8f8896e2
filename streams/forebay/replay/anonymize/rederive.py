"""Derive a journal again from anonymised events. Its decisions must equal the decisions of the original journal."""

from contextlib import suppress
from typing import Self

import msgspec

from forebay.core.rederive import SEALS_MAX, RecordedEvents, Rederivation
from forebay.core.restore import restore
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.base import hex_digest
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, JournalRecord, SnapshotRecord
from forebay.events.topics import DECISIONS
from forebay.replay.anonymize.events import EventAnonymizer, with_value
from forebay.replay.anonymize.masks import NotAnonymizable
from forebay.replay.walk import Start, oldest
from forebay.transport.base import Log, Record
from forebay.transport.history.reader import RecordedOrder, Validity, decode_journal
from forebay.transport.history.snapshots import MissingChunk, checksum_of

CHANGED_FIELDS = frozenset({"message", "digest"})  # fields with masked values or with state digests


class AnonymizedJournal:
    def __init__(self, inputs: Log, anonymizer: EventAnonymizer, start: Start, offset: int) -> None:
        self.offset = offset
        self._inputs = inputs
        self._anonymizer = anonymizer
        self._start = start.offset
        self._followed = Rederivation(start.world)
        self._order = RecordedOrder(inputs, anonymizer.partition, start.world.view)
        self._validity = Validity.after(start.world)
        self._seals = {start.offset: hex_digest(start.world.digest())}

    @classmethod
    async def begin(
        cls, log: Log, inputs: Log, anonymizer: EventAnonymizer, custom: CustomPolicies = ONLY_BUILT_IN
    ) -> Self:
        """Begin with the first journal record of the original `log`."""
        begin, end = [await of(DECISIONS.name, anonymizer.partition) for of in (log.begin, log.end)]
        start = await oldest(log, anonymizer.partition, end)
        world = restore(map(anonymizer.anonymize, start.world.snapshot()), custom)
        return cls(inputs, anonymizer, Start(world, start.offset), begin)

    async def anonymize(self, record: Record) -> Record:
        assert record.offset == self.offset, "records come in order"
        self.offset += 1
        decision = decode_journal(record)
        is_ours = record.offset >= self._start and self._validity.read(record) is not None
        if decision is None:
            return with_value(record, self._anonymizer.masks.undecodable(DECISIONS, record.value))
        masked = self._anonymizer.anonymize(decision)
        # Stale records and records before the start cannot be derived. They are kept for inspection.
        if is_ours:
            if isinstance(masked, SnapshotRecord) and masked.checksum is not None:
                masked = await self._with_checksum(masked)
            masked = self._derive(record.offset, masked, await self._order.events_of(decision.consumed))
        return with_value(record, encode(DECISIONS, masked))

    async def _with_checksum(self, taken: SnapshotRecord) -> SnapshotRecord:
        """Return the record of a snapshot with the checksum of the anonymised chunks, zero if a chunk is missing."""
        with suppress(MissingChunk):  # the verification reports it
            checksum = await checksum_of(self._inputs, self._anonymizer.partition, taken)
            return msgspec.structs.replace(taken, checksum=checksum)
        return taken

    def _derive(self, offset: int, expected: JournalRecord, events: RecordedEvents) -> JournalRecord:
        if isinstance(expected, SnapshotRecord) and expected.journal_offset in self._seals:
            expected = msgspec.structs.replace(expected, digest=self._seals[expected.journal_offset])
        divergence = self._followed.apply(offset, expected, events)
        derived = expected
        if divergence is not None:
            found = divergence.derived
            if found is None or not _alike(expected, found):
                raise NotAnonymizable(
                    f"with anonymised events the decision at journal offset {offset} differs: "
                    f"{divergence.reason}; if a policy reads masked fields, record without --anonymize"
                )
            derived = found
        if isinstance(derived, Advanced):
            self._seals[offset + 1] = derived.digest
            if len(self._seals) > SEALS_MAX:
                del self._seals[next(iter(self._seals))]
        return derived


def _alike(expected: JournalRecord, derived: JournalRecord) -> bool:
    """Return whether two records are equal except for messages and digests."""
    if type(expected) is not type(derived) or isinstance(expected, SnapshotRecord):
        return False
    fields = (name for name in expected.__struct_fields__ if name not in CHANGED_FIELDS)
    return all(getattr(expected, name) == getattr(derived, name) for name in fields)
