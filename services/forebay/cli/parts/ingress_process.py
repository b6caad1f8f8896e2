"""The process of `forebay ingress`: HTTP and the topic door on one event loop."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import typer
from prometheus_client import CollectorRegistry
from xxhash import xxh3_64_intdigest

from forebay.cli.common.cluster import Cluster, connected, leases_at, run_service, until_signal
from forebay.events.control import Role
from forebay.events.fleet import WorkerLease
from forebay.events.topics import TOKENS
from forebay.ingress.app import build_app
from forebay.ingress.door import Door
from forebay.ingress.door_metrics import DoorMetrics
from forebay.ingress.errors import ApiError
from forebay.ingress.explain_worker import Source
from forebay.ingress.explainer import Explainer
from forebay.ingress.ingress import NO_PREFILL_WORKER, NO_WORKER, Ingress, IngressSettings
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.server import build_server, listen
from forebay.transport.base import Lease, LeaseError, Leases
from forebay.transport.directory import Directory
from forebay.transport.kafka_topics import count_topics

POLL_S = 1.0


def serve(cluster: Cluster, address: tuple[str, int], model: Path | None, settings: IngressSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises Unusable for what cannot be started with, LogError when the log fails."""
    loaded = Model(model or DEFAULT_MODEL)
    listener = listen(*address)
    run_service(_run(cluster, loaded, settings, listener))


class Readiness:
    """Whether requests would be served: the group is placed, and a worker that answers is alive. Polls the leases.

    Where prompts must be computed by prefill workers (`enforced` asks for that), one of them has to be alive, too.
    """

    def __init__(self, leases: Leases, group: str, directory: Directory) -> None:
        self._leases = leases
        self._group = group
        self._directory = directory
        self._alive = False
        self._why_not = NO_WORKER
        self.enforced: Callable[[], Awaitable[bool]] | None = None

    def __call__(self) -> bool:
        """As of the last poll."""
        return self._alive and self.partition() is not None

    def why_not(self) -> str:
        """Why no request would be served, as of the last poll."""
        return self._why_not

    def partition(self) -> int | None:
        """The control partition of the group, None while no router placed it."""
        return self._directory.partition_of(self._group)

    async def run(self) -> None:
        """Poll until cancelled; leases that cannot be read change nothing."""
        while True:
            try:
                leases = await asyncio.to_thread(self._leases.poll, self._group)
                self._alive = await self._would_serve({_role(lease) for lease in leases})
            except (LeaseError, ApiError):
                pass
            await asyncio.sleep(POLL_S)

    async def _would_serve(self, roles: set[Role | None]) -> bool:
        if "aggregated" in roles or {"decode", "prefill"} <= roles:
            self._why_not = NO_WORKER  # if any: the group is not placed
            return True
        if "decode" not in roles:
            self._why_not = NO_WORKER
            return False
        self._why_not = NO_PREFILL_WORKER
        return not (self.enforced is not None and await self.enforced())


def _role(lease: Lease) -> Role | None:
    """What the holder of a lease does, if it is alive."""
    if lease.expires_in_ms <= 0:
        return None
    try:
        return msgspec.msgpack.decode(lease.payload, type=WorkerLease).spec.role
    except msgspec.MsgspecError:
        return None  # no owner will admit it


async def _enforced(ingress: Ingress) -> bool:
    """Whether every request is refused while there is no prefill worker."""
    model = ingress.settings.model_name
    pools = await ingress.thresholds.decode_pools()
    return any(disagg.enforce and disagg.policy == "always" for _, served, disagg in pools if served == model)


async def _run(cluster: Cluster, model: Model, settings: IngressSettings, listener: socket.socket) -> None:
    registry = CollectorRegistry()
    counts = await count_topics(cluster.kafka)
    slot = xxh3_64_intdigest(settings.ingress_id.encode()) % counts.replies
    settings = replace(settings, reply_slot=slot)
    async with connected(cluster, registry) as log:
        directory = Directory(log)
        await directory.start()
        leases = leases_at(cluster.redis_url, cluster.kafka.namespace)
        ready = Readiness(leases, settings.model_name, directory)
        metrics = IngressMetrics(registry, settings.model_name)
        reply_from = await log.end(TOKENS.name, slot)
        ingress = Ingress(log, model, settings, metrics, ready, reply_from, ready.partition)
        ready.enforced = partial(_enforced, ingress)
        ingress.why_not_ready = ready.why_not
        explainer = Explainer(Source(kafka=cluster.kafka))
        address, port = listener.getsockname()[:2]
        text = f"forebay: ingress {settings.ingress_id} serves {settings.model_name} on http://{address}:{port}/v1"
        server = build_server(build_app(ingress, registry, explainer), partial(typer.echo, text))

        async def stop() -> None:
            server.should_exit = True
            await explainer.close()

        door = Door(log, ingress, DoorMetrics(registry), counts.replies)
        serving = server.serve(sockets=[listener])
        try:
            await until_signal(serving, ingress.run(), door.run(), ready.run(), directory.run(), stop=stop)
        finally:
            await explainer.close()
