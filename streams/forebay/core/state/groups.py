"""Where each group lives: a fold over the topic `groups`, for whoever has to name a partition.

The first placement of a group stands, and the first group of a partition keeps it. So two writers, one of
which does not know yet that it was replaced, can contradict each other without any reader being misled.
"""

from collections import Counter

from forebay.events.groups import GroupPlaced


class Groups:
    """The partition of each group. `ignored` counts placements without effect, by reason."""

    def __init__(self) -> None:
        self.partitions: dict[str, int] = {}
        self.ignored: Counter[str] = Counter()

    def apply(self, event: GroupPlaced) -> None:
        """Fold the next placement."""
        if event.group in self.partitions:
            if self.partitions[event.group] != event.partition:
                self.ignored["placed_elsewhere"] += 1
        elif event.partition in self.partitions.values():
            self.ignored["partition_taken"] += 1
        else:
            self.partitions[event.group] = event.partition

    def group_in(self, partition: int) -> str | None:
        """The group that lives in a partition; None for none."""
        return next((group for group, taken in self.partitions.items() if taken == partition), None)

    def lowest_free(self, partitions: int) -> int | None:
        """The lowest partition below `partitions` that no group has; None when there is none."""
        taken = set(self.partitions.values())
        return next((number for number in range(partitions) if number not in taken), None)
