"""One model of `forebay up`: its engines, its workers, and the owner of its group."""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.console.settings import ConsoleSettings
from forebay.core.routing.policies import CustomPolicies
from forebay.core.state.fleet import WorkerPhase
from forebay.events.base import unpack_u64
from forebay.events.control import DisaggConfig, PoolConfigured, Role, RouterConfig
from forebay.events.fleet import WorkerSpec
from forebay.events.models import ModelCard
from forebay.events.pools import PoolRouting
from forebay.events.snapshots import IndexBlocks
from forebay.ingress.group import NO_PREFILL_WORKER, NO_WORKER
from forebay.ingress.http.endpoint import Endpoint
from forebay.ingress.model_cards import read_card
from forebay.ingress.settings import IngressSettings
from forebay.live.owner.admission import SLOTS_MAX
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.owner.retention import RetentionLimits
from forebay.live.owner.start_check import CheckedLog
from forebay.live.spans import SpanSettings
from forebay.live.standby import Standby
from forebay.processes.engines import EngineChoice, built, with_own_disk
from forebay.replay.status import GroupStatus, missing_worker, owner_status
from forebay.runtime.errors import ConfigError, cause_of
from forebay.transport.base import Leases, LogSync
from forebay.transport.models import FILE_BYTES_MAX, stored_card
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engine import Engine, EngineError
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.worker import Worker

logger = logging.getLogger(__name__)

PAUSE_S = 1.0  # before a failed engine is started again for the first time
PAUSE_S_MAX = 60.0
FAILURES_MAX = 5  # in a row of every engine, in at least 15 s, before the system ends
HEALTHY_S = 60.0  # an engine that fails after less time has probably the same problem again

Caches = dict[tuple[str, int], list[int]]


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    role: Role
    pool: str


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """One model of `forebay up`, which has a group of its own.

    Attributes:
        engine: engine of every worker of the model. The ingress serves the model and the adapters of this engine.
        places: by worker id, which is unique among all models.
        routing: rules for the choice of pools; None keeps those of the log.
    """

    engine: EngineChoice
    places: dict[str, WorkerPlace]
    routing: PoolRouting | None

    @property
    def name(self) -> str:
        return self.engine.settings.model_name


@dataclass(frozen=True, slots=True)
class EmbeddedSettings:
    """Settings of `forebay up`.

    Attributes:
        log: path of the log file; None keeps the log in memory.
        taints: taints (labels) of each worker by its id.
        ingress: settings without the block size, which the engines report.
        log_sync: whether an acknowledged append survives a power loss (`full`), or only the death of the process.
        console: settings of a console in another process; None for no console.
        console_module: module that runs the process of the console.
        spans: receiver of spans; None for no export.
    """

    log: Path | None
    models: tuple[EmbeddedModel, ...]
    router: RouterConfig
    policies: CustomPolicies
    taints: dict[str, tuple[str, ...]]
    kv_events: bool
    ingress: IngressSettings
    endpoint: Endpoint
    drain_s: float
    lease_ttl_s: float
    snapshot_every: int
    snapshot_age_s: int
    log_limits: RetentionLimits
    log_sync: LogSync = "normal"
    console: ConsoleSettings | None = None
    console_module: str = ""
    spans: SpanSettings | None = None


class EngineRestarts:
    """Decides when a failed engine of `forebay up` is started again, and when the system ends.

    An engine that fails before the system serves ends the system, because its settings are probably wrong. Later, it is
    started again after a pause, which doubles with each failure in a row. Once every engine has failed `FAILURES_MAX`
    times in a row, and none serves, the system ends.
    """

    def __init__(self) -> None:
        self.failures: dict[str, int] = {}
        self.is_serving = False
        self._in_a_row: dict[str, int] = {}

    def add(self, worker_id: str) -> None:
        self.failures[worker_id] = self._in_a_row[worker_id] = 0

    def remove(self, worker_id: str) -> None:
        del self._in_a_row[worker_id]

    def pause_s(self, worker_id: str, healthy_s: float, serving: int, error: EngineError) -> float:
        """Count a failure, and return the pause before the engine is restarted. Raises `error` if the system ends."""
        self.failures[worker_id] += 1
        row = self._in_a_row[worker_id] = 1 if healthy_s >= HEALTHY_S else self._in_a_row[worker_id] + 1
        if not self.is_serving:
            raise error
        if not serving and min(self._in_a_row.values()) >= FAILURES_MAX:
            raise EngineError(f"every engine has failed {FAILURES_MAX} times in a row: {error}")
        return min(PAUSE_S_MAX, PAUSE_S * 2.0 ** min(row - 1, 30))


class EmbeddedGroup:
    """Workers and owner of one model of `forebay up`.

    With `has_card`, its model card is stored on the log. Raises ConfigError if the model directory has none.
    """

    owner: Owner
    partition: int

    def __init__(
        self, settings: EmbeddedSettings, model: EmbeddedModel, restarts: EngineRestarts, *, has_card: bool
    ) -> None:
        self.name = model.name
        self.workers: list[Worker] = []
        self._settings = settings
        self._model = model
        self._restarts = restarts
        self._engines = [self._built(name) for name in model.places]
        self._card = _card_of(model) if has_card else None
        self._partitions = 1
        self._standby: Standby | None = None
        self._leases: Leases | None = None
        self._keeper: LeaseKeeper | None = None
        self._log: SqliteLog | None = None
        self._card_digest: str | None = None
        self._caches: Caches = {}

    async def store_card(self, log: SqliteLog) -> None:
        """Store the model card, if the group has one. Raises LogError if the log fails."""
        if self._card is not None:
            self._card_digest = await stored_card(log, self.name, *self._card)

    def create(self, opened: CheckedLog, leases: Leases, keeper: LeaseKeeper) -> None:
        """Create the workers, which `run_worker` runs."""
        self.partition, self._standby = opened.groups[self.name]
        self._log, self._leases, self._keeper, self._partitions = opened.log, leases, keeper, opened.partitions
        self.workers = [self._worker(engine, spec) for engine, spec in self._engines]
        for worker in self.workers:
            self._restarts.add(worker.spec.worker_id)

    async def run_worker(self, place: int, serving: Callable[[], int]) -> None:
        """Run a worker until it is drained. If its engine fails, replace the worker by one with a new engine.

        `serving` returns the number of workers of the system that serve. Raises EngineError if the engine failed and
        the system ends, and BaseExceptionGroup with any other error of the worker.
        """
        while True:
            worker = self.workers[place]
            name = worker.spec.worker_id
            try:
                await worker.run()
                self._restarts.remove(name)
                return
            except (EngineError, BaseExceptionGroup) as error:
                failure = cause_of(error)
                if (task := asyncio.current_task()) is not None and task.cancelling():
                    raise asyncio.CancelledError from error  # the system ends
                if not isinstance(failure, EngineError):
                    raise
                if worker.is_draining:
                    logger.warning("the engine of worker %s failed during its drain: %s", name, failure)
                    self._restarts.remove(name)
                    return
                pause_s = self._restarts.pause_s(name, worker.health.healthy_s, serving(), failure)
                logger.error(  # noqa: TRY400 - the message contains the cause
                    "the engine of worker %s failed; it is started again in %g s: %s", name, pause_s, failure
                )
            await asyncio.sleep(pause_s)
            self.workers[place] = self._worker(*self._built(name))

    def _built(self, name: str) -> tuple[Engine, WorkerSpec]:
        settings, place = self._settings, self._model.places[name]
        choice = with_own_disk(self._model.engine.with_settings(role=place.role), name)
        return built(choice, name, pool=place.pool, taints=settings.taints[name], kv_events=settings.kv_events)

    def _worker(self, engine: Engine, spec: WorkerSpec) -> Worker:
        assert self._log is not None
        assert self._keeper is not None
        if self._card_digest is not None:
            spec = msgspec.structs.replace(spec, card=self._card_digest)
        token = runtime.random_id()
        worker = Worker(self._log, self._keeper, spec, engine, token=token, group=self.name, partition=self.partition)
        worker.commands.adapters = self._model.engine.adapters
        return worker

    async def start_owner(self, registry: CollectorRegistry) -> None:
        """Recover the state of the group, and restore the caches of mock engines. All engines must have started."""
        assert self._log is not None
        assert self._leases is not None
        self.owner = Owner(self._log, self._leases, self._group_settings())
        registry.register(OwnerMetrics(self.owner, self.name))
        await self.owner.start(self._standby)
        self._caches = _warmed(self.owner, self._engines)

    def is_admitted(self) -> bool:
        """Return whether every worker of this process is ready, and its restored cache is in the index."""
        return all(_admitted(self.owner, worker, self._caches) for worker in self.workers)

    def why_not_ready(self) -> str | None:
        """Return the reason why no request of the model can be served now; None if requests can be served."""
        missing = missing_worker(self.owner.world, self.name)
        if missing is None:
            return None
        return NO_WORKER if missing == "worker" else NO_PREFILL_WORKER

    def disagg(self) -> DisaggConfig:
        world, configured = self.owner.world, self._settings.router.disagg
        pool = world.pool_of(self.name)
        return configured if pool is None else world.settings.disagg.get(pool.pool, configured)

    async def status(self) -> GroupStatus:
        """Return the status of the group. Raises LogError if the log cannot be read."""
        assert self._log is not None
        return await owner_status(self._log, self.partition, self.name, self.owner.world)

    @property
    def block_size(self) -> int:
        """Block size of all workers. Raises ConfigError if the workers have different block sizes."""
        sizes = sorted({worker.spec.block_size for worker in self.workers})
        if len(sizes) > 1:
            found = " and ".join(map(str, sizes))
            raise ConfigError(
                f"the workers have KV blocks of {found} tokens, but all pools of a model need the same"
                " block size; give one --block-size"
            )
        return sizes[0]

    def _group_settings(self) -> GroupSettings:
        settings, block_size = self._settings, self.block_size
        return GroupSettings(
            group=self.name,
            partition=self.partition,
            owner_id=f"embedded-{os.getpid()}",
            pools=tuple(
                PoolConfigured(
                    pool=place.pool, model=self.name, block_size=block_size, router=settings.router, role=place.role
                )
                for place in dict.fromkeys(self._model.places.values())
            ),
            routing=self._model.routing,
            policies=settings.policies,
            slots_max=SLOTS_MAX * self._partitions,
            groups=self._partitions,
            snapshot_every=settings.snapshot_every,
            snapshot_age_s=settings.snapshot_age_s,
            poll_s=min(0.5, settings.lease_ttl_s / 6),
            has_readers=settings.spans is not None,
        )


def _card_of(model: EmbeddedModel) -> tuple[ModelCard, dict[str, bytes]]:
    """Return the model card and its files. Raises ConfigError if the model directory has none."""
    directory = model.engine.settings.model
    found = read_card(directory, model.engine.context_tokens)
    if found is None:
        raise ConfigError(
            f"--model {directory}: expected a tokenizer.json, and files of at most {FILE_BYTES_MAX >> 20} MiB"
            " together, because `forebay up` serves several models"
        )
    return found


def _warmed(owner: Owner, engines: Sequence[tuple[Engine, WorkerSpec]]) -> Caches:
    """Restore the caches of mock engines from the log, and return their blocks by worker and rank.

    The log has all of a mock engine's cache, which holds no bytes. Restoring it imitates engines that survive a restart
    of the router.
    """
    caches: Caches = {}
    mocks = {spec.worker_id: engine for engine, spec in engines if isinstance(engine, MockEngine)}
    for chunk in owner.world.index.snapshot():
        if isinstance(chunk, IndexBlocks) and chunk.tier == "device" and chunk.worker_id in mocks:
            caches.setdefault((chunk.worker_id, chunk.rank), []).extend(unpack_u64(chunk.sequence_hashes))
    for engine, spec in engines:
        if isinstance(engine, MockEngine):
            for rank in spec.ranks:
                engine.warm(caches.get((spec.worker_id, rank), ()), rank)
    return caches


def _admitted(owner: Owner, worker: Worker, caches: Caches) -> bool:
    """Return whether this process's incarnation of a worker is ready and its restored cache is in the index."""
    spec = worker.spec
    member = owner.world.fleet.get(spec.worker_id)
    if member is None or member.worker_epoch != worker.worker_epoch or member.phase is not WorkerPhase.READY:
        return False
    return not spec.kv_events or all(
        owner.world.index.blocks_held(spec.worker_id, rank, "device")
        >= min(len(caches.get((spec.worker_id, rank), ())), spec.kv_blocks_total)
        for rank in spec.ranks
    )
