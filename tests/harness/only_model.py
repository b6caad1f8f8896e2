"""The only model of an ingress, whose group needs no router."""

import asyncio
from pathlib import Path

from forebay.events.heartbeats import RouterHeartbeat
from forebay.ingress.front import Front
from forebay.ingress.group import Readiness
from forebay.ingress.model import Model
from forebay.ingress.served_models import ServedModels
from forebay.transport.directory import Directory
from forebay.transport.models import ModelStore


class Present:
    """Owner that is always present, with this state."""

    has_owner = True
    owner_age_s = 0.0

    def __init__(self, owner: RouterHeartbeat) -> None:
        self.group = owner.group
        self.owner: RouterHeartbeat | None = owner

    def standbys(self) -> list[RouterHeartbeat]:
        return []

    async def follow(self, _: int) -> None:
        await asyncio.Event().wait()


class Placed(Readiness):
    """Readiness of a group with a present owner, a ready worker and this partition."""

    def __init__(self, front: Front, partition: int | None) -> None:
        beat = RouterHeartbeat(group=front.settings.model_name, router_id="r", role="owner", ready_aggregated=1)
        self.presence: Present = Present(beat)
        super().__init__(self.presence, Directory(front.log))
        self.placed = partition

    def partition(self) -> int | None:
        return self.placed


def only_model(front: Front, model: Model, ready: Readiness) -> ServedModels:
    return ServedModels(
        front, Directory(front.log), ModelStore(front.log), Path(), lambda _: None, lambda _: ready, model
    )
