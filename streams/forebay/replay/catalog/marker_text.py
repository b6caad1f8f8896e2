"""Describe configuration changes and commands of operators in one short sentence."""

from collections.abc import Iterable
from typing import Any

import msgspec

from forebay.core.world import World
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    ControlEvent,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    WorkerCommanded,
)
from forebay.events.decisions import CommandSent
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRoutingConfigured
from forebay.replay.moment import flat

CHANGES_MAX = 4  # settings in a sentence; the number of all others is added
NAMES_MAX = 3
VALUE_CHARS_MAX = 40

SettingsEvent = (
    PoolConfigured
    | BusyThresholdsSet
    | DisaggregationSet
    | PolicySet
    | PoolRoutingConfigured
    | PoolCanarySet
    | PoolDrainSet
)


class EffectiveSettings:
    """Shallow copies of the immutable settings of all pools before an event, to name what the event changes."""

    def __init__(self, world: World) -> None:
        self.pools = dict(world.pools)
        self.busy = dict(world.busy)
        self.disagg = dict(world.disagg)

    def busy_of(self, model: str) -> BusyThresholds:
        pools = (self.busy.get(name, pool.router.busy) for name, pool in self.pools.items() if pool.model == model)
        return next(pools, BusyThresholds())

    def disagg_of(self, model: str) -> DisaggConfig:
        decoders = ((name, pool) for name, pool in self.pools.items() if pool.model == model and pool.role == "decode")
        return next((self.disagg.get(name, pool.router.disagg) for name, pool in decoders), DisaggConfig())


def settings_text(event: SettingsEvent, before: EffectiveSettings, after: EffectiveSettings) -> str:
    """Return what an event changes in the settings. Empty if it changes nothing, for example for an unknown model."""
    match event:
        case PoolConfigured():
            text = _pool_text(event, before)
        case BusyThresholdsSet():
            changes = changes_of(before.busy_of(event.model), after.busy_of(event.model))
            text = f"Busy thresholds of {event.model}: {join_changes(changes)}" if changes else ""
        case DisaggregationSet():
            changes = changes_of(before.disagg_of(event.model), after.disagg_of(event.model))
            text = f"Disaggregation of {event.model}: {join_changes(changes)}" if changes else ""
        case PolicySet():
            text = _mode_text(event.pool, before, after)
        case PoolRoutingConfigured():
            grids = ", ".join(f"a grid of {len(grid.pools)} {grid.role} pools" for grid in event.routing.grids)
            retry = " and retries in faster pools" if event.routing.retry else ""
            text = f"Pools of {event.model} are chosen by {grids or 'name'}{retry}"
        case PoolCanarySet() if event.base:
            text = f"Pool {event.pool} gets {event.share:.4g} of the requests for pool {event.base}"
        case PoolCanarySet():
            text = f"Pool {event.pool} is no canary any more"
        case PoolDrainSet():
            text = f"Pool {event.pool} gets {'no new requests' if event.drained else 'new requests again'}"
    return text and _sentence(text, event)


def modes_text(before: EffectiveSettings, after: EffectiveSettings) -> str:
    """Return the pools whose router mode a new owner changed, because it may not run their policy. Empty if none."""
    texts = (_mode_text(pool, before, after) for pool in after.pools)
    text = "; ".join(text for text in texts if text)
    return text and f"{text}, because the new owner may not run the previous policy."


def command_text(event: WorkerCommanded, sent: CommandSent | None) -> str:
    """Return what an operator's command does. `sent` is the owner's decision; None for a repeated command."""
    command = event.command
    named = f"{command.action} {command.lora_name}".rstrip()
    if sent is not None and sent.reason is not None:
        text = f"Command {named} for {event.model} was rejected: {sent.reason}"
    else:
        targets = [one.worker_id for one in sent.targets] if sent is not None else list(event.worker_ids)
        text = f"Command {named} was sent to {join_names(targets, 'worker') if targets else event.model}"
    return _sentence(text, event)


def changes_of(before: msgspec.Struct, after: msgspec.Struct) -> list[str]:
    """Return the fields that differ as `name old → new`, with dotted names for parts of a part."""
    old, new = dict(flat(before)), dict(flat(after))
    return [_change_text(name, old[name], new[name]) for name in new if old[name] != new[name]]


def join_changes(changes: list[str]) -> str:
    """Return changes as text, with the number of those above `CHANGES_MAX`."""
    more = len(changes) - CHANGES_MAX
    return ", ".join(changes[:CHANGES_MAX]) + (f" and {more} more" if more > 0 else "")


def join_names(names: Iterable[str], noun: str) -> str:
    """Return names after their noun, for example `workers a and b` or `5 workers`."""
    found = list(names)
    if len(found) == 1:
        return f"{noun} {found[0]}"
    if len(found) <= NAMES_MAX:
        return f"{noun}s {', '.join(found[:-1])} and {found[-1]}"
    return f"{len(found)} {noun}s"


def _mode_text(pool: str, before: EffectiveSettings, after: EffectiveSettings) -> str:
    modes = [settings.pools[pool].router.mode if pool in settings.pools else "none" for settings in (before, after)]
    return f"Pool {pool}: mode {modes[0]} → {modes[1]}" if modes[0] != modes[1] else ""


def _pool_text(event: PoolConfigured, before: EffectiveSettings) -> str:
    known = before.pools.get(event.pool)
    if known is None:
        return f"Pool {event.pool} serves {event.model} with router mode {event.router.mode}"
    effective = msgspec.structs.replace(
        known,
        router=msgspec.structs.replace(
            known.router,
            busy=before.busy.get(event.pool, known.router.busy),
            disagg=before.disagg.get(event.pool, known.router.disagg),
        ),
        at_us=event.at_us,
    )
    changes = [change.removeprefix("router.") for change in changes_of(effective, event)]
    return f"Pool {event.pool}: {join_changes(changes)}" if changes else ""


def _sentence(text: str, event: ControlEvent) -> str:
    operator = "" if isinstance(event, PoolConfigured) else event.operator
    return f"{text} (by {operator})." if operator else f"{text}."


def _change_text(name: str, old: Any, new: Any) -> str:
    if isinstance(old, tuple):  # the classes of a queue
        return f"{name} changed"
    return f"{name} {_value(old)} → {_value(new)}"


def _value(value: Any) -> str:
    if value is None or value == "":
        return "off"
    text = ("yes" if value else "no") if isinstance(value, bool) else str(value)
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}…"
