"""The reader of a reply slot: position, dispatch and interruptions."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from forebay.events.base import Event, pack_u32
from forebay.events.codec import encode
from forebay.events.tokens import (
    AttemptStarted,
    CommandResponse,
    Embedded,
    ResponseEnded,
    RouteResponse,
    TokenChunk,
    TokensEmitted,
)
from forebay.events.topics import TOKENS
from forebay.ingress.streams import ReplyReader, ReplySlot, Stream
from forebay.transport.base import FOLLOWED_RECORDS, Draft, LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.memory_log import memory_log
from tests.system import PATIENCE_S, until

GROUP = "model"
KEY = 77
SLOT = 2


@pytest.fixture
async def log() -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(None)
    yield opened
    opened.close()


@asynccontextmanager
async def reading(
    log: SqliteLog, offset: int, on_foreign: Callable[[float], None] = lambda _: None
) -> AsyncIterator[ReplyReader]:
    slot = ReplySlot(log, SLOT, offset, lambda: None, on_foreign)
    reader = slot.reader(GROUP)
    running = asyncio.create_task(slot.run())
    try:
        yield reader
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


def output(name: str, first: int, *tokens: int) -> TokensEmitted:
    chunk = TokenChunk(request_id=name, attempt=1, first_index=first, token_ids=pack_u32(tokens), reply_key=KEY)
    return TokensEmitted(worker_id="w1", worker_epoch=1, owner_epoch=1, chunks=(chunk,), group=GROUP)


def called(reader: ReplyReader) -> "tuple[asyncio.Task[RouteResponse], asyncio.Task[CommandResponse]]":
    async def send() -> None:
        """Append nothing, because the test plays the owner."""

    query, command = (RouteResponse, "q"), (CommandResponse, "c")
    return (
        asyncio.create_task(reader.call(*query, KEY, send, PATIENCE_S)),
        asyncio.create_task(reader.call(*command, KEY, send, PATIENCE_S)),
    )


@pytest.mark.parametrize(
    ("group", "key", "foreign"),
    [("other-model", KEY, []), ("", KEY, []), (GROUP, 0, [4]), (GROUP, KEY - 1, [4]), (GROUP, 2**63 - 1, [4])],
)
async def test_events_of_another_group_or_without_the_key_of_the_request_are_ignored(
    log: SqliteLog, group: str, key: int, foreign: list[float]
) -> None:
    """Events of the group without the key are counted."""
    forged: dict[str, Any] = {"owner_epoch": 9, "group": group, "reply_key": key}
    (chunk,) = output("a", 0, 90, 91).chunks
    own: dict[str, Any] = {"owner_epoch": 1, "group": GROUP, "reply_key": KEY}
    ended = ResponseEnded(request_id="a", attempt=1, finish_reason="stop", **own)
    replies = [RouteResponse(request_id="q", **own), CommandResponse(command_id="c", **own)]
    counted: list[float] = []
    async with reading(log, 0, counted.append) as reader:
        stream, calls = reader.add("a", Stream(KEY)), called(reader)
        await append(
            log,
            replace(output("a", 0), owner_epoch=9, group=group, chunks=(replace(chunk, reply_key=key),)),
            AttemptStarted(request_id="a", attempt=2, worker_id="w", **forged),
            Embedded(request_id="a", attempt=2, worker_id="w", vector=b"", **forged),
            ResponseEnded(request_id="a", attempt=2, finish_reason="stop", **forged),
            RouteResponse(request_id="q", **forged),
            CommandResponse(command_id="c", **forged),
            output("a", 0, 7, 8),
            ended,
        )
        await until(lambda: stream.ended is not None)
        assert (stream.tokens, stream.attempt, stream.ended) == ([7, 8], 1, ended)
        assert not any(call.done() for call in calls)
        await append(log, *replies)
        assert [await call for call in calls] == replies
        reader.close("a")
    assert counted == foreign


async def append(log: SqliteLog, *events: Event) -> None:
    await log.append([Draft(TOKENS.name, SLOT, encode(TOKENS, event)) for event in events])


async def test_position_follows_the_last_dispatched_record(log: SqliteLog) -> None:
    await append(log, *[output("a", at, at) for at in range(2 * FOLLOWED_RECORDS)])
    async with reading(log, 3) as reader:
        assert reader.position == 3
        await until(lambda: reader.position == 2 * FOLLOWED_RECORDS)
        stream = reader.add("b", Stream(KEY))
        await append(log, output("b", 0, 7))
        await stream.ready()
        await until(lambda: reader.position == 2 * FOLLOWED_RECORDS + 1)
        assert stream.tokens == [7]


async def test_a_gap_wakes_the_reader(log: SqliteLog) -> None:
    async with reading(log, 0) as reader:
        stream = reader.add("a", Stream(KEY))
        waiting = asyncio.create_task(stream.ready())
        await append(log, output("a", 1, 7), output("a", 0, 6))
        await waiting
        assert (stream.gap, stream.tokens) == (True, [])


async def test_a_failed_log_interrupts_all_streams() -> None:
    log, db = memory_log()
    await append(log, output("a", 0, 7))
    slot = ReplySlot(log, SLOT, 0, lambda: None, lambda _: None)
    reader = slot.reader(GROUP)
    streams = [reader.add(name, Stream(KEY)) for name in "ab"]
    db.execute(f"UPDATE {TOKENS.name} SET value = x'00'")
    with pytest.raises(LogError):
        await slot.run()
    assert all(stream.interrupt_reason for stream in streams)
    log.close()
