"""Control partition of each group, built from the topic `groups`. Readers use it to address the topics of a group.

The first placement of a group is valid, and a partition keeps its first group until an operator removes it. So all
readers get the same result, even if two writers contradict each other during a takeover.
"""

from collections import Counter

from forebay.events.groups import GroupPlaced


class Groups:
    """Map from each group to its control partition. `ignored` counts placements without effect, by reason."""

    def __init__(self) -> None:
        self.partitions: dict[str, int] = {}
        self.ignored: Counter[str] = Counter()

    def apply(self, event: GroupPlaced) -> None:
        """Apply the next `GroupPlaced`. It has no effect if the group or the partition is already in use."""
        if event.group in self.partitions:
            if self.partitions[event.group] != event.partition:
                self.ignored["placed_elsewhere"] += 1
        elif event.partition in self.partitions.values():
            self.ignored["partition_taken"] += 1
        else:
            self.partitions[event.group] = event.partition

    def remove(self, group: str) -> None:
        """Free the partition of a group, if it has one."""
        self.partitions.pop(group, None)

    def refusal(self, group: str, partitions: int) -> str | None:
        """Return why a group gets none of the partitions 0 to `partitions` - 1, None if it has one or can get one."""
        if group in self.partitions or self.lowest_free(partitions) is not None:
            return None
        # More control partitions would change the slots of every model while their workers run.
        return (
            f"the model {group} gets no control partition, because all {partitions} of this namespace belong to other"
            f" models: {', '.join(sorted(self.partitions))}; free one with `forebay model remove NAME`, or serve the"
            " model in another --namespace"
        )

    def group_in(self, partition: int) -> str | None:
        """Return the group that uses a control partition, or None if the partition is free."""
        return next((group for group, taken in self.partitions.items() if taken == partition), None)

    def lowest_free(self, partitions: int) -> int | None:
        """Return the lowest of the partitions 0 to `partitions` - 1 that no group uses, or None if all are in use."""
        taken = set(self.partitions.values())
        return next((number for number in range(partitions) if number not in taken), None)
