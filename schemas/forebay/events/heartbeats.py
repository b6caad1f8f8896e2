"""Topic `heartbeats`: which routers of a group are alive, as owner or standby. Never journalled, never replayed."""

from typing import Literal

from forebay.events.base import Count, Event, Name


class RouterHeartbeat(Event, tag="router.heartbeat", frozen=True, kw_only=True):
    """A router is alive and serves this group as its owner or as a standby.

    The owner's deciding loop writes it, so a stuck loop stops its heartbeats. Readers ignore an owner whose
    `owner_epoch` is lower than the highest one they have seen: a newer owner has replaced it.

    `owner_epoch` is the epoch of the owner, or the newest epoch that a standby has read; -1 while it has read none.
    `position` is the journal offset that an owner has written up to, or that a standby has applied up to.
    The other fields are counts of ready workers by role, as of the owner's fleet; a standby leaves them at 0.

    Attributes:
        router_id: name of the router.
        role: owner or standby of the group.
        position: offset in the journal up to which the router has written or read.
        ready_aggregated: ready workers that compute prompts and generate responses.
        ready_prefill: ready prefill workers.
        ready_decode: ready decode workers.
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


HeartbeatEvent = RouterHeartbeat
