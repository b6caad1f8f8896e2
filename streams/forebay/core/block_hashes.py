"""Hash the tokens of KV blocks by Dynamo's scheme, so that recordings and engines interoperate.

Only full blocks have a hash. A block hash identifies the tokens of one block and the images and audio in it. A sequence
hash identifies the block and everything before it. The seed separates caches by adapter and tenant. Source: Dynamo
`compute_block_hash_for_seq`, `hash_mm_identifier` and lib/tokens.
"""

import string
import struct
from collections.abc import Iterable, Mapping

from xxhash import xxh3_64_intdigest

from forebay.events.base import U32_BYTES, U64_MASK, pack_u64
from forebay.events.media import Media

HASH_SEED = 1337
DIGEST_CHARS = 64  # SHA-256 in hex: vLLM's identifier of images and audio
DIGEST_CHARS_USED = 16  # 64 bits of the digest
HEX_DIGITS = frozenset(string.hexdigits)
NO_MM_HASHES: Mapping[int, Iterable[int]] = {}

_pack_pair = struct.Struct("<QQ").pack  # a third faster than `int.to_bytes` twice


def hash_seed(lora_name: str = "", cache_namespace: str = "") -> int:
    """Return the seed of block hashes for an adapter and a tenant. An empty name means no adapter, or no tenant."""
    seed = HASH_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_namespace:
        seed += xxh3_64_intdigest(cache_namespace.encode(), 1)
    return seed & U64_MASK


def mm_hash(identifier: str) -> int:
    """Return the 64-bit hash of an image, video or sound: the first 16 digits of a SHA-256, or a hash of other text."""
    assert identifier
    if len(identifier) == DIGEST_CHARS and HEX_DIGITS.issuperset(identifier):
        return int(identifier[:DIGEST_CHARS_USED], 16)
    return xxh3_64_intdigest(identifier.encode(), 0)


def mm_hashes(media: Iterable[Media], block_size: int) -> Mapping[int, Iterable[int]]:
    """Return by block index the `mm_hash` values of all images and videos that have a placeholder token in the block.

    As in Dynamo and vLLM, an object counts for every block that contains any part of it.
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
    """Return the block hash of each full block of a prompt.

    Args:
        token_ids: prompt tokens, as packed u32.
        seed: result of `hash_seed`.
        mm_hashes: `mm_hash` values of the objects in each block, by block index from 0, in any order.
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
    """Return the sequence hashes of consecutive blocks. `parent` is that of the block before; None starts a prompt."""
    chain: list[int] = []
    for block in blocks:
        parent = block if parent is None else xxh3_64_intdigest(_pack_pair(parent, block), HASH_SEED)
        chain.append(parent)
    return chain


def sequence_hashes(
    token_ids: bytes,
    block_size: int,
    seed: int = HASH_SEED,
    mm_hashes: Mapping[int, Iterable[int]] = NO_MM_HASHES,
) -> bytes:
    """Return the sequence hash of each full block of a prompt, as packed u64. For the arguments, see `block_hashes`."""
    return pack_u64(extend_chain(None, block_hashes(token_ids, block_size, seed, mm_hashes)))
