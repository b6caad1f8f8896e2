"""Counts of an owner's decisions, for its metrics. They are not part of the state and start at zero."""

from collections import Counter

from forebay.core.step import AnyDecision
from forebay.events.decisions import RequestHeld, RequestRejected, RequestRouted


class DecisionTally:
    """Counts of the decisions of one owner.

    Attributes:
        stages: times that the owner sent a stage of a request to a worker, by stage.
        prefills: decisions where to prefill a request of a decode pool, by ("remote" or "local", reason).
        pools: choices of pools for requests, by (pool, role, reason).
    """

    def __init__(self) -> None:
        self.stages: Counter[str] = Counter()
        self.prefills: Counter[tuple[str, str]] = Counter()
        self.pools: Counter[tuple[str, str, str]] = Counter()

    def count(self, decision: AnyDecision) -> None:
        match decision:
            case RequestRouted():
                self.stages[decision.stage] += 1
                if (placement := decision.prefill) is not None:
                    self.prefills["remote" if placement.remote else "local", placement.reason] += 1
            case RequestHeld() | RequestRejected():
                pass
            case _:
                return
        self.pools.update((choice.pool, choice.role, choice.reason) for choice in decision.pools)
