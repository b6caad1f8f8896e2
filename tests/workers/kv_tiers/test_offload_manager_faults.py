"""Tiers that fail: nothing is served wrong, nothing waits twice for a dead tier, and every failure is counted."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from random import Random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import runtime
from forebay.kv_tiers.manager import TierRun
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_tiers.transfers import LoadResult
from tests.workers.kv_tiers.cases import (
    BLOCK_BYTES,
    DrivenRank,
    FaultyStore,
    ShiftedClock,
    content,
    inject,
    name_of,
    rank,
    settings,
)

PROMPT = range(8)


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
        one.offload(PROMPT)
        (store,) = stores
        store.reason = reason
        for _ in range(3):
            assert one.match(PROMPT) == [TierRun("store", 8)], "a failure does not show that the blocks are gone"
            assert one.load(PROMPT).blocks == 0
        calls = store.calls
        assert one.match(PROMPT) == []
        assert store.calls == calls
        store.reason = ""
        clock.ahead_s += 1.1
        assert one.load(PROMPT).blocks == 8
        counted = "failed" if reason == "raise" else reason
        assert one.tiers.counters().misses == {("store", counted): 24}


def test_a_tier_that_still_fails_is_suspended_for_longer(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, store=True)) as one:
        one.offload(PROMPT)
        stores[0].reason = "deadline"
        for pause_s in (1, 2, 4, 8, 16, 32, 60, 60):
            assert one.load(PROMPT).blocks == 0, "one call that runs into its deadline is enough"
            clock.ahead_s += pause_s - 0.5
            assert one.match(PROMPT) == []
            clock.ahead_s += 0.6
            assert one.match(PROMPT) != []


def test_a_dead_store_ends_writes_to_it_but_not_to_host(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, host=32, store=True)) as one:
        (store,) = stores
        store.reason = "deadline"
        one.offload(PROMPT)
        calls = store.calls
        for first in range(100, 120, 4):
            one.offload(range(first, first + 4))
        assert store.calls == calls, "no write waits for the deadline of a dead store"
        assert one.held["host"] >= {*PROMPT, *range(100, 120)}
        assert one.held["store"] == set()
        store.reason = ""
        clock.ahead_s += 1.1
        one.offload(PROMPT)
        assert one.held["store"] == {*PROMPT}


def test_a_full_disk_ends_writes_but_not_reads(tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock) -> None:
    with rank(settings(tmp_path, disk=64)) as one:
        one.offload(PROMPT)
        (disk,) = stores
        disk.reason, disk.reading = "full", False
        for first in range(100, 112, 4):
            one.offload(range(first, first + 4))
        calls = disk.calls
        one.offload(range(200, 204))
        assert disk.calls == calls
        assert one.load(PROMPT).by_tier == {"disk": 8}
        assert one.tiers.counters().write_failures == {("disk", "full"): 12}
        disk.reason = ""
        clock.ahead_s += 1.1
        one.offload(range(200, 204))
        assert one.held["disk"] == {*PROMPT, *range(200, 204)}


def test_blocks_pass_a_suspended_disk_on_their_way_to_the_store(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, host=32, disk=32, store=True)) as one:
        disk, _ = stores
        disk.reason = "deadline"
        one.offload(PROMPT)
        assert (one.held["disk"], one.held["store"]) == (set(), {*PROMPT}), "host memory still has them"
        one.offload(range(100, 104))
        assert one.held["store"] == {*PROMPT, *range(100, 104)}


def test_without_host_memory_blocks_pass_a_suspended_disk_too(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, disk=32, store=True)) as one:
        disk, _ = stores
        disk.reason = "deadline"
        one.offload(PROMPT)
        assert one.held["store"] == set()
        one.offload(PROMPT)
        assert (one.held["disk"], one.held["store"]) == (set(), {*PROMPT})
        assert one.tiers.counters().offloaded_blocks["device", "store"] == 8


def test_blocks_that_the_disk_lost_do_not_reach_the_store(tmp_path: Path, stores: list[FaultyStore]) -> None:
    with rank(settings(tmp_path, disk=32, store=True)) as one:
        disk, store = stores
        disk.reason, disk.writing = "missing", False
        one.offload(PROMPT)
        assert (one.held["disk"], one.held["store"]) == (set(), set())
        assert (store.calls, one.tiers.counters().misses) == (0, {("disk", "missing"): 8})


def test_blocks_that_are_cleared_while_they_are_written_leave_no_file(
    tmp_path: Path, stores: list[FaultyStore]
) -> None:
    with rank(settings(tmp_path, disk=32)) as one:
        stores[0].gate.clear()
        one.offer(PROMPT)
        one.tiers.clear()
        stores[0].gate.set()
        one.settle()
        assert one.held["disk"] == set()
        assert not [*(tmp_path / "disk").rglob("*.kv")]


def test_a_load_that_waited_too_long_for_a_thread_ends_without_a_read(
    tmp_path: Path, stores: list[FaultyStore], clock: ShiftedClock
) -> None:
    with rank(settings(tmp_path, store=True, read_s=5.0)) as one:
        one.offload(PROMPT)
        (store,) = stores
        store.gate.clear()
        calls = store.calls
        found: list[LoadResult] = []
        for _ in range(6):
            one.begin_load(PROMPT, found.append)
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


def test_too_many_writes_are_skipped_and_counted(tmp_path: Path, stores: list[FaultyStore]) -> None:
    with rank(settings(tmp_path, disk=4000)) as one:
        stores[0].gate.clear()
        one.offer(range(1500))
        stores[0].gate.set()
        one.settle()
        assert one.held["disk"] == {*range(1024)}
        assert one.tiers.counters().skipped["busy"] == 476


@pytest.mark.parametrize("tier", ["disk", "store"])
@pytest.mark.parametrize("damage", ["truncate", "flip", "foreign", "newer", "delete"])
def test_damaged_files_are_misses(tier: Literal["disk", "store"], damage: str, tmp_path: Path) -> None:
    given = settings(tmp_path, disk=32) if tier == "disk" else settings(tmp_path, store=True)
    with rank(given) as one:
        one.offload(PROMPT)
        files = {int(path.stem.rpartition("-")[2], 16) - 1: path for path in (tmp_path / tier).rglob("*.kv")}
        data = bytearray(files[5].read_bytes())
        match damage:
            case "truncate":
                files[5].write_bytes(data[:-1])
            case "flip":
                data[-1] ^= 4
                files[5].write_bytes(data)
            case "foreign":
                files[5].write_bytes(files[4].read_bytes())
            case "newer":
                data[8] += 1
                files[5].write_bytes(data)
            case _:
                files[5].unlink()
        assert one.load(PROMPT).blocks == 5
        assert one.held[tier] == {*PROMPT} - {5}
        assert sum(one.tiers.counters().misses.values()) == 1
        one.offload(PROMPT)
        assert one.load(PROMPT).blocks == 8


def test_a_prefetch_of_stale_blocks_is_counted(tmp_path: Path) -> None:
    with rank(settings(tmp_path, host=32, store=True)) as one:
        one.tiers.prefetch([name_of(number) for number in PROMPT], 0, hinted=8)
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
        one.tiers.offer([name_of(number) for number in PROMPT], memory, partial(one.offers.append, 1))
        one.settle()
        assert (one.offers, one.held["host"]) == ([1], set())
        one.offload(range(16))
        assert one.held["host"] == {*range(16)}


def test_closing_drops_what_has_not_begun(tmp_path: Path, stores: list[FaultyStore]) -> None:
    with rank(settings(tmp_path, disk=64)) as one:
        stores[0].gate.clear()
        for first in range(0, 40, 4):
            one.offer(range(first, first + 4))
        stores[0].gate.set()
    with rank(settings(tmp_path, disk=64)) as two:
        assert two.held["disk"] <= {*range(40)}
        for first in range(0, 40, 4):
            two.load(range(first, first + 4))
        assert not two.tiers.counters().misses


@contextmanager
def pair(first: TierSettings, second: TierSettings) -> Iterator[list[DrivenRank]]:
    with rank(first) as one, rank(second) as two:
        yield [one, two]


@pytest.mark.slow
@given(
    seed=st.integers(0, 1 << 30),
    mode=st.sampled_from(["through", "eviction"]),
    host=st.sampled_from([0, 5, 24]),
    disk=st.sampled_from([0, 10, 40]),
    filtered=st.booleans(),
)
def test_concurrent_transfers_never_load_wrong_bytes(
    seed: int,
    mode: Literal["through", "eviction"],
    host: int,
    disk: int,
    filtered: bool,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Two ranks share a store, and files are damaged while blocks are offered, evicted, loaded and cleared."""
    folder = tmp_path_factory.mktemp("tiers")
    random = Random(seed)
    sizes = settings(
        folder, host=host, store=True, filtered=filtered, write=mode, store_bytes=60 * (BLOCK_BYTES + 4096)
    )
    own = [
        TierSettings(
            **{name: getattr(sizes, name) for name in sizes.__slots__}
            | {"disk": folder / f"disk-{at}" if disk else None, "disk_bytes": disk * (BLOCK_BYTES + 4096)}
        )
        for at in range(2)
    ]
    results: list[LoadResult] = []
    begun = 0
    with pair(*own) as ranks:
        for _ in range(120):
            one = random.choice(ranks)
            first = random.randrange(0, 60, 10)
            numbers = range(first, first + random.randint(1, 10))
            names = [name_of(number) for number in numbers]
            match random.choice("ooooollllepdc" if random.random() < 0.9 else "s"):
                case "o":
                    one.offer(numbers)
                case "l":
                    one.begin_load(numbers, results.append, hinted=random.choice([0, 3]))
                    begun += 1
                case "e":
                    one.tiers.device_evicts(names, [memoryview(content(number)) for number in numbers])
                case "p":
                    one.tiers.prefetch(names, random.randint(0, 2), hinted=random.choice([0, 5]))
                case "d":
                    damage(random, sorted(folder.rglob("*.kv")))
                case "c":
                    if random.random() < 0.1:
                        one.tiers.clear()
                case _:
                    one.settle()
            one.until(lambda: True)
        for one in ranks:
            one.settle()
            for tier in ("host", "disk"):
                assert one.held[tier] == one.resident(tier)
        assert len(results) == begun
    shutil.rmtree(folder)


def damage(random: Random, files: list[Path]) -> None:
    """Truncate, flip or delete one file, which another thread may be using."""
    if not files:
        return
    path = random.choice(files)
    try:
        data = bytearray(path.read_bytes())
        match random.randrange(3):
            case 0:
                path.write_bytes(data[: len(data) // 2])
            case 1:
                data[random.randrange(4096, len(data))] ^= 1
                path.write_bytes(data)
            case _:
                path.unlink()
    except (FileNotFoundError, ValueError):
        return
