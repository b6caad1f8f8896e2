"""Add up the totals of a comparison: per world, per time interval, and over the requests that both worlds routed.

Memory is bounded by the fleet, the resolution of a chart and the active requests. Only queueing times are kept per
request, eight bytes each.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field
from heapq import heappush, heappushpop

from forebay.core.state.holder_bits import HolderKey
from forebay.events.decisions import CostTerms
from forebay.replay.diff.report import (
    Interval,
    MovedRequest,
    OverlapChange,
    RankComparison,
    RankRouting,
    TierBlocks,
    WorldSummary,
)

INTERVALS_MAX = 120  # points that a chart can resolve
INTERVAL_FIRST_US = 10_000
TIERS = ("device", "host", "disk", "store")
MOST = 20  # moved requests in the report


@dataclass(slots=True)
class WorldTally:
    summary: WorldSummary = field(default_factory=WorldSummary)
    waits_us: "array[int]" = field(default_factory=lambda: array("q"))
    ranks: dict[HolderKey, RankRouting] = field(default_factory=dict)

    def route(self, key: HolderKey, terms: CostTerms, prompt_tokens: int, cached_tokens: int) -> None:
        summary, overlap = self.summary, self.summary.overlap
        summary.routed += 1
        summary.prompt_tokens += prompt_tokens
        summary.cached_tokens += cached_tokens
        for tier in TIERS:
            setattr(overlap, tier, getattr(overlap, tier) + getattr(terms, f"{tier}_overlap"))
        load = self.ranks.setdefault(key, RankRouting())
        load.requests += 1
        load.computed_tokens += prompt_tokens - cached_tokens

    def side(self, keys: list[HolderKey], still_held: int, landed: float | None) -> WorldSummary:
        """Return the summary of the world. `keys` are all ranks that existed at any time."""
        summary = self.summary
        loads = [self.ranks[key].computed_tokens if key in self.ranks else 0 for key in keys]
        summary.still_held, summary.landed = still_held, landed
        summary.rejected, summary.aborted = (
            dict(sorted(counts.items())) for counts in (summary.rejected, summary.aborted)
        )
        summary.reuse = summary.cached_tokens / summary.prompt_tokens if summary.prompt_tokens else 0.0
        summary.max_over_mean = max_over_mean(loads) or 0.0
        summary.wait_ms = _distribution(self.waits_us)
        return summary


@dataclass(slots=True)
class _Stretch:
    prompt_tokens: list[int] = field(default_factory=lambda: [0, 0])
    cached_tokens: list[int] = field(default_factory=lambda: [0, 0])
    computed: tuple[Counter[HolderKey], Counter[HolderKey]] = field(default_factory=lambda: (Counter(), Counter()))

    def add(self, other: "_Stretch") -> None:
        for world in (0, 1):
            self.prompt_tokens[world] += other.prompt_tokens[world]
            self.cached_tokens[world] += other.cached_tokens[world]
            self.computed[world].update(other.computed[world])


class Series:
    """Totals over time. World 0 is history, world 1 the alternative.

    When there are more than `INTERVALS_MAX` intervals, their length doubles.
    """

    def __init__(self, start_us: int) -> None:
        self.start_us = start_us
        self.width_us = INTERVAL_FIRST_US
        self._stretches: list[_Stretch] = []

    def route(self, world: int, at_us: int, key: HolderKey, prompt_tokens: int, cached_tokens: int) -> None:
        stretch = self._at(at_us)
        stretch.prompt_tokens[world] += prompt_tokens
        stretch.cached_tokens[world] += cached_tokens
        stretch.computed[world][key] += prompt_tokens - cached_tokens

    def intervals(self, keys: list[HolderKey]) -> list[Interval]:
        """Return one entry per interval. `keys` are all ranks that existed at any time."""
        return [
            Interval(
                after_s=number * self.width_us / 1e6,
                reuse=_share(one.cached_tokens[0], one.prompt_tokens[0]),
                other_reuse=_share(one.cached_tokens[1], one.prompt_tokens[1]),
                max_over_mean=max_over_mean([one.computed[0][key] for key in keys]),
                other_max_over_mean=max_over_mean([one.computed[1][key] for key in keys]),
            )
            for number, one in enumerate(self._stretches)
        ]

    def _at(self, at_us: int) -> _Stretch:
        while (number := (at_us - self.start_us) // self.width_us) >= INTERVALS_MAX:
            self.width_us *= 2
            pairs = zip(self._stretches[::2], [*self._stretches[1::2], _Stretch()], strict=False)
            joined = []
            for one, other in pairs:
                one.add(other)
                joined.append(one)
            self._stretches = joined
        while len(self._stretches) <= number:
            self._stretches.append(_Stretch())
        return self._stretches[number]


class PairTally:
    """Compared requests: their overlaps in both worlds, and the moved requests with the largest change."""

    def __init__(self) -> None:
        self.won = TierBlocks()
        self.lost = TierBlocks()
        self.later = 0
        self.later_won = 0
        self._most: list[tuple[int, int, MovedRequest]] = []
        self._seen = 0

    def add(self, history: CostTerms, other: CostTerms, *, later: bool) -> None:
        if later:
            self.later += 1
            self.later_won += max(0, blocks_of(other) - blocks_of(history))
        for tier in TIERS:
            gain = getattr(other, f"{tier}_overlap") - getattr(history, f"{tier}_overlap")
            into = self.won if gain > 0 else self.lost
            setattr(into, tier, getattr(into, tier) + abs(gain))

    def move(self, moved: MovedRequest) -> None:
        self._seen += 1
        ranked = (abs(moved.gain), -self._seen, moved)
        if len(self._most) < MOST:
            heappush(self._most, ranked)
        else:
            heappushpop(self._most, ranked)

    def overlap(self) -> OverlapChange:
        return OverlapChange(won=self.won, lost=self.lost, later=self.later, later_won=self.later_won)

    def most(self) -> list[MovedRequest]:
        """Return the moved requests with the largest change of overlap, largest first, then in order of arrival."""
        return [moved for _, _, moved in sorted(self._most, key=lambda one: one[:2], reverse=True)]


def ranks(keys: list[HolderKey], history: WorldTally, other: WorldTally) -> list[RankComparison]:
    return [
        RankComparison(
            worker_id=worker_id,
            rank=rank,
            history=history.ranks.get((worker_id, rank), RankRouting()),
            alternative=other.ranks.get((worker_id, rank), RankRouting()),
        )
        for worker_id, rank in keys
    ]


def blocks_of(terms: CostTerms) -> int:
    return terms.device_overlap + terms.host_overlap + terms.disk_overlap + terms.store_overlap


def max_over_mean(loads: list[int]) -> float | None:
    """Return the maximum divided by the mean; None if all loads are zero."""
    total = sum(loads)
    return max(loads) * len(loads) / total if total else None


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def _distribution(waits_us: "array[int]") -> dict[str, float]:
    """Return mean and percentiles in milliseconds; empty if there are no values."""
    if not waits_us:
        return {}
    ordered = sorted(waits_us)
    last = len(ordered) - 1
    shares = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "max": 1.0}
    found = {name: ordered[round(last * share)] / 1e3 for name, share in shares.items()}
    return {"mean": sum(ordered) / len(ordered) / 1e3, **found}
