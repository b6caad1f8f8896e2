"""Look up the control partition of a group, by following the topic `groups`.

Each record of this topic is a placement: it assigns a control partition to a group.
"""

import asyncio
import logging
from collections.abc import Callable

from forebay.core.state.groups import Groups
from forebay.events.codec import DecodeError, decode
from forebay.events.topics import GROUPS
from forebay.transport.base import Log, Record, Tail

logger = logging.getLogger(__name__)

PARTITION = 0  # of the topic `groups`: there is one directory
READ_MAX = 256


def apply_placement(groups: Groups, record: Record) -> None:
    """Apply a record of the topic `groups`. Raises DecodeError if it is neither a placement nor a removal."""
    if record.value:
        groups.apply(decode(GROUPS, record.value))
    else:
        groups.remove((record.key or b"").decode(errors="replace"))


class Directory:
    """Control partitions of all groups. Each lookup first reads new records; `run` reads them continuously."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._wake = asyncio.Event()
        self._tail: Tail | None = None
        self._position = 0
        self.on_change: Callable[[], None] | None = None
        self.groups = Groups()
        self.undecodable = 0

    async def start(self) -> None:
        """Read all existing placements. Raises LogError."""
        self._tail = self._log.tail(GROUPS.name, PARTITION, 0, self._wake)
        await self.reach(await self._log.end(GROUPS.name, PARTITION))

    async def run(self) -> None:
        """Follow the topic until cancelled. Raises LogError."""
        await self._until(lambda: False)

    def close(self) -> None:
        if self._tail is not None:
            self._tail.close()

    def partition_of(self, group: str) -> int | None:
        """Return the current control partition of a group. Raises LogError."""
        self._read()
        return self.groups.partitions.get(group)

    def group_in(self, partition: int) -> str | None:
        """Return the group to which a control partition is assigned. Raises LogError."""
        self._read()
        return self.groups.group_in(partition)

    async def placed(self, group: str) -> int:
        """Wait until a group has a control partition, and return the partition. Raises LogError."""
        await self._until(lambda: group in self.groups.partitions)
        return self.groups.partitions[group]

    async def reach(self, offset: int) -> None:
        """Wait until every record of `groups` before `offset` has been read. Raises LogError."""
        await self._until(lambda: self._position >= offset)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._wake.clear()
            self._read()
            if condition():
                return
            await self._wake.wait()

    def _read(self) -> None:
        assert self._tail is not None, "the directory was not started"
        while records := self._tail.take(READ_MAX):
            for record in records:
                self._apply(record)
            self._position = records[-1].offset + 1
            if self.on_change is not None:
                self.on_change()

    def _apply(self, record: Record) -> None:
        try:
            apply_placement(self.groups, record)
        except DecodeError as error:
            self.undecodable += 1
            logger.warning("ignored record %d of %s, which is not a placement: %s", record.offset, GROUPS.name, error)
