"""Keep a replica of each group whose control partition Faust assigns to this process.

Faust revokes all partitions in each rebalance and assigns most of them again to the same member. A replica therefore
lives until its partition is assigned to another member.
"""

import asyncio
from collections.abc import Collection, Mapping

from prometheus_client import CollectorRegistry

from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.live.indexer.replica import IndexerMetrics, Replica
from forebay.transport.base import Log, Record
from forebay.transport.directory import Directory


class Indexer:
    """The replicas of one process, by control partition."""

    def __init__(self, registry: CollectorRegistry, custom: CustomPolicies = ONLY_BUILT_IN) -> None:
        self.registry = registry
        self.replicas: dict[int, Replica] = {}
        self._custom = custom
        self._metrics = IndexerMetrics(self.replicas, registry)
        self._assigned: Collection[int] | None = None
        self._addresses: Mapping[int, str] = {}
        self._directory: Directory | None = None
        self._changed = asyncio.Event()

    def assign(self, partitions: Collection[int] | None, addresses: Mapping[int, str]) -> None:
        """Keep the groups of these control partitions. `addresses` has the URL of the process of each partition."""
        self._assigned, self._addresses = partitions, addresses
        self._changed.set()

    def deliver(self, partition: int, records: list[Record]) -> None:
        replica = self.replicas.get(partition)
        if replica is not None:
            replica.log.deliver(records)

    def find(self, group: str) -> Replica | None:
        return next((replica for replica in self.replicas.values() if replica.group == group), None)

    def groups(self) -> Mapping[str, str]:
        """Return all placed groups, each with the address of its process; empty if that is this one or unknown."""
        placed = {} if self._directory is None else self._directory.groups.partitions
        own = self._assigned or ()
        return {name: "" if at in own else self._addresses.get(at, "") for name, at in sorted(placed.items())}

    def why_not_ready(self) -> str | None:
        """Return why not every group of this process can be queried, or None."""
        if self._assigned is None:
            return "Faust has assigned no partitions to this process yet"
        problems = [f"{one.group}: {one.problem}" for one in self.replicas.values() if one.problem is not None]
        return "; ".join(problems) or None

    async def run(self, log: Log, directory: Directory) -> None:
        """Follow the assigned groups until cancelled. Raises LogError if the directory fails."""
        self._directory = directory
        directory.on_change = self._changed.set
        running: dict[int, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(directory.run())
            while True:
                self._changed.clear()
                for partition, replica in list(self.replicas.items()):
                    if partition not in (self._assigned or ()) or directory.group_in(partition) != replica.group:
                        running.pop(partition).cancel()
                        del self.replicas[partition]
                for partition in self._assigned or ():
                    group = directory.group_in(partition)
                    if group is not None and partition not in self.replicas:
                        replica = Replica(log, group, partition, self._custom, self._metrics)
                        self.replicas[partition] = replica
                        running[partition] = tasks.create_task(replica.run(), name=f"replica of {group}")
                await self._changed.wait()
