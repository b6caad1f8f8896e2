"""Changes of sizes and their reversals."""

from forebay.core.scaling.changes import SizeChanges, size_changes
from tests.core.scaling.records import decided


def test_decisions_of_one_interval_count_as_one_change() -> None:
    assert size_changes([[decided(0, 0, 1, 3), decided(0, 0, 3, 5), decided(0, 0, 5, 5)]]) == SizeChanges(1, 0)


def test_a_change_in_the_opposite_direction_is_a_reversal() -> None:
    sizes = [(1, 3), (3, 3), (3, 4), (4, 2), (2, 2), (2, 1), (1, 6)]
    assert size_changes([[decided(0, 0, *one)] for one in sizes]) == SizeChanges(5, 2)


def test_no_decision_is_no_change() -> None:
    assert size_changes([]) == SizeChanges(0, 0)
