"""Topic `shadow`: decisions of policies that run in parallel for comparison. They have no effect."""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Digest, Event, Name


class ShadowStarted(Event, tag="shadow.started", frozen=True, kw_only=True):
    """A shadow starts, or resumes after it was stopped.

    If `from_offset` is more than one above its last decision, the decisions between were skipped, because the events
    that led to them are gone. A process that finds a newer start of its own shadow ends.

    Attributes:
        shadow: name of the shadow.
        alternative: description of what it changes.
        alternative_digest: digest of what it changes.
        from_offset: first journal offset whose decisions it covers.
        at_us: wall clock of the process, in microseconds.
    """

    shadow: Name
    alternative: str
    alternative_digest: Digest
    from_offset: Count
    at_us: int = 0


class DecisionShadowed(Event, tag="shadow.decision_shadowed", frozen=True, kw_only=True):
    """Selection of a shadow beside the recorded one, both made in the same state.

    If two processes run the same shadow for a moment, a decision may appear twice with the same content.

    Attributes:
        shadow: name of the shadow.
        alternative_digest: digest of what it changes, as in `shadow.started`.
        decision_offset: journal offset of the `RequestRouted`.
        request_id: id of the request.
        attempt: attempt of the recorded routing.
        pool: pool of the recorded routing.
        worker_id: recorded worker.
        rank: recorded rank.
        overlap_blocks: leading prompt blocks on the device of the recorded rank.
        shadow_worker_id: worker that the shadow selected; empty if it selected none.
        shadow_rank: rank that the shadow selected.
        shadow_overlap_blocks: leading prompt blocks on the device of that rank.
        agrees: whether both selected the same rank.
        would_hold: whether the shadow would have queued the request; its selection is then the one it would have made
            otherwise.
        regret_blocks: cost of the recorded rank minus cost of the shadow's rank, in blocks, by the shadow's cost table.
            Negative if the shadow does not select the lowest cost; null if the recorded rank is not one of its
            candidates.
        failure: why the shadow selected no rank; empty if it did.
        at_us: the owner's clock at the decision, in microseconds.
    """

    shadow: Name
    alternative_digest: Digest
    decision_offset: Count
    request_id: Name
    attempt: Annotated[int, msgspec.Meta(ge=1)]
    pool: Name
    worker_id: Name
    rank: Count
    overlap_blocks: Count
    shadow_worker_id: str = ""
    shadow_rank: Count = 0
    shadow_overlap_blocks: Count = 0
    agrees: bool = False
    would_hold: bool = False
    regret_blocks: float | None = None
    failure: str = ""
    at_us: int = 0


ShadowEvent = ShadowStarted | DecisionShadowed
