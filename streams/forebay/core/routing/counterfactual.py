"""Evaluate another router configuration in the recorded state of each decision (open loop).

`World.on_plan` reports each plan before it is booked. At that moment this module applies the same
eligibility, costs and policy under an alternative configuration. It only reads the world. The world keeps following the
recorded decisions, so the next evaluation also starts from the recorded state and errors do not accumulate. Bookings
always follow the recorded configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from forebay.core.routing.candidates import find_candidates, find_retry_candidates, must_queue
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.evaluation import evaluate
from forebay.core.routing.plan import Plan, StageCandidates
from forebay.core.routing.stages import find_decode_candidates, find_prefill_candidates
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
    """Selection under an alternative configuration, beside the recorded one.

    Attributes:
        history: recorded plan, with its own cost table.
        choice: plan under the alternative; None if the alternative would have rejected the request.
        refusal: reason for that rejection.
        would_hold: whether the alternative would have queued the request. `choice` is then the plan it would have
            made without queueing.
    """

    history: Plan
    choice: Plan | None
    refusal: Ineligible | None
    would_hold: bool

    @property
    def agrees(self) -> bool:
        """Whether both selected the same rank."""
        return self.choice is not None and self.choice.selected.key == self.history.selected.key

    @property
    def regret_blocks(self) -> float | None:
        """Cost of the recorded rank minus cost of the alternative's rank, in blocks, by the alternative's cost table.

        Negative if the alternative does not select the lowest cost. None if it selected no rank, or if the recorded
        rank is not one of its candidates.
        """
        if self.choice is None:
            return None
        table = self.choice.table
        at = table.roster.positions.get(self.history.selected.key)
        return None if at is None else table.costs[at] - table.costs[self.choice.at]

    @property
    def overlap_blocks(self) -> int:
        """Leading prompt blocks on the device of the rank that the alternative selected; 0 without a selection."""
        return 0 if self.choice is None else self.choice.table.overlap(self.choice.at).device

    @property
    def history_overlap_blocks(self) -> int:
        """Leading prompt blocks on the device of the rank that was recorded."""
        return self.history.table.overlap(self.history.at).device


def counterfactual(world: World, pool: PoolConfigured, history: Plan) -> Counterfactual:
    """Return the plan that `pool`, an alternative configuration, would lead to.

    The stage is not reconsidered: if the prompt was sent to a prefill pool, only the rank in that pool is selected
    again.

    Args:
        world: state in which the recorded plan was made.
        pool: alternative configuration of the pool that made the plan.
        history: recorded plan.
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
    """Return the candidates of the same stage in `pool`, as the planner does. Raises Ineligible."""
    busy, again = _busy(world, pool), request.was_dispatched
    if history.stage == "prefill":
        return find_prefill_candidates(world, pool, request, busy, again=again)
    if history.stage == "decode":
        roster = find_decode_candidates(world, pool, request, busy)
    elif again:
        roster = find_retry_candidates(world, pool, history.request)
    else:
        roster = find_candidates(world, pool, history.request, busy)
    return StageCandidates(history.stage, pool, roster, history.request, history.attempt)


def merge_runtime_settings(
    alternative: RuntimeSettings, recorded: RuntimeSettings, by_hand: RuntimeSettings
) -> RuntimeSettings:
    """Return the settings an operator changed at run time, for a comparison with `alternative`.

    Fields that the alternative changes against `recorded` keep the alternative's value. All others keep the operator's.
    """
    names = by_hand.__struct_fields__
    changed = {name: value for name in names if (value := getattr(alternative, name)) != getattr(recorded, name)}
    return msgspec.structs.replace(by_hand, **changed)


def changed_booking_fields(pool: PoolConfigured, alternative: PoolConfigured) -> list[str]:
    """Return the changed fields of `BOOKED_FIELDS`: a comparison shows their effect only in part."""
    ours, others = pool.router, alternative.router
    return [name for name in BOOKED_FIELDS if getattr(ours, name) != getattr(others, name)]


def _busy(world: World, pool: PoolConfigured) -> BusyThresholds | None:
    by_hand = world.busy.get(pool.pool)
    return by_hand and merge_runtime_settings(pool.router.busy, world.pools[pool.pool].router.busy, by_hand)
