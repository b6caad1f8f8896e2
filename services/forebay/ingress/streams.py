"""Follow reply slots and dispatch their events to the requests that wait for them.

The buffer of a request needs no limit of its own, because an engine generates at most `max_tokens`.

Theory of operation. A response that another ingress or connection began is read by a `View`, from an offset in the
past. One task per slot reads the history up to the position of the live dispatch, in one pass for all waiting views.
Then the views join the live dispatch at exactly this position, so they miss nothing and get nothing
twice. Slots that other ingresses read are followed only while a view needs them.
"""

import asyncio
import contextlib
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
from forebay.transport.base import Log, LogError, Record
from forebay.transport.follower import Follower

logger = logging.getLogger(__name__)

READ_MAX = 256  # records of a page of the history
VIEWS_MAX = 8  # of one response at a time, because each event of the slot is applied to every layer of views
# Records before the live position that are read for a view, which takes a few seconds of CPU time. A slot has a few
# hundred records per second under load, so responses that began about ten minutes ago can still be read.
HISTORY_MAX = 200_000
EXPIRED = "the output of the request was removed from the log by retention"
UNREACHABLE = (
    f"the output of the request began more than {HISTORY_MAX:,} records ago; only a kept answer, for example of a"
    ' request with `forebay: {"detach": true}`, can be read for longer'
)
NOT_OPEN = (0, None)

CallT = TypeVar("CallT", RouteResponse, CommandResponse)
OnChange = Callable[["Stream"], None]  # called after each event of the stream, and after its interruption


class Stream(ResponseState):
    """Output of one request on the log that the ingress has read and the response has not used yet.

    Attributes:
        location: location of the request; None before the log has acknowledged it.
        interrupt_reason: why the ingress reads no more events of the request; None while it does.
    """

    __slots__ = ("_on_change", "_waiter", "interrupt_reason", "location")

    def __init__(self, key: int = 0, on_change: OnChange | None = None) -> None:
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
        """Wait until the stream has tokens, a destination or a gap (missing events), or was located or interrupted.

        The end of the response ends the wait, too.
        """
        has_news = self.tokens or self.destination or self.gap or self.located or self.ended
        if has_news or self.interrupt_reason is not None:
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


class ReplySlot(Follower):
    """Reads one reply slot (partition of `tokens`), and passes each event to the `ReplyReader` of its group."""

    def __init__(
        self,
        log: Log,
        number: int,
        offset: int,
        on_undecodable: Callable[[], None],
        on_foreign: Callable[[float], None],
    ) -> None:
        super().__init__(log, TOKENS)
        self.on_undecodable = on_undecodable
        self.on_foreign = on_foreign
        self.number = number
        self.position = offset
        self.views: set[View] = set()
        self._waiting: list[View] = []
        self._arrived: list[TokenEvent] | None = None  # events dispatched during a pass
        self._catching_up: asyncio.Task[None] | None = None
        self._readers: dict[str, ReplyReader] = {}

    def reader(self, group: str) -> "ReplyReader":
        if group not in self._readers:
            self._readers[group] = ReplyReader(self, group)
        return self._readers[group]

    async def run(self) -> None:
        """Dispatch the events of the partition until cancelled. A LogError first interrupts all requests."""
        try:
            await self.follow_from(self.number, self.position)
        except LogError as error:
            self.interrupt_all(str(error))
            raise
        finally:
            if self._catching_up is not None:
                self._catching_up.cancel()

    def view(self, group: str, streams: "dict[str, Stream]", offset: int) -> "View":
        """Return a view that fills the streams of all parts of a response from an offset on.

        Raises ApiError (429) if the response has `VIEWS_MAX` views in this process.
        """
        if sum(not view.streams.keys().isdisjoint(streams) for view in self.views) >= VIEWS_MAX:
            text = f"{VIEWS_MAX} clients of this ingress read this response at this moment; try again later"
            raise ApiError(429, "too_many_readers", text)
        view = View(self, group, streams, offset)
        self.views.add(view)
        self._waiting.append(view)
        if self._catching_up is None or self._catching_up.done():
            self._catching_up = asyncio.create_task(self._catch_up(), name=f"history of reply slot {self.number}")
        return view

    async def _catch_up(self) -> None:
        while self._waiting:
            views: list[View] = []
            try:
                await self._read_history(views)
            except LogError as error:
                views += self._waiting
                self._waiting.clear()
                for view in views:
                    view.interrupt(str(error))
            self._arrived = None

    async def _read_history(self, views: "list[View]") -> None:
        """Fill views with the records before the live position, until their responses have ended; then let them join.

        Views that wait when a page was read join the pass if they begin in this page or later. They are added to
        `views`.
        """
        history: dict[str, Layers] = {}
        arrived = self._arrived = list[TokenEvent]()  # during the pass, because the log may grow as fast as it is read
        until = self.position
        begin = await self._log.begin(TOKENS.name, self.number)
        at = max(begin, min(view.offset for view in self._waiting))
        self._admit(at, begin, views, history)
        while views and at < until:
            records = await self._log.read(TOKENS.name, self.number, at, min(READ_MAX, until - at))
            self._admit(at, begin, views, history)
            for record in records:
                event = decode_output(record, self.on_undecodable) if record.offset < until else None
                if event is not None and event.group in history:
                    history[event.group].apply(event, event.group)
            at = min(until, records[-1].offset + 1) if records else until
            for view in views:
                if view.has_ended:
                    view.caught_up.set()
                elif at - view.offset >= HISTORY_MAX:
                    view.interrupt(UNREACHABLE)
            views[:] = [view for view in views if not view.has_ended]
            at = max(at, min((view.offset for view in views), default=until))
            await asyncio.sleep(0)
        # A client may have read records at another ingress that this one has not dispatched yet.
        await self.reach(await self._log.end(TOKENS.name, self.number))
        for event in arrived:
            if event.group in history:
                history[event.group].apply(event, event.group)
        for view in views:
            if not view.has_ended:
                self.reader(view.group).layers.add(view.streams)
            view.caught_up.set()

    def _admit(self, at: int, begin: int, views: "list[View]", history: "dict[str, Layers]") -> None:
        """Move waiting views that begin at an offset or later to a pass. Interrupt those before the first record."""
        waiting, self._waiting = self._waiting, []
        for view in waiting:
            if view.offset < begin:
                view.interrupt(EXPIRED)
            elif view.offset < at:
                self._waiting.append(view)
            else:
                history.setdefault(view.group, Layers()).add(view.streams)
                views.append(view)

    def interrupt_all(self, reason: str) -> None:
        """Interrupt every request, view, route query and command in flight."""
        for reader in self._readers.values():
            reader.interrupt_all(reason)
        for view in self.views:
            view.interrupt(reason)

    def apply(self, record: Record) -> None:
        event = decode_output(record, self.on_undecodable)
        if event is not None:
            if self._arrived is not None:
                self._arrived.append(event)
            if (reader := self._readers.get(event.group)) is not None:
                reader.apply(event)


class View:
    """Reader of all parts of a response in a slot, from the offset `offset` on.

    Attributes:
        streams: streams of the parts by their ids on the log.
        caught_up: set once the streams have all records that the slot had when the view was opened, or the view was
            interrupted.
    """

    def __init__(self, slot: ReplySlot, group: str, streams: dict[str, Stream], offset: int) -> None:
        self.group = group
        self.streams = streams
        self.offset = offset
        self.caught_up = asyncio.Event()
        self._slot = slot

    @property
    def has_ended(self) -> bool:
        """Whether nothing more is read, because all parts have ended or the view was interrupted or closed."""
        return self not in self._slot.views or all(
            one.ended or one.gap or one.interrupt_reason for one in self.streams.values()
        )

    def interrupt(self, reason: str) -> None:
        for stream in self.streams.values():
            stream.interrupt(reason)
        self.caught_up.set()

    def close(self) -> None:
        """Stop reading. Later events are ignored."""
        self._slot.views.discard(self)
        self._slot.reader(self.group).layers.remove(self.streams)
        for request_id, stream in self.streams.items():
            count_foreign(request_id, stream, self._slot.on_foreign)


class Layers:
    """Streams by request id. A further stream of the same request is in the first layer that has none of it."""

    def __init__(self) -> None:
        self.first: dict[str, Stream] = {}
        self._layers = [self.first]

    def add(self, streams: dict[str, Stream]) -> None:
        for layer in self._layers:
            if layer.keys().isdisjoint(streams):
                layer.update(streams)
                return
        self._layers.append(dict(streams))

    def remove(self, streams: dict[str, Stream]) -> None:
        for layer in self._layers:
            for request_id, stream in streams.items():
                if layer.get(request_id) is stream:
                    del layer[request_id]
        while len(self._layers) > 1 and not self._layers[-1]:
            self._layers.pop()

    def apply(self, event: TokenEvent, group: str) -> None:
        for layer in self._layers:
            for stream in apply(layer, event, group):
                stream.notify()


class ReplySlots:
    """The reply slot of an ingress, and those of other ingresses while a view needs them."""

    def __init__(self, log: Log, own: ReplySlot) -> None:
        self.own = own
        self._log = log
        self._others: dict[int, tuple[ReplySlot, asyncio.Task[None]]] = {}
        self._opening = asyncio.Lock()

    async def view(self, number: int, group: str, streams: dict[str, Stream], offset: int) -> View:
        """Return a view of a response in any slot; see `ReplySlot.view`. Raises ApiError or LogError."""
        if number == self.own.number:
            return self.own.view(group, streams, offset)
        async with self._opening:
            slot, _ = self._others.get(number, (None, None))
            if slot is None:
                end = await self._log.end(TOKENS.name, number)
                slot = ReplySlot(self._log, number, end, self.own.on_undecodable, self.own.on_foreign)
                self._others[number] = slot, asyncio.create_task(self._follow(slot), name=f"reply slot {number}")
            return slot.view(group, streams, offset)

    async def _follow(self, slot: ReplySlot) -> None:
        with contextlib.suppress(LogError):  # `run` has interrupted the views
            await slot.run()
        if self._others.get(slot.number, (None,))[0] is slot:
            del self._others[slot.number]

    def close(self, view: View) -> None:
        """Close a view, and stop following the slot of another ingress after its last one."""
        view.close()
        for number, (slot, following) in list(self._others.items()):
            if not slot.views:
                following.cancel()
                del self._others[number]

    def is_read(self, group: str, request_id: str) -> bool:
        """Return whether a client of this ingress reads the output of a request."""
        views = [view for slot in self._all() for view in slot.views]
        is_viewed = any(view.group == group and request_id in view.streams for view in views)
        return is_viewed or request_id in self.own.reader(group)

    def interrupt_all(self, reason: str) -> None:
        for slot in self._all():
            slot.interrupt_all(reason)

    def _all(self) -> list[ReplySlot]:
        return [self.own, *(slot for slot, _ in self._others.values())]

    def stop(self) -> None:
        for _, following in self._others.values():
            following.cancel()


class ReplyReader:
    """Dispatches the events of one group in a reply slot, to which owners of other groups may write, too."""

    def __init__(self, slot: ReplySlot, group: str) -> None:
        self.layers = Layers()
        self._slot = slot
        self._group = group
        self._calls: dict[tuple[type, str], tuple[int, asyncio.Future[Any]]] = {}

    @property
    def position(self) -> int:
        return self._slot.position

    def __contains__(self, request_id: str) -> bool:
        return request_id in self.layers.first or (RouteResponse, request_id) in self._calls

    def __len__(self) -> int:
        return len(self.layers.first) + len(self._calls)

    def add(self, request_id: str, stream: Stream) -> Stream:
        """Register a request with a new id, whose events the stream receives, and return the stream."""
        assert request_id not in self
        self.layers.first[request_id] = stream
        return stream

    def close(self, request_id: str) -> None:
        """Remove a request. Its later events are ignored."""
        stream = self.layers.first.pop(request_id, None)
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
        for stream in self.layers.first.values():
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
        self.layers.apply(event, self._group)


def decode_output(record: Record, on_undecodable: Callable[[], None]) -> TokenEvent | None:
    """Return the event in a record of `tokens`. If it does not decode, count it and return None."""
    try:
        event: TokenEvent = decode(TOKENS, record.value)
    except DecodeError as error:
        on_undecodable()
        logger.warning("skipped a record of tokens that cannot be decoded: %s", error)
        return None
    return event


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
    if reason in (EXPIRED, UNREACHABLE):
        return ApiError(410, "answer_expired", reason)
    return ApiError(503, "log_unavailable", reason or "the log is unavailable")
