"""What candidates cost: every weight, the credit of each tier, evictions, and the digest of the table."""

from collections.abc import Sequence
from math import exp, inf, nan, tanh
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import extend_chain
from forebay.core.restore import restore
from forebay.core.routing.cost import CostTable, Demand, cost_table, taint_factor
from forebay.core.routing.draws import lowest
from forebay.core.state.fleet import FleetWorker
from forebay.core.state.holder_bits import HolderBits
from forebay.core.state.load import FleetLoad
from forebay.core.state.prefix_index import NO_OVERLAP, Overlap
from forebay.core.state.rank_load import rates_of
from forebay.core.state.roster import CandidateRank, Roster
from forebay.core.world import World
from forebay.events.base import pack_u64
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, LowerTier, StoreBlocksAdded
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.progress import RequestFinished
from forebay.events.requests import RoutingHints, TaintWeight
from tests.core.worlds import BLOCK, PROMPTS, Driver, joined, pool, request, spec

BLOCK_SIZE = 64


def roster(**loads: tuple[int, int, int]) -> Roster:
    """Seats by worker id, each with (prefill tokens, decode blocks, active requests)."""
    load = FleetLoad()
    seats = []
    for name, (prefill_tokens, decode_blocks, active_requests) in loads.items():
        worker = FleetWorker(spec(name, taints=tuple(name.split("_")[1:])), "l", 0, 1, 0)
        rank = load.add_rank(name, 0, BLOCK_SIZE)
        for number in range(active_requests):
            first = number == 0
            load.book(
                f"{name}{number}",
                (name, 0),
                prefill_tokens=prefill_tokens if first else 0,
                blocks=range(decode_blocks) if first else [],
            )
        seats.append(CandidateRank(worker, 0, rank, (name, 0)))
    return Roster(seats)


def table(seats: Roster, prompt_tokens: int, blocks: int = 0, **changes: Any) -> CostTable:
    loads = {candidate.key: candidate.load for candidate in seats.ranks}
    active = [(1 << loads[key].slot, depth) for key, depth in changes.pop("active", {}).items() if key in loads]
    overlaps, taints = changes.pop("overlaps", {}), changes.pop("preferred_taints", ())
    demand = Demand(prompt_tokens, blocks, active, HolderBits(()), (), overlaps, taints)
    return cost_table(RouterConfig(**changes), BLOCK_SIZE, seats, demand)


def test_the_worked_examples_of_the_router_design() -> None:
    """Dynamo docs, router design: of costs 18, 10 and 11 the second wins."""
    seats = roster(a=(0, 10, 1), b=(0, 5, 1), c=(0, 9, 1))
    found = table(seats, 640, overlaps={("a", 0): Overlap(2), ("b", 0): Overlap(5), ("c", 0): Overlap(8)})
    assert found.columns[1].tolist() == [10.0] * 3
    assert found.costs == [18.0, 10.0, 11.0]
    assert lowest(found.columns[0], seed=1) == 1


def test_every_weight_counts() -> None:
    weights: dict[str, Any] = {
        "overlap_score_credit": 2.0,
        "host_cache_hit_weight": 0.5,
        "disk_cache_hit_weight": 0.25,
        "prefill_load_scale": 3.0,
        "decode_active_request_weight": 0.125,
    }
    seats = roster(a=(64, 7, 8))
    found = table(seats, 64 * 9, 8, overlaps={("a", 0): Overlap(1, 2, 4)}, active={("a", 0): 5}, **weights)
    terms = found.terms(0)
    assert (terms.cost, terms.prefill_blocks, terms.overlap_credit) == (3.0 * (10 - 4.0) + 10 + 1.0, 10.0, 4.0)
    assert (terms.decode_blocks, terms.active_requests) == (10.0, 8)
    assert (terms.device_overlap, terms.host_overlap, terms.disk_overlap) == (1, 2, 4)
    rich = table(roster(a=(0, 1, 1)), 64, overlaps={("a", 0): Overlap(1)}, overlap_score_credit=99.0)
    assert rich.costs == [1.0], "a credit saves what there is to save, no more"


def test_equal_overlaps_give_equal_credit() -> None:
    seats = roster(a=(0, 0, 0), b=(64, 0, 1), c=(0, 0, 0), d=(0, 0, 0))
    alike, other = Overlap(2, 1), Overlap(3)
    found = table(seats, 64 * 9, overlaps={("a", 0): alike, ("b", 0): alike, ("c", 0): other, ("d", 0): alike})
    assert [found.terms(at).overlap_credit for at in range(4)] == [2.75, 2.75, 3.0, 2.75]
    assert found.costs == [9 - 2.75, 10 - 2.75, 9 - 3.0, 9 - 2.75]


def test_overlaps_and_active_blocks_of_other_ranks_are_ignored() -> None:
    found = table(roster(a=(0, 0, 0)), 64, 1, overlaps={("gone", 0): Overlap(1)}, active={("gone", 0): 1})
    assert found.costs == [2.0]
    assert found.overlap(0) == NO_OVERLAP


def test_prefill_that_is_not_tracked_costs_nothing_and_the_credit_is_for_decode_blocks() -> None:
    seats = roster(a=(6400, 3, 1), b=(0, 3, 1))
    untracked: dict[str, Any] = {"overlaps": {("b", 0): Overlap(4)}, "track_prefill_tokens": False}
    found = table(seats, 640, 10, overlap_score_credit_decay=1.0, **untracked)
    assert found.costs == [13.0, 9.0]
    assert found.columns[1].tolist() == [0.0, 0.0]
    assert table(seats, 640, 10, decode_active_request_weight=0.5, **untracked).costs == [13.5, 9.5]
    assert table(seats, 640, 10, overlap_score_credit=0.0, **untracked).costs == [13.0, 13.0]
    assert table(seats, 640, overlap_score_credit=2.0, **untracked).costs == [3.0, 0.0]


def test_the_credit_of_a_busier_rank_decays() -> None:
    # b waits for one prompt like this one more than a: at decay 1 its blocks are worth half.
    seats = roster(a=(64, 0, 1), b=(64 + 640, 0, 1))
    overlaps = {("a", 0): Overlap(4), ("b", 0): Overlap(4, 2)}
    found = table(seats, 640, overlaps=overlaps, overlap_score_credit_decay=1.0, host_cache_hit_weight=0.5)
    assert [found.terms(at).overlap_credit for at in (0, 1)] == [4.0, 2.0 + 1.0]
    assert table(seats, 640, overlaps=overlaps).terms(1).overlap_credit == 4.0 + 1.5
    # A partial block is a block of the request: the same excess is ten blocks of ten. No blocks are as good as one.
    for tokens, credit in ((640 - 63, 2.0 + 1.5), (0, 4.0 / 11 + 1.5)):
        found = table(seats, tokens, overlaps=overlaps, overlap_score_credit_decay=1.0)
        assert found.terms(1).overlap_credit == credit


def test_lmetric_multiplies() -> None:
    seats = roster(a=(0, 10, 1), b=(0, 0, 0))
    found = table(seats, 640, overlaps={("a", 0): Overlap(8)}, selection_policy="lmetric")
    assert found.costs == [2.0 * 11.0, 10.0 * 1.0]


def test_preferred_taints_multiply_the_cost() -> None:
    seats = roster(a_ssd=(0, 0, 0), b=(0, 0, 0), c_ssd_old=(0, 0, 0))
    wishes = (TaintWeight(taint="ssd", weight=1.5), TaintWeight(taint="old", weight=-3.0))
    found = table(seats, 640, preferred_taints=wishes)
    factors = [found.terms(at).taint_factor for at in range(3)]
    assert factors == pytest.approx([exp(-tanh(1.5)), 1.0, exp(-tanh(-1.5))], rel=1e-12)
    assert found.costs == [10.0 * factor for factor in factors]
    assert taint_factor(0.0) == 1.0


@given(st.floats(-1e6, 1e6))
def test_a_taint_factor_lies_between_its_limits_and_falls(weight: float) -> None:
    factor = taint_factor(weight)
    assert factor == pytest.approx(exp(-tanh(weight)), rel=1e-12)
    assert exp(-1) - 1e-15 <= factor <= exp(1) + 1e-15


def test_the_table_digest_covers_every_term() -> None:
    plain = {"a": (0, 0, 0), "b": (0, 0, 0)}
    overlaps = {("b", 0): Overlap(1)}
    tables = [
        table(roster(**plain), 100, overlaps=overlaps),
        table(roster(**plain), 101, overlaps=overlaps),
        table(roster(**plain), 100, 1, overlaps=overlaps),
        table(roster(**plain), 100, overlaps={("a", 0): Overlap(1)}),
        table(roster(**plain), 100, overlaps={("b", 0): Overlap(0, 1)}, host_cache_hit_weight=1.0),
        table(roster(a=(0, 0, 0), c=(0, 0, 0)), 100, overlaps={("c", 0): Overlap(1)}),
        table(roster(a=(0, 0, 0)), 100),
        table(roster(a=(0, 0, 1), b=(0, 0, 0)), 100, overlaps=overlaps),
        table(roster(**plain), 100, overlaps=overlaps, preferred_taints=(TaintWeight(taint="x", weight=1.0),)),
    ]
    assert len({one.digest() for one in tables}) == len(tables)
    assert table(roster(**plain), 100, overlaps=overlaps).digest() == tables[0].digest()


@pytest.mark.parametrize("value", [nan, inf, -inf, -0.5, 1e7])
@pytest.mark.parametrize("name", ["temperature", "overlap_score_credit", "prefill_load_scale"])
def test_a_weight_that_is_no_number_is_refused_by_its_name(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a number from 0 to 1e"):
        msgspec.structs.replace(RouterConfig(), **{name: value})
    with pytest.raises(ValueError, match="weight of the taint x"):
        TaintWeight(taint="x", weight=nan)


# Credit for blocks outside of device memory: by weights, or by what a rank measured


BOTH = Overlap(device=2, host=4, disk=4, store=10)


def measured(**tiers: tuple[float, float]) -> TierCosts:
    """Costs of a rank that computes a block in 100 µs, with (fixed, per block) of each tier in microseconds."""
    costs = [{"tier": tier, "fixed_us": fixed, "block_us": each} for tier, (fixed, each) in tiers.items()]
    return TierCosts(prefill_block_us=100.0, tiers=msgspec.convert(costs, tuple[TierCost, ...]))


def credit(costs: TierCosts | None, overlap: Overlap = BOTH, **changes: Any) -> float:
    """Return the credit of a candidate with a prompt of 40 blocks."""
    return credits_of({"a": costs}, overlap, **changes)[0]


def credits_of(costs: dict[str, TierCosts | None], overlap: Overlap, **changes: Any) -> list[float]:
    seats = roster(**dict.fromkeys(costs, (0, 0, 0)))
    found = _table(seats, costs, overlap, changes)
    return [found.terms(at).overlap_credit for at in range(len(found))]


def _table(seats: Roster, costs: dict[str, TierCosts | None], overlap: Overlap, changes: dict[str, Any]) -> CostTable:
    for rank in seats.ranks:
        found = costs[rank.worker.spec.worker_id]
        if found is not None:
            rank.load.rates = rates_of(found)
    overlaps = {rank.key: overlap for rank in seats.ranks}
    return table(seats, 64 * 40, overlaps=overlaps, **changes)


def test_the_weight_of_the_shared_store_counts() -> None:
    assert credit(None) == 2 + 0.75 * 4 + 0.25 * 4 + 0.5 * 10
    assert credit(None, shared_cache_hit_weight=0.0) == 6.0
    assert credit(None, Overlap(store=10), shared_cache_hit_weight=2.0) == 20.0


def test_measured_credit_is_what_loading_saves() -> None:
    costs = measured(host=(50.0, 10.0), disk=(100.0, 50.0), store=(300.0, 20.0))
    # host: 4 - (50 + 4 * 10) / 100; disk: 4 - (100 + 4 * 50) / 100; store: 10 - (300 + 10 * 20) / 100
    assert credit(costs, tier_credit="measured") == pytest.approx(2 + 3.1 + 1.0 + 5.0)
    assert credit(costs, Overlap(device=3), tier_credit="measured") == 3.0
    assert credit(costs) == 11.0, "weights are the default"


def test_a_load_that_is_slower_than_computing_gives_no_credit_and_no_debit() -> None:
    slow = measured(host=(0.0, 100.0), disk=(401.0, 0.0), store=(1e13, 1e13))
    assert credit(slow, tier_credit="measured") == 2.0


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        (None, 11.0),
        (measured(), 11.0),
        (TierCosts(prefill_block_us=0.0, tiers=measured(store=(0.0, 0.0)).tiers), 11.0),
        (measured(store=(0.0, 0.0)), 2 + 0.75 * 4 + 0.25 * 4 + 10),
    ],
    ids=["no report", "no tiers", "no prefill", "store only"],
)
def test_what_is_not_measured_counts_by_weight(costs: TierCosts | None, expected: float) -> None:
    assert credit(costs, tier_credit="measured") == expected


def test_each_rank_has_its_own_costs_and_decay_applies_to_the_device_only() -> None:
    costs = {"a": measured(store=(0.0, 50.0)), "b": measured(store=(0.0, 0.0)), "c": None}
    overlap = Overlap(device=4, store=10)
    assert credits_of(costs, overlap, tier_credit="measured") == [4 + 5.0, 4 + 10.0, 4 + 5.0]
    seats = roster(a=(64 * 40, 0, 1), b=(0, 0, 0))
    decayed = _table(
        seats,
        {"a": costs["b"], "b": costs["b"]},
        overlap,
        {"tier_credit": "measured", "overlap_score_credit_decay": 1.0},
    )
    assert decayed.columns[2].tolist() == [2 + 10.0, 4 + 10.0]
    by_weight = _table(seats, {"a": None, "b": None}, overlap, {"overlap_score_credit_decay": 1.0})
    assert by_weight.columns[2].tolist() == [2 + 5.0, 4 + 5.0]


def test_the_digest_of_a_table_has_store_blocks_only_if_there_are_any() -> None:
    seats = roster(a=(0, 0, 0), b=(0, 0, 0))
    without = table(seats, 640, overlaps={("a", 0): Overlap(1, 2, 3)}, shared_cache_hit_weight=0.0)
    assert without.digest() == table(seats, 640, overlaps={("a", 0): Overlap(1, 2, 3)}).digest()
    with_blocks = table(seats, 640, overlaps={("a", 0): Overlap(1, 2, 3, 4)}, shared_cache_hit_weight=0.0)
    assert with_blocks.costs == without.costs
    assert with_blocks.digest() != without.digest()
    assert (with_blocks.terms(0).store_overlap, with_blocks.terms(1).store_overlap) == (4, 0)
    assert with_blocks.overlap(1) == NO_OVERLAP


def tiered_fleet(**router: Any) -> Driver:
    """Workers "a" and "b" of a store with the first prompt; "a" also has its first two blocks on the device."""
    drive = Driver()
    drive("control", pool(**router))
    for slot, name in enumerate("ab"):
        drive("fleet", joined(name, slot, kv_store="s"))
    drive("kv-events", StoreBlocksAdded(store="s", worker_id="a", sequence_hashes=pack_u64(PROMPTS[0])))
    first = pack_u64(PROMPTS[0][:2])
    drive("kv-events", BlocksStored(worker_id="a", worker_epoch=drive.epoch("a"), seq=1, sequence_hashes=first))
    return drive


def report(drive: Driver, worker: str, costs: TierCosts) -> None:
    drive("metrics", TierCostsMeasured(worker_id=worker, worker_epoch=drive.epoch(worker), costs=costs))


def test_a_decision_uses_the_newest_costs_and_journals_the_overlap() -> None:
    drive = tiered_fleet(tier_credit="measured")
    report(drive, "a", measured(store=(0.0, 100.0)))
    report(drive, "b", measured(store=(0.0, 0.0)))
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    # a: 8.5 blocks - 2; b: 8.5 blocks - 8
    assert (routed.worker_id, routed.terms.overlap_credit, routed.terms.store_overlap) == ("b", 8.0, 8)
    assert (routed.runner_up.terms.overlap_credit, routed.runner_up.terms.store_overlap) == (2.0, 6)
    report(drive, "b", measured(store=(0.0, 99.0)))
    (again,) = drive("requests", request("q", PROMPTS[0]))
    assert again.worker_id == "a"


def test_costs_of_other_epochs_and_ranks_are_counted_and_ignored() -> None:
    drive = tiered_fleet()
    before = drive.world.load.digest()
    for changes in ({"worker_id": "z"}, {"worker_epoch": 99}, {"rank": 1}):
        event = TierCostsMeasured(worker_id="a", worker_epoch=drive.epoch("a"), costs=measured())
        drive("metrics", msgspec.structs.replace(event, **changes))
    assert drive.world.load.digest() == before
    assert drive.world.counts["foreign_load_report"] == 3


def test_costs_are_part_of_the_state_only_if_reported_and_leave_with_their_rank() -> None:
    drive, silent = tiered_fleet(), tiered_fleet()
    report(drive, "b", measured(host=(1.0, 2.0)))
    silent("metrics", None)
    assert drive.world.load.digest() != silent.world.load.digest()
    report(drive, "b", measured())
    drive.world.take_consumed()
    copy = restore(drive.world.snapshot())
    assert copy.load.rank_load("b", 0).costs == measured()
    assert copy.digest() == drive.world.digest()
    for one in (drive, silent):
        worker = one.world.fleet.get("b")
        assert worker is not None
        one.world.dismiss(worker)
    assert drive.world.load.digest() == silent.world.load.digest()


def test_the_settings_are_part_of_the_digest() -> None:
    digests = {world_with(RouterConfig(**changes)).digest() for changes in CHANGES}
    assert len(digests) == len(CHANGES)


CHANGES: tuple[dict[str, Any], ...] = ({}, {"tier_credit": "measured"}, {"shared_cache_hit_weight": 1.0})


def world_with(router: RouterConfig) -> World:
    world = World()
    world.set_pools(PoolConfigured(pool="p", model="m", block_size=4, router=router))
    return world


# Cached blocks that a rank must evict for a prompt


CAPACITY = 64  # blocks per worker


def chain(start: int, blocks: int) -> list[int]:
    return extend_chain(None, range(start * 1_000, start * 1_000 + blocks))


def caches(held: list[int], capacity: int = CAPACITY, tiers: Sequence[LowerTier | None] = (None,) * 8) -> Roster:
    """Candidates a, b, … that have `held` blocks on the device."""
    load, found = FleetLoad(), []
    for name, blocks, tier in zip("abcdefgh", held, tiers, strict=False):
        rank = load.add_rank(name, 0, BLOCK_SIZE, capacity)
        load.set_cached((name, 0), blocks, tier)
        found.append(CandidateRank(FleetWorker(spec(name), "l", 0, 1, 0), 0, rank, (name, 0)))
    return Roster(found)


def evicting(ranks: Roster, blocks: float, overlaps: dict[str, Overlap] | None = None, **config: Any) -> CostTable:
    known = {(name, 0): overlap for name, overlap in (overlaps or {}).items()}
    demand = Demand(int(blocks * BLOCK_SIZE), 0, (), HolderBits(()), (), known, now_us=config.pop("now_us", 0))
    return cost_table(RouterConfig(**config), BLOCK_SIZE, ranks, demand)


def evictions(found: CostTable) -> list[float]:
    return [found.terms(at).eviction_cost for at in range(len(found.costs))]


@given(st.lists(st.integers(0, CAPACITY), min_size=1, max_size=8), st.integers(1, CAPACITY), st.data())
def test_the_cost_is_zero_exactly_while_the_new_blocks_fit(held: list[int], blocks: int, data: st.DataObject) -> None:
    names = "abcdefgh"[: len(held)]
    cached = {name: Overlap(data.draw(st.integers(0, min(one, blocks)))) for name, one in zip(names, held, strict=True)}
    ranks = caches(held)
    for at, load in enumerate(ranks.loads):
        load.turnover_us = (-at - 1,)  # the first of the candidates has the newest blocks
        load.publish()
    found, without = evicting(ranks, blocks, cached), evicting(ranks, blocks, cached, eviction_weight=0.0)
    more = [max(one + blocks - cached[name].device - CAPACITY, 0) for name, one in zip(names, held, strict=True)]
    oldest = max((at + 1 for at, one in enumerate(more) if one), default=0)
    for at, (cost, evicted) in enumerate(zip(evictions(found), more, strict=True)):
        if not evicted:
            assert cost == 0.0
        elif not all(more):
            assert cost == 4.0 * evicted
        else:
            assert cost == pytest.approx(4.0 * evicted * (1 - (at + 1) / oldest))
    assert found.costs == pytest.approx([one + two for one, two in zip(without.costs, evictions(found), strict=True)])
    assert evictions(without) == [0.0] * len(held)
    assert (found.digest() == without.digest()) == (not any(evictions(found)))


def test_the_cost_follows_the_weights_of_the_configuration() -> None:
    ranks = caches([CAPACITY, 0])
    assert evictions(evicting(ranks, 10, {"a": Overlap(4)})) == [24.0, 0.0]
    assert evicting(ranks, 10, {"a": Overlap(4)}).costs == [6 + 24.0, 10.0]
    assert evictions(evicting(ranks, 10, eviction_weight=0.5)) == [5.0, 0.0]
    assert evictions(evicting(ranks, 10, overlap_score_credit=0.5)) == [20.0, 0.0]
    assert evicting(ranks, 10, prefill_load_scale=3.0).costs == [3.0 * (10 + 40.0), 30.0]
    assert evicting(ranks, 10, selection_policy="lmetric").costs == [(10 + 40.0) * 1.0, 10.0]
    assert evicting(ranks, 10, track_prefill_tokens=False).costs == [40.0, 0.0]


@pytest.mark.parametrize("config", [{"use_kv_events": False}, {"overlap_score_credit": 0.0}], ids=str)
def test_there_is_no_cost_if_caches_are_unknown_or_do_not_matter(config: dict[str, Any]) -> None:
    assert evictions(evicting(caches([CAPACITY, 0]), 10, **config)) == [0.0, 0.0]


@pytest.mark.parametrize("known", [True, False])
def test_only_the_caches_of_workers_with_kv_events_are_known(known: bool) -> None:
    drive = Driver()
    drive("control", pool())
    drive("fleet", joined("a"))
    drive("fleet", joined("b", 1, kv_events=known))
    full_fleet(drive, "a")
    (routed,) = drive("requests", request("r", [*chain(1, 4), *chain(9, 16)]))
    assert routed.worker_id == ("b" if known else "a"), "b has no known room, and a no younger blocks than others"


def test_a_capacity_that_cannot_be_right_does_not_count() -> None:
    assert evictions(evicting(caches([CAPACITY + 1, 0]), 10)) == [0.0, 0.0]
    assert evictions(evicting(caches([1, 0], capacity=1), 10)) == [0.0, 0.0]
    # b is unknown, so it is no candidate with room beside a, which has the oldest blocks of all known candidates.
    assert evictions(evicting(caches([CAPACITY, CAPACITY + 1]), 10)) == [0.0, 0.0]


def test_blocks_of_which_a_lower_tier_has_copies_cost_less() -> None:
    ranks = caches([CAPACITY, CAPACITY, CAPACITY, 0], tiers=["host", "disk", None, None])
    assert evictions(evicting(ranks, 10)) == [4 * 2.5, 4 * 7.5, 4 * 10.0, 0.0]
    ranks.loads[0].rates = {"host": (1.0, 0.1)}
    assert evictions(evicting(ranks, 10, tier_credit="measured")) == pytest.approx([4 * 2.0, 4 * 7.5, 4 * 10.0, 0.0])
    assert evictions(evicting(ranks, 10, host_cache_hit_weight=2.0))[0] == 0.0, "an eviction never lowers a cost"


def full_fleet(drive: Driver, *names: str, **changes: Any) -> dict[str, int]:
    """Fill the caches of some workers by KV events; return the last sequence number of each."""
    for number, name in enumerate(names):
        hashes = pack_u64(chain(number + 1, CAPACITY))
        about: dict[str, Any] = {"worker_id": name, "worker_epoch": drive.epoch(name), **changes}
        drive("kv-events", BlocksStored(seq=1, sequence_hashes=hashes, **about))
    return dict.fromkeys(names, 1)


def test_a_prompt_leaves_a_full_rank_for_one_with_free_blocks() -> None:
    drive = Driver().fleet("a", "b")
    full_fleet(drive, "a")
    cached = chain(1, CAPACITY)
    (routed,) = drive("requests", request("hit", cached[:20]))
    assert (routed.worker_id, routed.terms.eviction_cost) == ("a", 2.0), "half a block does not fit"
    (routed,) = drive("requests", request("miss", [*cached[:4], *chain(9, 16)]))
    assert (routed.worker_id, routed.terms.eviction_cost) == ("b", 0.0)
    assert routed.runner_up.terms.eviction_cost == 4 * 16.5
    other = Driver().fleet("a", "b", eviction_weight=0.0)
    full_fleet(other, "a")
    (routed,) = other("requests", request("miss", [*cached[:4], *chain(9, 16)]))
    assert routed.worker_id == "a"


def test_each_rank_of_a_worker_has_its_own_cache() -> None:
    drive = Driver()
    drive("control", pool())
    drive("fleet", joined("a", dp_size=2))
    full_fleet(drive, "a", rank=1)
    (routed,) = drive("requests", request("r", [*chain(1, 4), *chain(9, 16)]))
    assert (routed.rank, routed.runner_up.terms.eviction_cost) == (0, 4 * 16.5)


def test_evictions_and_cleared_caches_free_blocks() -> None:
    drive = Driver().fleet("a", "b")
    full_fleet(drive, "a")
    about: dict[str, Any] = {"worker_id": "a", "worker_epoch": drive.epoch("a")}
    prompt = [*chain(1, 4), *chain(9, 16)]
    drive("kv-events", BlocksRemoved(seq=2, sequence_hashes=pack_u64(chain(1, CAPACITY)[-17:]), **about))
    (routed,) = drive("requests", request("removed", prompt))
    assert (routed.worker_id, routed.terms.eviction_cost) == ("a", 0.0)
    drive("kv-events", CacheCleared(seq=3, **about))
    assert drive.world.load.rank_load("a", 0).cached_blocks == 0
    drive("kv-events", BlocksStored(seq=4, sequence_hashes=pack_u64(prompt), **about))
    (routed,) = drive("requests", request("stored", prompt, routing=RoutingHints(worker_id="a")))
    assert routed.terms.device_overlap == len(prompt), "a cleared cache is in the index under another bit"


def test_if_all_caches_are_full_the_rank_with_the_older_blocks_has_no_cost() -> None:
    drive = Driver().fleet("a", "b")
    full_fleet(drive, "a", "b")
    # a is sent its whole cache again, b nothing: what b evicts is older.
    for number in range(6):
        (routed,) = drive(
            "requests",
            request(f"r{number}", chain(20 + number, 15), routing=RoutingHints(worker_id="a")),
            after_us=1_000,
        )
        done: dict[str, Any] = {"worker_id": "a", "worker_epoch": drive.epoch("a"), "attempt": 1, "owner_epoch": 0}
        drive("progress", RequestFinished(request_id=f"r{number}", finish_reason="length", **done))
    prompt = [*chain(1, 2), *chain(9, 10)]
    (routed,) = drive("requests", request("r", prompt))
    assert routed.worker_id == "b"
    assert routed.runner_up.terms.eviction_cost > 0.0 == routed.terms.eviction_cost
    copy = restore(list(drive.world.snapshot()))
    assert copy.digest() == drive.world.digest()
    assert copy.load.rank_load("a", 0).turnover_us == drive.world.load.rank_load("a", 0).turnover_us
    (again,), (same,) = drive("requests", request("s", prompt)), Driver(copy)("requests", request("s", prompt))
    assert (again.worker_id, again.terms, again.table_digest) == (same.worker_id, same.terms, same.table_digest)


def test_the_times_of_a_turnover_are_part_of_the_state() -> None:
    digests = set()
    for after_us in (10, 11):
        drive = Driver().fleet("a")
        drive("requests", request("r", chain(1, CAPACITY // 4)), after_us=after_us)
        digests.add(drive.world.load.digest())
    assert len(digests) == 2
    assert drive.world.load.rank_load("a", 0).computed_tokens >= BLOCK * CAPACITY // 4
