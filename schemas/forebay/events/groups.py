"""Topic `groups`: the control partition of each group. A directory for ingresses and workers; no world applies it."""

from forebay.events.base import Count, Event, Name


class GroupPlaced(Event, tag="group.placed", frozen=True, kw_only=True):
    """A group, the pools of one model, is assigned to a control partition. The record key is the group.

    Only the owner of control partition 0 writes this event. The first placement of a group wins.

    Attributes:
        partition: control partition of the group.
    """

    group: Name
    partition: Count
    at_us: int = 0


GroupEvent = GroupPlaced
