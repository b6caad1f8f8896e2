"""Topic `shadow`: what a policy that only looks on would have decided. Nobody acts on it."""

from typing import Annotated

import msgspec

from forebay.events.base import Count, Digest, Event, Name


class ShadowStarted(Event, tag="shadow.started", frozen=True, kw_only=True):
    """A shadow begins, or goes on after it was stopped: decisions of the journal from `from_offset` on are its.

    If that is more than one after its last one, those between were passed over: what led to them is gone. A process
    that meets a newer one of its own shadow ends.
    """

    shadow: Name
    alternative: str  # what it changes, for people
    alternative_digest: Digest
    from_offset: Count
    at_us: int = 0  # the clock of the process


class DecisionShadowed(Event, tag="shadow.decision_shadowed", frozen=True, kw_only=True):
    """A shadow's choice beside the recorded one, both made in the same state of the world.

    Overlaps are leading prompt blocks in the cache of the chosen rank, on its device. `regret_blocks` is how much
    more the recorded choice costs than the shadow's, in blocks, by the shadow's own cost table: below zero where the
    shadow does not take the cheapest, null where the recorded one is none of its candidates. A shadow that could not
    choose says why in `failure`, and has no choice. `would_hold` says that it would have let the request wait in the
    router's queue; its choice is then who would have got it otherwise.

    Should two processes run one shadow for a moment, a decision may stand here twice; both say the same.
    """

    shadow: Name
    alternative_digest: Digest  # of what it changes, as in `shadow.started`
    decision_offset: Count  # of the `RequestRouted` in the journal
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
    at_us: int = 0  # the owner's clock at the decision


ShadowEvent = ShadowStarted | DecisionShadowed
