"""Store, load and delete finished responses on the topic `answers`.

Theory of operation. Every ingress follows the index and remembers the offset of the newest index record per response,
or its deletion, in 16 bytes. Content is read only when a client wants it. The content is appended before its index
record, so every response in the index can be loaded. Two ingresses may store the same response at the same time. Both
copies are complete and equal, and the newer index record counts.

A deletion is an index record of its own, which stays for as long as an answer would. So an ingress that starts later
does not serve the response from the topics `requests` and `tokens` either. No later record makes a deleted response
readable, because an ingress may store a response that it does not know to be deleted.
"""

import asyncio
import zlib
from array import array
from bisect import bisect_left
from collections import defaultdict

import msgspec

from forebay import runtime
from forebay.events.answers import (
    RETENTION_S,
    AnswerChunk,
    AnswerContent,
    AnswerDeleted,
    AnswerStored,
    IndexEvent,
    chunk_key,
)
from forebay.events.codec import MALFORMED, DecodeError, decode, encode
from forebay.events.models import CHUNK_BYTES_MAX
from forebay.events.request_ids import RequestLocation
from forebay.events.topics import ANSWERS
from forebay.transport.base import Draft, Log, LogError, Record, event_at, events_of
from forebay.transport.follower import Follower

INDEX, CONTENT = 0, 1  # partitions of the topic
KNOWN_MAX = 1 << 20  # responses remembered per group, 16 MB
DELETED = (1 << 64) - 1  # in place of the offset of an index record
FORGOTTEN = KNOWN_MAX >> 5  # responses that are forgotten together, because a removal moves all others
CONTENT_BYTES_MAX = 64 << 20  # of one response; a token with 20 log probabilities takes about 800 bytes
LEVEL = 6


class AnswerTooLarge(ValueError):
    """A response is too large to be kept."""


class AnswerDamaged(LogError):
    """The stored content of a response is incomplete or cannot be decoded."""


class AnswerForgotten(LogError):
    """So many later responses are kept that it is not known whether this one was deleted."""


class KnownAnswers:
    """Newest index records of the responses of one partition of `requests`, ordered by the offset of their requests.

    Responses end nearly in the order of their requests, so an insertion moves few others.
    """

    __slots__ = ("_first", "_records", "_requests")

    def __init__(self) -> None:
        self._requests = array("Q")
        self._records = array("Q")
        self._first = 0  # requests with lower offsets were forgotten

    def set(self, request: int, record: int) -> None:
        """Set the newest index record of a response: its offset, or `DELETED`, which no later record changes.

        Beyond `KNOWN_MAX` responses, forget the oldest ones.
        """
        requests, records = self._requests, self._records
        at = bisect_left(requests, request)
        if at == len(requests) or requests[at] != request:
            requests.insert(at, request)
            records.insert(at, 0)
        if records[at] != DELETED:
            records[at] = record
        if len(requests) > KNOWN_MAX:
            self._first = max(self._first, requests[FORGOTTEN - 1] + 1)
            del requests[:FORGOTTEN], records[:FORGOTTEN]

    def get(self, request: int) -> int | None:
        """Return the newest index record of a response, None if there is none. Raises AnswerForgotten."""
        if request < self._first:
            raise AnswerForgotten(f"{KNOWN_MAX:,} later answers are kept")
        at = bisect_left(self._requests, request)
        return self._records[at] if at < len(self._requests) and self._requests[at] == request else None


class AnswerStore(Follower):
    """The answers on the topic, by the location of their first request. The other methods wait for `run`."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, ANSWERS)
        self._known: defaultdict[int, KnownAnswers] = defaultdict(KnownAnswers)
        self._end = 0  # of the index when this process began to follow it
        self._began = asyncio.Event()

    async def run(self) -> None:
        """Follow the index until cancelled. Raises LogError."""
        begin = await self._log.begin(ANSWERS.name, INDEX)
        self._end = await self._log.end(ANSWERS.name, INDEX)
        self._began.set()
        await self.follow_from(INDEX, begin)

    async def load(self, request_id: str, location: RequestLocation) -> AnswerContent | AnswerDeleted | None:
        """Return the content of a response, its deletion, or None if the topic does not have it.

        Raises AnswerForgotten, AnswerDamaged or LogError.
        """
        stored = await self._indexed(request_id, location)
        if not isinstance(stored, AnswerStored):
            return stored
        packed = b"".join([await self._piece(stored, index) for index in range(len(stored.offsets))])
        return await runtime.offload(_unpacked, packed, stored)

    async def store(self, request_id: str, location: RequestLocation, content: AnswerContent) -> None:
        """Store a response unless it is stored or deleted already. Raises AnswerTooLarge or LogError."""
        if await self._indexed(request_id, location) is not None:
            return
        packed, size = await runtime.offload(_packed, content)
        upload, offsets = runtime.random_id(), []
        for index, at in enumerate(range(0, len(packed), CHUNK_BYTES_MAX)):
            chunk = AnswerChunk(upload=upload, index=index, data=packed[at : at + CHUNK_BYTES_MAX])
            offsets += await self._log.append([Draft(ANSWERS.name, CONTENT, encode(ANSWERS, chunk), chunk.key)])
        now_us = runtime.wall_us()
        event = AnswerStored(
            request_id=request_id,
            partition=location.partition,
            offset=location.offset,
            at_us=now_us,
            upload=upload,
            offsets=tuple(offsets),
            size=size,
            expires_us=now_us + RETENTION_S * 1_000_000,
            tenant=content.submission.tenant,
        )
        await self._append(event)
        if isinstance(await self._indexed(request_id, location), AnswerDeleted):  # since the upload began
            await self._delete(request_id, location, event)

    async def delete(self, request_id: str, location: RequestLocation) -> None:
        """Delete a response, whether it is stored or not. Raises LogError."""
        await self._delete(request_id, location, await self._indexed(request_id, location))

    async def forget(self, tenant: str) -> int:
        """Delete the kept responses of a tenant, and return their number. It does not need `run`. Raises LogError."""
        end = await self._log.end(ANSWERS.name, INDEX)
        found: defaultdict[RequestLocation, list[AnswerStored]] = defaultdict(list)  # several ingresses may store one
        async for _, event in events_of(self._log, ANSWERS, INDEX):
            if isinstance(event, AnswerDeleted):
                found.pop(RequestLocation(event.partition, event.offset), None)
            elif isinstance(event, AnswerStored) and event.tenant == tenant:
                found[RequestLocation(event.partition, event.offset)].append(event)
        self.begin(INDEX, end)
        for place, stored in found.items():
            for event in stored:
                await self._delete(event.request_id, place, event)
        return len(found)

    async def _delete(
        self, request_id: str, location: RequestLocation, stored: AnswerStored | AnswerDeleted | None
    ) -> None:
        """Append a deletion as the newest index record, because compaction removes the earlier ones."""
        event = AnswerDeleted(
            request_id=request_id, partition=location.partition, offset=location.offset, at_us=runtime.wall_us()
        )
        await self._append(event)
        if isinstance(stored, AnswerStored):
            keys = [chunk_key(stored.upload, index) for index in range(len(stored.offsets))]
            await self._log.append([Draft(ANSWERS.name, CONTENT, b"", key) for key in keys])

    async def _append(self, event: AnswerStored | AnswerDeleted) -> None:
        (offset,) = await self._log.append([Draft(ANSWERS.name, INDEX, encode(ANSWERS, event), event.key)])
        await self.reach(offset + 1)

    async def _indexed(self, request_id: str, location: RequestLocation) -> AnswerStored | AnswerDeleted | None:
        """Return the index record of a response, None without a valid one."""
        await self._began.wait()
        await self.reach(self._end)  # a deletion that was written before this process began has been read
        known = self._known.get(location.partition)
        offset = None if known is None else known.get(location.offset)
        if offset == DELETED:
            return AnswerDeleted(request_id=request_id, partition=location.partition, offset=location.offset)
        event = None if offset is None else await event_at(self._log, ANSWERS, INDEX, offset)
        if not isinstance(event, AnswerStored) or event.request_id != request_id:
            return None
        return event if event.expires_us > runtime.wall_us() else None

    async def _piece(self, stored: AnswerStored, index: int) -> bytes:
        chunk = await event_at(self._log, ANSWERS, CONTENT, stored.offsets[index])
        if not isinstance(chunk, AnswerChunk) or (chunk.upload, chunk.index) != (stored.upload, index):
            raise AnswerDamaged(f"the topic {ANSWERS.name} has no piece {index} of the answer to {stored.request_id}")
        return chunk.data

    def apply(self, record: Record) -> None:
        event = decode(ANSWERS, record.value)
        if not isinstance(event, IndexEvent) or record.key != event.key:
            raise DecodeError(f"an event {type(event).__name__} with the key {record.key!r}")
        newest = DELETED if isinstance(event, AnswerDeleted) else record.offset
        self._known[event.partition].set(event.offset, newest)


def _packed(content: AnswerContent) -> tuple[bytes, int]:
    """Return the compressed content, and its size before compression."""
    plain = msgspec.msgpack.encode(content)
    if len(plain) > CONTENT_BYTES_MAX:
        text = f"the answer has {len(plain):,} bytes with log probabilities; at most {CONTENT_BYTES_MAX:,} are kept"
        raise AnswerTooLarge(text)
    return zlib.compress(plain, LEVEL), len(plain)


def _unpacked(packed: bytes, stored: AnswerStored) -> AnswerContent:
    try:
        if stored.size > CONTENT_BYTES_MAX:
            raise ValueError(f"it has {stored.size:,} bytes, at most {CONTENT_BYTES_MAX:,} are allowed")
        plain = zlib.decompressobj().decompress(packed, stored.size + 1)
        return msgspec.msgpack.decode(plain, type=AnswerContent)
    except (ValueError, zlib.error, *MALFORMED) as error:
        raise AnswerDamaged(f"the stored answer to {stored.request_id} cannot be read: {error}") from error
