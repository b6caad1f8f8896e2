"""Re-announcements of a cache during work, and failed appends of KV events."""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from forebay.events.base import unpack_u64
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared
from forebay.events.progress import RequestFinished
from forebay.events.topics import KV_EVENTS
from forebay.events.work import ReannounceCache
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.runtime.worker import Worker
from tests.harness.faulty_log import FaultyLog
from tests.workers.conftest import Scene, until, work_item


def over(scene: Scene, *names: str) -> bool:
    return {end.request_id for end in scene.progress(RequestFinished)}.issuperset(names)


def cached(events: list[Any]) -> set[int]:
    """Return the blocks of one rank for a reader that requires parents first."""
    blocks: set[int] = set()
    for event in events:
        match event:
            case BlocksStored():
                assert event.parent_hash is None or event.parent_hash in blocks
                blocks.update(unpack_u64(event.sequence_hashes))
            case BlocksRemoved():
                blocks.difference_update(unpack_u64(event.sequence_hashes))
            case CacheCleared():
                blocks.clear()
    return blocks


def reannounced(worker: Worker, times: int) -> bool:
    return worker.counters.reannounced == times


async def test_cache_is_reannounced_during_work(scene: Scene) -> None:
    """All events before and after it add up, also with unpublished changes of the engine."""
    worker = scene.worker(dp_size=2, speedup=50.0)
    async with scene.serving(worker) as epoch:
        for number in range(20):
            item = work_item(f"r{number}", [number % 7, 0, 0, 0] * 3, 20, worker_epoch=epoch, rank=number % 2)
            await scene.send(item)
        await until(scene.kv)
        for turn in range(1, 6):
            await scene.send(ReannounceCache(owner_epoch=0, worker_epoch=epoch, rank=0))
            await until(partial(reannounced, worker, turn))
        await until(lambda: over(scene, *[f"r{number}" for number in range(20)]))
        await scene.send(ReannounceCache(owner_epoch=0, worker_epoch=epoch, rank=0))
        await until(partial(reannounced, worker, 6))
    events = [event for event in scene.kv() if event.rank == 0]
    assert [event.seq for event in events] == list(range(1, len(events) + 1))
    cleared = [at for at, event in enumerate(events) if type(event) is CacheCleared]
    assert len(cleared) == 6
    assert cached(events[: cleared[-1]]) == cached(events[cleared[-1] :]) == cached(events)
    for at in cleared[:-1]:
        reported = cached(events[:at])
        anew: set[int] = set()
        for event in events[at + 1 :]:
            if anew == reported:
                break
            assert type(event) is BlocksStored
            anew.update(unpack_u64(event.sequence_hashes))
        assert anew == reported
    assert all(type(event) is not CacheCleared for event in scene.kv() if event.rank == 1)


async def test_sequence_numbers_of_others_are_skipped(scene: Scene) -> None:
    worker = scene.worker()
    async with scene.serving(worker) as epoch:
        await scene.send(work_item("r", list(range(12)), 1, worker_epoch=epoch))
        await until(lambda: over(scene, "r"))
        generated = cached(scene.kv())
        for turn, above_seq in enumerate((100, 7), 1):
            await scene.send(ReannounceCache(owner_epoch=0, worker_epoch=epoch, rank=0, above_seq=above_seq))
            await until(partial(reannounced, worker, turn))
    anew = [event for event in scene.kv() if event.seq > 100]
    assert [event.seq for event in anew] == list(range(101, 101 + len(anew)))
    assert [type(event) for event in anew].count(CacheCleared) == 2
    assert cached(anew) == generated


async def test_unknown_rank_is_not_reannounced(scene: Scene) -> None:
    worker = scene.worker()
    async with scene.serving(worker) as epoch:
        await scene.send(ReannounceCache(owner_epoch=0, worker_epoch=epoch + 1, rank=0))
        await scene.send(ReannounceCache(owner_epoch=0, worker_epoch=epoch, rank=1))
        await scene.send(work_item("a", [1], 1, worker_epoch=epoch))
        await until(lambda: over(scene, "a"))
    assert (worker.counters.other_epoch, worker.counters.unknown_rank, worker.counters.reannounced) == (1, 1, 0)
    assert scene.kv() == []


async def test_worker_without_kv_events_does_not_reannounce(scene: Scene) -> None:
    worker = scene.worker(kv_events=False)
    async with scene.serving(worker) as epoch:
        await scene.send(work_item("a", list(range(8)), 1, worker_epoch=epoch))
        await scene.send(ReannounceCache(owner_epoch=0, worker_epoch=epoch, rank=0))
        await until(lambda: over(scene, "a") and worker.counters.reannounced)
    assert scene.kv() == []


class RefusingLog(FaultyLog):
    """Log that rejects every append with KV events, from one append on."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log, crash_after=sys.maxsize)
        self.refusing = False

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        if self.refusing and any(draft.topic == KV_EVENTS.name for draft in drafts):
            raise LogError("not taken")
        super().append_soon(drafts, then)


async def test_worker_ends_without_a_gap_if_kv_events_cannot_be_appended(scene: Scene, log: SqliteLog) -> None:
    refusing = RefusingLog(log)
    worker = scene.worker(log=refusing, dp_size=2)
    task = asyncio.create_task(worker.run())
    epoch = await scene.admit(worker, "t1")
    await scene.send(work_item("a", [1] * 8, 1, worker_epoch=epoch))
    await until(lambda: over(scene, "a"))
    refusing.refusing = True
    for name, rank in (("b", 0), ("c", 1), ("d", 0)):
        await scene.send(work_item(name, [ord(name)] * 8, 1, worker_epoch=epoch, rank=rank))
    with pytest.raises(ExceptionGroup) as caught:
        await task
    assert caught.group_contains(LogError, match="not taken")
    refusing.refusing = False
    numbers = [event.seq for event in scene.kv()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers
    await until(lambda: scene.lease() is None)
