"""Rules by which the owner chooses pools: grids and retries per model, canaries and drains per pool."""

from typing import Any, assert_never

from forebay.core.state_machine import digest_of, plain
from forebay.events.base import U64_MASK
from forebay.events.pools import GridRole, PoolCanarySet, PoolDrainSet, PoolGrid, PoolRouting, PoolRoutingConfigured

NO_ROUTING = PoolRouting()
PoolEvent = PoolRoutingConfigured | PoolCanarySet | PoolDrainSet


class PoolRegistry:
    """Newest event about each model and pool.

    A model without any such event has no rules: the first pool by name with a ready worker serves its requests.
    """

    def __init__(self) -> None:
        self._routing: dict[str, PoolRoutingConfigured] = {}
        self._canaries: dict[tuple[str, str], PoolCanarySet] = {}
        self._drains: dict[tuple[str, str], PoolDrainSet] = {}
        self._models: frozenset[str] = frozenset()

    def apply(self, event: PoolEvent) -> None:
        key = event.model, "" if isinstance(event, PoolRoutingConfigured) else event.pool
        match event:
            case PoolRoutingConfigured():
                self._routing[event.model] = event
            case PoolCanarySet(base=""):
                self._canaries.pop(key, None)
            case PoolCanarySet():
                self._canaries[key] = event
            case PoolDrainSet(drained=True):
                self._drains[key] = event
            case PoolDrainSet():
                self._drains.pop(key, None)
            case _:
                assert_never(event)
        self._models = frozenset((*self._routing, *(model for model, _ in (*self._canaries, *self._drains))))

    def has_rules(self, model: str) -> bool:
        return model in self._models

    def routing_of(self, model: str) -> PoolRouting:
        """Return the grids of a model and whether its failed requests are retried in faster pools."""
        found = self._routing.get(model)
        return NO_ROUTING if found is None else found.routing

    def retries(self, model: str) -> bool:
        return self.routing_of(model).retry

    def grid(self, model: str, role: GridRole) -> PoolGrid | None:
        return next((grid for grid in self.routing_of(model).grids if grid.role == role), None)

    def canaries(self, model: str) -> list[PoolCanarySet]:
        return [self._canaries[key] for key in sorted(self._canaries) if key[0] == model]

    def is_drained(self, model: str, pool: str) -> bool:
        return (model, pool) in self._drains

    def digest(self) -> int:
        """Return a 64-bit digest, the sum of a term per event. It is 0 without events."""
        events: tuple[PoolEvent, ...] = (*self.routing, *self.all_canaries, *self.drains)
        return sum(digest_of(_fields(event)) for event in events) & U64_MASK

    @property
    def routing(self) -> tuple[PoolRoutingConfigured, ...]:
        return tuple(self._routing[model] for model in sorted(self._routing))

    @property
    def all_canaries(self) -> tuple[PoolCanarySet, ...]:
        return tuple(self._canaries[key] for key in sorted(self._canaries))

    @property
    def drains(self) -> tuple[PoolDrainSet, ...]:
        return tuple(self._drains[key] for key in sorted(self._drains))


def _fields(event: PoolEvent) -> Any:
    """Return an event as a tuple for a digest.

    Logs of versions without the field `operator`, the last one, keep their digests, so the tuple omits an empty one.
    """
    fields = plain(event)
    return fields if event.operator else fields[:-1]
