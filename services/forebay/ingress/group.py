"""Client of the group of one model: its pools, commands, adapters and responses. It needs no tokenizer."""

from collections.abc import Callable

from forebay.ingress.adapters import Adapters
from forebay.ingress.commands import CommandClient
from forebay.ingress.errors import ApiError, no_router
from forebay.ingress.front import Front
from forebay.ingress.http.pool_settings import PoolConfigurator
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.readiness import NO_OWNER, NO_WORKER, Readiness
from forebay.ingress.settings import IngressSettings
from forebay.transport.heartbeats import OwnerPresence


class GroupClient:
    """Sends commands and settings of one model to its owner, and knows whether the model can be served.

    Args:
        front: parts that all models of the process share.
        settings: settings of the ingress, with the name of the model.
        ready: returns whether requests can be served.
        find_partition: returns the partition of the model's control topics; None while no router has assigned one.

    Attributes:
        front: parts that all models of the process share.
        ready_details: additional fields of the response to `GET /ready`.
        not_ready_reason: returns the error message of `GET /ready` while the ingress is not ready.
        has_owner: returns whether the model has an owner. In the embedded system the owner is a task of this process.
        owner_silent_s: returns the seconds since the owner's last heartbeat, 0 in the embedded system.
        full: whether the queue of the model's pool is assumed to be full.
        heartbeats: heartbeats of the routers of the group; None in the embedded system.
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
        """Stop following the topics of the model."""
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
        pools = await self.pools.disaggregation_settings()
        return any(disagg.enforce and disagg.policy == "always" for _, served, disagg in pools if served == model)
