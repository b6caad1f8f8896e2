"""Count how often decisions change the sizes of pools, and how often they reverse a change."""

from collections.abc import Iterable
from dataclasses import dataclass

from forebay.core.scaling.state import PoolKey
from forebay.events.scaling import ScalingDecided


@dataclass(slots=True)
class SizeChanges:
    """Changes of sizes by a sequence of decisions.

    Attributes:
        reversals: changes in the opposite direction of the pool's previous change.
    """

    changes: int = 0
    reversals: int = 0


def size_changes(intervals: Iterable[Iterable[ScalingDecided]]) -> SizeChanges:
    """Count the changes of all pools.

    Args:
        intervals: decisions of each interval. Those of one interval continue each other, so they count as one.
    """
    found = SizeChanges()
    grew: dict[PoolKey, bool] = {}
    for decisions in intervals:
        first: dict[PoolKey, int] = {}
        last: dict[PoolKey, int] = {}
        for decided in decisions:
            for pool in decided.pools:
                key = (pool.group, pool.pool)
                first.setdefault(key, pool.from_size)
                last[key] = pool.to_size
        for key, size in last.items():
            if size == first[key]:
                continue
            found.changes += 1
            found.reversals += grew.get(key, size > first[key]) != (size > first[key])
            grew[key] = size > first[key]
    return found
