"""What Dynamo's own tests and documents say of its router holds here: each test names what it conforms to.

Where we differ on purpose, docs/divergence.md says so. Status codes of refusals are in tests/live/test_effects.py, the
names of metrics in tests/live/test_metric_names.py; against Dynamo itself, where it is installed, runs tests/dynamo.
"""

from math import exp

import pytest

from forebay.core.block_hashes import block_hashes, hash_seed, sequence_hashes
from forebay.core.routing.pool_choice import cell_index, retry_order, target_of
from forebay.core.routing.selection import softmax_weights
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.pools import GridPool
from forebay.events.requests import RoutingHints
from tests.core.worlds import one_cell


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


# Active sequences: Dynamo lib/kv-router, tests of `ActiveSequences`


# Busy: Dynamo docs, request rejection
