"""Follow a reply slot and dispatch its events to the requests that wait for them.

The buffer of a request needs no limit of its own, because an engine generates at most `max_tokens`.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from forebay.core.state.reply_slot import ResponseState, apply
from forebay.events.codec import DecodeError, decode
from forebay.events.request_ids import RequestLocation
from forebay.events.tokens import CommandResponse, RouteResponse, TokenEvent
from forebay.events.topics import TOKENS
from forebay.ingress.drain import SHUTTING_DOWN
from forebay.ingress.errors import ApiError
from forebay.transport.base import Log, LogError

logger = logging.getLogger(__name__)

READ_MAX = 256  # records per iteration of the event loop
NOT_OPEN = (0, None)

CallT = TypeVar("CallT", RouteResponse, CommandResponse)


class Stream(ResponseState):
    """Output of one request on the log that the ingress has read and the response has not used yet.

    Attributes:
        location: location of the request; None before the log has acknowledged it.
        interrupt_reason: why the ingress reads no more events of the request; None while it does.
    """

    __slots__ = ("_on_change", "_waiter", "interrupt_reason", "location")

    def __init__(self, key: int = 0, on_change: "Callable[[Stream], None] | None" = None) -> None:
        super().__init__(key)
        self.location: RequestLocation | None = None
        self.interrupt_reason: str | None = None
        self._on_change = on_change
        self._waiter: asyncio.Future[None] | None = None

    def interrupt(self, reason: str) -> None:
        """End the stream because the client disconnected, the deadline passed, the log failed, or the server stops."""
        self.interrupt_reason = self.interrupt_reason or reason
        self.notify()

    async def ready(self) -> None:
        """Wait until the stream has tokens, has a gap (missing events), has ended, or was interrupted."""
        if self.tokens or self.gap or self.ended is not None or self.interrupt_reason is not None:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def notify(self) -> None:
        if self._on_change is not None:
            self._on_change(self)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class ReplySlot:
    """Reads one reply slot (partition of `tokens`), and passes each event to the `ReplyReader` of its group.

    `position` is the offset of the first record that was not dispatched yet.
    """

    def __init__(
        self,
        log: Log,
        number: int,
        offset: int,
        on_undecodable: Callable[[], None],
        on_foreign: Callable[[float], None],
    ) -> None:
        self.on_foreign = on_foreign
        self.number = number
        self.position = offset
        self._readers: dict[str, ReplyReader] = {}
        self._wake = asyncio.Event()
        self._tail = log.tail(TOKENS.name, number, offset, self._wake)
        self._on_undecodable = on_undecodable

    def reader(self, group: str) -> "ReplyReader":
        found = self._readers.get(group)
        if found is None:
            found = self._readers[group] = ReplyReader(self, group)
        return found

    async def run(self) -> None:
        """Dispatch the events of the partition until cancelled. A LogError first interrupts all requests."""
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
        """Interrupt every request, route query and command in flight."""
        for reader in self._readers.values():
            reader.interrupt_all(reason)

    def _dispatch(self, value: bytes) -> None:
        try:
            event: TokenEvent = decode(TOKENS, value)
        except DecodeError as error:
            self._on_undecodable()
            logger.warning("skipped a record of tokens that cannot be decoded: %s", error)
            return
        reader = self._readers.get(event.group)
        if reader is not None:
            reader.apply(event)


class ReplyReader:
    """Dispatches the events of one group in a reply slot, to which owners of other groups may write, too."""

    def __init__(self, slot: ReplySlot, group: str) -> None:
        self._slot = slot
        self._group = group
        self._streams: dict[str, Stream] = {}
        self._calls: dict[tuple[type, str], tuple[int, asyncio.Future[Any]]] = {}

    @property
    def position(self) -> int:
        return self._slot.position

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._streams or (RouteResponse, request_id) in self._calls

    def __len__(self) -> int:
        return len(self._streams) + len(self._calls)

    def open(self, request_id: str, key: int, on_change: "Callable[[Stream], None] | None" = None) -> Stream:
        """Register a request with a new id, and return the stream that receives its events.

        As in `call`, events with another `reply_key` than `key` are ignored. `on_change` is called after each event.
        """
        assert request_id not in self
        stream = self._streams[request_id] = Stream(key, on_change)
        return stream

    def close(self, request_id: str) -> None:
        """Remove a request. Its later events are ignored."""
        stream = self._streams.pop(request_id, None)
        if stream is not None:
            count_foreign(request_id, stream, self._slot.on_foreign)

    async def call(
        self, kind: type[CallT], name: str, key: int, send: Callable[[], Awaitable[object]], timeout_s: float
    ) -> CallT:
        """Append a route query or a command with an id that is not in flight, and return the response of the owner.

        Raises ApiError: 504 if there is no response in time, 503 after an interruption, or the error in the response.
        """
        assert not self.is_called(kind, name)
        future = asyncio.get_running_loop().create_future()
        self._calls[kind, name] = key, future
        try:
            async with asyncio.timeout(timeout_s):
                await send()
                result = await future
        except TimeoutError as error:
            raise ApiError(504, "deadline_exceeded", f"no router responded within {timeout_s:g} s") from error
        finally:
            self._calls.pop((kind, name))[1].cancel()
        if not isinstance(result, kind):
            raise interruption(result)
        if result.error is not None:
            raise ApiError(result.error.status, result.error.code, result.error.message)
        return result

    def is_called(self, kind: type, name: str) -> bool:
        return (kind, name) in self._calls

    def interrupt_all(self, reason: str) -> None:
        for stream in self._streams.values():
            stream.interrupt(reason)
        for _, future in self._calls.values():
            if not future.done():
                future.set_result(reason)

    def apply(self, event: TokenEvent) -> None:
        if isinstance(event, RouteResponse | CommandResponse):
            name = event.request_id if isinstance(event, RouteResponse) else event.command_id
            key, future = self._calls.get((type(event), name), NOT_OPEN)
            if future is not None and key == event.reply_key and not future.done():
                future.set_result(event)
            return
        for stream in apply(self._streams, event, self._group):
            stream.notify()


def count_foreign(request_id: str, state: ResponseState, count: Callable[[float], None]) -> None:
    if state.foreign:
        count(state.foreign)
        logger.error(
            "ignored %d events of the request %s on tokens without its key, which neither its owner nor its worker"
            " wrote; check who may write to the topic",
            state.foreign,
            request_id,
        )


def interruption(reason: str | None) -> ApiError:
    if reason == SHUTTING_DOWN:
        return ApiError(503, "shutting_down", SHUTTING_DOWN)
    return ApiError(503, "log_unavailable", reason or "the log is unavailable")
