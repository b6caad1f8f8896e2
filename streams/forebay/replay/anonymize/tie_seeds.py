"""Find other tie seeds that lead to the same decisions. A request's own seed is a hash of its ID and would reveal it.

Theory of operation. While the original is walked, each routing decision is observed with its cost table. A request gets
the first seed of a keyed sequence with which the policy repeats all of the request's decisions. If a later decision
does not fit that seed, the search continues with the next seed that fits all of them. Most decisions depend on no seed.
Of the others, most fit one seed in a few.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.evaluation import policy_input, run_policy
from forebay.core.routing.plan import Plan
from forebay.core.routing.policies import BUILT_IN, Policy, RoutingRequest, RoutingWorld
from forebay.core.world import World
from forebay.events.topics import REQUESTS
from forebay.replay.anonymize.masks import NotAnonymizable

TRIES_MAX = 100_000  # per request, about a second; enough for a probability of one in ten thousand
TRIES_LATER = 1_000  # per request after
FAILED_TRIES_MAX = 3_000_000  # this many failed tries, because some policies fit no other seed
COSTS_ONLY = ("kv", "direct")  # modes that ignore candidates
IDLE_MAX = 1_024  # ended requests that are still kept, because removing them needs a full scan


class _RecordedChoice(NamedTuple):
    """One routing decision: the policy's input and the selected position."""

    policy: type[Policy]
    world: RoutingWorld
    request: RoutingRequest
    at: int


class SeedNumbers:
    """Index of the seed that each request gets, by offset on `requests`; -1 for its own seed. Four bytes per request.

    Requests before `first` are few, because they were active when the recording began.
    """

    def __init__(self, first: int = 0) -> None:
        self._first = first
        self._earlier: dict[int, int] = {}
        self._numbers = array("i")

    def get(self, offset: int) -> int:
        """Return the index of the request's seed; 0 by default."""
        at = offset - self._first
        if at < 0:
            return self._earlier.get(offset, 0)
        return self._numbers[at] if at < len(self._numbers) else 0

    def set(self, offset: int, number: int) -> None:
        """Set the index of the seed of the request at this offset."""
        at = offset - self._first
        if at < 0:
            self._earlier[offset] = number
            return
        self._numbers.extend([0] * (at + 1 - len(self._numbers)))
        self._numbers[at] = number

    @property
    def kept(self) -> int:
        """Number of requests that keep their own seed."""
        return self._numbers.count(-1) + sum(number < 0 for number in self._earlier.values())


class SeedSearch:
    """Observes the routing decisions of a world (`World.on_plan`) and fills `numbers`.

    Args:
        world: the world to observe.
        numbers: receives the index of each request's seed.
        seed: returns the seed with this index for the request at an offset.
        anonymize: returns the anonymised input of a custom policy.
        tries_max: number of seeds to try. If none fits, the request keeps its own seed.
    """

    def __init__(
        self,
        world: World,
        numbers: SeedNumbers,
        seed: Callable[[int, int], int],
        anonymize: Callable[[RoutingRequest], RoutingRequest],
        tries_max: int = TRIES_MAX,
    ) -> None:
        self._world = world
        self._numbers = numbers
        self._seed = seed
        self._anonymize = anonymize
        self._tries_max = tries_max
        self._seen: dict[int, list[_RecordedChoice]] = {}
        self._failed_tries = 0

    def observe(self, plan: Plan) -> None:
        """Observe a decision before it is booked.

        Raises:
            NotAnonymizable: the decision depends on masked values, so not even the original seed leads to it.
        """
        request = plan.request
        if _needs_no_seed(plan):
            return
        is_query = not request.due_us  # queries have no deadline
        offset = self._world.view[REQUESTS.name] - 1 if is_query else request.offset
        number = self._numbers.get(offset)
        if number < 0:
            return
        seen = [*self._seen.get(offset, ()), self._keep(plan)]
        if not self._suits(offset, number, seen[-1:]):
            self._numbers.set(offset, self._next(offset, number + 1, seen, request.tie_seed))
        if not is_query:
            self._tidy()  # first, because a request is not active before its first decision
            self._seen[offset] = seen

    def _next(self, offset: int, number: int, seen: list[_RecordedChoice], own: int) -> int:
        tries = range(number, number + (self._tries_max if self._failed_tries < FAILED_TRIES_MAX else TRIES_LATER))
        # Newest decision first, because no previous seed fitted it.
        found = next((one for one in tries if self._suits(offset, one, seen[::-1])), -1)
        if found < 0:
            self._failed_tries += len(tries)
            if not all(_chooses(one, own) for one in seen):
                mode = seen[-1].world.config.mode
                raise NotAnonymizable(
                    f"policy {mode} uses request IDs, sessions, adapters or block hashes, which are masked; "
                    "record without --anonymize"
                )
        return found

    def _suits(self, offset: int, number: int, seen: list[_RecordedChoice]) -> bool:
        seed = self._seed(offset, number)
        return all(_chooses(one, seed) for one in seen)

    def _keep(self, plan: Plan) -> _RecordedChoice:
        """Return the decision in a form that can be repeated later, because the world's candidates change."""
        world, policy_request = policy_input(self._world, plan.pool, plan.request, plan.config, plan.table)
        mode = plan.config.mode
        if mode not in BUILT_IN:
            policy_request = self._anonymize(policy_request)  # a custom policy may read all fields
        candidates = () if mode in COSTS_ONLY else tuple(world.candidates)
        policy = self._world.policy(mode)
        return _RecordedChoice(policy, replace(world, candidates=candidates), policy_request, plan.at)

    def _tidy(self) -> None:
        requests = self._world.requests
        if len(self._seen) > 2 * len(requests) + IDLE_MAX:
            self._seen = {one.offset: self._seen[one.offset] for one in requests.active() if one.offset in self._seen}


def _needs_no_seed(plan: Plan) -> bool:
    mode, costs = plan.config.mode, plan.table.costs
    if mode not in BUILT_IN:
        return False
    drawn = mode not in COSTS_ONLY or (plan.config.temperature > 0.0 and mode == "kv")
    return mode == "round-robin" or len(costs) == 1 or (not drawn and costs.count(min(costs)) == 1)


def _chooses(seen: _RecordedChoice, seed: int) -> bool:
    try:
        return run_policy(seen.policy, seen.world, replace(seen.request, tie_seed=seed)) == seen.at
    except Ineligible:
        return False
