"""All models of a distributed system: which of them have ready workers, and an ingress for each that is used.

Theory of operation. The topic `groups` lists the models. The heartbeats of the owner of each model contain the number
of ready workers and the digest of their model card. The first request for a model loads the card from the topic
`models`. At most `LOADED_MAX` models stay loaded; requests in flight of a dropped model go on. A model whose workers
have a new card is loaded again. Loading holds the interpreter for about a second if the vocabulary is large.
"""

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.events.models import AliasSet, AliasTarget
from forebay.events.names import unknown_name
from forebay.events.request_ids import client_id_of
from forebay.ingress.admission import FullPool
from forebay.ingress.errors import ApiError, model_required
from forebay.ingress.front import Front
from forebay.ingress.group import GroupClient, Readiness
from forebay.ingress.ingress import Ingress
from forebay.ingress.model_cards import open_model
from forebay.ingress.served import ServedModel, ServedModels, card_of
from forebay.runtime.errors import ConfigError
from forebay.transport.base import LogError
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import OwnerPresence, RouterHeartbeats
from forebay.transport.models import ModelStore

logger = logging.getLogger(__name__)

LOADED_MAX = 64  # a tokenizer takes 5 to 60 MB of memory
FAILED_S = 10.0  # between two attempts to load a card that cannot be loaded
LISTED_S = 0.5  # until the last known adapters of a model count, because a worker may be slow to list them
CARD_S = 5.0  # until the topic `models` shows a card that a worker has stored before it joined


class _Failure(NamedTuple):
    """A card that could not be loaded, and the time of the next attempt on the monotonic clock."""

    card: str
    until_s: float
    code: str
    message: str


class Entry:
    """One model of the catalog. `digest` is that of the loaded card; empty while no card is loaded."""

    def __init__(self, name: str, heartbeats: OwnerPresence, ready: Readiness, group: GroupClient) -> None:
        self.name = name
        self.heartbeats = heartbeats
        self.ready = ready
        self.group = group
        group.follow(heartbeats, ready)
        self.ingress: Ingress | None = None
        self.digest = ""
        self.loading = asyncio.Lock()
        self.failure: _Failure | None = None

    @property
    def card(self) -> str:
        """Digest of the card of the ready workers; empty if unknown."""
        owner = self.heartbeats.owner
        return "" if owner is None else owner.card

    def require_loadable(self, card: str) -> None:
        """Raise the error of the last attempt to load a card, until the next attempt is due."""
        failure = self.failure
        if failure is not None and failure.card == card and runtime.monotonic_s() < failure.until_s:
            raise ApiError(503, failure.code, failure.message)


class Catalog(ServedModels):
    """The models of a distributed system.

    Args:
        directory: the models and their control partitions, which another task reads.
        presence_of: returns the owner of a model, by default from heartbeats; None if this process does not serve it.
    """

    def __init__(
        self,
        front: Front,
        directory: Directory,
        store: ModelStore,
        folder: Path,
        on_loaded: Callable[[str], None],
        presence_of: Callable[[str], OwnerPresence | None] | None = None,
    ) -> None:
        self.front = front
        self._presence_of = presence_of or (lambda name: RouterHeartbeats(front.log, name))
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
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._store.run())
                while True:
                    self._placed.clear()
                    for name in sorted(self._directory.groups.partitions.keys() - self._entries.keys()):
                        presence = self._presence_of(name)
                        if presence is not None:
                            entry = self._entries[name] = self._new_entry(presence)
                            tasks.create_task(entry.ready.run())
                    await self._placed.wait()
        finally:
            for entry in self._entries.values():
                entry.group.close()

    def _new_entry(self, heartbeats: OwnerPresence) -> Entry:
        front, name = self.front, heartbeats.group
        ready = Readiness(heartbeats, self._directory)
        settings = replace(front.settings, model_name=name, loras=())
        group = GroupClient(front, settings, front.metrics.of_model(name), ready, ready.partition)
        group.full = FullPool(lambda: len(group.replies))  # other models have other pools
        return Entry(name, heartbeats, ready, group)

    def ready(self) -> list[Entry]:
        return [entry for _, entry in sorted(self._entries.items()) if entry.ready()]

    @property
    def ready_details(self) -> dict[str, str]:
        return {"models": ", ".join(entry.name for entry in self.ready())}

    def has_owner(self) -> bool:
        """Return True: `find` checks the owner of each request's model."""
        return True

    def require_any(self) -> None:
        """Do nothing, because the body of a request names its model."""

    def why_not_ready(self) -> str | None:
        if not self._entries:
            return "no model has workers yet"
        reasons = []
        for name, entry in sorted(self._entries.items()):
            if not entry.ready():
                reasons.append(f"{name}: {entry.ready.why_not()}")
            elif entry.card in self._store.cards:
                return None
            else:
                reasons.append(f"{name}: its workers have stored no model card")
        return "; ".join(reasons)

    async def find(self, name: str, request_id: str) -> ServedModel:
        alias = None if name in self._entries else self._store.aliases.get(name)
        if alias is not None:
            name = self._target(alias, request_id)
        entry = self._entries.get(name) or await self._with_adapter(name)
        if entry is None:
            raise ApiError(404, "model_not_found", unknown_name("model", name, await self._names()), "model")
        ingress = await self._ingress(entry)
        ingress.require_owner()
        return ServedModel(ingress, name)

    @property
    def names(self) -> list[str]:
        """Names of the models, also of those that cannot be served now."""
        return sorted(self._entries)

    async def load(self, name: str) -> None:
        """Load a model before its first request. Raises ApiError (503) if its card cannot be loaded."""
        await self._ingress(self._entries[name])

    def require_capacity(self, ingress: Ingress, endpoint: str) -> None:
        if ingress.full:
            ingress.metrics.rejected(endpoint)
            raise ingress.full.error(self.front.admission.retry_after_s)

    def heartbeats(self) -> list[OwnerPresence]:
        return [entry.heartbeats for _, entry in sorted(self._entries.items())]

    def group(self, name: str) -> GroupClient:
        names = sorted(self._entries)
        if not name and len(names) != 1:
            raise model_required(names)
        entry = self._entries.get(name or names[0])
        if entry is None:
            raise ApiError(404, "model_not_found", unknown_name("model", name, names), "model")
        return entry.group

    def _target(self, alias: AliasSet, request_id: str) -> str:
        """Return the model behind an alias for a request, by weighted rendezvous hashing of the client's request id.

        So a repeated request has the same model. If it is not ready, only its own requests go to others.
        """
        client_id = client_id_of(request_id)

        def place(target: AliasTarget) -> float:
            drawn = (xxh3_64_intdigest(f"{client_id}/{target.model}".encode()) + 1) / ((1 << 64) + 1)
            return float(drawn ** (1 / target.weight))

        ready = {entry.name for entry in self.ready()}
        for target in sorted(alias.targets, key=place, reverse=True):
            if target.model in ready:
                return target.model
        return alias.fallback if alias.fallback in ready else alias.targets[0].model

    async def only(self, name: str) -> ServedModel:
        name = name or self.group("").settings.model_name
        return await self.find(name, name)

    async def cards(self) -> list[dict[str, Any]]:
        entries = [entry for entry in self.ready() if entry.card in self._store.cards]
        contexts = [self._store.cards[entry.card].card.context_tokens for entry in entries]  # they may leave meanwhile
        adapters = await asyncio.gather(*(_adapters_of(entry) for entry in entries))
        listed: list[dict[str, Any]] = []
        for entry, context_tokens, names in zip(entries, contexts, adapters, strict=True):
            listed += card_of(entry.name, context_tokens, self._created_s, names)
        found = {card["id"]: card for card in listed}
        for name, alias in sorted(self._store.aliases.items()):
            target = found.get(self._target(alias, ""))
            if target is not None and name not in found:
                listed.append({**target, "id": name, "root": target["id"]})
        return listed

    async def _names(self) -> list[str]:
        return [card["id"] for card in await self.cards()]

    async def _with_adapter(self, name: str) -> Entry | None:
        """Return the model that has an adapter of this name, or None. Raises ApiError (503) if that cannot be known."""
        entries = list(self._entries.values())
        for entry in entries:
            if name in entry.group.adapters.known:
                return entry
        adapters = await asyncio.gather(*(_adapters_of(entry) for entry in entries))
        for entry, names in zip(entries, adapters, strict=True):
            if name in names:
                return entry
        if not all(entry.group.adapters.is_current for entry in entries):
            text = f"no model {name} is known, but a model has not listed its adapters yet; try again soon"
            raise ApiError(503, "adapters_unknown", text)
        return None

    async def _ingress(self, entry: Entry) -> Ingress:
        ingress = entry.ingress
        if ingress is None or entry.digest != self._card_of(entry):
            entry.require_loadable(self._card_of(entry))
            async with entry.loading:
                card = self._card_of(entry)  # the workers may have another one by now
                ingress = entry.ingress
                if ingress is None or entry.digest != card:
                    entry.require_loadable(card)
                    ingress = await self._load(entry, card)
                    entry.ingress, entry.digest, entry.failure = ingress, card, None
        self._loaded[entry.name] = entry
        self._loaded.move_to_end(entry.name)
        while len(self._loaded) > LOADED_MAX:
            _, unused = self._loaded.popitem(last=False)
            unused.ingress, unused.digest = None, ""
        return ingress

    def _card_of(self, entry: Entry) -> str:
        """Return the digest of the card to use. Raises ApiError (503) if there is none."""
        is_ready = entry.ready()
        card = entry.card if is_ready else entry.card or entry.digest  # between two owners the loaded card stays valid
        if not card:
            why = "its workers have stored no model card" if is_ready else entry.ready.why_not()
            raise ApiError(503, "not_ready", f"the model {entry.name} cannot be served now: {why}")
        return card

    async def _load(self, entry: Entry, card: str) -> Ingress:
        try:
            async with asyncio.timeout(CARD_S):
                await self._store.stored(card)
            ingress = Ingress.of_group(entry.group, await open_model(self._store, card, self._folder))
        except TimeoutError:
            text = f"the model card {card} of {entry.name} is not on the topic models"
            raise self._failed(entry, card, ApiError(503, "no_model_card", text)) from None
        except (ConfigError, LogError) as error:
            text = f"the model card of {entry.name}: {error}"
            raise self._failed(entry, card, ApiError(503, "model_card_unusable", text)) from error
        self._on_loaded(entry.name)
        logger.info("loaded the model card %s of %s", card, entry.name)
        return ingress

    def _failed(self, entry: Entry, card: str, error: ApiError) -> ApiError:
        logger.error("cannot load the model card %s of %s: %s", card, entry.name, error)
        entry.failure = _Failure(card, runtime.monotonic_s() + FAILED_S, error.code, str(error))
        return error


async def _adapters_of(entry: Entry) -> tuple[str, ...]:
    """Return the adapters of a model, as far as they are known after `LISTED_S`."""
    adapters = entry.group.adapters
    try:
        async with asyncio.timeout(LISTED_S):
            return await adapters.names()
    except TimeoutError:
        return adapters.known
