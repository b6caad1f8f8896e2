"""Plain data about changes that would have changed a routing decision."""

from typing import Literal

from forebay.replay.moment import Fact

ChangedThing = Literal["setting", "temperature", "cache", "load", "worker", "policy", "request"]


class SelectionChange(Fact, frozen=True, kw_only=True):
    """A change of one thing, and the rank that the router selects with the change in the otherwise recorded state.

    Attributes:
        what: what is changed: a setting of the pool (`temperature` and `policy` are separate), the cached blocks or the
            load of a rank, the state of a worker, or a condition of the request.
        setting: name of the changed setting of the router configuration; `worker/rank` for a change of a rank; worker
            ID for a change of a worker.
        value: value of the setting, number of blocks or tokens, or name of the policy. For a threshold, a value right
            beyond the threshold.
        selected: selected rank as `worker/rank`. It may be the recorded rank for `policy`.
        probability: probability of the selection if the selection is a random draw; null otherwise.
    """

    what: ChangedThing
    setting: str
    value: float | int | str | bool | None
    text: str
    selected: str
    probability: float | None = None


class Counterfactuals(Fact, frozen=True, kw_only=True):
    """Changes that would have changed one routing decision. Each was evaluated with the code of the router.

    Attributes:
        attempt: number of the attempt at the stage, starting at 1.
        stage: stage of the request: `aggregated`, `prefill`, `decode` or `encode`.
        selected: recorded selection as `worker/rank`.
        changes: changes that select another rank, smallest changes first, and the selection of each other policy.
        notes: kinds of changes that were not evaluated, and why, as sentences.
    """

    request_id: str
    attempt: int
    stage: str
    routing_offset: int
    selected: str
    changes: list[SelectionChange]
    notes: list[str]
