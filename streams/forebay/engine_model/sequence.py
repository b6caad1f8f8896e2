"""State of one request inside the engine model: its KV blocks and its output tokens."""

from array import array

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import block_hashes, extend_chain
from forebay.engine_model.chain_pool import ChainRun
from forebay.events.base import U32_BYTES, U64_BYTES, U64_MASK, pack_u32

TOKENS_PER_DRAW = 4  # a draw has 64 bits, a token uses 16


class EngineSequence(msgspec.Struct):
    """Request in the engine.

    It uses `blocks` KV blocks. The first `held` of them are full, and the pool knows their hashes. The others are
    anonymous. While the sequence decodes, `generated` is not updated: in iteration `now` it has generated `now - since`
    tokens.
    """

    request_id: str
    attempt: int
    token_seed: int
    hash_seed: int
    prompt_tokens: int
    max_tokens: int
    hashes: "array[int]"
    text: bytes  # packed tokens from the first block without a hash on, possibly beyond what was emitted
    mm_hashes: tuple[int, ...] = ()  # of the objects in that first block
    stage: str = "aggregated"  # "decode" until its KV has arrived
    first_position: int = 0  # position of the first output token in the whole response
    generated: int = 0
    computed: int = 0  # tokens in the cache; not updated while decoding
    blocks: int = 0
    held: int = 0
    tail: ChainRun | None = None  # run of the pool that ends with the last held block, if this sequence filled it
    since: int = 0
    text_origin: int = 0  # iteration `now` emits the token at position `now - text_origin` of `text`
    turn: int = -1  # position among the decoding sequences
    due: int = 0  # iteration after which its block is full or it ends
    cached_tokens: int = -1  # unknown before the first admission

    def extend_text(self, tokens: int, block_size: int, vocabulary: tuple[int, ...]) -> None:
        """Generate output tokens in advance, up to `tokens` in total. To generate them one by one would be slower."""
        prompt_bytes = (self.prompt_tokens - len(self.hashes) * block_size) * U32_BYTES
        first = (len(self.text) - prompt_bytes) // U32_BYTES
        if first < tokens:
            position = self.first_position + first
            self.text += pack_u32(generate_tokens(self.token_seed, position, tokens - first, vocabulary))

    def name_block(self, block_size: int, *, no_tokens: bool) -> None:
        """Append the sequence hash of the first block that has none.

        Args:
            block_size: tokens per block.
            no_tokens: whether the engine emits no tokens, so that the hash depends on the seed alone.
        """
        hashes = self.hashes
        if no_tokens:
            block = seed_block(self.token_seed, self.hash_seed)
        else:
            width = block_size * U32_BYTES
            assert len(self.text) >= width
            (block,) = block_hashes(self.text[:width], block_size, self.hash_seed, {0: self.mm_hashes})
            self.mm_hashes = ()
            self.text = self.text[width:]
        hashes.extend(extend_chain(hashes[-1] if hashes else None, (block,)))


def seed_block(token_seed: int, hash_seed: int) -> int:
    """Return the block hash of an output block of an engine that emits no tokens."""
    return xxh3_64_intdigest(token_seed.to_bytes(U64_BYTES, "little"), hash_seed)


def generate_tokens(seed: int, first: int, count: int, vocabulary: tuple[int, ...]) -> list[int]:
    """Return the output tokens at positions `first` to `first + count - 1` of a response.

    The tokens depend on seed and position only (splitmix64 of the position).
    """
    size = len(vocabulary)
    draw_first = first // TOKENS_PER_DRAW
    tokens: list[int] = []
    for draw in range(draw_first, (first + count - 1) // TOKENS_PER_DRAW + 1):
        mixed = (seed + (draw + 1) * 0x9E3779B97F4A7C15) & U64_MASK
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & U64_MASK
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & U64_MASK
        mixed ^= mixed >> 31
        tokens += (
            vocabulary[(mixed & 0xFFFF) * size >> 16],
            vocabulary[(mixed >> 16 & 0xFFFF) * size >> 16],
            vocabulary[(mixed >> 32 & 0xFFFF) * size >> 16],
            vocabulary[(mixed >> 48) * size >> 16],
        )
    skip = first - draw_first * TOKENS_PER_DRAW
    return tokens[skip : skip + count]
