"""Events of a shared store and measured costs: what a worker announces, when, and to which owners."""

from collections.abc import Sequence
from typing import Any

import pytest

from forebay import runtime
from forebay.engine_model.steps import EngineLoad, FirstTokenStep, StoreChange
from forebay.events.base import pack_u64, unpack_u64
from forebay.events.codec import decode
from forebay.events.fleet import WorkerLost, WorkerSpec
from forebay.events.kv import StoreBlocksAdded, StoreBlocksRemoved, StoreEvent, StoreKvEvent
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.progress import FirstTokenEmitted, OnboardedTokens, PrefillFinished
from forebay.events.topics import FLEET, KV_EVENTS, METRICS
from forebay.events.transfer import Prefilled
from forebay.events.work import ReannounceCache, WorkItem
from forebay.transport.base import Draft
from forebay.workers.engine import EngineBatch, PromptPrefilled, Publish
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime import cache_events
from forebay.workers.runtime.cache_events import COSTS_INTERVAL_S, CostReports, StoreEvents
from forebay.workers.runtime.rank_buffer import RankBuffer
from forebay.workers.runtime.worker import Worker
from tests.harness.fake_runtime import FakeRuntime
from tests.workers.conftest import PARTITION, Scene, engine_config, until, work_item

IDLE = EngineLoad(0, 0, 0, 64)
STORE = "store-1"


def spec(**changes: Any) -> WorkerSpec:
    sizes: dict[str, Any] = {"block_size": 4, "kv_blocks_total": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    return WorkerSpec(worker_id="w1", model="m", **sizes, **{"kv_store": STORE, **changes})


def generated(drafts: list[Draft]) -> list[Any]:
    return [decode(KV_EVENTS, draft.value) for draft in drafts]


def facts(events: Sequence[StoreEvent]) -> list[tuple[type[StoreKvEvent], list[int]]]:
    return [(type(event), unpack_u64(event.sequence_hashes)) for event in events]


def test_changes_are_encoded_in_order_and_in_bounded_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_events, "EVENT_HASHES_MAX", 2)
    changes = [StoreChange(stored=(1, 2, 3)), StoreChange(stored=(5,), removed=(1,), stale=(2, 4))]
    events = generated(StoreEvents(spec(), 0).changes(changes))
    assert facts(events) == [
        (StoreBlocksAdded, [1, 2]),
        (StoreBlocksAdded, [3]),
        (StoreBlocksRemoved, [1]),
        (StoreBlocksRemoved, [2, 4]),
        (StoreBlocksAdded, [5]),
    ]
    assert [event.stale for event in events if isinstance(event, StoreBlocksRemoved)] == [False, True]
    assert {(event.store, event.worker_id) for event in events} == {(STORE, "w1")}
    announced = generated(StoreEvents(spec(), 0).announcement(range(1, 6)))
    assert facts(announced) == [(StoreBlocksAdded, [1, 2]), (StoreBlocksAdded, [3, 4]), (StoreBlocksAdded, [5])]


def test_an_empty_store_is_announced_so_that_the_owner_learns_its_name() -> None:
    assert facts(generated(StoreEvents(spec(), 0).announcement(()))) == [(StoreBlocksAdded, [])]


@pytest.mark.parametrize("changes", [{"kv_store": ""}, {"kv_events": False}])
def test_workers_without_a_store_or_events_report_nothing(changes: dict[str, Any]) -> None:
    events = StoreEvents(spec(**changes), 0)
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
        reports = CostReports(spec(), 7, 0)
        (first,) = reports.report(0, costs(), 5)
        event = decode(METRICS, first.value)
        assert event == TierCostsMeasured(worker_id="w1", worker_epoch=7, costs=costs(), at_us=5)
        clock.monotonic_shift_s = COSTS_INTERVAL_S
        assert bool(reports.report(0, later, 6)) == is_reported


def test_costs_are_reported_at_most_once_per_interval_and_rank() -> None:
    clock = FakeRuntime()
    with runtime.use(clock):
        reports = CostReports(spec(dp_size=2), 7, 0)
        assert [len(reports.report(rank, costs(), 0)) for rank in (0, 1)] == [1, 1]
        clock.monotonic_shift_s = COSTS_INTERVAL_S - 1.0
        assert reports.report(0, costs(prefill_us=900.0), 0) == []
        clock.monotonic_shift_s = COSTS_INTERVAL_S + 1.0
        assert len(reports.report(0, costs(prefill_us=900.0), 0)) == 1


def test_a_duration_that_was_zero_is_reported_once_it_is_measured() -> None:
    clock = FakeRuntime()
    with runtime.use(clock):
        reports = CostReports(spec(), 7, 0)
        assert len(reports.report(0, costs(prefill_us=0.0), 0)) == 1
        clock.monotonic_shift_s = COSTS_INTERVAL_S
        assert reports.report(0, costs(prefill_us=0.0), 0) == []
        assert len(reports.report(0, costs(prefill_us=0.1), 0)) == 1


class StoringEngine(MockEngine):
    """Mock engine with a shared store; the test publishes its batches."""

    def __init__(self) -> None:
        super().__init__(engine_config(), speedup=1000.0)
        self.blocks: list[int] = []
        self.publish: Publish | None = None
        self.items: list[WorkItem] = []

    def stored(self) -> Sequence[int]:
        return self.blocks

    async def run(self, publish: Publish) -> None:
        self.publish = publish
        await super().run(publish)

    def submit(self, item: WorkItem) -> None:
        self.items.append(item)

    def emit(self, **what: Any) -> None:
        assert self.publish is not None
        self.publish(EngineBatch(rank=0, load=IDLE, **what))


def storing(scene: Scene) -> tuple[Worker, StoringEngine]:
    engine = StoringEngine()
    return scene.worker(engine=engine, kv_store=STORE), engine


def in_store(scene: Scene) -> list[tuple[type[StoreKvEvent], list[int]]]:
    return facts([event for event in scene.kv() if isinstance(event, StoreBlocksAdded | StoreBlocksRemoved)])


async def test_each_epoch_begins_with_the_whole_store_and_a_resync_concerns_the_ranks_only(scene: Scene) -> None:
    worker, engine = storing(scene)
    engine.blocks = [1]
    async with scene.serving(worker) as epoch:
        await until(lambda: in_store(scene))
        await scene.send(ReannounceCache(owner_epoch=7, worker_epoch=epoch, rank=0))
        await until(lambda: worker.counters.reannounced)
        assert len(in_store(scene)) == 1
        await scene.append(FLEET, PARTITION, WorkerLost(owner_epoch=7, worker_id="w1", worker_epoch=epoch))
        await scene.admit(worker, "t1.2", owner_epoch=7)
        await until(lambda: len(in_store(scene)) == 2)


async def test_the_sources_of_a_prompt_are_passed_on(scene: Scene) -> None:
    worker, engine = storing(scene)
    loads = (OnboardedTokens(tier="store", tokens=8, us=120),)
    async with scene.serving(worker) as epoch:
        for name, stage in (("r", "aggregated"), ("p", "prefill")):
            await scene.send(work_item(name, list(range(12)), 2, worker_epoch=epoch, stage=stage, store_blocks=2))
        await until(lambda: len(engine.items) == 2)
        assert [item.store_blocks for item in engine.items] == [2, 2]
        kept = Prefilled(
            worker_id="w1", worker_epoch=epoch, model="m", connector="nixl", descriptor=b"x", tokens=12, lease_us=9
        )
        engine.emit(
            first_tokens=[FirstTokenStep("r", 1, 8, onboarded=loads)],
            prefilled=[PromptPrefilled("p", 1, kept, 8, loads)],
        )
        await until(lambda: scene.progress(FirstTokenEmitted) and scene.progress(PrefillFinished))
    assert [event.onboarded for event in scene.progress(FirstTokenEmitted)] == [loads]
    assert [event.onboarded for event in scene.progress(PrefillFinished)] == [loads]


def test_a_buffer_collects_tier_events_and_keeps_changes_of_the_store_on_a_reset() -> None:
    buffer, item = RankBuffer(0, 64), work_item("r", [1], 1)
    loads = (OnboardedTokens(tier="disk", tokens=4),)
    buffer.take()
    buffer.store_changed(StoreChange(stored=(1,)))
    buffer.tier_costs = costs()
    buffer.reset()
    buffer.began(item, 4, loads)
    batch = buffer.take()
    assert batch is not None
    assert list(batch.store_changes) == [StoreChange(stored=(1,))]
    assert batch.tier_costs == costs()
    assert [first.onboarded for first in batch.first_tokens] == [loads]
    assert buffer.take() is None


def test_packed_hashes_keep_all_64_bits() -> None:
    (event,) = generated(StoreEvents(spec(), 0).changes([StoreChange(stored=(2**64 - 1,))]))
    assert event.sequence_hashes == pack_u64([2**64 - 1])
