"""The fold of placements."""

from forebay.core.state.groups import Groups
from forebay.events.groups import GroupPlaced


def folded(*placed: tuple[str, int]) -> Groups:
    groups = Groups()
    for group, partition in placed:
        groups.apply(GroupPlaced(group=group, partition=partition))
    return groups


def test_the_first_placement_stands_and_no_partition_has_two_groups() -> None:
    groups = folded(("a", 0), ("b", 2), ("a", 1), ("c", 2), ("a", 0), ("d", 1))
    assert groups.partitions == {"a": 0, "b": 2, "d": 1}
    assert [groups.group_in(partition) for partition in range(4)] == ["a", "d", "b", None]
    assert groups.ignored == {"placed_elsewhere": 1, "partition_taken": 1}


def test_the_lowest_free_partition() -> None:
    groups = folded(("a", 0), ("b", 2))
    assert groups.lowest_free(4) == 1
    assert folded(("a", 0), ("b", 1)).lowest_free(2) is None
