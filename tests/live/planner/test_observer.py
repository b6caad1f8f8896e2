"""The planner's observer follows the topics of groups, from any moment of their history."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import pytest

from forebay.core.world import CORE_VERSION
from forebay.events.base import Event
from forebay.events.codec import encode
from forebay.events.decisions import OwnerClaimed, SnapshotTaken
from forebay.events.fleet import WorkerJoined, WorkerSpec
from forebay.events.groups import GroupPlaced
from forebay.events.progress import FirstTokenEmitted, RequestFinished
from forebay.events.scaling import PoolObserved, PoolScaling
from forebay.events.topics import DECISIONS, FLEET, GROUPS, METRICS, PROGRESS, REQUESTS, Topic
from forebay.live.owner.owner import Owner
from forebay.live.planner.observer import PoolObserver
from forebay.transport.base import Draft, Log, LogError, Tail, Wake
from forebay.transport.sqlite.log import SqliteLog
from tests.core.scaling.scene import routed
from tests.live.shared import SharedLog
from tests.system import MODEL, System, submitted, until

POOL = PoolScaling(group=MODEL, pool="default")
PROMPT = list(range(12))


class TrimmedLog(SharedLog):
    """A log of which retention removed the records before these offsets of partition 0."""

    def __init__(self, log: Log, begins: Mapping[str, int]) -> None:
        super().__init__(log)
        self._begins = begins

    async def begin(self, topic: str, partition: int) -> int:
        return self._begins.get(topic, 0)


async def append(log: SqliteLog, topic: Topic, *events: Event) -> None:
    await log.append([Draft(topic.name, 0, encode(topic, event)) for event in events])


async def place(log: SqliteLog, group: str = MODEL, partition: int = 0) -> None:
    await log.append([Draft(GROUPS.name, 0, encode(GROUPS, GroupPlaced(group=group, partition=partition)))])


@asynccontextmanager
async def served(log: SqliteLog, *names: str) -> AsyncIterator[tuple[System, Owner]]:
    """Run a placed group with two workers that has served requests."""
    await place(log)
    async with System(log).started(2) as system, system.owned(snapshot_every=5, fleet=2) as owner:
        for name in names:
            await serve(system, name)
        yield system, owner


async def serve(system: System, name: str) -> None:
    """Serve a request of four output tokens."""
    await system.serve(name, PROMPT, max_tokens=4)


class Observed:
    """Everything that an observer has observed so far."""

    def __init__(self, observer: PoolObserver) -> None:
        self.observer = observer
        self.seen: list[PoolObserved] = []

    async def until(self, condition: Callable[[list[PoolObserved]], object]) -> list[PoolObserved]:
        """Observe until the observations meet the condition."""

        def is_met() -> object:
            self.seen += self.observer.observe()
            return condition(self.seen)

        await until(is_met)
        return self.seen


@asynccontextmanager
async def observing(log: Log, *pools: PoolScaling) -> AsyncIterator[Observed]:
    observer = PoolObserver(log, pools or (POOL,))
    running = asyncio.create_task(observer.run())
    try:
        yield Observed(observer)
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_requests_and_workers_are_observed(log: SqliteLog) -> None:
    async with served(log) as (system, _), observing(log) as observed:
        idle = (await observed.until(lambda seen: seen))[-1]
        assert (idle.ready, idle.requests, idle.isl) == (2, 0, None)
        assert [one.worker_id for one in idle.workers] == ["w0", "w1"]
        await serve(system, "r")
        seen = await observed.until(lambda seen: any(one.osl for one in seen))
        assert [(one.requests, one.isl) for one in seen if one.requests] == [(1, 12)]
        assert [one.osl for one in seen if one.osl] == [4]
        assert sum(one.ttft_ms is not None for one in seen) == 1
        assert sum(one.itl_ms is not None for one in seen) == 1
        assert observed.observer.forgotten == observed.observer.undecodable == 0


async def test_an_observer_that_starts_late_knows_the_workers_and_counts_only_new_requests(log: SqliteLog) -> None:
    async with served(log, *(f"r{number}" for number in range(8))) as (system, _):
        await until(lambda: system.decisions(SnapshotTaken))
        async with observing(TrimmedLog(log, {FLEET.name: 2})) as observed:
            assert (await observed.until(lambda seen: seen))[-1].ready == 2
            await serve(system, "late")
            seen = await observed.until(lambda seen: any(one.osl for one in seen))
            assert sum(one.requests for one in seen) == 1


async def test_a_request_in_flight_at_the_start_has_no_time_to_first_token(unproven_log: SqliteLog) -> None:
    log = unproven_log
    await place(log)
    spec = WorkerSpec(
        worker_id="w", model=MODEL, block_size=4, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=64
    )
    ids: dict[str, Any] = {"request_id": "r", "attempt": 1, "worker_id": "w", "worker_epoch": 0, "owner_epoch": 0}
    await append(log, FLEET, WorkerJoined(owner_epoch=0, spec=spec, lease="l", slot=0, from_offset=0))
    await append(log, REQUESTS, submitted("r", PROMPT, max_tokens=10))
    await append(log, DECISIONS, OwnerClaimed(owner_id="o", core_version=CORE_VERSION), routed("r", "w"))
    async with observing(log) as observed:
        await observed.until(lambda seen: seen)
        await append(
            log, PROGRESS, FirstTokenEmitted(**ids), RequestFinished(**ids, finish_reason="stop", output_tokens=9)
        )
        seen = await observed.until(lambda seen: any(one.osl for one in seen))
        assert [one.osl for one in seen if one.osl] == [9]
        assert not any(one.requests or one.ttft_ms is not None for one in seen)


async def test_a_worker_that_leaves_is_no_longer_ready(log: SqliteLog) -> None:
    async with served(log, "r") as (system, _), observing(log) as observed:
        await observed.until(lambda seen: seen and seen[-1].ready == 2)
        await system.stop_worker("w0")
        seen = await observed.until(lambda seen: seen and seen[-1].ready == 1)
        assert [one.worker_id for one in seen[-1].workers] == ["w1"]


async def test_tails_that_fetch_over_a_network_are_followed(log: SqliteLog) -> None:
    async with served(log, "r") as (system, _), observing(SharedLog(log)) as observed:
        await observed.until(lambda seen: seen)
        await serve(system, "late")
        seen = await observed.until(lambda seen: any(one.osl for one in seen))
        assert sum(one.requests for one in seen) == 1


async def test_an_interval_that_was_not_followed_from_its_beginning_is_not_observed(log: SqliteLog) -> None:
    tails: dict[str, int] = {}

    class NotingLog(SharedLog):
        def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> Tail:
            tails[topic] = offset
            return super().tail(topic, partition, offset, wake)

    async with served(log, "before") as (system, _):
        ends = {topic.name: log.next_offset(topic.name, 0) for topic in (REQUESTS, FLEET)}
        async with observing(NotingLog(log)) as observed:
            await until(lambda: PROGRESS.name in tails)
            assert {topic: tails[topic] for topic in ends} == ends
            await serve(system, "r")
            assert observed.observer.observe() == ()
            await observed.until(lambda seen: seen)
        assert observed.observer.observe() == (), "nobody follows the topics any more"


async def test_a_group_is_observed_once_it_is_placed(log: SqliteLog) -> None:
    other = PoolScaling(group="other", pool="default")
    async with served(log, "r"), observing(log, other, POOL) as observed:
        seen = await observed.until(lambda seen: seen)
        assert {one.group for one in seen} == {MODEL}
        await place(log, "other", 1)
        await observed.until(lambda seen: seen[-1].group == MODEL and len(seen) > 1 and seen[-2].group == "other")
        assert [one.ready for one in observed.seen[-2:]] == [0, 2]


async def test_records_that_do_not_decode_are_counted(log: SqliteLog) -> None:
    async with served(log) as (system, _), observing(log) as observed:
        await observed.until(lambda seen: seen)
        await log.append([Draft(topic.name, 0, b"?") for topic in (REQUESTS, PROGRESS, METRICS)])
        await serve(system, "r")
        await observed.until(lambda seen: any(one.osl for one in seen))
        await until(lambda: observed.observer.undecodable == 3)


async def test_a_log_without_the_beginning_of_the_fleet_is_refused(log: SqliteLog) -> None:
    async with served(log):
        with pytest.raises(LogError, match="fleet/0 begins at offset 1"):
            await PoolObserver(TrimmedLog(log, {FLEET.name: 1}), (POOL,)).run()


async def test_topics_without_their_beginning_are_followed_from_what_is_left(log: SqliteLog) -> None:
    async with served(log, "r"), observing(TrimmedLog(log, {METRICS.name: 1})) as observed:
        assert (await observed.until(lambda seen: seen))[-1].ready == 2


async def test_a_log_that_fails_ends_the_observer(log: SqliteLog) -> None:
    class FailingLog(SharedLog):
        async def end(self, topic: str, partition: int) -> int:
            if topic == PROGRESS.name:
                raise LogError("Kafka cannot be read")
            return await super().end(topic, partition)

    async with served(log):
        with pytest.raises(LogError, match="Kafka"):
            await PoolObserver(FailingLog(log), (POOL,)).run()
