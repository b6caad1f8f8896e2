"""State of one request inside the engine model: its KV blocks and its output tokens."""

from array import array
from collections.abc import Callable

import msgspec
from xxhash import xxh3_64_intdigest

from forebay.core.block_hashes import block_hashes, extend_chain
from forebay.engine_model.chain_pool import ChainRun
from forebay.engine_model.requests import EngineConfig, EngineRequest, RequestMalformed, RequestTooLarge
from forebay.events.base import U32_BYTES, U64_BYTES, U64_MASK, array_u64, pack_u32

TOKENS_PER_DRAW = 4  # a draw has 64 bits, a token uses 16


class EngineSequence(msgspec.Struct):
    """Request in the engine.

    It uses `blocks` KV blocks. The first `held` of them are full, and the pool knows their hashes. The others are
    anonymous. While the sequence decodes, `generated` is not updated: in iteration `now` it has generated `now - since`
    tokens.
    """

    number: int  # number of requests submitted before it
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
    may_load: bool = True  # whether to ask for blocks of slower tiers before the next admission

    def extend_text(self, tokens: int, block_size: int, vocabulary: tuple[int, ...]) -> None:
        """Generate output tokens in advance, up to `tokens` in total. To generate them one by one would be slower."""
        prompt_bytes = (self.prompt_tokens - len(self.hashes) * block_size) * U32_BYTES
        first = (len(self.text) - prompt_bytes) // U32_BYTES
        if first < tokens:
            position = self.first_position + first
            self.text += pack_u32(generate_tokens(self.token_seed, position, tokens - first, vocabulary))

    def name_block(self, block_size: int, named: Callable[[int, int, bytes], None] | None, *, no_tokens: bool) -> None:
        """Append the sequence hash of the first block that has none.

        `named` gets the parent, hash and tokens of a block that these determine. If the engine emits no tokens, the
        hash depends on the seed alone.
        """
        hashes = self.hashes
        parent = hashes[-1] if hashes else None
        mm_hashes, self.mm_hashes = self.mm_hashes, ()
        text = b""
        if no_tokens:
            block = seed_block(self.token_seed, self.hash_seed)
        else:
            width = block_size * U32_BYTES
            assert len(self.text) >= width
            text, self.text = self.text[:width], self.text[width:]
            (block,) = block_hashes(text, block_size, self.hash_seed, {0: mm_hashes})
        hashes.extend(extend_chain(parent, (block,)))
        if named is not None and parent is not None and not mm_hashes:
            named(parent, hashes[-1], text)


def open_sequence(request: EngineRequest, config: EngineConfig, number: int) -> EngineSequence:
    """Return the sequence of a new request. Raises RequestRefused if the engine can never serve it."""
    block_size = config.block_size
    prompt_tokens = len(request.token_ids) // U32_BYTES
    full = prompt_tokens // block_size
    if prompt_tokens < 1 or request.max_tokens < 1:
        raise RequestMalformed("a request needs at least one prompt token and one token to generate")
    if len(request.sequence_hashes) != full * U64_BYTES:
        raise RequestMalformed(
            f"{prompt_tokens} prompt tokens are {full} full blocks of {block_size}, "
            f"but {len(request.sequence_hashes) // U64_BYTES} block hashes came with them"
        )
    here = 0 if request.stage == "prefill" else request.max_tokens
    needed = -(-(prompt_tokens + here) // block_size)
    if needed > config.kv_blocks_total:
        raise RequestTooLarge(
            f"{prompt_tokens} prompt tokens and {here} to generate need {needed} KV blocks "
            f"of {block_size} tokens, but the engine has {config.kv_blocks_total}"
        )
    hashes = array_u64(request.sequence_hashes)
    if len(set(hashes)) != full:
        raise RequestMalformed("duplicate block hash: every sequence hash of a prompt must be different")
    return EngineSequence(
        number,
        request.request_id,
        request.attempt,
        request.token_seed,
        request.hash_seed,
        prompt_tokens,
        request.max_tokens,
        hashes,
        request.token_ids[full * block_size * U32_BYTES :] + request.output,
        request.tail_mm_hashes,
        request.stage,
        request.first_position,
    )


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
