"""Measured cost of loading blocks from a tier, relative to the cost of computing them."""

from collections.abc import Mapping

from forebay.events.kv import LowerTier
from forebay.events.metrics import TierCosts

# Blocks that could be computed in the fixed duration of a load, and in the duration per loaded block.
TierRates = Mapping[LowerTier, tuple[float, float]]

NO_RATES: TierRates = {}


def rates_of(costs: TierCosts) -> TierRates:
    """Return the rates of each measured tier; nothing while the cost of computing a block is unknown."""
    computed_us = costs.prefill_block_us
    if not computed_us:
        return NO_RATES
    return {one.tier: (one.fixed_us / computed_us, one.block_us / computed_us) for one in costs.tiers}


def credit_blocks(rates: TierRates, tier: LowerTier, blocks: float, weight: float) -> float:
    """Return how many blocks of computation it saves to load blocks from a tier, at least 0.

    Args:
        blocks: number of blocks to load, above 0.
        weight: blocks saved per loaded block if the tier has not been measured.
    """
    rate = rates.get(tier)
    if rate is None:
        return weight * blocks
    fixed, each = rate
    saved = blocks - (fixed + blocks * each)
    return saved if saved > 0.0 else 0.0
