"""Poll the leases of a group's workers and ingresses, and write the changes to `fleet`."""

import asyncio
import logging

from forebay import runtime
from forebay.core.world import World
from forebay.events.topics import FLEET
from forebay.live.owner.admission import WorkerAdmission
from forebay.live.owner.ingress_presence import IngressPresence
from forebay.live.owner.lease_judgement import ObservedTime
from forebay.transport.base import Lease, LeaseError, Leases

logger = logging.getLogger(__name__)


class LeasePolling:
    """Polls the leases of one group for its owner. `ingress_leases` is None if ingresses have no leases."""

    def __init__(
        self,
        group: str,
        world: World,
        workers: tuple[Leases, WorkerAdmission],
        ingresses: tuple[Leases | None, IngressPresence],
    ) -> None:
        self._group = group
        self._world = world
        self._leases, self._admission = workers
        self._ingress_leases, self._ingresses = ingresses

    async def run(self, poll_s: float) -> None:
        """Poll every `poll_s` seconds until cancelled. Raises LogError if the log does not accept an event."""
        readable = True
        workers, ingresses = ObservedTime(), ObservedTime()
        while True:
            try:
                leases, observed_ms, applied = await self._read(self._leases, workers)
                ended = await self._admission.update(leases, self._world.pools, self._world.fleet, applied, observed_ms)
                await self._forget(self._leases, ended)
                if self._ingress_leases is not None:
                    leases, observed_ms, applied = await self._read(self._ingress_leases, ingresses)
                    ended = await self._ingresses.update(leases, self._world.fleet, applied, observed_ms)
                    await self._forget(self._ingress_leases, ended)
                readable = True
            except LeaseError as error:
                # Without readable leases no worker counts as lost: the fleet stays as it is.
                workers.failed()
                ingresses.failed()
                if readable:
                    logger.warning("the leases cannot be read, retrying: %s", error)
                readable = False
            await asyncio.sleep(poll_s)

    async def _read(self, leases: Leases, observed: ObservedTime) -> tuple[list[Lease], int, int]:
        """Return the leases, the milliseconds observed since the last poll, and the applied offset of `fleet`."""
        polled = await runtime.offload(leases.poll, self._group)
        return polled, observed.read(runtime.monotonic_s()), self._world.view.get(FLEET.name, 0)

    async def _forget(self, leases: Leases, ended: list[Lease]) -> None:
        for lease in ended:
            await runtime.offload(leases.forget, self._group, lease.worker_id, lease.token)
