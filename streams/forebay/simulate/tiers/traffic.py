"""Totals of what the tiers of a simulation have loaded, written and skipped."""

from collections import Counter
from collections.abc import Sequence

from forebay.simulate.outcome import TierTraffic
from forebay.simulate.tiers.rank_tiers import SimulatedTiers


def tier_traffic(tiers: Sequence[SimulatedTiers]) -> TierTraffic | None:
    """Return the totals over all ranks; None if no rank has tiers."""
    if not tiers:
        return None
    loaded, written, skipped = Counter[str](), Counter[str](), Counter[str]()
    for one in tiers:
        loaded += one.loaded_blocks
        written += one.written_blocks
        skipped += one.counters
    return TierTraffic(dict(sorted(loaded.items())), dict(sorted(written.items())), dict(sorted(skipped.items())))
