"""Look up the control partition of a group, by following the topic `groups`.

Each record of this topic is a placement: it assigns a control partition to a group.
"""

from collections.abc import Callable

from forebay.core.state.groups import Groups
from forebay.events.codec import decode
from forebay.events.topics import GROUPS
from forebay.transport.base import Log, Record
from forebay.transport.follower import Follower

PARTITION = 0  # of the topic `groups`: there is one directory


def apply_placement(groups: Groups, record: Record) -> None:
    """Apply a record of the topic `groups`. Raises DecodeError if it is neither a placement nor a removal."""
    if record.value:
        groups.apply(decode(GROUPS, record.value))
    else:
        groups.remove((record.key or b"").decode(errors="replace"))


class Directory(Follower):
    """Control partitions of all groups. Each lookup first reads new records; `run` reads them continuously."""

    def __init__(self, log: Log) -> None:
        super().__init__(log, GROUPS)
        self.on_change: Callable[[], None] | None = None
        self.groups = Groups()

    async def start(self) -> None:
        """Read all existing placements. Raises LogError."""
        await self.read_all(PARTITION)

    def partition_of(self, group: str) -> int | None:
        """Return the current control partition of a group. Raises LogError."""
        self.read_ready()
        return self.groups.partitions.get(group)

    def group_in(self, partition: int) -> str | None:
        """Return the group to which a control partition is assigned. Raises LogError."""
        self.read_ready()
        return self.groups.group_in(partition)

    async def placed(self, group: str) -> int:
        """Wait until a group has a control partition, and return the partition. Raises LogError."""
        self.read_ready()
        await self.wait_until(lambda: group in self.groups.partitions)
        return self.groups.partitions[group]

    def apply(self, record: Record) -> None:
        apply_placement(self.groups, record)
        if self.on_change is not None:
            self.on_change()
