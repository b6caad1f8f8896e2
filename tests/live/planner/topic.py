"""The topic `scaling` of a log in memory, for tests: append records, and wait for those of the code under test."""

import asyncio
import contextlib
from typing import TypeVar

from forebay.events.base import Event
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.scaling import ScalingEvent
from forebay.events.topics import SCALING
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog

PATIENCE_S = 50.0

EventT = TypeVar("EventT", bound=Event)


async def append(log: SqliteLog, *events: ScalingEvent) -> list[int]:
    """Append records and return their offsets."""
    return await log.append([Draft(SCALING.name, 0, encode(SCALING, event)) for event in events])


def records(log: SqliteLog, kind: type[EventT]) -> list[EventT]:
    """Return the records of one kind."""
    found = []
    for record in log.records(SCALING.name, 0, 0, 10_000):
        with contextlib.suppress(DecodeError):
            found.append(decode(SCALING, record.value))
    return [event for event in found if isinstance(event, kind)]


async def until(log: SqliteLog, kind: type[EventT], count: int) -> list[EventT]:
    """Wait until the topic has `count` records of one kind, and return them."""
    async with asyncio.timeout(PATIENCE_S):
        while len(found := records(log, kind)) < count:  # noqa: ASYNC110 - the log is the subject
            await asyncio.sleep(0.001)
    return found
