"""The process of `forebay ingress`: HTTP and the Kafka API on one event loop."""

import asyncio
import contextlib
import socket
import tempfile
from collections.abc import Awaitable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.events.topics import TOKENS
from forebay.ingress.drain import IngressDrain
from forebay.ingress.explain_worker import LogSource
from forebay.ingress.explainer import Explainer
from forebay.ingress.front import Front
from forebay.ingress.http.app import build_app
from forebay.ingress.http.endpoint import Endpoint
from forebay.ingress.kafka_api.api import KafkaApi
from forebay.ingress.kafka_api.shared import KafkaApiMetrics
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.served_models import ServedModels
from forebay.ingress.settings import IngressSettings
from forebay.processes.listening import Hosts, listening, serve_http
from forebay.processes.metrics_server import process_registry
from forebay.processes.notices import announce, complain
from forebay.processes.service import Cluster, connected, leases_at, redis_at, until_signal
from forebay.processes.shutdown import STOP_S, stop_notice
from forebay.runtime.errors import ConfigError
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import OWNER_SILENT_S, heartbeat_metrics
from forebay.transport.models import ModelStore
from forebay.transport.redis.limits import RedisLimits
from forebay.workers.runtime.lease_keeper import LeaseKeeper

KNOWN_POLL_S = 0.02
WAIT_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class IngressProcessSettings:
    """Settings of an ingress.

    Attributes:
        model: directory of the only model; None to serve all models of the system.
        ingress: settings without the reply slot and the incarnation.
        policies: names of the custom policies of routers that `explain` may run.
    """

    cluster: Cluster
    model: Path | None
    ingress: IngressSettings
    endpoint: Endpoint
    drain_s: float
    policies: tuple[str, ...] = ()


async def run(settings: IngressProcessSettings) -> None:
    """Serve until SIGINT or SIGTERM. Raises ConfigError, LeaseError or LogError."""
    model = None if settings.model is None else Model(settings.model)
    with listening(settings.endpoint, settings.ingress) as (listeners, hosts):
        await _serve(settings, model, listeners, hosts)


class IngressLeases:
    """Redis leases of an ingress, one per model, so that owners notice its death."""

    def __init__(self, keeper: LeaseKeeper, settings: IngressSettings) -> None:
        self.replaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._keeper = keeper
        self._settings = settings
        self._held: set[str] = set()

    def hold(self, model: str) -> None:
        """Renew the lease of a model from now on."""
        settings = self._settings
        if model not in self._held:
            self._held.add(model)
            self._keeper.hold(model, settings.ingress_id, settings.incarnation, b"", self._on_replaced)

    def _on_replaced(self, _: str) -> None:
        if not self.replaced.done():
            text = f"another ingress with the id {self._settings.ingress_id} runs; give each its own --id"
            self.replaced.set_exception(ConfigError(text))


async def _until_draining(part: Awaitable[None], drain: IngressDrain) -> None:
    """Run the task `part` until the drain begins, because other ingresses then take over its requests; then wait."""
    running = asyncio.ensure_future(part)
    beginning = asyncio.create_task(drain.wait_begun())
    try:
        await asyncio.wait((running, beginning), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            await running
            return
        running.cancel()
        await asyncio.wait((running,))
        if not running.cancelled():
            running.result()
        await asyncio.Event().wait()
    finally:
        for task in (running, beginning):
            task.cancel()
        await asyncio.gather(running, beginning, return_exceptions=True)


async def _serve(
    process: IngressProcessSettings, model: Model | None, listeners: list[socket.socket], hosts: Hosts
) -> None:
    cluster, endpoint, drain_s = process.cluster, process.endpoint, process.drain_s
    explainer = Explainer(LogSource(kafka=cluster.kafka, policies=process.policies))
    registry = process_registry()
    async with connected(cluster, registry) as (log, counts):
        slot = xxh3_64_intdigest(process.ingress.ingress_id.encode()) % counts.replies
        settings = replace(process.ingress, reply_slot=slot, incarnation=runtime.random_id())
        directory, store = Directory(log), ModelStore(log)
        await directory.start()
        if model is None:
            await store.start()
        metrics = IngressMetrics(registry, None if model is None else settings.model_name)
        limit_store = RedisLimits(redis_at(cluster.redis_url), cluster.kafka.namespace)
        front = Front(log, settings, metrics, await log.end(TOKENS.name, slot), model, limit_store)
        await front.keys.start()
        keeper = LeaseKeeper(leases_at(cluster.redis_url, cluster.kafka.namespace, "ingress"))
        leases = IngressLeases(keeper, settings)
        with tempfile.TemporaryDirectory(prefix="forebay-models-") as folder:
            models = ServedModels(front, directory, store, Path(folder), leases.hold, model=model)
            registry.register(heartbeat_metrics(models.presences))
            app = build_app(models, registry, explainer, hosts)
            address, port = listeners[0].getsockname()[:2]
            text = f"ingress {settings.ingress_id} serves {settings.model_name} on"
            started = partial(announce, f"{text} {endpoint.scheme}://{address}:{port}/v1")

            async def stop() -> None:
                announce(stop_notice(f"ingress {settings.ingress_id}", front.drain.in_flight, drain_s))
                front.drain.begin()

            api = KafkaApi(log, models, KafkaApiMetrics(registry), counts.replies)

            async def serve() -> None:
                await until_known(models)
                await serve_http(app, front, listeners, endpoint, drain_s, started)

            keeper.start()
            if model is not None:
                leases.hold(settings.model_name)
            parts = (
                front.run(),
                front.keys.run(),
                models.run(),
                leases.replaced,
                serve(),
                _until_draining(api.run(), front.drain),
                directory.run(),
                _until_draining(_report_waits(models, settings.ingress_id), front.drain),
            )
            try:
                await until_signal(*parts, stop=stop, stop_s=drain_s + STOP_S)
            finally:
                await keeper.stop()
                await explainer.close()


async def _report_waits(models: ServedModels, ingress_id: str) -> None:
    """Say every `WAIT_S` seconds what the ingress waits for while it is not ready."""
    while True:
        await asyncio.sleep(WAIT_S)
        if (why := models.why_not_ready()) is not None:
            complain(f"ingress {ingress_id} is not ready: {why}")


async def until_known(models: ServedModels) -> None:
    """Wait until the ingress has read the heartbeats of the owners. Without any, wait for as long as an owner may miss.

    Clients that connect meanwhile wait in the backlog of the listening socket. Otherwise the first requests would get
    503, although the system can serve them.
    """

    def is_known() -> bool:
        return models.why_not_ready() is None and all(one.owner is not None for one in models.presences())

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(OWNER_SILENT_S):
            while not is_known():  # noqa: ASYNC110 - heartbeats of several models set no common event
                await asyncio.sleep(KNOWN_POLL_S)
