"""The only model of an ingress, whose group needs no router."""

from pathlib import Path

from forebay.events.heartbeats import RouterHeartbeat
from forebay.ingress.front import Front
from forebay.ingress.group import Readiness
from forebay.ingress.model import Model
from forebay.ingress.served_models import ServedModels
from forebay.transport.directory import Directory
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.models import ModelStore


class OnlyModel(Readiness):
    """Readiness of the only model. Its owner, which has a ready worker, has been silent for `silent_s` seconds."""

    silent_s = 0.0

    def __init__(self, front: Front, model: Model, partition: int | None = 0) -> None:
        log, name = front.log, front.settings.model_name
        directory = Directory(log)
        self.owner = RouterHeartbeats(log, name, lambda: self.silent_s)
        self.owner.owner = RouterHeartbeat(group=name, router_id="r", role="owner", ready_aggregated=1)
        super().__init__(self.owner, directory)
        self._placed = partition
        self.models = ServedModels(front, directory, ModelStore(log), Path(), lambda _: None, lambda _: self, model)

    def partition(self) -> int | None:
        return self._placed
