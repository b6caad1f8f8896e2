"""Load of one worker rank, and what the costs of its candidates need to know about its cache."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from forebay.events.fleet import WorkerSpec
from forebay.events.kv import LowerTier
from forebay.events.metrics import TierCosts
from forebay.events.snapshots import Reported

TURNOVER_STEPS = 4  # a rank remembers when it was sent each quarter of its cache; finer steps change selections little
TIGHT_SHARE = 4  # a cache with less than a quarter free is tight; lower would make more decisions look at every cache
UNKNOWN_BLOCKS = 1 << 62  # more than any cache has
BLOCK_UNITS = 1 << 16  # per block; finer than any difference that matters to a cost

# Blocks that could be computed in the fixed duration of a load, and in the duration per loaded block.
TierRates = Mapping[LowerTier, tuple[float, float]]

NO_RATES: TierRates = {}
LOWER_TIERS: tuple[LowerTier | None, ...] = (None, "host", "disk")


class LoadColumns:
    """What costs read of the loads of all ranks, as one array per number, so that numpy computes all costs at once.

    Each rank has a slot, its position in the arrays, until it leaves. The names are those of `RankLoad`, except that
    `lower_tier` is a position in `LOWER_TIERS`, and `began_us` is the oldest time of `turnover_us`. Token and block
    counts are far below 2**53, so that they are exact as floats.
    """

    prefill_tokens: NDArray[np.float64]
    decode_blocks: NDArray[np.float64]
    active_requests: NDArray[np.int64]
    computed_tokens: NDArray[np.int64]
    waiting: NDArray[np.int64]
    cached_blocks: NDArray[np.int64]
    free_blocks: NDArray[np.int64]
    lower_tier: NDArray[np.int64]
    began_us: NDArray[np.int64]

    def __init__(self) -> None:
        self._free: list[int] = []
        for name in self.__annotations__:
            setattr(self, name, np.zeros(0, np.float64 if name in ("prefill_tokens", "decode_blocks") else np.int64))

    def take_slot(self) -> int:
        """Return the lowest free slot."""
        if not self._free:
            size = len(self.began_us)
            self._free = list(range(size, 2 * size + 8))
            for name in self.__annotations__:
                setattr(self, name, np.resize(getattr(self, name), 2 * size + 8))
        return heappop(self._free)

    def free_slot(self, slot: int) -> None:
        heappush(self._free, slot)


@dataclass(slots=True, eq=False)
class RankLoad:
    """Current load of one worker rank.

    Only `FleetLoad` changes it. The router may keep the object and read it at any time.

    Attributes:
        prefill_tokens: uncached prompt tokens of requests without a first token.
        decode_blocks: KV blocks of booked requests; blocks that several requests share count once.
        computed_tokens: uncached prompt tokens sent to the rank since it joined, plus the lowest total of any rank at
            that time.
        cached_blocks: blocks on the device by the KV events of the rank; a copy from the prefix index.
        next_tier: highest tier below the device in which the rank has blocks; None for none; likewise.
        kv_blocks: KV blocks of the rank; `UNKNOWN_BLOCKS` if its worker sends no KV events.
        free_blocks: blocks of the device that have no content, by the KV events. `UNKNOWN_BLOCKS` if the rank has more
            cached blocks than `kv_blocks`, because then this number cannot be right.
        turnover_us: when the rank was sent each of the last five quarters of its cache to compute, oldest first, or
            when it joined.
        reported: last load report of the rank; None before the first, like `costs`.
        rates: `costs` relative to the cost of computing a block.
        units: `decode_blocks` as an exact integer, in units of 1/65536 block.
        salt: factor by which equal sums of different ranks differ in the digest.
        slot: position of the rank in `columns`, which have a copy of what costs read.
    """

    worker_id: str
    rank: int
    block_size: int
    prefill_tokens: int = 0
    active_requests: int = 0
    decode_blocks: float = 0.0
    computed_tokens: int = 0
    cached_blocks: int = 0
    next_tier: LowerTier | None = None
    kv_blocks: int = UNKNOWN_BLOCKS
    free_blocks: int = field(init=False)
    turnover_us: tuple[int, ...] = (0,)
    turnover_term: int = 0
    reported: Reported | None = None
    reported_term: int = 0
    costs: TierCosts | None = None
    rates: TierRates = field(default_factory=lambda: NO_RATES)
    units: int = 0
    salt: int = field(init=False)
    columns: LoadColumns = field(init=False)
    slot: int = field(init=False)

    @property
    def turnovers(self) -> int:
        """Number of quarters of its cache that the rank was sent to compute."""
        return self.computed_tokens * TURNOVER_STEPS // (self.kv_blocks * self.block_size)

    @property
    def waiting(self) -> int:
        """Requests queued in the engine by its last report, at most the booked requests; 0 without a report."""
        return 0 if self.reported is None else min(self.reported.waiting, self.active_requests)

    def __post_init__(self) -> None:
        self.free_blocks = self.kv_blocks
        self.salt = xxh3_64_intdigest(f"{self.worker_id}\0{self.rank}".encode()) | 1

    def enter(self, columns: LoadColumns) -> None:
        """Take a slot in `columns`, and copy the load there."""
        self.columns, self.slot = columns, columns.take_slot()
        self.publish()

    def publish(self) -> None:
        """Copy what costs read to the columns. Every method of `FleetLoad` that changes the load must call this."""
        columns, slot = self.columns, self.slot
        columns.prefill_tokens[slot] = self.prefill_tokens
        columns.decode_blocks[slot] = self.decode_blocks
        columns.active_requests[slot] = self.active_requests
        columns.computed_tokens[slot] = self.computed_tokens
        columns.waiting[slot] = self.waiting
        columns.cached_blocks[slot] = self.cached_blocks
        columns.free_blocks[slot] = self.free_blocks
        columns.lower_tier[slot] = LOWER_TIERS.index(self.next_tier)
        columns.began_us[slot] = self.turnover_us[0]


def kv_blocks_of(spec: WorkerSpec) -> int:
    """Return the KV blocks of each rank of a worker; `UNKNOWN_BLOCKS` if the worker sends no KV events."""
    return spec.kv_blocks_total if spec.kv_events else UNKNOWN_BLOCKS


def rates_of(costs: TierCosts) -> TierRates:
    """Return the rates of each measured tier; nothing while the cost of computing a block is unknown."""
    computed_us = costs.prefill_block_us
    if not computed_us:
        return NO_RATES
    return {one.tier: (one.fixed_us / computed_us, one.block_us / computed_us) for one in costs.tiers}


def credit_blocks(rates: TierRates, tier: LowerTier, blocks: float, weight: float) -> float:
    """Return how many blocks of computation it saves to load blocks from a tier, at least 0.

    `weight` is the number of blocks saved per loaded block if the tier has not been measured.
    """
    rate = rates.get(tier)
    if rate is None:
        return weight * blocks
    fixed, each = rate
    saved = blocks - (fixed + blocks * each)
    return saved if saved > 0.0 else 0.0
