"""Other tie seeds that lead to the same choices: the seed of a request is a hash of its id, and would give it away.

Theory of operation. While the original is walked, every choice is seen with the table it was made from. A request
gets the first seed of a keyed sequence with which the policy chooses the same in all of its choices; a later choice
that the seed does not suit moves it on to the next seed that suits them all. Most choices depend on no seed, and of
the others most suit one seed in a few.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.policies import BUILT_IN, RoutingRequest, RoutingWorld
from forebay.core.routing.router import Selection, policy_input, run_policy
from forebay.core.state.active_request import ActiveRequest
from forebay.core.world import World
from forebay.events.control import PoolConfigured
from forebay.events.topics import REQUESTS
from forebay.replay.anonymize.masks import NotAnonymizable

TRIES_MAX = 100_000  # for one request, about a second: a choice of one in ten thousand is still found
TRIES_LATER = 1_000  # for each further one, when
TRIES_IN_VAIN_MAX = 3_000_000  # as many found nothing: some policies leave nothing to find
COSTS_ONLY = ("kv", "direct")  # modes that do not look at candidates
IDLE_MAX = 1_024  # requests that ended and are still kept: to find them costs a look at all


class _Seen(NamedTuple):
    """One choice: what the policy was asked, and what it chose."""

    world: RoutingWorld
    asked: RoutingRequest
    at: int


class SeedNumbers:
    """Which seed of its sequence each request gets, by offset on `requests`; -1 for its own. Four bytes a request.

    Those before `first` are few: they were under way when the recording begins.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._earlier: dict[int, int] = {}
        self._numbers = array("i")

    def get(self, offset: int) -> int:
        """0, the first, unless told otherwise."""
        at = offset - self._first
        if at < 0:
            return self._earlier.get(offset, 0)
        return self._numbers[at] if at < len(self._numbers) else 0

    def set(self, offset: int, number: int) -> None:
        """The request at this offset gets another one."""
        at = offset - self._first
        if at < 0:
            self._earlier[offset] = number
            return
        self._numbers.extend([0] * (at + 1 - len(self._numbers)))
        self._numbers[at] = number

    @property
    def kept(self) -> int:
        """How many keep their own."""
        return self._numbers.count(-1) + sum(number < 0 for number in self._earlier.values())


class SeedSearch:
    """Looks on at the choices of a world, see `World.on_selection`, and finds `numbers`.

    `seed` gives the seed of a request at an offset that is tried as number so and so. When none of `tries_max` suits,
    the request keeps its own. `asked` says what a policy of a user's will be asked instead.
    """

    def __init__(
        self,
        world: World,
        numbers: SeedNumbers,
        seed: Callable[[int, int], int],
        asked: Callable[[RoutingRequest], RoutingRequest],
        tries_max: int = TRIES_MAX,
    ) -> None:
        self._world = world
        self._numbers = numbers
        self._seed = seed
        self._asked = asked
        self._tries_max = tries_max
        self._seen: dict[int, list[_Seen]] = {}
        self._in_vain = 0

    def saw(self, pool: PoolConfigured, request: ActiveRequest, choice: Selection) -> None:
        """A choice was made, and nothing is booked by it yet.

        Raises NotAnonymizable when it was made by what is masked, so that not even its own seed leads to it.
        """
        if _needs_no_seed(choice):
            return
        is_query = not request.due_us  # who only asks has no deadline
        offset = self._world.view[REQUESTS.name] - 1 if is_query else request.offset
        number = self._numbers.get(offset)
        if number < 0:
            return
        seen = [*self._seen.get(offset, ()), self._keep(pool, request, choice)]
        if not self._suits(offset, number, seen[-1:]):
            self._numbers.set(offset, self._next(offset, number + 1, seen, request.tie_seed))
        if not is_query:
            self._tidy()  # before: who is decided on for the first time is not under way yet
            self._seen[offset] = seen

    def _next(self, offset: int, number: int, seen: list[_Seen], own: int) -> int:
        tries = range(number, number + (self._tries_max if self._in_vain < TRIES_IN_VAIN_MAX else TRIES_LATER))
        # The newest choice first: it is the one that all the numbers before did not suit.
        found = next((one for one in tries if self._suits(offset, one, seen[::-1])), -1)
        if found < 0:
            self._in_vain += len(tries)
            if not all(_chooses(one, own) for one in seen):
                mode = seen[-1].world.config.mode
                raise NotAnonymizable(
                    f"the policy {mode} chooses by request ids, sessions, adapters or block hashes, which are masked: "
                    "record without --anonymize"
                )
        return found

    def _suits(self, offset: int, number: int, seen: list[_Seen]) -> bool:
        seed = self._seed(offset, number)
        return all(_chooses(one, seed) for one in seen)

    def _keep(self, pool: PoolConfigured, request: ActiveRequest, choice: Selection) -> _Seen:
        """A choice as it can be made again later: candidates are looked up in the world, which goes on changing."""
        world, asked = policy_input(self._world, pool, request, choice.config, choice.table)
        mode = choice.config.mode
        if mode not in BUILT_IN:
            asked = self._asked(asked)  # a user's policy may look at all of it
        return _Seen(replace(world, candidates=() if mode in COSTS_ONLY else tuple(world.candidates)), asked, choice.at)

    def _tidy(self) -> None:
        requests = self._world.requests
        if len(self._seen) > 2 * len(requests) + IDLE_MAX:
            self._seen = {one.offset: self._seen[one.offset] for one in requests.active() if one.offset in self._seen}


def _needs_no_seed(choice: Selection) -> bool:
    mode, costs = choice.config.mode, choice.table.costs
    if mode not in BUILT_IN:
        return False
    drawn = mode not in COSTS_ONLY or (choice.config.temperature > 0.0 and mode == "kv")
    return mode == "round-robin" or len(costs) == 1 or (not drawn and costs.count(min(costs)) == 1)


def _chooses(seen: _Seen, seed: int) -> bool:
    try:
        return run_policy(seen.world, replace(seen.asked, tie_seed=seed)) == seen.at
    except Ineligible:
        return False
