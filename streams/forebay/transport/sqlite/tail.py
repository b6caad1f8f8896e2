"""Follow a partition of a SQLite log, from memory at the end of the partition and from the file otherwise.

The buffer of a tail is bounded. A tail that lags never delays the writer or another tail.
"""

from collections import deque
from collections.abc import Callable

from forebay.transport.base import Record, Wake

# A reader takes records every few milliseconds. For a reader that lags by more than this, the file is equally fast.
TAIL_RECORDS_MAX = 10_000
TAIL_BYTES_MAX = 64 << 20


class Partition:
    """State of one partition. `next_offset` is the next to assign, `committed` the end of the committed records."""

    __slots__ = ("committed", "next_offset", "number", "tails", "topic")

    def __init__(self, topic: str, number: int, end: int) -> None:
        self.topic = topic
        self.number = number
        self.next_offset = end
        self.committed = end
        self.tails: list[SqliteTail] = []


Fetch = Callable[[Partition, int, int, int], list[Record]]


class SqliteTail:
    """Tail of one partition. A commit sets `wake` once for all its records, so call `take` until `len` is 0.

    `pushed` says whether the log passes each committed record to `push`. Otherwise the tail always reads the file.
    """

    def __init__(self, partition: Partition, offset: int, wake: Wake, fetch: Fetch, *, pushed: bool) -> None:
        self.wake = wake
        self._partition = partition
        self._position = offset
        self._fetch = fetch
        self._pushed = pushed
        self._buffer: deque[Record] = deque()
        self._buffered_bytes = 0
        self._live = pushed and offset >= partition.committed
        partition.tails.append(self)

    def __len__(self) -> int:
        if self._live:
            return len(self._buffer)
        return max(0, self._partition.committed - self._position)

    @property
    def position(self) -> int:
        return self._position

    def take(self, limit: int) -> list[Record]:
        """Return up to `limit` next records without waiting, fewer if they are large.

        Raises LogError at a damaged record. The position does not advance past it, so every later call raises too.
        """
        records = self._take_buffered(limit) if self._live else self._take_stored(limit)
        if records:
            self._position = records[-1].offset + 1
        return records

    def close(self) -> None:
        """Stop following and free the buffer. May be called twice."""
        if self in self._partition.tails:
            self._partition.tails.remove(self)
        self._buffer.clear()
        self._buffered_bytes = 0
        self._live = False

    def push(self, record: Record) -> bool:
        """Receive a committed record, and return whether this tail will return it."""
        if record.offset < self._position:
            return False
        if not self._live:
            return True
        self._buffered_bytes += len(record.value)
        if len(self._buffer) >= TAIL_RECORDS_MAX or self._buffered_bytes > TAIL_BYTES_MAX:
            self._buffer.clear()
            self._buffered_bytes = 0
            self._live = False
            return True
        self._buffer.append(record)
        return True

    def _take_buffered(self, limit: int) -> list[Record]:
        buffer = self._buffer
        if limit >= len(buffer):
            records = list(buffer)
            buffer.clear()
            self._buffered_bytes = 0
            return records
        records = [buffer.popleft() for _ in range(max(0, limit))]
        self._buffered_bytes -= sum(len(record.value) for record in records)
        return records

    def _take_stored(self, limit: int) -> list[Record]:
        records = self._fetch(self._partition, self._position, limit, TAIL_BYTES_MAX)
        position = self._position + len(records)
        # Commits run in this thread, so no record is missed between this read and the first pushed record.
        self._live = self._pushed and position >= self._partition.committed
        return records
