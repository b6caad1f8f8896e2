"""Later attempts: what was said is read back from the reply slot, so that the answer goes on from there.

Theory of operation. A later attempt begins with `AttemptStarted`, which voids what earlier ones say after it: what
stands on the slot up to that record stays as it is. The requests of a lost worker move together and share few slots,
so all that wait for a slot share one pass over it: its cost does not grow with their number.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass

import msgspec

from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.base import pack_u32
from forebay.events.codec import DecodeError, decode
from forebay.events.tokens import TokenEvent
from forebay.events.topics import TOKENS
from forebay.events.work import WorkItem
from forebay.transport.base import Log, LogError, Record
from forebay.workers.runtime.outbox import Active, Outbox

logger = logging.getLogger(__name__)

PAGE_RECORDS = 512  # each page is a round trip to a broker, and some milliseconds for the embedded log
SLICE_BYTES = 256 << 10  # some milliseconds of decoding between two chances for others to run

Spawn = Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
OnFound = Callable[["Later", ResponseState], None]


@dataclass(frozen=True, slots=True)
class Later:
    """A later attempt that was ordered and does not run yet."""

    item: WorkItem
    active: Active


@dataclass(slots=True)
class SlotReading:
    """What it took to find where answers go on."""

    passes: int = 0
    bytes_read: int = 0
    undecodable: int = 0


class Resumer:
    """Announces later attempts of one epoch and finds what was said before them; `found` is told of each."""

    def __init__(
        self, log: Log, group: str, outbox: Outbox, reading: SlotReading, spawn: Spawn, found: OnFound
    ) -> None:
        self._log = log
        self._group = group
        self._outbox = outbox
        self._reading = reading
        self._spawn = spawn
        self._found = found
        self._waiting: dict[int, list[Later]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def add(self, later: Later) -> None:
        """Look it up with the next pass over its slot. A log that fails ends the task that was spawned."""
        slot = later.item.reply_slot
        if slot in self._waiting:
            self._waiting[slot].append(later)
            return
        self._waiting[slot] = [later]
        task = self._spawn(self._serve(slot))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop: nothing is found any more."""
        for task in self._tasks:
            task.cancel()

    async def _serve(self, slot: int) -> None:
        while waiting := self._waiting[slot]:
            self._waiting[slot] = []
            replies = await self._read(slot, waiting)
            for later in waiting:
                self._found(later, replies[later.item.request_id])
        del self._waiting[slot]

    async def _read(self, slot: int, asked: list[Later]) -> dict[str, ResponseState]:
        """The answers as they stand once the attempts began, by request id."""
        offsets = await self._log.append([self._outbox.attempt_started(later.active) for later in asked])
        # Only from its own start on is a request's: the same id may have been used before.
        coming = sorted((later.item.reply_from, later.item.request_id) for later in asked)
        coming.reverse()
        replies = {later.item.request_id: ResponseState() for later in asked}
        begun: dict[str, ResponseState] = {}
        begin, end = await self._log.begin(TOKENS.name, slot), offsets[-1] + 1
        for later in asked:
            # Retention took what may have been the start of its answer: that is a gap like any other.
            replies[later.item.request_id].gap = later.item.reply_from < begin
        position = max(begin, coming[-1][0])
        self._reading.passes += 1
        while position < end:
            page = await self._log.read(TOKENS.name, slot, position, min(PAGE_RECORDS, end - position))
            if not page:
                raise LogError(f"reply slot {slot} ends at {position}, but a record was acknowledged at {end - 1}")
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
        self._reading.bytes_read += len(record.value)
        try:
            event: TokenEvent = decode(TOKENS, record.value)
        except DecodeError as error:
            # Its readers pass it over too, so the answer is the same for all.
            self._reading.undecodable += 1
            logger.warning("record %s of reply slot %s does not decode: %s", record.offset, record.partition, error)
            return
        apply(replies, event, self._group)


def continued(item: WorkItem, said: list[int], block_size: int) -> WorkItem:
    """The item whose answer is the rest of `item`'s, of which `said` is known; fewer than it asks for."""
    sampling = item.sampling
    assert len(said) < sampling.max_tokens
    token_ids = item.token_ids + pack_u32(said)
    salt, media = hash_seed(item.lora_name, item.cache_namespace), mm_hashes(item.media, block_size)
    return msgspec.structs.replace(
        item,
        token_ids=token_ids,
        sequence_hashes=sequence_hashes(token_ids, block_size, salt, media),
        sampling=msgspec.structs.replace(
            sampling,
            max_tokens=sampling.max_tokens - len(said),
            min_tokens=max(0, sampling.min_tokens - len(said)),
        ),
    )
