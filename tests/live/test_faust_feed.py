"""Tails fed by Faust yield each record once and in order, whatever Faust skips, repeats or never delivers."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from forebay.live.router import faust_feed
from forebay.live.router.faust_feed import FaustLog, FedTail, Feed
from forebay.transport.base import Draft, LogError, Record
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.faulty_log import Crashed
from tests.system import until

FED, PLAIN = "kv-events", "requests"


class Scene:
    """A log, the records that Faust has delivered from it, and a reader."""

    def __init__(self, log: SqliteLog) -> None:
        self.log = log
        self.feed = Feed()
        self.feed.assign({0})
        self.faust_log = FaustLog(log, self.feed, [FED])
        self.taken: list[int] = []

    async def write(self, count: int) -> list[Record]:
        """Append records whose value is their offset."""
        first = self.log.next_offset(FED, 0)
        await self.log.append([Draft(FED, 0, str(first + number).encode()) for number in range(count)])
        return self.log.records(FED, 0, first, count)

    def tail(self, offset: int = 0) -> FedTail:
        tail = self.faust_log.tail(FED, 0, offset, asyncio.Event())
        assert isinstance(tail, FedTail)
        return tail

    async def read(self, tail: FedTail, end: int) -> None:
        """Take records until the tail has reached `end`."""

        def reached() -> bool:
            while len(tail):
                self.taken += [int(record.value) for record in tail.take(7)]
            return bool(self.taken) and self.taken[-1] == end - 1

        await until(reached)


@pytest.fixture
async def scene(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Scene]:
    monkeypatch.setattr(faust_feed, "STILL_S", 0.01)
    log = SqliteLog.open(None)
    yield Scene(log)
    log.close()


async def test_earlier_records_are_read_from_the_log_and_later_ones_from_faust(scene: Scene) -> None:
    await scene.write(1_200)
    tail = scene.tail(3)
    await scene.read(tail, 1_200)
    for record in await scene.write(5):
        scene.feed.push(record)
    await scene.read(tail, 1_205)
    assert scene.taken == list(range(3, 1_205))
    tail.close()


async def test_records_that_faust_repeats_or_skips_are_delivered_once(scene: Scene) -> None:
    seed = 20261121
    print(f"seed {seed}")
    rng = random.Random(seed)
    tail = scene.tail()
    for _ in range(60):
        records = await scene.write(rng.randrange(1, 12))
        # Deliver a random subset, some records twice, and sometimes old records.
        brought = [record for record in records if rng.random() < 0.7] + rng.sample(records, 1)
        for record in sorted(brought, key=lambda record: record.offset):
            scene.feed.push(record)
        if rng.random() < 0.3:
            await asyncio.sleep(0)
            while len(tail):
                scene.taken += [int(record.value) for record in tail.take(5)]
    end = scene.log.next_offset(FED, 0)
    await scene.read(tail, end)
    assert scene.taken == list(range(end))
    tail.close()


async def test_records_that_faust_never_delivers_are_read_from_the_log(scene: Scene) -> None:
    tail = scene.tail()
    await scene.write(1)
    await scene.read(tail, 1)
    await scene.write(3)
    await scene.read(tail, 4)
    assert scene.taken == [0, 1, 2, 3]
    tail.close()


async def test_a_rebalance_makes_a_tail_look_for_records_at_once(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faust_feed, "STILL_S", 3_600.0)
    await scene.write(1)
    tail = scene.tail()
    await scene.read(tail, 1)
    await scene.write(1)
    scene.feed.hurry()
    await scene.read(tail, 2)
    await scene.write(1)
    scene.feed.assign({0})
    await scene.read(tail, 3)
    tail.close()


async def test_a_slow_reader_buffers_a_bounded_number_of_records(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(faust_feed, "BUFFER_RECORDS_MAX", 50)
    monkeypatch.setattr(faust_feed, "PAGE_RECORDS", 20)
    tail = scene.tail()
    for _ in range(20):
        for record in await scene.write(10):
            scene.feed.push(record)
        await asyncio.sleep(0)
        assert len(tail) < 50 + 20
    await scene.read(tail, 200)
    assert scene.taken == list(range(200))
    tail.close()


async def test_a_log_read_error_is_raised_to_the_reader(scene: Scene) -> None:
    await scene.write(3)
    tail = scene.tail()
    scene.log.close()
    await until(lambda: len(tail))
    with pytest.raises((LogError, Crashed)):
        tail.take(1)
    tail.close()


async def test_other_topics_are_read_from_the_log_directly(scene: Scene) -> None:
    await scene.faust_log.append([Draft(PLAIN, 0, b"0")])
    scene.faust_log.append_soon([Draft(PLAIN, 0, b"1")])
    assert await scene.faust_log.end(PLAIN, 0) == 2
    assert await scene.faust_log.begin(PLAIN, 0) == 0
    tail = scene.faust_log.tail(PLAIN, 0, 0, asyncio.Event())
    assert not isinstance(tail, FedTail)
    assert [record.value for record in tail.take(9)] == [
        record.value for record in await scene.faust_log.read(PLAIN, 0, 0, 9)
    ]
