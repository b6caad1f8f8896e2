"""Values that a routing decision results in, before anything is booked."""

from dataclasses import dataclass

from forebay.core.routing.cost import CostTable
from forebay.events.control import RouterConfig
from forebay.events.decisions import ScoredCandidate


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """Selected candidate and the data that explains it.

    Attributes:
        config: router configuration in effect, including the request's override.
        table: cost table over all candidates.
        at: position of the selected candidate in the table.
    """

    config: RouterConfig
    table: CostTable
    at: int

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
