"""The process of `forebay ingress`: HTTP and the Kafka API on one event loop."""

import asyncio
import contextlib
import socket
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from xxhash import xxh3_64_intdigest

from forebay.cli.common.cluster import connected, leases_at, run_service, until_signal
from forebay.cli.common.cluster_options import Cluster
from forebay.cli.common.logs import announce
from forebay.cli.common.process_metrics import process_registry
from forebay.cli.common.shutdown import STOP_S, stop_notice
from forebay.cli.processes.listening import Hosts, listening
from forebay.events.topics import TOKENS
from forebay.ingress.errors import ApiError, Unusable
from forebay.ingress.explain_worker import LogSource
from forebay.ingress.explainer import Explainer
from forebay.ingress.http.app import build_app
from forebay.ingress.http.drain import IngressDrain
from forebay.ingress.http.endpoint import Endpoint
from forebay.ingress.http.protocol import ConnectionLimits, connections_allowed
from forebay.ingress.http.server import build_server, serve_until_drained
from forebay.ingress.http.status import SharedReader
from forebay.ingress.ingress import NO_OWNER, NO_PREFILL_WORKER, NO_WORKER, Ingress
from forebay.ingress.kafka_api.api import KafkaApi
from forebay.ingress.kafka_api.metrics import KafkaApiMetrics
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.settings import IngressSettings
from forebay.replay.status import GroupStatus, with_heartbeats
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import HeartbeatMetrics, RouterHeartbeats
from forebay.transport.kafka.topics import count_topics
from forebay.workers.runtime.lease_keeper import LeaseKeeper

POLL_S = 1.0  # seconds between two checks whether prompts must be computed by prefill workers


def serve(
    cluster: Cluster,
    endpoint: Endpoint,
    model: Path | None,
    settings: IngressSettings,
    drain_s: float,
    policies: tuple[str, ...],
) -> None:
    """Serve until SIGINT or SIGTERM. Raises Unusable if the options are invalid, and LogError if the log fails."""
    loaded = Model(model or DEFAULT_MODEL)
    source = LogSource(kafka=cluster.kafka, policies=policies)
    with listening(endpoint, settings) as (listener, hosts):
        run_service(_run(cluster, loaded, settings, listener, endpoint, drain_s, hosts, Explainer(source)))


class Readiness:
    """Whether an ingress can serve: its group has a partition, an owner and a ready worker that generates responses.

    The owner's heartbeats contain the number of ready workers per role, according to the events of `fleet` that the
    owner has applied. If prompts must be computed by prefill workers (`enforced`), a prefill worker must be ready, too.
    """

    def __init__(self, heartbeats: RouterHeartbeats, directory: Directory) -> None:
        self._heartbeats = heartbeats
        self._directory = directory
        self._is_enforced = False
        self.enforced: Callable[[], Awaitable[bool]] | None = None

    def __call__(self) -> bool:
        """Return whether the ingress can serve requests now."""
        return self._problem() is None

    def why_not(self) -> str:
        """Return the reason why the ingress cannot serve requests."""
        return self._problem() or NO_WORKER

    def partition(self) -> int | None:
        """Return the control partition of the group; None until a router has assigned one."""
        return self._directory.partition_of(self._heartbeats.group)

    async def run(self) -> None:
        """Read the heartbeats of the group's owner until cancelled. Raises LogError if the log fails."""
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


async def _enforced(ingress: Ingress) -> bool:
    """Return whether requests are rejected while no prefill worker is ready."""
    model = ingress.settings.model_name
    pools = await ingress.pools.disaggregation_settings()
    return any(disagg.enforce and disagg.policy == "always" for _, served, disagg in pools if served == model)


def _hold_lease(keeper: LeaseKeeper, settings: IngressSettings) -> "asyncio.Future[None]":
    """Renew the Redis lease of the ingress. The future fails with Unusable if another ingress takes the lease over."""
    replaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def on_replaced(_: str) -> None:
        if not replaced.done():
            text = f"another ingress with the id {settings.ingress_id} runs; give each its own --ingress-id"
            replaced.set_exception(Unusable(text))

    keeper.hold(settings.model_name, settings.ingress_id, settings.incarnation, b"", on_replaced)
    return replaced


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


async def _run(
    cluster: Cluster,
    model: Model,
    settings: IngressSettings,
    listener: socket.socket,
    endpoint: Endpoint,
    drain_s: float,
    hosts: Hosts,
    explainer: Explainer,
) -> None:
    registry = process_registry()
    counts = await count_topics(cluster.kafka)
    slot = xxh3_64_intdigest(settings.ingress_id.encode()) % counts.replies
    settings = replace(settings, reply_slot=slot, incarnation=uuid.uuid4().hex)
    async with connected(cluster, registry) as log:
        directory = Directory(log)
        await directory.start()
        heartbeats = RouterHeartbeats(log, settings.model_name)
        registry.register(HeartbeatMetrics(heartbeats))
        ready = Readiness(heartbeats, directory)
        metrics = IngressMetrics(registry, settings.model_name)
        reply_from = await log.end(TOKENS.name, slot)
        ingress = Ingress(log, model, settings, metrics, ready, reply_from, ready.partition)
        ready.enforced = partial(_enforced, ingress)
        ingress.not_ready_reason = ready.why_not
        ingress.has_owner = lambda: heartbeats.has_owner
        ingress.owner_silent_s = lambda: heartbeats.owner_age_s or 0.0
        ingress.pools.allowed_policies = lambda: None if heartbeats.owner is None else heartbeats.owner.policies

        derived = SharedReader(lambda: explainer.status(settings.model_name, ingress.require_partition()))

        async def read_status() -> GroupStatus:
            return with_heartbeats(await derived.read(), heartbeats)

        address, port = listener.getsockname()[:2]
        url = f"{endpoint.scheme}://{address}:{port}/v1"
        text = f"forebay: ingress {settings.ingress_id} serves {settings.model_name} on {url}"
        limits = ConnectionLimits(ingress.metrics.reject, connections_allowed())
        app = build_app(ingress, registry, explainer, hosts, read_status)
        server = build_server(app, partial(announce, text), limits, endpoint.tls)

        drain = ingress.drain

        async def stop() -> None:
            announce(stop_notice(f"ingress {settings.ingress_id}", drain.in_flight, drain_s))
            drain.begin()

        api = KafkaApi(log, ingress, KafkaApiMetrics(registry), counts.replies)
        serving = serve_until_drained(server, listener, drain, ingress.replies.interrupt_all, drain_s)
        keeper = LeaseKeeper(leases_at(cluster.redis_url, cluster.kafka.namespace, "ingress"))
        keeper.start()
        replaced = _hold_lease(keeper, settings)
        parts = replaced, serving, ingress.run(), _until_draining(api.run(), drain), ready.run(), directory.run()
        try:
            await until_signal(*parts, stop=stop, stop_s=drain_s + STOP_S)
        finally:
            await keeper.stop()
            await explainer.close()
