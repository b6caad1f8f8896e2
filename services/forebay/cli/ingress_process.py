"""The process of `forebay ingress`: HTTP and the topic door on one event loop."""

import asyncio
import socket
from dataclasses import replace
from pathlib import Path

import typer
from prometheus_client import CollectorRegistry
from xxhash import xxh3_64_intdigest

from forebay.cli.cluster import Cluster, connected, leases_at, run_service, until_signal
from forebay.events.topics import TOKENS
from forebay.ingress.app import build_app
from forebay.ingress.door import Door
from forebay.ingress.door_metrics import DoorMetrics
from forebay.ingress.explain_worker import Source
from forebay.ingress.explainer import Explainer
from forebay.ingress.ingress import Ingress, IngressSettings
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.server import build_server, listen
from forebay.transport.base import LeaseError, Leases
from forebay.transport.directory import Directory
from forebay.transport.kafka_topics import count_topics

POLL_S = 1.0


def serve(cluster: Cluster, address: tuple[str, int], model: Path | None, settings: IngressSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises Unusable for what cannot be started with, LogError when the log fails."""
    loaded = Model(model or DEFAULT_MODEL)
    listener = listen(*address)
    run_service(_run(cluster, loaded, settings, listener))


class Readiness:
    """Whether requests would be served: the group is placed and a worker is alive. Polls the leases."""

    def __init__(self, leases: Leases, group: str, directory: Directory) -> None:
        self._leases = leases
        self._group = group
        self._directory = directory
        self._alive = False

    def __call__(self) -> bool:
        """As of the last poll."""
        return self._alive and self.partition() is not None

    def partition(self) -> int | None:
        """The control partition of the group, None while no router placed it."""
        return self._directory.partition_of(self._group)

    async def run(self) -> None:
        """Poll until cancelled; leases that cannot be read change nothing."""
        while True:
            try:
                leases = await asyncio.to_thread(self._leases.poll, self._group)
                self._alive = any(lease.expires_in_ms > 0 for lease in leases)
            except LeaseError:
                pass
            await asyncio.sleep(POLL_S)


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
        explainer = Explainer(Source(kafka=cluster.kafka))
        server = build_server(build_app(ingress, registry, explainer))
        address, port = listener.getsockname()[:2]
        typer.echo(f"forebay: ingress {settings.ingress_id} serves {settings.model_name} on http://{address}:{port}/v1")

        async def stop() -> None:
            server.should_exit = True
            await explainer.close()

        door = Door(log, ingress, DoorMetrics(registry), counts.replies)
        serving = server.serve(sockets=[listener])
        try:
            await until_signal(serving, ingress.run(), door.run(), ready.run(), directory.run(), stop=stop)
        finally:
            await explainer.close()
