"""Select one of the candidates of a request: compute their costs, then call the policy. Only reads the world."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import overload

import msgspec

from forebay.core.routing.cost import CostTable, Demand, cost_table
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Plan, StageCandidates
from forebay.core.routing.policies import Candidate, Policy, RoutingRequest, RoutingWorld
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.prefix_index import NO_OVERLAP, Overlap
from forebay.core.state.roster import Roster
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import World
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.requests import RouterOverride

NO_BLOCKS: Sequence[int] = ()


def evaluate(world: World, candidates: StageCandidates, *, as_owner: bool = True) -> Plan:
    """Compute the cost table of the candidates, call the policy, and return the selection.

    If the owner makes this decision (`as_owner`), only policies that its operator allowed may decide. Raises Ineligible
    if the policy failed or is not allowed, PolicyMissing if it is allowed, but this process does not have its class.
    """
    request = candidates.request
    override, router = request.hints.override, candidates.pool.router
    config = router if override is None else apply_override(router, override)
    return select(world, candidates, config, demand_of(world, candidates, config), as_owner=as_owner)


def demand_of(world: World, candidates: StageCandidates, config: RouterConfig) -> Demand:
    """Return the demand of a request under `config`, which includes the overrides of the request."""
    request, pool = candidates.request, candidates.pool
    blocks = request.blocks if config.track_active_blocks else NO_BLOCKS
    assumes = len(world.routed) or len(world.predicted)
    return Demand(
        prompt_tokens=request.prompt_tokens,
        blocks=len(blocks),
        active=world.load.active_depths(blocks) if config.assume_kv_reuse else (),
        holders=world.index.bits,
        cached=() if assumes or not pool.router.use_kv_events else world.index.overlap_groups(request.blocks),
        overlaps=find_overlaps(world, pool, request.blocks) if assumes else {},
        preferred_taints=request.hints.preferred_taints,
        now_us=world.now_us,
        has_tight_caches=bool(world.load.tight),
    )


def select(
    world: World, candidates: StageCandidates, config: RouterConfig, demand: Demand, *, as_owner: bool = True
) -> Plan:
    """Like `evaluate`, for a given demand and a configuration that includes the overrides of the request."""
    pool, request = candidates.pool, candidates.request
    table = cost_table(config, pool.block_size, candidates.roster, demand)
    policy = world.policy(config.mode, as_owner=as_owner)
    at = run_policy(policy, *policy_input(world, candidates, config, table))
    return Plan(
        candidates.stage, pool, request, candidates.attempt, config, table, at, candidates.place, candidates.pools
    )


def find_overlaps(world: World, pool: PoolConfigured, blocks: Sequence[int]) -> dict[HolderKey, Overlap]:
    """Return how many leading blocks of a prompt each rank has cached, by KV events or by assumption.

    If a rank is assumed to have more blocks than its KV events say, the assumption counts. Ranks without any are
    omitted.
    """
    found = world.index.overlaps(blocks) if pool.router.use_kv_events else {}
    for routed in (world.routed, world.predicted):
        if len(routed):
            for key, depth in routed.depths(blocks).items():
                found[key] = _with_device_prefix(found.get(key, NO_OVERLAP), depth)
    return found


def count_uncached_tokens(world: World, pool: PoolConfigured, request: SubmittedRequest, roster: Roster) -> int:
    """Return the prompt tokens that even the candidate with the largest device overlap must compute."""
    positions = roster.positions
    known = find_overlaps(world, pool, request.blocks)
    best = max((overlap.device for key, overlap in known.items() if key in positions), default=0)
    return max(0, request.prompt_tokens - best * pool.block_size)


@lru_cache(maxsize=256)
def apply_override(config: RouterConfig, override: RouterOverride) -> RouterConfig:
    changes = {name: getattr(override, name) for name in override.__struct_fields__}
    return msgspec.structs.replace(config, **{name: value for name, value in changes.items() if value is not None})


def _with_device_prefix(overlap: Overlap, device: int) -> Overlap:
    """Return `overlap`, changed so that at least the first `device` blocks count as cached on the device."""
    if device <= overlap.device:
        return overlap
    on_host = max(device, overlap.device + overlap.host)
    on_disk = max(on_host, overlap.device + overlap.host + overlap.disk)
    in_store = max(on_disk, sum(overlap))
    return Overlap(device, on_host - device, on_disk - on_host, in_store - on_disk)


def policy_input(
    world: World, candidates: StageCandidates | Plan, config: RouterConfig, table: CostTable
) -> tuple[RoutingWorld, RoutingRequest]:
    """Return the two arguments of a policy: the state of the pool, and the request.

    The state computes a candidate only when the policy reads it, from load that changes later. So a caller that keeps
    candidates must copy them. `config` includes the overrides of the request.
    """
    pool, request = candidates.pool, candidates.request
    seen = RoutingWorld(
        _Candidates(table),
        table.columns[0],
        table.requests,
        table.roster.columns.computed_tokens.take(table.roster.slots),
        config,
        pool.block_size,
        world.turns.get(pool.pool, 0),
        world.now_us,
    )
    routing_request = RoutingRequest(
        request.request_id,
        request.prompt_tokens,
        request.blocks,
        request.tie_seed,
        candidates.attempt + 1,
        request.hints,
        request.lora_name,
    )
    return seen, routing_request


def run_policy(policy: type[Policy], seen: RoutingWorld, request: RoutingRequest) -> int:
    """Return the position that a policy selects. Raises Ineligible if the policy fails or selects no candidate."""
    mode = seen.config.mode
    try:
        at = policy().decide(seen, request)
    except (Exception, SystemExit) as error:  # a custom policy may fail in any way
        raise Ineligible("policy_failed", f"the policy {mode} failed: {_describe_error(error)}") from error
    count = len(seen.cost_array)
    if type(at) is not int:
        raise Ineligible("policy_failed", f"the policy {mode} returned {type(at).__name__}, not a position")
    if not 0 <= at < count:
        raise Ineligible("policy_failed", f"the policy {mode} returned a position outside its {count} candidates")
    return at


def _describe_error(error: BaseException) -> str:
    """Return type and line of an error. Its text would be stored on the log, and may contain object addresses."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    assert frame is not None, "a raised error has a traceback"
    file = frame.tb_frame.f_code.co_filename.replace("\\", "/").rpartition("/")[2]
    return f"{type(error).__name__} ({file}:{frame.tb_lineno})"


class _Candidates(Sequence[Candidate]):
    """Candidates of a cost table, built on access because most policies never look at them."""

    def __init__(self, table: CostTable) -> None:
        self._table = table

    def __len__(self) -> int:
        return len(self._table)

    @overload
    def __getitem__(self, at: int) -> Candidate: ...

    @overload
    def __getitem__(self, at: slice) -> list[Candidate]: ...

    def __getitem__(self, at: int | slice) -> Candidate | list[Candidate]:
        if isinstance(at, slice):
            return [self._make(one) for one in range(*at.indices(len(self)))]
        return self._make(range(len(self))[at])

    def __iter__(self) -> Iterator[Candidate]:
        return map(self._make, range(len(self)))

    def _make(self, at: int) -> Candidate:
        table = self._table
        candidate = table.roster.ranks[at]
        spec, load = candidate.worker.spec, candidate.load
        return Candidate(
            worker_id=spec.worker_id,
            rank=candidate.rank,
            overlap=table.overlap(at),
            prefill_tokens=load.prefill_tokens,
            decode_blocks=table.columns[3].item(at),
            active_requests=table.requests.item(at),
            kv_blocks_total=spec.kv_blocks_total,
            kv_blocks_used=None if load.reported is None else load.reported.kv_blocks_used,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            taints=spec.taints,
            eviction_cost=0.0 if table.evictions is None else table.evictions.item(at),
        )
