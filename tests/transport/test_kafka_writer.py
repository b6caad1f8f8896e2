"""`KafkaLog` on a broker that does not respond: the bytes that wait for it are bounded, and the log can be closed."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import cast

import pytest
from aiokafka import TopicPartition

from forebay.events.topics import PROGRESS, TOKENS
from forebay.transport.base import Draft, LogFull
from forebay.transport.kafka import log as log_module
from forebay.transport.kafka import producer as kafka
from forebay.transport.kafka import wire
from forebay.transport.kafka import writer as writer_module
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from tests.system import until

LIMIT = 10_000
SIZE = 1_000  # bytes of a record
PATIENCE_S = 20.0


class Wire:
    """Connections to a broker that does not respond until `is_back` is set."""

    def __init__(self) -> None:
        self.is_back = asyncio.Event()

    async def partitions(self, topic: str) -> set[int]:
        del topic
        await self.is_back.wait()
        return {0}

    async def close(self) -> None:
        self.is_back.set()


class Producer:
    """Producer of that broker. `written` has the values of each topic."""

    def __init__(self) -> None:
        self.wire = Wire()
        self.written: dict[str, list[bytes]] = {}

    async def append(self, place: TopicPartition, drafts: Sequence[tuple[Draft, int]], size: int) -> int:
        assert place.partition == 0
        assert size == sum(len(one.value) for one, _ in drafts)
        values = self.written.setdefault(place.topic, [])
        values += [one.value for one, _ in drafts]
        return len(values) - len(drafts)

    async def stop(self) -> None:
        pass


@pytest.fixture
def producer() -> Producer:
    return Producer()


@pytest.fixture
async def log(producer: Producer, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[KafkaLog]:
    monkeypatch.setattr(writer_module, "BUFFER_BYTES_MAX", LIMIT)
    log = KafkaLog(
        KafkaSettings("127.0.0.1:1", "n"), cast("wire.Wire", producer.wire), cast("kafka.Producer", producer)
    )
    yield log
    producer.wire.is_back.set()
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
    producer.wire.is_back.set()
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
    producer.wire.is_back.set()
    assert await log.append([draft(TOKENS.name, 1, 1)]) == [1]
    assert len(producer.written["n.tokens"]) == 2
    assert "n.progress" not in producer.written


async def test_a_follower_that_is_too_large_rejects_the_whole_append(log: KafkaLog, producer: Producer) -> None:
    with pytest.raises(ValueError, match="the limit is"):
        log.append_soon([draft(TOKENS.name, 0)], then=[draft(PROGRESS.name, 0, writer_module.RECORD_BYTES_MAX + 1)])
    producer.wire.is_back.set()
    assert await log.append([draft(TOKENS.name, 1)]) == [0]
    assert log.failure is None


async def test_closing_a_log_ends_if_its_connections_stay_open(
    log: KafkaLog, producer: Producer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hung broker does not read the last bytes that were sent, so the connection does not close."""

    async def close() -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(log_module, "DISCONNECT_S", 0.0)
    monkeypatch.setattr(producer.wire, "close", close)
    async with asyncio.timeout(PATIENCE_S):
        await log.close()


async def test_a_cancelled_start_disconnects(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, closed = asyncio.Event(), asyncio.Event()

    class SilentWire:
        """Connections to a broker that assigns no producer id."""

        def __init__(self, settings: KafkaSettings) -> None:
            del settings

        async def start(self) -> None:
            pass

        async def producer_id(self) -> wire.ProducerId:
            asked.set()
            await asyncio.Event().wait()
            raise AssertionError

        async def close(self) -> None:
            closed.set()

    monkeypatch.setattr(log_module, "Wire", SilentWire)
    opening = asyncio.create_task(KafkaLog.open(KafkaSettings("127.0.0.1:1", "n")))
    await asked.wait()
    opening.cancel()
    await asyncio.wait([opening])
    assert opening.cancelled()
    assert closed.is_set()
