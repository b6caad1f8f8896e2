"""What another configuration would have chosen, in the very state in which history chose.

Theory of operation. `World.on_choice` tells of a choice before anything is booked by it; there the same eligibility,
costs and policy are asked again under an alternative. Only looking: the world stays history's, so that the next
question is asked in history's state, too, and nothing drifts. What history's rule booked stays booked by it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from forebay.core.routing.disaggregation import decoders, is_kept, prefillers, prefilling, was_sent
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.router import Choice, consider, find, find_again, must_wait
from forebay.core.state.requests import Request
from forebay.core.state.roster import Roster, Seat
from forebay.core.world import World
from forebay.events.control import BusyThresholds, DisaggConfig, PoolConfigured

# What these decide was booked by history's rule before: a choice in history's state cannot show all they change.
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

ByHand = TypeVar("ByHand", BusyThresholds, DisaggConfig)
Alternative = Callable[[PoolConfigured], PoolConfigured]  # from history's configuration to another


@dataclass(frozen=True, slots=True, eq=False)
class Counterfactual:
    """A choice of an alternative beside history's.

    Attributes:
        history: what history chose, by its own table.
        choice: what the alternative would have chosen; None when it would have refused.
        refusal: why it would have refused.
        would_hold: whether the alternative would have let the request wait in its queue; `choice` is who would have
            got it otherwise.
    """

    history: Choice
    choice: Choice | None
    refusal: Ineligible | None
    would_hold: bool

    @property
    def agrees(self) -> bool:
        """Whether both chose the same rank."""
        return self.choice is not None and seat_of(self.choice).key == seat_of(self.history).key

    @property
    def regret_blocks(self) -> float | None:
        """What history's rank costs more than the alternative's, in blocks, by the alternative's own table.

        Below zero where the alternative does not take the cheapest. None when it has no choice, or when history's rank
        is none of its candidates.
        """
        if self.choice is None:
            return None
        table = self.choice.table
        at = table.roster.positions.get(seat_of(self.history).key)
        return None if at is None else table.costs[at] - table.costs[self.choice.at]

    @property
    def overlap_blocks(self) -> int:
        """Leading blocks of the prompt on the device of the rank that the alternative chose; 0 without a choice."""
        return 0 if self.choice is None else self.choice.table.overlap(self.choice.at).device

    @property
    def history_overlap_blocks(self) -> int:
        """The same of the rank that history chose."""
        return self.history.table.overlap(self.history.at).device


def counterfactual(world: World, pool: PoolConfigured, request: Request, history: Choice) -> Counterfactual:
    """What would be chosen if `pool` were configured so; `world` is as it was when history chose.

    Where a prompt is computed stays history's: only who of that pool gets it is asked.
    """
    if pool.role == "encode":  # no configuration changes who encodes
        return Counterfactual(history, history, None, would_hold=False)
    # What a prefill worker sees of a request has another count of attempts.
    again = was_sent(world.requests.get(request.request_id) or request)
    try:
        pool, roster = _candidates(world, pool, request, again=again)
        choice = consider(world, pool, request, roster)
    except Ineligible as ineligible:
        return Counterfactual(history, None, ineligible, would_hold=False)
    return Counterfactual(history, choice, None, would_hold=not again and must_wait(pool, roster))


def _candidates(world: World, pool: PoolConfigured, request: Request, *, again: bool) -> tuple[PoolConfigured, Roster]:
    """The pool as it chooses, and who of it may be asked, as `forebay.core.dispatch` does. Raises Ineligible."""
    busy = _busy(world, pool)
    if pool.role == "prefill":
        return prefilling(pool), prefillers(world, pool, request, busy, again=again)
    if pool.role == "decode" and request.stage == "decode" and is_kept(request, world.now_us):
        return pool, decoders(world, pool, request, busy)
    return pool, find_again(world, pool, request) if again else find(world, pool, request, busy)


def seat_of(choice: Choice) -> Seat:
    """The rank that was chosen."""
    return choice.table.roster.seats[choice.at]


def changed_by_hand(alternative: ByHand, recorded: ByHand, by_hand: ByHand) -> ByHand:
    """What was set by hand where the alternative, and no longer `recorded`, is what is configured.

    What the alternative changes is not undone by it.
    """
    names = by_hand.__struct_fields__
    changed = {name: value for name in names if (value := getattr(alternative, name)) != getattr(recorded, name)}
    return msgspec.structs.replace(by_hand, **changed)


def booked_by_history(pool: PoolConfigured, alternative: PoolConfigured) -> list[str]:
    """The changed fields whose bookings are history's own: what they change shows in a choice only in part."""
    ours, others = pool.router, alternative.router
    return [name for name in BOOKED_FIELDS if getattr(ours, name) != getattr(others, name)]


def _busy(world: World, pool: PoolConfigured) -> BusyThresholds | None:
    by_hand = world.busy.get(pool.pool)
    return by_hand and changed_by_hand(pool.router.busy, world.pools[pool.pool].router.busy, by_hand)
