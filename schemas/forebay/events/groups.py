"""Topic `groups`: where each group lives. A directory for ingresses and workers, never applied to a world."""

from forebay.events.base import Count, Event, Name


class GroupPlaced(Event, tag="group.placed", frozen=True, kw_only=True):
    """The pools of one model are decided in control partition `partition`; the record's key is the group.

    Written by the owner of control partition 0 alone; the first placement of a group stands.
    """

    group: Name
    partition: Count
    at_us: int = 0


GroupEvent = GroupPlaced
