"""The process of `forebay worker`: a worker for an engine of the process, or for each of several running servers.

Theory of operation. Each server has its own worker, which joins the group of the server's model. If the server stops
responding, its worker leaves, so that its requests continue on other workers. The process then waits for the server and
attaches it again, but only if it still serves the same model. Each failure doubles the pause before the next attempt,
because a failed start of a worker is an event on the log.
"""

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.events.control import Role
from forebay.events.fleet import WorkerSpec
from forebay.ingress.model import Model, model_name_of
from forebay.ingress.model_cards import read_card
from forebay.processes.card_keeper import keep_card
from forebay.processes.engines import EngineChoice, built, tokenizer_probes
from forebay.processes.metrics_server import Probe, process_registry
from forebay.processes.model_source import HUB_NAME, find_model
from forebay.processes.names import adapters, incarnation, named
from forebay.processes.notices import announce, complain
from forebay.processes.service import Cluster, connected, leases_at, until_signal
from forebay.processes.shutdown import stop_notice
from forebay.runtime.errors import ConfigError, cause_of, prefixed
from forebay.transport.base import LeaseError, Log
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.kafka.topics import count_topics, create_topics, plan_of
from forebay.transport.models import stored_card
from forebay.workers.engine import Engine, EngineError
from forebay.workers.engines.attached.engine import AttachedEngine, AttachedSettings
from forebay.workers.engines.attached.server import ServerInfo, UpstreamServer
from forebay.workers.engines.settings import EngineSettings, pool_of
from forebay.workers.kv_events.zmq_feed import KvSource
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.metrics import Probes, WorkerMetrics
from forebay.workers.runtime.worker import ENGINE_STOP_S, Worker, WorkerReplaced

logger = logging.getLogger(__name__)

RETRY_S = 2.0  # pause before a server that does not respond is tried again; doubles with each failure
RETRY_S_MAX = 30.0  # a server that needs minutes to load its model is not idle for much longer than necessary
ENGINE = "attached"


@dataclass(frozen=True, slots=True)
class Upstream:
    """Addresses of a server: of its HTTP API, and of ZMQ for KV events and their replays, empty if it has none."""

    url: str
    kv_events: str = ""
    kv_replay: str = ""

    @property
    def name(self) -> str:
        """Default worker id: host and port."""
        return f"{urlsplit(self.url).hostname}-{self._port}"

    @property
    def endpoint(self) -> str:
        """IP address and port, because gateways resolve no names. Raises OSError if the host has no address."""
        address = socket.getaddrinfo(urlsplit(self.url).hostname, self._port, type=socket.SOCK_STREAM)[0][4][0]
        return f"[{address}]:{self._port}" if ":" in str(address) else f"{address}:{self._port}"

    @property
    def _port(self) -> int:
        parts = urlsplit(self.url)
        return parts.port or (443 if parts.scheme == "https" else 80)


@dataclass(frozen=True, slots=True, kw_only=True)
class UpstreamSettings:
    """Servers that already run, each of which gets a worker, and the settings that they share.

    Attributes:
        model: directory or name on the Hub of the tokenizer; None for the model that the server names.
        model_name: name of the model in the API; empty for the name of the server.
        options: further fields of `EngineSettings` by name. Sizes are used if the server does not publish them.
        api_key: empty if the servers need none.
        allow_shared_cache: whether servers that cannot separate their cache get requests with a cache namespace.
    """

    servers: tuple[Upstream, ...]
    model: str | None = None
    revision: str | None = None
    model_name: str = ""
    role: Role = "aggregated"
    options: Mapping[str, Any] = field(default_factory=dict)
    api_key: str = ""
    allow_shared_cache: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of a process with one worker for its engine, or one per server that already runs.

    Attributes:
        worker_id: id of the worker, or the beginning of the ids of several workers; empty for the names of the servers.
        engine: engine of the process, or the servers.
        pool: empty for the default of the role.
    """

    cluster: Cluster
    worker_id: str
    engine: EngineChoice | UpstreamSettings
    pool: str = ""
    taints: tuple[str, ...] = ()
    kv_events: bool = True
    lease_ttl_s: float = 3.0
    drain_s: float = 30.0


@dataclass(slots=True)
class Attachment:
    """A server that already runs, or an engine of this process, and its worker.

    Attributes:
        upstream: the server; None for an engine of this process.
        own: engine of this process, the spec of its worker, and the directory of its model; None for a server.
        model: name of the model that the server served first; empty before it was reached.
        root: directory or name of its weights on the server; empty if the server does not publish it.
        worker: None while the server is not attached.
    """

    upstream: Upstream | None
    worker_id: str
    own: tuple[Engine, WorkerSpec, Path] | None = None
    model: str = ""
    root: str = ""
    worker: Worker | None = None
    probes: Probes = field(default_factory=Probes)


def attachments(upstreams: Sequence[Upstream], worker_id: str) -> list[Attachment]:
    """Return the attachments of the servers. With several servers, their number is added to a given worker id."""
    names = [one.name for one in upstreams]
    for upstream in upstreams:
        if names.count(upstream.name) > 1:
            raise ConfigError(f"--upstream {upstream.url}: the server appears twice")
    ids = [f"{worker_id}-{at}" if len(upstreams) > 1 else worker_id for at in range(len(upstreams))]
    return [
        Attachment(upstream, named("--id", "worker", given if worker_id else upstream.name))
        for upstream, given in zip(upstreams, ids, strict=True)
    ]


async def run(settings: WorkerSettings) -> None:
    """Start the engine of this process or attach the servers, and serve until SIGINT or SIGTERM.

    Raises EngineError if the engine of this process failed, and ConfigError if a server's model has no tokenizer or
    another one, or an option contradicts what the server serves.
    """
    cluster, engine = settings.cluster, settings.engine
    if isinstance(engine, UpstreamSettings):
        attached = attachments(engine.servers, settings.worker_id)
    else:
        own, spec = built(
            engine, settings.worker_id, pool=settings.pool, taints=settings.taints, kv_events=settings.kv_events
        )
        attached = [Attachment(None, spec.worker_id, (own, spec, engine.settings.model))]
    registry = process_registry()
    probes = {path: _combined(attached, path) for path in ("/ready", "/live")}
    async with connected(cluster, registry, probes) as (log, _):
        keeper = LeaseKeeper(leases_at(cluster.redis_url, cluster.kafka.namespace), ttl_s=settings.lease_ttl_s)
        keeper.start()
        fleet = AttachedWorkers(settings, log, keeper, attached, registry)
        try:
            await until_signal(fleet.run(), stop=fleet.stop, stop_s=settings.drain_s + ENGINE_STOP_S)
        finally:
            await keeper.stop()


def _combined(attached: list[Attachment], path: str) -> Probe:
    """Return a probe that succeeds if those of all workers do."""

    def probe() -> tuple[bool, str]:
        results = {one.worker_id: one.probes.ready() if path == "/ready" else one.probes.live() for one in attached}
        if len(results) == 1:
            return next(iter(results.values()))
        return all(ok for ok, _ in results.values()), ", ".join(f"{name} {text}" for name, (_, text) in results.items())

    return probe


class AttachedWorkers:
    """The workers of the process, one per server or one for its engine."""

    def __init__(
        self,
        settings: WorkerSettings,
        log: Log,
        keeper: LeaseKeeper,
        attached: list[Attachment],
        registry: CollectorRegistry,
    ) -> None:
        self._cluster = settings.cluster
        self._log = log
        self._keeper = keeper
        self._attached = attached
        self._settings = settings
        self._registry = registry
        self._metrics: WorkerMetrics | None = None
        self._drain_s = settings.drain_s
        self._keeping: dict[str, asyncio.Task[None]] = {}
        self._stopping = False

    async def run(self) -> None:
        """Attach all servers, until all workers have stopped. Raises the first error of a worker."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for one in self._attached:
                    part = self.attach(one) if one.own is not None else self._keep(one)
                    self._keeping[one.worker_id] = tasks.create_task(part, name=one.worker_id)
        except BaseExceptionGroup as group:
            cause = cause_of(group)
            raise (EngineError(str(cause)) if isinstance(cause, WorkerReplaced) else cause) from None

    async def stop(self) -> None:
        """Drain the workers, and end the waits for servers."""
        self._stopping = True
        for one in self._attached:
            if one.worker is not None:
                announce(stop_notice(f"worker {one.worker_id}", len(one.worker.active_requests), self._drain_s))
                one.worker.drain(self._drain_s)
            elif (keeping := self._keeping.get(one.worker_id)) is not None:
                keeping.cancel()  # it waits for the server or for a router

    async def _keep(self, one: Attachment) -> None:
        """Attach a server, and attach it again after it was lost, until the process stops."""
        warned, pause_s = "", RETRY_S
        while not self._stopping:
            began_s = runtime.monotonic_s()
            try:
                await self.attach(one)
            except EngineError as error:
                problem = str(error)
            except BaseExceptionGroup as group:
                lost, others = group.split(EngineError)
                if lost is None or others is not None:
                    raise
                problem = str(cause_of(lost))
            except ConfigError as error:
                if not one.model:
                    raise
                problem = str(error)
            else:
                return
            if problem != warned:
                logger.warning("worker %s waits for its server, and retries: %s", one.worker_id, problem)
            warned = problem
            if not self._stopping:
                if runtime.monotonic_s() - began_s > RETRY_S_MAX:  # the worker has served, so this is another failure
                    pause_s = RETRY_S
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, RETRY_S_MAX)

    async def attach(self, one: Attachment) -> None:
        """Start a worker for a server or an engine, and run it until it is drained.

        Raises EngineError if the engine failed, or the server does not respond or serves another model than before, and
        ConfigError if its model has no tokenizer.
        """
        engine, spec, folder = await self._connected(one) if one.own is None else one.own
        card = await runtime.offload(read_card, folder)
        if card is not None:
            spec = msgspec.structs.replace(spec, card=await stored_card(self._log, spec.model, *card))
        source = "" if one.upstream is None else f", for {one.upstream.url}"
        announce(f"worker {spec.worker_id} requests to join {spec.model}, pool {spec.pool}{source}")
        joining = asyncio.create_task(join_group(self._cluster, self._log, spec, one.probes))
        beside: list[asyncio.Task[Any]] = [joining]
        beside.append(asyncio.create_task(report_waits(self._log, one.probes, spec, joining)))
        try:
            partition = await joining
            token = incarnation()
            worker = one.worker = one.probes.worker = Worker(
                self._log,
                self._keeper,
                spec,
                engine,
                token=token,
                group=spec.model,
                partition=partition,
                drain_s=self._drain_s,
            )
            if not isinstance(self._settings.engine, UpstreamSettings):
                worker.commands.adapters = self._settings.engine.adapters
            self._register()
            if card is not None:
                keeping = keep_card(self._log, spec.model, spec.card, folder, lambda: worker.worker_epoch is not None)
                beside.append(asyncio.create_task(keeping))
            await worker.run()
        finally:
            for task in beside:
                task.cancel()
            one.worker = one.probes.worker = None  # while it waits for its server, the process is alive

    async def _connected(self, one: Attachment) -> tuple[Engine, WorkerSpec, Path]:
        """Return the engine of a server, the spec of its worker, and the directory of its model's tokenizer."""
        assert one.upstream is not None
        servers = self._settings.engine
        assert isinstance(servers, UpstreamSettings)
        info = await described(one.upstream, servers)
        if one.model and (info.model, info.root) != (one.model, one.root):
            raise EngineError(
                f"the server {one.upstream.url} serves {info.model} now (root {info.root!r}), but worker"
                f" {one.worker_id} joined with {one.model} (root {one.root!r}); restart the worker to"
                " serve the new model"
            )
        engine, spec, directory = await runtime.offload(engine_of, one, info, self._settings)
        await engine.check_tokenizer()
        one.model, one.root = info.model, info.root
        return engine, spec, directory

    def _register(self) -> None:
        """Export the metrics of the current workers."""
        if self._metrics is not None:
            self._registry.unregister(self._metrics)
        self._metrics = WorkerMetrics(*(one.worker for one in self._attached if one.worker is not None))
        self._registry.register(self._metrics)


async def described(upstream: Upstream, settings: UpstreamSettings) -> ServerInfo:
    """Return what a server publishes. Raises EngineError if it does not respond, or serves no such model."""
    server = UpstreamServer(upstream.url, settings.api_key)
    try:
        return await server.describe(settings.model_name)
    finally:
        await server.close()


def engine_of(one: Attachment, info: ServerInfo, settings: WorkerSettings) -> tuple[AttachedEngine, WorkerSpec, Path]:
    servers = settings.engine
    assert one.upstream is not None
    assert isinstance(servers, UpstreamSettings)
    url, role = one.upstream.url, servers.role
    directory = _tokenizer_of(info, servers, url)
    try:
        endpoint = one.upstream.endpoint
    except OSError as error:
        raise EngineError(f"the host of the server {url} has no address: {error}") from error
    name = model_name_of(None, servers.model_name or _api_name(info.model))
    model = Model(directory)
    probes = tokenizer_probes(model)
    source = None
    if one.upstream.kv_events:
        source = KvSource(one.upstream.kv_events, one.upstream.kv_replay or None)
    engine = AttachedEngine(
        EngineSettings(model=directory, model_name=name, role=role, tokenizer_probes=probes, **servers.options),
        AttachedSettings(
            url=url,
            info=info,
            encode=model.encode,
            decode=lambda ids: model.tokenizer.decode(ids, skip_special_tokens=False),
            context_tokens=model.context_tokens,
            api_key=servers.api_key,
            kv_events=source,
            allow_shared_cache=servers.allow_shared_cache,
        ),
    )
    spec = WorkerSpec(
        worker_id=one.worker_id,
        model=name,
        pool=settings.pool or pool_of(role),
        engine=info.kind if info.kind != "openai" else ENGINE,
        block_size=1,  # the engine reports the sizes after its start
        kv_blocks_total=1,
        max_num_seqs=1,
        max_num_batched_tokens=1,
        taints=settings.taints,
        loras=adapters(tuple(info.loras), name),
        kv_events=source is not None,
        role=role,
        endpoint=endpoint,
    )
    return engine, spec, directory


def _api_name(served: str) -> str:
    """Return the default name of a model. A server started with a directory serves the model under its path."""
    return Path(served).name if served.startswith("/") else served


def _tokenizer_of(info: ServerInfo, servers: UpstreamSettings, url: str) -> Path:
    """Return the directory with the tokenizer of a server's model."""
    if servers.model is not None:
        found = find_model(servers.model, servers.revision, servers.model_name, weights=False).directory
        assert found is not None
        return found
    for named_by_server in (info.root, info.model):
        if named_by_server and (os.path.isdir(named_by_server) or HUB_NAME.fullmatch(named_by_server)):  # noqa: PTH112
            with prefixed(f"the tokenizer of {url} was not found; set --model"):
                found = find_model(named_by_server, None, "", weights=False).directory
            assert found is not None
            return found
    raise ConfigError(
        f"the server {url} serves {info.model}, but names no directory or Hugging Face model of this machine"
        f" ({info.root or 'no root'}): set --model to a directory with its tokenizer.json"
    )


ANNOUNCEMENT_TTL_MS = 6_000
CHECK_S = 2.0
CHECKS = 5  # per line: a takeover takes six seconds, and an owner reads the leases twice per second


async def join_group(cluster: Cluster, log: Log, spec: WorkerSpec, probes: Probes) -> int:
    """Create a missing work topic, and return the partition of the group once a router has assigned it."""
    counts = await count_topics(cluster.kafka)
    if spec.pool not in counts.pools:
        await create_topics(cluster.kafka, await plan_of(cluster.kafka), [spec.pool])
    leases, is_first_error = leases_at(cluster.redis_url, cluster.kafka.namespace), True
    directory = Directory(log)
    await directory.start()
    try:
        while (partition := directory.partition_of(spec.model)) is None:
            probes.refusal = directory.groups.refusal(spec.model, counts.groups)
            try:
                await runtime.offload(leases.announce, spec.model, ANNOUNCEMENT_TTL_MS)
            except LeaseError as error:
                if is_first_error:
                    logger.warning("cannot announce the group %s, will retry: %s", spec.model, error)
                is_first_error = False
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCEMENT_TTL_MS / 3000):
                    await directory.placed(spec.model)
        with contextlib.suppress(LeaseError):
            for lease in await runtime.offload(leases.poll, spec.model):
                if lease.worker_id == spec.worker_id and lease.expires_in_ms > 0 and not lease.released:
                    text = f"worker {spec.worker_id} takes over the lease of incarnation {lease.token}"
                    complain(f"{text}; if that process runs, give each worker its own --id")
        return partition
    finally:
        probes.refusal = None
        directory.close()


async def report_waits(
    log: Log, probes: Probes, spec: WorkerSpec, placed: "asyncio.Future[int]", *, check_s: float = CHECK_S
) -> None:
    """Say what the worker waits for while no owner has admitted it, every `CHECKS` checks, and show it in the probe.

    A rejection is reported at once. `placed` is the control partition of the group.
    """
    beats = RouterHeartbeats(log, spec.model)
    following, checks, rejection = None, 0, ""
    try:
        while True:
            await asyncio.sleep(check_s)
            probes.waits_for = ""
            if probes.worker is not None and probes.worker.life.state is not State.REGISTERED:
                checks, rejection = 0, ""
                continue
            if placed.done() and following is None:
                following = asyncio.create_task(beats.follow(placed.result()))
                continue  # the first heartbeats arrive until the next check
            checks += 1
            rejected = () if beats.owner is None else beats.owner.rejected
            reason = next((one.reason for one in rejected if one.worker_id == spec.worker_id), "")
            probes.waits_for = why = probes.refusal or _wait(beats, reason, is_placed=placed.done())
            if reason != rejection or checks % CHECKS == 0:
                complain(f"worker {spec.worker_id} waits, and keeps trying: {why}")
            rejection = reason
    finally:
        if following is not None:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)


def _wait(beats: RouterHeartbeats, rejection: str, *, is_placed: bool) -> str:
    """Return what a worker waits for."""
    if not is_placed:
        return "no router has placed its model; start `forebay router` with the same --namespace and --redis"
    if beats.owner is None or not beats.has_owner:
        return "no router owns its model; start `forebay router`, or read the logs of the routers"
    if rejection:
        return f"the router {beats.owner.router_id} rejected it: {rejection}"
    return f"the router {beats.owner.router_id} has not admitted it; check that both use the same --redis"
