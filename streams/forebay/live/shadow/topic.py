"""Write a shadow's events to the topic `shadow`, and find the newest event, after which the shadow continues.

At most one process runs a shadow of a given name. A newer process writes `ShadowStarted`, and the older process ends
when it reads that event.
"""

from collections.abc import Sequence

from forebay.events.codec import DecodeError, decode, encode
from forebay.events.shadow import ShadowEvent, ShadowStarted
from forebay.events.topics import SHADOW
from forebay.transport.base import Draft, Log, LogError, Record

PAGE_RECORDS = 512


class TopicSink:
    """Sink that appends the events of the shadow `name` to its group's partition, with its name as the record key."""

    def __init__(self, log: Log, partition: int, name: str) -> None:
        self._log = log
        self._partition = partition
        self._name = name
        self._end: int | None = None  # offset after the last append of this process

    async def last(self) -> ShadowEvent | None:
        """Return the newest event of this shadow that the topic still holds. Raises LogError."""
        begin = await self._log.begin(SHADOW.name, self._partition)
        end = await self._log.end(SHADOW.name, self._partition)
        while end > begin:
            start = max(begin, end - PAGE_RECORDS)
            ours = self._ours(await self._between(start, end))
            if ours:
                return ours[-1]
            end = start
        return None

    async def write(self, events: Sequence[ShadowEvent]) -> None:
        """Append the events. Raises LogError if this fails, or if another process has started the same shadow."""
        key = self._name.encode()
        drafts = [Draft(SHADOW.name, self._partition, encode(SHADOW, event), key) for event in events]
        offsets = await self._log.append(drafts)
        before = offsets[0] if self._end is None else self._end
        self._end = offsets[-1] + 1
        if self._end - before == len(offsets):
            return
        own = set(offsets)
        others = [record for record in await self._between(before, self._end) if record.offset not in own]
        if any(isinstance(event, ShadowStarted) for event in self._ours(others)):
            raise LogError(
                f"another process started the shadow {self._name}, so this process ends; choose another --id to"
                " run both"
            )

    async def _between(self, start: int, end: int) -> list[Record]:
        found: list[Record] = []
        while start < end:
            records = await self._log.read(SHADOW.name, self._partition, start, min(PAGE_RECORDS, end - start))
            if not records:
                raise LogError(f"{SHADOW.name}/{self._partition} ends at offset {start}, expected records up to {end}")
            found += records
            start = records[-1].offset + 1
        return found

    def _ours(self, records: Sequence[Record]) -> list[ShadowEvent]:
        key = self._name.encode()
        found: list[ShadowEvent] = []
        for record in records:
            if record.key == key:
                try:
                    event: ShadowEvent = decode(SHADOW, record.value)
                except DecodeError:
                    continue  # no decision depends on this topic, and any producer may write to it
                found.append(event)
        return found
