"""The planner's decision: propose a size for each pool, guard each change, and fit the sizes to the GPU budget.

A pool keeps its size if its last change has no reply yet, if the planner is paused, or if the pool is not observed. A
size set by an operator comes before every proposal. A change that reverses the last one waits for the cool-down, and no
later step of the decision reverses it either: the limits come before this check, and the budget keeps to its result.

A pool grows only into GPUs that are free. Workers that were removed use theirs until they have drained, and also count
in the largest size of their pool.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from forebay.core.scaling import budget, load, throughput
from forebay.core.scaling.proposal import Proposal, SimulatedAttainment
from forebay.core.scaling.state import PlannerState, overdue
from forebay.events.scaling import PlannerSettings, PoolDecision, PoolDemand, PoolScaling, Reason, ScalingDecided

LACKS_INPUT: frozenset[Reason] = frozenset({"no_observation", "no_demand", "no_profile", "insufficient_data"})
KEPT: frozenset[Reason] = frozenset({"manual", "in_progress", "paused", "no_observation"})
US_PER_S = 1_000_000


@dataclass(frozen=True, slots=True)
class MethodProposal:
    """Proposal of one method. Method `both` has one of each of its two methods."""

    method: Literal["throughput", "load", "simulate"]
    proposal: Proposal


@dataclass(frozen=True, slots=True)
class PoolSizing:
    """Steps that led to the size of one pool.

    Attributes:
        demand: forecast for it that knows the newest observation; None if there is none.
        proposals: proposals of the methods; empty if the pool keeps its size without one, or an operator has set it.
        limited: the proposed size within the largest change and the limits of the size; None without a proposal.
        guarded: decision before the GPU budget.
    """

    pool: PoolScaling
    demand: PoolDemand | None
    proposals: tuple[MethodProposal, ...]
    limited: int | None
    guarded: PoolDecision
    decided: PoolDecision


@dataclass(frozen=True, slots=True)
class Derivation:
    """A decision that follows from a state, and the steps that led to it."""

    decision: ScalingDecided
    sizings: tuple[PoolSizing, ...]


def decide(state: PlannerState) -> ScalingDecided | None:
    """Return the decision about every pool, without its time, or None if no planner has claimed the topic.

    The result depends on nothing but the state, so every reader of the topic derives the same decision.
    """
    derivation = derive(state)
    return derivation.decision if derivation is not None else None


def derive(state: PlannerState) -> Derivation | None:
    settings = state.settings
    if settings is None:
        return None
    guarded = [_guarded(state, settings, pool) for pool in settings.pools]
    sizings = tuple(_within_budget(state, settings, guarded))
    decision = ScalingDecided(
        planner_epoch=state.epoch,
        after=max(state.effective, 0),
        pools=tuple(one.decided for one in sizings),
        advisory=settings.advisory,
    )
    return Derivation(decision, sizings)


def _guarded(state: PlannerState, settings: PlannerSettings, pool: PoolScaling) -> PoolSizing:
    demand = _demand(state, pool)
    current = state.size(pool)
    if kept := _kept(state, pool, current):
        decision = _decision(pool, current or 0, kept, kept.size)
        return PoolSizing(pool, demand, (), None, decision, decision)
    assert current is not None, "a pool of unknown size keeps it"
    proposals = _proposals(state, settings, pool, demand, current)
    proposal = _chosen(proposals)
    size = max(current - settings.max_change, min(current + settings.max_change, proposal.size))
    size = max(pool.min_size, min(_most(state, pool, current), size))
    if reason := _hold(state, settings, pool, current, size):
        decision = _decision(pool, current, Proposal(proposal.size, reason), current)
    elif size != proposal.size:
        decision = _decision(pool, current, Proposal(proposal.size, "limited"), size)
    else:
        decision = _decision(pool, current, proposal, size)
    return PoolSizing(pool, demand, proposals, size, decision, decision)


def _most(state: PlannerState, pool: PoolScaling, current: int) -> int:
    """Return the largest size that a pool may get now, not below its present size if that is within the limits."""
    removed = state.running(pool) - current
    return max(pool.max_size - removed, min(current, pool.max_size))


def _kept(state: PlannerState, pool: PoolScaling, current: int | None) -> Proposal | None:
    """Return the size that comes before every proposal, None if the methods shall propose one."""
    key = (pool.group, pool.pool)
    manual = state.manual.get(key)
    if current is None:
        if manual is None:
            return Proposal(0, "no_observation")
        current = 0  # a pool without workers has no observation, so only an operator can start it
    if key in state.open and key not in overdue(state):
        return Proposal(current, "in_progress")
    if manual is not None:
        return Proposal(manual, "manual")
    if state.paused:
        return Proposal(current, "paused")
    if state.last_observed(pool) is None:
        return Proposal(current, "no_observation")
    return None


def _proposals(
    state: PlannerState, settings: PlannerSettings, pool: PoolScaling, demand: PoolDemand | None, current: int
) -> tuple[MethodProposal, ...]:
    if settings.method == "simulate":
        return (MethodProposal("simulate", _simulated(state, settings, pool, current)),)
    found: list[MethodProposal] = []
    if settings.method in {"throughput", "both"}:
        lower = throughput.propose(pool, settings, demand, state.last_observed(pool), current)
        found.append(MethodProposal("throughput", lower))
    if settings.method in {"load", "both"}:
        history = [
            one for past in state.history for one in past.pools if (one.group, one.pool) == (pool.group, pool.pool)
        ]
        found.append(MethodProposal("load", load.propose(pool, settings, history, current)))
    return tuple(found)


def _chosen(proposals: Sequence[MethodProposal]) -> Proposal:
    """Return the last proposal, unless the first one is a larger lower bound."""
    first, last = proposals[0].proposal, proposals[-1].proposal
    return first if first.reason not in LACKS_INPUT and first.size > last.size else last


def _demand(state: PlannerState, pool: PoolScaling) -> PoolDemand | None:
    """Return the forecast for a pool. A forecast that does not know the newest observation may be of any age."""
    if state.forecast is None or state.forecast[1].observed != state.observed:
        return None
    pools = state.forecast[1].pools
    return next((one for one in pools if (one.group, one.pool) == (pool.group, pool.pool)), None)


def _simulated(state: PlannerState, settings: PlannerSettings, pool: PoolScaling, current: int) -> Proposal:
    """Return the smallest simulated size that attains the target, or the best one if none does.

    A smaller size than the present one must attain the target by a margin.
    """
    if state.simulated is None:
        return Proposal(current, "no_demand")
    sizes = [one for one in state.simulated.sizes if (one.group, one.pool) == (pool.group, pool.pool)]
    if not sizes:
        return Proposal(current, "no_demand")
    basis = (SimulatedAttainment(state.simulated.target, tuple((one.size, one.attained) for one in sizes)),)
    target = state.simulated.target
    attaining = [one.size for one in sizes if one.attained >= target]
    if attaining:
        size = min(attaining)
        if size >= current:
            return Proposal(size, basis=basis)
        # A pool shrinks only to a size at which fewer requests miss the targets than may miss them.
        missed_max = (1 - target) * settings.down_sensitivity
        enough = [one.size for one in sizes if 1 - one.attained <= missed_max]
        size = min(min(enough, default=current), current)
        return Proposal(size, "consolidation_refused" if size == current else None, basis)
    best = max(sizes, key=lambda one: (one.attained, -one.size))
    return Proposal(best.size, "target_unattainable", basis)


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
    # The load that led to a reduction is not a reason for another one, once the actuator has replied.
    if not change.up and size < current and change.observed == state.observed and settings.method in {"load", "both"}:
        return "no_observation"
    if change.up != (size > current) and age_us < settings.cooldown_s * US_PER_S:
        return "cooldown"
    return None


def _within_budget(state: PlannerState, settings: PlannerSettings, guarded: Sequence[PoolSizing]) -> list[PoolSizing]:
    """Fit the sizes to the GPU budget, except those that must be kept. They count in it."""
    used = sum(gpus_before_budget(one) for one in guarded if one.guarded.reason in KEPT)
    fitted = budget.fit(
        [_wanted(state, settings, one.pool, one.guarded) for one in guarded if one.guarded.reason not in KEPT],
        budget_gpus=max(settings.gpu_budget - used, 0) if settings.gpu_budget else None,
        min_gpus=max(settings.min_gpus - used, 0),
    )
    sizes = iter(_within_free_gpus(state, settings, guarded, fitted.sizes) if fitted.feasible else fitted.sizes)
    found = []
    for sizing in guarded:
        one = sizing.guarded
        if one.reason in KEPT:
            found.append(sizing)
            continue
        size, reason = next(sizes), one.reason
        if not fitted.feasible:  # no size of 0: it would end a system that runs
            size = min(one.from_size, one.to_size)
            reason = "budget_below_minimum" if size == one.from_size else one.reason
        elif size != one.to_size:
            reason = "gpu_budget"
        decided = _decision(sizing.pool, one.from_size, Proposal(one.proposed, reason), size)
        found.append(replace(sizing, decided=decided))
    return found


def _within_free_gpus(
    state: PlannerState, settings: PlannerSettings, guarded: Sequence[PoolSizing], sizes: Sequence[int]
) -> Sequence[int]:
    """Fit growth in `sizes`, those of the pools not kept, into the GPUs that no worker uses now. Keep reductions."""
    if not settings.gpu_budget:
        return sizes
    used = sum(one.pool.gpus_per_worker * state.running(one.pool) for one in guarded)
    used += sum(
        max(0, gpus_before_budget(one) - one.pool.gpus_per_worker * state.running(one.pool))
        for one in guarded
        if one.guarded.reason in KEPT
    )
    changing = [one for one in guarded if one.guarded.reason not in KEPT]
    growing = [
        budget.Wanted(one.guarded.from_size, size, one.guarded.from_size, size, one.pool.gpus_per_worker)
        for one, size in zip(changing, sizes, strict=True)
        if size > one.guarded.from_size
    ]
    present = sum(one.current * one.gpus for one in growing)
    fitted = budget.fit(growing, max(settings.gpu_budget - used, 0) + present, 0)
    grown = iter(fitted.sizes)
    return [next(grown) if size > one.guarded.from_size else size for one, size in zip(changing, sizes, strict=True)]


def gpus_before_budget(sizing: PoolSizing) -> int:
    """Return the GPUs that a pool takes of the budget. A pool that was never observed has at least `min_size`."""
    one, pool = sizing.guarded, sizing.pool
    workers = max(one.to_size, pool.min_size) if one.reason == "no_observation" else one.to_size
    return pool.gpus_per_worker * workers


def _wanted(state: PlannerState, settings: PlannerSettings, pool: PoolScaling, one: PoolDecision) -> budget.Wanted:
    current, size = one.from_size, one.to_size
    low = current if _hold(state, settings, pool, current, current - 1) else pool.min_size
    high = current if _hold(state, settings, pool, current, current + 1) else _most(state, pool, current)
    return budget.Wanted(current, size, min(low, size), max(high, size), pool.gpus_per_worker)


def _decision(pool: PoolScaling, current: int, proposal: Proposal, size: int) -> PoolDecision:
    reason = proposal.reason
    if reason is None:
        reason = "hold" if size == current else "scale_up" if size > current else "scale_down"
    return PoolDecision(
        group=pool.group, pool=pool.pool, from_size=current, to_size=size, proposed=proposal.size, reason=reason
    )
