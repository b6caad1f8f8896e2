"""What Dynamo's own tests and documents say of its router holds here: each test names what it conforms to.

Where we differ on purpose, docs/divergence.md says so. Status codes of refusals are in tests/live/test_effects.py, the
names of metrics in tests/live/test_metric_names.py; against Dynamo itself, where it is installed, runs tests/dynamo.
"""

from math import exp
from typing import Any

import pytest

from forebay.core.block_hashes import block_hashes, hash_seed, sequence_hashes
from forebay.core.routing.pool_choice import cell_index, retry_order, target_of
from forebay.core.routing.selection import lowest, softmax_weights
from forebay.core.state.load import FleetLoad
from forebay.core.state.prefix_index import Overlap
from forebay.events.base import pack_u32, pack_u64, unpack_u64
from forebay.events.control import BusyThresholds, BusyThresholdsSet
from forebay.events.decisions import CacheResyncRequested, RequestRejected, RequestRouted
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared
from forebay.events.pools import GridPool
from forebay.events.requests import RoutingHints
from tests.core.costs import roster, table
from tests.core.pool_rules import one_cell
from tests.core.worlds import PROMPTS, Driver, joined, request

KEY = ("w", 0)


def test_hash_vectors() -> None:
    """Dynamo lib/tokens and lib/kv-router, `compute_block_hash_for_seq`: block size 4, tokens 1 to 12."""
    tokens = pack_u32(range(1, 13))
    assert block_hashes(tokens, 4) == [14643705804678351452, 16777012769546811212, 483935686894639516]
    chain = [14643705804678351452, 4945711292740353085, 12583592247330656132]
    assert unpack_u64(sequence_hashes(tokens, 4)) == chain
    assert block_hashes(tokens, 4, hash_seed("my-lora"))[0] == 15671544057904749233
    assert block_hashes(tokens, 4, hash_seed(cache_namespace="tenant-a"))[0] == 5738685477468498325
    assert hash_seed("", "") == 1337
    assert hash_seed("my-lora", "tenant-a") < 1 << 64


def test_the_worked_examples_of_the_router_design() -> None:
    """Dynamo docs, router design: of costs 18, 10 and 11 the second wins."""
    seats = roster(a=(0, 10, 1), b=(0, 5, 1), c=(0, 9, 1))
    found = table(seats, 640, overlaps={("a", 0): Overlap(2), ("b", 0): Overlap(5), ("c", 0): Overlap(8)})
    assert found.prefill_blocks == [10.0] * 3
    assert found.costs == [18.0, 10.0, 11.0]
    assert lowest(found.costs, seed=1) == 1


def test_softmax_of_the_selectors_test() -> None:
    """Dynamo lib/kv-router tests of the selector: logits 0, 3, 9 at temperature 1, scaled to their range."""
    weights = softmax_weights([0.0, 3.0, 9.0], 1.0)
    shares = [weight / sum(weights) for weight in weights]
    expected = [exp(0), exp(-1 / 3), exp(-1)]
    assert shares == pytest.approx([value / sum(expected) for value in expected], rel=1e-12)
    assert len(set(softmax_weights([4.0, 4.0], 0.5))) == 1


# Pools: Dynamo components/global_router, pool_selection.py


@pytest.mark.parametrize(
    ("isl", "cell"),
    [(0, 0), (15_999, 0), (16_000, 1), (31_999, 1), (32_000, 1), (40_000, 1), (-1, 0), (-50_000, 0)],
)
def test_the_cell_of_a_grid(isl: int, cell: int) -> None:
    """isl_min 0, isl_max 32000, resolution 2: values out of range belong to the first or last cell."""
    assert cell_index(isl, 0, 32_000, 2) == cell


def test_the_index_of_a_cell_is_truncated_towards_zero() -> None:
    assert [cell_index(value, 100.0, 400.0, 3) for value in (50.0, 99.9, 199.9, 200.0, 399.9)] == [0, 0, 0, 1, 2]


def test_a_missing_target_is_the_middle_of_its_axis_unless_there_is_a_default() -> None:
    grid = one_cell("a", target_min_ms=10.0, target_max_ms=3_000.0)
    assert target_of(grid, RoutingHints()) == 1_505.0
    assert target_of(grid, RoutingHints(ttft_target_ms=20.0, itl_target_ms=7.0)) == 20.0
    assert target_of(one_cell("a", default_target_ms=99.0), RoutingHints(itl_target_ms=7.0)) == 99.0
    assert target_of(one_cell("a", target="itl"), RoutingHints(ttft_target_ms=20.0, itl_target_ms=7.0)) == 7.0


@pytest.mark.parametrize(
    ("priorities", "selected", "order"),
    [((0, 1, 2), 2, [2, 1, 0]), ((0, 1, 2), 0, [0]), ((0, 1, 1, 0, 2), 4, [4, 1, 2, 0, 3]), ((1, 1), 1, [1])],
)
def test_a_request_is_retried_in_faster_pools(priorities: tuple[int, ...], selected: int, order: list[int]) -> None:
    """A lower number is faster. Pools of equal speed keep their order."""
    pools = [GridPool(pool=str(at), priority=priority) for at, priority in enumerate(priorities)]
    assert retry_order(str(selected), pools) == [str(at) for at in order]


# KV events: Dynamo lib/kv-router, tests of the radix tree and of worker queries


class Caches:
    """A fleet's KV events, numbered for each rank."""

    def __init__(self) -> None:
        self.drive = Driver().fleet("a", "b")
        self._seq: dict[str, int] = {}

    def stored(self, worker: str, blocks: list[int], parent: int | None = None, *, skip: int = 0) -> list[Any]:
        fields = self._next(worker, skip)
        return self.drive("kv-events", BlocksStored(**fields, sequence_hashes=pack_u64(blocks), parent_hash=parent))

    def removed(self, worker: str, blocks: list[int]) -> None:
        self.drive("kv-events", BlocksRemoved(**self._next(worker), sequence_hashes=pack_u64(blocks)))

    def cleared(self, worker: str) -> None:
        self.drive("kv-events", CacheCleared(**self._next(worker)))

    def overlaps(self, blocks: list[int]) -> dict[str, int]:
        found = self.drive.world.index.overlaps(blocks)
        return {worker: overlap.device for (worker, _), overlap in found.items()}

    def count(self, name: str) -> int:
        return self.drive.world.index.counts[name]

    def _next(self, worker: str, skip: int = 0) -> dict[str, Any]:
        self._seq[worker] = self._seq.get(worker, 0) + 1 + skip
        return {"worker_id": worker, "worker_epoch": self.drive.epoch(worker), "seq": self._seq[worker]}


def test_an_unknown_parent_and_an_unknown_block_are_counted() -> None:
    """ParentBlockNotFound and BlockNotFound: no crash, and what is known stays. We keep the block; see divergence."""
    caches = Caches()
    caches.stored("a", [1, 2])
    caches.stored("a", [9], parent=8)
    caches.removed("a", [77])
    assert (caches.count("unknown_parent"), caches.count("unknown_block")) == (1, 1)
    assert caches.overlaps([1, 2, 3]) == {"a": 2}


def test_a_clear_is_of_one_rank_of_one_worker() -> None:
    caches = Caches()
    for worker in ("a", "b"):
        caches.stored(worker, [1, 2])
    caches.cleared("a")
    assert caches.overlaps([1, 2]) == {"b": 2}
    drive = Driver().fleet()
    drive("fleet", joined("a", dp_size=2))
    for rank in (0, 1):
        fields: dict[str, Any] = {"worker_id": "a", "worker_epoch": drive.epoch("a"), "rank": rank}
        drive("kv-events", BlocksStored(**fields, seq=1, sequence_hashes=pack_u64([1])))
    drive("kv-events", CacheCleared(**fields, seq=2))
    assert list(drive.world.index.overlaps([1])) == [("a", 0)]


def test_duplicate_events_are_ignored_and_a_gap_requests_a_resync() -> None:
    """An id above last + 1 recovers [last + 1, id - 1] from the worker, and is applied all the same."""
    caches = Caches()
    caches.stored("a", [1])
    known = caches.drive.world.digest()
    caches.drive("kv-events", BlocksStored(
        worker_id="a", worker_epoch=caches.drive.epoch("a"), seq=1, sequence_hashes=pack_u64([5])
    ))  # fmt: skip
    assert (caches.count("duplicate"), caches.overlaps([5])) == (1, {})
    (resync,) = caches.stored("a", [2], parent=1, skip=3)
    assert isinstance(resync, CacheResyncRequested)
    assert (resync.worker_id, resync.rank, resync.expected_seq, resync.found_seq - 1) == ("a", 0, 2, 4)
    assert caches.overlaps([1, 2]) == {"a": 2}
    assert caches.drive.world.digest() != known


# Active sequences: Dynamo lib/kv-router, tests of `ActiveSequences`


def busy_rank() -> FleetLoad:
    load = FleetLoad()
    load.add_rank(*KEY, 4)
    return load


def now(load: FleetLoad) -> tuple[int, float, int]:
    rank = load.rank_load(*KEY)
    return rank.prefill_tokens, rank.decode_blocks, rank.active_requests


def test_shared_blocks_count_once_until_the_last_request_is_gone() -> None:
    """Two requests that share two blocks and then diverge."""
    load = busy_rank()
    load.book("r1", KEY, prefill_tokens=100, blocks=[1, 2, 3])
    load.book("r2", KEY, prefill_tokens=50, blocks=[1, 2, 9])
    assert now(load) == (150, 4.0, 2)
    assert load.active_depths([1, 2, 3, 4]) == {KEY: 3}
    load.free("r1")
    assert now(load) == (50, 3.0, 1)
    assert load.active_depths([1, 2, 3]) == {KEY: 2}
    load.free("r2")
    assert now(load) == (0, 0.0, 0)
    assert load.active_depths([1]) == {}
    load.drop_rank(*KEY)
    assert load.digest() == FleetLoad().digest()


def test_the_first_token_ends_the_prefill_load_and_so_does_the_end() -> None:
    """MarkPrefillCompleted, and Free that implies it."""
    load = busy_rank()
    load.book("r1", KEY, prefill_tokens=100, blocks=[1])
    load.book("r2", KEY, prefill_tokens=50, blocks=[])
    load.prefill_done("r1")
    assert now(load) == (50, 1.0, 2)
    load.free("r2")
    load.free("r1")
    assert now(load) == (0, 0.0, 0)


# Busy: Dynamo docs, request rejection


@pytest.mark.parametrize(
    "thresholds",
    [
        {"active_prefill_tokens_threshold": 5},
        {"active_prefill_tokens_threshold_frac": 5 / 64},
        {"active_decode_blocks_threshold": 2 / 64},
        {"active_decode_blocks_threshold": 1.0, "active_prefill_tokens_threshold": 5},
    ],
)
def test_a_worker_is_busy_when_all_its_ranks_are_above_any_threshold(thresholds: dict[str, Any]) -> None:
    """OR of the thresholds; a worker only with all its ranks; all workers busy is refused, which is status 503."""
    drive = Driver().fleet()
    drive("fleet", joined("a", dp_size=2))
    drive("control", BusyThresholdsSet(model="m", thresholds=BusyThresholds(**thresholds)))

    def ask(name: str, **hints: Any) -> Any:
        return drive("requests", request(name, PROMPTS[int(name[1:])][:3], routing=RoutingHints(**hints)))[-1]

    for rank in (0, 1):
        routed = ask(f"r{rank}", worker_id="a", rank=rank)
        assert isinstance(routed, RequestRouted)
        assert routed.candidates == 1
    refused = ask("r2")
    assert isinstance(refused, RequestRejected)
    assert refused.reason == "busy"
