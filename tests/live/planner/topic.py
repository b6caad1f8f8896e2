"""The topic `scaling` of a log in memory, for tests: append records, and wait for those of the code under test."""

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import TypeVar

from forebay.core.scaling.state import PoolKey
from forebay.events.base import Event
from forebay.events.codec import DecodeError, decode, encode
from forebay.events.scaling import ScalingEvent
from forebay.events.topics import SCALING
from forebay.live.planner.actuator import ActuatorError, Reached
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.scaling.scene import GROUP, POOL

PATIENCE_S = 50.0

EventT = TypeVar("EventT", bound=Event)


class RecordingActuator:
    """Actuator that records its calls and reaches the sizes of `reaches`, by default those requested."""

    def __init__(self, *, pools: frozenset[PoolKey] = frozenset({(GROUP, POOL)})) -> None:
        self.name = "recording"
        self.pools = pools
        self.calls: list[Mapping[PoolKey, int]] = []
        self.reaches: Reached | None = None
        self.fails = ""

    async def scale(self, sizes: Mapping[PoolKey, int]) -> Reached:
        self.calls.append(sizes)
        if self.fails:
            raise ActuatorError(self.fails)
        return self.reaches or Reached(sizes)


async def append(log: SqliteLog, *events: ScalingEvent) -> list[int]:
    return await log.append([Draft(SCALING.name, 0, encode(SCALING, event)) for event in events])


def records(log: SqliteLog, kind: type[EventT]) -> list[EventT]:
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


async def eventually(condition: Callable[[], object]) -> None:
    """Run other tasks until the condition holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - conditions are about several objects
            await asyncio.sleep(0.001)
