"""All models of a distributed system: which of them have ready workers, and an ingress for each that is used.

Theory of operation. The topic `groups` lists the models. For each model the catalog follows the heartbeats of its
owner, which contain the number of ready workers and the digest of their model card. The first request for a model loads
the card from the topic `models`, and later requests use the loaded model. At most `LOADED_MAX` models are loaded. When
another one is needed, the one that was not used for the longest time is dropped, unless it has requests in flight. A
model whose workers have another card than before is loaded again.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.events.models import AliasSet
from forebay.events.names import unknown_name
from forebay.ingress.errors import ApiError
from forebay.ingress.front import Front
from forebay.ingress.ingress import Ingress
from forebay.ingress.model import Model, ModelUnusable
from forebay.ingress.model_cards import open_model
from forebay.ingress.readiness import Readiness
from forebay.ingress.served import ServedModel, card_of
from forebay.transport.base import LogError
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.models import ModelStore

logger = logging.getLogger(__name__)

LOADED_MAX = 64  # a tokenizer takes 5 to 60 MB of memory
CARD_S = 5.0  # until the topic `models` shows a card that a worker has stored before it joined


class Entry:
    """One model of the catalog.

    Attributes:
        name: name of the model.
        heartbeats: heartbeats of its routers.
        ready: whether it can be served now.
        ingress: its ingress; None while its card is not loaded.
        digest: digest of the loaded card; empty while no card is loaded.
    """

    def __init__(self, name: str, heartbeats: RouterHeartbeats, ready: Readiness) -> None:
        self.name = name
        self.heartbeats = heartbeats
        self.ready = ready
        self.ingress: Ingress | None = None
        self.digest = ""
        self.loading = asyncio.Lock()

    @property
    def card(self) -> str:
        """Digest of the card of its ready workers; empty if unknown."""
        owner = self.heartbeats.owner
        return "" if owner is None else owner.card


class Catalog:
    """The models of a distributed system, as `ServedModels`.

    Args:
        front: parts that all models share.
        directory: the models and their control partitions, which another task reads.
        store: the model cards.
        folder: folder for the files of loaded models.
        on_loaded: called with the name of a model before its first request.

    Attributes:
        front: parts that all models share.
    """

    def __init__(
        self, front: Front, directory: Directory, store: ModelStore, folder: Path, on_loaded: Callable[[str], None]
    ) -> None:
        self.front = front
        self._on_loaded = on_loaded
        self._directory = directory
        self._store = store
        self._folder = folder
        self._entries: dict[str, Entry] = {}
        self._loaded: OrderedDict[str, Entry] = OrderedDict()  # the model that was used last comes last
        self._created_s = int(runtime.wall_s())
        self._placed = asyncio.Event()
        directory.on_change = self._placed.set

    async def run(self) -> None:
        """Follow the models until cancelled. Raises LogError if the log cannot be read."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._store.run())
            while True:
                self._placed.clear()
                for name in self._directory.groups.partitions.keys() - self._entries.keys():
                    heartbeats = RouterHeartbeats(self.front.log, name)
                    entry = self._entries[name] = Entry(name, heartbeats, Readiness(heartbeats, self._directory))
                    tasks.create_task(entry.ready.run())
                await self._placed.wait()

    def ready(self) -> list[Entry]:
        """Return the models that can be served now, by name."""
        return [entry for _, entry in sorted(self._entries.items()) if entry.ready()]

    @property
    def ready_details(self) -> dict[str, str]:
        """Additional fields of the response to `GET /ready`: the models that can be served."""
        return {"models": ", ".join(entry.name for entry in self.ready())}

    def has_owner(self) -> bool:
        """Return True, because a request waits for the owner of its own model."""
        return True

    def require_any(self) -> None:
        """Do nothing, because the body of a request names its model."""

    def why_not_ready(self) -> str | None:
        """Return why no model can be served now, or None if one can be served."""
        if not self._entries:
            return "no model has workers yet"
        reasons = [f"{name}: {entry.ready.why_not()}" for name, entry in sorted(self._entries.items())]
        return None if self.ready() else "; ".join(reasons)

    async def find(self, name: str, request_id: str) -> ServedModel:
        """Return the model that a request names, also by an alias or an adapter.

        Raises ApiError: 404 for an unknown name, 503 if the model cannot be served now.
        """
        alias = None if name in self._entries else self._store.aliases.get(name)
        if alias is not None:
            name = self._target(alias, request_id)
        entry = self._entries.get(name) or await self._with_adapter(name)
        if entry is None:
            raise ApiError(404, "model_not_found", unknown_name("model", name, await self._names()), "model")
        ingress = await self._ingress(entry)
        ingress.require_owner()
        return ServedModel(ingress, name)

    def _target(self, alias: AliasSet, request_id: str) -> str:
        """Return the model behind an alias for a request.

        It is a function of the request id, so a record of the Kafka API that two ingresses submit has one model.
        """
        ready = {entry.name for entry in self.ready()}
        targets = [target for target in alias.targets if target.model in ready]
        if not targets:
            return alias.fallback if alias.fallback in ready else alias.targets[0].model
        place = xxh3_64_intdigest(request_id.encode()) / (1 << 64) * sum(target.weight for target in targets)
        for target in targets:
            place -= target.weight
            if place < 0:
                return target.model
        return targets[-1].model

    async def only(self, name: str) -> ServedModel:
        """Return the model of this name. An empty name means the only model. Raises ApiError as `find`."""
        if name:
            return await self.find(name, name)
        if len(self._entries) != 1:
            text = f"name a model; models are: {', '.join(await self._names()) or 'none'}"
            raise ApiError(400, "model_required", text, "model")
        return await self.find(next(iter(self._entries)), "")

    async def cards(self) -> list[dict[str, Any]]:
        """Return the models with ready workers and their adapters, as `GET /v1/models` lists them."""
        listed = []
        for entry in self.ready():
            stored = self._store.cards.get(entry.card)
            if stored is not None:
                adapters = () if entry.ingress is None else await entry.ingress.adapters.names()
                listed += card_of(entry.name, stored.card.context_tokens, self._created_s, adapters)
        found = {card["id"]: card for card in listed}
        for name, alias in sorted(self._store.aliases.items()):
            target = found.get(self._target(alias, ""))
            if target is not None and name not in found:
                listed.append({**target, "id": name, "root": target["id"]})
        return listed

    async def _names(self) -> list[str]:
        return [card["id"] for card in await self.cards()]

    async def _with_adapter(self, name: str) -> Entry | None:
        """Return the loaded model that has an adapter of this name, or None."""
        for entry in self.ready():
            if entry.ingress is not None and name in await entry.ingress.adapters.names():
                return entry
        return None

    async def _ingress(self, entry: Entry) -> Ingress:
        """Return the ingress of a model, and load its card unless it is loaded. Raises ApiError."""
        card = entry.card or entry.digest  # between two owners the loaded card stays valid
        if entry.ingress is None or entry.digest != card:
            async with entry.loading:
                if entry.ingress is None or entry.digest != card:
                    await self._load(entry, card)
        assert entry.ingress is not None
        self._loaded[entry.name] = entry
        self._loaded.move_to_end(entry.name)
        return entry.ingress

    async def _load(self, entry: Entry, card: str) -> None:
        if not card:
            why = entry.ready.why_not() if not entry.ready() else "its workers have stored no model card"
            raise ApiError(503, "not_ready", f"the model {entry.name} cannot be served now: {why}")
        try:
            async with asyncio.timeout(CARD_S):
                await self._store.stored(card)
            model = await open_model(self._store, card, self._folder)
        except TimeoutError as error:
            text = f"the model card {card} of {entry.name} is not on the topic models"
            raise ApiError(503, "no_model_card", text) from error
        except (ModelUnusable, LogError) as error:
            logger.error("cannot load the model card %s of %s: %s", card, entry.name, error)  # noqa: TRY400
            raise ApiError(503, "model_card_unusable", f"the model card of {entry.name}: {error}") from error
        if entry.ingress is not None:
            entry.ingress.close()
        self._drop_idle()
        self._on_loaded(entry.name)
        entry.ingress, entry.digest = self._new_ingress(entry, model), card
        logger.info("loaded the model card %s of %s", card, entry.name)

    def _new_ingress(self, entry: Entry, model: Model) -> Ingress:
        front = self.front
        settings = replace(front.settings, model_name=entry.name, loras=())
        metrics = front.metrics.of_model(entry.name)
        ingress = Ingress(front.log, model, settings, metrics, entry.ready, 0, entry.ready.partition, front)
        ingress.follow(entry.heartbeats, entry.ready)
        return ingress

    def _drop_idle(self) -> None:
        """Drop the models that were not used for the longest time, until another one may be loaded."""
        idle = [name for name, entry in self._loaded.items() if entry.ingress is None or not len(entry.ingress.replies)]
        for name in idle[: max(0, len(self._loaded) + 1 - LOADED_MAX)]:
            entry = self._loaded.pop(name)
            if entry.ingress is not None:
                entry.ingress.close()
            entry.ingress, entry.digest = None, ""
