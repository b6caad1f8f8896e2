"""Tokens to block identities: Dynamo's scheme, so that recordings and engines interoperate.

Only full blocks have an identity. A block hash names the tokens of one block, and the images and sounds that
stand in it; a sequence hash names the block and everything before it. What else tells caches apart, an adapter
or a tenant, is in the seed. Source: Dynamo `compute_block_hash_for_seq`, `hash_mm_identifier` and lib/tokens.
"""

import string
from collections.abc import Iterable, Mapping

from xxhash import xxh3_64_intdigest

from forebay.events.base import U32_BYTES, U64_BYTES, U64_MASK, pack_u64
from forebay.events.media import Media

HASH_SEED = 1337
DIGEST_CHARS = 64  # a SHA-256 in hex: how vLLM names images and sounds
DIGEST_CHARS_USED = 16  # of which 64 bits are enough
HEX_DIGITS = frozenset(string.hexdigits)
NO_MM_HASHES: Mapping[int, Iterable[int]] = {}


def hash_seed(lora_name: str = "", cache_namespace: str = "") -> int:
    """The seed of block hashes; adapters and tenants get their own, empty names count as absent."""
    seed = HASH_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_namespace:
        seed += xxh3_64_intdigest(cache_namespace.encode(), 1)
    return seed & U64_MASK


def mm_hash(identifier: str) -> int:
    """The u64 of an image, video or sound by its name: the head of a hex digest, a hash of any other name."""
    assert identifier
    if len(identifier) == DIGEST_CHARS and HEX_DIGITS.issuperset(identifier):
        return int(identifier[:DIGEST_CHARS_USED], 16)
    return xxh3_64_intdigest(identifier.encode(), 0)


def mm_hashes(media: Iterable[Media], block_size: int) -> Mapping[int, Iterable[int]]:
    """The `mm_hash` of images and videos by each block, counted from 0, in which placeholders of theirs stand.

    `block_size` is in tokens. As Dynamo and vLLM have it: a block names all of which it holds any part.
    """
    found: dict[int, list[int]] = {}
    for one in media:
        last = one.first_token + one.tokens - 1
        for block in range(one.first_token // block_size, last // block_size + 1):
            found.setdefault(block, []).append(mm_hash(one.digest))
    return found or NO_MM_HASHES


def block_hashes(
    token_ids: bytes,
    block_size: int,
    seed: int = HASH_SEED,
    mm_hashes: Mapping[int, Iterable[int]] = NO_MM_HASHES,
) -> list[int]:
    """One hash per full block of packed u32 token ids; `block_size` is in tokens.

    `mm_hashes` holds by block, counted from 0, the `mm_hash` of all that stands in it, in any order.
    """
    assert block_size > 0
    width = block_size * U32_BYTES
    full = len(token_ids) - len(token_ids) % width
    hashes = [xxh3_64_intdigest(token_ids[at : at + width], seed) for at in range(0, full, width)]
    for block, objects in mm_hashes.items():
        if block < len(hashes):
            at = block * width
            hashes[block] = xxh3_64_intdigest(token_ids[at : at + width] + pack_u64(sorted(objects)), seed)
    return hashes


def extend_chain(parent: int | None, blocks: Iterable[int]) -> list[int]:
    """Sequence hashes of blocks that follow `parent`, or start a sequence when it is None."""
    chain: list[int] = []
    for block in blocks:
        if parent is None:
            parent = block
        else:
            pair = parent.to_bytes(U64_BYTES, "little") + block.to_bytes(U64_BYTES, "little")
            parent = xxh3_64_intdigest(pair, HASH_SEED)
        chain.append(parent)
    return chain


def sequence_hashes(
    token_ids: bytes,
    block_size: int,
    seed: int = HASH_SEED,
    mm_hashes: Mapping[int, Iterable[int]] = NO_MM_HASHES,
) -> bytes:
    """The packed u64 sequence hashes of a prompt, one per full block; arguments as of `block_hashes`."""
    return pack_u64(extend_chain(None, block_hashes(token_ids, block_size, seed, mm_hashes)))
