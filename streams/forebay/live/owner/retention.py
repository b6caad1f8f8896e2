"""Keep an embedded log within its maximum size and age, by deleting records that a snapshot replaces.

Theory of operation. Retention reads a snapshot back. If the snapshot is complete, the log may begin with it, so the log
always holds a verified state and all records after it. `groups`, `control` and `models` are kept whole. The prompts and
responses of requests in flight are kept, because a worker that takes over a request reads them again. `answers` has a
retention of its own, and becomes shorter only if the log is too large without the other records.

Deletions are transactions of a few records on the event loop, with pauses between them, so a decision waits for at most
one such transaction. Each group of a log has a retention, which also deletes from topics that all groups share.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterator, Sequence

import msgspec
from prometheus_client.core import Metric

from forebay import runtime
from forebay.events.answers import RETENTION_S
from forebay.events.decisions import SnapshotRecord
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import WorldState
from forebay.events.topics import ANSWERS, DECISIONS, FIXED_TOPICS, FOREVER, INPUTS, REQUESTS, SNAPSHOTS, TOKENS
from forebay.journal.records import decode_journal, decode_or_none
from forebay.journal.snapshots import check_snapshot_beside, newest_snapshot
from forebay.live.owner.owner import Owner
from forebay.live.owner.submissions import SubmissionReader
from forebay.runtime.metrics import collector, counter, gauge
from forebay.transport.base import LogError
from forebay.transport.sqlite.log import SqliteLog

logger = logging.getLogger(__name__)

CHECK_S = 1.0  # between two size checks; a busy log grows by a few megabytes meanwhile
AGE_CHECK_S = 60.0  # between two age checks; maximum ages are minutes or more
WAITS_MAX = 100  # consecutive pauses in which a slow reader prevents deletions; then the partition is left as it is
SLICE_S = 0.0005  # target duration of one deletion, equal to a slice of a snapshot
SLICE_RECORDS_MAX = 512  # records per deletion; their pages must fit into the cache of the connection
PAUSE_SHARE = 4  # a pause is this many times as long as the deletion, so deletions take at most a fifth of the time
PAUSE_S = 0.001  # minimum pause, so that other tasks run
SCAN_RECORDS = 64  # journal records per read while searching for a snapshot
SUBMISSIONS_MAX = 64  # read the submissions of the oldest requests in flight, whose responses begin first
GROWTH = 1.5  # a log over its limit grows by this factor before another early snapshot is requested
SNAPSHOT_TAGS = (b'"snapshot.taken"', b'"sealed"')
# Without regard to snapshots.
KEPT = frozenset(topic.name for topic in FIXED_TOPICS if topic.retention_s == FOREVER or topic.is_compacted)


class RetentionLimits(msgspec.Struct, frozen=True):
    """Limits of a log: bytes of records and age of records, and bytes of the WAL; 0 for the default of a log."""

    size_bytes: int
    age_s: float | None = None
    wal_bytes: int = 0


class Retention:
    """Deletes old records of one group's embedded log while the owner runs.

    Attributes:
        peers: Retentions of the other groups of the log, whose requests in flight need records of shared topics.
        refused: Number of snapshots that were incomplete when read back, so that no record was deleted for them.
    """

    def __init__(self, log: SqliteLog, owner: Owner, partition: int, limits: RetentionLimits) -> None:
        self._log = log
        self._owner = owner
        self._partition = partition
        self._kept_bytes = 0  # after the last deletion
        self._next: tuple[SnapshotRecord, WorldState] | None = None
        self._searched = 0  # journal offset before which there is no usable snapshot
        self._age_checked_s = -AGE_CHECK_S
        self._slice = 1
        self.limits = limits
        self.peers: Sequence[Retention] = ()
        self.trimmed: Counter[str] = Counter()
        self.refused = 0

    async def run(self) -> None:
        """Enforce the limits periodically until cancelled. Raises LogError if the log can no longer be written."""
        while True:
            await self.enforce()
            await asyncio.sleep(CHECK_S)

    async def enforce(self) -> None:
        """Delete old records until the log is within its limits, and request a snapshot if it stays too large.

        Raises LogError if the log can no longer be written.
        """
        try:
            while self._is_over_size():
                if not await self._trim_to_next():
                    self._request_snapshot()
                    break
            if runtime.monotonic_s() - self._age_checked_s >= AGE_CHECK_S:
                self._age_checked_s = runtime.monotonic_s()
                await self._trim_answers(runtime.wall_us() - RETENTION_S * 1_000_000)
                age_s = self.limits.age_s
                while age_s is not None and await self._trim_to_next(runtime.wall_us() - int(age_s * 1e6)):
                    pass
        except LogError as error:
            if self._log.failure is not None:
                raise
            logger.warning("old records cannot be deleted: %s", error)

    def _is_over_size(self) -> bool:
        return self._log.bytes_used()[0] > self.limits.size_bytes

    def _request_snapshot(self) -> None:
        """Request a snapshot from the owner, unless the log has grown by less than `GROWTH` since the last deletion."""
        used, _ = self._log.bytes_used()
        if used <= self._kept_bytes * GROWTH:
            return
        if self._kept_bytes > self.limits.size_bytes:
            logger.warning(
                "the newest snapshot and the records of requests in flight take %d bytes, more than the limit of %d:"
                " raise --log-max-size",
                self._kept_bytes,
                self.limits.size_bytes,
            )
        self._kept_bytes = used
        self._owner.snapshots.request()

    async def _trim_to_next(self, before_us: int | None = None) -> bool:
        """Delete all records before the next complete snapshot, and return whether there is one.

        With `before_us`, the snapshot must have been sealed before this wall-clock time.
        """
        self._next = self._next or await self._find_snapshot()
        if self._next is None:
            return False
        taken, state = self._next
        (sealed,) = await self._log.read(DECISIONS.name, self._partition, taken.journal_offset, 1)
        if before_us is not None and sealed.at_us > before_us:
            return False
        floors = await self._first_offsets(taken, state, sealed.at_us)
        already = sum(self.trimmed.values())
        for (topic, partition), floor in floors.items():
            await self._trim(topic, partition, floor)
        if self._is_over_size():
            await self._trim_answers(sealed.at_us)
        self._next = None
        self._kept_bytes, _ = self._log.bytes_used()
        deleted = sum(self.trimmed.values()) - already
        logger.info("deleted %d records: the journal begins at offset %d", deleted, taken.journal_offset)
        return True

    async def _find_snapshot(self) -> tuple[SnapshotRecord, WorldState] | None:
        """Return the oldest complete snapshot after the beginning of the log, with its state."""
        log, partition = self._log, self._partition
        begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
        position = max(begin, self._searched)
        while position < end:
            try:
                records = await log.read(DECISIONS.name, partition, position, min(SCAN_RECORDS, end - position))
            except LogError as error:
                if position < self._searched + SCAN_RECORDS:
                    logger.warning("the journal cannot be read, using its newest snapshot: %s", error)
                return await self._newest_snapshot(begin, end)
            for record in records:
                taken = decode_journal(record) if any(tag in record.value for tag in SNAPSHOT_TAGS) else None
                if isinstance(taken, SnapshotRecord) and taken.journal_offset > begin:
                    state = await self._read_back(taken)
                    if state is not None:
                        return taken, state
            position = self._searched = records[-1].offset + 1
            await asyncio.sleep(0)
        return None

    async def _newest_snapshot(self, begin: int, end: int) -> tuple[SnapshotRecord, WorldState] | None:
        """Return the newest snapshot with its state, so that the log does not grow because of damaged records."""
        taken = await newest_snapshot(self._log, self._partition, end)
        if taken is None or taken.journal_offset <= begin:
            return None
        state = await self._read_back(taken)
        return None if state is None else (taken, state)

    async def _read_back(self, taken: SnapshotRecord) -> WorldState | None:
        """Return the state of a snapshot if it is complete and has the sealed digest."""
        try:
            return await check_snapshot_beside(self._log, self._partition, taken)
        except LogError as error:
            self.refused += 1
            logger.warning("kept all records before the unusable snapshot at offset %d: %s", taken.first_offset, error)
            return None

    async def _first_offsets(
        self, taken: SnapshotRecord, state: WorldState, sealed_us: int
    ) -> dict[tuple[str, int], int]:
        partition = self._partition
        view = {run.topic: run.count for run in state.view}
        floors = {(topic.name, partition): view.get(topic.name, 0) for topic in INPUTS if topic.name not in KEPT}
        floors[DECISIONS.name, partition] = taken.journal_offset
        floors[SNAPSHOTS.name, partition] = taken.first_offset
        anchored = {topic for topic, _ in floors}.union(KEPT)
        for topic, number, end in self._log.topics():
            if topic not in anchored:
                floors[topic, number] = await self._offset_at(topic, number, end, sealed_us)
        for place, first_needed in (await self._offsets_in_flight()).items():
            floors[place] = min(first_needed, floors.get(place, first_needed))
        for peer in self.peers:
            for place, first_needed in (await peer._offsets_in_flight()).items():
                if place[0] == TOKENS.name and place in floors:
                    floors[place] = min(first_needed, floors[place])
        return floors

    async def _offsets_in_flight(self) -> dict[tuple[str, int], int]:
        """Return the offsets of the oldest prompt and the oldest responses that requests in flight may need."""
        world, partition = self._owner.world, self._partition
        requests = world.requests.active()[:SUBMISSIONS_MAX]
        unapplied = await self._log.read(REQUESTS.name, partition, world.view.get(REQUESTS.name, 0), SUBMISSIONS_MAX)
        first_needed = {(REQUESTS.name, partition): requests[0].submitted.offset} if requests else {}
        reader = SubmissionReader(self._log, partition)
        submissions = [await reader.at(request.submitted.offset) for request in requests]
        events = [decode_or_none(REQUESTS, record.value) for record in unapplied]
        submissions += [event for event in events if isinstance(event, RequestSubmitted)]
        for submitted in submissions:
            place = TOKENS.name, submitted.reply_slot
            first_needed[place] = min(submitted.reply_from, first_needed.get(place, submitted.reply_from))
        return first_needed

    async def _offset_at(self, topic: str, partition: int, end: int, at_us: int) -> int:
        """Return the offset of the first record that was appended at `at_us` or later."""
        low, high = await self._log.begin(topic, partition), end
        while low < high:
            middle = (low + high) // 2
            (record,) = await self._log.read(topic, partition, middle, 1)
            low, high = (middle + 1, high) if record.at_us < at_us else (low, middle)
        return low

    async def _trim_answers(self, before_us: int) -> None:
        for topic, partition, end in self._log.topics():
            if topic == ANSWERS.name:
                await self._trim(topic, partition, await self._offset_at(topic, partition, end, before_us))

    async def _trim(self, topic: str, partition: int, floor: int) -> None:
        waits = 0
        while waits < WAITS_MAX and await self._log.begin(topic, partition) < floor:
            began_s = runtime.monotonic_s()
            count = self._log.trim(topic, partition, floor, self._slice)
            took_s = runtime.monotonic_s() - began_s
            waits = 0 if count else waits + 1
            self.trimmed[topic] += count
            if took_s > SLICE_S:
                self._slice = max(1, self._slice // 2)
            elif count == self._slice and took_s < SLICE_S / 2:
                self._slice = min(2 * self._slice, SLICE_RECORDS_MAX)
            await asyncio.sleep(max(PAUSE_S, took_s * PAUSE_SHARE))


@collector
def retention_metrics(log: SqliteLog, *retentions: Retention) -> Iterator[Metric]:
    used, file = log.bytes_used()
    yield gauge("forebay_log_bytes", "bytes of records in the log", used)
    yield gauge("forebay_log_file_bytes", "bytes of the log file, including free pages", file)
    text = "maximum bytes of records in the log, from --log-max-size"
    yield gauge("forebay_log_limit_bytes", text, retentions[0].limits.size_bytes)
    first = {(topic, str(partition)): offset for (topic, partition), offset in sorted(log.starts().items())}
    text = "offset of the oldest record in each partition"
    yield gauge("forebay_log_first_offset", text, first, "topic", "partition")
    trimmed = sum((retention.trimmed for retention in retentions), Counter[str]())
    text = "records removed by retention"
    yield counter("forebay_log_trimmed_records", text, dict(sorted(trimmed.items())), "topic")
    text = "snapshots that retention found damaged or incomplete, and therefore kept all records for"
    yield counter("forebay_log_snapshots_refused", text, sum(retention.refused for retention in retentions))
