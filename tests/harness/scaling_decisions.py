"""Decisions of a planner, derived again from records of the topic `scaling`."""

from collections.abc import Iterable

from forebay.core.scaling.rederive import RecordedDecision, ScalingRederivation
from forebay.events.scaling import ScalingEvent


def decisions_of(records: Iterable[tuple[int, ScalingEvent]]) -> list[RecordedDecision]:
    """Apply all records with their offsets, and return the decisions with their replies."""
    rederivation = ScalingRederivation()
    return [found for offset, event in records if (found := rederivation.apply(offset, event)) is not None]
