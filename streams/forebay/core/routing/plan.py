"""Routing plans: the results of a routing decision, before the decision is booked.

`forebay.core.selection.next_stage` returns them, and `forebay.core.booking` books them. The journal and `explain` show
them.
"""

from typing import TypeVar

import msgspec
import numpy as np
from msgspec.structs import replace

from forebay.core.routing.cost import CostTable
from forebay.core.routing.eligibility import Ineligible
from forebay.core.state.roster import CandidateRank, Roster
from forebay.core.state.submitted_request import SubmittedRequest
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import PrefillPlace, ScoredCandidate, Stage
from forebay.events.pools import PoolChoice


class StageCandidates(msgspec.Struct, frozen=True, eq=False):
    """Ranks that may take the next stage of a request.

    Attributes:
        pool: configuration of the pool that the ranks belong to, with the changes for this stage.
        request: the request with the changes for this stage (`forebay.core.selection.stages`).
        place: where the prompt is computed, and why; None if nothing had to be decided, because the model has no decode
            pool or the prompt is already computed.
        pools: choice of the pool; empty if nothing had to be chosen.
    """

    stage: Stage
    pool: PoolConfigured
    roster: Roster
    request: SubmittedRequest
    attempt: int
    place: PrefillPlace | None = None
    pools: tuple[PoolChoice, ...] = ()


class Plan(msgspec.Struct, frozen=True, eq=False):
    """Rank that was selected for the next stage of a request, and the data that explains the selection.

    Attributes:
        config: router configuration in effect, including the request's override.
        at: position of the selected candidate in the table.
    """

    stage: Stage
    pool: PoolConfigured
    request: SubmittedRequest
    attempt: int
    config: RouterConfig
    table: CostTable
    at: int
    place: PrefillPlace | None = None
    pools: tuple[PoolChoice, ...] = ()

    @property
    def roster(self) -> Roster:
        return self.table.roster

    @property
    def selected(self) -> CandidateRank:
        return self.table.roster.ranks[self.at]

    @property
    def ties(self) -> int:
        """Number of candidates with the lowest cost; 1 if the selection was not by lowest cost."""
        if self.config.mode != "kv" or self.config.temperature > 0.0:
            return 1
        costs = self.table.columns[0]
        return int(np.count_nonzero(costs == costs[self.at]))

    def runner_up(self) -> ScoredCandidate | None:
        """Return the candidate with the lowest cost among all others, or None if there is only one candidate."""
        if len(self.table) == 1:
            return None
        others = self.table.columns[0].copy()
        others[self.at] = np.inf
        return self.table.candidate(int(others.argmin()))


class QueuePlan(msgspec.Struct, frozen=True):
    """Place in the router's queue for a new request that no rank can take yet.

    Attributes:
        uncached_tokens: prompt tokens that even the candidate with the largest overlap must compute.
        ahead: number of requests that are already queued in the class.
        timeout_s: seconds after which the request times out in the queue; 0 for no timeout.
        full: why the queue is full, so that the request must be rejected; None if the queue takes the request.
    """

    queue_class: str
    uncached_tokens: int
    ahead: int
    timeout_s: float
    full: Ineligible | None
    pools: tuple[PoolChoice, ...] = ()


AnyPlan = TypeVar("AnyPlan", bound=Plan | QueuePlan)


def with_choices(plan: AnyPlan, choices: tuple[PoolChoice, ...]) -> AnyPlan:
    """Return a plan that includes choices of pools made before it."""
    return replace(plan, pools=(*choices, *plan.pools)) if choices else plan
