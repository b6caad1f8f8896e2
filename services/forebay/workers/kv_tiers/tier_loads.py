"""Load blocks from the tiers of one rank into device memory."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from forebay import runtime
from forebay.events.kv import LowerTier
from forebay.events.progress import OnboardedTokens
from forebay.kv_tiers.costs import CostModel
from forebay.kv_tiers.manager import Loading, TierManager, TierRun
from forebay.workers.kv_tiers.identity import BlockName
from forebay.workers.kv_tiers.rank_places import SUSPENDED, RankPlaces
from forebay.workers.kv_tiers.transfer_lanes import Lane, TransferLanes

LOADS_MAX = 256  # requests that load at the same time, as many as engines usually run

LANES: dict[LowerTier, Lane] = {"host": "host-read", "disk": "disk-read", "store": "store-read"}


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load.

    Attributes:
        blocks: number of leading blocks that were loaded. The memory of later blocks has undefined content.
        bytes: bytes of these blocks.
        us: microseconds from the call of `load` to the end of the last transfer.
        us_by_tier: microseconds from the call of `load` to the end of the transfer from each of these tiers.
    """

    blocks: int
    bytes: int
    us: int
    by_tier: dict[LowerTier, int]
    us_by_tier: dict[LowerTier, int]

    def onboarded(self, block_size: int) -> tuple[OnboardedTokens, ...]:
        """Return the tokens that were loaded, by tier.

        Args:
            block_size: tokens per block.
        """
        return tuple(
            OnboardedTokens(tier=tier, tokens=blocks * block_size, us=self.us_by_tier[tier])
            for tier, blocks in self.by_tier.items()
        )


@dataclass(slots=True)
class _Load:
    """A load in flight.

    Attributes:
        reasons: result of each block: an empty text, or why it was not loaded.
        pending: tiers whose transfer has not ended.
        us_by_tier: duration of the transfers that have ended.
    """

    done: Callable[[LoadResult], None]
    began_s: float
    reasons: list[str]
    tiers: list[LowerTier]
    pending: int
    us_by_tier: dict[LowerTier, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Part:
    """The blocks of a load that are in one tier.

    Attributes:
        places: index of each block in the load.
        slots: their slots in host memory, if that is the tier.
    """

    tier: LowerTier
    places: list[int]
    names: list[BlockName]
    into: list[memoryview]
    slots: list[int]


class TierLoads:
    """Loads of one rank. The tiers of a load are read at the same time, each by one call.

    Args:
        manager: decides which blocks are where.
        block_size: tokens per block.
        read_s: seconds after which a load from disk or store ends, including the time in which it waits for a thread.
    """

    def __init__(
        self,
        manager: TierManager[BlockName],
        places: RankPlaces,
        lanes: TransferLanes,
        costs: CostModel,
        *,
        block_size: int,
        read_s: float,
    ) -> None:
        self.in_flight = 0
        self._manager = manager
        self._places = places
        self._lanes = lanes
        self._costs = costs
        self._block_size = block_size
        self._read_s = read_s

    @property
    def full(self) -> bool:
        """Return whether no further load may begin."""
        return self.in_flight >= LOADS_MAX

    def begin(
        self,
        names: Sequence[BlockName],
        begin: int,
        runs: Sequence[TierRun],
        into: Sequence[memoryview],
        done: Callable[[LoadResult], None],
    ) -> None:
        """Begin a load. See `RankTiers.load`."""
        loadings = self._manager.load(names, begin, runs)
        tiers = [one.tier for one in loadings for _ in one.keys]
        load = _Load(done, runtime.monotonic_s(), [SUSPENDED] * len(tiers), tiers, len(set(tiers)))
        self.in_flight += 1
        if not loadings:
            self._lanes.defer(partial(self._finish, load))
        for tier in dict.fromkeys(tiers):
            places = [at for at, one in enumerate(tiers) if one == tier]
            found = [names[begin + at] for at in places]
            host = self._places.host
            slots = host.acquire(found) if tier == "host" and host is not None else []
            part = _Part(tier, places, found, [into[at] for at in places], slots)
            own = [one for one in loadings if one.tier == tier]
            work = partial(self._read, load, part)
            then = partial(self._ended, load, part, own)
            self._lanes.submit(LANES[tier], work, then, (["failed"] * len(places), load.began_s))

    def _read(self, load: _Load, part: _Part) -> tuple[list[str], float]:
        """Read blocks, on a thread of a lane. Return their results and the time of the end."""
        host = self._places.host
        if part.tier == "host":
            assert host is not None
            for slot, memory in zip(part.slots, part.into, strict=True):
                host.copy_out(slot, memory)
            return [""] * len(part.names), runtime.monotonic_s()
        left_s = self._read_s - (runtime.monotonic_s() - load.began_s)
        if self._places.reads[part.tier].suspended():
            reasons = [SUSPENDED] * len(part.names)
        elif left_s <= 0:
            reasons = ["deadline"] * len(part.names)
        else:
            reasons = self._places.stores[part.tier].read(part.names, part.into, left_s)
        return reasons, runtime.monotonic_s()

    def _ended(
        self, load: _Load, part: _Part, loadings: list[Loading[BlockName]], result: tuple[list[str], float]
    ) -> None:
        reasons, ended_s = result
        us = max(1, round((ended_s - load.began_s) * 1e6))
        if self._places.host is not None:
            self._places.host.release(part.slots)
        gone = set(self._places.observe_read(part.tier, part.names, reasons))
        for one in loadings:
            self._manager.loaded(one.number, gone.intersection(one.keys))
        if not any(reasons):
            self._costs.observe_load(part.tier, len(reasons), us)
        counters = self._places.counters
        counters.loads[part.tier] += 1
        counters.load_us[part.tier] += us
        for at, reason in zip(part.places, reasons, strict=True):
            load.reasons[at] = reason
        load.us_by_tier[part.tier] = us
        load.pending -= 1
        if not load.pending:
            self._finish(load)

    def _finish(self, load: _Load) -> None:
        self.in_flight -= 1
        blocks = next((at for at, reason in enumerate(load.reasons) if reason), len(load.reasons))
        by_tier = Counter(load.tiers[:blocks])
        counters = self._places.counters
        counters.matched_tokens += blocks * self._block_size
        for tier, count in by_tier.items():
            counters.onboarded_blocks[tier] += count
            counters.onboarded_bytes[tier] += count * self._places.block_bytes
        us_by_tier = {tier: load.us_by_tier[tier] for tier in by_tier}
        us = max(us_by_tier.values(), default=0)
        load.done(LoadResult(blocks, blocks * self._places.block_bytes, us, dict(by_tier), us_by_tier))
