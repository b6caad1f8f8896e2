"""From Faust's streams to the tails that an owner reads: in order, without gaps, from any offset on.

Faust decides where its consumer begins: at the offsets committed to the group, which are a hint, or at what is the
end when its first fetch is sent. So a tail reads what lies before from the log itself, and takes over from Faust where
the two meet. What Faust passed over, or does not bring, shows in the end of the partition: a tail that stands still
looks there, and reads on by itself.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Collection, Sequence

from forebay.transport.base import Draft, Log, LogError, Record, Tail, Wake

logger = logging.getLogger(__name__)

PAGE_RECORDS = 500
BUFFER_RECORDS_MAX = 20_000  # a tail that is further behind reads the log instead
STILL_S = 0.5  # a tail that took nothing for this long looks at the end of its partition


class FedTail:
    """Follows one partition: from the log while it is behind, from Faust once it caught up."""

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
        self._fill()
        self._watching = asyncio.create_task(self._watch(), name=f"watch {topic}/{partition}")

    def __len__(self) -> int:
        return len(self._buffer) or (self._failure is not None)

    def take(self, limit: int) -> list[Record]:
        """Up to `limit` next records, at once. Raises LogError when what lies between cannot be read."""
        if self._failure is not None and not self._buffer:
            raise self._failure
        buffer = self._buffer
        taken = [buffer.popleft() for _ in range(min(limit, len(buffer)))]
        if not buffer and self.position < self._known_end:
            self._fill()
        return taken

    def close(self) -> None:
        """Stop following."""
        self._feed.leave(self._place, self)
        self._watching.cancel()
        if self._filling is not None:
            self._filling.cancel()

    def give(self, record: Record) -> None:
        """Faust has a record: taken at once when it is the next, read from the log later when it is not."""
        if record.offset == self.position and self._filling is None and len(self._buffer) < BUFFER_RECORDS_MAX:
            self._known_end = max(self._known_end, record.offset + 1)
            self._buffer.append(record)
            self.position += 1
            self._wake.set()
        else:
            self.announce(record.offset)

    def announce(self, offset: int) -> None:
        """The partition reaches to `offset`: read up to it from the log."""
        self._known_end = max(self._known_end, offset + 1)
        if self.position < self._known_end and len(self._buffer) < BUFFER_RECORDS_MAX:
            self._fill()

    def _fill(self) -> None:
        if self._filling is None and self._failure is None:
            self._filling = asyncio.create_task(self._read_up(), name=f"read up {self._place[0]}/{self._place[1]}")

    async def _watch(self) -> None:
        log, (topic, partition) = self._log, self._place
        before = -1
        while self._failure is None:
            await asyncio.sleep(STILL_S)
            if self.position != before or self._filling is not None:
                before = self.position
                continue
            try:
                end = await log.end(topic, partition)
            except LogError as error:
                logger.warning("%s/%d: %s", topic, partition, error)
                continue
            if end > self.position == before:
                logger.info("%s/%d is read from offset %d by itself: Faust brings nothing", topic, partition, before)
                self._fill()

    async def _read_up(self) -> None:
        log, (topic, partition) = self._log, self._place
        try:
            self._known_end = max(self._known_end, await log.end(topic, partition))
            while self.position < self._known_end and len(self._buffer) < BUFFER_RECORDS_MAX:
                records = await log.read(topic, partition, self.position, PAGE_RECORDS)
                if not records:
                    raise LogError(f"{topic}/{partition} ends at offset {self.position}, but more was seen of it")
                self._buffer.extend(records)
                self.position = records[-1].offset + 1
                self._wake.set()
        except LogError as error:
            self._failure = error
            self._wake.set()
        finally:
            self._filling = None


class FaustLog:
    """A log whose state topics come through Faust; everything else is the log's own."""

    def __init__(self, log: Log, feed: "Feed", topics: Collection[str]) -> None:
        self._log = log
        self._feed = feed
        self._topics = frozenset(topics)

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        """As the log behind."""
        return await self._log.append(drafts)

    def append_soon(self, drafts: Sequence[Draft]) -> None:
        """As the log behind."""
        self._log.append_soon(drafts)

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> Tail:
        """Follow a partition from `offset`: fed by Faust when the topic is its."""
        if topic in self._topics:
            return self._feed.tail(self._log, topic, partition, offset, wake)
        return self._log.tail(topic, partition, offset, wake)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """As the log behind."""
        return await self._log.read(topic, partition, offset, limit)

    async def begin(self, topic: str, partition: int) -> int:
        """As the log behind."""
        return await self._log.begin(topic, partition)

    async def end(self, topic: str, partition: int) -> int:
        """As the log behind."""
        return await self._log.end(topic, partition)


class Feed:
    """Hands what Faust consumed to the tails of its topics."""

    def __init__(self) -> None:
        self._tails: dict[tuple[str, int], list[FedTail]] = {}

    def tail(self, log: Log, topic: str, partition: int, offset: int, wake: Wake) -> FedTail:
        """Follow a partition of `log` from `offset` on."""
        tail = FedTail(self, log, topic, partition, offset, wake)
        self._tails.setdefault((topic, partition), []).append(tail)
        return tail

    def give(self, record: Record) -> None:
        """A record that Faust consumed."""
        for tail in self._tails.get((record.topic, record.partition), ()):
            tail.give(record)

    def announce(self, topic: str, partition: int, offset: int) -> None:
        """Faust consumed something at `offset` that it cannot deliver."""
        for tail in self._tails.get((topic, partition), ()):
            tail.announce(offset)

    def leave(self, place: tuple[str, int], tail: FedTail) -> None:
        """A tail is closed."""
        tails = self._tails.get(place, [])
        if tail in tails:
            tails.remove(tail)
        if not tails:
            self._tails.pop(place, None)
