"""Topic `heartbeats`: which routers of a group are running, as owner or standby. Replays do not use it."""

from typing import Literal

from forebay.events.base import Count, Event, Name, Part
from forebay.events.models import CardDigest


class RejectedWorker(Part, frozen=True, kw_only=True):
    """A worker that the owner does not admit, and why."""

    worker_id: Name
    reason: str


class RouterHeartbeat(Event, tag="router.heartbeat", frozen=True, kw_only=True):
    """A router is running, and is the owner or a standby of this group.

    The owner's deciding loop writes this event, so a stuck loop stops its heartbeats. Readers ignore an owner whose
    `owner_epoch` is lower than the highest epoch they have seen: a newer owner has replaced it.

    Attributes:
        router_id: name of the router.
        role: owner or standby of the group.
        owner_epoch: epoch of the owner. For a standby, the newest epoch that it has read, or -1 if it has read none.
        position: journal offset up to which an owner has written, or up to which a standby has applied the journal.
        ready_aggregated: ready workers that compute prompts and generate responses, in the owner's fleet; 0 from a
            standby.
        ready_prefill: ready prefill workers in the owner's fleet; 0 from a standby.
        ready_decode: ready decode workers in the owner's fleet; 0 from a standby.
        policies: custom policies that the owner may run.
        preferred: whether this router should own the group, so that it claims before other standbys.
        released: whether the owner has sealed its journal and decides no more, so that a standby may claim at once.
        core_version: version of the router's decision rules; 0 from a router that does not report it.
        events_version: version of the event types that the router can read.
        card: digest of the model card of the owner's ready workers; empty from a standby, or if they stored none.
        endpoints: endpoints of the ready workers that execute calls, sorted; at most 256.
        rejected: workers that the owner does not admit, with the reason; at most 8.
    """

    group: Name
    router_id: Name
    role: Literal["owner", "standby"]
    owner_epoch: int = -1
    position: Count = 0
    ready_aggregated: Count = 0
    ready_prefill: Count = 0
    ready_decode: Count = 0
    at_us: int = 0
    policies: tuple[str, ...] = ()
    preferred: bool = False
    released: bool = False
    core_version: Count = 0
    events_version: Count = 1
    card: CardDigest = ""
    endpoints: tuple[Name, ...] = ()
    rejected: tuple[RejectedWorker, ...] = ()


HeartbeatEvent = RouterHeartbeat
