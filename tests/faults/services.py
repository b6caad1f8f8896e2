"""Main coroutines of the simulated processes: the real services, connected to the simulated log and leases."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.engine_model.model import EngineConfig
from forebay.events.control import RouterConfig
from forebay.events.fleet import WorkerSpec
from forebay.events.topics import TOKENS
from forebay.ingress.front import Front
from forebay.ingress.group import GroupClient
from forebay.ingress.kafka_api.api import KafkaApi
from forebay.ingress.kafka_api.shared import KafkaApiMetrics
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.served_models import ServedModels
from forebay.ingress.settings import IngressSettings
from forebay.live.router.router import Router, RouterSettings
from forebay.picker.servers import Fallback
from forebay.transport.base import LeaseError, Leases, Log, LogError
from forebay.transport.directory import Directory
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.models import ModelStore
from forebay.workers.engines.mock.engine import MockEngine, MockLoras
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.worker import Worker
from tests.faults.process import Process

GROUP = "model"
PARTITION = 0  # control partition of the group
BLOCK = 4
VOCABULARY = tuple(range(100, 612))
LEASE_TTL_S = 3.0
ANNOUNCED_MS = 3_000
API_REPLY_SLOTS = 4  # partitions of `tokens` over which the Kafka API distributes responses
DRAIN_S = 3.0


@dataclass(frozen=True, slots=True)
class Connections:
    """What a simulated process uses to reach the others.

    Attributes:
        log_failed: set once the log has failed; the process then ends.
    """

    log: Log
    leases: Leases
    ingress_leases: Leases
    log_failed: "asyncio.Future[LogError]"


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes that differ from seed to seed.

    Attributes:
        kv_blocks: KV blocks of each worker. Few blocks cause eviction and preemption.
    """

    kv_blocks: int
    max_num_seqs: int
    speedup: float
    snapshot_every: int
    router: RouterConfig


class RouterService:
    def __init__(self, sizes: Sizes) -> None:
        self.router: Router | None = None
        self._sizes = sizes
        self._stopping = False

    async def run(self, process: Process, to: Connections) -> None:
        """Run the router until it is stopped or its log fails."""
        directory = Directory(to.log)
        await directory.start()
        settings = RouterSettings(
            router_id=process.name,
            partitions=1,
            slots_max=16,
            config=self._sizes.router,
            snapshot_every=self._sizes.snapshot_every,
            snapshot_age_s=20.0,
        )
        self.router = Router(
            to.log, to.leases, directory, settings, CollectorRegistry(), ingress_leases=to.ingress_leases
        )
        if self._stopping:
            await self.router.stop()
        await self.router.run()

    async def stop(self) -> None:
        """Stop in order, as after SIGTERM."""
        self._stopping = True
        if self.router is not None:
            await self.router.stop()


class WorkerService:
    """A worker process with a mock engine."""

    def __init__(self, sizes: Sizes) -> None:
        self.worker: Worker | None = None
        self._config = EngineConfig(
            block_size=BLOCK,
            kv_blocks_total=sizes.kv_blocks,
            max_num_seqs=sizes.max_num_seqs,
            max_num_batched_tokens=256,
            vocabulary=VOCABULARY,
        )
        self.engine = MockEngine(self._config, speedup=sizes.speedup, loras=MockLoras(slots=2, load_s=0.3))
        self._stopping = False

    async def run(self, process: Process, to: Connections) -> None:
        """Run the worker until it has drained or its log fails."""
        config = self._config
        spec = WorkerSpec(
            worker_id=process.name,
            model=GROUP,
            block_size=config.block_size,
            kv_blocks_total=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            endpoint=endpoint_of(process.name),
        )
        partition = await _partition_of(to)
        async with _keeper(to.leases) as keeper:
            token = runtime.random_id()
            self.worker = Worker(
                to.log, keeper, spec, self.engine, token=token, group=GROUP, partition=partition, drain_s=DRAIN_S
            )
            if not self._stopping:
                await self.worker.run()

    async def stop(self) -> None:
        """Drain and stop, as after SIGTERM."""
        self._stopping = True
        if self.worker is not None:
            self.worker.drain(DRAIN_S)


class IngressService:
    """An ingress process without HTTP, which is a picker without gRPC, too.

    Clients call `GroupClient.submit`, or use an `Exchange` with `fallback`.
    """

    def __init__(self, model: Model, slot: int, timeout_s: float) -> None:
        self.group: GroupClient | None = None
        self.fallback: Fallback | None = None
        self._model = model
        self._slot = slot
        self._timeout_s = timeout_s
        self._stopped = asyncio.Event()

    async def run(self, process: Process, to: Connections) -> None:
        """Run the ingress until it is stopped or its log fails."""
        settings = IngressSettings(
            model_name=GROUP,
            ingress_id=process.name,
            block_size=BLOCK,
            reply_slot=self._slot,
            timeout_s=self._timeout_s,
        )
        settings = replace(settings, incarnation=runtime.random_id())
        directory = Directory(to.log)
        await directory.start()
        reply_from = await to.log.end(TOKENS.name, self._slot)
        front = Front(to.log, settings, IngressMetrics(CollectorRegistry(), GROUP), reply_from, self._model)
        models = ServedModels(front, directory, ModelStore(to.log), Path(), lambda _: None, model=self._model)
        async with _keeper(to.ingress_leases) as keeper:
            keeper.hold(GROUP, settings.ingress_id, settings.incarnation, b"", lambda _: self._stopped.set())
            self.fallback = Fallback(models, to.leases, "503", CollectorRegistry())
            self.group = models.group(GROUP)
            async with asyncio.TaskGroup() as tasks:
                parts = [front.run(), models.run(), directory.run()]
                running = [tasks.create_task(part) for part in parts]
                api = tasks.create_task(_serve_kafka(to.log, models))
                await self._stopped.wait()
                api.cancel()
                await asyncio.wait((api,))
                front.slot.interrupt_all("the server is stopping")
                await asyncio.sleep(0.1)
                for task in running:
                    task.cancel()

    async def stop(self) -> None:
        """Interrupt the requests in flight and stop, as after a second SIGTERM."""
        self._stopped.set()


def endpoint_of(name: str) -> str:
    """Return the server of a worker, to which gateways send requests."""
    return f"{name}:8000"


async def _serve_kafka(log: Log, models: ServedModels) -> None:
    if isinstance(log, KafkaLog):
        await KafkaApi(log, models, KafkaApiMetrics(CollectorRegistry()), API_REPLY_SLOTS).run()


async def until_failed(work: "asyncio.Task[None]", log_failed: "asyncio.Future[LogError]") -> None:
    """Wait for a service to end. If its log fails, cancel the service, as `connected` of the commands does."""
    try:
        await asyncio.wait((work, log_failed), return_when=asyncio.FIRST_COMPLETED)
    finally:
        work.cancel()
        await asyncio.wait((work,))
    if not work.cancelled():
        work.result()


async def _partition_of(to: Connections) -> int:
    """Announce the group until a router has assigned a partition to it, and return the partition."""
    directory = Directory(to.log)
    await directory.start()
    try:
        while (partition := directory.partition_of(GROUP)) is None:
            with contextlib.suppress(LeaseError):
                await runtime.offload(to.leases.announce, GROUP, ANNOUNCED_MS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANNOUNCED_MS / 3000):
                    await directory.placed(GROUP)
    finally:
        directory.close()
    return partition


@contextlib.asynccontextmanager
async def _keeper(leases: Leases) -> AsyncIterator[LeaseKeeper]:
    keeper = LeaseKeeper(leases, ttl_s=LEASE_TTL_S)
    keeper.start()
    try:
        yield keeper
    finally:
        await keeper.stop()
