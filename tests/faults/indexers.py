"""Instances of the indexer in a simulation, and the consumer group by which a simulated Faust assigns their groups."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any, cast

from prometheus_client import CollectorRegistry

from forebay.core.world import World
from forebay.events.base import hex_digest
from forebay.events.decisions import Advanced, JournalRecord, Sealed
from forebay.events.topics import DECISIONS
from forebay.journal.records import JournalBroken
from forebay.journal.snapshots import OtherState
from forebay.live.indexer.delivered_log import TOPICS
from forebay.live.indexer.indexer import Indexer
from forebay.live.indexer.replica import Replica
from forebay.transport.base import Log, Record, RecordsRemoved
from forebay.transport.directory import Directory
from tests.faults.broker import Broker, Faults, Place
from tests.faults.effects import Violation
from tests.faults.process import Process
from tests.faults.services import PARTITION, Connections

POLL_S = 0.1  # between two batches of records
BATCH_MAX = 48
NOTICED = 0.05  # chance at each poll that the group notices a dead member
DELIVERED = 0.8  # chance at each poll that a topic is delivered
COMMITTED = 0.2  # chance at each poll that the offset of a topic is committed


class CheckedReplica(Replica):
    """Replica that ends its process with a violation if its state differs from that of the owner.

    So does a broken journal, for which the replica would be restored, because no fault breaks one.
    """

    def on_record(self, offset: int, record: JournalRecord) -> None:
        super().on_record(offset, record)
        if isinstance(record, Advanced | Sealed) and (digest := hex_digest(self.world.digest())) != record.digest:
            raise Violation(f"an indexer has the digest {digest} at journal offset {offset}, the owner {record.digest}")

    async def follow(self) -> None:
        try:
            await super().follow()
        except OtherState:
            raise  # a snapshot of another group, after retention has removed the claim; the owner's next one is used
        except JournalBroken as error:
            raise Violation(f"an indexer cannot derive the journal: {error}") from error


class RetainedLog:
    """Log of one process from which retention has removed all records before `begins`."""

    def __init__(self, log: Log, begins: Mapping[Place, int]) -> None:
        self._log = log
        self._begins = begins

    def __getattr__(self, name: str) -> Any:
        return getattr(self._log, name)

    async def begin(self, topic: str, partition: int) -> int:
        return max(await self._log.begin(topic, partition), self._begins.get((topic, partition), 0))

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        records = await self._log.read(topic, partition, offset, limit)
        if offset < self._begins.get((topic, partition), 0):
            raise RecordsRemoved(f"{topic}/{partition} no longer holds offset {offset}")
        return records


class IndexerService:
    """An indexer process without HTTP."""

    def __init__(self, faust: "FaustGroup", faults: Faults) -> None:
        self.indexer: Indexer | None = None
        self._faust = faust
        self._faults = faults
        self._stopped = asyncio.Event()

    async def run(self, process: Process, to: Connections) -> None:
        """Run the indexer until it is stopped or its log fails."""
        directory = Directory(to.log)
        await directory.start()
        self.indexer = Indexer(CollectorRegistry())
        self._faust.join(_Instance(process, self.indexer, self._faults))
        work = asyncio.create_task(self.indexer.run(cast("Log", RetainedLog(to.log, self._faust.begins)), directory))
        stop = asyncio.create_task(self._stopped.wait())
        await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
        work.cancel()
        await asyncio.wait((work,))
        if not work.cancelled():
            work.result()

    async def stop(self) -> None:
        """Stop in order, as after SIGTERM."""
        self._stopped.set()


@dataclass(slots=True)
class _Instance:
    """One member of the group. `is_told` if it knows whether it has the partition."""

    process: Process
    indexer: Indexer
    faults: Faults
    is_told: bool = False


class FaustGroup:
    """Assigns the control partition to one instance of the indexer, and delivers its records to this instance.

    As Faust does, it begins at the committed offset of each topic, or at the end if there is none. So a rebalance
    repeats or skips records.

    Attributes:
        begins: oldest offset that retention has left of each partition.
    """

    def __init__(self, broker: Broker, seed: str) -> None:
        self.begins: Mapping[Place, int] = {}
        self._broker = broker
        self._random = Random(f"{seed}/faust")
        self._members: dict[str, _Instance] = {}
        self._assigned = ""
        self._committed: dict[str, int] = {}
        self._positions: dict[str, int] = {}

    def start(self) -> None:
        self._broker.loop.call_main_later(POLL_S, self._poll)

    def join(self, instance: _Instance) -> None:
        self._members[instance.process.name] = instance
        self.rebalance()

    def rebalance(self) -> None:
        """Assign the partition to a random member. The others learn of it at once, or when they are reachable."""
        names = [name for name, member in self._members.items() if member.process.alive]
        self._assigned = self._random.choice(names) if names else ""
        self._positions = {topic.name: self._committed.get(topic.name, self._end(topic.name)) for topic in TOPICS}
        for member in self._members.values():
            member.is_told = False

    def why_behind(self) -> str:
        """Return why an instance has not reached the end of the journal; empty if each does what is assigned to it."""
        if self._assigned not in self._members:
            return "no instance is assigned"
        for name, member in self._members.items():
            if not (member.process.alive and member.is_told):
                return f"{name} does not know its partitions"
            replica = member.indexer.replicas.get(PARTITION)
            if (replica is not None) != (name == self._assigned):
                return f"{name} has the replicas {list(member.indexer.replicas)}, and {self._assigned} is assigned"
            end = self._end(DECISIONS.name)
            if replica is not None and (at := member.process.evaluate(replica.position).journal_offset) != end:
                return f"{name} has applied {at} of {end} journal records ({replica.problem})"
        return ""

    def world(self) -> World | None:
        """Return the state of the assigned instance, None while it has none."""
        replica = self._members[self._assigned].indexer.replicas[PARTITION]
        return replica.world if replica.problem is None else None

    def _end(self, topic: str) -> int:
        return len(self._broker.records((topic, PARTITION)))

    def _poll(self) -> None:
        self._broker.loop.call_main_later(POLL_S, self._poll)
        for name, member in list(self._members.items()):
            if not member.process.alive:
                if self._random.random() < NOTICED:
                    del self._members[name]
                    self.rebalance()
            elif not (member.process.paused or member.faults.cut or self._broker.down):
                if not member.is_told:
                    assigned = {PARTITION} if name == self._assigned else set()
                    member.process.call_soon(member.indexer.assign, assigned, {})
                    member.is_told = True
                elif name == self._assigned:
                    self._deliver(member)

    def _deliver(self, member: _Instance) -> None:
        for topic, position in self._positions.items():
            if self._random.random() < DELIVERED:
                limit = 1 + int(self._random.random() * BATCH_MAX)
                if records := self._broker.records((topic, PARTITION))[position : position + limit]:
                    member.process.call_soon(member.indexer.deliver, PARTITION, records)
                    self._positions[topic] += len(records)
            if self._random.random() < COMMITTED:
                self._committed[topic] = self._positions[topic]
