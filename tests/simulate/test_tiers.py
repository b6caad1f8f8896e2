"""Simulated host memory, disks and shared stores: outcomes against values computed by hand."""

import math
from collections.abc import Callable
from fractions import Fraction
from heapq import heappop, heappush

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.timing import prefill_us
from forebay.simulate.outcome import summary
from forebay.simulate.settings import (
    Delays,
    LifeCycleSettings,
    SettingsUnusable,
    Transfer,
    validate_settings,
)
from forebay.simulate.tiers.link import SharedLink
from forebay.simulate.tiers.rank_tiers import SharedStore
from forebay.simulate.tiers.settings import DiskTier, FleetTiers, HostTier, StoreTier
from forebay.simulate.workload import Turn
from tests.depth import examples
from tests.simulate.scene import crash_at, fleet, latency, routed, run, served, split, turn

S = 1_000_000
BLOCK_BYTES = 64 * Transfer().kv_bytes_per_token
PROMPT = 640  # ten blocks; the last token is always computed, so at most nine are loaded
SMALL = {"kv_blocks": 12}  # of an earlier prompt two blocks remain
HOST = FleetTiers(host=HostTier(size="100blocks", bandwidth=25.0, latency_us=20))


def prompt(number: int, root: int, at_s: float, **changes: int) -> Turn:
    return turn(number, PROMPT, block_ids=tuple(range(root * 100, root * 100 + 10)), at_us=round(at_s * S), **changes)


def load_us(blocks: int, gb_s: float, latency_us: int) -> int:
    return latency_us + math.ceil(blocks * BLOCK_BYTES / (gb_s * 1000))


def test_an_evicted_prompt_is_loaded_from_host_memory() -> None:
    system = fleet(1, sizes=SMALL, tiers=HOST)
    turns = (prompt(0, 1, 0), prompt(1, 2, 1), prompt(2, 1, 2))
    outcome = run(system, *turns)
    first, _, again = outcome.requests
    took_us = load_us(7, 25.0, 20)
    assert first.first_us == prefill_us(PROMPT)
    assert (again.cached_tokens, again.host_tokens, again.load_us) == (576, 448, took_us)
    assert again.first_us - again.arrived_us == took_us + prefill_us(64)
    assert outcome.tiers is not None
    assert (outcome.tiers.loaded, outcome.tiers.written) == ({"host": 7}, {"host": 20})
    terms = routed(system, *turns)[2].terms
    assert (terms.device_overlap, terms.host_overlap) == (2, 8)
    figures = summary(outcome, 1)["tiers"]
    assert figures["tokens"] == {"device": 128, "host": 448, "disk": 0, "store": 0, "computed": 3 * PROMPT - 576}
    assert figures["load_ms"]["p50"] == took_us / 1e3


def test_a_fleet_without_tiers_reports_none() -> None:
    for tiers in (None, FleetTiers(), FleetTiers(host=HostTier(size="0"))):
        outcome = run(fleet(1, tiers=tiers), prompt(0, 1, 0))
        assert outcome.tiers is None
        assert "tiers" not in summary(outcome, 1)


def test_all_ranks_of_a_model_share_one_store() -> None:
    tiers = FleetTiers(store=StoreTier(size="100blocks", bandwidth=10.0, latency_us=500))
    turns = (prompt(0, 1, 0), prompt(1, 1, 1))
    outcome = run(fleet(2, tiers=tiers), *turns, router="round-robin")
    first, again = outcome.requests
    assert (first.worker, again.worker) == (0, 1)
    assert (again.store_tokens, again.load_us) == (576, load_us(9, 10.0, 500))
    assert outcome.tiers is not None
    assert outcome.tiers.written == {"store": 10}  # the second worker knows that the store has them
    apart = run(fleet(2), *turns, router="round-robin")
    assert [one.cached_tokens for one in apart.requests] == [0, 0]


def test_the_router_sees_the_shared_store() -> None:
    tiers = FleetTiers(store=StoreTier(size="100blocks"))
    first, again = routed(
        fleet(2, tiers=tiers), prompt(0, 1, 0), prompt(1, 1, 1), router="kv:overlap_score_credit=0"
    ).values()
    # With this setting, blocks in device memory count nothing, and blocks in the store that follow them half.
    assert again.worker_id != first.worker_id
    assert again.terms.store_overlap == 10


def test_a_disk_survives_its_worker_and_host_memory_does_not() -> None:
    fault = crash_at(worker="mock-0", at_us=2 * S, back_us=S)
    life = LifeCycleSettings(faults=(fault,), lease_ttl_s=0.5)
    for tiers, name in (
        (HOST, ""),
        (FleetTiers(disk=DiskTier(size="100blocks")), "disk_tokens"),
        (FleetTiers(store=StoreTier(size="100blocks")), "store_tokens"),
    ):
        system, turns = fleet(1, life, tiers=tiers), (prompt(0, 1, 0), prompt(1, 1, 10))
        again = served(system, *turns)[1]
        assert again.cached_tokens == (576 if name else 0)
        assert not name or getattr(again, name) == 576
        if name == "disk_tokens":
            assert routed(system, *turns)[1].terms.disk_overlap == 10


def test_only_blocks_that_are_used_again_pass_the_filter() -> None:
    host = HostTier(size="30blocks")
    for is_filtered, written in ((None, 10), (False, 20)):
        disk = DiskTier(size="100blocks", filter=is_filtered)
        tiers = FleetTiers(host=host, disk=disk)
        outcome = run(fleet(1, tiers=tiers), prompt(0, 1, 0), prompt(1, 2, 1), prompt(2, 1, 2))
        assert outcome.tiers is not None
        assert outcome.tiers.written == {"host": 20, "disk": written}


def test_blocks_that_have_left_the_shared_store_are_computed() -> None:
    # A write is slow, so the second prompt pushes the first out of the store while its load waits for the latency.
    tiers = FleetTiers(store=StoreTier(size="10blocks", bandwidth=0.0, latency_us=100_000))
    slow = Delays(work=latency(fixed_us=0))
    turns = (prompt(0, 1, 0), prompt(1, 2, 1), prompt(2, 1, 1.09))
    outcome = run(fleet(2, tiers=tiers, delays=slow), *turns, router="round-robin")
    assert all(not one.failure for one in outcome.requests)
    again = outcome.requests[2]
    assert again.worker == 0  # it has the prompt in device memory
    fresh = run(fleet(3, tiers=tiers), *turns, router="round-robin").requests[2]
    assert (fresh.worker, fresh.store_tokens) == (2, 576)  # the load had begun before


def test_slow_tiers_are_not_used_once_they_are_measured() -> None:
    tiers = FleetTiers(host=HostTier(size="1000blocks", bandwidth=0.05, latency_us=0))
    turns = [prompt(number, 1 + number % 2, 10 * number) for number in range(12)]
    found = served(fleet(1, sizes=SMALL, tiers=tiers), *turns)
    loaded = [one.host_tokens > 0 for one in found]
    assert loaded == [False, False, True, True, True, True] + [False] * 6  # four loads to learn
    fast = FleetTiers(host=HostTier(size="1000blocks", bandwidth=25.0))
    assert all(one.host_tokens for one in served(fleet(1, sizes=SMALL, tiers=fast), *turns)[2:])


def test_a_write_never_delays_a_step() -> None:
    turns = [prompt(number, number, 0.001 * number, output=40) for number in range(6)]
    slow = FleetTiers(
        host=HostTier(size="100blocks", bandwidth=0.001), disk=DiskTier(size="100blocks", bandwidth=0.001, filter=False)
    )
    plain, tiered = (served(fleet(1, tiers=tiers), *turns) for tiers in (None, slow))
    assert [(one.first_us, one.last_us) for one in plain] == [(one.first_us, one.last_us) for one in tiered]


def test_a_waiting_request_is_prefetched_to_host_memory() -> None:
    # Two later prompts push the first out of host memory. It comes back from disk while others are computed.
    disk = DiskTier(size="100blocks", bandwidth=1.0, filter=False)
    sizes = {"kv_blocks": 12, "max_num_seqs": 1, "max_num_batched_tokens": 512}
    turns = (prompt(0, 1, 0), prompt(1, 2, 1), prompt(2, 3, 2, output=60), prompt(3, 4, 2.01), prompt(4, 1, 2.2))
    for blocks, found in ((20, ("host_tokens", 576)), (10, ("disk_tokens", 576))):
        tiers = FleetTiers(host=HostTier(size=f"{blocks}blocks", bandwidth=25.0, latency_us=0), disk=disk)
        again = served(fleet(1, sizes=sizes, tiers=tiers), *turns)[4]
        assert getattr(again, found[0]) == found[1]  # in half the host memory, the fourth prompt takes its place


def test_prefill_and_decode_workers_load() -> None:
    tiers = FleetTiers(host=HostTier(size="100blocks"), store=StoreTier(size="100blocks", filter=False))
    system = split(1, 1, sizes=SMALL, tiers=tiers)
    turns = (prompt(0, 1, 0, output=3), prompt(1, 2, 1, output=3), prompt(2, 1, 2, output=3))
    outcome = run(system, *turns, router="kv:disagg.policy=always")
    again = outcome.requests[2]
    assert again.prefiller is not None
    assert again.host_tokens == 448  # at the prefill worker
    assert outcome.tiers is not None
    assert outcome.tiers.loaded["host"] > 7  # and at the decode worker
    assert again.transferred_bytes < outcome.requests[0].transferred_bytes


def test_measured_costs_reach_the_router() -> None:
    tiers = FleetTiers(host=HostTier(size="1000blocks", bandwidth=25.0))
    turns = [prompt(number, 1 + number % 3, 20 * number) for number in range(15)]
    system = fleet(1, sizes=SMALL, tiers=tiers)
    last = [routed(system, *turns, router=router)[14].terms for router in ("kv:tier_credit=measured", "kv")]
    assert last[0].host_overlap == last[1].host_overlap > 0
    block_us = 0.01518344 * 64 * 1000  # about, of the modelled engine
    saved = 10 - 10 * BLOCK_BYTES / 25_000 / block_us
    assert last[0].overlap_credit == pytest.approx(saved, abs=0.2)
    assert last[1].overlap_credit == pytest.approx(0.75 * last[1].host_overlap + last[1].device_overlap)


def test_impossible_tiers_are_refused() -> None:
    with pytest.raises(SettingsUnusable, match=r"tiers.host: got a size of 1MB, but one block has 8388608 bytes"):
        validate_settings(fleet(1, tiers=FleetTiers(host=HostTier(size="1MB"))))
    for size in ("", "many", "4 parsecs", "-1GB", "5", "1e9GB"):
        with pytest.raises(ValueError, match="expected a size with a unit"):
            DiskTier(size=size)
    with pytest.raises(SettingsUnusable, match="the maximum is 2147483648"):
        validate_settings(fleet(1, tiers=FleetTiers(host=HostTier(size="99999PB"))))


@pytest.mark.parametrize(
    ("size", "blocks"),
    [("64GB", 7629), ("1 GiB", 128), ("4096blocks", 4096), ("12 Blocks", 12), ("0", 0), ("0.1TB", 11920)],
)
def test_sizes_are_bytes_or_blocks(size: str, blocks: int) -> None:
    assert HostTier(size=size).blocks(BLOCK_BYTES) == blocks


# The shared bandwidth of a tier, and the shared store, against slow implementations


class Clock:
    """Scheduler that runs actions in order of time."""

    def __init__(self) -> None:
        self.now_us = 0
        self._queue: list[tuple[int, int, Callable[[], object]]] = []
        self._put = 0

    def at(self, at_us: int, action: Callable[[], object]) -> None:
        self._put += 1
        heappush(self._queue, (at_us, self._put, action))

    def later(self, at_us: int, action: Callable[[], object]) -> None:
        self.at(at_us, action)

    def run(self) -> None:
        while self._queue:
            self.now_us, _, action = heappop(self._queue)
            action()


def shares(rate: int, transfers: list[tuple[int, int]]) -> list[Fraction]:
    """Return the end of each transfer (begin, size) if all that are in flight get equal shares of the bandwidth."""
    left = {number: Fraction(size) for number, (_, size) in enumerate(transfers) if size}
    ends = [Fraction(begin) for begin, _ in transfers]
    now = Fraction(0)
    while left:
        active = [number for number in left if transfers[number][0] <= now]
        coming = [Fraction(begin) for number, (begin, _) in enumerate(transfers) if number in left and begin > now]
        if not active:
            now = min(coming)
            continue
        each = Fraction(rate, len(active))
        step = min([min(left[number] for number in active) / each, *(begin - now for begin in coming)])
        now += step
        for number in active:
            left[number] -= each * step
            if not left[number]:
                ends[number] = now
                del left[number]
    return ends


@examples(2)
@given(
    rate=st.integers(1, 5_000),
    latency_us=st.integers(0, 50),
    transfers=st.lists(st.tuples(st.integers(0, 2_000), st.integers(0, 1_000_000)), max_size=12),
)
def test_transfers_get_equal_shares(rate: int, latency_us: int, transfers: list[tuple[int, int]]) -> None:
    clock = Clock()
    link = SharedLink(float(rate), latency_us, clock)
    ended: dict[int, int] = {}

    def begin(number: int, size: int) -> None:
        link.begin(size, lambda: ended.setdefault(number, clock.now_us), is_load=True, owner=None)

    for number, (at_us, size) in enumerate(transfers):
        clock.at(at_us, lambda number=number, size=size: begin(number, size))  # type: ignore[misc]
    clock.run()
    expected = shares(rate, [(at_us + latency_us, size) for at_us, size in transfers])
    # The clock has whole microseconds, so each end may be late, and delay the ends after it.
    for number, end in enumerate(expected):
        assert end - 1 <= ended[number] <= end + 1 + len(transfers)


def test_an_unlimited_bandwidth_takes_the_latency() -> None:
    clock = Clock()
    link = SharedLink(0.0, 30, clock)
    ended: list[int] = []
    for _ in range(3):
        link.begin(1 << 40, lambda: ended.append(clock.now_us), is_load=True, owner=None)
    clock.run()
    assert ended == [30, 30, 30]


def test_the_transfers_of_a_dead_rank_leave_their_bandwidth_to_others() -> None:
    clock = Clock()
    link = SharedLink(10.0, 0, clock)
    ended: list[str] = []
    for owner in ("dead", "alive"):
        link.begin(1_000, lambda owner=owner: ended.append(f"{owner} {clock.now_us}"), is_load=True, owner=owner)  # type: ignore[misc]
    clock.at(100, lambda: link.drop("dead"))
    clock.run()
    assert ended == ["alive 150"]  # 500 bytes in the first 100 us, and 500 in the next 50


@given(
    limit=st.integers(1, 8),
    actions=st.lists(
        st.tuples(st.booleans(), st.lists(st.integers(0, 20), unique=True, min_size=1, max_size=6)), max_size=30
    ),
)
def test_a_store_keeps_the_blocks_that_were_used_last(limit: int, actions: list[tuple[bool, list[int]]]) -> None:
    store = SharedStore(limit)
    expected: list[int] = []  # oldest first
    for is_use, keys in actions:
        if is_use:
            store.use(keys)
            for key in keys:
                if key in expected:
                    expected.remove(key)
                    expected.append(key)
        else:
            before = set(expected)
            expected = [key for key in expected if key not in keys] + keys[::-1]
            expected = expected[-limit:]
            stored, removed = store.add(keys)
            assert set(stored) == set(expected) - before
            assert set(removed) == before - set(expected)
        assert [key in store for key in range(21)] == [key in expected for key in range(21)]
        assert len(store) == len(expected)
