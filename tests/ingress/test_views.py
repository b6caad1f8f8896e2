"""Views of responses from an offset in the past: history and live dispatch without a gap, in few passes."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.events.base import pack_u32
from forebay.events.codec import encode
from forebay.events.tokens import ResponseEnded, TokenChunk, TokensEmitted, Usage
from forebay.events.topics import TOKENS
from forebay.ingress import streams
from forebay.ingress.errors import ApiError
from forebay.ingress.streams import EXPIRED, UNREACHABLE, VIEWS_MAX, ReplySlot, ReplySlots, Stream, View
from forebay.transport.base import Draft, LogError, LogUnavailable, Record
from forebay.transport.sqlite.log import SqliteLog
from tests.system import until

GROUP, KEY = "model", 77
OWN, OTHER = 2, 5


class CountingLog:
    """A log that counts the records it reads. Reads wait for `gate`, and may fail."""

    def __init__(self, log: SqliteLog) -> None:
        self.reads = self.read_records = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.failures: list[LogError] = []
        self.is_away = False
        self._log = log

    async def begin(self, topic: str, partition: int) -> int:
        if self.is_away:
            raise LogUnavailable("no broker")
        return await self._log.begin(topic, partition)

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        self.reads += 1
        await asyncio.sleep(0)  # as on a broker, other tasks run meanwhile
        await self.gate.wait()
        if self.failures:
            raise self.failures.pop()
        records = await self._log.read(topic, partition, offset, limit)
        self.read_records += len(records)
        return records

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)


class Slots:
    """Reply slots of an ingress on a log. Emits the output of requests to slots."""

    def __init__(self) -> None:
        self.sqlite = SqliteLog.open(None)
        self.log = CountingLog(self.sqlite)
        self._emitted: dict[str, int] = {}

    def emit(self, *names: str, slot: int = OWN) -> None:
        """Append a record with the next token of each request, which is the number of its earlier tokens."""
        chunks = []
        for name in names:
            first = self._emitted.get(name, 0)
            self._emitted[name] = first + 1
            token_ids = pack_u32([first])
            chunks.append(TokenChunk(request_id=name, attempt=1, first_index=first, token_ids=token_ids, reply_key=KEY))
        event = TokensEmitted(worker_id="w", worker_epoch=1, owner_epoch=1, chunks=tuple(chunks), group=GROUP)
        self.append(encode(TOKENS, event), slot)

    def end(self, name: str, slot: int = OWN) -> None:
        usage = Usage(prompt_tokens=1, output_tokens=1)
        event = ResponseEnded(
            request_id=name, attempt=1, owner_epoch=1, finish_reason="stop", usage=usage, group=GROUP, reply_key=KEY
        )
        self.append(encode(TOKENS, event), slot)

    def append(self, value: bytes, slot: int = OWN) -> None:
        self.sqlite.append_soon([Draft(TOKENS.name, slot, value)])

    async def view(self, *names: str, offset: int = 0, slot: int = OWN) -> View:
        return await self.slots.view(slot, GROUP, {name: Stream(KEY) for name in names}, offset)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        own = ReplySlot(self.log, OWN, await self.log.end(TOKENS.name, OWN), lambda: None, lambda _: None)
        self.slots = ReplySlots(self.log, own)
        running = asyncio.create_task(own.run())
        try:
            yield
        finally:
            running.cancel()
            self.slots.stop()
            await asyncio.gather(running, return_exceptions=True)


@pytest.fixture
async def slots() -> AsyncIterator[Slots]:
    made = Slots()
    yield made
    made.sqlite.close()


def received(view: View) -> list[list[int]]:
    return [stream.tokens for stream in view.streams.values()]


async def test_a_view_has_what_arrived_while_its_history_was_read(slots: Slots) -> None:
    slots.emit("a")
    async with slots.running():
        slots.log.gate.clear()
        view = await slots.view("a")
        await until(lambda: slots.log.reads)
        for _ in range(3):
            slots.emit("a")
        await until(lambda: slots.slots.own.position == 4)
        slots.log.gate.set()
        await view.caught_up.wait()
        assert received(view) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("slot", [OWN, OTHER])
async def test_a_view_reads_history_and_then_live_events(slots: Slots, slot: int) -> None:
    for _ in range(700):  # several pages
        slots.emit("a", "b", slot=slot)
    async with slots.running():
        view = await slots.view("a", slot=slot)
        await view.caught_up.wait()
        assert received(view) == [list(range(700))]
        slots.emit("b", "a", slot=slot)
        await until(lambda: len(received(view)[0]) == 701)
        later = await slots.view("a", "b", slot=slot)
        await later.caught_up.wait()
        slots.emit("a", slot=slot)
        slots.end("a", slot=slot)
        await until(lambda: view.has_ended)
        assert received(view) == [list(range(702))]
        assert received(later) == [list(range(702)), list(range(701))]
        for one in (view, later):
            slots.slots.close(one)


@settings(max_examples=30)
@given(st.lists(st.sampled_from(["emit", "view", "yield"]), max_size=40), st.integers(1, 5))
def test_a_view_misses_nothing_and_gets_nothing_twice(steps: Sequence[str], page: int) -> None:
    """Whenever a view is opened, between any records and pages of the history."""

    async def run() -> None:
        slots, views = Slots(), list[View]()
        async with slots.running():
            for step in steps:
                if step == "emit":
                    slots.emit("a")
                elif step == "yield":
                    await asyncio.sleep(0)
                elif len(views) < VIEWS_MAX:
                    views.append(await slots.view("a"))
            slots.emit("a")
            expected = [list(range(1 + steps.count("emit")))]
            await until(lambda: all(received(view) == expected and not view.streams["a"].gap for view in views))
        slots.sqlite.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streams, "READ_MAX", page)
        asyncio.run(run())


async def test_a_hundred_views_share_a_pass(slots: Slots) -> None:
    names = [f"r{number}" for number in range(100)]
    for _ in range(50):
        slots.emit(*names)
    async with slots.running():
        slots.log.gate.clear()
        views = []
        for name in names:
            views.append(await slots.view(name))
            await asyncio.sleep(0)
        slots.log.gate.set()
        for view in views:
            await view.caught_up.wait()
        assert all(received(view) == [list(range(50))] for view in views)
        assert slots.log.read_records == 50


async def test_history_is_read_only_until_the_response_has_ended(slots: Slots) -> None:
    slots.emit("a")
    slots.end("a")
    for _ in range(1_000):
        slots.emit("b")
    slots.emit("c")
    async with slots.running():
        ended, later = await slots.view("a"), await slots.view("c", offset=1_002)
        for view in (ended, later):
            await view.caught_up.wait()
        assert (received(ended), received(later)) == ([[0]], [[0]])
        assert slots.log.read_records < 600


async def test_a_view_knows_records_that_this_ingress_has_not_dispatched(slots: Slots) -> None:
    """Otherwise an event that a client has from another ingress would seem to be unknown."""
    own = ReplySlot(slots.log, OWN, 0, lambda: None, lambda _: None)
    slots.emit("a")
    view = own.view(GROUP, {"a": Stream(KEY)}, 0)
    for _ in range(20):
        await asyncio.sleep(0)
    assert not view.caught_up.is_set()
    running = asyncio.create_task(own.run())
    await view.caught_up.wait()
    assert received(view) == [[0]]
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_a_view_is_interrupted_if_the_beginning_of_the_log_cannot_be_read(slots: Slots) -> None:
    slots.emit("a")
    async with slots.running():
        slots.log.is_away = True
        view = await slots.view("a")
        await view.caught_up.wait()
        assert view.streams["a"].interrupt_reason == "no broker"
        slots.log.is_away = False
        later = await slots.view("a")
        await later.caught_up.wait()
        assert received(later) == [[0]]


async def test_slots_of_other_ingresses_are_followed_while_they_have_views(slots: Slots) -> None:
    async with slots.running():
        first, second = await asyncio.gather(slots.view("a", slot=OTHER), slots.view("a", slot=OTHER))
        tasks = {task.get_name() for task in asyncio.all_tasks()}
        assert f"reply slot {OTHER}" in tasks
        slots.slots.close(first)
        slots.emit("a", slot=OTHER)
        await until(lambda: received(second) == [[0]])
        assert received(first) == [[]]
        slots.slots.close(second)
        await until(lambda: f"reply slot {OTHER}" not in {task.get_name() for task in asyncio.all_tasks()})


async def test_a_response_has_a_limited_number_of_views(slots: Slots) -> None:
    async with slots.running():
        views = [await slots.view("a", "b") for _ in range(VIEWS_MAX)]
        with pytest.raises(ApiError, match="8 clients of this ingress read this response") as refused:
            await slots.view("a")
        assert refused.value.status == 429
        await slots.view("c")
        slots.slots.close(views.pop())
        await slots.view("b")


async def test_history_has_bounds(slots: Slots, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "HISTORY_MAX", 500)
    for _ in range(1_000):
        slots.emit("a")
    await slots.sqlite.flush()
    slots.sqlite.trim(TOKENS.name, OWN, 10, 10)
    async with slots.running():
        opened = {name: await slots.view(name, offset=offset) for name, offset in (("x", 9), ("y", 10), ("z", 900))}
        for view in opened.values():
            await view.caught_up.wait()
        reasons = [view.streams[name].interrupt_reason for name, view in opened.items()]
        assert reasons == [EXPIRED, UNREACHABLE, None]


async def test_a_failed_read_interrupts_only_the_views_that_need_it(slots: Slots) -> None:
    slots.emit("a")
    async with slots.running():
        slots.log.failures.append(LogUnavailable("the broker is away"))
        view = await slots.view("a")
        await view.caught_up.wait()
        assert view.streams["a"].interrupt_reason == "the broker is away"
        slots.slots.close(view)
        again = await slots.view("a")
        await again.caught_up.wait()
        assert received(again) == [[0]]
        slots.slots.interrupt_all("stopping")
        assert again.streams["a"].interrupt_reason == "stopping"
