"""Block identity beyond plain text: images and sounds, adapters, tenants. Plain vectors are in test_machines.py."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed, mm_hash, mm_hashes, sequence_hashes
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.media import Media

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


names = st.text(max_size=8)


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
