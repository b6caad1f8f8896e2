"""A recorded group told anew, without what its clients said: every decision and every cost table comes out the same.

Theory of operation. A first pass walks the original, which verifies it, and learns what cannot be known record by
record: names of the system, hashes that snapshots and requests share, tie seeds that lead to the same choices. Then
records are read through `AnonymousLog`. Inputs and snapshots are told anew one by one, at their offsets. The journal
is derived again from the inputs as they are told: what it decides must be what the original decided, only digests of
states and the texts of messages become others. The key exists in memory only: what was begun under it, nobody can
finish later. Memory is that of a world or two, and for each request some 20 bytes, with a session some 40.
"""

import secrets
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Self

from forebay.core.state.active_request import content_hash
from forebay.core.state.sessions import session_key
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.control import PoolConfigured
from forebay.events.decisions import JournalRecord, RequestAborted, SnapshotTaken
from forebay.events.fleet import WorkerJoined
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import CONTROL, DECISIONS, FLEET, GROUPS, INPUTS, REQUESTS, SNAPSHOTS, Topic
from forebay.replay.anonymize.events import Disguise, told
from forebay.replay.anonymize.masks import KEY_BYTES, Masks, NotAnonymizable
from forebay.replay.anonymize.rederive import Retelling
from forebay.replay.anonymize.tie_seeds import SeedNumbers, SeedSearch
from forebay.replay.read_only import ReadOnlyLog, SliceLog
from forebay.replay.record.slice import copy
from forebay.replay.verify.verify import Report, verify
from forebay.replay.walk import oldest, walk_all
from forebay.transport.base import Log, LogError, Record
from forebay.transport.history.reader import PAGE_RECORDS, MissingChunk, decode_or_none, journal_records, load_snapshot
from forebay.transport.recording.manifest import Contents
from forebay.transport.recording.writer import RecordingWriter, part_of
from forebay.transport.sqlite.schema import LogUnusable

PROGRESS_EVERY = 1_000  # journal records between two reports of progress

OnProgress = Callable[[int, int], None]
OnStep = Callable[[str, int, int], None]
TOPICS = {topic.name: topic for topic in (*INPUTS, SNAPSHOTS, GROUPS)}


class Anonymized(NamedTuple):
    """What was written, what its verification found by group, and how many requests keep their own tie seed.

    That is a hash of their id; they are those for which no other seed leads to the same choices.
    """

    contents: Contents
    verified: dict[str, Report]
    seeds_kept: int


class AnonymousLog(ReadOnlyLog):
    """Groups of a log, to be read as they are told anew. A journal is best read in order, from its begin on."""

    def __init__(self, log: Log, masks: Masks, groups: Iterable[Disguise]) -> None:
        self._log = log
        self._masks = masks
        self._groups = {group.partition: group for group in groups}
        self._journals: dict[int, Retelling] = {}

    @classmethod
    async def open(
        cls, log: Log, partitions: Iterable[int] = (0,), progress: OnProgress | None = None, key: bytes | None = None
    ) -> Self:
        """Take the first pass over groups of a log that does not grow.

        `partitions` are their control partitions; `progress` is told journal records done and their total, a group
        after the other. The `key` is drawn, unless a test gives one.

        Raises:
            NotAnonymizable: the original's events do not lead to its decisions.
            OtherRules: it was decided by another version of the rules.
            LogError: it is damaged, or misses a part.
        """
        masks = Masks(key or secrets.token_bytes(KEY_BYTES))
        groups = []
        for partition in partitions:
            disguise = Disguise(masks, partition)
            await _learn_names(log, disguise)
            await _learn_requests(log, disguise)
            await _learn_choices(log, disguise, progress)
            groups.append(disguise)
        return cls(log, masks, groups)

    @property
    def seeds_kept(self) -> int:
        """How many requests keep their own tie seed, a hash of their id: no other leads to the same choices."""
        return sum(group.seeds.kept for group in self._groups.values())

    async def begin(self, topic: str, partition: int) -> int:
        """As of the original."""
        return await self._log.begin(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        """As of the original."""
        return await self._log.end(topic, partition)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """As of a log; keys and headers are left out.

        Raises:
            NotAnonymizable: told anew, the events would lead to other decisions.
            LogError: the original is damaged, or misses a part.
        """
        if topic != DECISIONS.name and topic not in TOPICS:
            raise LogError(f"the topic {topic} has no place in an anonymised recording")
        records = await self._log.read(topic, partition, offset, limit)
        if topic != DECISIONS.name:
            return [self._tell(TOPICS[topic], record) for record in records]
        journal = await self._journal_at(partition, offset)
        return [await journal.tell(record) for record in records]

    def _tell(self, topic: Topic, record: Record) -> Record:
        try:
            event: Any = decode(topic, record.value)
        except DecodeError:
            return told(record, self._masks.undecodable(topic, record.value))
        if topic is not GROUPS:
            disguise = self._groups[record.partition]
            event = disguise.chunk(event) if topic is SNAPSHOTS else disguise.event(event, record.offset)
        return told(record, encode(topic, event))

    async def _journal_at(self, partition: int, offset: int) -> Retelling:
        """A journal, told up to an offset: from the beginning again if it is further already."""
        journal = self._journals.get(partition)
        if journal is None or journal.offset > offset:
            journal = await Retelling.begin(self._log, self, self._groups[partition])
            self._journals[partition] = journal
        async for record in journal_records(self._log, partition, journal.offset, offset):
            await journal.tell(record)
        return journal


async def record_anonymized(
    log: Log,
    out: Path,
    contents: Contents,
    progress: OnStep | None = None,
    key: bytes | None = None,
) -> Anonymized:
    """Write an anonymised recording of what `contents` says, from a log that may grow, and verify it.

    Nothing but what is told anew reaches the disk. What an earlier run left of the same recording is begun again, for
    its key is gone. `progress` is told what is being done, and how much of how much; the `key` is drawn, unless a test
    gives one.

    Raises:
        NotAnonymizable: decisions would come out otherwise; no file is left.
        LogUnusable: `out` exists, or something else is on its way there.
        LogError: the log is damaged or misses a part, or the disk is full.
    """
    assert contents.anonymized, "the recording must say what it is"
    steps = _Steps(progress)
    source = SliceLog(log, contents.extents)
    partitions = [group.partition for group in contents.groups]
    anonymous = await AnonymousLog.open(source, partitions, steps.of("deriving decisions"), key)
    _discard_begun(out, contents)
    writer = RecordingWriter.create(out, contents)
    try:
        await copy(anonymous, writer, steps.of("writing records"))
        verified = {}
        for group in contents.groups:
            report = await verify(writer.log, group.partition, steps.of("verifying"))
            if report.divergence is not None:
                raise NotAnonymizable(f"what was written diverges at journal offset {report.divergence.offset}")
            verified[group.name] = report
        return Anonymized(writer.finish(), verified, anonymous.seeds_kept)
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
                f"{part_of(out)}: lacks but its name: wait for the process that is at it, or if there is none remove it"
            )
        part_of(out).unlink(missing_ok=True)
    finally:
        begun.close()


class _Steps(NamedTuple):
    """Progress of one thing after the other."""

    told: OnStep | None

    def of(self, name: str) -> Callable[..., None] | None:
        """What tells of the thing of this name."""
        step = self.told
        return None if step is None else lambda done, total, *_: step(name, done, total)


async def _records(log: Log, topic: Topic, partition: int) -> AsyncIterator[tuple[int, Any]]:
    """Every event of a topic that decodes, with its offset."""
    offset = await log.begin(topic.name, partition)
    while records := await log.read(topic.name, partition, offset, PAGE_RECORDS):
        for record in records:
            event = decode_or_none(topic, record.value)
            if event is not None:
                yield record.offset, event
        offset = records[-1].offset + 1


async def _learn_names(log: Log, disguise: Disguise) -> None:
    names, partition = disguise.names, disguise.partition
    world = (await oldest(log, partition, await log.end(DECISIONS.name, partition))).world
    for worker in world.fleet.workers():
        names.learn_worker(worker.spec)
    for pool in world.pools.values():
        names.learn_pool(pool)
    async for _, event in _records(log, FLEET, partition):
        if isinstance(event, WorkerJoined):
            names.learn_worker(event.spec)
    async for _, event in _records(log, CONTROL, partition):
        if isinstance(event, PoolConfigured):
            names.learn_pool(event)


async def _learn_requests(log: Log, disguise: Disguise) -> None:
    """What snapshots know of requests, and what will stand for it."""
    async for offset, event in _records(log, REQUESTS, disguise.partition):
        if not isinstance(event, RequestSubmitted):
            continue
        anew = disguise.submitted(event, offset)
        disguise.contents.add(content_hash(event), content_hash(anew))
        if event.routing.session_id:
            for pool in disguise.names.pools:
                keys = (session_key(pool, one.routing.session_id) for one in (event, anew))
                disguise.sessions.add(*keys)
    disguise.contents.seal()
    disguise.sessions.seal()


async def _learn_choices(log: Log, disguise: Disguise, progress: OnProgress | None) -> None:
    """Walk the original: tie seeds that lead to the same choices, and who was given up at a deadline."""
    partition = disguise.partition
    disguise.seeds = SeedNumbers(await log.begin(REQUESTS.name, partition))
    walk = await walk_all(log, partition)
    search = SeedSearch(
        walk.world, disguise.seeds, lambda *place: disguise.masks.tie_seed(partition, *place), disguise.asked
    )
    walk.world.on_selection = search.saw
    overdue: set[str] = set()
    records = 0
    async for offset, record, _, divergence in walk:
        if divergence is not None:
            raise NotAnonymizable(
                f"the events do not lead to the decision at journal offset {offset}: {divergence.reason}; "
                "record without --anonymize, and see `forebay replay verify`"
            )
        if isinstance(record, SnapshotTaken):
            with suppress(MissingChunk):  # verification says so
                await load_snapshot(log, partition, record)
        _note_overdue(record, overdue)
        records += 1
        if progress is not None and records % PROGRESS_EVERY == 0:
            progress(offset + 1, walk.end)
    for decided in walk.unwritten:
        _note_overdue(decided, overdue)
    disguise.keep_order(overdue)


def _note_overdue(record: JournalRecord, overdue: set[str]) -> None:
    if isinstance(record, RequestAborted) and record.reason in ("deadline", "queue_deadline", "queue_timeout"):
        overdue.add(record.request_id)
