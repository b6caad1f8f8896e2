"""Credit for blocks outside of device memory: by weights, or by what a rank measured. Examples computed by hand."""

from typing import Any

import msgspec
import pytest

from forebay.core.restore import restore
from forebay.core.routing.cost import CostTable
from forebay.core.state.prefix_index import NO_OVERLAP, Overlap
from forebay.core.state.rank_load import rates_of
from forebay.core.state.roster import Roster
from forebay.core.world import World
from forebay.events.base import pack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.kv import BlocksStored, StoreBlocksAdded
from forebay.events.metrics import TierCost, TierCosts, TierCostsMeasured
from forebay.events.topics import CONTROL
from tests.core.costs import roster, table
from tests.core.worlds import PROMPTS, Driver, joined, pool, request

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
    return _table(seats, costs, overlap, changes).credit_blocks


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
    assert decayed.credit_blocks == [2 + 10.0, 4 + 10.0]
    by_weight = _table(seats, {"a": None, "b": None}, overlap, {"overlap_score_credit_decay": 1.0})
    assert by_weight.credit_blocks == [2 + 5.0, 4 + 5.0]


def test_the_digest_of_a_table_has_store_blocks_only_if_there_are_any() -> None:
    seats = roster(a=(0, 0, 0), b=(0, 0, 0))
    without = table(seats, 640, overlaps={("a", 0): Overlap(1, 2, 3)}, shared_cache_hit_weight=0.0)
    assert without.digest() == table(seats, 640, overlaps={("a", 0): Overlap(1, 2, 3)}).digest()
    with_blocks = table(seats, 640, overlaps={("a", 0): Overlap(1, 2, 3, 4)}, shared_cache_hit_weight=0.0)
    assert with_blocks.costs == without.costs
    assert with_blocks.digest() != without.digest()
    assert (with_blocks.terms(0).store_overlap, with_blocks.terms(1).store_overlap) == (4, 0)
    assert with_blocks.overlap(1) == NO_OVERLAP


def stored_world(**router: Any) -> Driver:
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
    drive = stored_world(tier_credit="measured")
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
    drive = stored_world()
    before = drive.world.load.digest()
    for changes in ({"worker_id": "z"}, {"worker_epoch": 99}, {"rank": 1}):
        event = TierCostsMeasured(worker_id="a", worker_epoch=drive.epoch("a"), costs=measured())
        drive("metrics", msgspec.structs.replace(event, **changes))
    assert drive.world.load.digest() == before
    assert drive.world.counts["foreign_load_report"] == 3


def test_costs_are_part_of_the_state_only_if_reported_and_leave_with_their_rank() -> None:
    drive, silent = stored_world(), stored_world()
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
    world.configure(PoolConfigured(pool="p", model="m", block_size=4, router=router))
    return world


def test_an_invalid_credit_does_not_decode() -> None:
    wire = encode(CONTROL, pool(tier_credit="measured"))
    assert decode(CONTROL, wire).router.tier_credit == "measured"
    with pytest.raises(ValueError, match="tier_credit"):
        decode(CONTROL, wire.replace(b"measured", b"guessed"))
