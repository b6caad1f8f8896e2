"""The version of the event types, by which writers know which types the owner of a group can read.

During a rolling upgrade, workers and ingresses of a new version may run under an owner of an older one. An event type
that this owner does not know would have no effect. Each event type therefore names the version that introduced it
(`Event.SINCE`), and each owner announces its own version in its claim, on `fleet` and in its heartbeats. A writer of a
type that older owners do not know checks `may_write` first. The newest claim counts, also after a rollback.
"""

from typing import get_args

from forebay.events.base import Event
from forebay.events.topics import INPUTS

TENANTS_SINCE = 4  # first version whose owners use the tenant and the weight of `RequestSubmitted`
PLACEMENT_SINCE = 5  # first version whose owners use `Command.placement`; others send the command to workers
CALLS_SINCE = 6  # first version whose owners know the task `call` of `RequestSubmitted`
# Version that an owner of this program can read.
EVENTS_VERSION: int = max(CALLS_SINCE, *(kind.SINCE for topic in INPUTS for kind in get_args(topic.events)))


def may_write(kind: type[Event], owner_events: int) -> bool:
    """Return whether an owner can read an event type.

    Args:
        kind: the event type.
        owner_events: version of the event types that the newest owner announced; 1 if it announced none.
    """
    return owner_events >= kind.SINCE
