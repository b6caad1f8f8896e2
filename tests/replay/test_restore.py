"""A restored namespace has the groups and the settings of the recorded log, and an owner applies them."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from forebay.core.routing.policies import RoundRobin
from forebay.events.codec import encode
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    Command,
    ControlEvent,
    PolicySet,
    PoolConfigured,
    WorkerCommanded,
)
from forebay.events.decisions import RequestRouted
from forebay.events.groups import GroupPlaced
from forebay.events.pools import GridPool, PoolDrainSet, PoolGrid, PoolRouting, PoolRoutingConfigured
from forebay.events.topics import CONTROL, DECISIONS, GROUPS
from forebay.journal.groups import groups_of
from forebay.replay.group_settings import RestoreRefused, restored_groups, settings_of, write_group
from forebay.replay.record.slice import Window
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.replay.slices import journal_of, opened, sliced
from tests.system import BLOCK, MODEL, System, submitted, until, until_ended

CUSTOM = f"{RoundRobin.__module__}.{RoundRobin.__qualname__}"
GRID = PoolGrid(isl_max=100, target_max_ms=10, pools=(GridPool(pool="default", priority=1),), cells=(("default",),))


async def append(log: SqliteLog, partition: int, *events: ControlEvent) -> None:
    await log.append([Draft(CONTROL.name, partition, encode(CONTROL, event)) for event in events])


async def place(log: SqliteLog, group: str, partition: int) -> None:
    await log.append([Draft(GROUPS.name, 0, encode(GROUPS, GroupPlaced(group=group, partition=partition)))])


async def restored(source: SqliteLog) -> SqliteLog:
    """Return a new log in memory into which the groups of `source` were restored."""
    target = SqliteLog.open(None, namespace="new")
    for group in await restored_groups(source):
        await write_group(target, group, 5)
    return target


@pytest.fixture
def log() -> Iterator[SqliteLog]:
    """Return an empty log in memory."""
    with closing(SqliteLog.open(None)) as log:
        yield log


async def test_groups_keep_their_partitions_and_are_placed_last(log: SqliteLog) -> None:
    for name, partition in (("m", 2), ("n", 0)):
        await place(log, name, partition)
        pool = PoolConfigured(pool=f"pool-of-{name}", model=name, block_size=16)
        await append(log, partition, pool)
    await append(log, 2, PoolDrainSet(model="m", pool="pool-of-m", drained=True))
    groups = await restored_groups(log)
    assert [(one.name, one.partition, one.pools) for one in groups] == [
        ("n", 0, ("pool-of-n",)),
        ("m", 2, ("pool-of-m",)),
    ]
    assert {name: count for name, count in groups[1].counts.items() if count} == {"pools": 1, "drains": 1}
    with closing(await restored(log)) as target:
        assert await groups_of(target) == {"m": 2, "n": 0}
        assert target.topics() == [("control", 0, 1), ("control", 2, 2), ("groups", 0, 2)]


async def test_commands_and_undecodable_records_are_counted_and_not_restored(log: SqliteLog) -> None:
    command = WorkerCommanded(
        command_id="c", model="m", command=Command(action="clear_kv_blocks"), reply_slot=0, timeout_us=1
    )
    await append(log, 0, PoolConfigured(pool="default", model="m", block_size=16), command)
    await log.append([Draft(CONTROL.name, 0, b'{"type": "control.of_a_newer_version"}')])
    (group,) = await restored_groups(log)
    assert (group.read.settings, group.read.commands, group.read.undecodable) == (1, 1, 1)
    assert [type(event) for event in group.events] == [PoolConfigured]


async def test_custom_policies_are_named(log: SqliteLog) -> None:
    pool = PoolConfigured(pool="default", model="m", block_size=16)
    await append(log, 0, pool, PolicySet(model="m", pool="default", mode=CUSTOM))
    (group,) = await restored_groups(log)
    assert group.policies == (CUSTOM,)


async def test_an_empty_log_has_nothing_to_restore(log: SqliteLog) -> None:
    with pytest.raises(RestoreRefused, match="the log has no group"):
        await restored_groups(log)


async def test_a_namespace_that_another_process_changes_is_not_completed(log: SqliteLog) -> None:
    await append(log, 0, PoolConfigured(pool="default", model="m", block_size=16))
    (group,) = await restored_groups(log)
    with closing(SqliteLog.open(None)) as target:
        await append(target, 0, PoolConfigured(pool="foreign", model="m", block_size=16))
        with pytest.raises(LogError, match="does another process write to this namespace"):
            await write_group(target, group, 5)
        assert target.next_offset(GROUPS.name, 0) == 0


@pytest.fixture
async def source(tmp_path: Path) -> Path:
    """Return the log of a system whose settings an operator has changed, half of them before its newest snapshot."""
    path = tmp_path / "source.db"
    with closing(SqliteLog.open(path)) as log:
        async with System(log).started(2) as system, system.owned(snapshot_every=6) as owner:
            await until(lambda: len(owner.world.fleet) == 2)
            early = PolicySet(model=MODEL, pool="default", mode="round-robin", operator="ann")
            await append(log, 0, early, PoolRoutingConfigured(model=MODEL, routing=PoolRouting(grids=(GRID,))))
            for number in range(20):
                system.send(submitted(f"r{number}", [number] * 8))
                await until_ended(system, f"r{number}")
            thresholds = BusyThresholds(active_prefill_tokens_threshold=9_999)
            await append(log, 0, BusyThresholdsSet(model=MODEL, thresholds=thresholds))
            await append(log, 0, PoolDrainSet(model=MODEL, pool="old", drained=True))
            for number in range(20, 30):
                system.send(submitted(f"r{number}", [number] * 8))
                await until_ended(system, f"r{number}")
            await until(lambda: not len(owner.world.requests))
    return path


async def test_a_recording_that_begins_at_a_snapshot_has_all_settings(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "slice.rec"
    with opened(source) as log:
        wanted, _ = await settings_of(log, 0)
        contents = await sliced(log, out, Window(from_us=journal_of(source)[-12].at_us))
    assert contents.groups[0].start > 0
    with opened(out) as recording:
        assert await recording.begin(CONTROL.name, 0) > 0, "earlier changes are only in the snapshot"
        with closing(await restored(recording)) as target:
            found, _ = await settings_of(target, 0)
    assert found.snapshot() == wanted.snapshot()


async def test_an_owner_serves_a_restored_namespace_with_its_settings(source: Path) -> None:
    with opened(source) as log:
        wanted, _ = await settings_of(log, 0)
        target = await restored(log)
    assert target.next_offset(DECISIONS.name, 0) == 0
    with closing(target):
        async with System(target).started(2) as system, system.owned(pool=None) as owner:
            await until(lambda: len(owner.world.fleet) == 2)
            assert owner.world.settings.snapshot() == wanted.snapshot(), "the owner does not reset the settings"
            assert owner.world.pools["default"].block_size == BLOCK
            system.send(submitted("r", [1] * 8))
            await until_ended(system, "r")
            (routed,) = system.decisions(RequestRouted)
            assert routed.mode == "round-robin"
