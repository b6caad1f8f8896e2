"""Write the heartbeats of a router for one group, so that ingresses and operators see its owner and standbys."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Literal

from forebay import runtime
from forebay.core.state.fleet import WorkerPhase
from forebay.core.world import World
from forebay.events.codec import encode
from forebay.events.control import Role
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import FLEET, HEARTBEATS
from forebay.live.router.standby import Standby
from forebay.transport.base import Draft, Log, LogError

OWNER_EVERY_S = 0.5  # a quarter of the time without heartbeats after which an ingress rejects requests
STANDBY_EVERY_S = 1.0  # a standby counts for ten seconds after its heartbeat


class HeartbeatWriter:
    """Writer of the heartbeats of one router for the group in `partition`.

    At most one heartbeat is unacknowledged, so heartbeats do not accumulate while the broker is unreachable.
    """

    def __init__(self, log: Log, partition: int, group: str, router_id: str) -> None:
        self._log = log
        self._partition = partition
        self._group = group
        self._router_id = router_id
        self._appending: asyncio.Task[None] | None = None
        self._due_s = 0.0
        self._fleet_read = -1

    def due_in_s(self) -> float:
        """Return the seconds until the next heartbeat."""
        return max(0.0, self._due_s - runtime.monotonic_s())

    def beat_as_owner(self, world: World, position: int) -> None:
        """Append a heartbeat if one is due, or if the fleet changed. Called after every turn of the owner.

        `position` is the end of the owner's journal.
        """
        fleet_read = world.view.get(FLEET.name, 0)
        if self.due_in_s() and fleet_read == self._fleet_read:
            return
        if self._is_appending():
            self._due_s = runtime.monotonic_s() + OWNER_EVERY_S  # the loop sleeps until then
            return
        self._fleet_read = fleet_read
        ready = Counter(worker.spec.role for worker in world.fleet.workers() if worker.phase is WorkerPhase.READY)
        self._append("owner", world, position, OWNER_EVERY_S, ready)

    async def beat_as_standby(self, standby: Standby, is_member: Callable[[], bool]) -> None:
        """Append heartbeats of a standby until cancelled, as long as `is_member()` and `standby` has not failed."""
        while True:
            if is_member() and standby.failed is None and not self._is_appending():
                self._append("standby", standby.world, standby.position, STANDBY_EVERY_S, Counter())
            await asyncio.sleep(self.due_in_s() or STANDBY_EVERY_S)

    def close(self) -> None:
        """Cancel the heartbeat that is not acknowledged yet."""
        if self._appending is not None:
            self._appending.cancel()

    def _is_appending(self) -> bool:
        return self._appending is not None and not self._appending.done()

    def _append(
        self, role: Literal["owner", "standby"], world: World, position: int, every_s: float, ready: Counter[Role]
    ) -> None:
        self._due_s = runtime.monotonic_s() + every_s
        heartbeat = RouterHeartbeat(
            group=self._group,
            router_id=self._router_id,
            role=role,
            owner_epoch=world.owner_epoch,
            position=position,
            ready_aggregated=ready["aggregated"],
            ready_prefill=ready["prefill"],
            ready_decode=ready["decode"],
            at_us=runtime.wall_us(),
            policies=world.owner_policies,
        )
        draft = Draft(HEARTBEATS.name, self._partition, encode(HEARTBEATS, heartbeat), self._router_id.encode())
        self._appending = asyncio.create_task(self._appended(draft), name="heartbeat")

    async def _appended(self, draft: Draft) -> None:
        try:
            await self._log.append([draft])
        except LogError:
            return  # the owner notices a failed log by its journal, and ingresses notice the missing heartbeat
