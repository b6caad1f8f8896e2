"""The reply slot, read: one reader follows it and hands each request its tokens and its end.

What a request buffers needs no bound of its own: an engine never gives it more than its max_tokens.
"""

import asyncio
import logging
from collections.abc import Callable

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.codec import DecodeError, decode
from forebay.events.tokens import CommandResponse, RouteResponse, TokenEvent, TokenLogprob
from forebay.events.topics import TOKENS
from forebay.ingress.errors import RETRY_STATUSES, ApiError
from forebay.ingress.http.drain import SHUTTING_DOWN
from forebay.transport.base import Log, LogError

logger = logging.getLogger(__name__)

READ_MAX = 256  # records between two chances for others to run
TOKENS_MISSING = "tokens are missing"


class Stream(ResponseState):
    """What has come for one request and was not taken yet. One reader."""

    __slots__ = ("_waiter", "broken")

    def __init__(self) -> None:
        super().__init__()
        self.broken: str | None = None
        self._waiter: asyncio.Future[None] | None = None

    def interrupt(self, reason: str) -> None:
        """Nobody waits for more: the client left, the time is over, or the log is gone."""
        self.broken = self.broken or reason
        self.notify()

    def take(self) -> tuple[list[int], list[TokenLogprob]]:
        """The tokens since the last time, and what was told of their probabilities."""
        taken = self.tokens, self.logprobs
        self.tokens, self.logprobs = [], []
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

    def notify(self) -> None:
        """Wake the reader: the answer changed."""
        if self.gap:
            self.broken = self.broken or TOKENS_MISSING
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ReplyReader:
    """Follows one reply slot from `offset` on, and takes what is from `group`: other groups share the slot.

    Attributes:
        position: the offset of the first record that was not dispatched yet.
    """

    def __init__(self, log: Log, group: str, reply_slot: int, offset: int, on_undecodable: Callable[[], None]) -> None:
        self.position = offset
        self._group = group
        self._wake = asyncio.Event()
        self._tail = log.tail(TOKENS.name, reply_slot, offset, self._wake)
        self._streams: dict[str, Stream] = {}
        self._queries: dict[str, asyncio.Future[RouteResponse | str]] = {}
        self._commands: dict[str, asyncio.Future[CommandResponse | str]] = {}
        self._on_undecodable = on_undecodable

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams or request_id in self._queries

    def __len__(self) -> int:
        return len(self._streams) + len(self._queries) + len(self._commands)

    def open(self, request_id: str) -> Stream:
        """Listen for a request; its id must not be listened for."""
        assert request_id not in self
        stream = self._streams[request_id] = Stream()
        return stream

    def close(self, request_id: str) -> None:
        """Stop listening for a request."""
        self._streams.pop(request_id, None)

    def open_query(self, request_id: str) -> "asyncio.Future[RouteResponse | str]":
        """Listen for where a request would go, or the reason why nothing more comes."""
        assert request_id not in self
        answer = self._queries[request_id] = asyncio.get_running_loop().create_future()
        return answer

    def close_query(self, request_id: str) -> None:
        """Stop listening for the answer to a query."""
        self._queries.pop(request_id).cancel()

    def open_command(self, command_id: str) -> "asyncio.Future[CommandResponse | str]":
        """Listen for what becomes of a command, or the reason why nothing more comes."""
        assert command_id not in self._commands
        answer = self._commands[command_id] = asyncio.get_running_loop().create_future()
        return answer

    def close_command(self, command_id: str) -> None:
        """Stop listening for what becomes of a command."""
        self._commands.pop(command_id).cancel()

    def awaits_command(self, command_id: str) -> bool:
        """Whether somebody listens for what becomes of it."""
        return command_id in self._commands

    async def run(self) -> None:
        """Dispatch until cancelled; when the log fails every waiting request is told."""
        try:
            while True:
                self._wake.clear()
                records = self._tail.take(READ_MAX)
                for record in records:
                    self._dispatch(record.value)
                if records:
                    self.position = records[-1].offset + 1
                    await asyncio.sleep(0)
                else:
                    await self._wake.wait()
        except LogError as error:
            self.interrupt_all(str(error))
            raise
        finally:
            self._tail.close()

    def interrupt_all(self, reason: str) -> None:
        """Tell every waiting request that nothing more comes."""
        for stream in self._streams.values():
            stream.interrupt(reason)
        for answer in self._queries.values():
            if not answer.done():
                answer.set_result(reason)
        for outcome in self._commands.values():
            if not outcome.done():
                outcome.set_result(reason)

    def _dispatch(self, value: bytes) -> None:
        try:
            event: TokenEvent = decode(TOKENS, value)
        except DecodeError as error:
            self._on_undecodable()
            logger.warning("a record of the reply slot does not decode: %s", error)
            return
        if event.group != self._group:
            return
        if isinstance(event, RouteResponse):
            answer = self._queries.get(event.request_id)
            if answer is not None and not answer.done():
                answer.set_result(event)
            return
        if isinstance(event, CommandResponse):
            outcome = self._commands.get(event.command_id)
            if outcome is not None and not outcome.done():
                outcome.set_result(event)
            return
        for stream in apply(self._streams, event, self._group):
            stream.notify()


def was_rejected(reply: ResponseState) -> bool:
    """Whether no worker could take the request for now."""
    error = None if reply.ended is None else reply.ended.error
    return error is not None and error.status in RETRY_STATUSES and not reply.next_index


def interruption(reason: str | None) -> ApiError:
    """Return the error for a client whose response was interrupted for this reason."""
    if reason == SHUTTING_DOWN:
        return ApiError(503, "shutting_down", SHUTTING_DOWN)
    return ApiError(503, "log_unavailable", reason or "the log is unavailable")
