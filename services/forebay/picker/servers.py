"""Servers for requests that no owner can route, and the metrics of a picker."""

import asyncio
import logging
from collections.abc import Collection
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter

from forebay import runtime
from forebay.events.codec import MALFORMED
from forebay.events.fleet import WorkerLease
from forebay.ingress.errors import ApiError
from forebay.ingress.served_models import ServedModels
from forebay.transport.base import LeaseError, Leases

logger = logging.getLogger(__name__)

POLL_S = 1.0
FallbackMode = Literal["random", "503"]


class Fallback:
    """Selects a server while a model has no owner, at random among the ready ones, and counts what pickers do."""

    def __init__(self, models: ServedModels, leases: Leases, mode: FallbackMode, registry: CollectorRegistry) -> None:
        self.models = models
        self._leases = leases
        self._mode = mode
        self._servers: dict[str, list[str]] = {}
        self._requests = Counter(
            "forebay_picker_requests",
            "Requests of gateways, by what happened: picked, moved to another server, finished, failed, cancelled,"
            " rejected, or without an owner sent at random (fallback_random) or rejected (fallback_503).",
            ["event"],
            registry=registry,
        )

    def count(self, event: str) -> None:
        self._requests.labels(event).inc()

    def endpoint(self, error: ApiError, name: str, endpoints: Collection[str]) -> str:
        """Return a ready server of a model that has no owner, of those that the gateway names. Raises other errors."""
        try:
            group = self.models.group(name)
        except ApiError:
            raise error from None
        if error.status != 503 or (group.has_owner() and error.code != "log_unavailable"):
            raise error
        servers = self._servers.get(group.settings.model_name, [])
        allowed = [one for one in servers if not endpoints or one in endpoints]
        if self._mode != "random" or not allowed:
            self.count("fallback_503")
            raise error
        self.count("fallback_random")
        return allowed[runtime.random_int(8) % len(allowed)]

    async def run(self) -> None:
        """Follow the leases of workers until cancelled. While they cannot be read, the last ones count."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        for name in self.models.names:
            try:
                leases = await runtime.offload(self._leases.poll, name)
            except LeaseError as error:
                logger.debug("the leases of %s cannot be read: %s", name, error)
                continue
            fresh = [one.payload for one in leases if one.expires_in_ms > 0 and not one.released]
            self._servers[name] = [found for payload in fresh if (found := _server(payload))]


def _server(payload: bytes) -> str:
    """Return the server of a worker that may get requests; empty if there is none."""
    try:
        lease = msgspec.msgpack.decode(payload, type=WorkerLease)
    except MALFORMED:
        return ""
    return "" if lease.draining or lease.spec.role != "aggregated" else lease.spec.endpoint
