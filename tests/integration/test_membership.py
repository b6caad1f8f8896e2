"""Indexers stay members of their consumer group while idle, and report crashes of the consumer."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from aiokafka.errors import GroupAuthorizationFailedError

from forebay.live.indexer.faust_app import IndexerApp
from forebay.transport.base import LogError, LogUnavailable, Record
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics

PLAN = TopicPlan(groups=1, slots=2, replies=2, kafka_api=2)
POLL_INTERVAL_MS = 3_000  # the default is five minutes
PATIENCE_S = 90.0
URL = "http://127.0.0.1:1"


class Member:
    """Faust app of an indexer, with its current control partitions."""

    def __init__(self, settings: KafkaSettings) -> None:
        self.partitions: Collection[int] | None = None
        self.app = IndexerApp(settings, self, URL, POLL_INTERVAL_MS)  # type: ignore[arg-type]

    def assign(self, partitions: Collection[int], _addresses: Mapping[int, str]) -> None:
        self.partitions = partitions

    def deliver(self, partition: int, records: list[Record]) -> None:
        """Ignore records; these tests write none."""


@pytest.fixture
async def settings(kafka: str, namespace: str) -> KafkaSettings:
    settings = KafkaSettings(kafka, namespace)
    await create_topics(settings, PLAN, ["default"])
    return settings


@asynccontextmanager
async def member(settings: KafkaSettings) -> AsyncIterator[Member]:
    """Run a member of the consumer group of indexers."""
    joined = Member(settings)
    joined.app.finalize()
    await joined.app.start()
    try:
        yield joined
    finally:
        await joined.app.stop()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - Faust's callbacks set no event
            await asyncio.sleep(0.05)


async def test_a_member_writes_nothing_to_the_working_directory(
    settings: KafkaSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with member(settings) as joined:
        await until(lambda: joined.partitions == {0})
    assert await asyncio.to_thread(os.listdir, tmp_path) == []


async def test_an_idle_member_stays_beyond_the_poll_interval_and_takes_over(settings: KafkaSettings) -> None:
    async with member(settings) as one, member(settings) as other:
        await until(lambda: {0} in (one.partitions, other.partitions) and set() in (one.partitions, other.partitions))
        busy, idle = (one, other) if one.partitions else (other, one)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 4 * POLL_INTERVAL_MS / 1000
        while loop.time() < until_s:
            assert idle.app.is_member, "the idle member left the group"
            await asyncio.sleep(0.1)
        await busy.app.stop()
        await until(lambda: idle.partitions == {0})
        assert idle.app.is_member


async def test_a_crashed_app_is_reported(settings: KafkaSettings) -> None:
    async with member(settings) as joined:
        await until(lambda: joined.app.is_member)
        watching = asyncio.create_task(joined.app.until_broken())
        await joined.app.crash(RuntimeError("out of luck"))
        with pytest.raises(LogError, match="out of luck"):
            await asyncio.wait_for(watching, PATIENCE_S)
        assert not joined.app.is_member


async def test_an_indexer_joins_again_after_a_crash_of_its_app(settings: KafkaSettings) -> None:
    async with member(settings) as crashed:
        await until(lambda: crashed.partitions == {0})
        await crashed.app.crash(RuntimeError("out of luck"))
        with pytest.raises(LogUnavailable):
            await asyncio.wait_for(crashed.app.until_broken(), PATIENCE_S)
    async with member(settings) as joined:
        await until(lambda: joined.partitions == {0})


async def test_an_indexer_that_may_not_join_ends(settings: KafkaSettings) -> None:
    async with member(settings) as denied:
        await denied.app.crash(GroupAuthorizationFailedError("router"))
        with pytest.raises(LogError, match="GroupAuthorizationFailed") as caught:
            await asyncio.wait_for(denied.app.until_broken(), PATIENCE_S)
    assert not isinstance(caught.value, LogUnavailable)
