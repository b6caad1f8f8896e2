"""Topic `metrics`: reports of engines. The newest of each type replaces earlier ones of its (worker, rank)."""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Event, Part
from forebay.events.kv import LowerTier
from forebay.events.privacy import SystemName


class LoadReported(Event, tag="load.reported", frozen=True, kw_only=True):
    """Number of requests and use of the cache of one rank, reported at most ten times a second."""

    worker_id: SystemName
    worker_epoch: Count
    running: Count
    waiting: Count
    kv_blocks_used: Count
    kv_blocks_total: Count
    rank: Count = 0
    at_us: int = 0


# Without an upper limit, the cost of a rank might become infinite. A year is more than any transfer takes.
Microseconds = Annotated[float, msgspec.Meta(ge=0.0, le=3.2e13)]
TIERS_MAX = 3  # one per value of `LowerTier`


class TierCost(Part, frozen=True, kw_only=True):
    """Measured duration of loads from one tier: `fixed_us` plus `block_us` per block.

    Attributes:
        tier: tier from which blocks are loaded into device memory.
        fixed_us: duration of a load apart from its blocks, in microseconds.
        block_us: additional duration per block, in microseconds.
    """

    tier: LowerTier
    fixed_us: Microseconds
    block_us: Microseconds


class TierCosts(Part, frozen=True, kw_only=True):
    """Measured durations of one rank: to load blocks from its tiers, and to compute them.

    Attributes:
        prefill_block_us: duration of computing one block of a prompt, in microseconds; 0 if not measured yet.
        tiers: durations of loads, at most one entry per tier; tiers without measurements are absent.
    """

    prefill_block_us: Microseconds
    tiers: Annotated[tuple[TierCost, ...], msgspec.Meta(max_length=TIERS_MAX)] = ()


class TierCostsMeasured(Event, tag="metrics.tier_costs", frozen=True, kw_only=True):
    """Measured costs of loading and computing blocks at one rank.

    Attributes:
        costs: measured durations.
    """

    worker_id: SystemName
    worker_epoch: Count
    costs: TierCosts
    rank: Count = 0
    at_us: int = 0


MetricEvent = LoadReported | TierCostsMeasured
