"""A replica of the indexer has the state of the owner, whatever Faust delivers, and says so if it cannot have it."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import Phase, given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from forebay.core.restore import restore
from forebay.core.routing.policies import CustomPolicies
from forebay.core.step import advance
from forebay.core.world import CORE_VERSION, World
from forebay.events.codec import encode
from forebay.events.decisions import Advanced, Sealed
from forebay.events.groups import GroupPlaced
from forebay.events.snapshots import Chunk
from forebay.events.topics import DECISIONS, GROUPS, INPUTS, SNAPSHOTS
from forebay.journal import records as recorded
from forebay.journal import snapshots
from forebay.live.indexer import delivered_log, replica
from forebay.live.indexer.delivered_log import TOPICS, DeliveredLog
from forebay.live.indexer.indexer import Indexer
from forebay.live.indexer.replica import IndexerMetrics, Replica
from forebay.live.owner import owner as owner_module
from forebay.transport.base import Draft, Log, LogError, Record
from forebay.transport.directory import Directory
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import Driver, histories, perform_all
from tests.depth import examples
from tests.live.shared import (
    OTHER,
    Altered,
    Program,
    SharedLog,
    admit,
    background,
    dearer,
    followed,
    journal_end,
    serve,
    serve_unsealed,
    write,
)
from tests.system import MODEL, System, until

READ_MAX = 100_000
PATIENCE_S = 10.0
deliveries = st.lists(
    st.tuples(st.sampled_from([topic.name for topic in TOPICS]), st.integers(0, 40), st.integers(1, 12)), max_size=40
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(delivered_log, "QUIET_S", 0.001)
    monkeypatch.setattr(replica, "RETRY_S", 0.001)


def replica_of(log: Log, registry: CollectorRegistry | None = None) -> Replica:
    return Replica(log, MODEL, 0, {}, IndexerMetrics({}, registry or CollectorRegistry()))


def state(world: World) -> tuple[int, int, int]:
    return world.digest(), world.seq, world.now_us


class Unannounced(SharedLog):
    """A log whose journal seems to have one record until it `is_open`, so that a reader learns of others from Faust."""

    is_open = False

    async def end(self, topic: str, partition: int) -> int:
        end = await super().end(topic, partition)
        return end if self.is_open or topic != DECISIONS.name else 1


@examples(0.5, phases=(Phase.generate,))  # shrinking a wait takes minutes
@given(histories, deliveries)
def test_a_replica_equals_its_owner_whatever_faust_delivers(
    history: list[tuple[str, Any]], delivered: list[tuple[str, int, int]]
) -> None:
    """Faust may skip, repeat and reorder batches, and deliver journal records before the events that they count."""
    drive = perform_all(Driver().fleet("a", "b"), history)

    async def run() -> None:
        log = SqliteLog.open(None)
        await write(log, drive)
        owner = (await followed(log)).world
        await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, advance(owner)))])
        shared = Unannounced(log)
        ours = replica_of(shared)
        async with background(ours.run()):
            for topic, begin, count in delivered:
                if records := log.records(topic, 0, begin, count):
                    ours.log.deliver(records)
                await asyncio.sleep(0)
            shared.is_open = True
            await until(lambda: ours.position().proven_at == journal_end(log) - 1)
        assert ours.problem is None
        assert state(ours.world) == state(owner)
        assert ours.position().lag_records == 0
        log.close()

    with (
        patch.object(delivered_log, "RECORDS_MAX", 8),
        patch("forebay.transport.base.PAGE_RECORDS", 3),
        patch.object(recorded, "PAGE_RECORDS", 3),
        patch.object(delivered_log, "QUIET_S", 0.001),
        patch.object(replica.logger, "error") as failed,
    ):
        asyncio.run(run())
    failed.assert_not_called()


STORED = [Record(INPUTS[0].name, 0, offset, 0, b"%d" % offset) for offset in range(30)]
operations = st.lists(st.tuples(st.booleans(), st.integers(0, 29), st.integers(1, 9)), max_size=40)


@given(operations)
def test_a_read_returns_the_records_of_the_log_whatever_was_delivered(
    given_operations: list[tuple[bool, int, int]],
) -> None:
    async def run() -> None:
        log = SqliteLog.open(None)
        await log.append([Draft(one.topic, 0, one.value) for one in STORED])
        delivered = DeliveredLog(log, 0)
        for is_delivery, offset, count in given_operations:
            if is_delivery:
                delivered.deliver(STORED[offset : offset + count])
                continue
            found = await delivered.read(INPUTS[0].name, 0, offset, count)
            assert found
            assert [one.value for one in found] == [one.value for one in STORED[offset : offset + len(found)]]
            assert len(found) <= count
        log.close()

    asyncio.run(run())


class Counted(SharedLog):
    """A log that lists the topics that were read."""

    def __init__(self, log: Log) -> None:
        super().__init__(log)
        self.read_topics: list[str] = []

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        self.read_topics.append(topic)
        return await super().read(topic, partition, offset, limit)


async def test_records_that_faust_delivers_in_order_are_not_read_from_the_log(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a", "b")
    counted = Counted(log)
    ours = replica_of(counted)
    for topic in TOPICS:
        ours.log.deliver(log.records(topic.name, 0, 0, READ_MAX))
    async with background(ours.run()):
        await until(lambda: ours.problem is None)
    assert not {topic.name for topic in INPUTS} & {*counted.read_topics}
    assert ours.position().journal_offset == journal_end(log)


async def test_a_run_of_records_is_bounded_by_number_and_bytes(
    unproven_log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader that is too far behind reads the log instead."""
    monkeypatch.setattr(delivered_log, "RECORDS_MAX", 4)
    monkeypatch.setattr(delivered_log, "BYTES_MAX", 100)
    topic = INPUTS[0].name
    sizes = [1, 1, 1, 1, 1, 40, 40, 40, 200, 1]
    await unproven_log.append([Draft(topic, 0, b"x" * size) for size in sizes])
    stored = unproven_log.records(topic, 0, 0, READ_MAX)
    counted = Counted(unproven_log)

    async def held(count: int) -> list[int]:
        """Return the offsets that are read without the log after `count` records were delivered."""
        delivered = DeliveredLog(counted, 0)
        delivered.deliver(stored[:count])
        counted.read_topics.clear()
        found = []
        for offset in range(count):
            records = await delivered.read(topic, 0, offset, 1)
            assert [one.offset for one in records] == [offset]
            if not counted.read_topics:
                found.append(offset)
            counted.read_topics.clear()
        return found

    assert [await held(count) for count in (4, 5, 8, 9, 10)] == [[0, 1, 2, 3], [1, 2, 3, 4], [6, 7], [], [9]]


def removed(log: Log) -> Log:
    """Return a log whose journal has lost its beginning, without a snapshot."""

    class Trimmed(SharedLog):
        async def begin(self, topic: str, partition: int) -> int:
            return 1 if topic == DECISIONS.name else await super().begin(topic, partition)

        async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
            if topic == DECISIONS.name and offset < 1:
                raise LogError("the first stored record is 1")
            return await super().read(topic, partition, offset, limit)

    return Trimmed(log)


def corrupt(log: Log) -> Log:
    return Altered(log, SNAPSHOTS.name, lambda value: value[:-1] + bytes([value[-1] ^ 1]))


@pytest.mark.parametrize(
    ("broken", "seals", "reason", "differences"),
    [
        (dearer, False, "cannot be derived again", True),
        (removed, False, "the first stored record is 1", False),
        (corrupt, True, "snapshot", False),
    ],
)
async def test_a_replica_that_cannot_follow_gives_the_reason_and_is_restored(
    log: SqliteLog,
    broken: Callable[[Log], Log],
    seals: bool,
    reason: str,
    differences: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with System(log).started(workers=2) as system, system.owned(dies=not seals) as owner:
        await serve(system, owner, "a")
    registry = CollectorRegistry()
    shared = SharedLog(broken(log))
    ours = replica_of(shared, registry)
    async with background(ours.run()):
        await until(lambda: caplog.text.count("is restored in") > 1)
        assert reason in str(ours.problem)
        shared.log = log  # somebody has repaired it
        await until(lambda: ours.problem is None)
        assert ours.position().journal_offset == journal_end(log)
    counted = registry.get_sample_value("forebay_indexer_digest_differences_total", {"group": MODEL})
    assert bool(counted) is differences


async def test_other_tasks_run_while_a_snapshot_is_restored(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    async with System(log).started(workers=2) as system, system.owned() as owner:
        await serve(system, owner, "a")
    begun, others_ran = threading.Event(), threading.Event()
    waited: list[bool] = []

    def restore_slowly(parts: list[Chunk], custom: CustomPolicies) -> World:
        begun.set()
        waited.append(others_ran.wait(PATIENCE_S))
        return restore(parts, custom)

    monkeypatch.setattr(snapshots, "restore", restore_slowly)
    ours = replica_of(log)
    async with background(ours.run()):
        await until(begun.is_set)
        others_ran.set()
        await until(lambda: ours.problem is None)
    assert waited == [True]


async def test_a_replica_waits_for_its_own_version_of_the_rules(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with System(log).started(workers=1) as system:
        await admit(system, 1)
        other = Program(monkeypatch, OTHER)
        await other.serve(system, "a", seals=False)
        ours = replica_of(log)
        async with background(ours.run()):
            await until(lambda: f"this indexer has version {CORE_VERSION}" in str(ours.problem))
        await other.serve(system, "b", seals=True)
        async with background(ours.run()), Program(monkeypatch, CORE_VERSION).owning(system, seals=True):
            await until(lambda: ours.problem is None)
            await until(lambda: len(ours.world.fleet) == 1)


async def test_every_digest_of_the_owner_proves_the_replica(log: SqliteLog) -> None:
    registry = CollectorRegistry()
    async with System(log).started(workers=2) as system:
        ours = replica_of(log, registry)
        async with background(ours.run()):
            async with system.owned(snapshot_every=3) as owner:
                await serve(system, owner, "a", "b", "c")
            end = journal_end(log)
            await until(lambda: ours.position().journal_offset == end)
    digests = system.decisions(Advanced | Sealed)
    assert len(digests) > 2
    assert registry.get_sample_value("forebay_indexer_digests_equal_total", {"group": MODEL}) == len(digests)
    assert ours.position().proven_at == end - 1
    restored = replica_of(log)
    async with background(restored.run()):
        await until(lambda: restored.problem is None)
    assert restored.position().proven_at is not None  # by the digest of the snapshot
    assert state(restored.world) == state(ours.world)


@pytest.mark.parametrize(("quiet_s", "unread_max"), [(0.001, 1 << 60), (1e9, 1)])
async def test_events_of_a_group_without_requests_become_part_of_the_state(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch, quiet_s: float, unread_max: int
) -> None:
    monkeypatch.setattr(owner_module, "QUIET_S", quiet_s)
    monkeypatch.setattr(owner_module, "UNREAD_MAX", unread_max)
    async with System(log).started(workers=2) as system:
        ours = replica_of(log)
        async with background(ours.run()), system.owned(fleet=2, heartbeats=True):
            await until(lambda: len(ours.world.fleet) == 2)


async def test_a_process_keeps_the_groups_that_faust_assigns_to_it(unproven_log: SqliteLog) -> None:
    log = unproven_log

    async def place(name: str, partition: int) -> None:
        value = encode(GROUPS, GroupPlaced(group=name, partition=partition))
        await log.append([Draft(GROUPS.name, 0, value, name.encode())])

    await place("x", 0)
    await place("y", 1)
    directory, registry = Directory(log), CollectorRegistry()
    await directory.start()
    indexer = Indexer(registry)
    assert "assigned no partitions" in str(indexer.why_not_ready())
    async with background(indexer.run(log, directory)):
        indexer.assign({0, 2}, {0: "http://here", 1: "http://there"})
        await until(lambda: indexer.find("x"))
        kept = indexer.find("x")
        assert (indexer.find("y"), indexer.groups()) == (None, {"x": "", "y": "http://there"})
        await until(lambda: indexer.why_not_ready() is None)
        await place("z", 2)
        await until(lambda: indexer.find("z"))
        indexer.assign({0, 1}, {2: "http://there"})  # as after a rebalance, in which Faust has revoked both
        await until(lambda: indexer.find("y"))
        assert (indexer.find("x"), indexer.find("z"), indexer.groups()["z"]) == (kept, None, "http://there")
        await until(lambda: registry.get_sample_value("forebay_indexer_following", {"group": "y"}) == 1)
        await log.append([Draft(GROUPS.name, 0, b"", b"y")])
        await until(lambda: not indexer.find("y"))
        indexer.assign((), {})  # as when Kafka no longer counts the process as a member
        await until(lambda: not indexer.replicas)
        assert set(indexer.groups().values()) == {""}
