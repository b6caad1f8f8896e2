"""Compute the cost of sending a request to each candidate, in KV blocks. The policy `kv` selects the lowest cost.

    cost = (prefill_load_scale * (max(prefill_blocks - credit, 0) + eviction) + decode_blocks
            + decode_active_request_weight * active_requests) * taint factor
    prefill_blocks = (prompt tokens of other requests to compute + prompt tokens of this request) / block size
    credit = overlap_score_credit / (1 + decay * excess) * device + host weight * host + disk weight * disk
             + shared weight * store

`device`, `host`, `disk` and `store` are the overlap in blocks. `excess` is how much more a candidate has to prefill
than the one with the least, in multiples of this prompt. Source: Dynamo's KV router, except `eviction` (`_evictions`).
Costs use only + - * / in the order written here, and decimal curves, so every machine gets the same bits.
"""

from collections.abc import Mapping, Sequence
from decimal import Context, Decimal
from functools import cached_property, lru_cache

import msgspec
import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64

from forebay.core.state.holder_bits import HolderBits, HolderKey, bits_of
from forebay.core.state.prefix_index import Overlap
from forebay.core.state.rank_load import LOWER_TIERS, UNKNOWN_BLOCKS, credit_blocks
from forebay.core.state.roster import Roster
from forebay.events.control import RouterConfig
from forebay.events.decisions import CostTerms, ScoredCandidate
from forebay.events.kv import LowerTier
from forebay.events.requests import TaintWeight

_DECIMAL = Context(prec=30)


class CostTable(msgspec.Struct, frozen=True, eq=False, dict=True):
    """Cost and cost terms of every candidate, in KV blocks and in roster order.

    Attributes:
        columns: rows cost, prefill (prompt blocks that the candidate still has to compute, including those of this
            request), credit (reduction of the cost for cached blocks) and decode (blocks in use by requests in flight,
            plus those that this request would add).
        requests: requests in flight per candidate.
        cached: rows device, host, disk and store: cached leading blocks of the prompt per candidate.
        has_lower: whether any of these blocks are not on a device.
        factors: factor of the cost per candidate from preferred taints; None if the request prefers none.
        evictions: increase of the cost for cached blocks that each rank must evict; None if none must evict any.
    """

    roster: Roster
    columns: NDArray[np.float64]
    requests: NDArray[np.int64]
    cached: NDArray[np.int64]
    has_lower: bool
    factors: NDArray[np.float64] | None
    evictions: NDArray[np.float64] | None

    def __len__(self) -> int:
        return len(self.requests)

    @cached_property
    def costs(self) -> list[float]:
        return _floats(self.columns[0])

    def overlap(self, at: int) -> Overlap:
        """Return how many leading prompt blocks the candidate at position `at` has cached."""
        return Overlap(*self.cached[:, at].tolist())

    def digest(self) -> int:
        """Return a 64-bit digest over the names and all cost terms of the candidates."""
        state = xxh3_64(seed=self.roster.names_hash)
        state.update(self.columns.data)
        if self.factors is not None:
            state.update(self.factors.data)
        state.update(self.requests.data)
        positions = np.flatnonzero(self.cached.any(axis=0)) if self.has_lower else self.cached[0].nonzero()[0]
        overlaps = np.empty((len(positions), 5), np.int64)
        overlaps[:, 0], overlaps[:, 1:] = positions, self.cached[:, positions].T
        state.update(overlaps.data)
        if self.evictions is not None:
            positions = self.evictions.nonzero()[0]
            state.update(positions.data)
            state.update(self.evictions[positions].data)
        return state.intdigest()

    def terms(self, at: int) -> CostTerms:
        cost, prefill, credit, decode = self.columns[:, at].tolist()
        device, host, disk, store = self.cached[:, at].tolist()
        return CostTerms(
            cost=cost,
            prefill_blocks=prefill,
            overlap_credit=credit,
            decode_blocks=decode,
            active_requests=self.requests.item(at),
            device_overlap=device,
            host_overlap=host,
            disk_overlap=disk,
            taint_factor=1.0 if self.factors is None else self.factors.item(at),
            store_overlap=store,
            eviction_cost=0.0 if self.evictions is None else self.evictions.item(at),
        )

    def candidate(self, at: int) -> ScoredCandidate:
        candidate = self.roster.ranks[at]
        return ScoredCandidate(worker_id=candidate.worker.spec.worker_id, rank=candidate.rank, terms=self.terms(at))


class Demand(msgspec.Struct, frozen=True, eq=False):
    """Load that one request would put on a rank, and how much of its prompt each rank has cached.

    Attributes:
        blocks: number of prompt blocks that count as decode load.
        active: leading prompt blocks that other requests in flight on a rank already use, as from `active_depths`.
        holders: assigns ranks to the bits of the masks in `cached`.
        cached: cached leading blocks of the prompt, each with the mask of the ranks that have it.
        overlaps: the same for single ranks, instead of what `cached` says about them.
        has_tight_caches: whether any rank has less than a quarter of its cache free.
    """

    prompt_tokens: int
    blocks: int
    active: Sequence[tuple[int, int]]
    holders: HolderBits
    cached: Sequence[tuple[int, Overlap]]
    overlaps: Mapping[HolderKey, Overlap]
    preferred_taints: tuple[TaintWeight, ...] = ()
    now_us: int = 0
    has_tight_caches: bool = True


def _floats(row: NDArray[np.float64]) -> list[float]:
    numbers: list[float] = row.tolist()
    return numbers


def cost_table(config: RouterConfig, block_size: int, roster: Roster, demand: Demand) -> CostTable:
    """Return the costs of all candidates. `config` includes the overrides of the request.

    The selection policy `lmetric` multiplies the terms instead of adding them: (max(prefill_blocks - credit, 0) +
    eviction) * (decode_blocks + 1). If prefill is not tracked, the credit reduces the decode blocks: max(decode_blocks
    - credit, 0) + eviction. Dynamo's decode routers compute the cost in this way.
    """
    loads, slots = roster.columns, roster.slots
    columns = np.zeros((4, len(slots)))
    costs, prefill, credit, decode = columns
    waiting = loads.prefill_tokens.take(slots) if config.track_prefill_tokens else None
    if waiting is not None:
        np.add(waiting, demand.prompt_tokens, prefill)
        np.divide(prefill, block_size, prefill)
    np.add(loads.decode_blocks.take(slots), demand.blocks, decode)
    if demand.active:
        shared = np.zeros(len(loads.decode_blocks))
        for mask, depth in demand.active:
            shared[bits_of(mask)] = depth
        np.subtract(decode, shared.take(slots), decode)
    requests = loads.active_requests.take(slots)
    cached, has_lower = _cached_blocks(roster, demand)
    decay = _decay(config, block_size, waiting, demand.prompt_tokens)
    np.multiply(
        cached[0], config.overlap_score_credit if decay is None else config.overlap_score_credit / decay, credit
    )
    if has_lower:
        _credit_lower(config, roster, cached, credit)
    evictions = _evictions(config, block_size, roster, demand, cached[0])
    _costs(config, columns, evictions, requests)
    factors = _taint_factors(roster, demand.preferred_taints)
    if factors is not None:
        np.multiply(costs, factors, costs)
    return CostTable(roster, columns, requests, cached, has_lower, factors, evictions)


def _cached_blocks(roster: Roster, demand: Demand) -> tuple[NDArray[np.int64], bool]:
    count, has_lower = len(roster.ranks), bool(demand.overlaps)
    found = np.zeros((4, count + 1), np.int64)  # the last column is for ranks that are not in the roster
    if demand.cached:
        positions = roster.positions_by_bit(demand.holders)
        for mask, overlap in demand.cached:
            at = positions[bits_of(mask)]
            found[0, at] = overlap.device
            if overlap.host or overlap.disk or overlap.store:
                has_lower = True
                found[:, at] = np.array(overlap)[:, np.newaxis]
    for key, overlap in demand.overlaps.items():
        found[:, roster.positions.get(key, count)] = overlap
    return found[:, :count], has_lower


def _credit_lower(config: RouterConfig, roster: Roster, cached: NDArray[np.int64], credit: NDArray[np.float64]) -> None:
    """Add the credit of blocks in lower tiers.

    If the tiers are credited as measured, n blocks of a lower tier have the credit n - (fixed_us + n * block_us) /
    prefill_block_us, at least 0. If the rank has not measured these durations, the weight of the tier applies.
    """
    names: tuple[LowerTier, ...] = ("host", "disk", "store")
    weights = config.host_cache_hit_weight, config.disk_cache_hit_weight, config.shared_cache_hit_weight
    if config.tier_credit == "measured":
        for at in np.flatnonzero(cached[1:].any(axis=0)).tolist():
            saved, rates = credit.item(at), roster.loads[at].rates
            for name, blocks, weight in zip(names, cached[1:, at].tolist(), weights, strict=True):
                if blocks:
                    saved += credit_blocks(rates, name, blocks, weight)
            credit[at] = saved
        return
    for row, weight in zip(cached[1:], weights, strict=True):
        np.add(credit, weight * row, credit)


def _costs(
    config: RouterConfig,
    columns: NDArray[np.float64],
    evictions: NDArray[np.float64] | None,
    requests: NDArray[np.int64],
) -> None:
    """Set the first of the `columns` of a cost table from the others."""
    costs, prefill, credit, decode = columns
    by_prefill = config.track_prefill_tokens or not config.overlap_score_credit
    np.subtract(prefill if by_prefill or config.selection_policy == "lmetric" else decode, credit, costs)
    np.maximum(costs, 0.0, out=costs)
    if evictions is not None:
        np.add(costs, evictions, costs)
    if config.selection_policy == "lmetric":
        np.multiply(costs, decode + 1.0, costs)
        return
    if by_prefill:
        if config.prefill_load_scale != 1.0:
            np.multiply(costs, config.prefill_load_scale, costs)
        np.add(costs, decode, costs)
    if config.decode_active_request_weight:
        np.add(costs, config.decode_active_request_weight * requests, costs)


def _evictions(
    config: RouterConfig, block_size: int, roster: Roster, demand: Demand, on_device: NDArray[np.int64]
) -> NDArray[np.float64] | None:
    """Return the cost of the blocks that each rank must evict for the prompt, or None if no rank must.

    eviction = eviction_weight * overlap_score_credit * recency * (evicted - evicted blocks that a lower tier saves)
    evicted = max(blocks of the prompt that are not on the device - free blocks of the device, 0)

    Without this cost, sessions that share a prefix would stay on one rank whose cache is too small for them, beside
    ranks with empty caches. `recency` is 1 if any candidate has free blocks. Otherwise all candidates must evict, and
    all caches may be full of useless blocks. Then `recency` is 1 - age / highest age of the candidates. The age is the
    time in which the rank was sent as many new blocks as its cache has: blocks that leave a cache sooner are more
    likely to be needed again. Ranks with unknown free blocks (`RankLoad.free_blocks`) have no cost.
    """
    weight = config.eviction_weight * config.overlap_score_credit
    if not weight or not config.use_kv_events:
        return None
    needed = demand.prompt_tokens / block_size
    if not demand.has_tight_caches and needed <= roster.loose_blocks:
        return None
    loads, slots = roster.columns, roster.slots
    free = loads.free_blocks.take(slots)
    missing = np.maximum(needed - free - on_device, 0.0)
    evicted = missing.nonzero()[0]
    if not len(evicted):
        return None
    has_room = bool(((free < UNKNOWN_BLOCKS) & (missing == 0.0)).any())
    slots = slots[evicted]
    blocks = np.minimum(missing[evicted], loads.cached_blocks.take(slots))
    ages = demand.now_us - loads.began_us.take(slots)
    oldest = ages.max()
    recency = 1.0 if has_room else 1.0 - ages / oldest if oldest else 0.0
    costs = np.zeros(len(free))
    costs[evicted] = weight * recency * (blocks - _kept_blocks(config, roster, evicted, slots, blocks))
    return costs


def _kept_blocks(
    config: RouterConfig,
    roster: Roster,
    evicted: NDArray[np.intp],
    slots: NDArray[np.intp],
    blocks: NDArray[np.float64],
) -> NDArray[np.float64]:
    """Return how many blocks of computation a lower tier of each rank saves if evicted blocks are needed again."""
    tiers = roster.columns.lower_tier.take(slots)
    weights = np.array((0.0, config.host_cache_hit_weight, config.disk_cache_hit_weight))
    kept = weights[tiers] * blocks
    if config.tier_credit == "measured":
        for at in tiers.nonzero()[0].tolist():
            tier = LOWER_TIERS[tiers[at]]
            assert tier is not None
            rates = roster.loads[evicted[at]].rates
            kept[at] = credit_blocks(rates, tier, blocks.item(at), weights.item(tiers[at]))
    return np.minimum(kept, blocks)


def _decay(
    config: RouterConfig, block_size: int, waiting: NDArray[np.float64] | None, prompt_tokens: int
) -> NDArray[np.float64] | None:
    """Return the divisor of each candidate's credit, or None if no decay applies.

    The candidate with the fewest prefill tokens has divisor 1. One more prompt of the same length to prefill adds
    `overlap_score_credit_decay`. A partial block of the prompt counts as one block, as in Dynamo.
    """
    decay = config.overlap_score_credit_decay
    if not decay or waiting is None:
        return None
    prompt_blocks = max(1, -(-prompt_tokens // block_size))  # a producer may submit an empty prompt
    more: NDArray[np.float64] = waiting - waiting.min()
    return 1.0 + decay * (more / block_size) / prompt_blocks


@lru_cache(maxsize=64)
def _taint_factors(roster: Roster, preferred: tuple[TaintWeight, ...]) -> NDArray[np.float64] | None:
    if not preferred:
        return None
    factors = []
    for candidate in roster.ranks:
        taints = candidate.worker.spec.taints
        weight = 0.0
        for wish in preferred:
            if wish.taint in taints:
                weight += wish.weight
        factors.append(taint_factor(weight))
    return np.array(factors)


@lru_cache(maxsize=4096)
def taint_factor(weight: float) -> float:
    """Return the factor exp(-tanh(weight)) of a cost, between 1/e and e, for the summed weights of a worker's taints.

    Decimal arithmetic makes the result the same on every machine.
    """
    if abs(weight) > 40.0:  # above 40, tanh is 1 to thirty digits
        tanh = Decimal(1 if weight > 0.0 else -1)
    else:
        square = _DECIMAL.exp(_DECIMAL.multiply(Decimal(weight), Decimal(2)))
        tanh = _DECIMAL.divide(_DECIMAL.subtract(square, Decimal(1)), _DECIMAL.add(square, Decimal(1)))
    return float(_DECIMAL.exp(_DECIMAL.minus(tanh)))
