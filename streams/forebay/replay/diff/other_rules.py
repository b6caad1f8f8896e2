"""Other rules for the choice of pools, with which a comparison replaces those of a recording."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import msgspec

from forebay.core.state.pool_registry import PoolEvent
from forebay.core.world import World
from forebay.events.pools import PoolCanarySet, PoolRouting, PoolRoutingConfigured


@dataclass(frozen=True, slots=True)
class OtherPoolRules:
    """Rules that replace recorded rules. Drains stay as recorded.

    `routing` replaces all recorded grids of its models. A model without an entry keeps its recorded grids.
    """

    routing: Mapping[str, PoolRouting] = field(default_factory=dict)
    without_canaries: bool = False

    @property
    def are_given(self) -> bool:
        return bool(self.routing) or self.without_canaries

    def of(self, event: PoolEvent) -> PoolEvent:
        match event:
            case PoolRoutingConfigured(model=model) if model in self.routing:
                return msgspec.structs.replace(event, routing=self.routing[model])
            case PoolCanarySet() if self.without_canaries:
                return msgspec.structs.replace(event, base="", share=0.0)
            case _:
                return event

    def at_start(self, world: World) -> Iterator[PoolEvent]:
        for model, routing in sorted(self.routing.items()):
            if routing != world.registry.routing_of(model):
                yield PoolRoutingConfigured(model=model, routing=routing)
        for canary in world.registry.all_canaries if self.without_canaries else ():
            yield self.of(canary)


RECORDED_RULES = OtherPoolRules()
