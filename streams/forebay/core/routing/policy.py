"""Input and interface of a routing policy.

This is a complete custom policy:

class Mine:
    def decide(self, world, request):
        return min(range(len(world.candidates)), key=lambda at: world.costs[at])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from forebay.core.state.prefix_index import NO_OVERLAP, Overlap
from forebay.events.control import RouterConfig
from forebay.events.requests import NO_HINTS, RoutingHints


class PolicyMissing(Exception):
    """A decision needs a custom policy whose class this process did not import.

    The text names the option that allows the import.
    """


@dataclass(frozen=True, slots=True)
class Candidate:
    """Worker rank that may take the request.

    Attributes:
        worker_id: id of the worker; candidates are sorted by (worker id, rank).
        rank: data-parallel rank of the worker's engine.
        overlap: number of leading prompt blocks that the rank has cached, by tier.
        prefill_tokens: prompt tokens routed to the rank and not computed yet.
        decode_blocks: KV blocks of requests in flight on the rank plus those that this request would add.
        kv_blocks_used: KV blocks in use by the engine's last load report; None before the first report.
        max_num_batched_tokens: token budget of one engine step.
        eviction_cost: increase of the cost for cached blocks that the rank must evict, in KV blocks.
    """

    worker_id: str
    rank: int = 0
    overlap: Overlap = NO_OVERLAP
    prefill_tokens: int = 0
    decode_blocks: float = 0.0
    active_requests: int = 0
    kv_blocks_total: int = 1
    kv_blocks_used: int | None = None
    max_num_batched_tokens: int = 1
    taints: tuple[str, ...] = ()
    eviction_cost: float = 0.0


class RoutingRequest(msgspec.Struct, frozen=True, eq=False):
    """Part of a request that routing may depend on.

    Attributes:
        prompt_tokens: length of the prompt, in tokens.
        blocks: sequence hashes of the full blocks of the prompt.
        tie_seed: 64 bits derived from the request; the only source of randomness.
        attempt: number of this attempt at the stage: 1 at first, higher after an attempt failed or its worker was lost.
        lora_name: adapter; empty for none.
    """

    request_id: str
    prompt_tokens: int
    blocks: Sequence[int]
    tie_seed: int
    attempt: int = 1
    hints: RoutingHints = NO_HINTS
    lora_name: str = ""


class RoutingWorld(msgspec.Struct, frozen=True, eq=False, dict=True):
    """State of the pool at the decision.

    The arrays have one element per candidate. A policy must not change them.

    Attributes:
        candidates: ranks that may take the request; at least one.
        cost_array: cost by the configured formula, in KV blocks; see `forebay.core.routing.cost`.
        request_array: requests in flight.
        computed_array: prompt tokens that each candidate was sent to compute so far.
        config: the pool's configuration with the request's overrides.
        block_size: tokens per KV block.
        turn: number of requests that the pool has routed before.
        now_us: the owner's clock, in microseconds.
    """

    candidates: Sequence[Candidate]
    cost_array: NDArray[np.float64]
    request_array: NDArray[np.int64]
    computed_array: NDArray[np.int64]
    config: RouterConfig
    block_size: int
    turn: int
    now_us: int

    @cached_property
    def costs(self) -> Sequence[float]:
        """Content of `cost_array`."""
        return tuple(self.cost_array.tolist())

    @cached_property
    def computed_tokens(self) -> Sequence[int]:
        """Content of `computed_array`."""
        return tuple(self.computed_array.tolist())


class Policy(Protocol):
    """Interface of a policy. It must be pure: the same world and request give the same selection in any process."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """Return the position of the selected candidate in `world.candidates`."""
