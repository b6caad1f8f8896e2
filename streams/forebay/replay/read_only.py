"""Read-only views of a log: nothing can be appended, and the content does not grow."""

from collections.abc import Iterable, Sequence

from forebay.transport.base import Draft, Log, LogError, Record, Tail, Wake
from forebay.transport.sqlite.recording import Extent


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
