"""What came of a shadow's choices, in numbers, and in a line for people."""

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

from forebay.events.shadow import DecisionShadowed

REGRET_BUCKETS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)  # blocks
NEWEST = 10_000  # regrets of which the 99th percentile is: exact, and of what happens now


@dataclass(slots=True)
class PoolFigures:
    """The figures of one pool. Regret is in blocks, by the shadow's costs; overlap is on the chosen rank's device.

    Attributes:
        decisions: of history, that the shadow spoke of.
        agreements: where it chose the same rank.
        held: where it would have let the request wait.
        failures: where it had no choice, by reason.
        incomparable: where history's rank was none of its candidates.
        compared: where there is a regret.
        regret_blocks: what history's choices cost more.
        excess_blocks: what the shadow's own choices cost more: it does not always take the cheapest.
        overlap_blocks_won: blocks that it would have found more.
        overlap_blocks_lost: blocks that it would have found less.
        buckets: of the regrets, for each of `REGRET_BUCKETS` and above.
    """

    decisions: int = 0
    agreements: int = 0
    held: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    incomparable: int = 0
    compared: int = 0
    regret_blocks: float = 0.0
    excess_blocks: float = 0.0
    overlap_blocks_won: int = 0
    overlap_blocks_lost: int = 0
    buckets: list[int] = field(default_factory=lambda: [0] * (len(REGRET_BUCKETS) + 1))

    def add(self, event: DecisionShadowed) -> None:
        """Count one decision."""
        self.decisions += 1
        if event.failure:
            self.failures[event.failure.partition(":")[0]] += 1
            return
        self.agreements += event.agrees
        self.held += event.would_hold
        difference = event.shadow_overlap_blocks - event.overlap_blocks
        self.overlap_blocks_won += max(0, difference)
        self.overlap_blocks_lost += max(0, -difference)
        if event.regret_blocks is None:
            self.incomparable += 1
            return
        self.compared += 1
        regret = max(0.0, event.regret_blocks)
        self.regret_blocks += regret
        self.excess_blocks += max(0.0, -event.regret_blocks)
        self.buckets[bisect_left(REGRET_BUCKETS, regret)] += 1


class Figures:
    """The figures of a shadow, by pool."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolFigures] = {}
        self._newest: deque[float] = deque(maxlen=NEWEST)

    def add(self, event: DecisionShadowed) -> None:
        """Count one decision."""
        pool = self.pools.get(event.pool)
        if pool is None:
            pool = self.pools[event.pool] = PoolFigures()
        pool.add(event)
        if event.regret_blocks is not None:
            self._newest.append(event.regret_blocks)

    @property
    def decisions(self) -> int:
        """Decisions spoken of, in all pools."""
        return sum(pool.decisions for pool in self.pools.values())

    def __str__(self) -> str:
        pools = self.pools.values()
        decisions = self.decisions
        if not decisions:
            return "no decisions yet"
        agreed = sum(pool.agreements for pool in pools) / decisions
        compared = sum(pool.compared for pool in pools)
        regret = sum(pool.regret_blocks - pool.excess_blocks for pool in pools) / compared if compared else 0.0
        newest = sorted(self._newest)
        p99 = newest[(len(newest) - 1) * 99 // 100] if newest else 0.0
        won, lost = sum(pool.overlap_blocks_won for pool in pools), sum(pool.overlap_blocks_lost for pool in pools)
        said = [
            f"{decisions} decisions, {agreed:.1%} agree",
            f"regret mean {regret:.2f} p99 {p99:.2f} blocks",
            f"overlap won {won} lost {lost} blocks",
        ]
        held, incomparable = sum(pool.held for pool in pools), sum(pool.incomparable for pool in pools)
        failures = sum((pool.failures for pool in pools), Counter[str]())
        said += [f"{held} would wait"] if held else []
        said += [f"{incomparable} not comparable"] if incomparable else []
        said += [f"{count} failed ({reason})" for reason, count in sorted(failures.items())]
        return ", ".join(said)
