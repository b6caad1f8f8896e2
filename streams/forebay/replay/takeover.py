"""The change from one owner to the next: when it was, how long no router owned the group, and whom that delayed."""

from typing import Any, Self

import msgspec

from forebay.core.world import World
from forebay.events.decisions import OwnerClaimed
from forebay.events.progress import ProgressEvent, RequestFailed, RequestFinished
from forebay.events.requests import RequestCancelled, RequestResumed, RequestSubmitted


class Takeover(msgspec.Struct):
    """A claim and the outage before it. The times are from the clocks of both owners.

    Attributes:
        offset: offset of the claim in the journal.
        previous_id: ID of the previous owner; empty if it is unknown.
        begin_us: newest time at which the previous owner is known to have run; 0 if there was none.
        at_us: time of the claim; not before `begin_us`, and not after the new owner's first clock reading.
        delayed: number of requests that were active at `begin_us` or submitted by `at_us`.
    """

    offset: int
    claim: OwnerClaimed
    previous_id: str
    begin_us: int
    at_us: int
    delayed: int

    @classmethod
    def of(cls, offset: int, claim: OwnerClaimed, world: World, previous: Self | None) -> Self:
        """Return the takeover by a claim that was just read, in the state of the previous owner."""
        previous_id, claimed_us = ("", 0) if previous is None else (previous.claim.owner_id, previous.at_us)
        begin_us = max(world.now_us, claimed_us, claim.previous_seen_us)
        return cls(offset, claim, previous_id, begin_us, max(begin_us, claim.at_us), len(world.requests.active()))

    def settle(self, now_us: int) -> None:
        """Limit the times to a clock reading of the new owner, because clocks differ."""
        self.begin_us, self.at_us = min(self.begin_us, now_us), min(self.at_us, now_us)

    def count(self, event: Any) -> bool:
        """Count an event that the new owner applied. Return whether it was written before the claim."""
        is_late = self.is_late(event)
        if isinstance(event, RequestSubmitted):
            self.delayed += is_late
        elif isinstance(event, RequestFinished | RequestFailed):  # of a request that was active at the claim
            self.delayed -= is_late and event.at_us <= self.begin_us
        return is_late

    def is_late(self, event: Any) -> bool:
        """Return whether an event that the new owner applies was written before the claim."""
        is_timed = isinstance(event, RequestSubmitted | RequestCancelled | RequestResumed | ProgressEvent)
        return is_timed and 0 < event.at_us < self.at_us

    @property
    def outage_us(self) -> int:
        return self.at_us - self.begin_us if self.begin_us else 0

    @property
    def text(self) -> str:
        kind = "a planned hand-over of" if self.claim.seal >= 0 else "an outage of up to"
        requests = "no request" if not self.delayed else f"{self.delayed:,} request{'s' * (self.delayed > 1)}"
        return f"{kind} {self.outage_us / 1e6:.3f} s, which delayed {requests}"
