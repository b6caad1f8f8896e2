"""A deterministic engine: vLLM's v1 scheduler in small, with prefix caching, in virtual time.

Theory of operation. Running sequences decode one token per iteration; at most one, the newest, is still
prefilling, because a prompt is only cut when the token budget of the iteration is spent. Waiting ones are
admitted first come, first served. When blocks run out the newest running sequence is preempted and later
computed again. Between two block boundaries or ends nothing can change, so iterations there are made at once, and
what a sequence has generated follows from the number of iterations: a step touches only those at a boundary, and those
that speak. It never knows what time it is: a step says how long it takes, the caller lets that time go by.
"""

from collections import deque
from collections.abc import Sequence
from typing import Literal

import msgspec

from forebay.core.blocks import HASH_SEED
from forebay.core.chain_pool import ChainPool, Found
from forebay.core.engine_decoding import Decoding
from forebay.core.engine_sequence import EngineSequence
from forebay.core.engine_timing import EngineTiming, MockerTiming
from forebay.events.base import U32_BYTES, U64_BYTES, array_u64
from forebay.events.kv import Tier
from forebay.events.tokens import TokenLogprob

WAITING_MAX = 65_536  # beyond any router's queue bound; more means that nobody limits the callers
VOCABULARY_MAX = 65_536  # a token is drawn from 16 bits
NOTHING_FOUND = Found(0, [])
NOBODY: list[EngineSequence] = []


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's size and pace. Defaults are Dynamo's mocker's; `vocabulary` is the token ids to speak with.

    Without a vocabulary the engine is silent: prompts count by their length, no tokens are emitted, and output blocks
    are named after `token_seed`, so that requests of different seeds share none. All else is the same, and faster.
    """

    vocabulary: tuple[int, ...] | None
    block_size: int = 64
    kv_blocks_total: int = 16_384
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    timing: EngineTiming = MockerTiming()

    def __post_init__(self) -> None:
        if min(self.block_size, self.kv_blocks_total, self.max_num_seqs) < 1:
            raise ValueError("block_size, kv_blocks_total and max_num_seqs must be at least 1")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): every running sequence needs a token per step"
            )
        if self.vocabulary is not None and not 1 <= len(self.vocabulary) <= VOCABULARY_MAX:
            raise ValueError(f"a vocabulary has 1 to {VOCABULARY_MAX} tokens, not {len(self.vocabulary)}")


class EngineRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to answer a prompt: packed u32 tokens, packed u64 hashes of its full blocks.

    `hash_seed` is the one that the hashes were made with: output blocks are named with it, too. `tail_mm_hashes` are of
    what stands in the prompt's last block, if that is not full.
    """

    request_id: str
    attempt: int
    token_ids: bytes
    sequence_hashes: bytes
    token_seed: int
    max_tokens: int
    hash_seed: int = HASH_SEED
    tail_mm_hashes: tuple[int, ...] = ()


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
    logprobs: tuple[TokenLogprob, ...] = ()


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
    """Blocks entered one tier: a chain that continues `parent`, or starts a sequence when it is None.

    `hashes` may be an array ("Q"), which is packed at once. `engine_hashes` are the engine's own names of them, where
    it has others.
    """

    parent: int | None
    hashes: Sequence[int]
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()


class Removed(msgspec.Struct, frozen=True, gc=False):
    """Blocks left one tier; `hashes` and `engine_hashes` as in `Stored`."""

    hashes: Sequence[int]
    tier: Tier = "device"
    engine_hashes: tuple[int, ...] = ()


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


class EngineModel:
    """One rank of an engine. `submit`, then `step` until it returns None."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self.pool = ChainPool(config.kv_blocks_total)
        self._sequences: dict[str, EngineSequence] = {}
        self._waiting: deque[EngineSequence] = deque()
        self._prefilling: EngineSequence | None = None
        self._decoding = Decoding()  # the one prefilling is newer than all of these
        self._iteration = 0  # of those in which something decoded
        self._full: list[EngineSequence] = []  # those that need a block before they go on, oldest first
        self._changes: list[CacheChange] = []

    def load(self) -> Load:
        """How busy the engine is now."""
        running = len(self._decoding.by_turn) + (self._prefilling is not None)
        return Load(running, len(self._waiting), self.pool.used, self.pool.total)

    def warm(self, hashes: Sequence[int]) -> None:
        """Start with these blocks in the cache, as an engine that outlived a restart of its surroundings."""
        self.pool.warm(hashes)

    def held(self) -> list[int]:
        """The sequence hashes in the cache, ascending."""
        return sorted(self.pool.content())

    def generated(self, undone: int = 0) -> dict[str, int]:
        """Output tokens of every request under way, without those of the last `undone` iterations."""
        now = self._iteration - undone
        return {
            name: now - one.since if one.turn in self._decoding.by_turn else one.generated
            for name, one in self._sequences.items()
        }

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
        hashes = array_u64(request.sequence_hashes)
        if len(set(hashes)) != full:
            raise RequestMalformed("a block hash comes twice, but it names its block and all before it")
        if len(self._waiting) >= WAITING_MAX:
            raise QueueFull(f"{WAITING_MAX} requests are waiting already")
        sequence = EngineSequence(
            request.request_id,
            request.attempt,
            request.token_seed,
            request.hash_seed,
            prompt_tokens,
            request.max_tokens,
            hashes,
            request.token_ids[full * block_size * U32_BYTES :],
            request.tail_mm_hashes,
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
            self._stop_decoding(sequence)
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
        self._full.clear()

    def clear_cache(self) -> None:
        """Empty the cache; what runs goes back to the head of the queue, to be computed again."""
        while self._decoding.by_turn or self._prefilling is not None:
            self._preempt()
        self._full.clear()
        self.pool.clear()

    def step(self, until_us: int = 0) -> Step | None:
        """The next scheduler iteration; None when there is nothing to do.

        Iterations that only decode are repeated in one step, while nothing but time changes, until they
        took `until_us`: the same as single steps, but cheaper.
        """
        if not self._sequences:
            return None
        assert not self._changes
        calm = self._make_room()
        # What was evicted for that is told when the step ends: at the end of this iteration, not of later ones.
        steady = calm and self._prefilling is None and not self._changes
        prefill_tokens, attended, completed = 0, 0, NOBODY
        if self._waiting or self._prefilling is not None:
            prefill_tokens, attended, completed = self._prefill(may_admit=calm)
        emitted: list[Emitted] = []
        finished: list[Finished] = []
        iterations = 1
        config = self.config
        # Each reads its own context: a shared block counts for each, one of a prompt not yet computed for none.
        duration_us = config.timing.step_us(
            prefill_tokens=prefill_tokens,
            prefill_attended=attended,
            decode_sequences=len(self._decoding.by_turn),
            decode_tokens=self._decoding.blocks * config.block_size,
            cache_tokens=self.pool.total * config.block_size,
        )
        if self._decoding.by_turn:
            if until_us > duration_us and steady and not prefill_tokens:
                iterations = min(-(-until_us // duration_us), self._decoding.next_due() - self._iteration)
                duration_us *= iterations
            self._decode(iterations, emitted, finished)
        first_tokens = self._begin(completed, emitted, finished) if completed else []
        assert duration_us > 0
        changes = self._changes
        self._changes = []
        return Step(duration_us, iterations, emitted, first_tokens, finished, changes, self.load())

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def _make_room(self) -> bool:
        """A block for every decoding sequence whose last one is full. False when any had to be preempted."""
        calm = True
        for sequence in self._full:
            while sequence.blocks and not self._take(sequence, 1):
                self._preempt()
                calm = False
            if sequence.blocks:
                self._decoding.blocks += 1
                done = self._iteration - sequence.since
                self._go_on(sequence, done, min(self.config.block_size, sequence.max_tokens - done))
        self._full.clear()
        return calm

    def _take(self, sequence: EngineSequence, blocks: int) -> bool:
        """Anonymous blocks for a running sequence, if there is room."""
        evicted = self.pool.take(NOTHING_FOUND, blocks)
        if evicted is None:
            return False
        if evicted:
            self._changes.append(Removed(evicted))
        sequence.blocks += blocks
        return True

    def _preempt(self) -> None:
        """The newest running sequence goes back to the head of the queue, to be computed again."""
        if self._prefilling is None:
            victim = self._decoding.newest()
            self._stop_decoding(victim)
        else:
            victim = self._prefilling
            self._prefilling = None
        self._release(victim)
        self._waiting.appendleft(victim)

    def _release(self, sequence: EngineSequence) -> None:
        self.pool.release(sequence.hashes, sequence.held, sequence.blocks - sequence.held)
        sequence.blocks = sequence.held = sequence.computed = 0
        sequence.tail = None

    def _prefill(self, *, may_admit: bool) -> tuple[int, int, list[EngineSequence]]:
        """Spend the token budget on prompts: tokens computed, pairs attended, and sequences done with theirs."""
        decoding = len(self._decoding.by_turn)
        budget = budget_all = self.config.max_num_batched_tokens - decoding
        attended = 0
        completed: list[EngineSequence] = []
        while budget:
            sequence = self._prefilling
            if sequence is None:
                running = decoding + len(completed)
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
            attended += chunk * sequence.computed + chunk * (chunk + 1) // 2
            sequence.computed += chunk
            self._fill(sequence, sequence.computed)
            if sequence.computed == sequence.prompt_tokens + sequence.generated:
                self._prefilling = None
                completed.append(sequence)
        return budget_all - budget, attended, completed

    def _admit(self, sequence: EngineSequence, budget: int) -> int:
        """Blocks for the first chunk of a waiting sequence: the tokens to compute, 0 for no room."""
        known = sequence.prompt_tokens + sequence.generated
        # The last token is always computed: it is what the next one is made from.
        found = self.pool.find(sequence.hashes, (known - 1) // self.config.block_size)
        cached_tokens = found.blocks * self.config.block_size
        chunk = min(budget, known - cached_tokens)
        blocks = self._blocks_for(cached_tokens + chunk)
        evicted = self.pool.take(found, blocks - found.blocks)
        if evicted is None:
            return 0
        if evicted:
            self._changes.append(Removed(evicted))
        sequence.blocks = blocks
        sequence.held = found.blocks
        sequence.computed = cached_tokens
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = cached_tokens
        return chunk

    def _continue(self, sequence: EngineSequence, budget: int) -> int:
        """Blocks for the next chunk of a prompt: the tokens to compute, 0 when it had to be preempted."""
        chunk = min(budget, sequence.prompt_tokens + sequence.generated - sequence.computed)
        if not self._take(sequence, self._blocks_for(sequence.computed + chunk) - sequence.blocks):
            self._preempt()
            return 0
        return chunk

    def _fill(self, sequence: EngineSequence, computed: int) -> None:
        """Blocks that `computed` tokens make full get their names; new content is reported in chains."""
        full = computed // self.config.block_size
        hashes = sequence.hashes
        if len(hashes) < full:
            sequence.name_block(self.config.block_size, silent=self.config.vocabulary is None)
        begin = sequence.held
        if begin == full:
            return
        new, sequence.tail = self.pool.fill(hashes, begin, full, sequence.tail)
        for first, end in new:
            self._changes.append(Stored(hashes[first - 1] if first else None, hashes[first:end]))
        sequence.held = full

    def _decode(self, iterations: int, emitted: list[Emitted], finished: list[Finished]) -> None:
        """`iterations` tokens of every decoding sequence; none reaches a boundary before the last."""
        now = self._iteration
        self._iteration = now + iterations
        if self.config.vocabulary is not None:
            span = iterations * U32_BYTES
            for sequence in self._decoding.by_turn.values():
                at = (now - sequence.spoken) * U32_BYTES
                token_ids = sequence.text[at : at + span]
                emitted.append(Emitted(sequence.request_id, sequence.attempt, now - sequence.since, token_ids))
        for sequence in self._decoding.take_due(self._iteration):
            generated = self._iteration - sequence.since
            self._fill(sequence, sequence.prompt_tokens + generated - 1)
            if generated < sequence.max_tokens:
                self._full.append(sequence)
            else:
                self._decoding.remove(sequence)
                sequence.generated = generated
                self._finish(sequence, finished)

    def _begin(
        self, completed: list[EngineSequence], emitted: list[Emitted], finished: list[Finished]
    ) -> list[FirstToken]:
        """The token that a computed prompt yields in the same iteration; from the next on it decodes."""
        vocabulary = self.config.vocabulary
        first_tokens: list[FirstToken] = []
        for sequence in completed:
            request_id, attempt, generated = sequence.request_id, sequence.attempt, sequence.generated
            if vocabulary is not None:
                sequence.think(generated + 1, self.config.block_size, vocabulary)
                at = (sequence.computed - len(sequence.hashes) * self.config.block_size) * U32_BYTES
                emitted.append(Emitted(request_id, attempt, generated, sequence.text[at : at + U32_BYTES]))
            if not generated:
                first_tokens.append(FirstToken(request_id, attempt, sequence.cached_tokens))
            sequence.generated = done = generated + 1
            left = sequence.max_tokens - done
            if not left:
                self._finish(sequence, finished)
                continue
            self._decoding.add(sequence)
            sequence.since = self._iteration - done
            room = sequence.blocks * self.config.block_size - sequence.computed
            if room:
                self._go_on(sequence, done, min(room, left))
            else:
                self._full.append(sequence)
        return first_tokens

    def _go_on(self, sequence: EngineSequence, done: int, more: int) -> None:
        """Nothing but `more` tokens will come of a decoding sequence, which has `done`, until it is looked at again."""
        self._decoding.look_at(sequence, self._iteration + more)
        if self.config.vocabulary is not None:
            block_size = self.config.block_size
            sequence.think(done + more, block_size, self.config.vocabulary)
            known = sequence.prompt_tokens + done - len(sequence.hashes) * block_size
            sequence.spoken = self._iteration - known

    def _stop_decoding(self, sequence: EngineSequence) -> None:
        self._decoding.remove(sequence)
        sequence.generated = self._iteration - sequence.since

    def _finish(self, sequence: EngineSequence, finished: list[Finished]) -> None:
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
