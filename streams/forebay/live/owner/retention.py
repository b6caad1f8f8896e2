"""Keeps an embedded log within a size and an age, by deleting history that a snapshot stands for.

Theory of operation. Everything up to a snapshot that was read back and found complete may go, as on a broker with
retention: the log then begins with that snapshot. What lies behind a later snapshot stays, so a log always holds a
verified state and all records after it. `groups` and `control` are kept whole. Of `requests` and `tokens` the prompts
and answers of requests in flight are kept as well, because a worker that takes over a request reads them again.

The newest snapshot that has to serve is taken early if the log is over its size and no snapshot lets anything go.
Deletions are transactions of a few records on the event loop, with pauses between them, so that a decision waits for
one of them at most.
"""

import asyncio
import logging
import time
from collections import Counter

import msgspec

from forebay.events.decisions import SnapshotTaken
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import WorldState
from forebay.events.topics import CONTROL, DECISIONS, GROUPS, INPUTS, REQUESTS, SNAPSHOTS, TOKENS
from forebay.live.owner.owner import Owner
from forebay.live.owner.recorded_requests import AskedReader
from forebay.transport.base import LogError, Record
from forebay.transport.history.reader import check_snapshot_beside, decode_journal, decode_or_none, newest_snapshot
from forebay.transport.sqlite.log import SqliteLog

logger = logging.getLogger(__name__)

LOOK_S = 1.0  # between two looks at the size: a busy log grows by some megabytes meanwhile
LOOK_AGE_S = 60.0  # between two looks at the age, which is given in minutes or more
WAITS_MAX = 100  # pauses without a deletion: a reader of this process lags, so the rest is left to the next time
SLICE_S = 0.0005  # of one deletion: as long as a slice of a snapshot
SLICE_RECORDS_MAX = 512  # deleted at once: their pages must fit into the cache of the connection
PAUSE_SHARE = 4  # pauses are so many times as long as deletions: a fifth of the time is the most that they take
PAUSE_S = 0.001  # at least, so that other tasks get their turn
SCAN_RECORDS = 64  # journal records read at once in search of a snapshot
ASKED_MAX = 64  # requests in flight whose submissions are read: the oldest, whose answers begin first
GROWTH = 1.5  # times what could not be deleted: a log over its limit grows by so much before another early snapshot
SNAPSHOT_TAG = b'"snapshot.taken"'
KEPT = (GROUPS.name, CONTROL.name)


class Limits(msgspec.Struct, frozen=True):
    """What a log may hold.

    Attributes:
        size_bytes: of all records and tables.
        age_s: how old records may become; None for any age.
    """

    size_bytes: int
    age_s: float | None = None


class Retention:
    """Deletes the old history of one group's log while its owner runs.

    Attributes:
        limits: what the log may hold.
        trimmed: deleted records by topic.
        refused: snapshots that were not complete when they were read back, so nothing was deleted up to them.
    """

    def __init__(self, log: SqliteLog, owner: Owner, partition: int, limits: Limits) -> None:
        self._log = log
        self._owner = owner
        self._partition = partition
        self._kept_bytes = 0  # after the last deletion
        self._next: tuple[SnapshotTaken, WorldState] | None = None
        self._searched = 0  # the journal offset before which no snapshot is left to use
        self._looked_at_age_s = -LOOK_AGE_S
        self._slice = 1
        self.limits = limits
        self.trimmed: Counter[str] = Counter()
        self.refused = 0

    async def run(self) -> None:
        """Look after the log until cancelled. Raises LogError when the log cannot be written any more."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Delete what is over the limits now. Raises LogError when the log cannot be written any more."""
        try:
            while self._is_over_size():
                if not await self._trim_to_next():
                    self._ask_for_snapshot()
                    break
            if self.limits.age_s is not None and time.monotonic() - self._looked_at_age_s >= LOOK_AGE_S:
                self._looked_at_age_s = time.monotonic()
                while await self._trim_to_next(time.time_ns() // 1000 - int(self.limits.age_s * 1e6)):
                    pass
        except LogError as error:
            if self._log.failure is not None:
                raise
            logger.warning("old records cannot be deleted: %s", error)

    def _is_over_size(self) -> bool:
        return self._log.bytes_used()[0] > self.limits.size_bytes

    def _ask_for_snapshot(self) -> None:
        """Have the owner take a snapshot now, unless the log has hardly grown since the last deletion."""
        used, _ = self._log.bytes_used()
        if used <= self._kept_bytes * GROWTH:
            return
        if self._kept_bytes > self.limits.size_bytes:
            logger.warning(
                "the newest snapshot and what requests in flight need take %d bytes, more than the limit of %d:"
                " raise --log-max-size",
                self._kept_bytes,
                self.limits.size_bytes,
            )
        self._kept_bytes = used
        self._owner.snapshots.request()

    async def _trim_to_next(self, before_us: int | None = None) -> bool:
        """Delete all up to the next complete snapshot, if it was sealed before a time; return whether one was found."""
        self._next = self._next or await self._find()
        if self._next is None:
            return False
        taken, state = self._next
        (sealed,) = await self._log.read(DECISIONS.name, self._partition, taken.journal_offset, 1)
        if before_us is not None and sealed.at_us > before_us:
            return False
        floors = await self._floors(taken, state, sealed.at_us)
        already = sum(self.trimmed.values())
        for (topic, partition), floor in floors.items():
            await self._trim(topic, partition, floor)
        self._next = None
        self._kept_bytes, _ = self._log.bytes_used()
        deleted = sum(self.trimmed.values()) - already
        logger.info("deleted %d records: the journal begins at offset %d", deleted, taken.journal_offset)
        return True

    async def _find(self) -> tuple[SnapshotTaken, WorldState] | None:
        """Return the oldest complete snapshot after the log's beginning, with its state; None if there is none yet."""
        log, partition = self._log, self._partition
        begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
        position = max(begin, self._searched)
        while position < end:
            try:
                records = await log.read(DECISIONS.name, partition, position, min(SCAN_RECORDS, end - position))
            except LogError as error:
                if position < self._searched + SCAN_RECORDS:
                    logger.warning("the journal cannot be read, its newest snapshot serves: %s", error)
                return await self._newest(begin, end)
            for record in records:
                taken = decode_journal(record) if SNAPSHOT_TAG in record.value else None
                if isinstance(taken, SnapshotTaken) and taken.journal_offset > begin:
                    state = await self._checked(taken)
                    if state is not None:
                        return taken, state
            position = self._searched = records[-1].offset + 1
            await asyncio.sleep(0)
        return None

    async def _newest(self, begin: int, end: int) -> tuple[SnapshotTaken, WorldState] | None:
        """Return the newest snapshot: damaged history must not keep the log growing."""
        taken = await newest_snapshot(self._log, self._partition, end)
        if taken is None or taken.journal_offset <= begin:
            return None
        state = await self._checked(taken)
        return None if state is None else (taken, state)

    async def _checked(self, taken: SnapshotTaken) -> WorldState | None:
        """Read a snapshot back; return its state if it is complete and as it was sealed, else None."""
        try:
            return await check_snapshot_beside(self._log, self._partition, taken)
        except LogError as error:
            self.refused += 1
            logger.warning("nothing is deleted up to the snapshot at offset %d: %s", taken.first_offset, error)
            return None

    async def _floors(self, taken: SnapshotTaken, state: WorldState, sealed_us: int) -> dict[tuple[str, int], int]:
        """Return the first offset to keep in each partition."""
        partition = self._partition
        view = {run.topic: run.count for run in state.view}
        floors = {(topic.name, partition): view.get(topic.name, 0) for topic in INPUTS if topic.name not in KEPT}
        floors[DECISIONS.name, partition] = taken.journal_offset
        floors[SNAPSHOTS.name, partition] = taken.first_offset
        anchored = {topic for topic, _ in floors}.union(KEPT)
        for topic, number, end in self._log.topics():
            if topic not in anchored:
                floors[topic, number] = await self._offset_at(topic, number, end, sealed_us)
        for place, needed in (await self._needed()).items():
            floors[place] = min(needed, floors.get(place, needed))
        return floors

    async def _needed(self) -> dict[tuple[str, int], int]:
        """Return the oldest prompt and the beginning of the oldest answers that requests in flight may need again."""
        world, partition = self._owner.world, self._partition
        requests = world.requests.active()[:ASKED_MAX]
        unapplied = await self._log.read(REQUESTS.name, partition, world.view.get(REQUESTS.name, 0), ASKED_MAX)
        needed = {(REQUESTS.name, partition): requests[0].offset} if requests else {}
        asked = AskedReader(self._log, partition)
        submissions = [await asked.at(request.offset) for request in requests]
        submissions += [event for record in unapplied if isinstance(event := _event_of(record), RequestSubmitted)]
        for submitted in submissions:
            place = TOKENS.name, submitted.reply_slot
            needed[place] = min(submitted.reply_from, needed.get(place, submitted.reply_from))
        return needed

    async def _offset_at(self, topic: str, partition: int, end: int, at_us: int) -> int:
        """Return the first offset whose record was appended at a time or later, by bisection."""
        low, high = await self._log.begin(topic, partition), end
        while low < high:
            middle = (low + high) // 2
            (record,) = await self._log.read(topic, partition, middle, 1)
            low, high = (middle + 1, high) if record.at_us < at_us else (low, middle)
        return low

    async def _trim(self, topic: str, partition: int, floor: int) -> None:
        """Delete the records of a partition before `floor`, a few at a time."""
        waits = 0
        while waits < WAITS_MAX and await self._log.begin(topic, partition) < floor:
            began_s = time.perf_counter()
            count = self._log.trim(topic, partition, floor, self._slice)
            took_s = time.perf_counter() - began_s
            waits = 0 if count else waits + 1
            self.trimmed[topic] += count
            if took_s > SLICE_S:
                self._slice = max(1, self._slice // 2)
            elif count == self._slice and took_s < SLICE_S / 2:
                self._slice = min(2 * self._slice, SLICE_RECORDS_MAX)
            await asyncio.sleep(max(PAUSE_S, took_s * PAUSE_SHARE))


def _event_of(record: Record) -> object:
    return decode_or_none(REQUESTS, record.value)
