"""Settings of a recorded group, as events for a new namespace.

Theory of operation. Epochs are offsets, and workers, leases and requests name epochs. A copy of a log therefore cannot
be continued elsewhere. The placements and the settings of groups name no epoch, so a new namespace can begin with them.
They follow from the topics `groups` and `control` alone. No decision is derived again, so neither a damaged journal nor
a journal of another version prevents a restore.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.core.restore import restore
from forebay.core.step import step
from forebay.core.world import World
from forebay.events.codec import DecodeError, encode
from forebay.events.control import (
    BusyThresholdsSet,
    ControlEvent,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    WorkerCommanded,
)
from forebay.events.groups import GroupPlaced
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRoutingConfigured
from forebay.events.topics import CONTROL, GROUPS
from forebay.journal.groups import groups_of, oldest_world_state
from forebay.transport.base import Draft, Log, LogError, event_of, records_of
from forebay.transport.directory import PARTITION
from forebay.transport.sqlite.log import SqliteLog

# What each event sets, in the words of the report.
NAMES: dict[type[ControlEvent], str] = {
    PoolConfigured: "pools",
    PolicySet: "policies",
    BusyThresholdsSet: "busy thresholds",
    DisaggregationSet: "disaggregation settings",
    PoolRoutingConfigured: "routing rules",
    PoolCanarySet: "canaries",
    PoolDrainSet: "drains",
}


class RestoreRefused(LogError):
    """The settings of a log cannot be restored. The message gives the reason and the remedy."""


class ControlRead(msgspec.Struct):
    """Numbers of records that were read from the topic `control` of a group."""

    settings: int = 0
    commands: int = 0
    undecodable: int = 0


class RestoredGroup(msgspec.Struct, frozen=True):
    """Group of a recorded log, and the `control` events that give a new namespace its settings, in order.

    `policies` are the custom policies of the pools, sorted. Routers have to allow them.
    """

    name: str
    partition: int
    events: tuple[ControlEvent, ...]
    read: ControlRead
    pools: tuple[str, ...]
    policies: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(NAMES[type(event)] for event in self.events)
        found[NAMES[PoolConfigured]] = len(self.pools)
        return {name: found[name] for name in NAMES.values()}


async def restored_groups(log: Log) -> list[RestoredGroup]:
    """Return every group of a log with its settings, sorted by control partition.

    Raises RestoreRefused if the log is an anonymised recording, or has no group.
    """
    if isinstance(log, SqliteLog) and log.recording is not None and log.recording.anonymized:
        raise RestoreRefused("an anonymised recording has masked names of models and pools; use the original recording")
    placed = await groups_of(log)
    found = [await _restored(log, name, partition) for name, partition in placed.items() if name]
    if not found:
        raise RestoreRefused("the log has no group, so there is nothing to restore")
    return sorted(found, key=lambda group: group.partition)


async def _restored(log: Log, name: str, partition: int) -> RestoredGroup:
    world, read = await settled_world(log, partition)
    events = settings_events(world)
    modes = {pool.router.mode for pool in world.pools.values()} | set(world.modes.values())
    policies = tuple(sorted(mode for mode in modes if "." in mode))
    return RestoredGroup(name, partition, tuple(events), read, tuple(sorted(world.pools)), policies)


async def settled_world(log: Log, partition: int) -> tuple[World, ControlRead]:
    """Return a world that has only the settings of a group, and the records from which they follow. Raises LogError."""
    begin, end = await log.begin(CONTROL.name, partition), await log.end(CONTROL.name, partition)
    state = await oldest_world_state(log, partition) if begin else None
    world, read = World() if state is None else restore([state]), ControlRead()
    events: list[Any] = []
    async for record in records_of(log, CONTROL, partition, begin, end):
        try:
            event = event_of(CONTROL, record)
        except DecodeError:
            read.undecodable += 1
            continue
        if isinstance(event, WorkerCommanded):
            read.commands += 1
        else:
            read.settings += 1
            events.append(event)
    # An ingress accepts only policies that the owner allows, so each of these was allowed when it was set.
    allowed = {event.mode for event in events if isinstance(event, PolicySet)}
    world.owner_policies = tuple(sorted({*world.owner_policies, *allowed}))
    for event in events:
        step(world, CONTROL.name, event, world.now_us)
    return world, read


def settings_of(world: World) -> Any:
    """Return the settings of a world in a form that can be compared."""
    registry = world.registry
    rules = (registry.routing, registry.all_canaries, registry.drains)
    return (world.pools, world.busy, world.disagg, world.modes, *rules)


def settings_events(world: World) -> list[ControlEvent]:
    models = sorted({pool.model for pool in world.pools.values()})
    events: list[ControlEvent] = [event for model in models for event in _pool_events(world, model)]
    events += [
        PolicySet(model=pool.model, pool=name, mode=pool.router.mode)
        for name, pool in sorted(world.pools.items())
        if name in world.modes
    ]
    events += [*world.registry.routing, *world.registry.all_canaries, *world.registry.drains]
    made = World()
    made.owner_policies = tuple(sorted({event.mode for event in events if isinstance(event, PolicySet)}))
    for event in events:
        step(made, CONTROL.name, event, 0)
    assert settings_of(made) == settings_of(world), "the events lead to the same settings"
    return events


def _pool_events(world: World, model: str) -> list[ControlEvent]:
    """Return the configurations of a model's pools, with busy thresholds and disaggregation settings.

    The last two are set for all pools of the model that exist at that time, and a later configuration of a pool resets
    them. So a pool without a setting is configured after the event that sets the others.
    """
    pools = {name: pool for name, pool in sorted(world.configured_pools().items()) if pool.model == model}
    busy = [name for name in pools if name in world.busy]
    disagg = [name for name in pools if name in world.disagg]
    setters: list[tuple[list[str], Sequence[ControlEvent]]] = [
        (busy, [BusyThresholdsSet(model=model, thresholds=world.busy[name]) for name in busy[:1]]),
        (disagg, [DisaggregationSet(model=model, disagg=world.disagg[name]) for name in disagg[:1]]),
    ]
    if any(pools[name].role == "decode" and name not in world.disagg for name in busy):
        setters.reverse()  # the thresholds were set last
    events: list[ControlEvent] = []
    for names, setter in setters:
        events += [pools.pop(name) for name in names if name in pools]
        events += setter
    return events + list(pools.values())


async def write_group(log: Log, group: RestoredGroup, at_us: int) -> None:
    """Append a group to the log of a new namespace, and check that the log has the settings of the group.

    The placement, with `at_us` of Unix time, is appended last, so a router that finds the group finds its settings.
    """
    await log.append([Draft(CONTROL.name, group.partition, encode(CONTROL, event)) for event in group.events])
    written, _ = await settled_world(log, group.partition)
    if list(settings_events(written)) != list(group.events):
        raise LogError(
            f"the records on {CONTROL.name}/{group.partition} do not give the settings of {group.name}: does another"
            " process write to this namespace? Stop it, and restore into another namespace"
        )
    placed = GroupPlaced(group=group.name, partition=group.partition, at_us=at_us)
    await log.append([Draft(GROUPS.name, PARTITION, encode(GROUPS, placed), group.name.encode())])
