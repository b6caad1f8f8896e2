"""The bytes that wait for a broker are bounded, including those of records that follow other records."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from forebay.events.topics import PROGRESS, TOKENS
from forebay.transport.base import Draft, LogFull
from forebay.transport.kafka import writer as writer_module
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from tests.system import until

LIMIT = 10_000
SIZE = 1_000  # bytes of a record


class Batch:
    """Batch of any size."""

    def __init__(self) -> None:
        self.values: list[bytes] = []

    def append(self, *, value: bytes, **_: Any) -> object:
        self.values.append(value)
        return self

    def close(self) -> None:
        pass


class Producer:
    """Producer of a broker that does not respond until `is_back` is set. `written` has the values of each topic."""

    def __init__(self) -> None:
        self.is_back = asyncio.Event()
        self.written: dict[str, list[bytes]] = {}

    async def partitions_for(self, topic: str) -> set[int]:
        del topic
        await self.is_back.wait()
        return {0}

    def create_batch(self) -> Batch:
        return Batch()

    async def send_batch(self, batch: Batch, topic: str, partition: int) -> "asyncio.Future[Any]":
        assert partition == 0
        values = self.written.setdefault(topic, [])
        acknowledged = asyncio.get_running_loop().create_future()
        acknowledged.set_result(Written(len(values)))
        values += batch.values
        return acknowledged

    async def stop(self) -> None:
        self.is_back.set()


class Written:
    """Acknowledgement of a batch."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
async def log(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KafkaLog]:
    monkeypatch.setattr(writer_module, "BUFFER_BYTES_MAX", LIMIT)
    log = KafkaLog(KafkaSettings("127.0.0.1:1", "n"), producer)
    yield log
    producer.is_back.set()
    await log.close()


def draft(topic: str, value: int, size: int = SIZE) -> Draft:
    return Draft(topic, 0, str(value).encode().rjust(size))


def append_until_full(log: KafkaLog) -> int:
    """Append pairs of records of which one follows the other, and return how many pairs the log accepted."""
    for number in range(LIMIT):
        try:
            log.append_soon([draft(TOKENS.name, number)], then=[draft(PROGRESS.name, number)])
        except LogFull:
            return number
    raise AssertionError("the log accepts any number of records")


async def test_records_that_follow_others_count_towards_the_bound(log: KafkaLog, producer: Producer) -> None:
    count = append_until_full(log)
    assert count == LIMIT // (2 * SIZE)
    producer.is_back.set()
    await until(lambda: len(producer.written.get("n.progress", ())) == count)
    assert [int(value) for value in producer.written["n.progress"]] == list(range(count))
    assert append_until_full(log) == count


async def test_a_rejected_append_leaves_no_bytes_counted(log: KafkaLog, producer: Producer) -> None:
    for _ in range(20):
        with pytest.raises(LogFull):
            log.append_soon([draft(TOKENS.name, 0, LIMIT)], then=[draft(PROGRESS.name, 0)])
    log.append_soon([draft(TOKENS.name, 0, LIMIT - 1)])
    with pytest.raises(LogFull):
        log.append_soon([draft(TOKENS.name, 0, 2)])
    producer.is_back.set()
    assert await log.append([draft(TOKENS.name, 1, 1)]) == [1]
    assert len(producer.written["n.tokens"]) == 2
    assert "n.progress" not in producer.written


async def test_a_follower_that_is_too_large_rejects_the_whole_append(log: KafkaLog, producer: Producer) -> None:
    with pytest.raises(ValueError, match="the limit is"):
        log.append_soon([draft(TOKENS.name, 0)], then=[draft(PROGRESS.name, 0, writer_module.RECORD_BYTES_MAX + 1)])
    producer.is_back.set()
    assert await log.append([draft(TOKENS.name, 1)]) == [0]
    assert log.failure is None
