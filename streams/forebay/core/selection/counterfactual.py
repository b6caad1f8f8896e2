"""Evaluate another router configuration in the recorded state of each decision (open loop).

A replay calls `counterfactual` for each recorded plan before the plan is booked (`World.on_plan`). At that moment this
module applies eligibility, costs and policy under the alternative configuration. It only reads the world. The world
then follows the recorded decision, so the next evaluation also starts from the recorded state and errors do not
accumulate. Bookings always follow the recorded configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Plan, StageCandidates
from forebay.core.selection.candidates import find_candidates, find_retry_candidates, must_queue
from forebay.core.selection.evaluation import evaluate
from forebay.core.selection.stages import find_decode_candidates, find_prefill_candidates
from forebay.core.state.active_request import ActiveRequest
from forebay.core.world import World
from forebay.events.control import BusyThresholds, DisaggConfig, PoolConfigured

# These fields change what is booked. Bookings follow the recorded configuration, so a comparison of single decisions
# shows only a part of their effect.
BOOKED_FIELDS = (
    "track_prefill_tokens",
    "track_active_blocks",
    "track_output_blocks",
    "assume_kv_reuse",
    "use_kv_events",
    "ttl_s",
    "approximate_blocks_max",
    "predicted_ttl_s",
    "session_ttl_s",
)

RuntimeSettings = TypeVar("RuntimeSettings", BusyThresholds, DisaggConfig)
Alternative = Callable[[PoolConfigured], PoolConfigured]  # maps the recorded configuration to another


@dataclass(frozen=True, slots=True, eq=False)
class Counterfactual:
    """Selection under an alternative configuration, and the recorded selection in the same state.

    Attributes:
        choice: plan under the alternative configuration; None if it would have rejected the request (`refusal`).
        would_hold: whether the alternative would have queued the request. If so, `choice` is the plan that it would
            have made without a queue.
    """

    history: Plan
    choice: Plan | None
    refusal: Ineligible | None
    would_hold: bool

    @property
    def agrees(self) -> bool:
        return self.choice is not None and self.choice.selected.key == self.history.selected.key

    @property
    def regret_blocks(self) -> float | None:
        """Cost of the recorded rank minus cost of the alternative's rank, in blocks, by the alternative's cost table.

        It is negative if the alternative did not select the lowest cost. None if the alternative selected no rank, or
        if the recorded rank is not one of its candidates.
        """
        if self.choice is None:
            return None
        table = self.choice.table
        at = table.roster.positions.get(self.history.selected.key)
        return None if at is None else table.costs[at] - table.costs[self.choice.at]

    @property
    def overlap_blocks(self) -> int:
        """Leading prompt blocks that the alternative's rank has cached on its device; 0 if it selected no rank."""
        return 0 if self.choice is None else self.choice.table.overlap(self.choice.at).device

    @property
    def history_overlap_blocks(self) -> int:
        """Leading prompt blocks that the recorded rank has cached on its device."""
        return self.history.table.overlap(self.history.at).device


def counterfactual(world: World, pool: PoolConfigured, history: Plan) -> Counterfactual:
    """Compare a recorded plan with the selection under the alternative configuration `pool`, in the same state.

    The stage stays as recorded. For example, if the prompt was sent to a prefill pool, only the rank in that pool is
    selected again.
    """
    if history.stage == "encode":  # no configuration changes the selection of an encode worker
        return Counterfactual(history, history, None, would_hold=False)
    request = world.requests.get(history.request.request_id) or ActiveRequest(history.request)
    again = request.was_dispatched
    try:
        candidates = _candidates(world, pool, history, request)
        choice = evaluate(world, candidates, as_owner=False)
    except Ineligible as ineligible:
        return Counterfactual(history, None, ineligible, would_hold=False)
    would_hold = not again and must_queue(candidates.pool, candidates.roster)
    return Counterfactual(history, choice, None, would_hold=would_hold)


def _candidates(world: World, pool: PoolConfigured, history: Plan, request: ActiveRequest) -> StageCandidates:
    """Return the candidates of the recorded stage under the alternative configuration `pool`."""
    busy, again = _busy(world, pool), request.was_dispatched
    if history.stage == "prefill":
        return find_prefill_candidates(world, pool, request, busy, again=again)
    if history.stage == "decode":
        roster = find_decode_candidates(world, pool, request, busy)
    elif again:
        roster = find_retry_candidates(world, pool, history.request, request.rejected_by)
    else:
        roster = find_candidates(world, pool, history.request, busy)
    return StageCandidates(history.stage, pool, roster, history.request, history.attempt)


def merge_runtime_settings(
    alternative: RuntimeSettings, recorded: RuntimeSettings, by_hand: RuntimeSettings
) -> RuntimeSettings:
    """Return the settings under an alternative configuration after an operator set `by_hand` at run time.

    Fields in which the alternative differs from the recorded configuration have the alternative's value. All other
    fields have the operator's value.
    """
    names = by_hand.__struct_fields__
    changed = {name: value for name in names if (value := getattr(alternative, name)) != getattr(recorded, name)}
    return msgspec.structs.replace(by_hand, **changed)


def changed_booking_fields(pool: PoolConfigured, alternative: PoolConfigured) -> list[str]:
    """Return the names in `BOOKED_FIELDS` in which two configurations of a pool differ."""
    ours, others = pool.router, alternative.router
    return [name for name in BOOKED_FIELDS if getattr(ours, name) != getattr(others, name)]


def _busy(world: World, pool: PoolConfigured) -> BusyThresholds | None:
    by_hand = world.settings.busy.get(pool.pool)
    return by_hand and merge_runtime_settings(pool.router.busy, world.pools[pool.pool].router.busy, by_hand)
