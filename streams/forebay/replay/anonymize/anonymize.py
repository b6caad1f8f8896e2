"""Write a copy of a recorded group without its clients' content. Every decision and every cost table stays the same.

Theory of operation. A first pass verifies the original. It collects data that a single record does not have: the names
of the system, the hashes by which snapshots refer to requests, and the requests that exceeded a deadline. Then input
records and snapshots are rewritten at their offsets. At last the journal is derived again from the rewritten inputs;
only digests and message texts may differ from the original. The key exists only in memory. Memory holds one or two
worlds, and about 150 bytes per request, or 300 if the request has a session.
"""

import secrets
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import msgspec

from forebay.core.rederive import SEALS_MAX, RecordedEvents, Rederivation
from forebay.core.restore import restore
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import AdapterPlaced, Advanced, JournalRecord, RequestAborted, SnapshotRecord
from forebay.events.fleet import WorkerJoined
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, GROUPS, REQUESTS, topic_named
from forebay.journal.reader import read_whole
from forebay.journal.records import RecordedOrder, Validity
from forebay.journal.snapshots import MissingChunk, checksum_of
from forebay.journal.start import oldest
from forebay.replay.anonymize.events import KEY_BYTES, EventAnonymizer
from forebay.replay.record.slice import copy
from forebay.replay.verify.verify import PROGRESS_EVERY, VerifyReport, verify
from forebay.transport.base import Draft, Log, LogError, Record, Tail, Wake, events_of
from forebay.transport.sqlite.recording import Contents, Extent
from forebay.transport.sqlite.recording_writer import RecordingWriter, part_of

CHANGED_FIELDS = frozenset({"message", "digest"})  # fields with masked values or with state digests
DEADLINES = ("deadline", "queue_deadline", "queue_timeout")

OnStep = Callable[[str, int, int], None]


class ReadOnlyLog:
    """Base class of read-only logs."""

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        raise LogError("this log is read-only")

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        raise LogError("this log is read-only")

    async def flush(self) -> None:
        """Return at once, because nothing can be appended."""

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> Tail:
        raise LogError("this log is a fixed slice and cannot be tailed")


class SliceLog(ReadOnlyLog):
    """A log restricted to a fixed offset range (extent) per partition. It stays the same while the log grows."""

    def __init__(self, log: Log, extents: Iterable[Extent]) -> None:
        self._log = log
        self._extents = {(extent.topic, extent.partition): extent for extent in extents}

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        extent = self._extent(topic, partition)
        if offset < extent.first:
            raise LogError(f"{topic}/{partition}: the slice begins at offset {extent.first}, not {offset}")
        left = min(limit, extent.end - offset)
        return await self._log.read(topic, partition, offset, left) if left > 0 else []

    async def begin(self, topic: str, partition: int) -> int:
        return self._extent(topic, partition).first

    async def end(self, topic: str, partition: int) -> int:
        return self._extent(topic, partition).end

    def _extent(self, topic: str, partition: int) -> Extent:
        return self._extents.get((topic, partition)) or Extent(topic, partition, 0, 0)


class NotAnonymizable(LogError):
    """Raised if an anonymised recording would not have the same decisions. Discard everything that was written."""


class Anonymized(NamedTuple):
    """Result of an anonymisation, with the verification report of each group by group name."""

    contents: Contents
    verified: dict[str, VerifyReport]


async def record_anonymized(
    log: Log,
    out: Path,
    contents: Contents,
    progress: OnStep | None = None,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> Anonymized:
    """Write an anonymised recording of `contents` from a log, which may grow, and verify the recording.

    Only anonymised data is written to the disk. `progress` is called with the name of the current step, its progress
    and its total.

    Raises:
        NotAnonymizable: decisions from the anonymised events would differ. No file is left behind.
        LogUnusable: `out` exists, or an earlier call or another process has begun it.
        LogError: the log is damaged or incomplete, or the disk is full.
    """
    assert contents.anonymized, "the contents must be marked as anonymised"

    def step_of(name: str) -> Callable[..., None] | None:
        return None if progress is None else lambda done, total, *_: progress(name, done, total)

    source, key = SliceLog(log, contents.extents), secrets.token_bytes(KEY_BYTES)
    partitions = [group.partition for group in contents.groups]
    anonymizers = {one: await _learn(source, one, key, step_of("deriving decisions"), custom) for one in partitions}
    writer = RecordingWriter.create(out, contents)
    try:
        journals = {}
        for one, anonymizer in anonymizers.items():
            start = await oldest(source, one)
            world = restore(map(anonymizer.anonymize, start.world.snapshot()), custom)
            journals[one] = AnonymizedJournal(writer.log, one, anonymizer, world, start.offset)
        of_no_group = EventAnonymizer(key)

        async def rewrite(record: Record) -> Record:
            if record.topic == DECISIONS.name:
                value = await journals[record.partition].anonymize(record)
            else:
                value = _anonymize_input(record, anonymizers.get(record.partition, of_no_group))
            return Record(record.topic, record.partition, record.offset, record.at_us, value)

        await copy(source, writer, step_of("writing records"), rewrite)
        verified = {}
        for group in contents.groups:
            report = await verify(writer.log, group.partition, step_of("verifying"), custom=custom)
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


async def _learn(
    log: Log, partition: int, key: bytes, progress: Callable[..., None] | None, custom: CustomPolicies
) -> EventAnonymizer:
    """Verify a group of the original, and return an anonymizer that knows what a single record does not have.

    Raises NotAnonymizable if the decisions do not follow from the events, OtherRules if a program with other decision
    rules wrote the journal, and LogError if the log is damaged or incomplete.
    """
    anonymizer, overdue = EventAnonymizer(key), set[str]()
    reader = await read_whole(log, partition, custom)
    for worker in reader.world.fleet.workers():
        anonymizer.learn_worker(worker.spec)
    for pool in reader.world.pools.values():
        anonymizer.learn_pool(pool)
    async for step in reader:
        if step.divergence is not None:
            raise NotAnonymizable(
                f"the decision at journal offset {step.offset} does not follow from the events: "
                f"{step.divergence.reason}; record without --anonymize, and see `forebay verify`"
            )
        if isinstance(step.record, RequestAborted) and step.record.reason in DEADLINES:
            overdue.add(step.record.request_id)
        if isinstance(step.record, AdapterPlaced):
            anonymizer.learn_placement(step.record)
        for event in chain.from_iterable(step.events.values()):
            if isinstance(event, WorkerJoined):
                anonymizer.learn_worker(event.spec)
            elif isinstance(event, PoolConfigured):
                anonymizer.learn_pool(event)
        if progress is not None and step.offset % PROGRESS_EVERY == 0:
            progress(step.offset, reader.end)
    # Requests with the deadline of the last abort may have expired with it, although the journal ends before.
    for decided in reader.followed.pending:
        if isinstance(decided, RequestAborted) and decided.reason in DEADLINES:
            overdue.add(decided.request_id)
    async for _, event in events_of(log, REQUESTS, partition):
        if isinstance(event, RequestSubmitted):
            anonymizer.learn_request(event)
    anonymizer.keep_order(overdue)
    return anonymizer


def _anonymize_input(record: Record, anonymizer: EventAnonymizer) -> bytes:
    topic = topic_named(record.topic)
    try:
        event = decode(topic, record.value)
    except DecodeError:
        return anonymizer.undecodable(topic, record.value)
    return encode(topic, event if topic is GROUPS else anonymizer.anonymize(event))


class AnonymizedJournal:
    """Derives the journal of a group again, record by record."""

    def __init__(self, inputs: Log, partition: int, anonymizer: EventAnonymizer, world: World, start: int) -> None:
        """Begin with the anonymised `world` right before the journal offset `start`."""
        self._inputs = inputs
        self._partition = partition
        self._anonymizer = anonymizer
        self._start = start
        self._followed = Rederivation(world)
        self._order = RecordedOrder(inputs, partition, world.view)
        self._validity = Validity.after(world)
        self._seals = {start: hex_digest(world.digest())}

    async def anonymize(self, record: Record) -> bytes:
        is_ours = record.offset >= self._start and self._validity.read(record) is not None
        try:
            masked = self._anonymizer.anonymize(decode(DECISIONS, record.value))
        except DecodeError:
            return self._anonymizer.undecodable(DECISIONS, record.value)
        # Stale records and records before the start cannot be derived. They are kept for inspection.
        if is_ours:
            if isinstance(masked, SnapshotRecord) and masked.checksum is not None:
                with suppress(MissingChunk):  # the verification reports it
                    checksum = await checksum_of(self._inputs, self._partition, masked)
                    masked = msgspec.structs.replace(masked, checksum=checksum)
            masked = self._derive(record.offset, masked, await self._order.events_of(masked.consumed))
        return encode(DECISIONS, masked)

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
