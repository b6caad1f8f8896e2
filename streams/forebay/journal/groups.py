"""List the groups of a log and the configurations of their pools."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress

from forebay.core.state.groups import Groups
from forebay.events.codec import DecodeError
from forebay.events.control import PolicySet, PoolConfigured
from forebay.events.fleet import WorkerJoined, WorkerLost
from forebay.events.snapshots import WorldState
from forebay.events.topics import CONTROL, DECISIONS, FLEET, GROUPS, SNAPSHOTS
from forebay.journal.claims import valid_claims
from forebay.journal.snapshots import snapshots_taken, state_of
from forebay.transport.base import Log, Record, events_of, records_of
from forebay.transport.directory import PARTITION, apply_placement
from forebay.transport.heartbeats import owner_of
from forebay.transport.sqlite.log import SqliteLog


async def groups_of(log: Log) -> dict[str, int]:
    """Return the control partition of each group in `log`. Raises LogError.

    The single group of an embedded log has no record on `groups`. It is named after its model, and its name is empty
    until a pool is configured.
    """
    recording = log.recording if isinstance(log, SqliteLog) else None
    if recording is not None:
        return {group.name: group.partition for group in recording.groups}
    placed = Groups()
    async for record in _placements(log):
        with suppress(DecodeError):  # the directory of a live system ignores foreign records, too
            apply_placement(placed, record)
    if placed.partitions or not isinstance(log, SqliteLog):
        return dict(sorted(placed.partitions.items()))
    pools = await pools_of(log, 0)
    return {pools[0].model if pools else "": 0}


async def partitions_of(log: Log) -> set[int]:
    """Return the control partitions of all groups, also of removed ones, whose records remain. Raises LogError."""
    found = set((await groups_of(log)).values())
    if isinstance(log, SqliteLog) and log.recording is not None:
        return found
    return found | {event.partition async for _, event in events_of(log, GROUPS, PARTITION)}


async def groups_with_workers(log: Log, placed: Mapping[str, int]) -> list[str]:
    """Return those of the groups that have ready workers now; of a log file, those of its last start. Raises LogError.

    All groups are returned if none has workers, and of a recording, whose groups made decisions in its window.
    """
    if isinstance(log, SqliteLog):
        records = [] if log.recording else [record async for record in _placements(log)]
        # A start appends the placements of its models together.
        found = [(record.key or b"").decode() for record in records if record.at_us == records[-1].at_us]
    else:
        owners = await asyncio.gather(*(owner_of(log, group, number) for group, number in placed.items()))
        found = [one.group for one in owners if one and one.ready_aggregated + one.ready_prefill + one.ready_decode]
    return [group for group in placed if group in found] or list(placed)


async def workers_of(log: Log, partition: int) -> set[str]:
    """Return the workers that have joined a group and are not lost. Raises LogError."""
    found: set[str] = set()
    async for _, event in events_of(log, FLEET, partition):
        if isinstance(event, WorkerJoined):
            found.add(event.spec.worker_id)
        elif isinstance(event, WorkerLost):
            found.discard(event.worker_id)
    return found


async def _placements(log: Log) -> AsyncIterator[Record]:
    begin, end = await log.begin(GROUPS.name, PARTITION), await log.end(GROUPS.name, PARTITION)
    async for record in records_of(log, GROUPS, PARTITION, begin, end):
        yield record


async def pools_of(log: Log, partition: int) -> list[PoolConfigured]:
    """Return every configuration that the pools of a group ever had, oldest first. Raises LogError.

    A policy that an operator set is a configuration, too. If retention removed the oldest records of `control`, the
    oldest snapshot supplies their configurations.
    """
    found: list[PoolConfigured] = []
    if await log.begin(CONTROL.name, partition) and (state := await oldest_world_state(log, partition)) is not None:
        found += state.pools
    newest = {pool.pool: pool for pool in found}
    async for _, event in events_of(log, CONTROL, partition):
        match event:
            case PoolConfigured():
                pool = event
            case PolicySet() if event.pool in newest:
                pool = newest[event.pool].with_mode(event.mode)
            case _:
                continue
        newest[pool.pool] = pool
        found.append(pool)
    return found


async def policies_run(log: Log, partition: int) -> set[str]:
    """Return the custom policies that any recorded owner of a group was allowed to run. Raises LogError."""
    begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
    state = await oldest_world_state(log, partition) if begin else None
    found = set() if state is None else set(state.owner_policies)
    async for valid in valid_claims(log, partition, begin, end):
        found.update(valid.claim.policies)
    return found


async def oldest_world_state(log: Log, partition: int) -> WorldState | None:
    """Return the state in the oldest complete snapshot of a log."""
    begin, end = await log.begin(DECISIONS.name, partition), await log.end(DECISIONS.name, partition)
    oldest_chunk = await log.begin(SNAPSHOTS.name, partition)
    async for _, taken in snapshots_taken(log, partition, begin, end):
        if taken.first_offset >= oldest_chunk:
            return await state_of(log, partition, taken)
    return None
