"""The cost of cached blocks that a rank must evict for a prompt: when it is zero, what it adds, and what it changes."""

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import extend_chain
from forebay.core.restore import restore
from forebay.core.routing.cost import CostTable, Demand, cost_table
from forebay.core.state.fleet import FleetWorker
from forebay.core.state.load import FleetLoad
from forebay.core.state.prefix_index import Overlap
from forebay.core.state.roster import CandidateRank, Roster
from forebay.events.base import pack_u64
from forebay.events.control import RouterConfig
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, LowerTier
from forebay.events.progress import RequestFinished
from forebay.events.requests import RoutingHints
from tests.core.costs import BLOCK_SIZE
from tests.core.worlds import BLOCK, Driver, joined, pool, request, spec

CAPACITY = 64  # blocks per worker


def chain(start: int, blocks: int) -> list[int]:
    return extend_chain(None, range(start * 1_000, start * 1_000 + blocks))


def seats(held: list[int], capacity: int = CAPACITY, tiers: Sequence[LowerTier | None] = (None,) * 8) -> Roster:
    """Candidates a, b, … that have `held` blocks on the device."""
    load, found = FleetLoad(), []
    for name, blocks, tier in zip("abcdefgh", held, tiers, strict=False):
        rank = load.add_rank(name, 0, BLOCK_SIZE, capacity)
        load.set_cached((name, 0), blocks, tier)
        found.append(CandidateRank(FleetWorker(spec(name), "l", 0, 1, 0), 0, rank, (name, 0)))
    return Roster(found)


def table(ranks: Roster, blocks: float, overlaps: dict[str, Overlap] | None = None, **config: Any) -> CostTable:
    known = {(name, 0): overlap for name, overlap in (overlaps or {}).items()}
    demand = Demand(int(blocks * BLOCK_SIZE), 0, {}, known, now_us=config.pop("now_us", 0))
    return cost_table(RouterConfig(**config), BLOCK_SIZE, ranks, demand)


def evictions(found: CostTable) -> list[float]:
    return [found.terms(at).eviction_cost for at in range(len(found.costs))]


@given(st.lists(st.integers(0, CAPACITY), min_size=1, max_size=8), st.integers(1, CAPACITY), st.data())
def test_the_cost_is_zero_exactly_while_the_new_blocks_fit(held: list[int], blocks: int, data: st.DataObject) -> None:
    names = "abcdefgh"[: len(held)]
    cached = {name: Overlap(data.draw(st.integers(0, min(one, blocks)))) for name, one in zip(names, held, strict=True)}
    ranks = seats(held)
    for at, load in enumerate(ranks.loads):
        load.turnover_us = (-at - 1,)  # the first of the candidates has the newest blocks
    found, without = table(ranks, blocks, cached), table(ranks, blocks, cached, eviction_weight=0.0)
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
    ranks = seats([CAPACITY, 0])
    assert evictions(table(ranks, 10, {"a": Overlap(4)})) == [24.0, 0.0]
    assert table(ranks, 10, {"a": Overlap(4)}).costs == [6 + 24.0, 10.0]
    assert evictions(table(ranks, 10, eviction_weight=0.5)) == [5.0, 0.0]
    assert evictions(table(ranks, 10, overlap_score_credit=0.5)) == [20.0, 0.0]
    assert table(ranks, 10, prefill_load_scale=3.0).costs == [3.0 * (10 + 40.0), 30.0]
    assert table(ranks, 10, selection_policy="lmetric").costs == [(10 + 40.0) * 1.0, 10.0]
    assert table(ranks, 10, track_prefill_tokens=False).costs == [40.0, 0.0]


@pytest.mark.parametrize("config", [{"use_kv_events": False}, {"overlap_score_credit": 0.0}], ids=str)
def test_there_is_no_cost_if_caches_are_unknown_or_do_not_matter(config: dict[str, Any]) -> None:
    assert evictions(table(seats([CAPACITY, 0]), 10, **config)) == [0.0, 0.0]


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
    assert evictions(table(seats([CAPACITY + 1, 0]), 10)) == [0.0, 0.0]
    assert evictions(table(seats([1, 0], capacity=1), 10)) == [0.0, 0.0]
    # b is unknown, so it is no candidate with room beside a, which has the oldest blocks of all known candidates.
    assert evictions(table(seats([CAPACITY, CAPACITY + 1]), 10)) == [0.0, 0.0]


def test_blocks_of_which_a_lower_tier_has_copies_cost_less() -> None:
    ranks = seats([CAPACITY, CAPACITY, CAPACITY, 0], tiers=["host", "disk", None, None])
    assert evictions(table(ranks, 10)) == [4 * 2.5, 4 * 7.5, 4 * 10.0, 0.0]
    ranks.loads[0].rates = {"host": (1.0, 0.1)}
    assert evictions(table(ranks, 10, tier_credit="measured")) == pytest.approx([4 * 2.0, 4 * 7.5, 4 * 10.0, 0.0])
    assert evictions(table(ranks, 10, host_cache_hit_weight=2.0))[0] == 0.0, "an eviction never lowers a cost"


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
