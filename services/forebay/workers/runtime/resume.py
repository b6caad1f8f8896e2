"""Read the output of earlier attempts from the reply slot, so that a later attempt can continue the response.

Theory of operation. A later attempt begins with the record `AttemptStarted` in the reply slot. Output of earlier
attempts before that record stays valid, and readers ignore their output after it. When a worker is lost, many of its
requests move at the same time, and their responses are in few reply slots. So all requests that wait for one of these
slots share one read of it, and the cost of that read does not grow with the number of requests.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from functools import partial

import msgspec

from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import pack_u32
from forebay.events.codec import DecodeError, decode
from forebay.events.tokens import TokenEvent
from forebay.events.topics import TOKENS
from forebay.events.work import WorkItem
from forebay.transport.base import Log, LogError, Record
from forebay.transport.patience import until_available
from forebay.workers.runtime.outbox import Outbox
from forebay.workers.runtime.request_table import WorkRequest

logger = logging.getLogger(__name__)

PAGE_RECORDS = 512  # each page costs a round trip to a broker, or a few milliseconds on the embedded log
SLICE_BYTES = 256 << 10  # a few milliseconds of decoding before other tasks may run

Spawn = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
OnFound = Callable[["LaterAttempt", ResponseState], None]


@dataclass(frozen=True, slots=True)
class LaterAttempt:
    """A second or later attempt at a request, which waits until the output of the earlier attempts is read."""

    item: WorkItem
    request: WorkRequest


@dataclass(slots=True)
class ReplySlotReading:
    passes: int = 0
    undecodable: int = 0


class Resumer:
    """Starts the later attempts of one worker epoch, and passes the output of the earlier ones to `found`."""

    def __init__(
        self, log: Log, group: str, outbox: Outbox, reading: ReplySlotReading, spawn: Spawn, found: OnFound
    ) -> None:
        self._log = log
        self._group = group
        self._outbox = outbox
        self._reading = reading
        self._spawn = spawn
        self._found = found
        self._waiting: dict[int, list[LaterAttempt]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, later: LaterAttempt) -> None:
        """Start an attempt with the next read of its reply slot. If the log fails, the spawned task raises LogError."""
        reply_slot = later.item.reply_slot
        if reply_slot in self._waiting:
            self._waiting[reply_slot].append(later)
            return
        self._waiting[reply_slot] = [later]
        task = self._spawn(self._serve(reply_slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Cancel all reads, so that `found` is not called any more."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, reply_slot: int) -> None:
        while waiting := self._waiting[reply_slot]:
            self._waiting[reply_slot] = []
            offsets = await self._log.append([self._outbox.attempt_started(later.request) for later in waiting])
            replies = await until_available(partial(self._read, reply_slot, waiting, offsets[-1] + 1))
            for later in waiting:
                self._found(later, replies[later.item.request_id])
        del self._waiting[reply_slot]

    async def _read(self, reply_slot: int, attempts: list[LaterAttempt], end: int) -> dict[str, ResponseState]:
        """Return the responses as of the offset `end`, by request id."""
        # Records before `reply_from` belong to an earlier request with the same id.
        coming = sorted((later.item.reply_from, later.item.request_id) for later in attempts)
        coming.reverse()
        replies = {later.item.request_id: ResponseState(later.item.reply_key) for later in attempts}
        begun: dict[str, ResponseState] = {}
        begin = await self._log.begin(TOKENS.name, reply_slot)
        for later in attempts:
            # Retention may have deleted the start of the response: treat it as a gap.
            replies[later.item.request_id].gap = later.item.reply_from < begin
        position = max(begin, coming[-1][0])
        self._reading.passes += 1
        while position < end:
            page = await self._log.read(TOKENS.name, reply_slot, position, min(PAGE_RECORDS, end - position))
            if not page:
                raise LogError(
                    f"partition {reply_slot} of tokens ends at offset {position}, but a record at {end - 1} was"
                    " acknowledged: the log lost records; check the broker or the file"
                )
            held_bytes = 0
            for record in page:
                while coming and coming[-1][0] <= record.offset:
                    _, request_id = coming.pop()
                    begun[request_id] = replies[request_id]
                self._apply(begun, record)
                held_bytes += len(record.value)
                if held_bytes >= SLICE_BYTES:
                    held_bytes = 0
                    await asyncio.sleep(0)
            position = page[-1].offset + 1
            await asyncio.sleep(0)
        return replies

    def _apply(self, replies: dict[str, ResponseState], record: Record) -> None:
        try:
            event: TokenEvent = decode(TOKENS, record.value)
        except DecodeError as error:
            # All other readers skip the record, too, so they agree on the response.
            self._reading.undecodable += 1
            logger.warning("record %s of reply slot %s does not decode: %s", record.offset, record.partition, error)
            return
        apply(replies, event, self._group)


def continued(item: WorkItem, output: list[int], block_size: int) -> WorkItem:
    """Return a work item that continues a response after the given output of earlier attempts.

    `output` is appended to its `token_ids`, counted in its `output_tokens` and subtracted from its `max_tokens`.
    """
    sampling = item.sampling
    assert len(output) < sampling.max_tokens
    token_ids = item.token_ids + pack_u32(output)
    salt, media = hash_seed(item.lora_name, item.cache_namespace), mm_hashes(item.media, block_size)
    return msgspec.structs.replace(
        item,
        token_ids=token_ids,
        sequence_hashes=sequence_hashes(token_ids, block_size, salt, media),
        output_tokens=item.output_tokens + len(output),
        sampling=msgspec.structs.replace(
            sampling, max_tokens=sampling.max_tokens - len(output), min_tokens=max(0, sampling.min_tokens - len(output))
        ),
    )
