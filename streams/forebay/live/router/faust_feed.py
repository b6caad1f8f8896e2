"""Feed records from Faust's streams into the tails of an owner, in order and without gaps.

Faust decides where its consumer begins: at the committed offsets of the consumer group, or at the end of the partition
when its first fetch is sent. A tail therefore reads earlier records from the log itself, and takes records from Faust
once both meet. If Faust skips records or delivers none, the tail notices that the end of the partition has moved, and
reads the missing records from the log.

A claim may make a router the owner of a group whose partition Faust assigned to another router, or to none. The tails
of such a partition follow the log, until Faust delivers its first record after an assignment.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Collection

from forebay.transport.base import Log, LogError, Record, Tail, Wake

logger = logging.getLogger(__name__)

PAGE_RECORDS = 500
BUFFER_RECORDS_MAX = 20_000  # a tail that is further behind reads the log instead
# A tail that got no record for this long reads the end of its partition. While the partition stays still, the time
# doubles up to the maximum.
STILL_S, STILL_S_MAX = 0.5, 2.0


class FedTail:
    """Tail of one partition, which takes records from Faust while the partition is assigned to this router.

    It reads the log while it is behind Faust, and follows the log while Faust does not deliver the partition.
    """

    def __init__(self, feed: "Feed", log: Log, topic: str, partition: int, offset: int, wake: Wake) -> None:
        self.position = offset
        self._feed = feed
        self._log = log
        self._place = (topic, partition)
        self._wake = wake
        self._buffer: deque[Record] = deque()
        self._known_end = offset
        self._failure: LogError | None = None
        self._filling: asyncio.Task[None] | None = None
        self._following: Tail | None = None  # tail of the log while Faust does not deliver the partition
        self._hurry = asyncio.Event()
        if feed.is_assigned(partition):
            self._fill()
        else:
            self.follow_log()
        self._watching = asyncio.create_task(self._watch(), name=f"watch {topic}/{partition}")

    def __len__(self) -> int:
        if self._buffer or self._failure is not None:
            return len(self._buffer) or 1
        return 0 if self._following is None else len(self._following)

    def take(self, limit: int) -> list[Record]:
        if self._failure is not None and not self._buffer:
            raise self._failure
        buffer = self._buffer
        taken = [buffer.popleft() for _ in range(min(limit, len(buffer)))]
        if self._following is not None:
            followed = self._following.take(limit - len(taken))
            self.position += len(followed)
            return taken + followed
        if not buffer and self.position < self._known_end:
            self._fill()
        return taken

    def close(self) -> None:
        self._feed.remove(self._place, self)
        self._watching.cancel()
        if self._filling is not None:
            self._filling.cancel()
        if self._following is not None:
            self._following.close()

    def follow_log(self) -> None:
        """Follow the log from here on, because Faust does not deliver the partition."""
        if self._following is None and self._filling is None and self._failure is None:
            topic, partition = self._place
            self._following = self._log.tail(topic, partition, self.position, self._wake)

    def hurry(self) -> None:
        self._hurry.set()

    def push(self, record: Record) -> None:
        """Buffer the next record of this tail. If another record arrives, read the log up to it."""
        if self._is_followed(record.offset):
            return
        if record.offset == self.position and self._filling is None and len(self._buffer) < BUFFER_RECORDS_MAX:
            self._known_end = max(self._known_end, record.offset + 1)
            self._buffer.append(record)
            self.position += 1
            self._wake.set()
        else:
            self.announce(record.offset)

    def announce(self, offset: int) -> None:
        """Note that a record exists at `offset`, and read the log up to it."""
        if self._is_followed(offset):
            return
        self._known_end = max(self._known_end, offset + 1)
        if self.position < self._known_end and len(self._buffer) < BUFFER_RECORDS_MAX:
            self._fill()

    def _is_followed(self, offset: int) -> bool:
        """Return whether the log delivers the record at `offset` itself; otherwise Faust delivers from here on."""
        if self._following is None:
            return False
        if offset < self.position or not self._feed.is_assigned(self._place[1]):
            return True
        self._following.close()
        self._following = None
        return False

    def _fill(self) -> None:
        if self._filling is None and self._failure is None:
            self._filling = asyncio.create_task(self._read_up(), name=f"read up {self._place[0]}/{self._place[1]}")

    async def _watch(self) -> None:
        log, (topic, partition) = self._log, self._place
        before, still_s = -1, STILL_S
        while self._failure is None:
            try:
                async with asyncio.timeout(still_s):
                    await self._hurry.wait()
                self._hurry.clear()  # not later: it may be set again while `log.end` runs
                before, still_s = self.position, STILL_S
            except TimeoutError:
                pass
            if self.position != before or self._filling is not None or self._following is not None:
                before, still_s = self.position, STILL_S
                continue
            still_s = min(2 * still_s, STILL_S_MAX)
            try:
                end = await log.end(topic, partition)
            except LogError as error:
                logger.warning("%s/%d: %s", topic, partition, error)
                continue
            if end > self.position == before:
                logger.info("reading %s/%d from offset %d, because Faust delivers no records", topic, partition, before)
                self._fill()

    async def _read_up(self) -> None:
        log, (topic, partition) = self._log, self._place
        try:
            self._known_end = max(self._known_end, await log.end(topic, partition))
            while self.position < self._known_end and len(self._buffer) < BUFFER_RECORDS_MAX:
                records = await log.read(topic, partition, self.position, PAGE_RECORDS)
                if not records:
                    raise LogError(
                        f"{topic}/{partition} ends at offset {self.position}, but its end was {self._known_end} before:"
                        " the broker lost records"
                    )
                self._buffer.extend(records)
                self.position = records[-1].offset + 1
                self._wake.set()
        except LogError as error:
            self._failure = error
            self._wake.set()
        finally:
            self._filling = None
        if not self._feed.is_assigned(partition):
            self.follow_log()


class FaustLog:
    """Log whose tails of the state topics are fed by Faust. All other calls go to the underlying log."""

    def __init__(self, log: Log, feed: "Feed", topics: Collection[str]) -> None:
        self._log = log
        self._feed = feed
        self._topics = frozenset(topics)
        self.append, self.append_soon, self.flush = log.append, log.append_soon, log.flush
        self.read, self.begin, self.end = log.read, log.begin, log.end

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> Tail:
        if topic in self._topics:
            return self._feed.tail(self._log, topic, partition, offset, wake)
        return self._log.tail(topic, partition, offset, wake)


class Feed:
    """Distributor of the records that Faust consumed to the tails of their partitions."""

    def __init__(self) -> None:
        self._tails: dict[tuple[str, int], list[FedTail]] = {}
        self._assigned: frozenset[int] = frozenset()

    def assign(self, partitions: Collection[int]) -> None:
        """Note that Faust delivers exactly these control partitions from now on."""
        self._assigned = frozenset(partitions)
        for (_, partition), tails in self._tails.items():
            if partition not in self._assigned:
                for tail in tails:
                    tail.follow_log()
        self.hurry()  # Faust may begin behind records that no tail has

    def hurry(self) -> None:
        """Let all tails look at once for records that Faust has not delivered, for example during a rebalance."""
        for tails in self._tails.values():
            for tail in tails:
                tail.hurry()

    def is_assigned(self, partition: int) -> bool:
        return partition in self._assigned

    def tail(self, log: Log, topic: str, partition: int, offset: int, wake: Wake) -> FedTail:
        tail = FedTail(self, log, topic, partition, offset, wake)
        self._tails.setdefault((topic, partition), []).append(tail)
        return tail

    def push(self, record: Record) -> None:
        for tail in self._tails.get((record.topic, record.partition), ()):
            tail.push(record)

    def announce(self, topic: str, partition: int, offset: int) -> None:
        """Let the tails read from the log a record that Faust consumed but cannot deliver."""
        for tail in self._tails.get((topic, partition), ()):
            tail.announce(offset)

    def remove(self, place: tuple[str, int], tail: FedTail) -> None:
        tails = self._tails.get(place, [])
        if tail in tails:
            tails.remove(tail)
        if not tails:
            self._tails.pop(place, None)
