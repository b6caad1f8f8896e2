"""Topic `groups`: the number of the control partition of each group.

Ingresses and workers read it to find the partition of their group. It is no input topic of an owner.
"""

from forebay.events.base import Count, Event, Name


class GroupPlaced(Event, tag="group.placed", frozen=True, kw_only=True):
    """A group (the pools of one model) is assigned to a control partition. The record key is the name of the group.

    The owner of control partition 0 writes this event, or every router while this partition has no owner. If there are
    several events for one group, the first is valid. A record with the key and without a value removes the group, and
    frees its partition for another one.

    Attributes:
        partition: number of the partition that the group uses in all control topics.
    """

    group: Name
    partition: Count
    at_us: int = 0


GroupEvent = GroupPlaced
