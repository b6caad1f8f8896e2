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

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Context, Decimal
from functools import lru_cache
from itertools import chain
from operator import add

from xxhash import xxh3_64

from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.prefix_index import NO_OVERLAP, Overlap
from forebay.core.state.rank_load import NO_RATES, UNKNOWN_BLOCKS, RankLoad, credit_blocks
from forebay.core.state.roster import Roster
from forebay.events.control import RouterConfig
from forebay.events.decisions import CostTerms, ScoredCandidate
from forebay.events.requests import TaintWeight

_DECIMAL = Context(prec=30)


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """Cost and cost terms of every candidate, in KV blocks and in roster order.

    There is one list per term, because a decision reads every term of hundreds of candidates.

    Attributes:
        prefill_blocks: prompt blocks that each candidate still has to compute, including those of this request.
        credit_blocks: reduction of the cost per candidate for cached blocks.
        decode_blocks: blocks in use by requests in flight per candidate, plus the blocks that this request would add.
        overlaps: cached blocks of the prompt by position in the roster. A position without an entry has none.
        taint_factors: factor of the cost per candidate from preferred taints; None if the request prefers none.
        eviction_costs: increase of the cost for cached blocks that the rank must evict, by position like `overlaps`.
    """

    roster: Roster
    costs: list[float]
    prefill_blocks: list[float]
    credit_blocks: list[float]
    decode_blocks: list[float]
    active_requests: list[int]
    overlaps: dict[int, Overlap]
    taint_factors: list[float] | None
    eviction_costs: dict[int, float]

    def overlap(self, at: int) -> Overlap:
        """Return how many leading prompt blocks the candidate at position `at` has cached."""
        return self.overlaps.get(at, NO_OVERLAP)

    def digest(self) -> int:
        """Return a 64-bit digest over the names and all cost terms of the candidates."""
        state = xxh3_64(seed=self.roster.names_hash)
        for column in (
            self.costs,
            self.prefill_blocks,
            self.credit_blocks,
            self.decode_blocks,
            self.taint_factors or (),
        ):
            state.update(array("d", column))
        state.update(array("q", self.active_requests))
        positions = sorted(self.overlaps)
        tiers = [*zip(*map(self.overlaps.__getitem__, positions), strict=True)]
        state.update(array("q", [*chain.from_iterable(zip(positions, *tiers, strict=True))]))
        state.update(array("q", self.eviction_costs))
        state.update(array("d", self.eviction_costs.values()))
        return state.intdigest()

    def terms(self, at: int) -> CostTerms:
        overlap = self.overlap(at)
        return CostTerms(
            cost=self.costs[at],
            prefill_blocks=self.prefill_blocks[at],
            overlap_credit=self.credit_blocks[at],
            decode_blocks=self.decode_blocks[at],
            active_requests=self.active_requests[at],
            device_overlap=overlap.device,
            host_overlap=overlap.host,
            disk_overlap=overlap.disk,
            taint_factor=1.0 if self.taint_factors is None else self.taint_factors[at],
            store_overlap=overlap.store,
            eviction_cost=self.eviction_costs.get(at, 0.0),
        )

    def candidate(self, at: int) -> ScoredCandidate:
        candidate = self.roster.ranks[at]
        return ScoredCandidate(worker_id=candidate.worker.spec.worker_id, rank=candidate.rank, terms=self.terms(at))


@dataclass(frozen=True, slots=True)
class Demand:
    """Load that one request would put on a rank, and how much of its prompt each rank has cached.

    Attributes:
        blocks: number of prompt blocks that count as decode load.
        active: leading prompt blocks that other requests in flight on a rank already use; none without an entry.
        overlaps: cached leading blocks of the prompt by rank; none without an entry.
        has_tight_caches: whether any rank has less than a quarter of its cache free.
    """

    prompt_tokens: int
    blocks: int
    active: Mapping[HolderKey, int]
    overlaps: Mapping[HolderKey, Overlap]
    preferred_taints: Sequence[TaintWeight] = ()
    now_us: int = 0
    has_tight_caches: bool = True


def cost_table(config: RouterConfig, block_size: int, roster: Roster, demand: Demand) -> CostTable:
    """Return the costs of all candidates. `config` includes the overrides of the request.

    The selection policy `lmetric` multiplies the terms instead of adding them: (max(prefill_blocks - credit, 0) +
    eviction) * (decode_blocks + 1). If prefill is not tracked, the credit reduces the decode blocks: max(decode_blocks
    - credit, 0) + eviction. Dynamo's decode routers compute the cost in this way.
    """
    loads, positions = roster.loads, roster.positions
    prompt_tokens, blocks = demand.prompt_tokens, demand.blocks
    if config.track_prefill_tokens:
        prefill = [(load.prefill_tokens + prompt_tokens) / block_size for load in loads]
    else:
        prefill = [0.0] * len(loads)
    decode = [load.decode_blocks + blocks for load in loads]
    for key, depth in demand.active.items():
        at = positions.get(key)
        if at is not None:
            decode[at] -= depth
    requests = [load.active_requests for load in loads]
    found = zip(map(positions.get, demand.overlaps), demand.overlaps.values(), strict=True)
    overlaps = {at: overlap for at, overlap in found if at is not None}
    decay = _decay(config, block_size, roster, prompt_tokens)
    saved_blocks = (_measured if config.tier_credit == "measured" else _weighted)(config, roster, overlaps, decay)
    evictions = _evictions(config, block_size, roster, demand, overlaps)
    costs = _costs(config, prefill, saved_blocks, overlaps, evictions, decode, requests)
    factors = _taint_factors(roster, demand.preferred_taints)
    if factors is not None:
        costs = [cost * factor for cost, factor in zip(costs, factors, strict=True)]
    return CostTable(roster, costs, prefill, saved_blocks, decode, requests, overlaps, factors, evictions)


def _weighted(
    config: RouterConfig, roster: Roster, overlaps: Mapping[int, Overlap], decay: list[float] | None
) -> list[float]:
    host, disk = config.host_cache_hit_weight, config.disk_cache_hit_weight
    store, credit, same, saved = config.shared_cache_hit_weight, config.overlap_score_credit, NO_OVERLAP, 0.0
    saved_blocks = [0.0] * len(roster.loads)
    for at, overlap in overlaps.items():
        if decay is not None:
            saved = credit / decay[at] * overlap.device + host * overlap.host + disk * overlap.disk
            saved += store * overlap.store
        elif overlap is not same:  # many ranks share one overlap object
            same, saved = overlap, credit * overlap.device + host * overlap.host + disk * overlap.disk
            saved += store * overlap.store
        saved_blocks[at] = saved
    return saved_blocks


def _measured(
    config: RouterConfig, roster: Roster, overlaps: Mapping[int, Overlap], decay: list[float] | None
) -> list[float]:
    """Return the credit of each candidate by the durations that its rank measured.

    The credit of n blocks of a tier is n - (fixed_us + n * block_us) / prefill_block_us, at least 0. If the rank has
    not measured these durations, the weight of the tier applies.
    """
    credit, loads = config.overlap_score_credit, roster.loads
    saved_blocks = [0.0] * len(loads)
    for at, (device, host, disk, store) in overlaps.items():
        rates = loads[at].rates
        saved = (credit if decay is None else credit / decay[at]) * device
        if host:
            saved += credit_blocks(rates, "host", host, config.host_cache_hit_weight)
        if disk:
            saved += credit_blocks(rates, "disk", disk, config.disk_cache_hit_weight)
        if store:
            saved += credit_blocks(rates, "store", store, config.shared_cache_hit_weight)
        saved_blocks[at] = saved
    return saved_blocks


def _costs(
    config: RouterConfig,
    prefill: list[float],
    saved_blocks: list[float],
    saved: Iterable[int],
    evictions: Mapping[int, float],
    decode: list[float],
    requests: list[int],
) -> list[float]:
    """Return the cost of each candidate. `saved` has all positions at which `saved_blocks` may differ from 0."""
    left = prefill.copy()
    for at in saved:
        left[at] = max(prefill[at] - saved_blocks[at], 0.0)
    for at, blocks in evictions.items():
        left[at] += blocks
    if config.selection_policy == "lmetric":
        return [rest * (blocks + 1.0) for rest, blocks in zip(left, decode, strict=True)]
    scale, weight = config.prefill_load_scale, config.decode_active_request_weight
    if config.track_prefill_tokens or not config.overlap_score_credit:
        # The usual case: `map` adds the terms of hundreds of candidates in C. A factor of 1 can be skipped.
        costs = list(map(add, left if scale == 1.0 else [scale * rest for rest in left], decode))
    else:
        costs = [blocks - less if blocks > less else 0.0 for blocks, less in zip(decode, saved_blocks, strict=True)]
        for at, blocks in evictions.items():
            costs[at] += blocks
    if weight:
        costs = [cost + weight * count for cost, count in zip(costs, requests, strict=True)]
    return costs


def _evictions(
    config: RouterConfig, block_size: int, roster: Roster, demand: Demand, overlaps: Mapping[int, Overlap]
) -> dict[int, float]:
    """Return the cost of the blocks that each rank must evict for the prompt, by position, without zeros.

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
        return {}
    needed = demand.prompt_tokens / block_size
    if not demand.has_tight_caches and needed <= roster.loose_blocks:
        return {}
    loads = roster.loads
    full = [(at, load) for at, load in enumerate(loads) if load.free_blocks < needed]
    has_room = len(full) < len(loads) and any(needed <= load.free_blocks < UNKNOWN_BLOCKS for load in loads)
    evicted: list[tuple[int, RankLoad, float]] = []
    for at, load in full:
        blocks = needed - load.free_blocks
        if at in overlaps:
            blocks -= overlaps[at].device
        if blocks > 0.0:
            evicted.append((at, load, min(blocks, load.cached_blocks)))
        else:
            has_room = True
    if not evicted:
        return {}
    ages = [demand.now_us - load.turnover_us[0] for _, load, _ in evicted]
    oldest, measured, found = max(ages), config.tier_credit == "measured", {}
    for (at, load, blocks), age in zip(evicted, ages, strict=True):
        recency = 1.0 if has_room else 1.0 - age / oldest if oldest else 0.0
        if recency:
            kept = _kept_blocks(config, load, blocks, measured=measured) if load.next_tier else 0.0
            found[at] = weight * recency * (blocks - kept)
    return {at: blocks for at, blocks in found.items() if blocks}


def _kept_blocks(config: RouterConfig, load: RankLoad, blocks: float, *, measured: bool) -> float:
    """Return how many blocks of computation a lower tier of the rank saves if evicted blocks are needed again."""
    tier = load.next_tier
    assert tier is not None, "only ranks with a lower tier keep blocks"
    weight = config.host_cache_hit_weight if tier == "host" else config.disk_cache_hit_weight
    return min(credit_blocks(load.rates if measured else NO_RATES, tier, blocks, weight), blocks)


def _decay(config: RouterConfig, block_size: int, roster: Roster, prompt_tokens: int) -> list[float] | None:
    """Return the divisor of each candidate's credit, or None if no decay applies.

    The candidate with the fewest prefill tokens has divisor 1. One more prompt of the same length to prefill adds
    `overlap_score_credit_decay`. A partial block of the prompt counts as one block, as in Dynamo.
    """
    decay = config.overlap_score_credit_decay
    if not decay or not config.track_prefill_tokens:
        return None
    waiting = [load.prefill_tokens for load in roster.loads]
    least = min(waiting)
    prompt_blocks = max(1, -(-prompt_tokens // block_size))  # a producer may submit an empty prompt
    return [1.0 + decay * ((tokens - least) / block_size) / prompt_blocks for tokens in waiting]


def _taint_factors(roster: Roster, preferred: Sequence[TaintWeight]) -> list[float] | None:
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
    return factors


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
