"""One model of `forebay up`: its engines, its workers, and the owner of its group."""

import os
import uuid
from collections.abc import Sequence

import msgspec
from prometheus_client import CollectorRegistry

from forebay.cli.processes.engines import built, playing, with_own_disk
from forebay.cli.processes.settings import EmbeddedModel, EmbeddedSettings
from forebay.core.state.fleet import WorkerPhase
from forebay.events.base import unpack_u64
from forebay.events.control import DisaggConfig, PoolConfigured
from forebay.events.fleet import WorkerSpec
from forebay.events.models import ModelCard
from forebay.events.snapshots import IndexBlocks
from forebay.ingress.errors import Unusable
from forebay.ingress.model_cards import read_card
from forebay.ingress.readiness import NO_PREFILL_WORKER, NO_WORKER
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.live.owner.start_check import CheckedLog
from forebay.live.router.standby import Standby
from forebay.replay.status import GroupStatus, missing_worker, owner_status
from forebay.transport.base import Leases
from forebay.transport.models import FILE_BYTES_MAX, stored_card
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engine import Engine
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime.lease_keeper import LeaseKeeper
from forebay.workers.runtime.worker import Worker

SLOTS_MAX = 1_024  # workers of a pool per group

Caches = dict[tuple[str, int], list[int]]


class EmbeddedGroup:
    """Workers and owner of one model of `forebay up`.

    Args:
        settings: settings of the system.
        model: the model.
        has_card: whether to store its model card on the log. Raises Unusable if the model directory has none.

    Attributes:
        name: name of the model and of its group.
        partition: control partition of the group.
        workers: the workers.
        owner: the owner.
    """

    owner: Owner
    partition: int

    def __init__(self, settings: EmbeddedSettings, model: EmbeddedModel, *, has_card: bool) -> None:
        self.name = model.name
        self.workers: list[Worker] = []
        self._settings = settings
        self._model = model
        self._engines: list[tuple[Engine, WorkerSpec]] = [
            built(
                with_own_disk(playing(model.engine, place.role), name),
                name,
                pool=place.pool,
                taints=settings.taints[name],
                kv_events=settings.kv_events,
            )
            for name, place in model.places.items()
        ]
        self._card = _card_of(model) if has_card else None
        self._partitions = 1
        self._standby: Standby | None = None
        self._leases: Leases | None = None
        self._log: SqliteLog | None = None
        self._caches: Caches = {}

    async def store_card(self, log: SqliteLog) -> None:
        """Store the model card, if the group has one. Raises LogError if the log fails."""
        if self._card is not None:
            digest = await stored_card(log, self.name, *self._card)
            self._engines = [(engine, msgspec.structs.replace(spec, card=digest)) for engine, spec in self._engines]

    def create(self, opened: CheckedLog, leases: Leases, keeper: LeaseKeeper) -> None:
        """Create the workers, which `Worker.run` starts."""
        self.partition, self._standby = opened.groups[self.name]
        self._log, self._leases, self._partitions = opened.log, leases, opened.partitions
        self.workers = [
            Worker(
                opened.log,
                keeper,
                spec,
                engine,
                token=uuid.uuid4().hex,
                group=self.name,
                partition=self.partition,
            )
            for engine, spec in self._engines
        ]

    async def start_owner(self, registry: CollectorRegistry) -> None:
        """Recover the state of the group, and restore the caches of mock engines. All engines must have started.

        Raises:
            Unusable: the workers have different block sizes.
            LogError: the log failed.
        """
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
        """Return the settings of the disaggregation in effect."""
        world, configured = self.owner.world, self._settings.router.disagg
        pool = world.pool_of(self.name)
        return configured if pool is None else world.disagg.get(pool.pool, configured)

    async def status(self) -> GroupStatus:
        """Return the status of the group. Raises LogError if the log cannot be read."""
        assert self._log is not None
        return await owner_status(self._log, self.partition, self.name, self.owner.world)

    @property
    def block_size(self) -> int:
        """Block size of all workers. Raises Unusable if the workers have different block sizes."""
        sizes = sorted({worker.spec.block_size for worker in self.workers})
        if len(sizes) > 1:
            found = " and ".join(map(str, sizes))
            raise Unusable(
                f"the workers have KV blocks of {found} tokens, but pools of a model share one size; use one"
                " --block-size"
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
            snapshot_every=settings.snapshots.snapshot_every,
            snapshot_age_s=settings.snapshots.snapshot_age_s,
            poll_s=min(0.5, settings.lease_ttl_s / 6),
        )


def _card_of(model: EmbeddedModel) -> tuple[ModelCard, dict[str, bytes]]:
    """Return the model card and its files. Raises Unusable if the model directory has none."""
    directory = model.engine.settings.model
    found = read_card(directory)
    if found is None:
        raise Unusable(
            f"--model {directory}: expected a tokenizer.json, and files of at most {FILE_BYTES_MAX >> 20} MiB"
            " together, because `forebay up` serves several models"
        )
    return found


def _warmed(owner: Owner, engines: Sequence[tuple[Engine, WorkerSpec]]) -> Caches:
    """Restore the caches of mock engines from the log, and return their blocks by worker and rank.

    A mock engine's cache holds no bytes, so the log has all of it. Restoring it imitates engine processes that survive
    a restart of the router.
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
