"""Statistics of a shadow's evaluations, per pool and as one line of text."""

from bisect import bisect_left
from collections import Counter, deque
from dataclasses import dataclass, field

from forebay.events.shadow import DecisionShadowed

REGRET_BUCKETS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0)  # blocks
NEWEST = 10_000  # newest regrets, of which the 99th percentile is computed exactly


@dataclass(slots=True)
class PoolStatistics:
    """Statistics of one pool.

    Regret is the cost of the recorded selection minus the cost of the shadow's selection, in blocks, by the shadow's
    cost function. Overlap counts device blocks of the selected rank. `forebay.live.shadow.metrics` explains the counts.

    Attributes:
        failures: Number of decisions for which the shadow selected no rank, by reason.
        excess_blocks: Sum of the negative regrets, as a positive number. A shadow that does not always select the
            cheapest rank has such decisions.
        buckets: Number of regrets per bucket of `REGRET_BUCKETS`, and above the last bound.
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


class ShadowStatistics:
    def __init__(self) -> None:
        self.pools: dict[str, PoolStatistics] = {}
        self._newest: deque[float] = deque(maxlen=NEWEST)

    def add(self, event: DecisionShadowed) -> None:
        pool = self.pools.get(event.pool)
        if pool is None:
            pool = self.pools[event.pool] = PoolStatistics()
        pool.add(event)
        if event.regret_blocks is not None:
            self._newest.append(event.regret_blocks)

    @property
    def decisions(self) -> int:
        return sum(pool.decisions for pool in self.pools.values())

    def __str__(self) -> str:
        pools = self.pools.values()
        decisions = self.decisions
        if not decisions:
            return "no decisions yet"
        agreement = sum(pool.agreements for pool in pools) / decisions
        compared = sum(pool.compared for pool in pools)
        regret = sum(pool.regret_blocks - pool.excess_blocks for pool in pools) / compared if compared else 0.0
        newest = sorted(self._newest)
        p99 = newest[(len(newest) - 1) * 99 // 100] if newest else 0.0
        won, lost = sum(pool.overlap_blocks_won for pool in pools), sum(pool.overlap_blocks_lost for pool in pools)
        parts = [
            f"{decisions} decisions, {agreement:.1%} agree",
            f"regret mean {regret:.2f} p99 {p99:.2f} blocks",
            f"overlap won {won} lost {lost} blocks",
        ]
        held, incomparable = sum(pool.held for pool in pools), sum(pool.incomparable for pool in pools)
        failures = sum((pool.failures for pool in pools), Counter[str]())
        parts += [f"{held} would wait"] if held else []
        parts += [f"{incomparable} not comparable"] if incomparable else []
        parts += [f"{count} failed ({reason})" for reason, count in sorted(failures.items())]
        return ", ".join(parts)
