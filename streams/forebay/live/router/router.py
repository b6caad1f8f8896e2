"""Run a router process, which is either the owner or a warm standby of each group.

Each group has a member of its own (see `forebay.live.router.group_member`), so the groups do not wait for each other.
"""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import NamedTuple

import msgspec
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from forebay.core.routing.policies import CustomPolicies
from forebay.events.control import RouterConfig
from forebay.events.pools import PoolRouting
from forebay.live.owner.admission import RequireSlot
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.router.group_member import GroupMember
from forebay.live.router.placement import GroupPlacement, placement_metrics
from forebay.live.standby import AbandonedTail, Standby
from forebay.runtime.metrics import collector, gauge
from forebay.transport.base import Leases, Log
from forebay.transport.directory import Directory

logger = logging.getLogger(__name__)

RETRY_S = 1.0  # pause after a log failure


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a router process.

    Attributes:
        routing: Rules for the choice of pools, by model. A model without rules keeps those of the log.
        retry_s: Pause before a group is claimed or followed again after a log failure. It doubles up to `RETRY_MAX_S`.
        slots_max: Maximum number of slots per pool. All groups share them.
        require_slot: Adds a missing slot to a pool. None if all slots exist.
        on_loss: Called before this router continues from the newest snapshot of a group, whose journal it cannot
            derive. None if it must not.
    """

    router_id: str
    partitions: int
    slots_max: int
    config: RouterConfig
    policies: CustomPolicies = {}
    routing: dict[str, PoolRouting] = {}
    snapshot_every: int = 5_000
    snapshot_age_s: float = 300.0
    poll_s: float = 0.5
    retry_s: float = RETRY_S
    require_slot: RequireSlot | None = None
    on_loss: Callable[[AbandonedTail], None] | None = None


class Router:
    def __init__(
        self,
        log: Log,
        leases: Leases,
        directory: Directory,
        settings: RouterSettings,
        registry: CollectorRegistry,
        on_owned: Callable[[str, int], None] = lambda _group, _epoch: None,
        ingress_leases: Leases | None = None,
    ) -> None:
        self._log = log
        self._leases = leases
        self._ingress_leases = ingress_leases
        self._directory = directory
        self._settings = settings
        self._registry = registry
        self._report_owned = on_owned
        self.members: dict[int, GroupMember] = {}
        self._metrics: dict[int, OwnerMetrics] = {}
        self._placed = asyncio.Event()
        self._stopped = asyncio.Event()
        self.owners: dict[int, Owner] = {}
        directory.on_change = self._placed.set

    @property
    def standbys(self) -> dict[int, Standby]:
        members = self.members.items()
        return {partition: member.standby for partition, member in members if member.standby is not None}

    async def run(self) -> None:
        """Run the owner or standby of every group until `stop`. Raises LogError if the directory fails."""
        async with asyncio.TaskGroup() as tasks:
            helping = [tasks.create_task(self._directory.run()), tasks.create_task(self._place())]
            stopped = tasks.create_task(self._wait_stopped())
            serving: list[asyncio.Task[None]] = []
            while not self._stopped.is_set():
                self._placed.clear()
                serving += [tasks.create_task(self._serve(member)) for member in self._new_members()]
                placed = asyncio.create_task(self._placed.wait())
                await asyncio.wait((placed, stopped), return_when=asyncio.FIRST_COMPLETED)
                placed.cancel()
            if serving:
                await asyncio.wait(serving)
            for task in helping:
                task.cancel()

    async def stop(self) -> None:
        """Seal the journal of each owned group, so that the next owner starts at once, and end `run`."""
        self._stopped.set()
        for member in self.members.values():
            member.stop()

    async def _wait_stopped(self) -> None:
        await self._stopped.wait()

    async def _serve(self, member: GroupMember) -> None:
        """Run a member until the router stops, or an operator removes its group and frees the partition."""
        await member.run()
        if self._directory.group_in(member.partition) != member.group:
            del self.members[member.partition]
            self._placed.set()

    def _new_members(self) -> list[GroupMember]:
        for partition, member in self.members.items():
            if self._directory.group_in(partition) != member.group:
                member.stop()
        created = []
        for partition in range(self._settings.partitions):
            group = self._directory.group_in(partition)
            if group is None or partition in self.members:
                continue
            member = self.members[partition] = self._member_of(group, partition)
            created.append(member)
        return created

    async def _place(self) -> None:
        """Place groups while this router owns the group of control partition 0, or no router does."""
        placement = GroupPlacement(self._log, self._leases, self._directory, self._settings.partitions)
        self._registry.register(placement_metrics(placement, self._directory))
        while True:
            first = self.members.get(0)
            if 0 in self.owners or first is None or not first.has_owner:
                await placement.update()
            await asyncio.sleep(self._settings.poll_s)

    def _member_of(self, group: str, partition: int) -> GroupMember:
        settings = self._settings
        return GroupMember(
            self._log,
            group,
            partition,
            settings.router_id,
            new_owner=lambda: self._owner_of(group, partition),
            new_standby=lambda: Standby(
                self._log, partition, custom=settings.policies, waits_for_seal=True, on_loss=settings.on_loss
            ),
            on_owned=lambda owner: self._on_owned(group, partition, owner),
            retry_s=settings.retry_s,
        )

    def _owner_of(self, group: str, partition: int) -> Owner:
        settings = self._settings
        return Owner(
            self._log,
            self._leases,
            GroupSettings(
                group=group,
                partition=partition,
                owner_id=settings.router_id,
                router=settings.config,
                policies=settings.policies,
                routing=settings.routing.get(group),
                slots_max=settings.slots_max,
                require_slot=settings.require_slot,
                groups=settings.partitions,
                snapshot_every=settings.snapshot_every,
                snapshot_age_s=settings.snapshot_age_s,
                poll_s=settings.poll_s,
                heartbeats=True,
            ),
            ingress_leases=self._ingress_leases,
        )

    def _on_owned(self, group: str, partition: int, owner: Owner | None) -> None:
        if owner is not None:
            self.owners[partition] = owner
            metrics = self._metrics[partition] = OwnerMetrics(owner, group)
            self._registry.register(metrics)
            self._report_owned(group, owner.world.owner_epoch)
        elif self.owners.pop(partition, None) is not None:
            self._registry.unregister(self._metrics.pop(partition))


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


@collector
def readiness_metrics(router: Router) -> Iterator[Metric]:
    text = "1 for a group that this router cannot take over; /ready names the reason"
    blocked = {one.group for one in blocked_groups(router)}
    groups = {member.group: member.group in blocked for member in router.members.values()}
    yield gauge("forebay_router_blocked", text, groups, "group")
