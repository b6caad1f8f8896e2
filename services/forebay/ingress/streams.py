"""The reply slot, read: one reader follows it and hands each request its tokens and its end.

What a request buffers needs no bound of its own: an engine never gives it more than its max_tokens.
"""

import asyncio
import logging
from collections.abc import Callable

from forebay.events.base import unpack_u32
from forebay.events.codec import DecodeError, decode
from forebay.events.tokens import AttemptStarted, ResponseEnded, TokenChunk, TokenEvent, TokensEmitted
from forebay.events.topics import TOKENS
from forebay.transport.base import Log, LogError

logger = logging.getLogger(__name__)

READ_MAX = 256  # records between two chances for others to run
TOKENS_MISSING = "tokens are missing"


class Stream:
    """What has come for one request and was not taken yet. One reader."""

    __slots__ = ("_valid_from", "_waiter", "attempt", "broken", "ended", "next_index", "rank", "tokens", "worker_id")

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.next_index = 0
        self.attempt = 0
        self.worker_id = ""
        self.rank = 0
        self.ended: ResponseEnded | None = None
        self.broken: str | None = None
        self._valid_from = (0, -1)
        self._waiter: asyncio.Future[None] | None = None

    def start(self, attempt: int, owner_epoch: int) -> None:
        """A later attempt, or one under a later owner, begins: what is lower is void from here on."""
        self._valid_from = max(self._valid_from, (attempt, owner_epoch))
        self.attempt = self._valid_from[0]

    def push(self, event: TokensEmitted, chunk: TokenChunk) -> None:
        """Take in new tokens; a later attempt says what is known already again."""
        if self._is_void(chunk.attempt, event.owner_epoch):
            return
        if chunk.attempt > self.attempt:
            self.start(chunk.attempt, -1)
        token_ids = unpack_u32(chunk.token_ids)
        known = self.next_index - chunk.first_index
        if known < 0:
            self.interrupt(TOKENS_MISSING)
            return
        if self.broken == TOKENS_MISSING or known >= len(token_ids):
            return
        self.worker_id, self.rank = event.worker_id, event.rank
        self.tokens += token_ids[known:] if known else token_ids
        self.next_index += len(token_ids) - known
        self._notify()

    def end(self, event: ResponseEnded) -> None:
        """Nothing more comes, of this attempt or a later one."""
        if self._is_void(event.attempt, event.owner_epoch) or self.broken == TOKENS_MISSING:
            return
        self.ended = event
        self._notify()

    def interrupt(self, reason: str) -> None:
        """Nobody waits for more: the client left, the time is over, or the log is gone."""
        self.broken = self.broken or reason
        self._notify()

    def take(self) -> list[int]:
        """The tokens since the last time."""
        taken, self.tokens = self.tokens, []
        return taken

    async def ready(self) -> None:
        """Wait for tokens, the end, or an interruption."""
        if self.tokens or self.ended is not None or self.broken is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _is_void(self, attempt: int, owner_epoch: int) -> bool:
        return (attempt, owner_epoch) < self._valid_from

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ReplyReader:
    """Follows one reply slot from `offset` on."""

    def __init__(self, log: Log, reply_slot: int, offset: int, on_undecodable: Callable[[], None]) -> None:
        self._wake = asyncio.Event()
        self._tail = log.tail(TOKENS.name, reply_slot, offset, self._wake)
        self._streams: dict[str, Stream] = {}
        self._on_undecodable = on_undecodable

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, request_id: str) -> Stream:
        """Listen for a request; its id must not be listened for."""
        assert request_id not in self._streams
        stream = self._streams[request_id] = Stream()
        return stream

    def close(self, request_id: str) -> None:
        """Stop listening for a request."""
        self._streams.pop(request_id, None)

    async def run(self) -> None:
        """Dispatch until cancelled; when the log fails every waiting request is told."""
        try:
            while True:
                self._wake.clear()
                records = self._tail.take(READ_MAX)
                for record in records:
                    self._dispatch(record.value)
                if records:
                    await asyncio.sleep(0)
                else:
                    await self._wake.wait()
        except LogError as error:
            for stream in self._streams.values():
                stream.interrupt(str(error))
            raise
        finally:
            self._tail.close()

    def interrupt_all(self, reason: str) -> None:
        """Tell every waiting request that nothing more comes."""
        for stream in self._streams.values():
            stream.interrupt(reason)

    def _dispatch(self, value: bytes) -> None:
        try:
            event: TokenEvent = decode(TOKENS, value)
        except DecodeError as error:
            self._on_undecodable()
            logger.warning("a record of the reply slot does not decode: %s", error)
            return
        match event:
            case TokensEmitted():
                for chunk in event.chunks:
                    stream = self._streams.get(chunk.request_id)
                    if stream is not None:
                        stream.push(event, chunk)
            case ResponseEnded():
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    stream.end(event)
            case AttemptStarted():
                stream = self._streams.get(event.request_id)
                if stream is not None:
                    stream.start(event.attempt, event.owner_epoch)
