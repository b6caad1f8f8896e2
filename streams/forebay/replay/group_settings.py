"""Settings of a recorded group, as events for a new namespace.

Theory of operation. Epochs are offsets, and workers, leases and requests name epochs. A copy of a log therefore cannot
be continued elsewhere. The placements and the settings of groups name no epoch, so a new namespace can begin with them.
They follow from the topics `groups` and `control` alone. No decision is derived again, so neither a damaged journal nor
a journal of another version prevents a restore.
"""

from collections import Counter
from typing import get_args

import msgspec

from forebay.core.state.pool_settings import PoolSettings
from forebay.events.codec import DecodeError, encode
from forebay.events.control import PoolConfigured, PoolSetting, WorkerCommanded
from forebay.events.groups import GroupPlaced
from forebay.events.topics import CONTROL, GROUPS
from forebay.journal.groups import groups_of, oldest_world_state
from forebay.transport.base import Draft, Log, LogError, event_of, records_of
from forebay.transport.directory import PARTITION
from forebay.transport.sqlite.log import SqliteLog


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
    events: tuple[PoolSetting, ...]
    read: ControlRead
    pools: tuple[str, ...]
    policies: tuple[str, ...]

    @property
    def counts(self) -> dict[str, int]:
        found = Counter(event.NOUN for event in self.events)
        found[PoolConfigured.NOUN] = len(self.pools)
        return {kind.NOUN: found[kind.NOUN] for kind in get_args(PoolSetting)}


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
    settings, read = await settings_of(log, partition)
    pools = tuple(sorted(settings.pools))
    return RestoredGroup(name, partition, tuple(settings.events()), read, pools, settings.policies())


async def settings_of(log: Log, partition: int) -> tuple[PoolSettings, ControlRead]:
    """Return the settings of a group, and the records from which they follow. Raises LogError."""
    begin, end = await log.begin(CONTROL.name, partition), await log.end(CONTROL.name, partition)
    settings, read = PoolSettings(), ControlRead()
    if begin and (state := await oldest_world_state(log, partition)) is not None:
        settings.restore(state)
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
            settings.apply(event)  # an ingress accepts only policies that the owner allows
    return settings, read


async def write_group(log: Log, group: RestoredGroup, at_us: int) -> None:
    """Append a group to the log of a new namespace, and check that the log has the settings of the group.

    The placement, with `at_us` of Unix time, is appended last, so a router that finds the group finds its settings.
    """
    await log.append([Draft(CONTROL.name, group.partition, encode(CONTROL, event)) for event in group.events])
    written, _ = await settings_of(log, group.partition)
    if tuple(written.events()) != group.events:
        raise LogError(
            f"the records on {CONTROL.name}/{group.partition} do not give the settings of {group.name}: does another"
            " process write to this namespace? Stop it, and restore into another namespace"
        )
    placed = GroupPlaced(group=group.name, partition=group.partition, at_us=at_us)
    await log.append([Draft(GROUPS.name, PARTITION, encode(GROUPS, placed), group.name.encode())])
