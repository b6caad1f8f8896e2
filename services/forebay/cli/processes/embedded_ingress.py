"""The ingress of `forebay up`: of one model from its directory, or of several models from their cards on the log."""

import asyncio
import tempfile
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

from prometheus_client import CollectorRegistry

from forebay.cli.processes.embedded_group import EmbeddedGroup
from forebay.cli.processes.settings import EmbeddedSettings
from forebay.cli.processes.tasks import Tasks
from forebay.events.heartbeats import RouterHeartbeat
from forebay.events.topics import FLEET, TOKENS
from forebay.ingress.catalog import Catalog
from forebay.ingress.errors import ApiError, Unusable
from forebay.ingress.front import Front
from forebay.ingress.group import NO_WORKER
from forebay.ingress.ingress import Ingress
from forebay.ingress.metrics import IngressMetrics
from forebay.ingress.model import Model
from forebay.ingress.served import OneModel, ServedModels
from forebay.live.router.heartbeats import owner_heartbeat
from forebay.transport.directory import Directory
from forebay.transport.models import ModelStore
from forebay.transport.sqlite.log import SqliteLog


class OwnerInProcess:
    """Owner of a group that is a task of this process, so it needs no heartbeats, and the process ends if it fails."""

    owner_age_s = 0.0
    has_owner = True

    def __init__(self, group: EmbeddedGroup) -> None:
        self.group = group.name
        self._owner = group.owner
        self._fleet_read = -1
        self._beat: RouterHeartbeat | None = None

    @property
    def owner(self) -> RouterHeartbeat:
        world = self._owner.world
        fleet_read = world.view.get(FLEET.name, 0)
        if self._beat is None or fleet_read != self._fleet_read:
            self._beat, self._fleet_read = owner_heartbeat(world, self.group, "embedded"), fleet_read
        return self._beat

    def standbys(self) -> Sequence[RouterHeartbeat]:
        """Return no standbys, because the process has none."""
        return ()

    async def follow(self, partition: int) -> None:
        """Wait until cancelled, because `owner` is always current."""
        del partition
        await asyncio.Event().wait()


@asynccontextmanager
async def serving_one(
    settings: EmbeddedSettings,
    log: SqliteLog,
    registry: CollectorRegistry,
    tasks: Tasks,
    group: EmbeddedGroup,
    model: Model,
) -> AsyncIterator[ServedModels]:
    """Yield the only model. Its tokenizer comes from the model directory."""
    configured = replace(settings.ingress, block_size=group.block_size)
    metrics = IngressMetrics(registry, group.name)
    reply_from = await log.end(TOKENS.name, configured.reply_slot)
    ready, partition = (lambda: group.why_not_ready() is None), group.partition
    ingress = Ingress(log, model, configured, metrics, ready, reply_from, lambda: partition)
    ingress.pools.allowed_policies = lambda: group.owner.world.owner_policies
    ingress.not_ready_reason = lambda: group.why_not_ready() or NO_WORKER
    layouts = (worker.spec.kv_layout for worker in group.workers)
    layout = next((layout for layout in layouts if layout is not None), None)
    if layout is not None:  # a worker with another layout is not admitted
        ingress.ready_details["kv_transport"] = layout.connector
    tasks.run(ingress.run(), "ingress")
    yield OneModel(ingress)


@asynccontextmanager
async def serving_all(
    settings: EmbeddedSettings,
    log: SqliteLog,
    registry: CollectorRegistry,
    tasks: Tasks,
    groups: Iterable[EmbeddedGroup],
) -> AsyncIterator[ServedModels]:
    """Yield all models, with tokenizers from the cards on the log. Raises Unusable if a model cannot be loaded."""
    directory, store = Directory(log), ModelStore(log)
    await directory.start()
    await store.start()
    metrics = IngressMetrics(registry, None)
    front = Front(log, settings.ingress, metrics, await log.end(TOKENS.name, settings.ingress.reply_slot))
    owners = {group.name: OwnerInProcess(group) for group in groups}
    with tempfile.TemporaryDirectory(prefix="forebay-models-") as folder:
        catalog = Catalog(front, directory, store, Path(folder), lambda _: None, owners.get)
        tasks.run(front.run(), "ingress")
        tasks.run(directory.run(), "directory")
        tasks.run(catalog.run(), "models")
        await tasks.until(lambda: catalog.names == sorted(owners))
        for name in catalog.names:
            try:
                await catalog.load(name)
            except ApiError as error:
                raise Unusable(str(error)) from error
        yield catalog
