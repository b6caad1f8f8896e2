"""A shadow's events on the topic `shadow`, which says where it is: its newest event there is where it goes on.

One process runs a shadow of a name; a newer one says so on the topic, and the older one ends when it sees that.
"""

from collections.abc import Sequence

from forebay.events.codec import DecodeError, decode, encode
from forebay.events.shadow import ShadowEvent, ShadowStarted
from forebay.events.topics import SHADOW
from forebay.transport.base import Draft, Log, LogError, Record

PAGE_RECORDS = 512


class TopicSink:
    """Appends a shadow's events to its group's partition, under the key `name`."""

    def __init__(self, log: Log, partition: int, name: str) -> None:
        self._log = log
        self._partition = partition
        self._name = name
        self._end: int | None = None  # behind our last append

    async def last(self) -> ShadowEvent | None:
        """The newest event of this shadow, searched backwards as far as the topic is kept. Raises LogError."""
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
        """Append. Raises LogError, also when another process runs this shadow now."""
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
            raise LogError(f"another process runs the shadow {self._name} now: this one ends")

    async def _between(self, start: int, end: int) -> list[Record]:
        found: list[Record] = []
        while start < end:
            records = await self._log.read(SHADOW.name, self._partition, start, min(PAGE_RECORDS, end - start))
            if not records:
                raise LogError(f"{SHADOW.name}/{self._partition} ends at offset {start}, before {end}")
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
                    continue  # nobody acts on this topic, and anybody may write there
                found.append(event)
        return found
