"""Values of a routing decision, before anything is booked.

`forebay.core.routing.planner` reads the world and returns them. `forebay.core.execute` applies them. The journal and
`replay explain` show them.
"""

from dataclasses import dataclass

from forebay.core.routing.cost import CostTable
from forebay.core.routing.eligibility import Ineligible
from forebay.core.state.roster import CandidateRank, Roster
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import PrefillPlace, ScoredCandidate, Stage


@dataclass(frozen=True, slots=True, eq=False)
class StageCandidates:
    """Ranks that may take the next stage of a request.

    Attributes:
        stage: next stage.
        pool: configuration of the pool that selects.
        roster: the candidates, at least one.
        request: request as that pool sees it.
        attempt: earlier attempts at the stage.
        place: where the prompt is computed, and why; None if the pool always computes it, or no longer.
    """

    stage: Stage
    pool: PoolConfigured
    roster: Roster
    request: SubmittedRequest
    attempt: int
    place: PrefillPlace | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """Candidate that is selected for the next stage of a request, and the data that explains it.

    Attributes:
        stage: next stage.
        pool: configuration of the pool that selects.
        request: request as that pool sees it.
        attempt: earlier attempts at the stage.
        config: router configuration in effect, including the request's override.
        table: cost table over all candidates.
        at: position of the selected candidate in the table.
        place: as in `StageCandidates`.
    """

    stage: Stage
    pool: PoolConfigured
    request: SubmittedRequest
    attempt: int
    config: RouterConfig
    table: CostTable
    at: int
    place: PrefillPlace | None = None

    @property
    def roster(self) -> Roster:
        """All candidates."""
        return self.table.roster

    @property
    def selected(self) -> CandidateRank:
        """Selected candidate."""
        return self.table.roster.ranks[self.at]

    @property
    def ties(self) -> int:
        """How many candidates share the lowest cost; 1 if the lowest cost did not decide."""
        if self.config.mode != "kv" or self.config.temperature > 0.0:
            return 1
        return self.table.costs.count(self.table.costs[self.at])

    def runner_up(self) -> ScoredCandidate | None:
        """Return the candidate with the lowest cost among the others, or None if there is no other."""
        others = self.table.costs[: self.at] + self.table.costs[self.at + 1 :]
        if not others:
            return None
        best = others.index(min(others))
        return self.table.candidate(best + (best >= self.at))


@dataclass(frozen=True, slots=True)
class QueuePlan:
    """Place in the router's queue of a new request that must wait.

    Attributes:
        queue_class: class in which the request is queued.
        uncached_tokens: prompt tokens that even the candidate with the largest overlap must compute.
        ahead: requests of the class that are already queued.
        full: why the queue does not take the request; None if it does.
    """

    queue_class: str
    uncached_tokens: int
    ahead: int
    full: Ineligible | None
