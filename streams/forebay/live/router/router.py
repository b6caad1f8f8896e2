"""Run a router process, which is either the owner or a warm standby of each group.

Theory of operation. The router runs one task per control partition. While the partition is assigned to this router, the
task runs an owner, which claims the group. Otherwise it runs a standby, so that a later claim starts warm. If another
router claims the group, the owner ends but the process continues: the task runs a standby until the next assignment, or
until the group has no owner. The second case is necessary: members learn of a rebalance one after the other, so the
router that loses the partition may claim once more after the one that gets it. If the log fails a read or an append,
for example while a broker restarts, the task retries after a pause.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from enum import Enum

import msgspec
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.core.routing.policies import CustomPolicies
from forebay.events.control import RouterConfig
from forebay.events.pools import PoolRouting
from forebay.live.owner.journal import OwnershipLost
from forebay.live.owner.metrics import OwnerMetrics, PlacementMetrics
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.router.heartbeats import HeartbeatWriter
from forebay.live.router.placement import GroupPlacement
from forebay.live.router.standby import RecoveryDiverged, Standby
from forebay.transport.base import Leases, Log, LogError, PolicyNotAllowed
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.history.reader import OtherRules

logger = logging.getLogger(__name__)

# Without heartbeats of an owner, which are written twice per second from the end of its recovery on. Each claim for
# lack of an owner doubles the time, because that owner may only be slow to recover.
OWNERLESS_S, OWNERLESS_MAX_S = 3.0, 60.0
RETRY_S, RETRY_MAX_S = 1.0, 30.0  # pauses after a log failure double, because each claim adds a journal record


class OwnerEnd(Enum):
    """Why an ownership ended."""

    UNASSIGNED = "unassigned"
    LOST = "lost"  # another router claimed the group
    UNABLE = "unable"  # the rules of this router do not lead to the recorded decisions


class RouterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a router process.

    Attributes:
        router_id: Name of the router in the journal and in heartbeats. No decision depends on it.
        partitions: Number of control partitions, which is the maximum number of groups.
        slots_max: Number of partitions of each work topic. All groups share them.
        config: Routing settings of the pools, each of which the first lease of a worker configures.
        policies: Custom policies that the operator allowed, by router mode.
        routing: Rules for the choice of pools, by model. A model without rules keeps those of the log.
        snapshot_every: Number of journal records between two snapshots.
        snapshot_age_s: Maximum time between two snapshots in seconds, if at least one record was journalled since.
        poll_s: Interval between two polls of the leases, in seconds.
        retry_s: Pause in seconds before a group is claimed or followed again after a log failure. It doubles with each
            failure up to `RETRY_MAX_S`.
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


class Router:
    """Router process, which owns the groups of the partitions passed to `assign`.

    `is_member` returns whether this router is a member of the consumer group of routers. Only a member takes over a
    group when its owner ends, so only a member writes standby heartbeats.

    Attributes:
        owners: The running owners by control partition.
        standbys: The standbys that follow a journal, by control partition.
    """

    def __init__(
        self,
        log: Log,
        leases: Leases,
        directory: Directory,
        settings: RouterSettings,
        registry: CollectorRegistry,
        on_owned: Callable[[str, int], None] = lambda _group, _epoch: None,
        is_member: Callable[[], bool] = lambda: True,
        ingress_leases: Leases | None = None,
    ) -> None:
        self._is_member = is_member
        self._log = log
        self._leases = leases
        self._ingress_leases = ingress_leases
        self._directory = directory
        self._settings = settings
        self._registry = registry
        self._on_owned = on_owned
        self._assigned: set[int] = set()
        self._generation = 0
        self._changed = {partition: asyncio.Event() for partition in range(settings.partitions)}
        self._stopped = asyncio.Event()
        self.owners: dict[int, Owner] = {}
        self.standbys: dict[int, Standby] = {}
        directory.on_change = self._notify

    def assign(self, partitions: set[int]) -> None:
        """Own exactly the groups in these control partitions from now on."""
        logger.info("assigned the control partitions %s", sorted(partitions))
        self._assigned = partitions
        self._generation += 1
        self._notify()

    async def run(self) -> None:
        """Run the owner or standby of every partition until `stop`. Raises LogError if the directory fails."""
        async with asyncio.TaskGroup() as tasks:
            helping = [tasks.create_task(self._directory.run()), tasks.create_task(self._place())]
            partition_tasks = [tasks.create_task(self._serve(partition)) for partition in self._changed]
            await asyncio.wait(partition_tasks)
            for task in helping:
                task.cancel()

    async def stop(self) -> None:
        """Take a snapshot of each owned group, so that the next owner starts quickly, and end `run`."""
        self._stopped.set()
        self._notify()

    @property
    def _stopping(self) -> bool:
        return self._stopped.is_set()

    def _notify(self) -> None:
        for event in self._changed.values():
            event.set()

    async def _place(self) -> None:
        """Place groups while control partition 0 is assigned to this router."""
        placement = GroupPlacement(self._log, self._leases, self._directory, self._settings.partitions)
        self._registry.register(PlacementMetrics(placement, self._directory))
        while True:
            if 0 in self._assigned:
                await placement.update()
            await asyncio.sleep(self._settings.poll_s)

    async def _serve(self, partition: int) -> None:
        standby: Standby | None = None
        changed = self._changed[partition]
        lost_in = -1  # generation of the assignment in which the claim was lost; only a newer one allows a new claim
        reclaimed_in = -1  # generation of the assignment in which this router last claimed for lack of an owner
        ownerless_s: float | None = None  # time without an owner after which this router claims nevertheless
        retry_s = self._settings.retry_s
        while not self._stopping:
            changed.clear()
            group = self._directory.group_in(partition)
            if group is None:
                await changed.wait()
                continue
            try:
                if partition in self._assigned and self._generation > lost_in:
                    generation = self._generation
                    followed, standby = standby, None
                    end = await self._own(group, partition, followed)
                    if end is not OwnerEnd.UNASSIGNED:
                        ownerless_s = _next_ownerless_s(ownerless_s, end, is_new=generation > reclaimed_in)
                        lost_in = generation
                else:
                    standby = standby or Standby(self._log, partition, custom=self._settings.policies)
                    if await self._follow(group, partition, standby, changed, ownerless_s):
                        lost_in, reclaimed_in = -1, self._generation
                    if standby.failed is not None:
                        standby = None
                        await changed.wait()
                retry_s = self._settings.retry_s
            except LogError as error:
                standby = None
                logger.warning("the log failed for the group %s, retrying in %g s: %s", group, retry_s, error)
                await self._pause(retry_s)
                retry_s = min(2 * retry_s, RETRY_MAX_S)

    async def _pause(self, seconds: float) -> None:
        """Wait for `seconds`, at most until the router stops."""
        stopped = asyncio.create_task(self._stopped.wait())
        await asyncio.wait([stopped], timeout=seconds)
        stopped.cancel()

    async def _follow(
        self, group: str, partition: int, standby: Standby, changed: asyncio.Event, ownerless_s: float | None
    ) -> bool:
        """Run the standby until the assignment changes, the standby fails, or an assigned group has no owner.

        Returns whether the partition is assigned to this router, but the group had no owner for `ownerless_s`. Raises
        LogError if the log fails.
        """
        following = asyncio.create_task(standby.run(), name="standby")
        waiting = asyncio.create_task(changed.wait())
        tasks = [following, waiting]
        if partition in self._assigned and ownerless_s is not None:
            ownerless = self._until_ownerless(group, partition, standby, ownerless_s)
            tasks.append(asyncio.create_task(ownerless, name="owner's heartbeats"))
        self.standbys[partition] = standby
        writer = HeartbeatWriter(self._log, partition, group, self._settings.router_id)
        beating = asyncio.create_task(writer.beat_as_standby(standby, self._is_member), name="standby heartbeats")
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in tasks:
                if task.done():
                    task.result()
            return any(task.done() for task in tasks[2:])
        finally:
            del self.standbys[partition]
            writer.close()
            for task in (*tasks, beating):
                task.cancel()
            await asyncio.gather(*tasks, beating, return_exceptions=True)

    async def _until_ownerless(self, group: str, partition: int, standby: Standby, ownerless_s: float) -> None:
        """Wait until there was neither a heartbeat of an owner nor a claim for `ownerless_s`.

        Raises LogError if the log fails.
        """
        heartbeats = RouterHeartbeats(self._log, group)
        following = asyncio.create_task(heartbeats.follow(partition))
        claimed_s, epoch = runtime.monotonic_s(), standby.world.owner_epoch
        try:
            while True:
                if standby.world.owner_epoch != epoch:
                    claimed_s, epoch = runtime.monotonic_s(), standby.world.owner_epoch
                silent_s = runtime.monotonic_s() - claimed_s
                if heartbeats.owner_age_s is not None:
                    silent_s = min(silent_s, heartbeats.owner_age_s)
                if silent_s >= ownerless_s:
                    logger.warning("the group %s has no owner, although it is assigned to this router", group)
                    return
                await asyncio.wait((following,), timeout=min(ownerless_s - silent_s, 1.0))
                if following.done():
                    following.result()
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    async def _own(self, group: str, partition: int, standby: Standby | None) -> "OwnerEnd":
        """Own the group until it is unassigned or lost to another router, and return why the ownership ended.

        Raises LogError if the log fails.
        """
        settings = self._settings
        owner = Owner(
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
                groups=settings.partitions,
                snapshot_every=settings.snapshot_every,
                snapshot_age_s=settings.snapshot_age_s,
                poll_s=settings.poll_s,
                heartbeats=True,
            ),
            ingress_leases=self._ingress_leases,
        )
        metrics = OwnerMetrics(owner, group)
        try:
            await owner.start(standby)
            self.owners[partition] = owner
            self._registry.register(metrics)
            self._on_owned(group, owner.world.owner_epoch)
            await self._until_unassigned(owner, partition)
            return OwnerEnd.UNASSIGNED
        except OwnershipLost as error:
            logger.warning("no longer the owner of %s: %s", group, error)
            return OwnerEnd.LOST
        except (RecoveryDiverged, OtherRules, PolicyNotAllowed) as error:
            # The other groups continue. This group needs an operator or another router.
            logger.error("this router cannot own the group %s: %s", group, error)  # noqa: TRY400
            return OwnerEnd.UNABLE
        finally:
            owner.drop()
            if self.owners.pop(partition, None) is not None:
                self._registry.unregister(metrics)

    async def _until_unassigned(self, owner: Owner, partition: int) -> None:
        running = asyncio.create_task(owner.run(), name=f"owner of {partition}")
        changed = self._changed[partition]
        try:
            while partition in self._assigned and not self._stopping:
                changed.clear()
                waiting = asyncio.create_task(changed.wait())
                await asyncio.wait((running, waiting), return_when=asyncio.FIRST_COMPLETED)
                waiting.cancel()
                if running.done():
                    await running
                    return
            await owner.stop()
            await running
            await owner.close()
        finally:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError, LogError):
                await running


def _next_ownerless_s(previous_s: float | None, end: OwnerEnd, *, is_new: bool) -> float | None:
    """Return the time without an owner after which a router claims again, None for never.

    Args:
        previous_s: Time before the last claim.
        end: How the last ownership ended.
        is_new: Whether the router was assigned the partition since it last claimed for lack of an owner.
    """
    if end is OwnerEnd.UNABLE:
        return None
    return OWNERLESS_S if previous_s is None or is_new else min(2 * previous_s, OWNERLESS_MAX_S)
