"""Tiers of a rank: blocks go down and come back with the same bytes, and the changes say what is where.

Tiers that fail serve nothing wrong, no request waits twice for a dead tier, and every failure is counted.
"""

from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from forebay import runtime
from forebay.events.kv import LowerTier
from forebay.events.progress import OnboardedTokens
from forebay.kv_tiers.manager import TierRun
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.metrics import TierCounters, tier_metrics
from forebay.workers.kv_tiers.offload_manager import HIT_RATE_REQUESTS, OffloadManager
from forebay.workers.kv_tiers.transfers import HostMemory, LoadResult
from tests.workers.kv_tiers.cases import (
    BLOCK_BYTES,
    FaultyStore,
    ShiftedClock,
    identity,
    inject,
    name_of,
    rank,
    settings,
)

PROMPT = range(12)


@pytest.mark.parametrize("tier", ["host", "disk", "store"])
def test_offloaded_blocks_are_loaded_with_the_same_bytes(tier: LowerTier, tmp_path: Path) -> None:
    given = settings(tmp_path, host=20 * (tier == "host"), disk=20 * (tier == "disk"), store=tier == "store")
    with rank(given) as one:
        one.offload(PROMPT)
        assert one.offers == [1]
        assert one.held[tier] == {*PROMPT}
        result = one.load(range(20))
        assert (result.blocks, result.by_tier) == (12, {tier: 12})
        (onboarded,) = result.onboarded(16)
        assert onboarded == OnboardedTokens(tier=tier, tokens=12 * 16, us=result.us_by_tier[tier])
        counters = one.tiers.counters()
        assert (counters.matched_tokens, counters.onboarded_blocks[tier]) == (12 * 16, 12)
        assert counters.offloaded_blocks["device", tier] == 12
        assert counters.resident_blocks == {tier: 12}


def test_blocks_go_down_all_tiers_and_are_read_from_the_fastest(tmp_path: Path) -> None:
    with rank(settings(tmp_path, host=8, disk=16, store=True)) as one:
        one.offload(range(8))
        one.offload(range(100, 104))
        assert one.held["host"] == {0, 1, 2, 3, 100, 101, 102, 103}, "the end of a prompt is evicted first"
        assert one.held["disk"] == one.held["store"] == {*range(8), *range(100, 104)}
        assert one.match(range(8)) == [TierRun("host", 4), TierRun("disk", 4)]
        result = one.load(range(8))
        assert (result.blocks, result.by_tier) == (8, {"host": 4, "disk": 4})
        assert {part.tier for part in result.onboarded(16)} == {"host", "disk"}
        counters = one.tiers.counters()
        assert counters.offloaded_blocks["host", "disk"] == counters.offloaded_blocks["host", "store"] == 12
        assert counters.evicted["host"] == 4


def test_files_of_evicted_blocks_are_removed(tmp_path: Path) -> None:
    with rank(settings(tmp_path, disk=6)) as one:
        for first in range(0, 60, 3):
            one.offload(range(first, first + 3))
        assert len(one.held["disk"]) == 6
        files = {int(path.stem.rpartition("-")[2], 16) - 1 for path in (tmp_path / "disk").rglob("*.kv")}
        assert files == one.held["disk"] == one.resident("disk")


def test_hints_fill_the_gaps_between_known_blocks(tmp_path: Path) -> None:
    with rank(settings(tmp_path, host=16, store=True)) as one, rank(settings(tmp_path, store=True)) as two:
        two.offload(PROMPT)
        one.offload(PROMPT[3:5])
        one.offload(PROMPT[8:12])
        assert one.match(PROMPT, hinted=7) == [TierRun("store", 3), TierRun("host", 2), TierRun("store", 2)]
        assert one.resident("store") == {*PROMPT[3:5], *PROMPT[8:12]}, "a hint alone changes nothing"
        assert one.load(PROMPT, hinted=8).by_tier == {"store": 6, "host": 6}
        assert one.resident("store") == {*PROMPT}


def test_a_wrong_hint_is_a_miss_that_is_reported(tmp_path: Path) -> None:
    with rank(settings(tmp_path, store=True)) as one:
        one.offload(range(3))
        result = one.load(PROMPT, hinted=5)
        assert result.by_tier == {"store": 3}
        assert one.tiers.counters().misses["store", "missing"] == 2
        assert one.resident("store") == {0, 1, 2}


def test_the_quota_of_the_shared_store_is_reported(tmp_path: Path) -> None:
    with rank(settings(tmp_path, store=True, store_bytes=40 * (BLOCK_BYTES + 4096))) as one:
        for first in range(0, 200, 4):
            one.offload(range(first, first + 4))
        files = {int(path.stem.rpartition("-")[2], 16) - 1 for path in (tmp_path / "store").rglob("*.kv")}
        assert one.held["store"] == files == one.resident("store")
        assert one.tiers.counters().evicted["store"] == 200 - len(files) > 0


def test_offers_keep_their_memory_until_it_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stores = inject(monkeypatch)
    with rank(settings(tmp_path, disk=16)) as one:
        stores[0].gate.clear()
        one.offer(range(4))
        one.offer(range(4))
        assert one.offers == [2], "the second offer copies nothing, because the blocks are being written"
        assert one.match(range(4)) == []
        stores[0].gate.set()
        one.settle()
        assert one.offers == [2, 1]


def test_blocks_that_are_cleared_during_a_load_still_have_the_right_bytes(tmp_path: Path) -> None:
    with rank(settings(tmp_path, host=12)) as one:
        for _ in range(20):
            one.offload(PROMPT)
            found: list[int] = []
            one.begin_load(PROMPT, lambda result, found=found: found.append(result.blocks))  # type: ignore[misc]
            one.tiers.clear()
            one.offer(range(100, 112))
            one.settle()
            assert found == [12]
            one.tiers.clear()


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_a_tier_without_room_for_a_block_is_an_error(tier: str, tmp_path: Path) -> None:
    given = settings(tmp_path, host=1, disk=1)
    changed = {"host_bytes": 100} if tier == "host" else {"disk_bytes": 5_000}
    fields = {name: getattr(given, name) for name in given.__slots__} | changed
    with pytest.raises(EngineError, match=f"a {tier} tier of .* bytes has no room for one KV block of"):
        OffloadManager(type(given)(**fields), identity(), wake=lambda: None)


def test_hit_rates_count_requests(tmp_path: Path) -> None:
    with rank(settings(tmp_path, host=16, disk=16)) as one:
        one.tiers.observe_request(10, 4, {"host": 2})
        one.tiers.observe_request(10, 0, {"disk": 4})
        counters: TierCounters = one.tiers.counters()
        assert counters.hit_rates == {"device": 0.2, "host": 0.1, "disk": 0.2}
        for _ in range(HIT_RATE_REQUESTS):
            one.tiers.observe_request(4, 1, {})
        assert one.tiers.counters().hit_rates == {"device": 0.25, "host": 0, "disk": 0}


def test_a_slot_is_free_after_its_last_use() -> None:
    memory = HostMemory(2, BLOCK_BYTES)
    first, second = memory.reserve(2)
    memory.put(name_of(1), first)
    memory.give_back(second)
    assert memory.acquire([name_of(1)]) == memory.acquire([name_of(1)]) == [first]
    memory.remove([name_of(1), name_of(9)])
    assert memory.reserve(1) == [second]
    memory.give_back(second)
    memory.release([first])
    assert memory.reserve(1) == [second]
    memory.release([first])
    assert memory.reserve(1) == [first]


def exported(*ranks: TierCounters) -> list[str]:
    registry = CollectorRegistry()
    registry.register(tier_metrics("w", {rank: lambda one=one: one for rank, one in enumerate(ranks)}))  # type: ignore[misc]
    return generate_latest(registry).decode().splitlines()


def test_metrics_have_the_names_of_kvbm() -> None:
    one = TierCounters(
        matched_tokens=640,
        offloaded_blocks=Counter({("device", "host"): 1, ("host", "disk"): 2, ("disk", "store"): 3}),
        onboarded_blocks=Counter(store=4),
        onboarded_bytes=Counter(store=4096),
        misses=Counter({("store", "missing"): 5, ("store", "corrupt"): 1, ("disk", "corrupt"): 7}),
        write_failures=Counter({("store", "full"): 8}),
        load_us=Counter(disk=1_500_000),
        skipped=Counter(filter=9),
        resident_blocks={"host": 10},
        pinned_blocks={"host": 3},
        hit_rates={"store": 0.25},
    )
    lines = exported(one, TierCounters())
    found = [line.split('{rank="0",worker_id="w"} ') for line in lines if line.startswith("kvbm_")]
    assert {name.removeprefix("kvbm_"): float(value) for name, *values in found for value in values} == {
        **dict.fromkeys(("offload_blocks_d2d", "offload_blocks_d2o", "offload_blocks_h2o", "onboard_blocks_h2d"), 0.0),
        **dict.fromkeys(("onboard_blocks_d2d", "offload_bytes_object", "host_cache_hit_rate"), 0.0),
        "disk_cache_hit_rate": 0.0,
        "matched_tokens": 640,
        "offload_blocks_d2h": 1,
        "offload_blocks_h2d": 2,
        "onboard_blocks_o2d": 4,
        "onboard_bytes_object": 4096,
        "object_read_failures": 6,
        "object_write_failures": 8,
        "object_cache_hit_rate": 0.25,
    }
    assert 'kvbm_matched_tokens{rank="1",worker_id="w"} 0.0' in lines
    for line in (
        'offloaded_blocks_total{rank="0",source="disk",tier="store",worker_id="w"} 3.0',
        'misses_total{rank="0",reason="corrupt",tier="disk",worker_id="w"} 7.0',
        'load_seconds_total{rank="0",tier="disk",worker_id="w"} 1.5',
        'skipped_blocks_total{rank="0",reason="filter",worker_id="w"} 9.0',
        'resident_blocks{rank="0",tier="host",worker_id="w"} 10.0',
        'pinned_blocks{rank="0",tier="host",worker_id="w"} 3.0',
    ):
        assert f"forebay_tier_{line}" in lines


EIGHT = range(8)


@pytest.fixture
def clock() -> Iterator[ShiftedClock]:
    one = ShiftedClock()
    with runtime.use(one):
        yield one


@pytest.fixture
def stores(monkeypatch: pytest.MonkeyPatch) -> list[FaultyStore]:
    return inject(monkeypatch)


@pytest.mark.parametrize("reason", ["denied", "failed", "raise"])
def test_a_tier_that_fails_costs_nothing_until_it_is_tried_again(
    reason: str, tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, store=True)) as one:
        one.offload(EIGHT)
        (store,) = stores
        store.reason = reason
        for _ in range(3):
            assert one.match(EIGHT) == [TierRun("store", 8)], "a failure does not show that the blocks are gone"
            assert one.load(EIGHT).blocks == 0
        calls = store.calls
        assert one.match(EIGHT) == []
        assert store.calls == calls
        store.reason = ""
        clock.ahead_s += 1.1
        assert one.load(EIGHT).blocks == 8
        counted = "failed" if reason == "raise" else reason
        assert one.tiers.counters().misses == {("store", counted): 24}


def test_a_tier_that_still_fails_is_suspended_for_longer(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, store=True)) as one:
        one.offload(EIGHT)
        stores[0].reason = "deadline"
        for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
            assert one.load(EIGHT).blocks == 0, "one call that runs into its deadline is enough"
            clock.ahead_s += pause_s - 0.5
            assert one.match(EIGHT) == []
            clock.ahead_s += 0.6
            assert one.match(EIGHT) != []


def test_a_dead_store_ends_writes_to_it_but_not_to_host(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, host=32, store=True)) as one:
        (store,) = stores
        store.reason = "deadline"
        one.offload(EIGHT)
        calls = store.calls
        for first in range(100, 120, 4):
            one.offload(range(first, first + 4))
        assert store.calls == calls, "no write waits for the deadline of a dead store"
        assert one.held["host"] >= {*EIGHT, *range(100, 120)}
        assert one.held["store"] == set()
        store.reason = ""
        clock.ahead_s += 1.1
        one.offload(EIGHT)
        assert one.held["store"] == {*EIGHT}


def test_a_full_disk_ends_writes_but_not_reads(tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock) -> None:
    with rank(settings(tmp_path, disk=64)) as one:
        one.offload(EIGHT)
        (disk,) = stores
        disk.reason, disk.reading = "full", False
        for first in range(100, 112, 4):
            one.offload(range(first, first + 4))
        calls = disk.calls
        one.offload(range(200, 204))
        assert disk.calls == calls
        assert one.load(EIGHT).by_tier == {"disk": 8}
        assert one.tiers.counters().write_failures == {("disk", "full"): 12}
        disk.reason = ""
        clock.ahead_s += 1.1
        one.offload(range(200, 204))
        assert one.held["disk"] == {*EIGHT, *range(200, 204)}


def test_blocks_pass_a_suspended_disk_on_their_way_to_the_store(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, host=32, disk=32, store=True)) as one:
        disk, _ = stores
        disk.reason = "deadline"
        one.offload(EIGHT)
        assert (one.held["disk"], one.held["store"]) == (set(), {*EIGHT}), "host memory still has them"
        one.offload(range(100, 104))
        assert one.held["store"] == {*EIGHT, *range(100, 104)}


def test_blocks_that_the_disk_lost_do_not_reach_the_store(tmp_path: Path, stores: list[FaultyStore]) -> None:
    with rank(settings(tmp_path, disk=32, store=True)) as one:
        disk, store = stores
        disk.reason, disk.writing = "missing", False
        one.offload(EIGHT)
        assert (one.held["disk"], one.held["store"]) == (set(), set())
        assert (store.calls, one.tiers.counters().misses) == (0, {("disk", "missing"): 8})


def test_blocks_that_are_cleared_while_they_are_written_leave_no_file(
    tmp_path: Path, stores: list[FaultyStore]
) -> None:
    with rank(settings(tmp_path, disk=32)) as one:
        stores[0].gate.clear()
        one.offer(EIGHT)
        one.tiers.clear()
        stores[0].gate.set()
        one.settle()
        assert one.held["disk"] == set()
        assert not [*(tmp_path / "disk").rglob("*.kv")]


def test_a_load_that_waited_too_long_for_a_thread_ends_without_a_read(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, store=True, read_s=5.0)) as one:
        one.offload(EIGHT)
        (store,) = stores
        store.gate.clear()
        calls = store.calls
        found: list[LoadResult] = []
        for _ in range(6):
            one.begin_load(EIGHT, found.append)
        clock.ahead_s += 5.1
        store.gate.set()
        one.settle()
        assert sorted(result.blocks for result in found)[:4] == [0, 0, 0, 0]
        assert store.calls - calls <= 2, "as many as there are threads"


def test_too_many_loads_are_not_begun(tmp_path: Path, stores: list[FaultyStore]) -> None:
    with rank(settings(tmp_path, store=True)) as one:
        one.offload(range(2))
        stores[0].gate.clear()
        found: list[LoadResult] = []
        for _ in range(256):
            one.begin_load(range(2), found.append)
        assert one.match(range(2)) == []
        stores[0].gate.set()
        one.settle()
        assert [result.blocks for result in found] == [2] * 256
        assert one.match(range(2)) != []


@pytest.mark.parametrize("tiers", [("disk",), ("store",), ("disk", "store")])
@pytest.mark.parametrize("damage", ["flip", "foreign", "delete"])
def test_damaged_files_are_misses(tiers: tuple[LowerTier, ...], damage: str, tmp_path: Path) -> None:
    tier = tiers[0]
    given = settings(tmp_path, disk=32 * (tier == "disk"), store="store" in tiers)
    with rank(given) as one:
        one.offload(EIGHT)
        files = {int(path.stem.rpartition("-")[2], 16) - 1: path for path in (tmp_path / tier).rglob("*.kv")}
        data = bytearray(files[4 if damage == "foreign" else 5].read_bytes())
        data[-1] ^= 4 * (damage == "flip")
        files[5].write_bytes(data)
        if damage == "delete":
            files[5].unlink()
        loaded = one.load(EIGHT)
        assert loaded.by_tier == ({tier: 5} if len(tiers) == 1 else {"disk": 7, "store": 1})
        assert one.held[tier] == {*EIGHT} - {5}
        assert sum(one.tiers.counters().misses.values()) == 1
        one.offload(EIGHT)
        assert one.load(EIGHT).blocks == 8


def test_a_prefetch_of_stale_blocks_is_counted(tmp_path: Path) -> None:
    with rank(settings(tmp_path, host=32, store=True)) as one:
        one.tiers.prefetch([name_of(number) for number in EIGHT], 0, hinted=8)
        one.settle()
        assert one.held["host"] == set()
        assert one.resident("store") == set()
        counters = one.tiers.counters()
        assert (counters.misses["store", "missing"], counters.skipped["source"]) == (8, 8)
        one.offload(range(32))
        assert one.held["host"] == {*range(32)}, "all host memory is free"


def test_a_source_that_raises_ends_the_offer(tmp_path: Path) -> None:
    def memory(at: int) -> memoryview:
        raise RuntimeError(f"no block {at}")

    with rank(settings(tmp_path, host=16)) as one:
        one.tiers.offer([name_of(number) for number in EIGHT], memory, partial(one.offers.append, 1))
        one.settle()
        assert (one.offers, one.held["host"]) == ([1], set())
        one.offload(range(16))
        assert one.held["host"] == {*range(16)}
