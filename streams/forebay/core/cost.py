"""What it would cost to send a request to each candidate, in KV blocks; lowest wins.

    cost = prefill_load_scale * max(prefill_blocks - credit, 0) + decode_blocks
           + decode_active_request_weight * active_requests
    prefill_blocks = (active prefill tokens + prompt tokens) / block size
    credit = overlap_score_credit * device + host weight * host + disk weight * disk   (blocks of overlap)

Source: Dynamo's KV router (router design, default selector). Only scalar + - * / in this written order,
so a cost is the same bit pattern everywhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack
from typing import NamedTuple

from xxhash import xxh3_64_intdigest

from forebay.core.load import RankLoad
from forebay.core.prefix_index import Overlap
from forebay.events.control import RouterConfig
from forebay.events.decisions import Candidate, CostTerms


@dataclass(frozen=True, slots=True)
class Option:
    """A worker rank that may take the request, with what decides about it."""

    worker_id: str
    worker_epoch: int
    slot: int
    rank: int
    overlap: Overlap
    load: RankLoad


class Cost(NamedTuple):
    """The terms of one option's cost. `decode_blocks` includes the blocks that the request would add."""

    cost: float
    prefill_blocks: float
    overlap_credit: float
    decode_blocks: int
    active_requests: int


def cost_of(config: RouterConfig, prompt_tokens: int, block_size: int, overlap: Overlap, load: RankLoad) -> Cost:
    """The cost of one option; `prompt_tokens` and `block_size` in tokens."""
    prefill_blocks = (load.prefill_tokens + prompt_tokens) / block_size
    credit = (
        config.overlap_score_credit * overlap.device
        + config.host_cache_hit_weight * overlap.host
        + config.disk_cache_hit_weight * overlap.disk
    )
    left = prefill_blocks - credit
    decode_blocks = load.decode_blocks + load.new_blocks
    cost = config.prefill_load_scale * (left if left > 0.0 else 0.0) + decode_blocks
    cost += config.decode_active_request_weight * load.active_requests
    return Cost(cost, prefill_blocks, credit, decode_blocks, load.active_requests)


def cost_table(config: RouterConfig, prompt_tokens: int, block_size: int, options: Sequence[Option]) -> list[Cost]:
    """The cost of every option, in the order of the options."""
    return [cost_of(config, prompt_tokens, block_size, option.overlap, option.load) for option in options]


def table_digest(options: Sequence[Option], costs: Sequence[Cost]) -> int:
    """64 bits over the whole table: every option's identity, overlaps and cost terms."""
    rows = [
        option.worker_id.encode() + pack("<I5d3q", option.rank, *cost, *option.overlap)
        for option, cost in zip(options, costs, strict=True)
    ]
    return xxh3_64_intdigest(b"".join(rows))


def terms_of(option: Option, cost: Cost) -> CostTerms:
    """The terms as they stand in the journal."""
    return CostTerms(
        cost=cost.cost,
        prefill_blocks=cost.prefill_blocks,
        overlap_credit=cost.overlap_credit,
        decode_blocks=cost.decode_blocks,
        active_requests=cost.active_requests,
        device_overlap=option.overlap.device,
        host_overlap=option.overlap.host,
        disk_overlap=option.overlap.disk,
    )


def candidate(option: Option, cost: Cost) -> Candidate:
    """An option as it stands in the journal."""
    return Candidate(worker_id=option.worker_id, rank=option.rank, terms=terms_of(option, cost))
