"""A deterministic engine: vLLM's v1 scheduler in small, with prefix caching, in virtual time.

Theory of operation. Running sequences decode one token per iteration; at most one, the newest, is still
prefilling, because a prompt is only cut when the token budget of the iteration is spent. Waiting ones are
admitted first come, first served. When blocks run out the newest running sequence is preempted and later
computed again. Between two block boundaries or ends nothing can change, so iterations there are made at once.
It never knows what time it is: a step says how long it takes, the caller lets that time go by.
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from forebay.core.block_pool import BlockPool
from forebay.core.blocks import block_hashes, extend_chain
from forebay.core.engine_timing import decode_us, prefill_us
from forebay.events.base import U32_BYTES, U64_BYTES, U64_MASK, pack_u32, unpack_u64

WAITING_MAX = 65_536  # beyond any router's queue bound; more means that nobody limits the callers
VOCABULARY_MAX = 65_536  # a token is drawn from 16 bits
TOKENS_PER_DRAW = 4  # 64 bits of a draw over 16 bits of a token


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's size. Defaults are Dynamo's mocker's; `vocabulary` is the token ids to speak with."""

    vocabulary: tuple[int, ...]
    block_size: int = 64
    kv_blocks_total: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192

    def __post_init__(self) -> None:
        if min(self.block_size, self.kv_blocks_total, self.max_num_seqs) < 1:
            raise ValueError("block_size, kv_blocks_total and max_num_seqs must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a token per step"
            )
        if not 1 <= len(self.vocabulary) <= VOCABULARY_MAX:
            raise ValueError(f"a vocabulary has 1 to {VOCABULARY_MAX} tokens, not {len(self.vocabulary)}")


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to answer a prompt: packed u32 tokens, packed u64 hashes of its full blocks."""

    request_id: str
    attempt: int
    token_ids: bytes
    sequence_hashes: bytes
    token_seed: int
    max_tokens: int


class RequestRefused(Exception):
    """The engine does not take the request; nothing changed. The text is fit for the caller."""


class RequestTooLarge(RequestRefused):
    """Prompt and answer together can never fit into the cache."""


class RequestMalformed(RequestRefused):
    """An empty prompt, no token wanted, or hashes that do not belong to the prompt's blocks."""


class QueueFull(RequestRefused):
    """`WAITING_MAX` requests wait already."""


class Emitted(msgspec.Struct, frozen=True, gc=False):
    """New output tokens of a request, packed u32; `first_index` counts its output tokens from 0."""

    request_id: str
    attempt: int
    first_index: int
    token_ids: bytes


class FirstToken(msgspec.Struct, frozen=True, gc=False):
    """A prompt was computed; `cached_tokens` of it were found in the cache."""

    request_id: str
    attempt: int
    cached_tokens: int


class Finished(msgspec.Struct, frozen=True, gc=False):
    """A request got its last token."""

    request_id: str
    attempt: int
    reason: Literal["length", "stop"]
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int


class Stored(msgspec.Struct, frozen=True, gc=False):
    """Blocks entered the cache: a chain that continues `parent`, or starts a sequence when it is None."""

    parent: int | None
    hashes: tuple[int, ...]


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks were evicted."""

    hashes: tuple[int, ...]


CacheChange = Stored | Removed


class Load(msgspec.Struct, frozen=True, gc=False):
    """How busy the engine is."""

    running: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int


class Step(msgspec.Struct, frozen=True, gc=False):
    """What one scheduler iteration did, or `iterations` of them in which the same sequences decoded."""

    duration_us: int
    iterations: int
    emitted: list[Emitted]
    first_tokens: list[FirstToken]
    finished: list[Finished]
    cache_changes: list[CacheChange]
    load: Load


class _Sequence(msgspec.Struct):
    """A request under way. Blocks `[:held]` of `hashes` are referenced, `blocks - held` are anonymous."""

    request_id: str
    attempt: int
    token_seed: int
    prompt_tokens: int
    max_tokens: int
    hashes: list[int]
    text: bytes  # packed tokens from the first block without a hash on, perhaps beyond what was said
    at: int  # where in `text` the next output token begins, in bytes
    generated: int = 0
    computed: int = 0  # tokens in the cache; not kept while decoding
    blocks: int = 0
    held: int = 0
    quiet: int = 0  # iterations until its block is full or it ends
    cached_tokens: int = -1  # unknown before the first admission


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


class EngineModel:
    """One rank of an engine. `submit`, then `step` until it returns None."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.kv_blocks_total)
        self._width = config.block_size * U32_BYTES
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: _Sequence | None = None
        self._decoding: list[_Sequence] = []  # oldest first; the one prefilling is newer than all
        self._changes: list[CacheChange] = []

    def load(self) -> Load:
        """How busy the engine is now."""
        running = len(self._decoding) + (self._prefilling is not None)
        return Load(running, len(self._waiting), self.pool.used, self.pool.total)

    def warm(self, hashes: Sequence[int]) -> None:
        """Start with these blocks in the cache, as an engine that outlived a restart of its surroundings."""
        self.pool.warm(hashes)

    def held(self) -> list[int]:
        """The sequence hashes in the cache, ascending."""
        return sorted(self.pool.content())

    def submit(self, request: EngineRequest) -> None:
        """Queue a request whose id is not under way. Raises RequestRefused for one that cannot be served."""
        assert request.request_id not in self._sequences
        block_size = self.config.block_size
        prompt_tokens = len(request.token_ids) // U32_BYTES
        full = prompt_tokens // block_size
        if prompt_tokens < 1 or request.max_tokens < 1:
            raise RequestMalformed("a request needs at least one prompt token and one token to generate")
        if len(request.sequence_hashes) != full * U64_BYTES:
            raise RequestMalformed(
                f"{prompt_tokens} prompt tokens are {full} full blocks of {block_size}, "
                f"but {len(request.sequence_hashes) // U64_BYTES} block hashes came with them"
            )
        needed = self._blocks_for(prompt_tokens + request.max_tokens)
        if needed > self.pool.total:
            raise RequestTooLarge(
                f"{prompt_tokens} prompt tokens and {request.max_tokens} to generate need {needed} KV blocks "
                f"of {block_size} tokens, but the engine has {self.pool.total}"
            )
        hashes = unpack_u64(request.sequence_hashes)
        if len(set(hashes)) != full:
            raise RequestMalformed("a block hash comes twice, but it names its block and all before it")
        if len(self._waiting) >= WAITING_MAX:
            raise QueueFull(f"{WAITING_MAX} requests are waiting already")
        sequence = _Sequence(
            request.request_id,
            request.attempt,
            request.token_seed,
            prompt_tokens,
            request.max_tokens,
            hashes,
            request.token_ids[full * self._width :],
            (prompt_tokens - full * block_size) * U32_BYTES,
        )
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> bool:
        """Drop a request and free its blocks. False when it is not under way."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence.blocks:
            self._decoding.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._release(sequence)
        return True

    def reset(self) -> None:
        """Drop every request and the cache."""
        self.pool.clear()
        self._sequences.clear()
        self._waiting.clear()
        self._prefilling = None
        self._decoding.clear()

    def step(self, until_us: int = 0) -> Step | None:
        """The next scheduler iteration; None when there is nothing to do.

        Iterations that only decode are repeated in one step, while nothing but time changes, until they
        took `until_us`: the same as single steps, but cheaper.
        """
        if not self._sequences:
            return None
        assert not self._changes
        calm = self._make_room()
        steady = calm and self._prefilling is None
        prefill_tokens, completed = self._prefill(may_admit=calm)
        emitted: list[Emitted] = []
        finished: list[Finished] = []
        iterations = 1
        duration_us = prefill_us(prefill_tokens)
        if self._decoding:
            one_us = decode_us(self.pool.used, self.pool.total)
            if until_us > one_us and steady and not prefill_tokens:
                iterations = min(-(-until_us // one_us), *[sequence.quiet for sequence in self._decoding])
            duration_us += one_us * iterations
            self._decode(iterations, emitted, finished)
        first_tokens = self._begin(completed, emitted, finished)
        assert duration_us > 0
        changes = self._changes
        self._changes = []
        return Step(duration_us, iterations, emitted, first_tokens, finished, changes, self.load())

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _make_room(self) -> bool:
        """A block for every decoding sequence whose last one is full. False when any had to be preempted."""
        calm = True
        decoding = self._decoding
        for sequence in [sequence for sequence in decoding if not sequence.quiet]:
            while sequence.blocks and not self._take(sequence, 1):
                self._preempt()
                calm = False
            if sequence.blocks:
                left = sequence.max_tokens - sequence.generated
                sequence.quiet = min(self.config.block_size, left)
        return calm

    def _take(self, sequence: _Sequence, blocks: int) -> bool:
        """Anonymous blocks for a running sequence, if there is room."""
        evicted = self.pool.take((), blocks)
        if evicted is None:
            return False
        if evicted:
            self._changes.append(Removed(tuple(evicted)))
        sequence.blocks += blocks
        return True

    def _preempt(self) -> None:
        """The newest running sequence goes back to the head of the queue, to be computed again."""
        if self._prefilling is None:
            victim = self._decoding.pop()
        else:
            victim = self._prefilling
            self._prefilling = None
        self._release(victim)
        self._waiting.appendleft(victim)

    def _release(self, sequence: _Sequence) -> None:
        self.pool.release(sequence.hashes[: sequence.held], sequence.blocks - sequence.held)
        sequence.blocks = sequence.held = sequence.computed = sequence.quiet = 0

    def _prefill(self, *, may_admit: bool) -> tuple[int, list[_Sequence]]:
        """Spend the token budget on prompts: tokens computed, and the sequences that are done with theirs."""
        budget = budget_all = self.config.max_num_batched_tokens - len(self._decoding)
        completed: list[_Sequence] = []
        while budget:
            sequence = self._prefilling
            if sequence is None:
                running = len(self._decoding) + len(completed)
                if not may_admit or not self._waiting or running >= self.config.max_num_seqs:
                    break
                sequence = self._waiting[0]
                chunk = self._admit(sequence, budget)
                if not chunk:
                    break
                self._waiting.popleft()
                self._prefilling = sequence
            else:
                chunk = self._continue(sequence, budget)
                if not chunk:
                    break
            budget -= chunk
            sequence.computed += chunk
            self._fill(sequence, sequence.computed)
            if sequence.computed == sequence.prompt_tokens + sequence.generated:
                self._prefilling = None
                completed.append(sequence)
        return budget_all - budget, completed

    def _admit(self, sequence: _Sequence, budget: int) -> int:
        """Blocks for the first chunk of a waiting sequence: the tokens to compute, 0 for no room."""
        known = sequence.prompt_tokens + sequence.generated
        # The last token is always computed: it is what the next one is made from.
        prefix = self.pool.cached_prefix(sequence.hashes, (known - 1) // self.config.block_size)
        cached_tokens = prefix * self.config.block_size
        chunk = min(budget, known - cached_tokens)
        blocks = self._blocks_for(cached_tokens + chunk)
        evicted = self.pool.take(sequence.hashes[:prefix], blocks - prefix)
        if evicted is None:
            return 0
        if evicted:
            self._changes.append(Removed(tuple(evicted)))
        sequence.blocks = blocks
        sequence.held = prefix
        sequence.computed = cached_tokens
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = cached_tokens
        return chunk

    def _continue(self, sequence: _Sequence, budget: int) -> int:
        """Blocks for the next chunk of a prompt: the tokens to compute, 0 when it had to be preempted."""
        chunk = min(budget, sequence.prompt_tokens + sequence.generated - sequence.computed)
        if not self._take(sequence, self._blocks_for(sequence.computed + chunk) - sequence.blocks):
            self._preempt()
            return 0
        return chunk

    def _fill(self, sequence: _Sequence, computed: int) -> None:
        """Blocks that `computed` tokens make full get their names; new content is reported in chains."""
        full = computed // self.config.block_size
        hashes = sequence.hashes
        if len(hashes) < full:
            self._name_block(sequence)
        fill = self.pool.fill
        begin = sequence.held
        for index in range(begin, full):
            if not fill(hashes[index]):
                self._report_stored(hashes, begin, index)
                begin = index + 1
        self._report_stored(hashes, begin, full)
        sequence.held = full

    def _report_stored(self, hashes: list[int], begin: int, end: int) -> None:
        if begin < end:
            self._changes.append(Stored(hashes[begin - 1] if begin else None, tuple(hashes[begin:end])))

    def _name_block(self, sequence: _Sequence) -> None:
        """The hash of the first block that came without one; it holds output tokens."""
        width = self._width
        assert len(sequence.text) >= width
        hashes = sequence.hashes
        blocks = block_hashes(sequence.text[:width], self.config.block_size)
        hashes += extend_chain(hashes[-1] if hashes else None, blocks)
        sequence.text = sequence.text[width:]
        sequence.at -= width

    def _decode(self, iterations: int, emitted: list[Emitted], finished: list[Finished]) -> None:
        """`iterations` tokens of every decoding sequence; none reaches a boundary before the last."""
        span = iterations * U32_BYTES
        boundary: list[_Sequence] = []
        for sequence in self._decoding:
            begin = sequence.at
            sequence.at = end = begin + span
            if end > len(sequence.text):
                self._think(sequence)
            generated = sequence.generated
            token_ids = sequence.text[begin:end]
            emitted.append(Emitted(sequence.request_id, sequence.attempt, generated, token_ids))
            sequence.generated = generated + iterations
            sequence.quiet -= iterations
            if not sequence.quiet:
                boundary.append(sequence)
        ended = False
        for sequence in boundary:
            self._fill(sequence, sequence.prompt_tokens + sequence.generated - 1)
            if sequence.generated == sequence.max_tokens:
                ended = True
                self._finish(sequence, finished)
        if ended:
            self._decoding = [sequence for sequence in self._decoding if sequence.blocks]

    def _think(self, sequence: _Sequence) -> None:
        """Extend the text by what comes next, up to a block of it: drawing tokens one by one is slower."""
        said = (sequence.prompt_tokens - len(sequence.hashes) * self.config.block_size) * U32_BYTES
        first = (len(sequence.text) - said) // U32_BYTES
        count = min(sequence.max_tokens - first, self.config.block_size)
        tokens = speech(sequence.token_seed, first, count, self.config.vocabulary)
        sequence.text += pack_u32(tokens)

    def _begin(self, completed: list[_Sequence], emitted: list[Emitted], finished: list[Finished]) -> list[FirstToken]:
        """The token that a computed prompt yields in the same iteration; from the next on it decodes."""
        first_tokens: list[FirstToken] = []
        for sequence in completed:
            begin = sequence.at
            sequence.at = end = begin + U32_BYTES
            if end > len(sequence.text):
                self._think(sequence)
            request_id, attempt = sequence.request_id, sequence.attempt
            emitted.append(Emitted(request_id, attempt, sequence.generated, sequence.text[begin:end]))
            if not sequence.generated:
                first_tokens.append(FirstToken(request_id, attempt, sequence.cached_tokens))
            sequence.generated += 1
            left = sequence.max_tokens - sequence.generated
            if not left:
                self._finish(sequence, finished)
                continue
            room = sequence.blocks * self.config.block_size - sequence.computed
            sequence.quiet = min(room, left)
            self._decoding.append(sequence)
        return first_tokens

    def _finish(self, sequence: _Sequence, finished: list[Finished]) -> None:
        self._release(sequence)
        del self._sequences[sequence.request_id]
        finished.append(
            Finished(
                sequence.request_id,
                sequence.attempt,
                "length",
                sequence.prompt_tokens,
                sequence.generated,
                sequence.cached_tokens,
            )
        )
