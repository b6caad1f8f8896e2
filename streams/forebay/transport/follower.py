"""Follow one partition of a topic, and keep what its records say."""

import asyncio
import logging
from collections.abc import Callable

from forebay.events.codec import DecodeError
from forebay.events.topics import Topic
from forebay.transport.base import FOLLOWED_RECORDS, Log, Record, Tail

logger = logging.getLogger(__name__)


class Follower:
    """Base class of the readers of a partition. Several tasks may wait for its records, and each of them reads.

    Attributes:
        position: offset of the first record that was not read yet.
        undecodable: number of records that were ignored.
    """

    def __init__(self, log: Log, topic: Topic) -> None:
        self.position = 0
        self.undecodable = 0
        self._log = log
        self._topic = topic
        self._wake = asyncio.Event()
        self._tail: Tail | None = None

    def apply(self, record: Record) -> None:
        """Apply a record. Raises DecodeError if the record is ignored."""
        raise NotImplementedError

    def begin(self, partition: int, offset: int) -> None:
        """Begin to read a partition at `offset`. Tasks may wait for its records before."""
        self._tail = self._log.tail(self._topic.name, partition, offset, self._wake)
        self.position = offset
        self._wake.set()

    async def read_all(self, partition: int) -> None:
        """Read every record that a partition has now. Raises LogError."""
        end = await self._log.end(self._topic.name, partition)
        if self._tail is None:
            self.begin(partition, await self._log.begin(self._topic.name, partition))
        await self.reach(end)

    async def follow_from(self, partition: int, offset: int) -> None:
        """Follow a partition from `offset` until cancelled. Raises LogError."""
        self.begin(partition, offset)
        try:
            await self.wait_until(lambda: False)
        finally:
            self.close()

    async def run(self) -> None:
        """Read records until cancelled. Raises LogError."""
        await self.wait_until(lambda: False)

    async def reach(self, offset: int) -> None:
        """Wait until every record before `offset` has been read. Raises LogError."""
        await self.wait_until(lambda: self.position >= offset)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Read records until a condition is true of what they say. Raises LogError."""
        while not condition():
            self._wake.clear()
            if self._read():
                await asyncio.sleep(0)  # other tasks run in between
            else:
                await self._wake.wait()

    def read_ready(self) -> None:
        """Read the records that are ready. Raises LogError."""
        while self._read():
            pass

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()
            self._tail = None

    def _read(self) -> bool:
        records = [] if self._tail is None else self._tail.take(FOLLOWED_RECORDS)
        for record in records:
            try:
                self.apply(record)
            except DecodeError as error:
                self.undecodable += 1
                logger.warning("ignored record %d of %s: %s", record.offset, self._topic.name, error)
            self.position = record.offset + 1
        return bool(records)
