"""Topic `shadow`: what shadows would have decided.

A shadow evaluates another policy beside the owner, without effect.
"""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Digest, Event, Name


class ShadowStarted(Event, tag="shadow.started", frozen=True, kw_only=True):
    """A shadow starts, or resumes after it was stopped.

    If `from_offset` is more than 1 above the shadow's last decision, the shadow skipped the decisions between both,
    because the log no longer has the events that led to them. If a process finds a newer start of its own shadow, it
    ends.

    Attributes:
        shadow: name of the shadow.
        alternative: description of the policy or settings that the shadow evaluates.
        alternative_digest: digest of that policy or those settings.
        from_offset: first journal offset whose decisions the shadow covers.
    """

    shadow: Name
    alternative: str
    alternative_digest: Digest
    from_offset: Count
    at_us: int = 0


class DecisionShadowed(Event, tag="shadow.decision_shadowed", frozen=True, kw_only=True):
    """Selection of a shadow, and the owner's recorded selection for the same request in the same state.

    If two processes run the same shadow for a moment, the topic may have the same decision twice.

    Attributes:
        shadow: name of the shadow.
        alternative_digest: digest of the policy or settings that the shadow evaluates, as in `shadow.started`.
        decision_offset: journal offset of the `RequestRouted`.
        attempt: attempt of the recorded routing.
        pool: pool of the recorded routing.
        worker_id: recorded worker.
        rank: recorded rank.
        overlap_blocks: leading prompt blocks that the recorded rank has cached on its device.
        shadow_worker_id: worker that the shadow selected; empty if it selected none.
        shadow_rank: rank that the shadow selected.
        shadow_overlap_blocks: leading prompt blocks that the shadow's rank has cached on its device.
        agrees: whether the shadow selected the recorded rank.
        would_hold: whether the shadow would have queued the request. Its selection is then the rank that it would have
            selected without a queue.
        regret_blocks: cost of the recorded rank minus cost of the shadow's rank, in blocks, by the shadow's cost table.
            It is negative if the shadow does not select the lowest cost, and null if the recorded rank is not a
            candidate of the shadow.
        failure: why the shadow selected no rank; empty if it selected one.
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
