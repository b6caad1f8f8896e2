"""What it would cost to send a request to each candidate, in KV blocks; lowest wins.

    cost = (prefill_load_scale * max(prefill_blocks - credit, 0) + decode_blocks
            + decode_active_request_weight * active_requests) * taint factor
    prefill_blocks = (active prefill tokens + prompt tokens) / block size
    credit = overlap_score_credit / (1 + decay * excess) * device + host weight * host + disk weight * disk

Source: Dynamo's KV router (router design, default selector). Only scalar + - * / in this written order, and
decimal arithmetic where a curve is needed, so a cost is the same bit pattern everywhere. The table is kept in
columns, one list a term: a decision reads all of them for hundreds of candidates.
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
from forebay.core.state.roster import Roster
from forebay.events.control import RouterConfig
from forebay.events.decisions import Candidate, CostTerms
from forebay.events.requests import TaintWeight

_DECIMAL = Context(prec=30)


@dataclass(frozen=True, slots=True, eq=False)
class CostTable:
    """The terms of every candidate's cost, in the order of the roster. Overlaps are by position, others are none.

    `decode_blocks` are the active blocks of the rank and those that the request would add.
    """

    roster: Roster
    costs: list[float]
    prefill_blocks: list[float]
    credit_blocks: list[float]
    decode_blocks: list[float]
    active_requests: list[int]
    overlaps: dict[int, Overlap]
    taint_factors: list[float] | None

    def overlap(self, at: int) -> Overlap:
        """What the candidate at this position has of the prompt."""
        return self.overlaps.get(at, NO_OVERLAP)

    def digest(self) -> int:
        """64 bits over every candidate and every term."""
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
        tiers = zip(*map(self.overlaps.__getitem__, positions), strict=True)
        state.update(array("q", [*chain.from_iterable(zip(positions, *tiers, strict=True))]))
        return state.intdigest()

    def terms(self, at: int) -> CostTerms:
        """The terms of one candidate as they stand in the journal."""
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
        )

    def candidate(self, at: int) -> Candidate:
        """One candidate as it stands in the journal."""
        seat = self.roster.seats[at]
        return Candidate(worker_id=seat.worker.spec.worker_id, rank=seat.rank, terms=self.terms(at))


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of whoever takes it.

    Attributes:
        prompt_tokens: the length of the prompt.
        blocks: how many blocks of the prompt count as decode load.
        active: of those, how many leading ones are active on a rank already; others have none.
        overlaps: what each rank has of the prompt in its cache; others have nothing.
        preferred_taints: which workers it would rather have, or not.
    """

    prompt_tokens: int
    blocks: int
    active: Mapping[HolderKey, int]
    overlaps: Mapping[HolderKey, Overlap]
    preferred_taints: Sequence[TaintWeight] = ()


def cost_table(config: RouterConfig, block_size: int, roster: Roster, demand: Demand) -> CostTable:
    """The costs of all candidates (at least one); `block_size` in tokens.

    The selection policy `lmetric` multiplies: max(prefill_blocks - credit, 0) * (decode_blocks + 1). Where prefill is
    not tracked the credit is for decode blocks, max(decode_blocks - credit, 0): so Dynamo's decode routers choose.
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
    saved_blocks = [0.0] * len(loads)
    decay = _decay(config, block_size, roster, prompt_tokens)
    host, disk = config.host_cache_hit_weight, config.disk_cache_hit_weight
    credit, same, saved = config.overlap_score_credit, NO_OVERLAP, 0.0
    for at, overlap in overlaps.items():
        if decay is not None:
            saved = credit / decay[at] * overlap.device + host * overlap.host + disk * overlap.disk
        elif overlap is not same:  # many ranks have just as much, as one object
            same, saved = overlap, credit * overlap.device + host * overlap.host + disk * overlap.disk
        saved_blocks[at] = saved
    costs = _costs(config, prefill, saved_blocks, overlaps, decode, requests)
    factors = _taint_factors(roster, demand.preferred_taints)
    if factors is not None:
        costs = [cost * factor for cost, factor in zip(costs, factors, strict=True)]
    return CostTable(roster, costs, prefill, saved_blocks, decode, requests, overlaps, factors)


def _costs(
    config: RouterConfig,
    prefill: list[float],
    saved_blocks: list[float],
    saved: Iterable[int],
    decode: list[float],
    requests: list[int],
) -> list[float]:
    """`saved` are the positions at which `saved_blocks` may be other than 0."""
    left = prefill.copy()
    for at in saved:
        left[at] = max(prefill[at] - saved_blocks[at], 0.0)
    if config.selection_policy == "lmetric":
        return [rest * (blocks + 1.0) for rest, blocks in zip(left, decode, strict=True)]
    scale, weight = config.prefill_load_scale, config.decode_active_request_weight
    if config.track_prefill_tokens or not config.overlap_score_credit:
        # As it usually is, where a multiplication by 1 would change no bit: hundreds of candidates, in C.
        costs = list(map(add, left if scale == 1.0 else [scale * rest for rest in left], decode))
    else:
        costs = [blocks - less if blocks > less else 0.0 for blocks, less in zip(decode, saved_blocks, strict=True)]
    if weight:
        costs = [cost + weight * count for cost, count in zip(costs, requests, strict=True)]
    return costs


def _decay(config: RouterConfig, block_size: int, roster: Roster, prompt_tokens: int) -> list[float] | None:
    """What divides the credit of each candidate: 1 for the one with the least to prefill, 2 for one prompt more.

    A partial block of the prompt counts as one, as in Dynamo.
    """
    decay = config.overlap_score_credit_decay
    if not decay or not config.track_prefill_tokens:
        return None
    waiting = [load.prefill_tokens for load in roster.loads]
    least = min(waiting)
    prompt_blocks = max(1, -(-prompt_tokens // block_size))  # a client of the log may ask for nothing at all
    return [1.0 + decay * ((tokens - least) / block_size) / prompt_blocks for tokens in waiting]


def _taint_factors(roster: Roster, preferred: Sequence[TaintWeight]) -> list[float] | None:
    if not preferred:
        return None
    factors = []
    for seat in roster.seats:
        taints = seat.worker.spec.taints
        weight = 0.0
        for wish in preferred:
            if wish.taint in taints:
                weight += wish.weight
        factors.append(taint_factor(weight))
    return factors


@lru_cache(maxsize=4096)
def taint_factor(weight: float) -> float:
    """exp(-tanh(weight)), in [1/e, e]: decimal arithmetic rounds it the same on every machine."""
    if abs(weight) > 40.0:  # tanh is 1 to thirty digits from here on
        tanh = Decimal(1 if weight > 0.0 else -1)
    else:
        square = _DECIMAL.exp(_DECIMAL.multiply(Decimal(weight), Decimal(2)))
        tanh = _DECIMAL.divide(_DECIMAL.subtract(square, Decimal(1)), _DECIMAL.add(square, Decimal(1)))
    return float(_DECIMAL.exp(_DECIMAL.minus(tanh)))
