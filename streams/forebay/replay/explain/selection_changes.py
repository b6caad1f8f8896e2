"""Evaluate one routing decision again with single changes, to find those that select another worker rank.

These functions read the world right before the decision is booked, and do not change it. Each change that they return
was evaluated with the code of the router, in the recorded state. For a number, the search goes from the recorded value
outwards in steps, and then bisects. So the result is the nearest threshold, unless two thresholds are within one step.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from math import ceil, floor, log10
from typing import Any, NamedTuple

import msgspec

from forebay.core.routing.candidates import find_candidates, find_retry_candidates
from forebay.core.routing.capacity import ranks_with_room
from forebay.core.routing.cost import Demand
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.evaluation import demand_of, select
from forebay.core.routing.plan import Plan, StageCandidates
from forebay.core.routing.policies import BUILT_IN, PolicyMissing
from forebay.core.routing.selection import softmax_weights
from forebay.core.state.holder_bits import HolderKey
from forebay.core.state.prefix_index import NO_OVERLAP, Overlap
from forebay.core.state.roster import CandidateRank, Roster
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.core.world import World
from forebay.events.control import RouterConfig
from forebay.replay.explain.choices import left_out
from forebay.replay.explain.explanation import ExcludedRank
from forebay.replay.explain.facts import ChangedThing, SelectionChange
from forebay.replay.explain.reasons import name_of, number

NUMBERS = (
    "overlap_score_credit",
    "overlap_score_credit_decay",
    "prefill_load_scale",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "shared_cache_hit_weight",
    "decode_active_request_weight",
    "eviction_weight",
)
SWITCHES = ("track_prefill_tokens", "track_active_blocks", "assume_kv_reuse")
SET_BY_STAGE = {  # `forebay.core.routing.stages` sets these, whatever the pool's configuration has
    "decode": frozenset(("overlap_score_credit", "track_prefill_tokens", "assume_kv_reuse")),
    "prefill": frozenset(("track_active_blocks",)),
}
BY_COST = ("kv", "direct")
BY_REQUESTS = ("least-loaded", "power-of-two")
OTHER_POLICIES = tuple(mode for mode in BUILT_IN if mode != "direct")  # `direct` needs a request that names a worker
STEPS = 24
RESOLUTION = 0.001  # of thresholds below 1, and relative to larger ones
WEIGHT_MAX = 1e6
TEMPERATURE_MAX = 10.0  # above, all candidates have nearly the same probability
TOKENS_MAX = 1 << 22  # more than a rank ever has to prefill
RIVALS_MAX = 3  # cheapest other candidates of which cache and load are changed
WORKERS_MAX = 5  # excluded workers that would have been selected
DIGITS = range(2, 7)  # significant digits of a threshold

# What a worker that is excluded for one reason would need.
REMEDIES = {
    "suspect": "had been ready (it was suspect)",
    "draining": "had been ready (it was draining)",
    "busy": "had not been busy",
    "full": "had room for another request",
    "missing_taint": "had the required taints",
    "missing_adapter": "had loaded the request's LoRA adapter",
    "shared_cache": "had separated the cache of the request's namespace",
    "rejected_it": "had not rejected the request",
    "rejects": "had not rejected requests",
    "had_it_last": "had been a candidate although it ran the previous attempt",
}
# Conditions of a request, with the hints that remove each and the condition in words.
CONDITIONS: tuple[tuple[str, dict[str, object], str], ...] = (
    ("worker_id", {"worker_id": "", "rank": None}, "its pin to a worker"),
    ("allowed_workers", {"allowed_workers": ()}, "its list of allowed workers"),
    ("required_taints", {"required_taints": ()}, "its required taints"),
    ("preferred_taints", {"preferred_taints": ()}, "its preferred taints"),
    ("session_id", {"session_id": ""}, "its session"),
)


class Found(NamedTuple):
    """A value that selects another rank, and the selection."""

    value: float
    plan: Plan


class RepeatedDecision:
    """A routing decision in the state in which it was made.

    Attributes:
        world: the state right before the plan is booked.
    """

    def __init__(self, world: World, plan: Plan) -> None:
        self.world = world
        self.plan = plan
        self._candidates = StageCandidates(plan.stage, plan.pool, plan.roster, plan.request, plan.attempt)
        self.demand = demand_of(world, self._candidates, plan.config)

    @property
    def rivals(self) -> list[int]:
        """Positions of the cheapest candidates that were not selected."""
        costs = self.plan.table.costs
        others = [at for at in range(len(costs)) if at != self.plan.at]
        return sorted(others, key=lambda at: (costs[at], at))[:RIVALS_MAX]

    def otherwise(
        self,
        *,
        config: RouterConfig | None = None,
        demand: Demand | None = None,
        roster: Roster | None = None,
        request: SubmittedRequest | None = None,
    ) -> Plan | None:
        """Return the selection with changes if it is another rank than the recorded one, else None.

        Args:
            config: other router configuration.
            demand: other load and cached blocks. By default they follow from the other changes.
        """
        plan = self.evaluate(config=config, demand=demand, roster=roster, request=request)
        return None if plan is None or plan.selected.key == self.plan.selected.key else plan

    def evaluate(
        self,
        *,
        config: RouterConfig | None = None,
        demand: Demand | None = None,
        roster: Roster | None = None,
        request: SubmittedRequest | None = None,
    ) -> Plan | None:
        """Return the selection with changes, or None if no rank is selected. Arguments as for `otherwise`."""
        candidates = replace(self._candidates, roster=roster or self.plan.roster, request=request or self.plan.request)
        used = config or self.plan.config
        if demand is None:
            unchanged = config is None and request is None
            demand = self.demand if unchanged else demand_of(self.world, candidates, used)
        try:
            return select(self.world, candidates, used, demand, as_owner=False)
        except (Ineligible, PolicyMissing):
            return None

    def change(
        self, plan: Plan, what: ChangedThing, setting: str, value: float | int | str | bool | None, text: str
    ) -> SelectionChange:
        """Return a change, given the selection that it leads to. `text` is the change in words."""
        worker_id, rank = plan.selected.key
        name = name_of(plan.table, plan.at)
        probability, verb = None, "selected"
        if plan.config.mode == "kv" and plan.config.temperature:
            weights = softmax_weights(plan.table.costs, plan.config.temperature)
            probability = weights[plan.at] / sum(weights)
            verb = f"drawn, with a probability of {100 * probability:.1f} %"
        also = ", too" if plan.selected.key == self.plan.selected.key else ""
        return SelectionChange(
            what=what,
            setting=setting,
            value=value,
            text=f"{text}, {name} is {verb}{also}",
            selected=f"{worker_id}/{rank}",
            probability=probability,
        )


def changes_of(world: World, plan: Plan) -> tuple[list[SelectionChange], list[str]]:
    """Return the changes that would have changed a selection, and notes about changes that were not evaluated."""
    decision = RepeatedDecision(world, plan)
    mode, stage = plan.config.mode, plan.stage
    found: list[SelectionChange] = []
    notes: list[str] = []
    if stage == "encode":
        notes.append("An encode worker is always selected by its number of active requests, whatever the settings.")
    if len(plan.table.costs) == 1:
        notes.append("There was only one candidate, so no setting changes the selection.")
    elif mode == "kv" and plan.config.temperature:
        notes.append("The selection was a random draw. Other costs would have changed only the probabilities.")
        found += _temperature_zero(decision)
    elif mode in BY_COST:
        found += _settings(decision)
        found += _cache(decision)
        found += _load(decision, "prefill_tokens" if plan.config.track_prefill_tokens else "decode_blocks")
    elif mode in BY_REQUESTS:
        found += _load(decision, "active_requests")
    else:
        notes.append(f"The policy {mode} does not select by the cost settings.")
    found += _workers(decision)
    if stage != "encode":
        found += _conditions(decision, notes)
        found += _policies(decision) if len(plan.table.costs) > 1 else []
    return found, notes


def _settings(decision: RepeatedDecision) -> list[SelectionChange]:
    """Return the smallest changes of settings of the cost, the smallest first, then switches and the temperature."""
    config, stage = decision.plan.config, decision.plan.stage
    kept = SET_BY_STAGE.get(stage, frozenset())
    numbers: list[tuple[float, SelectionChange]] = []

    def with_value(name: str, value: float | str | bool) -> Plan | None:
        return decision.otherwise(config=msgspec.structs.replace(config, **{name: value}))

    for name in NUMBERS:
        current = getattr(config, name)
        for values in () if name in kept else (_downwards(current), _upwards(current)):
            nearest = _nearest(partial(with_value, name), current, values)
            if nearest is not None:
                text = f"with {name} {nearest.value:g} instead of {current:g}"
                change = decision.change(nearest.plan, "setting", name, nearest.value, text)
                numbers.append((abs(nearest.value - current) / max(current, 1.0), change))
    found = [change for _, change in sorted(numbers, key=lambda one: one[0])]
    for name in SWITCHES:
        value = not getattr(config, name)
        plan = None if name in kept else with_value(name, value)
        if plan is not None:
            found.append(decision.change(plan, "setting", name, value, f"with {name} {str(value).lower()}"))
    other = "default" if config.selection_policy == "lmetric" else "lmetric"
    plan = with_value("selection_policy", other)
    if plan is not None:
        found.append(decision.change(plan, "setting", "selection_policy", other, f"with selection_policy {other}"))
    nearest = (
        _nearest(partial(with_value, "temperature"), 0.0, _upwards(0.0, TEMPERATURE_MAX))
        if config.mode == "kv"
        else None
    )
    if nearest is not None:
        text = f"with temperature {nearest.value:g} instead of 0"
        found.append(decision.change(nearest.plan, "temperature", "temperature", nearest.value, text))
    return found


def _temperature_zero(decision: RepeatedDecision) -> Iterator[SelectionChange]:
    config = msgspec.structs.replace(decision.plan.config, temperature=0.0)
    plan = decision.otherwise(config=config)
    if plan is not None:
        text = f"with temperature 0 instead of {decision.plan.config.temperature:g}"
        yield decision.change(plan, "temperature", "temperature", 0.0, text)


def _cache(decision: RepeatedDecision) -> Iterator[SelectionChange]:
    """Yield with how few cached blocks the selected rank loses, and with how many a rival wins."""
    plan, total = decision.plan, len(decision.plan.request.blocks)
    for at in (plan.at, *decision.rivals):
        key, name, overlap = plan.roster.ranks[at].key, name_of(plan.table, at), plan.table.overlap(at)
        cached = sum(overlap)

        def with_blocks(blocks: float, key: HolderKey = key, overlap: Overlap = overlap) -> Plan | None:
            other = _first_blocks(overlap, int(blocks)) if blocks <= sum(overlap) else Overlap(int(blocks))
            overlaps = {**decision.demand.overlaps, key: other}
            return decision.otherwise(demand=replace(decision.demand, overlaps=overlaps))

        nearest = _nearest_integer(with_blocks, cached, 0 if at == plan.at else total)
        if nearest is None:
            continue
        blocks = int(nearest.value)
        if not blocks:
            text = f"without the {_counted(cached, 'cached block')} on {name}"
        elif blocks < cached:
            text = f"with {blocks:,} instead of {_counted(cached, 'cached block')} on {name}"
        else:
            text = f"with {_counted(blocks, 'block')} of the prompt cached on {name}, which has {cached:,}"
        yield decision.change(nearest.plan, "cache", "/".join(map(str, key)), blocks, text)


def _load(decision: RepeatedDecision, field: str) -> Iterator[SelectionChange]:
    """Yield how much more load the selected rank, or less load a rival, needs for another selection.

    Args:
        field: field of the rank's load that changes.
    """
    nouns = {
        "prefill_tokens": "tokens to prefill",
        "decode_blocks": "KV blocks of active requests",
        "active_requests": "active requests",
    }
    plan = decision.plan
    for at in (plan.at, *decision.rivals):
        rank = plan.roster.ranks[at]
        current = getattr(rank.load, field)

        def with_load(value: float, rank: CandidateRank = rank) -> Plan | None:
            changed: dict[str, Any] = {field: int(value)}
            load = replace(rank.load, **changed)
            ranks = [replace(one, load=load) if one is rank else one for one in plan.roster.ranks]
            return decision.otherwise(roster=Roster(ranks), demand=decision.demand)

        nearest = _nearest_integer(with_load, int(current), int(current) + TOKENS_MAX if at == plan.at else 0)
        if nearest is not None:
            name = name_of(plan.table, at)
            text = f"with {number(nearest.value)} instead of {number(current)} {nouns[field]} on {name}"
            yield decision.change(nearest.plan, "load", "/".join(map(str, rank.key)), int(nearest.value), text)


def _workers(decision: RepeatedDecision) -> Iterator[SelectionChange]:
    """Yield the excluded workers because of which another rank would have been selected."""
    world, plan = decision.world, decision.plan
    excluded: dict[tuple[str, str], list[ExcludedRank]] = {}
    for one in left_out(world, plan.pool, plan.request, plan.roster.positions):
        if len(one.reasons) == 1 and one.reasons[0] in REMEDIES:
            excluded.setdefault((one.seen.worker_id, one.reasons[0]), []).append(one)
    count = 0
    for (worker_id, reason), ranks in sorted(excluded.items()):
        worker = world.fleet.get(worker_id)
        assert worker is not None, "it is in the fleet"
        more = [
            CandidateRank(worker, one.seen.rank, world.load.rank_load(*key), key)
            for one in ranks
            if (key := (worker_id, one.seen.rank))
        ]
        roster = Roster(sorted([*plan.roster.ranks, *more], key=lambda rank: rank.key))
        other = decision.otherwise(roster=roster)
        if other is not None and count < WORKERS_MAX:
            count += 1
            text = f"if {worker_id} {REMEDIES[reason]}"
            cost = f" at a cost of {number(other.table.costs[other.at])}" if plan.config.mode in BY_COST else ""
            change = decision.change(other, "worker", worker_id, reason, text)
            yield msgspec.structs.replace(change, text=change.text + cost)


def _conditions(decision: RepeatedDecision, notes: list[str]) -> Iterator[SelectionChange]:
    """Yield the request's conditions without which another rank would have been selected."""
    plan, hints = decision.plan, decision.plan.request.hints
    given = [one for one in CONDITIONS if any(getattr(hints, name) != value for name, value in one[1].items())]
    roster = _roster_for(decision, plan.request) if given else None
    if given and (roster is None or list(roster.positions) != list(plan.roster.positions)):
        notes.append("The candidates of this attempt depend on earlier attempts, so the request's conditions stay.")
        given = []
    for name, removed, words in given:
        request = replace(plan.request, hints=msgspec.structs.replace(hints, **removed))
        roster = _roster_for(decision, request)
        other = None if roster is None else decision.otherwise(roster=roster, request=request)
        if other is not None:
            yield decision.change(other, "request", name, None, f"if the request had come without {words}")
    override = hints.override
    if override is not None and plan.stage != "decode":  # the stage `decode` has an override of its own
        other = decision.otherwise(config=plan.pool.router)
        if other is not None:
            names = ", ".join(one for one in override.__struct_fields__ if getattr(override, one) is not None)
            text = f"if the request had not overridden {names}"
            yield decision.change(other, "request", "override", None, text)


def _roster_for(decision: RepeatedDecision, request: SubmittedRequest) -> Roster | None:
    """Return the candidates of a request with other hints, as the router finds them; None if there is none."""
    world, pool = decision.world, decision.plan.pool
    try:
        if decision.plan.attempt:
            roster = find_retry_candidates(world, pool, request)
        else:
            roster = find_candidates(world, pool, request)
    except Ineligible:
        return None
    return ranks_with_room(pool, roster) or roster


def _policies(decision: RepeatedDecision) -> Iterator[SelectionChange]:
    """Yield the selection of every other built-in policy, which may be the recorded rank."""
    config = decision.plan.config
    for mode in OTHER_POLICIES:
        plan = None if mode == config.mode else decision.evaluate(config=msgspec.structs.replace(config, mode=mode))
        if plan is not None:
            yield decision.change(plan, "policy", "mode", mode, f"with the policy {mode}")


def _nearest(select_with: Callable[[float], Plan | None], current: float, values: Sequence[float]) -> Found | None:
    """Return the value nearest to `current` that selects another rank, rounded away from `current`.

    Args:
        select_with: returns the selection with a value if it is another rank.
        values: values to try, from `current` outwards.
    """
    same = current
    for value in values:
        plan = select_with(value)
        if plan is None:
            same = value
            continue
        found = Found(value, plan)
        while abs(found.value - same) > RESOLUTION * max(1.0, found.value):
            middle = (same + found.value) / 2
            plan = select_with(middle)
            if plan is None:
                same = middle
            else:
                found = Found(middle, plan)
        return _rounded(select_with, found, same, value)
    return None


def _rounded(select_with: Callable[[float], Plan | None], found: Found, same: float, limit: float) -> Found:
    """Return a value with few digits that has the selection of `found`, between `found` and `limit` if possible."""
    towards = ceil if limit > same else floor
    for digits in DIGITS:
        unit = max(RESOLUTION, 10.0 ** (floor(log10(abs(found.value) or 1.0)) - digits + 1))
        value = float(f"{towards(found.value / unit) * unit:.{digits}g}")
        if min(found.value, limit) <= value <= max(found.value, limit):
            plan = select_with(value)
            if plan is not None and plan.selected.key == found.plan.selected.key:
                return Found(value, plan)
    return found


def _nearest_integer(select_with: Callable[[float], Plan | None], current: int, limit: int) -> Found | None:
    """Return the integer nearest to `current` and up to `limit` that selects another rank.

    The selection must not change back between the result and `limit`, as for a cost that grows with the value.
    """
    plan = None if current == limit else select_with(limit)
    if plan is None:
        return None
    same, found = current, Found(limit, plan)
    while abs(found.value - same) > 1:
        middle = (same + int(found.value)) // 2
        plan = select_with(middle)
        if plan is None:
            same = middle
        else:
            found = Found(middle, plan)
    return found


def _downwards(current: float) -> Sequence[float]:
    return [current * (STEPS - step) / STEPS for step in range(1, STEPS + 1)] if current else ()


def _upwards(current: float, limit: float = WEIGHT_MAX) -> Sequence[float]:
    values = [current + max(current, 1.0) * (1.3**step - 1.0) / 8 for step in range(1, 2 * STEPS + 1)]
    return [value for value in values if value <= limit]


def _first_blocks(overlap: Overlap, blocks: int) -> Overlap:
    """Return the part of an overlap that covers the first blocks of the prompt."""
    device = min(overlap.device, blocks)
    host = min(overlap.host, blocks - device)
    disk = min(overlap.disk, blocks - device - host)
    return NO_OVERLAP if not blocks else Overlap(device, host, disk, blocks - device - host - disk)


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
