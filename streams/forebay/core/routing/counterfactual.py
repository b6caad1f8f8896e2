"""Evaluate another router configuration in the recorded state of each decision (open loop).

`World.on_selection` reports each selection before it is booked. At that moment this module applies the same
eligibility, costs and policy under an alternative configuration. It only reads the world. The world keeps following the
recorded decisions, so the next evaluation also starts from the recorded state and errors do not accumulate. Bookings
always follow the recorded configuration.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from forebay.core.routing.disaggregation import (
    as_prefill_pool,
    find_decode_candidates,
    find_prefill_candidates,
    has_kept_kv,
    was_dispatched,
)
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.plan import Selection
from forebay.core.routing.router import evaluate, find_candidates, find_retry_candidates, must_queue
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.roster import CandidateRank, Roster
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
        history: recorded selection, with its own cost table.
        choice: selection under the alternative; None if the alternative would have rejected the request.
        refusal: reason for that rejection.
        would_hold: whether the alternative would have queued the request. `choice` is then the selection it would have
            made without queueing.
    """

    history: Selection
    choice: Selection | None
    refusal: Ineligible | None
    would_hold: bool

    @property
    def agrees(self) -> bool:
        """Whether both selected the same rank."""
        return self.choice is not None and selected_rank(self.choice).key == selected_rank(self.history).key

    @property
    def regret_blocks(self) -> float | None:
        """Cost of the recorded rank minus cost of the alternative's rank, in blocks, by the alternative's cost table.

        Negative if the alternative does not select the lowest cost. None if it selected no rank, or if the recorded
        rank is not one of its candidates.
        """
        if self.choice is None:
            return None
        table = self.choice.table
        at = table.roster.positions.get(selected_rank(self.history).key)
        return None if at is None else table.costs[at] - table.costs[self.choice.at]

    @property
    def overlap_blocks(self) -> int:
        """Leading prompt blocks on the device of the rank that the alternative selected; 0 without a selection."""
        return 0 if self.choice is None else self.choice.table.overlap(self.choice.at).device

    @property
    def history_overlap_blocks(self) -> int:
        """Leading prompt blocks on the device of the rank that was recorded."""
        return self.history.table.overlap(self.history.at).device


def counterfactual(world: World, pool: PoolConfigured, request: ActiveRequest, history: Selection) -> Counterfactual:
    """Return the selection that `pool`, an alternative configuration, would lead to.

    The stage is not reconsidered: if the prompt was sent to a prefill pool, only the rank in that pool is selected
    again.

    Args:
        world: state in which the recorded selection was made.
        pool: alternative configuration of the pool that made the selection.
        request: request as that pool saw it.
        history: recorded selection.
    """
    if pool.role == "encode":  # no configuration changes the selection of an encode worker
        return Counterfactual(history, history, None, would_hold=False)
    # A prefill worker's view of a request counts prefill attempts only, so look at the request itself.
    again = was_dispatched(world.requests.get(request.request_id) or request)
    try:
        pool, roster = _candidates(world, pool, request, again=again)
        choice = evaluate(world, pool, request, roster)
    except Ineligible as ineligible:
        return Counterfactual(history, None, ineligible, would_hold=False)
    return Counterfactual(history, choice, None, would_hold=not again and must_queue(pool, roster))


def _candidates(
    world: World, pool: PoolConfigured, request: ActiveRequest, *, again: bool
) -> tuple[PoolConfigured, Roster]:
    """Return the effective pool and its candidates, as `forebay.core.dispatch` does. Raises Ineligible."""
    busy = _busy(world, pool)
    if pool.role == "prefill":
        return as_prefill_pool(pool), find_prefill_candidates(world, pool, request, busy, again=again)
    if pool.role == "decode" and request.stage == "decode" and has_kept_kv(request, world.now_us):
        return pool, find_decode_candidates(world, pool, request, busy)
    return pool, find_retry_candidates(world, pool, request) if again else find_candidates(world, pool, request, busy)


def selected_rank(choice: Selection) -> CandidateRank:
    """Return the selected rank."""
    return choice.table.roster.ranks[choice.at]


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
