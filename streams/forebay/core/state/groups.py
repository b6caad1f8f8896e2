"""Control partition of each group: a fold over the topic `groups`, used to address partitions.

The first placement of a group wins, and a partition keeps its first group. So if a replaced writer and its successor
contradict each other, every reader still gets the same result.
"""

from collections import Counter

from forebay.events.groups import GroupPlaced


class Groups:
    """Partition of each group.

    Attributes:
        partitions: control partition by group.
        ignored: number of placements without effect, by reason.
    """

    def __init__(self) -> None:
        self.partitions: dict[str, int] = {}
        self.ignored: Counter[str] = Counter()

    def apply(self, event: GroupPlaced) -> None:
        """Apply the next placement."""
        if event.group in self.partitions:
            if self.partitions[event.group] != event.partition:
                self.ignored["placed_elsewhere"] += 1
        elif event.partition in self.partitions.values():
            self.ignored["partition_taken"] += 1
        else:
            self.partitions[event.group] = event.partition

    def group_in(self, partition: int) -> str | None:
        """Return the group in a partition, or None."""
        return next((group for group, taken in self.partitions.items() if taken == partition), None)

    def lowest_free(self, partitions: int) -> int | None:
        """Return the lowest partition below `partitions` without a group, or None if all are taken."""
        taken = set(self.partitions.values())
        return next((number for number in range(partitions) if number not in taken), None)
