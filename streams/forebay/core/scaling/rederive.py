"""Derive the recorded decisions of planners again, from the topic `scaling` alone."""

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from forebay.core.scaling.decide import Derivation, derive
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

REPLIES_MAX = 64  # of a decision; each actuator of its pools replies once
WAITING_MAX = 256  # newest decisions without a reply; an actuator refuses a stale decision soon, or never

Verification = Literal["equal", "different", "stale", "other_rules"]


@dataclass(slots=True)
class RecordedDecision:
    """Decision of the topic, with what it was derived from and what became of it.

    Attributes:
        derivation: the decision that follows from the state before it, with its steps; None if other rules made it.
        claim: claim of its planner; None if its planner has none on the topic.
        observed: newest observation before it.
        replies: replies of the actuators, except those that came too late to have an effect. A stale decision can have
            refusals.
    """

    offset: int
    decided: ScalingDecided
    outcome: Outcome
    derivation: Derivation | None
    claim: PlannerClaimed | None
    observed: ScalingObserved | None
    forecast: DemandForecast | None
    replies: list[ScalingApplied | ScalingRefused] = field(default_factory=list)

    @property
    def has_own_rules(self) -> bool:
        return self.claim is not None and self.claim.rules_version == RULES_VERSION

    @property
    def derived(self) -> ScalingDecided | None:
        """The decision that was derived again, without time; None if other rules made it, or if it is stale."""
        return self.derivation.decision if self.derivation is not None and self.outcome == "applied" else None

    @property
    def is_verified(self) -> bool:
        return self.derived == msgspec.structs.replace(self.decided, at_us=0)

    @property
    def verification(self) -> Verification:
        """Result of the derivation. A stale decision has no effect, and may differ."""
        if self.outcome == "stale":
            return "stale"
        if not self.has_own_rules:
            return "other_rules"
        return "equal" if self.is_verified else "different"


class ScalingRederivation:
    """Applies the records of the topic in order, and derives each decision again."""

    def __init__(self) -> None:
        self.state = PlannerState()
        self._waiting: dict[int, RecordedDecision] = {}

    def apply(self, offset: int, event: ScalingEvent) -> RecordedDecision | None:
        """Apply a record. Return the decision if it is one. Later calls add its replies."""
        if isinstance(event, ScalingDecided):
            decision = self._decide(offset, event)
            self._waiting[offset] = decision
            if len(self._waiting) > WAITING_MAX:
                del self._waiting[next(iter(self._waiting))]
            return decision
        outcome = self.state.apply(offset, event)
        if isinstance(event, ScalingApplied | ScalingRefused):
            replied = self._waiting.get(event.decision)
            if replied is not None and replied.outcome == outcome and len(replied.replies) < REPLIES_MAX:
                replied.replies.append(event)
        return None

    def _decide(self, offset: int, event: ScalingDecided) -> RecordedDecision:
        state = self.state
        claim = state.claim if state.epoch == event.planner_epoch else None
        derivation = derive(state) if claim is not None and claim.rules_version == RULES_VERSION else None
        observed = state.history[-1] if state.history else None
        forecast = state.forecast[1] if state.forecast else None
        outcome = state.apply(offset, event)
        return RecordedDecision(offset, event, outcome, derivation, claim, observed, forecast)
