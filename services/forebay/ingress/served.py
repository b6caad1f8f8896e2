"""The models that an ingress process serves: one from a directory, or all models of a distributed system."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple

from forebay import runtime
from forebay.ingress.front import Front
from forebay.ingress.group import GroupClient
from forebay.ingress.ingress import Ingress


class ServedModel(NamedTuple):
    """The model of a request, with the name of the model or of its adapter after aliases were resolved."""

    ingress: Ingress
    name: str


class ServedModels(ABC):
    front: Front

    @property
    @abstractmethod
    def ready_details(self) -> dict[str, str]:
        """Additional fields of the response to `GET /ready`."""

    @abstractmethod
    def has_owner(self) -> bool:
        """Return whether the only model has an owner, or whether there can be several models."""

    @abstractmethod
    def require_any(self) -> None:
        """Raise ApiError (503) if no model can be served now. Called before the body of a request is read."""

    @abstractmethod
    async def find(self, name: str, request_id: str) -> ServedModel:
        """Return the model that a request names, also by an adapter or an alias; the id selects one model of an alias.

        Raises ApiError: 404 for an unknown name, 503 if the model cannot be served now.
        """

    @abstractmethod
    def require_capacity(self, ingress: Ingress, endpoint: str) -> None:
        """Raise ApiError (429), and count it for this endpoint, if the pool of the model is assumed to be full.

        Requests of the Kafka API wait in the router's queue instead.
        """

    @abstractmethod
    async def only(self, name: str) -> ServedModel:
        """Return the model of this name. An empty name means the only model. Raises ApiError as `find`."""

    @abstractmethod
    def group(self, name: str) -> GroupClient:
        """Return the client of a model's group. An empty name means the only model.

        Raises ApiError: 400 if the name is missing, 404 for an unknown name.
        """

    @abstractmethod
    async def cards(self) -> list[dict[str, Any]]:
        """Return the models with ready workers, their adapters and aliases, as `GET /v1/models` lists them."""

    @abstractmethod
    def why_not_ready(self) -> str | None:
        """Return why no request can be served now, or None if requests can be served."""


def card_of(name: str, context_tokens: int, created_s: int, adapters: Sequence[str] = ()) -> list[dict[str, Any]]:
    """Return the entries of a model and its adapters for `GET /v1/models`."""
    card = {"id": name, "object": "model", "created": created_s, "owned_by": "forebay", "max_model_len": context_tokens}
    return [card, *({**card, "id": adapter, "parent": name} for adapter in adapters)]


class OneModel(ServedModels):
    def __init__(self, ingress: Ingress) -> None:
        self.front = ingress.front
        self.ingress = ingress
        self._created_s = int(runtime.wall_s())

    @property
    def ready_details(self) -> dict[str, str]:
        return self.ingress.ready_details

    def has_owner(self) -> bool:
        return self.ingress.find_partition() is not None and self.ingress.has_owner()

    def require_any(self) -> None:
        self.ingress.require_owner()

    async def find(self, name: str, request_id: str) -> ServedModel:
        del request_id
        return ServedModel(self.ingress, name)

    def require_capacity(self, ingress: Ingress, endpoint: str) -> None:
        """Do nothing, because the admission has rejected the request before its body was read."""

    async def only(self, name: str) -> ServedModel:
        return ServedModel(self.ingress, name)

    def group(self, name: str) -> GroupClient:
        del name
        return self.ingress

    async def cards(self) -> list[dict[str, Any]]:
        ingress = self.ingress
        adapters = await ingress.adapters.names()
        return card_of(ingress.settings.model_name, ingress.model.context_tokens, self._created_s, adapters)

    def why_not_ready(self) -> str | None:
        return None if self.ingress.ready() else self.ingress.not_ready_reason()
