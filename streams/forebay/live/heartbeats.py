"""Write the heartbeats of a router for one group, so that ingresses and operators see its owner and standbys."""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import Literal

from msgspec.structs import replace

from forebay import runtime
from forebay.core.state.fleet import WorkerPhase
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import encode
from forebay.events.heartbeats import RejectedWorker, RouterHeartbeat
from forebay.events.topics import FLEET, HEARTBEATS
from forebay.events.versions import EVENTS_VERSION
from forebay.live.standby import Standby
from forebay.transport.base import Draft, Log, LogError

Role = Literal["owner", "standby"]
OWNER_EVERY_S = 0.25  # standbys claim after 0.8 s without heartbeats (`forebay.live.router.succession.SILENT_S`)
ENDPOINTS_MAX = 256  # of a heartbeat, which is written four times per second
STANDBY_EVERY_S = 1.0  # a standby counts for ten seconds after its heartbeat


def owner_heartbeat(world: World, group: str, router_id: str, position: int = 0) -> RouterHeartbeat:
    specs = [worker.spec for worker in world.fleet.workers() if worker.phase is WorkerPhase.READY]
    ready = Counter(spec.role for spec in specs)
    return replace(
        _heartbeat(group, router_id, "owner", world, position),
        ready_aggregated=ready["aggregated"],
        ready_prefill=ready["prefill"],
        ready_decode=ready["decode"],
        card=card_of(world),
        endpoints=tuple(sorted({name for spec in specs for name in spec.endpoints})[:ENDPOINTS_MAX]),
    )


def card_of(world: World) -> str:
    """Return the digest of the model card of the ready workers; empty if they stored none."""
    ready = (worker.spec for worker in world.fleet.workers() if worker.phase is WorkerPhase.READY)
    return next((spec.card for spec in ready if spec.card), "")


def _heartbeat(group: str, router_id: str, role: Role, world: World, position: int) -> RouterHeartbeat:
    return RouterHeartbeat(
        group=group,
        router_id=router_id,
        role=role,
        owner_epoch=world.owner_epoch,
        position=position,
        at_us=runtime.wall_us(),
        policies=world.owner_policies,
        core_version=CORE_VERSION,
        events_version=EVENTS_VERSION,
    )


class HeartbeatWriter:
    """Writer of one router's heartbeats, of which at most one is unacknowledged, so none accumulate in an outage."""

    def __init__(self, log: Log, partition: int, group: str, router_id: str) -> None:
        self._log = log
        self._partition = partition
        self._group = group
        self._router_id = router_id
        self._appending: asyncio.Task[None] | None = None
        self._due_s = 0.0
        self._fleet_read = -1

    def due_in_s(self) -> float:
        return max(0.0, self._due_s - runtime.monotonic_s())

    def beat_as_owner(self, world: World, position: int, rejected: tuple[RejectedWorker, ...]) -> None:
        """Append a heartbeat if one is due, or if the fleet changed. `position` is the end of the owner's journal."""
        fleet_read = world.view.get(FLEET.name, 0)
        if self.due_in_s() and fleet_read == self._fleet_read:
            return
        if self._is_appending():
            self._due_s = runtime.monotonic_s() + OWNER_EVERY_S  # the loop sleeps until then
            return
        self._fleet_read = fleet_read
        beat = owner_heartbeat(world, self._group, self._router_id, position)
        self._append(self._draft(replace(beat, rejected=rejected)), OWNER_EVERY_S)

    async def release(self, world: World, position: int) -> None:
        """Append the last heartbeat of an owner that has sealed its journal, so that a standby claims at once."""
        self.close()
        with contextlib.suppress(LogError):  # the standbys also find the seal in the journal
            beat = _heartbeat(self._group, self._router_id, "owner", world, position)
            await self._log.append([self._draft(replace(beat, released=True))])

    async def beat_as_standby(self, standby: Standby, is_preferred: Callable[[], bool]) -> None:
        """Append heartbeats of a standby until cancelled, unless `standby` has failed or stopped."""
        while True:
            if standby.failed is None and standby.stopped is None and not self._is_appending():
                self._append(self._standby_draft(standby, preferred=is_preferred()), STANDBY_EVERY_S)
            await asyncio.sleep(self.due_in_s() or STANDBY_EVERY_S)

    async def probe(self, standby: Standby, *, preferred: bool) -> int | None:
        """Append a heartbeat of a standby and return its offset, or None if the log does not accept it."""
        try:
            (offset,) = await self._log.append([self._standby_draft(standby, preferred=preferred)])
        except LogError:
            return None
        return offset

    def close(self) -> None:
        if self._appending is not None:
            self._appending.cancel()

    def _is_appending(self) -> bool:
        return self._appending is not None and not self._appending.done()

    def _standby_draft(self, standby: Standby, *, preferred: bool) -> Draft:
        beat = _heartbeat(self._group, self._router_id, "standby", standby.world, standby.position)
        return self._draft(replace(beat, preferred=preferred))

    def _draft(self, beat: RouterHeartbeat) -> Draft:
        return Draft(HEARTBEATS.name, self._partition, encode(HEARTBEATS, beat), self._router_id.encode())

    def _append(self, draft: Draft, every_s: float) -> None:
        self._due_s = runtime.monotonic_s() + every_s
        self._appending = asyncio.create_task(self._appended(draft), name="heartbeat")

    async def _appended(self, draft: Draft) -> None:
        try:
            await self._log.append([draft])
        except LogError:
            return  # the owner notices a failed log by its journal, and ingresses notice the missing heartbeat
