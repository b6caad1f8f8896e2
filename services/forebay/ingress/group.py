"""Client of the group of one model: its readiness, pools, commands, adapters and responses. It needs no tokenizer."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from forebay.ingress.adapters import Adapters
from forebay.ingress.commands import CommandClient
from forebay.ingress.errors import ApiError, no_router
from forebay.ingress.front import Front
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.pool_settings import PoolConfigurator
from forebay.ingress.settings import IngressSettings
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import OwnerPresence

POLL_S = 1.0  # seconds between two checks whether prompts must be computed by prefill workers
NO_OWNER = "no router owns this model now: a failover is in progress, or Kafka does not respond; try again soon"
NO_WORKER = "no worker is ready"
NO_PREFILL_WORKER = "no prefill worker is ready, and decode workers must not compute prompts"


class Readiness:
    """Whether an ingress can serve: its group has a partition, an owner and a ready worker that generates responses.

    The owner's heartbeats contain the number of ready workers per role. If prompts must be computed by prefill workers
    (`enforced`), a prefill worker must be ready, too.
    """

    def __init__(self, heartbeats: OwnerPresence, directory: Directory) -> None:
        self._heartbeats = heartbeats
        self._directory = directory
        self._is_enforced = False
        self.enforced: Callable[[], Awaitable[bool]] | None = None

    def __call__(self) -> bool:
        return self._problem() is None

    def why_not(self) -> str:
        return self._problem() or NO_WORKER

    def partition(self) -> int | None:
        """Return the control partition of the group; None until a router has assigned one."""
        return self._directory.partition_of(self._heartbeats.group)

    async def run(self) -> None:
        """Follow the owner's heartbeats until cancelled. Raises LogError if the log fails."""
        partition = await self._directory.placed(self._heartbeats.group)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._heartbeats.follow(partition))
            tasks.create_task(self._look())

    async def _look(self) -> None:
        while True:
            if self.enforced is not None:
                with contextlib.suppress(ApiError):  # if the settings cannot be read, keep the previous ones
                    self._is_enforced = await self.enforced()
            await asyncio.sleep(POLL_S)

    def _problem(self) -> str | None:
        owner = self._heartbeats.owner
        if self.partition() is None:
            return NO_WORKER
        if owner is None or not self._heartbeats.has_owner:
            return NO_OWNER
        if owner.ready_aggregated:
            return None
        if not owner.ready_decode:
            return NO_WORKER
        return NO_PREFILL_WORKER if self._is_enforced and not owner.ready_prefill else None


class GroupClient:
    """Sends commands and settings of one model to its owner, and knows whether the model can be served.

    In the embedded system the owner is a task of this process, so it is never silent and has no heartbeats.

    Attributes:
        ready_details: additional fields of the response to `GET /ready`.
        full: whether the queue of the model's pool is assumed to be full.
    """

    def __init__(
        self,
        front: Front,
        settings: IngressSettings,
        metrics: IngressMetrics,
        ready: Callable[[], bool],
        find_partition: Callable[[], int | None],
    ) -> None:
        self.front = front
        self.settings = settings
        self.metrics = metrics
        self.ready = ready
        self.not_ready_reason: Callable[[], str] = lambda: NO_WORKER
        self.ready_details: dict[str, str] = {}
        self.has_owner: Callable[[], bool] = lambda: True
        self.owner_silent_s: Callable[[], float] = lambda: 0.0
        self.find_partition = find_partition
        self.full = front.admission.full
        self.heartbeats: OwnerPresence | None = None
        log, name = front.log, settings.model_name
        self.replies = front.slot.reader(name)
        self.pools = PoolConfigurator(log, find_partition, metrics.undecodable.inc)
        self.commands = CommandClient(log, self.replies, name, settings.reply_slot, self.require_owner)
        self.adapters = Adapters(log, self.commands, name, settings.loras, find_partition)

    def follow(self, heartbeats: OwnerPresence, ready: Readiness) -> None:
        """Decide by the heartbeats of the group's owner whether the model has an owner and can be served."""
        self.heartbeats = heartbeats
        ready.enforced = self.has_enforced_prefill
        self.not_ready_reason = ready.why_not
        self.has_owner = lambda: heartbeats.has_owner
        self.owner_silent_s = lambda: heartbeats.owner_age_s or 0.0
        self.pools.allowed_policies = lambda: None if heartbeats.owner is None else heartbeats.owner.policies

    def close(self) -> None:
        self.adapters.close()

    def require_partition(self) -> int:
        """Return the partition of the model's control topics. Raises ApiError (503) while it has no router."""
        partition = self.find_partition()
        if partition is None:
            raise no_router(self.settings.model_name)
        return partition

    def require_owner(self) -> int:
        """Return the partition of the model's control topics. Raises ApiError (503) while the model has no owner."""
        partition = self.require_partition()
        if not self.has_owner():
            raise ApiError(503, "no_owner", NO_OWNER)
        return partition

    async def has_enforced_prefill(self) -> bool:
        """Return whether requests are rejected while no prefill worker is ready. Raises ApiError (503)."""
        model = self.settings.model_name
        pools = (await self.pools.configured()).values()
        return any(
            pool.model == model and pool.role == "decode" and disagg.enforce and disagg.policy == "always"
            for pool in pools
            for disagg in [pool.router.disagg]
        )
