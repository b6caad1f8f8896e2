"""Logs made of other logs, for those who read one: nothing can be appended, and nothing more will come."""

from collections.abc import Iterable, Sequence

from forebay.transport.base import Draft, Log, LogError, Record, Tail, Wake
from forebay.transport.recording.manifest import Extent


class ReadOnlyLog:
    """What such logs have in common."""

    async def append(self, drafts: Sequence[Draft]) -> list[int]:
        """Raises LogError."""
        raise LogError("this log can only be read")

    def append_soon(self, drafts: Sequence[Draft]) -> None:
        """Raises LogError."""
        raise LogError("this log can only be read")

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> Tail:
        """Raises LogError."""
        raise LogError("this log does not grow")


class SliceLog(ReadOnlyLog):
    """A log as if it held these extents and nothing else: so that it may grow, and what is read stays the same."""

    def __init__(self, log: Log, extents: Iterable[Extent]) -> None:
        self._log = log
        self._extents = {(extent.topic, extent.partition): extent for extent in extents}

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        """As of the log, up to the extent's end. Raises LogError."""
        extent = self._extent(topic, partition)
        if offset < extent.first:
            raise LogError(f"{topic}/{partition}: the slice begins at offset {extent.first}, not {offset}")
        left = min(limit, extent.end - offset)
        return await self._log.read(topic, partition, offset, left) if left > 0 else []

    async def begin(self, topic: str, partition: int) -> int:
        """The extent's first offset."""
        return self._extent(topic, partition).first

    async def end(self, topic: str, partition: int) -> int:
        """The extent's end."""
        return self._extent(topic, partition).end

    def _extent(self, topic: str, partition: int) -> Extent:
        return self._extents.get((topic, partition)) or Extent(topic, partition, 0, 0)
