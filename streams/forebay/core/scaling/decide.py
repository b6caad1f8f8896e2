"""The planner's decision: propose a size for each pool, guard each change, and fit the sizes to the GPU budget.

A pool keeps its size if its last change has no reply yet, if the planner is paused, or if the pool is not observed. A
size set by an operator comes before every proposal. A change that reverses the last one waits for the cool-down, and no
later step of the decision reverses it either: the limits come before this check, and the budget keeps to its result.
"""

from collections.abc import Sequence

from forebay.core.scaling import budget, load, throughput
from forebay.core.scaling.proposal import Proposal
from forebay.core.scaling.state import PlannerState, is_overdue
from forebay.events.scaling import (
    PlannerSettings,
    PoolDecision,
    PoolDemand,
    PoolScaling,
    Reason,
    ScalingDecided,
)

LACKS_INPUT: frozenset[Reason] = frozenset({"no_observation", "no_demand", "no_profile", "insufficient_data"})
KEPT: frozenset[Reason] = frozenset({"manual", "in_progress", "paused", "no_observation"})
US_PER_S = 1_000_000


def decide(state: PlannerState) -> ScalingDecided | None:
    """Return the decision that follows from the state, without its time.

    The result depends on nothing but the state, so every reader of the topic derives the same decision.

    Returns:
        The decision about every pool of the settings, or None if no planner has claimed the topic.
    """
    settings = state.settings
    if settings is None:
        return None
    guarded = [(pool, _guarded(state, settings, pool)) for pool in settings.pools]
    return ScalingDecided(
        planner_epoch=state.epoch,
        after=max(state.effective, 0),
        pools=tuple(_within_budget(state, settings, guarded)),
        advisory=settings.advisory,
    )


def _guarded(state: PlannerState, settings: PlannerSettings, pool: PoolScaling) -> PoolDecision:
    """Return the decision about one pool before the budget."""
    current = state.size(pool)
    if current is None:
        return _decision(pool, 0, Proposal(0, "no_observation"), 0)
    if state.open is not None and not is_overdue(state):
        return _decision(pool, current, Proposal(current, "in_progress"), current)
    manual = state.manual.get((pool.group, pool.pool))
    if manual is not None:
        return _decision(pool, current, Proposal(manual, "manual"), manual)
    if state.paused:
        return _decision(pool, current, Proposal(current, "paused"), current)
    if state.last_observed(pool) is None:
        return _decision(pool, current, Proposal(current, "no_observation"), current)
    proposal = _proposal(state, settings, pool, current)
    size = max(current - settings.max_change, min(current + settings.max_change, proposal.size))
    size = max(pool.min_size, min(pool.max_size, size))
    if reason := _hold(state, settings, pool, current, size):
        return _decision(pool, current, Proposal(proposal.size, reason), current)
    if size != proposal.size:
        proposal = Proposal(proposal.size, "limited")
    return _decision(pool, current, proposal, size)


def _proposal(state: PlannerState, settings: PlannerSettings, pool: PoolScaling, current: int) -> Proposal:
    if settings.method == "simulate":
        return _simulated(state, pool, current)
    history = [one for past in state.history for one in past.pools if (one.group, one.pool) == (pool.group, pool.pool)]
    if settings.method == "load":
        return load.propose(pool, settings, history, current)
    lower = throughput.propose(pool, settings, _demand(state, pool), history[-1], current)
    if settings.method == "throughput":
        return lower
    loaded = load.propose(pool, settings, history, current)
    return lower if lower.reason not in LACKS_INPUT and lower.size > loaded.size else loaded


def _demand(state: PlannerState, pool: PoolScaling) -> PoolDemand | None:
    """Return the forecast for a pool. A forecast that does not know the newest observation may be of any age."""
    if state.forecast is None or state.forecast[1].observed != state.observed:
        return None
    pools = state.forecast[1].pools
    return next((one for one in pools if (one.group, one.pool) == (pool.group, pool.pool)), None)


def _simulated(state: PlannerState, pool: PoolScaling, current: int) -> Proposal:
    """Return the smallest simulated size that attains the target, or the best one if none does."""
    if state.simulated is None:
        return Proposal(current, "no_demand")
    sizes = [one for one in state.simulated.sizes if (one.group, one.pool) == (pool.group, pool.pool)]
    if not sizes:
        return Proposal(current, "no_demand")
    attaining = [one.size for one in sizes if one.attained >= state.simulated.target]
    if attaining:
        return Proposal(min(attaining))
    best = max(sizes, key=lambda one: (one.attained, -one.size))
    return Proposal(best.size, "target_unattainable")


def _hold(state: PlannerState, settings: PlannerSettings, pool: PoolScaling, current: int, size: int) -> Reason | None:
    """Return why the pool must not change to `size` now, or None if it may."""
    change = state.changes.get((pool.group, pool.pool))
    if change is None or size == current:
        return None
    age_us = state.now_us - change.at_us
    observed = state.last_observed(pool)
    starting = change.up and observed is not None and observed.ready < current and age_us < pool.startup_s * US_PER_S
    # Workers that start do not show in the load yet. A forecast already counts them.
    if starting and (size < current or settings.method in {"load", "both"}):
        return "starting"
    if change.up != (size > current) and age_us < settings.cooldown_s * US_PER_S:
        return "cooldown"
    return None


def _within_budget(
    state: PlannerState, settings: PlannerSettings, guarded: Sequence[tuple[PoolScaling, PoolDecision]]
) -> list[PoolDecision]:
    """Fit the sizes to the GPU budget, except those that must be kept. They count in it."""
    used = sum(pool.gpus_per_worker * _kept(pool, one) for pool, one in guarded if one.reason in KEPT)
    fitted = budget.fit(
        [_wanted(state, settings, pool, one) for pool, one in guarded if one.reason not in KEPT],
        budget_gpus=max(settings.gpu_budget - used, 0) if settings.gpu_budget else None,
        min_gpus=max(settings.min_gpus - used, 0),
    )
    sizes = iter(fitted.sizes)
    found = []
    for pool, one in guarded:
        if one.reason in KEPT:
            found.append(one)
            continue
        size, reason = next(sizes), one.reason
        if not fitted.feasible:  # no size of 0: it would end a system that runs
            size = min(one.from_size, one.to_size)
            reason = "budget_below_minimum" if size == one.from_size else one.reason
        elif size != one.to_size:
            reason = "gpu_budget"
        found.append(_decision(pool, one.from_size, Proposal(one.proposed, reason), size))
    return found


def _kept(pool: PoolScaling, one: PoolDecision) -> int:
    """Return the workers of a pool that keeps its size. A pool that was never observed has at least `min_size`."""
    return max(one.to_size, pool.min_size) if one.reason == "no_observation" else one.to_size


def _wanted(state: PlannerState, settings: PlannerSettings, pool: PoolScaling, one: PoolDecision) -> budget.Wanted:
    current, size = one.from_size, one.to_size
    low = current if _hold(state, settings, pool, current, current - 1) else pool.min_size
    high = current if _hold(state, settings, pool, current, current + 1) else pool.max_size
    return budget.Wanted(current, size, min(low, size), max(high, size), pool.gpus_per_worker)


def _decision(pool: PoolScaling, current: int, proposal: Proposal, size: int) -> PoolDecision:
    reason = proposal.reason
    if reason is None:
        reason = "hold" if size == current else "scale_up" if size > current else "scale_down"
    return PoolDecision(
        group=pool.group, pool=pool.pool, from_size=current, to_size=size, proposed=proposal.size, reason=reason
    )
