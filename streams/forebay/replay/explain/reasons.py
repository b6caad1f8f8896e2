"""Explain in one sentence why a candidate was selected."""

from collections.abc import Collection, Iterator

from forebay.core.routing.cost import CostTable
from forebay.core.routing.eligibility import Ineligible, filter_eligible
from forebay.core.routing.plan import Plan
from forebay.core.routing.policies.power_of_two import draw_two
from forebay.core.routing.selection import softmax_weights
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.roster import session_roster
from forebay.core.state.sessions import Binding
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import World
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.replay.explain.explanation import SelectionReason


def why(world: World, plan: Plan) -> tuple[SelectionReason, str]:
    """Return why the candidate was selected, as an identifier and as a sentence.

    Call this function before the decision is booked, because it reads the world's current state.
    """
    table, at = plan.table, plan.at
    count = len(table.costs)
    hints = plan.request.hints
    if count == 1:
        return _only(world, plan)
    among = f"among the {count} ranks of {hints.worker_id}, to which the request is pinned: " if hints.worker_id else ""
    match plan.config.mode:
        case "kv" if plan.config.temperature:
            reason, text = _drawn(plan)
        case "kv" if plan.ties > 1:
            reason, text = _tie(plan)
        case "direct" if table.costs.count(table.costs[at]) > 1:
            tied = table.costs.count(table.costs[at])
            reason, text = (
                "tie_seed",
                f"{tied} candidates have the lowest cost; the request's tie seed selected this one",
            )
        case "kv" | "direct":
            reason, text = "lowest_cost", _lowest(plan)
        case "round-robin":
            turn = world.turns.get(plan.pool.pool, 0)
            reason, text = "round_robin", f"its turn: request number {turn + 1:,} of the pool, over {count} candidates"
        case "random":
            reason, text = "random", f"drawn by the request's tie seed from {count} equally likely candidates"
        case "power-of-two":
            reason, text = "power_of_two", _of_two(plan)
        case "least-loaded":
            reason, text = "least_loaded", _least_loaded(plan)
        case mode:
            reason, text = "policy", _policy(mode, plan)
    return reason, among + text


def limiting_session(
    world: World, pool: PoolConfigured, request: SubmittedRequest, candidates: Collection[HolderKey]
) -> Binding | None:
    """Return the session binding because of which `find_candidates` left only one rank; None if there was none."""
    hints = request.hints
    if not hints.session_id or not pool.router.session_ttl_s or hints.worker_id:
        return None
    bound = world.sessions.find(pool.pool, hints.session_id)
    if bound is None or any(key != (bound.worker_id, bound.rank) for key in candidates):
        return None
    try:
        roster = filter_eligible(world.roster(pool.pool), world.fleet, pool, request)
    except Ineligible:
        return None
    return bound if len(roster.ranks) > 1 and session_roster(roster, bound) is not None else None


def name_of(table: CostTable, at: int) -> str:
    """Return a candidate's name: its worker, followed by its rank if any worker in the table has several ranks."""
    candidate = table.roster.ranks[at]
    worker_id = candidate.worker.spec.worker_id
    return f"{worker_id}/{candidate.rank}" if any(other.rank for other in table.roster.ranks) else worker_id


def number(value: float) -> str:
    """Format a count or a number of blocks with up to two decimals, or two significant digits if it is below 0.01."""
    if value and abs(value) < 0.01:
        return f"{value:.2g}"
    return f"{value:,.2f}".rstrip("0").rstrip(".")


def _only(world: World, plan: Plan) -> tuple[SelectionReason, str]:
    pool, request, hints = plan.pool, plan.request, plan.request.hints
    if hints.worker_id:
        return "pinned", "the request is pinned to it"
    session = limiting_session(world, pool, request, plan.roster.positions)
    if session is not None:
        return "session", f"the session {hints.session_id} is bound to it ({pool.router.session_mode} affinity)"
    return "only_candidate", "it was the only candidate"


def _lowest(plan: Plan) -> str:
    table, at = plan.table, plan.at
    costs = table.costs
    other = min((one for one in range(len(costs)) if one != at), key=lambda one: (costs[one], one))
    theirs = name_of(table, other)
    less = costs[other] - costs[at]
    text = f"lowest cost of {len(costs)} candidates: {number(costs[at])}, {number(less)} less than {theirs}"
    details = "; ".join(_differences(plan.config, table, at, other))
    return f"{text} ({details})" if details else text


def _differences(config: RouterConfig, table: CostTable, at: int, other: int) -> Iterator[str]:
    """Yield the cost terms in which two candidates differ, the largest difference first."""
    if config.selection_policy == "lmetric":
        left = [
            max(table.prefill_blocks[one] - table.credit_blocks[one], 0.0) + table.eviction_costs.get(one, 0.0)
            for one in (at, other)
        ]
        yield (
            f"{number(left[0])} blocks to prefill times {number(table.decode_blocks[at] + 1)}, "
            f"against {number(left[1])} times {number(table.decode_blocks[other] + 1)}"
        )
        if evicted := table.eviction_costs:
            costs = [number(evicted.get(one, 0.0)) for one in (at, other)]
            yield f"of these {costs[0]} for evicted blocks, against {costs[1]}"
    else:
        mine, theirs = _parts(config, table, at), _parts(config, table, other)
        parts = sorted(mine, key=lambda part: (-abs(theirs[part] - mine[part]), part))
        for part in parts:
            if difference := theirs[part] - mine[part]:
                yield f"{number(abs(difference))} {'less' if difference > 0 else 'more'} {part}"
    if table.overlap(at) != table.overlap(other):
        yield f"{_cached(table, at, 'blocks of the prompt are cached ')}, {_cached(table, other)}"
    if table.taint_factors is not None and table.taint_factors[at] != table.taint_factors[other]:
        yield f"taint factor {table.taint_factors[at]:.3f}, against {table.taint_factors[other]:.3f}"


def _cached(table: CostTable, at: int, what: str = "") -> str:
    """Return the cached blocks of the prompt on a candidate, with the other tiers listed separately."""
    overlap = table.overlap(at)
    lower = (
        (overlap.host, "in its host memory"),
        (overlap.disk, "on its disk"),
        (overlap.store, "in its shared store"),
    )
    more = "".join(f" and {count} {where}" for count, where in lower if count)
    return f"{overlap.device} {what}on {name_of(table, at)}{more}"


def _parts(config: RouterConfig, table: CostTable, at: int) -> dict[str, float]:
    """Return the summands of a cost, as `forebay.core.routing.cost` adds them."""
    factor = 1.0 if table.taint_factors is None else table.taint_factors[at]
    credit, decode = table.credit_blocks[at], table.decode_blocks[at]
    if config.track_prefill_tokens or not config.overlap_score_credit:
        prefill = config.prefill_load_scale * max(table.prefill_blocks[at] - credit, 0.0)
        parts = {"to prefill": factor * prefill, "of decode blocks": factor * decode}
    else:
        parts = {"of decode blocks that are not cached": factor * max(decode - credit, 0.0)}
    if evicted := table.eviction_costs:
        scale = config.prefill_load_scale if "to prefill" in parts else 1.0
        parts["for evicted blocks"] = factor * scale * evicted.get(at, 0.0)
    if config.decode_active_request_weight:
        parts["for active requests"] = factor * config.decode_active_request_weight * table.active_requests[at]
    return parts


def _tie(plan: Plan) -> tuple[SelectionReason, str]:
    table, at = plan.table, plan.at
    costs = table.costs
    tied = [one for one, cost in enumerate(costs) if cost == costs[at]]
    computed = [table.roster.loads[one].computed_tokens for one in tied]
    mine = table.roster.loads[at].computed_tokens
    text = f"{len(tied)} of {len(costs)} candidates have the lowest cost, {number(costs[at])}"
    equal = computed.count(mine)
    if equal == 1:
        others = min(one for one in computed if one != mine)
        least = "this one was sent the fewest tokens to compute so far"
        return "tie_computed_tokens", f"{text}; {least}: {number(mine)}, the next {number(others)}"
    seed = "the request's tie seed selected this one"
    if equal == len(tied):
        so_far = ", and were sent the same number of tokens to compute" if mine else ""  # 0 for most decode workers
        return "tie_seed", f"{text}{so_far}; {seed}"
    return "tie_seed", f"{text}; {equal} of them were sent the fewest tokens to compute, and {seed}"


def _drawn(plan: Plan) -> tuple[SelectionReason, str]:
    table, at, temperature = plan.table, plan.at, plan.config.temperature
    weights = softmax_weights(table.costs, temperature)
    cheaper = sum(cost < table.costs[at] for cost in table.costs)
    rank = "has the lowest cost" if not cheaper else f"costs more than {cheaper} of {len(table.costs)} candidates"
    chance = 100.0 * weights[at] / sum(weights)
    return "drawn", f"drawn at temperature {temperature:g} with probability {chance:.1f} %; it {rank}"


def _of_two(plan: Plan) -> str:
    table = plan.table
    first, second = draw_two(plan.request.tie_seed, len(table.costs))
    counts = table.active_requests
    drew = f"the request's tie seed drew {name_of(table, first)} and {name_of(table, second)}"
    active = f"{counts[first]} and {counts[second]} active requests"
    if counts[first] == counts[second]:
        return f"{drew}, with {active}: equal, so the first"
    return f"{drew}, with {active}: the smaller number"


def _least_loaded(plan: Plan) -> str:
    counts = plan.table.active_requests
    least = counts[plan.at]
    tied = counts.count(least)
    if tied == 1:
        return f"fewest active requests: {least}"
    return f"{tied} candidates have the fewest active requests, {least}; the request's tie seed selected this one"


def _policy(mode: str, plan: Plan) -> str:
    table, at = plan.table, plan.at
    costs = table.costs
    best = costs.index(min(costs))
    cheaper = sum(cost < costs[at] for cost in costs)
    text = f"the policy {mode} selected it"
    if not cheaper:
        return f"{text}, which also has the lowest cost, {number(costs[at])}"
    lowest = f"{number(costs[best])} of {name_of(table, best)}"
    return f"{text}, although {cheaper} of {len(costs)} candidates cost less: {number(costs[at])} against {lowest}"
