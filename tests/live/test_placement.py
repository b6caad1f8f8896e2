"""Groups get partitions from leases, and all readers see the same directory."""

import asyncio
from collections.abc import AsyncIterator

import fakeredis
import pytest

from forebay.events.codec import decode, encode
from forebay.events.groups import GroupPlaced
from forebay.events.topics import GROUPS
from forebay.live.owner.metrics import PlacementMetrics
from forebay.live.router.placement import GroupPlacement
from forebay.transport.base import Draft
from forebay.transport.directory import Directory
from forebay.transport.redis.leases import RedisLeases, embedded_leases
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import SharedLog

LONG_MS = 60_000


@pytest.fixture
async def directory(log: SqliteLog) -> AsyncIterator[Directory]:
    started = Directory(SharedLog(log))
    await started.start()
    yield started
    started.close()


def lease(leases: RedisLeases, *groups: str) -> None:
    for group in groups:
        leases.acquire(group, "w", "t", b"", LONG_MS)


async def place(log: SqliteLog, group: str, partition: int) -> None:
    await log.append([Draft(GROUPS.name, 0, encode(GROUPS, GroupPlaced(group=group, partition=partition)))])


def placements(log: SqliteLog) -> list[tuple[bytes | None, str, int]]:
    records = log.records(GROUPS.name, 0, 0, 100)
    events = [(record.key, decode(GROUPS, record.value)) for record in records]
    return [(key, event.group, event.partition) for key, event in events]


async def test_groups_get_the_lowest_free_partition_once(log: SqliteLog, directory: Directory) -> None:
    leases = embedded_leases()
    placement = GroupPlacement(log, leases, directory, 4)
    lease(leases, "b", "a")
    await placement.update()
    await place(log, "elsewhere", 3)
    lease(leases, "c")
    for _ in range(3):
        await placement.update()
    assert placements(log) == [(b"a", "a", 0), (b"b", "b", 1), (None, "elsewhere", 3), (b"c", "c", 2)]
    assert [directory.partition_of(group) for group in ("a", "b", "c", "unknown")] == [0, 1, 2, None]
    assert [directory.group_in(partition) for partition in range(4)] == ["a", "b", "c", "elsewhere"]


async def test_without_a_free_partition_a_group_is_rejected_and_logged_once(
    log: SqliteLog, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    leases = embedded_leases()
    placement = GroupPlacement(log, leases, directory, 1)
    lease(leases, "a", "b", "c")
    for _ in range(3):
        await placement.update()
    assert placements(log) == [(b"a", "a", 0)]
    assert placement.refused == 2
    assert caplog.text.count("; serve it in another --namespace") == 2
    await place(log, "b", 0)
    await directory.reach(2)
    metrics = {metric.name: metric for metric in PlacementMetrics(placement, directory).collect()}
    assert metrics["forebay_groups"].samples[0].value == 1
    assert metrics["forebay_groups_refused"].samples[0].value == 2
    assert metrics["forebay_placements_ignored"].samples[0].labels == {"reason": "partition_taken"}


async def test_an_invalid_model_name_gets_no_partition(
    log: SqliteLog, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    leases = embedded_leases()
    placement = GroupPlacement(log, leases, directory, 4)
    bad = ("../x", "a\nb", "a\0b", " a", "a" * 257)
    lease(leases, *bad, "org/model:tag")
    for _ in range(2):
        await placement.update()
    assert placements(log) == [(b"org/model:tag", "org/model:tag", 0)]
    assert placement.refused == len(bad)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == len(bad)
    assert all(line.isprintable() for line in messages)


async def test_two_concurrent_placements_converge(log: SqliteLog, directory: Directory) -> None:
    """The second does not see the placements of the first; readers follow the log, and no partition is shared."""
    leases = embedded_leases()
    lease(leases, "a", "b")
    other = Directory(SharedLog(log))
    await other.start()
    both = [GroupPlacement(SharedLog(log), leases, seen, 4) for seen in (directory, other)]
    for _ in range(3):
        await asyncio.gather(*(placement.update() for placement in both))
    late = Directory(log)
    await late.start()
    assert late.groups.partitions == directory.groups.partitions == other.groups.partitions
    assert sorted(late.groups.partitions) == ["a", "b"]
    assert len(set(late.groups.partitions.values())) == 2
    other.close()
    late.close()


async def test_a_waiter_for_a_group_is_notified(log: SqliteLog, directory: Directory) -> None:
    changes = []
    directory.on_change = lambda: changes.append(dict(directory.groups.partitions))
    running = asyncio.create_task(directory.run())
    waiting = [asyncio.create_task(directory.placed(group)) for group in ("a", "b", "a")]
    await log.append([Draft(GROUPS.name, 0, b"no placement")])
    await place(log, "a", 5)
    await place(log, "b", 6)
    assert await asyncio.gather(*waiting) == [5, 6, 5]
    assert directory.undecodable == 1
    assert changes[-1] == {"a": 5, "b": 6}
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


async def test_unreadable_leases_change_nothing(
    log: SqliteLog, directory: Directory, caplog: pytest.LogCaptureFixture
) -> None:
    server = fakeredis.FakeServer()
    server.connected = False
    placement = GroupPlacement(log, RedisLeases(fakeredis.FakeRedis(server=server)), directory, 4)
    await placement.update()
    assert placements(log) == []
    assert "cannot be read" in caplog.text
