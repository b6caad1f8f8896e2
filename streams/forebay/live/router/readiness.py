"""Report whether a router can take over its groups, as a readiness probe and as a metric."""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.router.router import Router


class BlockedGroup(NamedTuple):
    """Group that a router cannot take over.

    `is_ready` says that this is expected, because the group has an owner with other decision rules at the moment.
    """

    group: str
    reason: str
    is_ready: bool


def blocked_groups(router: Router) -> list[BlockedGroup]:
    found: list[BlockedGroup] = []
    for _, member in sorted(router.members.items()):
        if member.stopped is not None:
            found.append(BlockedGroup(member.group, member.stopped, is_ready=False))
        elif member.standby is not None and member.standby.blocked is not None:
            found.append(BlockedGroup(member.group, member.standby.blocked, is_ready=member.has_owner))
    return found


def ready(router: Router) -> tuple[bool, str]:
    """Return whether a router is ready, and the reason.

    A router is not ready if it cannot take over a group that has no owner, or whose records it cannot derive although
    the owner has its rules. While the group has an owner with other rules, as in a rolling upgrade, the router is
    ready, and waits.
    """
    blocked = blocked_groups(router)
    text = "; ".join(f"group {one.group}: {one.reason}" for one in blocked)
    return all(one.is_ready for one in blocked), text or "ready"


class ReadinessMetrics(Collector):
    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        text = "1 for a group that this router cannot take over; /ready names the reason"
        gauge = GaugeMetricFamily("forebay_router_blocked", text, labels=["group"])
        blocked = {one.group for one in blocked_groups(self._router)}
        for member in self._router.members.values():
            gauge.add_metric([member.group], member.group in blocked)
        yield gauge
