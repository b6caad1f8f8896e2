"""Report whether a router can take over its groups, as a readiness probe and as a metric."""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from forebay.live.router.router import Router


class BlockedGroup(NamedTuple):
    """Group that a router cannot take over, because its owner has other decision rules.

    Attributes:
        group: Name of the group.
        reason: Why the router cannot take over, with both versions of the rules.
        has_owner: Whether the group has an owner at the moment.
    """

    group: str
    reason: str
    has_owner: bool


def blocked_groups(router: Router) -> list[BlockedGroup]:
    """Return the groups that a router cannot take over, by control partition."""
    return [
        BlockedGroup(member.group, member.standby.blocked, member.has_owner)
        for _, member in sorted(router.members.items())
        if member.standby is not None and member.standby.blocked is not None
    ]


def ready(router: Router) -> tuple[bool, str]:
    """Return whether a router is ready, and a text with the reason.

    A router is not ready if it cannot take over a group that has no owner. While the group has an owner with other
    rules, as in a rolling upgrade, the router is ready, and waits.
    """
    blocked = blocked_groups(router)
    text = "; ".join(f"group {one.group}: {one.reason}" for one in blocked)
    return all(one.has_owner for one in blocked), text or "ready"


class ReadinessMetrics(Collector):
    """Prometheus metrics of the groups that a router cannot take over."""

    def __init__(self, router: Router) -> None:
        self._router = router

    def collect(self) -> Iterator[Metric]:
        """Yield the current metrics."""
        text = "1 for a group that this router cannot take over, because its owner has other decision rules"
        gauge = GaugeMetricFamily("forebay_router_blocked", text, labels=["group"])
        blocked = {one.group for one in blocked_groups(self._router)}
        for member in self._router.members.values():
            gauge.add_metric([member.group], member.group in blocked)
        yield gauge
