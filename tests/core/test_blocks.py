"""Block identity, and conformance to the tests and documents of Dynamo, which the docstring of each test names."""

from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed, mm_hash, mm_hashes, sequence_hashes
from forebay.core.routing.draws import WEIGHT_ONE, softmax_weights
from forebay.core.routing.pool_choice import cell_index, retry_order, target_of
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.media import Media
from forebay.events.pools import GridPool
from forebay.events.requests import RoutingHints
from tests.core.worlds import one_cell

TOKENS = pack_u32(range(1, 13))
PLAIN = [14643705804678351452, 16777012769546811212, 483935686894639516]
DIGEST = "0123456789abcdef00112233445566778899aabbccddeeffFEDCBA9876543210"


def test_mm_hash_uses_digest_head_or_identifier_hash() -> None:
    assert mm_hash(DIGEST) == 0x0123456789ABCDEF
    assert mm_hash("F" * 64) == (1 << 64) - 1
    for name in ("123", "x" + DIGEST[1:], DIGEST + "0", "ü"):
        assert mm_hash(name) == xxh3_64_intdigest(name.encode())


def test_the_hashes_of_a_blocks_objects_follow_its_tokens_in_order() -> None:
    first, second = 3, 1 << 63
    named = block_hashes(TOKENS, 4, mm_hashes={1: (second, first)})
    text = TOKENS[16:32] + first.to_bytes(8, "little") + second.to_bytes(8, "little")
    assert named == [PLAIN[0], xxh3_64_intdigest(text, 1337), PLAIN[2]]
    assert block_hashes(TOKENS, 4, mm_hashes={1: (first, second)}) == named
    chain = unpack_u64(sequence_hashes(TOKENS, 4, mm_hashes={1: (second, first)}))
    assert chain == extend_chain(None, named)


def test_objects_in_a_partial_block_have_no_effect() -> None:
    assert block_hashes(TOKENS[:40], 4, mm_hashes={2: (5,)}) == PLAIN[:2]
    assert block_hashes(TOKENS, 4, mm_hashes={0: ()}) == PLAIN


names = st.text("aé/:0", max_size=8)


def test_only_full_blocks_are_hashed_and_chains_go_on() -> None:
    assert block_hashes(pack_u32(range(1, 4)), 4) == []
    whole = extend_chain(None, PLAIN)
    assert whole[:2] + extend_chain(whole[1], PLAIN[2:]) == whole


@given(st.lists(st.tuples(names, names), min_size=2, max_size=6, unique=True))
def test_no_two_adapters_or_tenants_share_a_block(salts: list[tuple[str, str]]) -> None:
    chains = [unpack_u64(sequence_hashes(TOKENS, 4, hash_seed(lora, tenant))) for lora, tenant in salts]
    assert len({block for chain in chains for block in chain}) == 3 * len(salts)


@pytest.mark.parametrize(
    ("lora", "tenant", "first"),
    [("", "", PLAIN[0]), ("my-lora", "", 15671544057904749233), ("", "tenant-a", 5738685477468498325)],
)
def test_an_adapters_and_a_tenants_images_are_salted_too(lora: str, tenant: str, first: int) -> None:
    seed = hash_seed(lora, tenant)
    assert block_hashes(TOKENS, 4, seed)[0] == first
    assert block_hashes(TOKENS, 4, seed, {0: (9,)})[0] == xxh3_64_intdigest(TOKENS[:16] + bytes([9] + [0] * 7), seed)


def test_an_image_affects_every_block_it_overlaps() -> None:
    one, other = (
        Media(kind="image", digest=digest * 32, mime="image/png", first_token=first, tokens=tokens)
        for digest, first, tokens in (("ab", 3, 6), ("cd", 9, 3))
    )
    first, second = mm_hash(one.digest), mm_hash(other.digest)
    assert mm_hashes((one, other), 4) == {0: [first], 1: [first], 2: [first, second]}
    assert mm_hashes((other,), 12) == {0: [second]}
    assert mm_hashes((), 4) == {}


# What Dynamo's own tests and documents say of its router. docs/divergence.md lists the differences.


def test_hashes_equal_published_vectors() -> None:
    """Dynamo lib/tokens and lib/kv-router, `compute_block_hash_for_seq`: block size 4, tokens 1 to 12."""
    assert block_hashes(TOKENS, 4) == PLAIN
    chain = [14643705804678351452, 4945711292740353085, 12583592247330656132]
    assert unpack_u64(sequence_hashes(TOKENS, 4)) == chain
    assert hash_seed("", "") == 1337
    assert hash_seed("my-lora", "tenant-a") < 1 << 64


def test_softmax_of_the_selectors_test() -> None:
    """Dynamo lib/kv-router tests of the selector: logits 0, 3, 9 at temperature 1, scaled to their range."""
    weights = softmax_weights([0.0, 3.0, 9.0], 1.0)
    assert weights[0] == WEIGHT_ONE == 1 << 53
    assert [weight / WEIGHT_ONE for weight in weights] == pytest.approx([exp(0), exp(-1 / 3), exp(-1)], rel=1e-12)
    assert weights == softmax_weights([9.0, 3.0, 0.0], 1.0)[::-1]
    assert weights == softmax_weights([1.0, 4.0, 10.0], 1.0), "only differences count"
    assert len(set(softmax_weights([4.0, 4.0], 0.5))) == 1


# Pools: Dynamo components/global_router, pool_selection.py


@pytest.mark.parametrize(
    ("isl", "cell"),
    [(0, 0), (15_999, 0), (16_000, 1), (31_999, 1), (32_000, 1), (40_000, 1), (-1, 0), (-50_000, 0)],
)
def test_lengths_select_a_cell_of_a_grid(isl: int, cell: int) -> None:
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
