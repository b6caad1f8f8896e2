"""Find the smallest changes that would have changed a routing decision, with the router's own selection.

Right before a decision is booked, the router selects again with one number changed. The nearest number that changes the
selection is found by bisection. A cost is a sum in which the load, the cached blocks and the settings are factors, so
the selection does not change back further away.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal

import msgspec
from msgspec.structs import replace

from forebay.core.routing.cost import Demand
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Plan, StageCandidates
from forebay.core.routing.policies import BUILT_IN, PolicyMissing
from forebay.core.selection.evaluation import demand_of, select
from forebay.core.state.prefix_index import Overlap
from forebay.core.state.roster import CandidateRank, Roster
from forebay.core.world import World
from forebay.events.control import RouterConfig
from forebay.replay.explain.decisions import name_of
from forebay.replay.explain.explanation import SelectionChange

NUMBERS = (
    "overlap_score_credit",
    "prefill_load_scale",
    "host_cache_hit_weight",
    "disk_cache_hit_weight",
    "shared_cache_hit_weight",
    "decode_active_request_weight",
    "eviction_weight",
)
SET_BY_STAGE = {"decode": ("overlap_score_credit",)}  # `forebay.core.selection.stages` overrides the configuration
LOADS = {
    "prefill_tokens": "tokens to prefill",
    "decode_blocks": "KV blocks of active requests",
    "active_requests": "active requests",
}
OTHER_POLICIES = tuple(mode for mode in BUILT_IN if mode != "direct")  # `direct` needs a request that names a worker
RIVALS_MAX = 3  # cheapest other candidates of which cache and load are changed
SETTINGS = (0.0, *(digits * 10.0**power for power in range(-4, 5) for digits in range(10, 100)))  # two digits each
TOKENS_MAX = 1 << 22  # more than a rank ever has to prefill

LoadField = Literal["prefill_tokens", "decode_blocks", "active_requests"]


def changes_of(world: World, plan: Plan) -> tuple[list[SelectionChange], list[str]]:
    """Return the changes that would have changed a selection, and notes about changes that were not evaluated.

    Call this function before the decision is booked, because it reads the world's current state.
    """
    config, repeated = plan.config, _Repeated(world, plan)
    ranks = repeated.changed_ranks
    if len(plan.table.costs) == 1:
        return [], ["There was only one candidate, so no setting changes the selection."]
    if plan.stage == "encode":
        note = "An encode worker is always selected by its number of active requests, whatever the settings."
        return [change for at in ranks for change in repeated.load(at, "active_requests")], [note]
    found: list[SelectionChange] = []
    notes: list[str] = []
    if config.mode == "kv" and config.temperature:
        notes.append("The selection was a random draw. Other costs would have changed only the probabilities.")
    elif config.mode in ("kv", "direct"):
        names = (name for name in NUMBERS if name not in SET_BY_STAGE.get(plan.stage, ()))
        found += sorted((change for name in names for change in repeated.setting(name)), key=repeated.size)
        found += (change for at in ranks for change in repeated.cached_blocks(at))
        field: LoadField = "prefill_tokens" if config.track_prefill_tokens else "decode_blocks"
        found += (change for at in ranks for change in repeated.load(at, field))
    elif config.mode in ("least-loaded", "power-of-two"):
        found += (change for at in ranks for change in repeated.load(at, "active_requests"))
    else:
        notes.append(f"The policy {config.mode} does not select by the cost settings.")
    return [*found, *repeated.policies()], notes


class _Repeated:
    """A routing decision, in the state right before it was booked."""

    def __init__(self, world: World, plan: Plan) -> None:
        self._world = world
        self._plan = plan
        self._candidates = StageCandidates(plan.stage, plan.pool, plan.roster, plan.request, plan.attempt)
        self._demand = demand_of(world, self._candidates, plan.config)
        costs = plan.table.costs
        others = sorted((at for at in range(len(costs)) if at != plan.at), key=lambda at: (costs[at], at))
        self.changed_ranks = [plan.at, *others[:RIVALS_MAX]]

    def setting(self, name: str) -> Iterator[SelectionChange]:
        """Yield the nearest lower and the nearest higher value of a setting that select another rank."""
        current: float = getattr(self._plan.config, name)
        lower = [value for value in reversed(SETTINGS) if value < current]
        for values in (lower, [value for value in SETTINGS if value > current]):
            for value, plan in self._nearest(values, partial(self._select_with, name)):
                yield self._change(plan, name, value, f"with {name} {value:g} instead of {current:g}")

    def cached_blocks(self, at: int) -> Iterator[SelectionChange]:
        """Yield with how few cached blocks the selected rank loses, or with how many a rival wins."""
        rank, name, overlap = self._plan.roster.ranks[at], name_of(self._plan.table, at), self._plan.table.overlap(at)
        cached = sum(overlap)

        def select_with(blocks: int) -> Plan | None:
            overlaps = {**self._demand.overlaps, rank.key: _resized(overlap, blocks)}
            return self._select(demand=replace(self._demand, overlaps=overlaps))

        more = range(cached + 1, len(self._plan.request.blocks) + 1)
        for blocks, plan in self._nearest(range(cached - 1, -1, -1) if at == self._plan.at else more, select_with):
            if blocks > cached:
                text = f"with {_counted(blocks, 'block')} of the prompt cached on {name}, which has {cached:,}"
            elif blocks:
                text = f"with {blocks:,} instead of {_counted(cached, 'cached block')} on {name}"
            else:
                text = f"without the {_counted(cached, 'cached block')} on {name}"
            yield self._change(plan, _key_text(rank), blocks, text)

    def load(self, at: int, field: LoadField) -> Iterator[SelectionChange]:
        """Yield how much more load the selected rank, or less load a rival, needs for another selection."""
        rank, name = self._plan.roster.ranks[at], name_of(self._plan.table, at)
        current = int(getattr(rank.load, field))

        def select_with(value: int) -> Plan | None:
            numbers = getattr(rank.load.columns, field)
            numbers[rank.load.slot] = value
            try:
                return self._select()
            finally:
                numbers[rank.load.slot] = getattr(rank.load, field)

        more = range(current + 1, current + TOKENS_MAX)
        for value, plan in self._nearest(more if at == self._plan.at else range(current - 1, -1, -1), select_with):
            text = f"with {value:,} instead of {current:,} {LOADS[field]} on {name}"
            yield self._change(plan, _key_text(rank), value, text)

    def size(self, change: SelectionChange) -> float:
        current: float = getattr(self._plan.config, change.setting)
        return abs(float(change.value) - current) / max(current, 1.0)

    def policies(self) -> Iterator[SelectionChange]:
        """Yield the selection of every other built-in policy, which may be the recorded rank."""
        for mode in OTHER_POLICIES:
            plan = None if mode == self._plan.config.mode else self._select_with("mode", mode)
            if plan is not None:
                yield self._change(plan, "mode", mode, f"with the policy {mode}")

    def _select_with(self, setting: str, value: float | str) -> Plan | None:
        config = msgspec.structs.replace(self._plan.config, **{setting: value})
        return self._select(config=config, demand=demand_of(self._world, self._candidates, config))

    def _select(
        self, config: RouterConfig | None = None, demand: Demand | None = None, roster: Roster | None = None
    ) -> Plan | None:
        candidates = replace(self._candidates, roster=roster or self._plan.roster)
        try:
            return select(self._world, candidates, config or self._plan.config, demand or self._demand, as_owner=False)
        except (Ineligible, PolicyMissing):
            return None

    def _nearest(self, values: Sequence[Any], select_with: Callable[[Any], Plan | None]) -> Iterator[tuple[Any, Plan]]:
        """Yield the first value that selects another rank, and the selection, if the last value selects another one."""

        def selects_another(value: Any) -> bool:
            plan = select_with(value)
            return plan is not None and plan.selected.key != self._plan.selected.key

        if values and selects_another(values[-1]):
            value = values[bisect_left(values, True, key=selects_another)]
            plan = select_with(value)
            assert plan is not None, "it selects another rank"
            yield value, plan

    def _change(self, plan: Plan, setting: str, value: float | str, text: str) -> SelectionChange:
        also = ", too" if plan.selected.key == self._plan.selected.key else ""
        text = f"{text}, {name_of(plan.table, plan.at)} is selected{also}"
        return SelectionChange(setting=setting, value=value, text=text, selected=_key_text(plan.selected))


def _resized(overlap: Overlap, blocks: int) -> Overlap:
    """Return the first blocks of an overlap. If it has fewer, return as many blocks on the device."""
    if blocks > sum(overlap):
        return Overlap(blocks)
    device = min(overlap.device, blocks)
    host = min(overlap.host, blocks - device)
    disk = min(overlap.disk, blocks - device - host)
    return Overlap(device, host, disk, blocks - device - host - disk)


def _key_text(rank: CandidateRank) -> str:
    return f"{rank.key[0]}/{rank.key[1]}"


def _counted(count: int, noun: str) -> str:
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
