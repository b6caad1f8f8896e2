"""Owners that a standby follows, and a log that alters records."""

import asyncio

import msgspec

from forebay.events.codec import decode, encode
from forebay.events.decisions import RequestRouted
from forebay.events.topics import DECISIONS
from forebay.live.owner.owner import Owner
from forebay.transport.base import Record
from tests.live.shared import SharedLog
from tests.system import System, settings, until

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
    owner = Owner(system.log, system.leases, settings())
    await owner.start()
    running = asyncio.create_task(owner.run())
    await serve(system, owner, *names)
    await owner.stop()
    await running
    owner.drop()


class AlteredLog(SharedLog):
    """A log that returns every routing decision with a higher cost."""

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        records = await super().read(topic, partition, offset, limit)
        return [self._changed(record) if topic == DECISIONS.name else record for record in records]

    @staticmethod
    def _changed(record: Record) -> Record:
        event = decode(DECISIONS, record.value)
        if not isinstance(event, RequestRouted):
            return record
        lie = msgspec.structs.replace(event, terms=msgspec.structs.replace(event.terms, cost=event.terms.cost + 1))
        return msgspec.structs.replace(record, value=encode(DECISIONS, lie))
