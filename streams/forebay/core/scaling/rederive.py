"""Derive the recorded decisions of planners again, from the topic `scaling` alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import msgspec

from forebay.core.scaling.decide import decide
from forebay.core.scaling.state import RULES_VERSION, Outcome, PlannerState
from forebay.events.scaling import (
    DemandForecast,
    PlannerClaimed,
    ScalingApplied,
    ScalingDecided,
    ScalingEvent,
    ScalingObserved,
    ScalingRefused,
)


@dataclass(slots=True)
class RecordedDecision:
    """Decision of the topic, with what it was derived from and what became of it.

    Attributes:
        offset: offset of the decision.
        decided: the decision.
        outcome: whether it has an effect.
        derived: the decision that follows from the state before it, without time; None if other rules made it, or if it
            is stale.
        claim: claim of its planner; None if its planner has none on the topic.
        observed: newest observation before it.
        forecast: newest forecast before it.
        reply: reply of the actuator; None if there is none.
    """

    offset: int
    decided: ScalingDecided
    outcome: Outcome
    derived: ScalingDecided | None
    claim: PlannerClaimed | None
    observed: ScalingObserved | None
    forecast: DemandForecast | None
    reply: ScalingApplied | ScalingRefused | None = None

    @property
    def has_own_rules(self) -> bool:
        """Whether a planner with the rules of this version made the decision."""
        return self.claim is not None and self.claim.rules_version == RULES_VERSION

    @property
    def is_verified(self) -> bool:
        """Whether the decision was derived again with the same result."""
        return self.derived == msgspec.structs.replace(self.decided, at_us=0)


def decisions_of(records: Iterable[tuple[int, ScalingEvent]], state: PlannerState) -> Iterator[RecordedDecision]:
    """Apply the records with their offsets to `state`, and yield each decision after the last record.

    Memory grows with the number of decisions, because the reply to a decision follows later.
    """
    found: dict[int, RecordedDecision] = {}
    for offset, event in records:
        if isinstance(event, ScalingDecided):
            found[offset] = _apply(state, offset, event)
            continue
        if isinstance(event, ScalingApplied | ScalingRefused):
            decision = found.get(event.decision)
            if decision is not None and decision.reply is None:
                decision.reply = event
        state.apply(offset, event)
    yield from found.values()


def _apply(state: PlannerState, offset: int, event: ScalingDecided) -> RecordedDecision:
    claim = state.claim if state.epoch == event.planner_epoch else None
    derived = decide(state) if claim is not None and claim.rules_version == RULES_VERSION else None
    observed = state.history[-1] if state.history else None
    forecast = state.forecast[1] if state.forecast else None
    outcome = state.apply(offset, event)
    return RecordedDecision(
        offset, event, outcome, derived if outcome == "applied" else None, claim, observed, forecast
    )
