"""Settings of the pools of a group: their configurations, changes by operators, and rules by which pools are chosen.

All of them follow from the topic `control` alone. An operator's change of a pool is valid until the next such change,
or until the pool is configured again. The rules for the choice of pools are not reset by a configuration.
"""

from collections.abc import Collection, Sequence
from typing import Any, Literal, TypeVar, get_args

import msgspec

from forebay.core.state_machine import digest_of, plain
from forebay.events.base import U64_MASK
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    PoolSetting,
    Role,
    RouterMode,
)
from forebay.events.pools import (
    GridRole,
    PoolCanarySet,
    PoolDrainSet,
    PoolGrid,
    PoolRouting,
    PoolRoutingConfigured,
    PoolRule,
)
from forebay.events.snapshots import PoolBusy, PoolDisagg, PoolPolicy, WorldState

NO_ROUTING = PoolRouting()
BUILT_IN_MODES: frozenset[str] = frozenset(get_args(RouterMode))
NoEffect = Literal["unknown_model", "unknown_pool", "policy_not_allowed"]
AnyRule = TypeVar("AnyRule", bound=PoolRule)
RULES: dict[type[PoolRule], str] = {  # the field of a snapshot that has the rules of each type
    get_args(field.type)[0]: field.name
    for field in msgspec.structs.fields(WorldState)
    if set(get_args(field.type)) & set(get_args(PoolRule))
}


class PoolSettings:
    """Settings of all pools of a group.

    A model without rules has no choice of pools: the first pool by name with a ready worker serves its requests.

    Attributes:
        pools: configuration by pool, with the router mode in effect.
        busy: busy thresholds that an operator set, by pool.
        disagg: disaggregation settings that an operator set, by pool.
        modes: router mode that `PoolConfigured` set, by pool whose mode an operator changed.
    """

    def __init__(self) -> None:
        self.pools: dict[str, PoolConfigured] = {}
        self.busy: dict[str, BusyThresholds] = {}
        self.disagg: dict[str, DisaggConfig] = {}
        self.modes: dict[str, str] = {}
        self._rules: dict[type[Any], dict[tuple[str, str], Any]] = {kind: {} for kind in RULES}
        self._ruled_models: frozenset[str] = frozenset()

    def apply(self, event: PoolSetting, allowed: Collection[str] | None = None) -> NoEffect | None:
        """Apply the next change, and return why it has no effect, or None if it has one.

        `allowed` are the custom policies that the owner may run; None for any.
        """
        match event:
            case PoolConfigured():
                self.pools[event.pool] = event
                for changed in (self.busy, self.disagg, self.modes):
                    changed.pop(event.pool, None)
            case BusyThresholdsSet():
                self.busy |= dict.fromkeys(self._pools_of(event.model), event.thresholds)
                return self._unless_served(event.model)
            case DisaggregationSet():
                self.disagg |= dict.fromkeys(self._pools_of(event.model, "decode"), event.disagg)
                return self._unless_served(event.model)
            case PolicySet():
                return self._set_mode(event, allowed)
            case _:
                rules, key = self._rules[type(event)], _key(event)
                rules.pop(key, None)
                if not event.ends:
                    rules[key] = event
                self._ruled_models = frozenset(rule.model for rule in self._all_rules())
        return None

    def reset_policies(self, allowed: Collection[str]) -> list[NoEffect]:
        """Return pools to their configured policies if the owner may not run the policy that an operator set.

        The result says why pools keep their policy: the owner may not run the configured one either.
        """
        resets = [
            PolicySet(model=self.pools[name].model, pool=name, mode=configured)
            for name, configured in sorted(self.modes.items())
            if not is_allowed(self.pools[name].router.mode, allowed)
        ]
        return [no_effect for event in resets if (no_effect := self._set_mode(event, allowed)) is not None]

    def configured(self) -> dict[str, PoolConfigured]:
        """Return the pools as `PoolConfigured` set them, without the changes of operators, in order of their names."""
        pools = sorted(self.pools.items())
        return {name: pool.with_mode(self.modes.get(name, pool.router.mode)) for name, pool in pools}

    def in_effect(self) -> dict[str, PoolConfigured]:
        """Return the pools with the changes of operators, in order of their names."""
        return {
            name: msgspec.structs.replace(
                pool,
                router=msgspec.structs.replace(pool.router, busy=self.busy_of(pool), disagg=self.disagg_of(pool)),
            )
            for name, pool in sorted(self.pools.items())
        }

    def busy_of(self, pool: PoolConfigured) -> BusyThresholds:
        """Return the busy thresholds of a pool; of an operator, if set, otherwise of the configuration `pool`."""
        return self.busy.get(pool.pool, pool.router.busy)

    def disagg_of(self, pool: PoolConfigured) -> DisaggConfig:
        """Return the disaggregation of a pool; of an operator, if set, otherwise of the configuration `pool`."""
        return self.disagg.get(pool.pool, pool.router.disagg)

    def has_rules(self, model: str) -> bool:
        return model in self._ruled_models

    def routing_of(self, model: str) -> PoolRouting:
        """Return the grids of a model and whether its failed requests are retried in faster pools."""
        found = self.rule(PoolRoutingConfigured, model)
        return NO_ROUTING if found is None else found.routing

    def retries(self, model: str) -> bool:
        return self.routing_of(model).retry

    def grid(self, model: str, role: GridRole) -> PoolGrid | None:
        return next((grid for grid in self.routing_of(model).grids if grid.role == role), None)

    def canaries(self, model: str) -> list[PoolCanarySet]:
        return [rule for key, rule in sorted(self._rules[PoolCanarySet].items()) if key[0] == model]

    def canary(self, model: str, pool: str) -> PoolCanarySet | None:
        """Return how many requests a pool gets as a canary; None if it is no canary."""
        return self.rule(PoolCanarySet, model, pool)

    def is_drained(self, model: str, pool: str) -> bool:
        return self.rule(PoolDrainSet, model, pool) is not None

    def rule(self, kind: type[AnyRule], model: str, pool: str = "") -> AnyRule | None:
        """Return the event of a type that is valid for a model, or for one of its pools; None if there is none."""
        return self._rules[kind].get((model, pool))

    def policies(self) -> tuple[str, ...]:
        """Return the custom policies of all pools, sorted."""
        modes = {pool.router.mode for pool in self.pools.values()} | set(self.modes.values())
        return tuple(sorted(mode for mode in modes if mode not in BUILT_IN_MODES))

    def events(self) -> list[PoolSetting]:
        """Return the events that lead to these settings in a group without settings, in order."""
        models = sorted({pool.model for pool in self.pools.values()})
        events: list[PoolSetting] = [event for model in models for event in self._pool_events(model)]
        events += [
            PolicySet(model=pool.model, pool=name, mode=pool.router.mode)
            for name, pool in sorted(self.pools.items())
            if name in self.modes
        ]
        events += self._all_rules()
        made = PoolSettings()
        for event in events:
            made.apply(event)
        assert made.snapshot() == self.snapshot(), "the events lead to the same settings"
        return events

    def digest_of_rules(self) -> int:
        """Return a 64-bit digest of the rules for the choice of pools, the sum of a term per rule. It is 0 without any.

        The digest of the world covers all other settings by `snapshot`.
        """
        return sum(digest_of(_fields(event)) for event in self._all_rules()) & U64_MASK

    def snapshot(self) -> dict[str, Any]:
        """Return the settings as fields of `WorldState`."""
        return {
            "pools": tuple(self.pools[name] for name in sorted(self.pools)),
            "busy": tuple(PoolBusy(pool=name, thresholds=busy) for name, busy in sorted(self.busy.items())),
            "disagg": tuple(PoolDisagg(pool=name, disagg=disagg) for name, disagg in sorted(self.disagg.items())),
            "policies": tuple(PoolPolicy(pool=name, configured=mode) for name, mode in sorted(self.modes.items())),
            **{name: tuple(rule for _, rule in sorted(self._rules[kind].items())) for kind, name in RULES.items()},
        }

    def restore(self, state: WorldState) -> None:
        """Apply the settings in a snapshot. There must be no settings before."""
        for event in (*state.pools, *(rule for name in RULES.values() for rule in getattr(state, name))):
            self.apply(event)
        self.busy |= {one.pool: one.thresholds for one in state.busy}
        self.disagg |= {one.pool: one.disagg for one in state.disagg}
        self.modes |= {one.pool: one.configured for one in state.policies}

    def _all_rules(self) -> list[PoolRule]:
        return [rule for rules in self._rules.values() for _, rule in sorted(rules.items())]

    def _pools_of(self, model: str, *roles: Role) -> list[str]:
        """Return the names of a model's pools that have one of `roles`, or any role if there are none."""
        pools = [name for name, pool in self.pools.items() if pool.model == model]
        return [name for name in pools if not roles or self.pools[name].role in roles]

    def _unless_served(self, model: str) -> NoEffect | None:
        return None if self._pools_of(model, "aggregated", "decode") else "unknown_model"

    def _set_mode(self, event: PolicySet, allowed: Collection[str] | None) -> NoEffect | None:
        known = self.pools.get(event.pool)
        if known is None or known.model != event.model:
            return "unknown_pool"
        if allowed is not None and not is_allowed(event.mode, allowed):
            return "policy_not_allowed"
        configured = self.modes.pop(event.pool, known.router.mode)
        if event.mode != configured:
            self.modes[event.pool] = configured
        self.pools[event.pool] = known.with_mode(event.mode)
        return None

    def _pool_events(self, model: str) -> list[PoolSetting]:
        """Return the configurations of a model's pools, with busy thresholds and disaggregation settings.

        The last two are set for all pools of the model that exist at that time, and a later configuration of a pool
        resets them. So a pool without a setting is configured after the event that sets the others.
        """
        pools = {name: pool for name, pool in self.configured().items() if pool.model == model}
        busy = [name for name in pools if name in self.busy]
        disagg = [name for name in pools if name in self.disagg]
        setters: list[tuple[list[str], Sequence[PoolSetting]]] = [
            (busy, [BusyThresholdsSet(model=model, thresholds=self.busy[name]) for name in busy[:1]]),
            (disagg, [DisaggregationSet(model=model, disagg=self.disagg[name]) for name in disagg[:1]]),
        ]
        if any(pools[name].role == "decode" and name not in self.disagg for name in busy):
            setters.reverse()  # the thresholds were set last
        events: list[PoolSetting] = []
        for names, setter in setters:
            events += [pools.pop(name) for name in names if name in pools]
            events += setter
        return events + list(pools.values())


def is_allowed(mode: str, policies: Collection[str]) -> bool:
    """Return whether an owner that may run these custom policies may use a router mode."""
    return mode in BUILT_IN_MODES or mode in policies


def _key(rule: PoolRule) -> tuple[str, str]:
    return rule.model, "" if isinstance(rule, PoolRoutingConfigured) else rule.pool


def _fields(event: PoolRule) -> Any:
    """Return an event as a tuple for a digest.

    Logs of versions without the field `operator` keep their digests, so the tuple omits an empty one.
    """
    fields = plain(event)
    if event.operator:
        return fields
    at = [name for name in event.__struct_fields__ if name not in getattr(event, "ADDED", ())].index("operator")
    return fields[:at] + fields[at + 1 :]
