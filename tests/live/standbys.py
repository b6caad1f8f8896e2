"""Owners that a standby follows, and a log that alters records."""

import msgspec

from forebay.events.codec import decode, encode
from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS
from forebay.live.owner.owner import Owner
from forebay.transport.base import Log
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import Altered
from tests.system import System, until

PREFIX = list(range(12))


async def serve(system: System, owner: Owner, *names: str) -> None:
    """Serve requests one after another, then one that is rejected."""
    await until(lambda: len(owner.world.fleet) == 2)
    for number, name in enumerate(names):
        await system.serve(name, [*PREFIX, *[number] * 4])
        await system.serve(f"{name}-refused", PREFIX, model="another")
    await until(lambda: not len(owner.world.requests))


async def serve_unsealed(system: System, *names: str) -> None:
    """Serve requests with an owner that takes no final snapshot."""
    async with system.owned(dies=True) as owner:
        await serve(system, owner, *names)


async def served(log: SqliteLog, *names: str) -> None:
    """Serve requests by a system whose owner takes no final snapshot."""
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, *names)


def dearer(value: bytes) -> bytes:
    """Return a routing decision with a higher cost, and other records as they are."""
    event = decode(DECISIONS, value)
    if not isinstance(event, RequestRouted):
        return value
    lie = msgspec.structs.replace(event, terms=msgspec.structs.replace(event.terms, cost=event.terms.cost + 1))
    return encode(DECISIONS, lie)


def altered(log: Log) -> Altered:
    """Return a log with higher costs of all routing decisions."""
    return Altered(log, DECISIONS.name, dearer)
