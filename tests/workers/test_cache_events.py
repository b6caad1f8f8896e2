"""Cache events of a worker: numbering, bounded records, re-announcements, shared stores and measured costs."""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import runtime
from forebay.engine_model.model import Removed, Stored
from forebay.engine_model.steps import EngineLoad, StoreChange
from forebay.events.base import unpack_u64
from forebay.events.codec import decode
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    CacheEvent,
    StoreBlocksAdded,
    StoreBlocksRemoved,
    StoreEvent,
    StoreKvEvent,
)
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.topics import KV_EVENTS, METRICS, PROGRESS, TOKENS
from forebay.events.work import ReannounceCache
from forebay.transport.base import Draft, LogError
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.runtime import cache_events
from forebay.workers.runtime.cache_events import COSTS_INTERVAL_S, CacheEvents, CostReports, StoreEvents, chains
from forebay.workers.runtime.worker import Worker
from tests.harness.fake_runtime import FakeRuntime
from tests.harness.faulty_log import FaultyLog
from tests.workers.conftest import Scene, until, work_item
from tests.workers.hosted import HOSTED_SPEC

EPOCH = 7


def spec(**changes: Any) -> WorkerSpec:
    return msgspec.structs.replace(HOSTED_SPEC, **changes)


def generated(drafts: list[Draft]) -> list[Any]:
    return [decode(KV_EVENTS, draft.value) for draft in drafts]


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


blocks = st.lists(st.integers(1, 12), min_size=1, max_size=5, unique=True).map(tuple)
changes = st.lists(
    st.tuples(
        st.integers(0, 1),
        st.one_of(st.builds(Stored, st.none() | st.integers(1, 12), blocks), st.builds(Removed, blocks)),
    ),
    max_size=30,
)


@given(changes, st.integers(0, 1))
def test_reannouncement_equals_the_announced_cache(history: list[tuple[int, Stored | Removed]], requested: int) -> None:
    events = CacheEvents(spec(dp_size=2), EPOCH, 0)
    log: list[CacheEvent] = []
    held: dict[int, set[int]] = {0: set(), 1: set()}
    for rank, change in history:
        log += generated(events.changes(rank, [change]))
        held[rank] = held[rank] | set(change.hashes) if isinstance(change, Stored) else held[rank] - set(change.hashes)
    anew = generated(events.reannouncement(requested, 0))
    assert type(anew[0]) is CacheCleared
    assert all(type(event) is BlocksStored for event in anew[1:])
    assert {event.rank for event in anew} == {requested}
    assert cached(anew) == held[requested]
    hashes = [
        block for event in anew[1:] if isinstance(event, BlocksStored) for block in unpack_u64(event.sequence_hashes)
    ]
    assert len(hashes) == len(held[requested])
    for rank in (0, 1):
        numbers = [event.seq for event in log + anew if event.rank == rank]
        assert numbers == list(range(1, len(numbers) + 1))
    assert {(event.worker_id, event.worker_epoch) for event in anew} == {("w1", EPOCH)}


def test_reannouncement_keeps_chains() -> None:
    parents = {1: None, 2: 1, 3: 2, 4: 2, 5: None, 6: 99}
    assert chains(parents) == [Stored(None, (6,)), Stored(None, (5,)), Stored(None, (1, 2, 4)), Stored(2, (3,))]


def test_a_circle_of_parents_loses_no_block() -> None:
    found = chains({1: 3, 2: 1, 3: 2, 4: 3})
    assert sorted(block for chain in found for block in chain.hashes) == [1, 2, 3, 4]
    assert found[0].parent is None


def test_every_record_fits_and_continues_the_previous_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "EVENT_HASHES_MAX", 3)
    events = CacheEvents(spec(), EPOCH, 0)
    stored = generated(events.changes(0, [Stored(None, tuple(range(1, 9)))]))
    assert [event.parent_hash for event in stored if isinstance(event, BlocksStored)] == [None, 3, 6]
    anew = generated(events.reannouncement(0, 0))
    assert [event.seq for event in anew] == [4, 5, 6, 7]
    assert [len(unpack_u64(event.sequence_hashes)) for event in anew[1:] if isinstance(event, BlocksStored)] == [
        3,
        3,
        2,
    ]
    removed = generated(events.changes(0, [Removed((1, 2, 3, 4))]))
    assert [(type(event), event.seq) for event in removed] == [(BlocksRemoved, 8), (BlocksRemoved, 9)]


def test_no_events_without_kv_events() -> None:
    events = CacheEvents(spec(kv_events=False), EPOCH, 0)
    assert events.changes(0, [Stored(None, (1,))]) + events.reannouncement(0, 0) == []


IDLE = EngineLoad(0, 0, 0, 64)
STORE = "store-1"


def store_spec(**changes: Any) -> WorkerSpec:
    return spec(**{"kv_store": STORE, **changes})


def facts(events: Sequence[StoreEvent]) -> list[tuple[type[StoreKvEvent], list[int]]]:
    return [(type(event), unpack_u64(event.sequence_hashes)) for event in events]


def test_changes_are_encoded_in_order_and_in_bounded_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "EVENT_HASHES_MAX", 2)
    changes = [StoreChange(stored=(1, 2, 3)), StoreChange(stored=(5,), removed=(1,), stale=(2, 4))]
    events = generated(StoreEvents(store_spec(), 0).changes(changes))
    assert facts(events) == [
        (StoreBlocksAdded, [1, 2]),
        (StoreBlocksAdded, [3]),
        (StoreBlocksRemoved, [1]),
        (StoreBlocksRemoved, [2, 4]),
        (StoreBlocksAdded, [5]),
    ]
    assert [event.stale for event in events if isinstance(event, StoreBlocksRemoved)] == [False, True]
    assert {(event.store, event.worker_id) for event in events} == {(STORE, "w1")}
    announced = generated(StoreEvents(store_spec(), 0).announcement(range(1, 6)))
    assert facts(announced) == [(StoreBlocksAdded, [1, 2]), (StoreBlocksAdded, [3, 4]), (StoreBlocksAdded, [5])]


def test_an_empty_store_is_announced_so_that_the_owner_learns_its_name() -> None:
    assert facts(generated(StoreEvents(store_spec(), 0).announcement(()))) == [(StoreBlocksAdded, [])]


@pytest.mark.parametrize("changes", [{"kv_store": ""}, {"kv_events": False}])
def test_workers_without_a_store_or_events_report_nothing(changes: dict[str, Any]) -> None:
    events = StoreEvents(store_spec(**changes), 0)
    assert events.announcement((1,)) == []
    assert events.changes([StoreChange(stored=(1,))]) == []


def costs(prefill_us: float = 100.0, fixed_us: float = 50.0, block_us: float = 10.0, tier: Any = "host") -> TierCosts:
    return TierCosts(prefill_block_us=prefill_us, tiers=(TierCost(tier=tier, fixed_us=fixed_us, block_us=block_us),))


@pytest.mark.parametrize(
    ("later", "is_reported"),
    [
        (costs(), False),
        (costs(prefill_us=109.9), False),
        (costs(prefill_us=110.0), True),
        (costs(prefill_us=90.0), True),
        (costs(fixed_us=55.0), True),
        (costs(block_us=8.9), True),
        (costs(tier="disk"), True),
        (TierCosts(prefill_block_us=100.0), True),
    ],
    ids=str,
)
def test_costs_are_reported_on_a_change_of_a_tenth(later: TierCosts, is_reported: bool) -> None:
    clock = FakeRuntime()
    with runtime.use(clock):
        reports = CostReports(store_spec(), 7, 0)
        (first,) = reports.report(0, costs(), 5)
        event = decode(METRICS, first.value)
        assert event == TierCostsMeasured(worker_id="w1", worker_epoch=7, costs=costs(), at_us=5)
        clock.monotonic_shift_s = COSTS_INTERVAL_S
        assert bool(reports.report(0, later, 6)) == is_reported


def test_costs_are_reported_at_most_once_per_interval_and_rank() -> None:
    clock = FakeRuntime()
    with runtime.use(clock):
        reports = CostReports(store_spec(dp_size=2), 7, 0)
        assert [len(reports.report(rank, costs(), 0)) for rank in (0, 1)] == [1, 1]
        clock.monotonic_shift_s = COSTS_INTERVAL_S - 1.0
        assert reports.report(0, costs(prefill_us=900.0), 0) == []
        clock.monotonic_shift_s = COSTS_INTERVAL_S + 1.0
        assert len(reports.report(0, costs(prefill_us=900.0), 0)) == 1


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
        await scene.ended(*[f"r{number}" for number in range(20)])
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
        await scene.ended("r")
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
        await scene.finish("a", [1], 1)
    assert (worker.counters.other_epoch, worker.counters.unknown_rank, worker.counters.reannounced) == (1, 1, 0)
    assert scene.kv() == []


class OrderLog(FaultyLog):
    """Log that notes the topics of each append of a worker, and those of the records that follow."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log, crash_after=sys.maxsize)
        self.topics: set[str] = set()
        self.following: set[str] = set()

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        self.topics.update(draft.topic for draft in drafts)
        self.following.update(draft.topic for draft in then)
        super().append_soon(drafts, then)


async def test_all_other_records_of_a_batch_follow_its_tokens(scene: Scene, log: SqliteLog) -> None:
    order = OrderLog(log)
    async with scene.serving(scene.worker(log=order)):
        await scene.finish("a", [1] * 8, 1)
    assert (order.topics, order.following) == ({TOKENS.name}, {KV_EVENTS.name, METRICS.name, PROGRESS.name})


class RefusingLog(FaultyLog):
    """Log that rejects every append with KV events, from one append on."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log, crash_after=sys.maxsize)
        self.refusing = False

    def append_soon(self, drafts: Sequence[Draft], then: Sequence[Draft] = ()) -> None:
        if self.refusing and any(draft.topic == KV_EVENTS.name for draft in (*drafts, *then)):
            raise LogError("not taken")
        super().append_soon(drafts, then)


async def test_worker_ends_without_a_gap_if_kv_events_cannot_be_appended(scene: Scene, log: SqliteLog) -> None:
    refusing = RefusingLog(log)
    worker = scene.worker(log=refusing, dp_size=2)
    task = asyncio.create_task(worker.run())
    await scene.admit(worker, "t1")
    await scene.finish("a", [1] * 8, 1)
    refusing.refusing = True
    for name, rank in (("b", 0), ("c", 1), ("d", 0)):
        await scene.ask(name, [ord(name)] * 8, 1, rank=rank)
    with pytest.raises(ExceptionGroup) as caught:
        await task
    assert caught.group_contains(LogError, match="not taken")
    refusing.refusing = False
    numbers = [event.seq for event in scene.kv()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert numbers
    await until(lambda: scene.lease() is None)
