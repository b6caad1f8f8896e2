"""Tiers of all workers of a simulation: one shared store per model, host memory and a disk per rank."""

from collections import Counter
from collections.abc import Callable, Sequence

from forebay.engine_model.model import EngineConfig
from forebay.kv_tiers.manager import LowerTier
from forebay.simulate.outcome import TierTraffic
from forebay.simulate.tiers.link import Scheduler, SharedLink
from forebay.simulate.tiers.rank_tiers import SharedStore, SimulatedTiers, TierPlan
from forebay.simulate.tiers.settings import BYTES_PER_US, FleetTiers, TierModel


class TierFleet:
    """Builds the tiers of ranks. `reports_costs` says whether the router uses measured costs."""

    def __init__(self, scheduler: Scheduler, *, reports_costs: bool) -> None:
        self._reports_costs = reports_costs
        self._scheduler = scheduler
        self._stores: dict[str, tuple[SharedStore, SharedLink]] = {}

    def build(
        self,
        tiers: FleetTiers,
        model: str,
        config: EngineConfig,
        block_bytes: int,
        on_changed: Callable[[bool], object],
    ) -> SimulatedTiers | None:
        """Return the tiers of a new rank; None if it has none. All ranks that serve the same model share one store."""
        limits = tiers.limits(block_bytes)
        links: dict[LowerTier, SharedLink] = {}
        store: SharedStore | None = None
        if limits.host is not None and tiers.host is not None:
            links["host"] = self._link(tiers.host)
        if limits.disk is not None and tiers.disk is not None:
            links["disk"] = self._link(tiers.disk)
        if limits.store is not None and tiers.store is not None:
            if model not in self._stores:
                self._stores[model] = SharedStore(limits.store.blocks), self._link(tiers.store)
            store, links["store"] = self._stores[model]
        if not links:
            return None
        plan = TierPlan(limits, links, store, block_bytes, self._reports_costs)
        return SimulatedTiers(plan, config, self._scheduler, on_changed)

    def _link(self, tier: TierModel) -> SharedLink:
        return SharedLink(tier.bandwidth * BYTES_PER_US, tier.latency_us, self._scheduler)


def store_name(tiers: FleetTiers, model: str) -> str:
    """Return the name of the shared store of a model (`WorkerSpec.kv_store`); empty if there is none."""
    return f"store of {model}" if tiers.store is not None and tiers.store.blocks(1) else ""


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
