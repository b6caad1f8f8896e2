"""One request inside the engine model: its blocks, and what it says."""

from array import array

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import block_hashes, extend_chain
from forebay.engine_model.chain_pool import Run
from forebay.events.base import U32_BYTES, U64_BYTES, U64_MASK, pack_u32

TOKENS_PER_DRAW = 4  # 64 bits of a draw over 16 bits of a token


class EngineSequence(msgspec.Struct):
    """A request under way. Blocks `[:held]` of `hashes` are referenced, `blocks - held` are anonymous.

    While it decodes, `generated` stands still: iteration `now` finds `now - since` tokens generated.
    """

    request_id: str
    attempt: int
    token_seed: int
    hash_seed: int
    prompt_tokens: int
    max_tokens: int
    hashes: "array[int]"
    text: bytes  # packed tokens from the first block without a hash on, perhaps beyond what was said
    mm_hashes: tuple[int, ...] = ()  # of what stands in that first block, beside text
    stage: str = "aggregated"  # "decode" until its KV is there
    generated: int = 0
    computed: int = 0  # tokens in the cache; not kept while decoding
    blocks: int = 0
    held: int = 0
    tail: Run | None = None  # of the pool: it ends with the last block that is held, if that was filled
    since: int = 0
    spoken: int = 0  # iteration `now` says what is in `text` from token `now - spoken` on
    turn: int = -1  # its place among those that decode
    due: int = 0  # the iteration after which its block is full or it ends
    cached_tokens: int = -1  # unknown before the first admission

    def think(self, tokens: int, block_size: int, vocabulary: tuple[int, ...]) -> None:
        """Extend the text up to so many output tokens: drawing them one by one is slower."""
        said = (self.prompt_tokens - len(self.hashes) * block_size) * U32_BYTES
        first = (len(self.text) - said) // U32_BYTES
        if first < tokens:
            self.text += pack_u32(speech(self.token_seed, first, tokens - first, vocabulary))

    def name_block(self, block_size: int, *, silent: bool) -> None:
        """The hash of the first block that came without one; it holds output tokens, unless nothing is said."""
        hashes = self.hashes
        if silent:
            block = silent_block(self.token_seed, self.hash_seed)
        else:
            width = block_size * U32_BYTES
            assert len(self.text) >= width
            (block,) = block_hashes(self.text[:width], block_size, self.hash_seed, {0: self.mm_hashes})
            self.mm_hashes = ()
            self.text = self.text[width:]
        hashes.extend(extend_chain(hashes[-1] if hashes else None, (block,)))


def silent_block(token_seed: int, hash_seed: int) -> int:
    """What stands for the tokens of a block of output where nothing is said."""
    return xxh3_64_intdigest(token_seed.to_bytes(U64_BYTES, "little"), hash_seed)


def speech(seed: int, first: int, count: int, vocabulary: tuple[int, ...]) -> list[int]:
    """Output tokens `first` to `first + count - 1` of who speaks with `seed`: splitmix64 of the index."""
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
