"""The models that an ingress process serves: one from a directory, or all models of a distributed system.

Theory of operation. The topic `groups` lists the models. The heartbeats of the owner of each model contain the number
of ready workers and the digest of their model card. The first request for a model loads the card from the topic
`models`. At most `LOADED_MAX` models stay loaded; requests in flight of a dropped model go on. A model whose workers
have a new card is loaded again. Loading holds the interpreter for about a second if the vocabulary is large.

A model from a directory is the only entry of the list. It is always loaded and listed, and every request is for it.
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
from forebay.events.models import AliasSet, AliasTarget, ModelCard
from forebay.events.names import unknown_name
from forebay.events.request_ids import client_id_of
from forebay.ingress.caller import Caller
from forebay.ingress.errors import ApiError, model_required
from forebay.ingress.front import Front
from forebay.ingress.group import GroupClient, Readiness
from forebay.ingress.loaded_model import LoadedModel
from forebay.ingress.model import Model
from forebay.ingress.model_cards import open_model
from forebay.runtime.errors import ConfigError
from forebay.transport.base import LogError
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import OwnerPresence, RouterHeartbeats
from forebay.transport.models import ModelStore

logger = logging.getLogger(__name__)

OLDER_MAX = 8  # models with other cards than that of their workers, for responses to earlier requests
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


class ServedModel:
    """One model of an ingress.

    Attributes:
        loaded: the model with its tokenizer; None until a request needs it.
        digest: that of the loaded card; empty while no card is loaded, and for a model from a directory.
    """

    def __init__(self, group: GroupClient, model: Model | None = None) -> None:
        self.name = group.settings.model_name
        self.group = group
        self.loaded = None if model is None else LoadedModel(group, model)
        self.digest = ""
        self.loading = asyncio.Lock()
        self.failure: _Failure | None = None

    @property
    def card(self) -> str:
        """Digest of the card of the ready workers; empty if unknown."""
        owner = self.group.ready.presence.owner
        return "" if owner is None else owner.card

    def require_loadable(self, card: str) -> None:
        """Raise the error of the last attempt to load a card, until the next attempt is due."""
        failure = self.failure
        if failure is not None and failure.card == card and runtime.monotonic_s() < failure.until_s:
            raise ApiError(503, failure.code, failure.message)


class RequestedModel(NamedTuple):
    """The model of a request, with the name of the model or of its adapter after aliases were resolved."""

    loaded: LoadedModel
    name: str


class ServedModels:
    """The models of an ingress process.

    Args:
        directory: the models and their control partitions, which another task reads.
        store: the model cards.
        folder: directory for the files of loaded cards.
        on_loaded: called with the name of a model after its card was loaded.
        ready_of: returns the readiness of a model, by default from heartbeats; None if this process does not serve it.
        model: the only model, None to serve all models of the directory.
    """

    def __init__(
        self,
        front: Front,
        directory: Directory,
        store: ModelStore,
        folder: Path,
        on_loaded: Callable[[str], None],
        ready_of: Callable[[str], Readiness | None] | None = None,
        model: Model | None = None,
    ) -> None:
        self.front = front
        self._on_loaded = on_loaded
        self._directory = directory
        self._store = store
        self._folder = folder
        self._ready_of = ready_of or (lambda name: Readiness(RouterHeartbeats(front.log, name), directory))
        self._entries: dict[str, ServedModel] = {}
        self._following: dict[str, tuple[int, asyncio.Task[None]]] = {}  # with the partition of the model
        self._loaded: OrderedDict[str, ServedModel] = OrderedDict()  # the model that was used last comes last
        self._older: OrderedDict[tuple[str, str], LoadedModel] = OrderedDict()
        self._created_s = int(runtime.wall_s())
        self._placed = asyncio.Event()
        directory.on_change = self._placed.set
        self._only: ServedModel | None = None
        if model is not None:
            name = front.settings.model_name
            ready = self._ready_of(name)
            assert ready is not None
            group = GroupClient(front, front.settings, ready, front.admission.full)
            self._only = self._entries[name] = ServedModel(group, model)

    async def run(self) -> None:
        """Follow the models until cancelled. Raises LogError if the log cannot be read."""
        async with asyncio.TaskGroup() as tasks:
            for entry in self._entries.values():
                tasks.create_task(entry.group.run())
            if self._only is None:
                tasks.create_task(self._store.run())
                await self._add_placed(tasks)

    async def _add_placed(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            self._placed.clear()
            partitions = self._directory.groups.partitions
            for name, (partition, following) in list(self._following.items()):
                if partitions.get(name) != partition:  # an operator has removed the model
                    following.cancel()
                    del self._following[name], self._entries[name]
                    self._loaded.pop(name, None)
            for name in sorted(partitions.keys() - self._entries.keys()):
                ready = self._ready_of(name)
                if ready is not None:
                    settings = replace(self.front.settings, model_name=name, loras=())
                    entry = self._entries[name] = ServedModel(GroupClient(self.front, settings, ready))
                    self._following[name] = partitions[name], tasks.create_task(entry.group.run())
            await self._placed.wait()

    def ready(self) -> list[ServedModel]:
        return [entry for _, entry in sorted(self._entries.items()) if entry.group.ready()]

    @property
    def ready_details(self) -> dict[str, str]:
        """Additional fields of the response to `GET /ready`."""
        if self._only is not None:
            return self._only.group.ready.details
        return {"models": ", ".join(entry.name for entry in self.ready())}

    def has_owner(self) -> bool:
        """Return whether the only model has an owner. Of several models, `find` checks that of the request."""
        return self._only is None or self._only.group.has_owner()

    def require_any(self) -> None:
        """Raise ApiError (503) if no model can be served now. Called before the body of a request is read."""
        if self._only is not None:
            self._only.group.require_owner()

    def why_not_ready(self) -> str | None:
        """Return why no request can be served now, or None if requests can be served."""
        if self._only is not None:
            return self._only.group.ready.problem()
        if not self._entries:
            return "no model has workers yet"
        reasons = []
        for name, entry in sorted(self._entries.items()):
            if (problem := entry.group.ready.problem()) is not None:
                reasons.append(f"{name}: {problem}")
            elif entry.card in self._store.cards:
                return None
            else:
                reasons.append(f"{name}: its workers have stored no model card")
        return "; ".join(reasons)

    async def find(self, name: str, request_id: str) -> RequestedModel:
        """Return the model that a request names, also by an adapter or an alias; the id selects one model of an alias.

        Every request is for the only model; `LoadedModel` checks that it names the model or an adapter.

        Raises ApiError: 404 for an unknown name, 503 if the model cannot be served now.
        """
        entry = self._only
        if entry is None:
            alias = None if name in self._entries else self._store.aliases.get(name)
            if alias is not None:
                name = self._target(alias, request_id)
            entry = self._entries.get(name) or await self._with_adapter(name)
            if entry is None:
                text = unknown_name("model", name, [card["id"] for card in await self.cards()])
                if alias is not None:
                    text = f"the alias {alias.alias!r} names an {text}"
                raise ApiError(404, "model_not_found", text, "model")
        loaded = await self._load(entry)
        if entry is not self._only:  # whose owner was required before the body of the request was read
            entry.group.require_owner()
        return RequestedModel(loaded, name)

    async def find_endpoint(self, name: str, caller: Caller) -> LoadedModel:
        """Return the first model by name whose ready workers have an endpoint, of those that the caller may use.

        Raises ApiError: 404 for an unknown endpoint, 503 if the model cannot be served now.
        """
        known: dict[str, ServedModel] = {}
        for model, entry in sorted(self._entries.items()):
            owner = entry.group.ready.presence.owner
            if owner is not None and caller.may_use(model):
                known = dict.fromkeys(owner.endpoints, entry) | known
        if name not in known:
            raise ApiError(404, "endpoint_not_found", unknown_name("endpoint", name, sorted(known)))
        loaded = await self._load(known[name])
        known[name].group.require_owner()
        return loaded

    def partitions(self) -> list[int]:
        """Return the control partitions of the models."""
        found = (entry.group.ready.partition() for _, entry in sorted(self._entries.items()))
        return [partition for partition in found if partition is not None]

    async def rendering_model(self, name: str, card: str) -> LoadedModel:
        """Return a model with the card with which a request was prepared, to render its response.

        A model from a directory has no card, and is taken for the same one.

        Raises ApiError: 404 for an unknown model, 410 for a removed card, 503 if the model cannot be loaded.
        """
        entry = self._entries.get(name)
        if entry is None:
            raise ApiError(404, "model_not_found", f"the model {name} of the request was removed", "model")
        if entry.loaded is not None and (entry is self._only or card == entry.digest):
            return entry.loaded
        if not card or (card == entry.card and entry.group.ready()):
            return await self._load(entry)
        older = self._older.get((name, card))
        if older is None:
            if card not in self._store.cards:
                text = f"the model card {card} of {name}, with which the request was prepared, was removed"
                raise ApiError(410, "model_card_removed", text)
            entry.require_loadable(card)
            async with entry.loading:
                older = self._older.get((name, card)) or await self._load_card(entry, card)
            self._older[name, card] = older
        self._older.move_to_end((name, card))
        while len(self._older) > OLDER_MAX:
            self._older.popitem(last=False)
        return older

    async def only(self, name: str) -> RequestedModel:
        """Return the model of this name. An empty name means the only model. Raises ApiError as `find`."""
        name = name or self.group("").settings.model_name
        return await self.find(name, name)

    def group(self, name: str) -> GroupClient:
        """Return the client of a model's group. An empty name means the only model, or the only one with ready workers.

        Raises ApiError: 400 if the name is missing, 404 for an unknown name.
        """
        names = sorted(self._entries)
        served = [entry.name for entry in self.ready()] or names
        if not name and len(served) != 1:
            raise model_required(names)
        entry = self._only or self._entries.get(name or served[0])
        if entry is None:
            raise ApiError(404, "model_not_found", unknown_name("model", name, names), "model")
        return entry.group

    @property
    def names(self) -> list[str]:
        """Names of the models, also of those that cannot be served now."""
        return sorted(self._entries)

    async def load_all(self) -> None:
        """Load all models before their first requests. Raises ConfigError if a card cannot be loaded."""
        for entry in list(self._entries.values()):
            try:
                await self._load(entry)
            except ApiError as error:
                raise ConfigError(str(error)) from error

    def presences(self) -> list[OwnerPresence]:
        return [entry.group.ready.presence for _, entry in sorted(self._entries.items())]

    async def cards(self) -> list[dict[str, Any]]:
        """Return the models with ready workers, their adapters and aliases, as `GET /v1/models` lists them."""
        cards = self._cards()  # models may leave meanwhile
        adapters = await asyncio.gather(*map(self._adapters_of, cards))
        listed: list[dict[str, Any]] = []
        for (name, card), names in zip(cards.items(), adapters, strict=True):
            entry = {"id": name, "object": "model", "created": self._created_s, "owned_by": "forebay"}
            entry |= {"max_model_len": card.context_tokens}
            listed += [entry, *({**entry, "id": adapter, "parent": name} for adapter in names)]
        found = {entry["id"]: entry for entry in listed}
        for name, alias in sorted(self._store.aliases.items()):
            target = found.get(self._target(alias, ""))
            if target is not None and name not in found:
                listed.append({**target, "id": name, "root": target["id"]})
        return listed

    def _cards(self) -> dict[str, ModelCard]:
        """Return the card of each listed model by name."""
        if self._only is not None and self._only.loaded is not None:
            return {self._only.name: self._only.loaded.model.card}
        cards = self._store.cards
        return {one.name: cards[one.card].card for one in self.ready() if one.card in cards}

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

    async def _with_adapter(self, name: str) -> ServedModel | None:
        """Return the model that has an adapter of this name, or None. Raises ApiError (503) if that cannot be known."""
        entries = list(self._entries.values())
        for entry in entries:
            if name in entry.group.adapters.known:
                return entry
        adapters = await asyncio.gather(*(self._adapters_of(entry.name) for entry in entries))
        for entry, names in zip(entries, adapters, strict=True):
            if name in names:
                return entry
        if not all(entry.group.adapters.is_current for entry in entries):
            text = f"no model {name} is known, but a model has not listed its adapters yet; try again soon"
            raise ApiError(503, "adapters_unknown", text)
        return None

    async def _adapters_of(self, name: str) -> tuple[str, ...]:
        """Return the adapters of a model. Of several models, only those that are known after `LISTED_S`."""
        adapters = self._entries[name].group.adapters
        try:
            async with asyncio.timeout(LISTED_S if self._only is None else None):
                return await adapters.names()
        except TimeoutError:
            return adapters.known

    async def _load(self, entry: ServedModel) -> LoadedModel:
        loaded = entry.loaded
        if loaded is None or entry.digest != self._card_of(entry):
            entry.require_loadable(self._card_of(entry))
            async with entry.loading:
                card = self._card_of(entry)  # the workers may have another one by now
                loaded = entry.loaded
                if loaded is None or entry.digest != card:
                    entry.require_loadable(card)
                    loaded = await self._load_card(entry, card)
                    entry.loaded, entry.digest, entry.failure = loaded, card, None
        self._loaded[entry.name] = entry
        self._loaded.move_to_end(entry.name)
        while len(self._loaded) > LOADED_MAX:
            _, unused = self._loaded.popitem(last=False)
            unused.loaded, unused.digest = None, ""
        return loaded

    def _card_of(self, entry: ServedModel) -> str:
        """Return the digest of the card to use, that of the only model is empty. Raises ApiError (503) without one."""
        if entry is self._only:
            return ""
        problem = entry.group.ready.problem()
        card = entry.card if problem is None else entry.card or entry.digest  # the loaded one between two owners
        if not card:
            why = problem or "its workers have stored no model card"
            raise ApiError(503, "not_ready", f"the model {entry.name} cannot be served now: {why}")
        return card

    async def _load_card(self, entry: ServedModel, card: str) -> LoadedModel:
        try:
            async with asyncio.timeout(CARD_S):
                await self._store.stored(card)
            loaded = LoadedModel(entry.group, await open_model(self._store, card, self._folder), card)
        except TimeoutError:
            text = f"the model card {card} of {entry.name} is not on the topic models"
            raise self._failed(entry, card, ApiError(503, "no_model_card", text)) from None
        except (ConfigError, LogError) as error:
            text = f"the model card of {entry.name}: {error}"
            raise self._failed(entry, card, ApiError(503, "model_card_unusable", text)) from error
        self._on_loaded(entry.name)
        logger.info("loaded the model card %s of %s", card, entry.name)
        return loaded

    def _failed(self, entry: ServedModel, card: str, error: ApiError) -> ApiError:
        logger.error("cannot load the model card %s of %s: %s", card, entry.name, error)
        entry.failure = _Failure(card, runtime.monotonic_s() + FAILED_S, error.code, str(error))
        return error
