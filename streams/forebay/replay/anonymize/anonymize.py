"""Write a copy of a recorded group without its clients' content. Every decision and every cost table stays the same.

Theory of operation. A first pass reads and verifies the original. It collects data that a single record does not have:
the names of the system, the hashes by which snapshots refer to requests, and the requests that exceeded a deadline.
Then `AnonymousLog` rewrites each record when it is read. Input records and snapshots keep their offsets. The journal is
derived again from the anonymised input records; only digests and message texts may differ from the original. The key
exists only in memory, so an interrupted copy cannot be resumed. Memory holds one or two worlds, and about 150 bytes per
request, or 300 if the request has a session.
"""

import secrets
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

import msgspec

from forebay.core.rederive import SEALS_MAX, RecordedEvents, Rederivation
from forebay.core.restore import restore
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.sessions import session_key
from forebay.core.state.submitted_request import content_hash
from forebay.events.base import hex_digest
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import Advanced, JournalRecord, RequestAborted, SnapshotRecord
from forebay.events.fleet import WorkerJoined
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import CONTROL, DECISIONS, FLEET, GROUPS, INPUTS, REQUESTS, SNAPSHOTS, Topic
from forebay.replay.anonymize.events import EventAnonymizer, with_value
from forebay.replay.anonymize.masks import KEY_BYTES, Masks, NotAnonymizable
from forebay.replay.read_only import ReadOnlyLog, SliceLog
from forebay.replay.record.slice import copy
from forebay.replay.verify.verify import VerifyReport, verify
from forebay.replay.walk import Start, oldest, walk_all
from forebay.transport.base import Log, LogError, Record
from forebay.transport.history.reader import RecordedOrder, Validity, decode_journal, events_of, journal_records
from forebay.transport.history.snapshots import MissingChunk, checksum_of, load_snapshot
from forebay.transport.recording.manifest import Contents
from forebay.transport.recording.writer import RecordingWriter, part_of
from forebay.transport.sqlite.schema import LogUnusable

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


PROGRESS_EVERY = 1_000  # journal records between two progress reports

OnProgress = Callable[[int, int], None]
OnStep = Callable[[str, int, int], None]
TOPICS = {topic.name: topic for topic in (*INPUTS, SNAPSHOTS, GROUPS)}


class Anonymized(NamedTuple):
    """Result of an anonymisation, with the verification report of each group by group name."""

    contents: Contents
    verified: dict[str, VerifyReport]


class AnonymousLog(ReadOnlyLog):
    """Anonymised view of some groups of a log.

    Read a journal in order: a read at an earlier offset derives the journal from its beginning again.
    """

    def __init__(self, log: Log, masks: Masks, groups: Iterable[EventAnonymizer], custom: CustomPolicies) -> None:
        self._custom = custom
        self._log = log
        self._masks = masks
        self._groups = {group.partition: group for group in groups}
        self._journals: dict[int, AnonymizedJournal] = {}

    @classmethod
    async def open(
        cls,
        log: Log,
        partitions: Iterable[int] = (0,),
        progress: OnProgress | None = None,
        key: bytes | None = None,
        custom: CustomPolicies = ONLY_BUILT_IN,
    ) -> Self:
        """Run the first pass over some groups of a log, which must not grow, and return the anonymised view.

        Raises NotAnonymizable if the decisions of the original do not follow from its events, OtherRules if a program
        with other decision rules wrote the journal, and LogError if the log is damaged or incomplete.
        """
        masks = Masks(key or secrets.token_bytes(KEY_BYTES))
        groups = []
        for partition in partitions:
            anonymizer = EventAnonymizer(masks, partition)
            await _learn_names(log, anonymizer)
            await _learn_requests(log, anonymizer)
            await _learn_overdue(log, anonymizer, progress, custom)
            groups.append(anonymizer)
        return cls(log, masks, groups, custom)

    async def begin(self, topic: str, partition: int) -> int:
        return await self._log.begin(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        return await self._log.end(topic, partition)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """Return up to `limit` anonymised records from `offset`, without keys and headers."""
        if topic != DECISIONS.name and topic not in TOPICS:
            raise LogError(f"an anonymised recording does not contain topic {topic}")
        records = await self._log.read(topic, partition, offset, limit)
        if topic != DECISIONS.name:
            return [self._anonymize(TOPICS[topic], record) for record in records]
        journal = await self._journal_at(partition, offset)
        return [await journal.anonymize(record) for record in records]

    def _anonymize(self, topic: Topic, record: Record) -> Record:
        try:
            event: Any = decode(topic, record.value)
        except DecodeError:
            return with_value(record, self._masks.undecodable(topic, record.value))
        if topic is not GROUPS:
            event = self._groups[record.partition].anonymize(event)
        return with_value(record, encode(topic, event))

    async def _journal_at(self, partition: int, offset: int) -> AnonymizedJournal:
        """Return the journal anonymised up to `offset`, begun again if it is further already."""
        journal = self._journals.get(partition)
        if journal is None or journal.offset > offset:
            journal = await AnonymizedJournal.begin(self._log, self, self._groups[partition], self._custom)
            self._journals[partition] = journal
        async for record in journal_records(self._log, partition, journal.offset, offset):
            await journal.anonymize(record)
        return journal


async def record_anonymized(
    log: Log,
    out: Path,
    contents: Contents,
    progress: OnStep | None = None,
    key: bytes | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> Anonymized:
    """Write an anonymised recording of `contents` from a log, which may grow, and verify the recording.

    Only anonymised data is written to the disk. An unfinished file of an earlier call is replaced, because its key is
    lost. `progress` is called with the name of the current step, its progress and its total.

    Raises:
        NotAnonymizable: decisions from the anonymised events would differ. No file is left behind.
        LogUnusable: `out` exists, or another process is writing it.
        LogError: the log is damaged or incomplete, or the disk is full.
    """
    assert contents.anonymized, "the contents must be marked as anonymised"
    steps = _Steps(progress)
    source = SliceLog(log, contents.extents)
    partitions = [group.partition for group in contents.groups]
    anonymous = await AnonymousLog.open(source, partitions, steps.of("deriving decisions"), key, custom)
    _discard_begun(out, contents)
    writer = RecordingWriter.create(out, contents)
    try:
        await copy(anonymous, writer, steps.of("writing records"))
        verified = {}
        for group in contents.groups:
            report = await verify(writer.log, group.partition, steps.of("verifying"), custom=custom)
            if report.divergence is not None:
                raise NotAnonymizable(
                    f"the anonymised recording diverges at journal offset {report.divergence.offset}; record without "
                    "--anonymize"
                )
            verified[group.name] = report
        return Anonymized(writer.finish(), verified)
    except BaseException:
        writer.close()
        part_of(out).unlink(missing_ok=True)
        raise


def _discard_begun(out: Path, contents: Contents) -> None:
    begun = RecordingWriter.resume(out, contents.asked)
    if begun is None:
        return
    try:
        if begun.complete:
            raise LogUnusable(
                f"{part_of(out)} is complete but not renamed: wait for the process that writes it, or remove it"
            )
        part_of(out).unlink(missing_ok=True)
    finally:
        begun.close()


class _Steps(NamedTuple):
    on_step: OnStep | None

    def of(self, name: str) -> Callable[..., None] | None:
        step = self.on_step
        return None if step is None else lambda done, total, *_: step(name, done, total)


async def _learn_names(log: Log, anonymizer: EventAnonymizer) -> None:
    partition = anonymizer.partition
    world = (await oldest(log, partition, await log.end(DECISIONS.name, partition))).world
    for worker in world.fleet.workers():
        anonymizer.learn_worker(worker.spec)
    for pool in world.pools.values():
        anonymizer.learn_pool(pool)
    async for _, event in events_of(log, FLEET, partition):
        if isinstance(event, WorkerJoined):
            anonymizer.learn_worker(event.spec)
    async for _, event in events_of(log, CONTROL, partition):
        if isinstance(event, PoolConfigured):
            anonymizer.learn_pool(event)


async def _learn_requests(log: Log, anonymizer: EventAnonymizer) -> None:
    async for _, event in events_of(log, REQUESTS, anonymizer.partition):
        if not isinstance(event, RequestSubmitted):
            continue
        masked = anonymizer.anonymize(event)
        anonymizer.contents[content_hash(event)] = content_hash(masked)
        if event.routing.session_id:
            for pool in anonymizer.names["pool"]:
                key, stand_in = (session_key(pool, one.routing.session_id) for one in (event, masked))
                anonymizer.sessions[key] = stand_in


async def _learn_overdue(
    log: Log, anonymizer: EventAnonymizer, progress: OnProgress | None, custom: CustomPolicies
) -> None:
    """Walk the original to verify it, and find the requests that exceeded a deadline."""
    partition = anonymizer.partition
    walk = await walk_all(log, partition, custom)
    overdue: set[str] = set()
    records = 0
    async for offset, record, _, divergence in walk:
        if divergence is not None:
            raise NotAnonymizable(
                f"the decision at journal offset {offset} does not follow from the events: {divergence.reason}; "
                "record without --anonymize, and see `forebay verify`"
            )
        if isinstance(record, SnapshotRecord):
            with suppress(MissingChunk):  # the verification reports it
                await load_snapshot(log, partition, record)
        _note_overdue(record, overdue)
        records += 1
        if progress is not None and records % PROGRESS_EVERY == 0:
            progress(offset + 1, walk.end)
    for decided in walk.unwritten:
        _note_overdue(decided, overdue)
    anonymizer.keep_order(overdue)


def _note_overdue(record: JournalRecord, overdue: set[str]) -> None:
    if isinstance(record, RequestAborted) and record.reason in ("deadline", "queue_deadline", "queue_timeout"):
        overdue.add(record.request_id)
