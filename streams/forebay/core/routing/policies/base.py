"""What a policy is given, and what it gives back.

class Mine:
    def decide(self, world, request):
        return min(range(len(world.candidates)), key=lambda at: world.costs[at])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from forebay.core.state.prefix_index import NO_OVERLAP, Overlap
from forebay.events.control import RouterConfig
from forebay.events.requests import NO_HINTS, RoutingHints


class PolicyUnusable(Exception):
    """A policy that cannot be found, or does not do what a policy must; the text says which and why."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker rank that may take the request.

    Attributes:
        worker_id: of the worker; candidates come in order of (worker id, rank).
        rank: of the worker's engine.
        overlap: blocks of the prompt in its cache: a prefix on the device, then on the host, then on disk.
        prefill_tokens: prompt tokens routed there that are not computed yet.
        decode_blocks: KV blocks of requests under way there, and those that this request would add.
        active_requests: requests under way there.
        kv_blocks_total: KV blocks of the rank.
        kv_blocks_used: as its engine reported last; None before the first report.
        max_num_batched_tokens: of one engine step.
        taints: labels of the worker.
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


@dataclass(frozen=True, slots=True)
class RoutingRequest:
    """A request, as far as routing may depend on it.

    Attributes:
        request_id: of the request.
        prompt_tokens: length of the prompt.
        blocks: sequence hashes of its full blocks.
        tie_seed: 64 bits that differ from request to request: the only source of chance.
        attempt: 1 for a new request, more when workers were lost.
        hints: what the client asked for.
        lora_name: the adapter, empty for none.
    """

    request_id: str
    prompt_tokens: int
    blocks: Sequence[int]
    tie_seed: int
    attempt: int = 1
    hints: RoutingHints = NO_HINTS
    lora_name: str = ""


@dataclass(frozen=True, slots=True)
class RoutingWorld:
    """What is known at the decision.

    Attributes:
        candidates: who may take the request, at least one.
        costs: of each candidate by the configured formula, in KV blocks; see `forebay.core.routing.cost`.
        computed_tokens: prompt tokens that each was sent to compute so far.
        config: the pool's, with what the request changes of it.
        block_size: tokens of a KV block.
        turn: decisions of the pool before this one.
        now_us: the owner's clock.
    """

    candidates: Sequence[Candidate]
    costs: Sequence[float]
    computed_tokens: Sequence[int]
    config: RouterConfig
    block_size: int
    turn: int
    now_us: int


class Policy(Protocol):
    """Chooses; pure: the same world and request give the same choice, in any process."""

    def decide(self, world: RoutingWorld, request: RoutingRequest) -> int:
        """The position of the chosen candidate in `world.candidates`."""
