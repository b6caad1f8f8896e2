"""Policies of the tier manager: what is written where, what is evicted, and what is found."""

from collections.abc import Sequence

import pytest

from forebay.kv_tiers.decisions import leading_runs
from forebay.kv_tiers.frequency import FrequencyLimits
from forebay.kv_tiers.manager import LowerTier, TierLimits, TierManager, TierRun, TierSet, Write

PROMPT = list(range(8))


def limits(blocks: int = 100, **changes: bool | str) -> TierLimits:
    return TierLimits(blocks=blocks, **changes)  # type: ignore[arg-type]


def manager(
    host: TierLimits | None = None,
    disk: TierLimits | None = None,
    store: TierLimits | None = None,
    writes_max: int = 1024,
) -> TierManager[int]:
    return TierManager(TierSet(host=host, disk=disk, store=store, writes_max=writes_max))


def finish(one: TierManager[int], writes: Sequence[Write[int]]) -> list[tuple[str, str, tuple[int, ...]]]:
    """End writes successfully, also those that follow. Return source, tier and blocks of each."""
    pending = list(writes)
    ended: list[tuple[str, str, tuple[int, ...]]] = []
    while pending:
        write = pending.pop(0)
        ended.append((write.source, write.tier, write.keys))
        pending += one.written(write.number)
    return ended


def fill(one: TierManager[int], keys: Sequence[int] = PROMPT) -> list[tuple[str, str, tuple[int, ...]]]:
    return finish(one, one.offer(keys))


def test_written_blocks_go_from_tier_to_tier() -> None:
    one = manager(limits(), limits(), limits())
    blocks = tuple(PROMPT)
    assert fill(one) == [("device", "host", blocks), ("host", "disk", blocks), ("host", "store", blocks)]
    assert fill(one) == []
    assert one.match(PROMPT, 2) == [TierRun("host", 6)]


def test_each_block_is_read_from_its_fastest_tier() -> None:
    one = manager(limits(), limits(), limits())
    one.add("host", [2, 3])
    one.add("disk", [0, 1, 2])
    one.add("store", PROMPT)
    assert one.match(PROMPT) == [TierRun("disk", 2), TierRun("host", 2), TierRun("store", 4)]
    loads = one.load(PROMPT, 0, one.match(PROMPT))
    assert [(load.tier, load.keys) for load in loads] == [("disk", (0, 1)), ("host", (2, 3)), ("store", (4, 5, 6, 7))]


def test_without_host_the_disk_is_written_from_the_device_and_not_filtered() -> None:
    one = manager(disk=limits(filter=True), store=limits(filter=True))
    assert fill(one) == [("device", "disk", tuple(PROMPT))]
    assert fill(one) == [("device", "store", tuple(PROMPT))], "the filter of the store applies"


def test_the_filter_passes_blocks_that_are_offered_twice() -> None:
    one = manager(limits(), limits(filter=True))
    assert fill(one) == [("device", "host", tuple(PROMPT))]
    assert one.counters["skipped_filter"] == 8
    assert fill(one, PROMPT[:2]) == [("host", "disk", (0, 1))]


def test_offers_in_different_ticks_do_not_pass() -> None:
    one = manager(limits(), limits(filter=True))
    for _ in range(5):
        assert all(tier != "disk" for _, tier, _ in fill(one))
        one.tick()


@pytest.mark.parametrize("room", [1, 5, 7])
def test_the_leading_blocks_of_a_long_prompt_are_kept(room: int) -> None:
    one = manager(limits(room))
    for _ in range(3):
        fill(one)
        assert one.match(PROMPT) == [TierRun("host", room)]
    assert one.counters["skipped_full"] > 0


def test_the_end_of_the_oldest_prompt_is_evicted_first() -> None:
    one = manager(limits(8))
    fill(one, [0, 1, 2, 3])
    fill(one, [10, 11, 12, 13])
    fill(one, [0, 1])
    (write,) = one.offer([20, 21, 22])
    assert write.evicted == (3, 2, 13)
    assert one.counters["evicted_host"] == 3


def test_a_pin_extends_but_never_shortens_an_earlier_one() -> None:
    one = manager(limits(4))
    fill(one, [0, 1])
    one.pin([0], until_us=10)
    one.pin([0, 1], until_us=5)
    one.unpin(9)
    fill(one, [10, 11, 12, 13])
    assert [one.holds("host", 0), one.holds("host", 1)] == [True, False]
    one.pin([0], until_us=20)
    one.unpin(19)
    assert one.pinned("host") == 1
    one.unpin(20)
    fill(one, [20, 21, 22, 23])
    assert not one.holds("host", 0)


def test_the_end_of_a_pin_makes_room_for_others() -> None:
    one = manager(limits(8), limits(4))
    one.pin([0, 1], until_us=5)
    one.pin([2, 3], until_us=10)
    fill(one, [0, 1, 2, 3])
    assert (one.pinned("host"), one.pinned("disk")) == (4, 2)
    one.unpin(5)
    fill(one, range(100, 108))
    assert {*one.resident("disk")} & {*PROMPT} == {2, 3}


def test_stale_blocks_leave_their_tier() -> None:
    one = manager(store=limits())
    one.add("store", PROMPT)
    (load,) = one.load(PROMPT, 0, one.match(PROMPT))
    one.loaded(load.number, failed=[2, 3])
    assert one.match(PROMPT) == [TierRun("store", 2)]
    assert one.counters["stale_store"] == 2
    one.add("store", PROMPT)
    assert one.match(PROMPT) == [TierRun("store", 8)]


def test_a_load_ends_before_a_block_that_has_left_since_the_match() -> None:
    one = manager(limits(), limits())
    one.add("disk", PROMPT[4:])
    one.add("host", PROMPT[:4])
    runs = one.match(PROMPT)
    one.remove("host", [2])
    assert [load.keys for load in one.load(PROMPT, 0, runs)] == [(0, 1)]
    one.remove("disk", PROMPT)
    assert one.load(PROMPT, 4, runs[1:]) == []


def test_a_paused_tier_is_passed() -> None:
    one = manager(limits(), limits(), limits())
    one.set_paused("disk", paused=True)
    assert fill(one) == [("device", "host", tuple(PROMPT)), ("host", "store", tuple(PROMPT))]
    one.set_paused("disk", paused=False)
    assert fill(one) == [("host", "disk", tuple(PROMPT))]
    one.set_paused("host", paused=True)
    assert one.prefetch(PROMPT, 0) == []


def test_a_tier_that_does_not_exist_has_no_blocks() -> None:
    one = manager(disk=limits())
    one.set_paused("host", paused=True)
    one.add("host", PROMPT)
    one.remove("host", PROMPT)
    assert (one.count("host"), one.used("host"), one.holds("host", 0), one.pinned("host")) == (0, 0, False, 0)
    assert (one.match(PROMPT), one.resident("host"), one.changes()) == ([], [], [])
    assert one.load(PROMPT, 0, [TierRun("host", 1)]) == []


def test_blocks_of_a_failed_write_still_go_on_from_host() -> None:
    one = manager(limits(), limits(), limits())
    (to_host,) = one.offer(PROMPT)
    (to_disk,) = one.written(to_host.number)
    following = one.written(to_disk.number, failed=[0, 1])
    assert [(write.source, write.tier, write.keys) for write in following] == [("host", "store", tuple(PROMPT))]


def test_prefetch_uses_half_of_host_memory() -> None:
    one = manager(limits(10), limits(), limits())
    one.add("disk", PROMPT[:3])
    one.add("store", PROMPT[3:7])
    fill_host = [50, 51, 52, 53, 54, 55, 56, 57]
    one.add("host", fill_host)
    writes = one.prefetch(PROMPT, 1)
    assert [(write.source, write.keys) for write in writes] == [("disk", (1, 2)), ("store", (3, 4, 5))]
    assert one.prefetch(PROMPT, 1) == [], "they are being copied"
    for write in writes:
        one.written(write.number)
    assert one.match(PROMPT) == [TierRun("disk", 1), TierRun("host", 5), TierRun("store", 1)]
    assert manager(disk=limits()).prefetch(PROMPT, 0) == []


def test_prefetch_ends_before_a_block_that_no_tier_has() -> None:
    one = manager(limits(), limits())
    one.add("disk", [0, 1, 3])
    (write,) = one.prefetch(PROMPT, 0)
    assert write.keys == (0, 1)


def test_more_writes_than_allowed_are_skipped() -> None:
    one = manager(limits(), writes_max=3)
    (write,) = one.offer(PROMPT)
    assert write.keys == (0, 1, 2)
    assert one.offer([100]) == []
    assert one.counters["skipped_busy"] == 6
    assert len(one.written(write.number)) == 0
    assert len(one.offer(PROMPT)) == 1


def test_without_host_memory_the_disk_takes_its_place() -> None:
    one = manager(disk=limits(), store=limits())
    assert fill(one, [1]) == [("device", "disk", (1,)), ("disk", "store", (1,))]


def test_an_inventory_fills_the_free_room() -> None:
    one = manager(limits(3), limits(3), limits(3))
    tiers: tuple[LowerTier, ...] = ("host", "disk")
    for tier in tiers:
        one.add(tier, PROMPT)
        assert {*one.resident(tier)} == {0, 1, 2}
    one.add("store", PROMPT)
    one.add("store", [20])
    assert [*one.resident("store")] == [1, 0, 20], "a store forgets the oldest"


def test_clear_can_leave_a_tier() -> None:
    one = manager(limits(), limits(filter=True), limits())
    fill(one)
    fill(one)
    one.clear(("host", "disk"))
    assert (one.count("host"), one.count("disk"), one.count("store")) == (0, 0, 8)
    assert ("host", "disk", tuple(PROMPT)) not in fill(one), "frequencies are forgotten"


def test_limits_are_validated() -> None:
    with pytest.raises(ValueError, match="at least 0 blocks, not -1"):
        TierLimits(blocks=-1)
    for changes in ({"keys_max": 0}, {"offload_at": 0}, {"offload_at": 1025}):
        with pytest.raises(ValueError, match="keys_max must be at least 1"):
            FrequencyLimits(**changes)


def test_a_search_for_room_passes_over_a_bounded_number_of_blocks_in_use() -> None:
    one = manager(limits(4000), writes_max=4000)
    fill(one, range(4000))
    (load,) = one.load(range(1500), 0, [TierRun("host", 1500)])
    fill(one, range(1500, 4000))  # now the blocks of the load are the oldest
    assert one.offer(range(10_000, 10_020)) == []
    (write,) = one.offer(range(10_000, 10_020))
    assert (len(write.evicted), {*write.evicted} & {*load.keys}) == (20, set())


def test_leading_runs_end_within_a_run() -> None:
    runs = [TierRun("host", 3), TierRun("disk", 4), TierRun("store", 2)]
    assert leading_runs(runs, 0) == []
    assert leading_runs(runs, 3) == [TierRun("host", 3)]
    assert leading_runs(runs, 5) == [TierRun("host", 3), TierRun("disk", 2)]
    assert leading_runs(runs, 9) == runs
