"""The process of `forebay picker`: an external processor of Envoy for all models of a distributed system."""

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.events.topics import TOKENS
from forebay.ingress.front import Front
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.served_models import ServedModels
from forebay.ingress.settings import IngressSettings
from forebay.picker.server import build_server
from forebay.picker.servers import Fallback, FallbackMode
from forebay.processes.ingress import IngressLeases, until_known
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce
from forebay.processes.service import Cluster, connected, leases_at, until_signal
from forebay.processes.shutdown import STOP_S, stop_notice
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import heartbeat_metrics
from forebay.transport.models import ModelStore
from forebay.workers.runtime.lease_keeper import LeaseKeeper


@dataclass(frozen=True, slots=True, kw_only=True)
class PickerSettings:
    """Settings of a picker.

    Attributes:
        ingress: how requests are prepared, without the reply slot and the incarnation.
        drain_s: seconds to wait for answers in flight when the process stops.
    """

    cluster: Cluster
    ingress: IngressSettings
    host: str
    port: int
    fallback: FallbackMode
    drain_s: float


async def run(settings: PickerSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError, LeaseError or LogError.

    A picker is an ingress with another API: it has a reply slot and a lease per model. If it dies, the owner aborts its
    requests.
    """
    cluster, picker_id, registry = settings.cluster, settings.ingress.ingress_id, process_registry()
    async with connected(cluster, registry) as (log, counts):
        slot = xxh3_64_intdigest(picker_id.encode()) % counts.replies
        ingress = replace(settings.ingress, reply_slot=slot, incarnation=runtime.random_id())
        directory, store = Directory(log), ModelStore(log)
        await directory.start()
        await store.start()
        front = Front(log, ingress, IngressMetrics(registry, None), await log.end(TOKENS.name, slot))
        keeper = LeaseKeeper(leases_at(cluster.redis_url, cluster.kafka.namespace, "ingress"))
        leases = IngressLeases(keeper, ingress)
        with tempfile.TemporaryDirectory(prefix="forebay-models-") as folder:
            models = ServedModels(front, directory, store, Path(folder), leases.hold)
            registry.register(heartbeat_metrics(models.presences))
            workers = leases_at(cluster.redis_url, cluster.kafka.namespace)
            fallback = Fallback(models, workers, settings.fallback, registry)
            server, port = build_server(fallback, settings.host, settings.port)

            async def serve() -> None:
                await until_known(models)
                await server.start()
                announce(f"picker {picker_id} serves Envoy on {settings.host}:{port}")
                await server.wait_for_termination()

            async def stop() -> None:
                announce(stop_notice(f"picker {picker_id}", front.admission.in_flight, settings.drain_s))
                await server.stop(settings.drain_s)

            keeper.start()
            parts = front.run(), models.run(), leases.replaced, serve(), directory.run(), fallback.run()
            try:
                await until_signal(*parts, stop=stop, stop_s=settings.drain_s + STOP_S)
            finally:
                await server.stop(None)
                await keeper.stop()
