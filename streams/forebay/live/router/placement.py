"""Gives groups their partitions: a lease that names a group without a place is what asks for one.

Run by whoever is assigned control partition 0, and by nobody else. Two of them at once, one paused and replaced,
do no harm: readers follow the first placement (see `forebay.core.state.groups`).
"""

import asyncio
import logging
import time

from forebay.events.codec import encode
from forebay.events.groups import GroupPlaced
from forebay.events.names import NameInvalid, require_name
from forebay.events.topics import GROUPS
from forebay.transport.base import Draft, LeaseError, Leases, Log
from forebay.transport.directory import PARTITION, Directory

logger = logging.getLogger(__name__)


class Placement:
    """Places groups in control partitions 0 to `partitions` - 1, one group in each.

    `refused` counts the groups that found no free partition or have a name that cannot be used; each is named once in
    the log of this process.
    """

    def __init__(self, log: Log, leases: Leases, directory: Directory, partitions: int) -> None:
        self._log = log
        self._leases = leases
        self._directory = directory
        self._partitions = partitions
        self._told: set[str] = set()
        self._readable = True
        self.refused = 0

    async def update(self) -> None:
        """Look at the leases once, and give each group a place that has none. Raises LogError."""
        try:
            groups = await asyncio.to_thread(self._leases.groups)
        except LeaseError as error:
            if self._readable:
                logger.warning("the groups that have leases cannot be read, trying again: %s", error)
            self._readable = False
            return
        self._readable = True
        for group in groups:
            if self._directory.partition_of(group) is not None:
                continue
            try:
                # Once placed, a group has its partition for ever.
                require_name("model", group)
            except NameInvalid as error:
                self._refuse(group, f"a lease asks for a group without a place: {error}")
                continue
            partition = self._directory.groups.lowest_free(self._partitions)
            if partition is None:
                taken = f"{self._partitions} control partitions have a group each; raise the partition count"
                self._refuse(group, f"the group {group} finds no place: {taken}")
                continue
            placed = GroupPlaced(group=group, partition=partition, at_us=time.time_ns() // 1000)
            draft = Draft(GROUPS.name, PARTITION, encode(GROUPS, placed), group.encode())
            (offset,) = await self._log.append([draft])
            await self._directory.reach(offset + 1)
            logger.info("the group %s lives in partition %s", group, self._directory.partition_of(group))

    def _refuse(self, group: str, why: str) -> None:
        if group not in self._told:
            self._told.add(group)
            self.refused += 1
            logger.error("%s", why)
