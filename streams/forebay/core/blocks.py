"""Tokens to block identities: Dynamo's scheme, so that recordings and engines interoperate.

Only full blocks have an identity. A block hash names the tokens of one block; a sequence hash names
the block and everything before it. Source: Dynamo `compute_block_hash_for_seq` and lib/tokens.
"""

from collections.abc import Iterable

from xxhash import xxh3_64_intdigest

from forebay.events.base import U32_BYTES, U64_BYTES, U64_MASK, pack_u64

HASH_SEED = 1337


def hash_seed(lora_name: str = "", cache_namespace: str = "") -> int:
    """The seed of block hashes; adapters and tenants get their own, empty names count as absent."""
    seed = HASH_SEED
    if lora_name:
        seed += xxh3_64_intdigest(lora_name.encode(), 0)
    if cache_namespace:
        seed += xxh3_64_intdigest(cache_namespace.encode(), 1)
    return seed & U64_MASK


def block_hashes(token_ids: bytes, block_size: int, seed: int = HASH_SEED) -> list[int]:
    """One hash per full block of packed u32 token ids; `block_size` is in tokens."""
    assert block_size > 0
    width = block_size * U32_BYTES
    full = len(token_ids) - len(token_ids) % width
    return [xxh3_64_intdigest(token_ids[at : at + width], seed) for at in range(0, full, width)]


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


def sequence_hashes(token_ids: bytes, block_size: int, seed: int = HASH_SEED) -> bytes:
    """The packed u64 sequence hashes of a prompt, one per full block."""
    return pack_u64(extend_chain(None, block_hashes(token_ids, block_size, seed)))
