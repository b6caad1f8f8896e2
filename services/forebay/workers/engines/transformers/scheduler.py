"""Which tokens the transformers engine computes next, and in which KV blocks: requests interleave step by step.

Theory of operation. A step gives every running sequence its next token, all in one forward pass, and spends what is
left of its token budget on prompts, first come, first served; a long prompt takes several steps. Full blocks are named
by their canonical sequence hash and stay cached when nobody uses them. When blocks run out the newest sequence is
preempted and computed again later, as in vLLM. Nothing here knows of torch: a `Runner` computes, this says what, where.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed
from forebay.engine_model.model import Emitted, EngineConfig, Finished, FirstToken, Load, Removed, Stored
from forebay.events.base import U64_BYTES, pack_u32, unpack_u32, unpack_u64
from forebay.events.requests import Sampling
from forebay.events.tokens import AnswerError, TokenLogprob
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, Cleared, EngineBatch, Failed, Vector
from forebay.workers.engines.transformers.blocks import KvBlocks

WAITING_MAX = 4_096  # beyond what one machine answers within any timeout


class Sampler(Protocol):
    """Draws tokens for one request."""

    def __call__(self, tokens: Sequence[int], logits: Any) -> tuple[int, TokenLogprob | None]:
        """The token that follows `tokens`, and its logarithmic probability if that is wanted. Raises ValueError."""


@dataclass(frozen=True, slots=True)
class Row:
    """A token whose keys and values belong at `position` of a sequence that lies in the blocks of `places`."""

    token: int
    position: int
    places: Sequence[int]


class Runner(Protocol):
    """A model whose keys and values lie in numbered blocks. Logits are its own business, and its samplers'."""

    context_tokens: int
    vocabulary_size: int

    def prefill(self, tokens: Sequence[int], first: int, places: Sequence[int]) -> Any:
        """Compute `tokens` from position `first` on: the logits after the last one."""

    def decode(self, rows: Sequence[Row]) -> Sequence[Any]:
        """Compute one token of each sequence: the logits after each."""

    def hidden_sum(self, tokens: Sequence[int], first: int, places: Sequence[int]) -> Any:
        """As `prefill`, but the sum of the last hidden states of these tokens; sums can be added."""

    def embedding(self, hidden_sum: Any, tokens: int) -> bytes:
        """The mean of so many tokens at length 1, packed little-endian f32."""

    def sampler(self, sampling: Sampling, prompt_tokens: int) -> Sampler:
        """What draws the tokens of a request. Raises ValueError for what cannot be sampled so."""

    def stop_tokens(self, sampling: Sampling) -> frozenset[int]:
        """The tokens that end the answer to a request."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request: its tokens, prompt first, and how far they are computed and into which blocks.

    The first `named` of `places` are known by the first of `hashes`.
    """

    item: WorkItem
    tokens: list[int]
    prompt_tokens: int
    hashes: list[int]
    seed: int
    sampler: Sampler
    stop_tokens: frozenset[int]
    places: list[int] = field(default_factory=list)
    named: int = 0
    computed: int = 0
    cached_tokens: int = -1
    hidden_sum: Any = None

    @property
    def embeds(self) -> bool:
        return self.item.task == "embed"

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_tokens


@dataclass(slots=True)
class _Said:
    """What the next batch has to tell."""

    changes: list[CacheChange] = field(default_factory=list)
    emitted: list[Emitted] = field(default_factory=list)
    vectors: list[Vector] = field(default_factory=list)
    first_tokens: list[FirstToken] = field(default_factory=list)
    finished: list[Finished] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)


class Refused(Exception):
    """A request that cannot be served; nothing changed."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.error = AnswerError(status=status, code=code, message=message)


class Scheduler:
    """The requests of one rank. `submit`, then `step` while it is `busy`."""

    def __init__(self, runner: Runner, config: EngineConfig, rank: int) -> None:
        self._runner = runner
        self._config = config
        self._rank = rank
        self._blocks = KvBlocks(config.kv_blocks_total)
        self._sequences: dict[str, _Sequence] = {}
        self._waiting: deque[_Sequence] = deque()
        self._prefilling: _Sequence | None = None
        self._decoding: dict[_Sequence, None] = {}  # oldest first; the one prefilling is newer than all
        self._said = _Said()
        self._reported = self.load()

    @property
    def busy(self) -> bool:
        """Whether there is anything to compute."""
        return bool(self._sequences)

    def load(self) -> Load:
        """How busy the engine is now."""
        running = len(self._decoding) + (self._prefilling is not None)
        pool = self._blocks.pool
        return Load(running, len(self._waiting), pool.used, pool.total)

    def submit(self, item: WorkItem) -> None:
        """Queue a request whose id is not under way; a refusal is told by the next batch."""
        try:
            sequence = self._checked(item)
        except Refused as refusal:
            self._said.failed.append(Failed(item.request_id, item.attempt, refusal.error))
            return
        self._sequences[item.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it is under way, and free its blocks."""
        sequence = self._sequences.get(request_id)
        if sequence is not None:
            if sequence in self._waiting:
                self._waiting.remove(sequence)
            self._end(sequence)

    def reset(self) -> None:
        """Drop every request and the cache; nothing from before is told."""
        self._blocks.clear()
        self._sequences.clear()
        self._waiting.clear()
        self._prefilling = None
        self._decoding.clear()
        self._said = _Said()
        self._reported = self.load()

    def clear(self) -> None:
        """Empty the cache. Requests under way are computed again: their blocks were part of it."""
        while self._prefilling is not None or self._decoding:
            self._preempt()
        self._blocks.clear()
        self._said.changes.append(Cleared())

    def step(self) -> EngineBatch | None:
        """Compute a token of every running sequence and a piece of the prompts; None when there is nothing to tell."""
        if self._sequences:
            self._make_room()
            self._decode()
            self._prefill()
        said, load = self._said, self.load()
        if load == self._reported and said == _Said():
            return None
        self._said, self._reported = _Said(), load
        return EngineBatch(
            rank=self._rank,
            load=load,
            cache_changes=said.changes,
            emitted=said.emitted,
            vectors=said.vectors,
            first_tokens=said.first_tokens,
            finished=said.finished,
            failed=said.failed,
        )

    def _checked(self, item: WorkItem) -> _Sequence:
        """Raises Refused."""
        tokens = list(unpack_u32(item.token_ids))
        hashes = list(unpack_u64(item.sequence_hashes))
        sampling, runner, block_size = item.sampling, self._runner, self._config.block_size
        wanted = 0 if item.task == "embed" else sampling.max_tokens
        if not tokens:
            raise Refused(400, "invalid_request", "a request needs at least one prompt token")
        highest = max((*tokens, *(one.token_id for one in sampling.logit_bias)))
        if highest >= runner.vocabulary_size:
            raise Refused(
                400, "invalid_request", f"token ids lie below {runner.vocabulary_size} in this model, not at {highest}"
            )
        if len(hashes) != len(tokens) // block_size:
            raise Refused(
                400,
                "invalid_request",
                f"{len(tokens)} prompt tokens are {len(tokens) // block_size} full blocks of {block_size}, "
                f"but {len(item.sequence_hashes) // U64_BYTES} block hashes came with them",
            )
        if len(set(hashes)) != len(hashes):
            raise Refused(400, "invalid_request", "a block hash comes twice, but it names its block and all before it")
        room = min(runner.context_tokens, block_size * self._config.kv_blocks_total)
        if len(tokens) + wanted > room:
            raise Refused(
                400,
                "context_length_exceeded",
                f"the engine has room for {room} tokens of a request: {len(tokens)} of the prompt and {wanted} to "
                "generate do not fit",
            )
        if item.lora_name:
            raise Refused(400, "unsupported", f"the transformers engine has no LoRA adapters, {item.lora_name} neither")
        if sampling.structured is not None:
            raise Refused(400, "unsupported", "the transformers engine has no structured outputs")
        if len(self._sequences) >= WAITING_MAX:
            raise Refused(503, "engine_overloaded", f"{WAITING_MAX} requests are under way already")
        try:
            sampler = runner.sampler(sampling, len(tokens))
        except ValueError as error:
            raise Refused(400, "invalid_request", str(error)) from error
        seed = hash_seed(item.lora_name, item.cache_namespace)
        return _Sequence(item, tokens, len(tokens), hashes, seed, sampler, runner.stop_tokens(sampling))

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._config.block_size)

    def _take(self, sequence: _Sequence, prefix: int, blocks: int) -> bool:
        """Blocks for a sequence, `prefix` of them known, if there is room."""
        taken = self._blocks.take(sequence.hashes[:prefix], blocks - prefix)
        if taken is None:
            return False
        places, evicted = taken
        sequence.places += places
        if evicted:
            self._said.changes.append(Removed(tuple(evicted)))
        return True

    def _make_room(self) -> None:
        """A block for every decoding sequence whose last one is full, the oldest first."""
        for sequence in list(self._decoding):
            while sequence in self._decoding and sequence.computed == len(sequence.places) * self._config.block_size:
                if not self._take(sequence, 0, 1):
                    self._preempt()

    def _preempt(self) -> None:
        """The newest running sequence goes back to the head of the queue, to be computed again."""
        victim = self._prefilling or next(reversed(self._decoding))
        self._withdraw(victim)
        self._waiting.appendleft(victim)

    def _withdraw(self, sequence: _Sequence) -> None:
        """Out of those that run, and its blocks given back."""
        if sequence is self._prefilling:
            self._prefilling = None
        self._decoding.pop(sequence, None)
        self._blocks.release(sequence.hashes[: sequence.named], sequence.places[sequence.named :])
        sequence.places.clear()
        sequence.named = sequence.computed = 0
        sequence.hidden_sum = None

    def _end(self, sequence: _Sequence) -> None:
        self._withdraw(sequence)
        del self._sequences[sequence.item.request_id]

    def _decode(self) -> None:
        running = list(self._decoding)
        if not running:
            return
        rows = [Row(one.tokens[-1], one.computed, one.places) for one in running]
        for sequence, logits in zip(running, self._runner.decode(rows), strict=True):
            sequence.computed += 1
            self._name(sequence)
            self._speak(sequence, logits)

    def _prefill(self) -> None:
        """Spend what is left of the budget on prompts."""
        budget = self._config.max_num_batched_tokens - len(self._decoding)
        while budget > 0:
            sequence = self._prefilling or self._admitted()
            if sequence is None:
                return
            first = sequence.computed
            end = min(len(sequence.tokens), first + budget)
            if not self._take(sequence, 0, self._blocks_for(end) - len(sequence.places)):
                self._preempt()
                return
            tokens = sequence.tokens[first:end]
            budget -= len(tokens)
            compute = self._runner.hidden_sum if sequence.embeds else self._runner.prefill
            result = compute(tokens, first, sequence.places)
            sequence.computed = end
            if sequence.embeds:
                sequence.hidden_sum = result if sequence.hidden_sum is None else sequence.hidden_sum + result
            else:
                self._name(sequence)
            if end == len(sequence.tokens):
                self._prefilling = None
                self._decoding[sequence] = None
                if sequence.embeds:
                    self._tell_embedding(sequence)
                else:
                    self._speak(sequence, result)

    def _admitted(self) -> _Sequence | None:
        """The next in the queue, with what is cached of its prompt; None when there is none or no room."""
        if not self._waiting or len(self._decoding) >= self._config.max_num_seqs:
            return None
        sequence = self._waiting[0]
        # The last token is always computed: the next one is made from it. An embedding is made from all of them.
        blocks_max = 0 if sequence.embeds else (len(sequence.tokens) - 1) // self._config.block_size
        prefix = self._blocks.cached_prefix(sequence.hashes, blocks_max)
        if not self._take(sequence, prefix, prefix + 1):
            return None
        self._waiting.popleft()
        self._prefilling = sequence
        sequence.named = prefix
        sequence.computed = prefix * self._config.block_size
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = sequence.computed
        return sequence

    def _name(self, sequence: _Sequence) -> None:
        """Blocks that are full get their names; new ones are told in chains."""
        block_size, hashes = self._config.block_size, sequence.hashes
        full = sequence.computed // block_size
        if len(hashes) < full:
            tokens = sequence.tokens[len(hashes) * block_size : full * block_size]
            output = block_hashes(pack_u32(tokens), block_size, sequence.seed)
            hashes += extend_chain(hashes[-1] if hashes else None, output)
        new = sequence.named
        for index in range(sequence.named, full):
            sequence.places[index], is_new = self._blocks.name(sequence.places[index], hashes[index])
            if not is_new:
                self._tell_stored(hashes, new, index)
                new = index + 1
        self._tell_stored(hashes, new, full)
        sequence.named = full

    def _tell_stored(self, hashes: list[int], first: int, end: int) -> None:
        if first < end:
            self._said.changes.append(Stored(hashes[first - 1] if first else None, tuple(hashes[first:end])))

    def _speak(self, sequence: _Sequence, logits: Any) -> None:
        """The next token of a sequence, and its end if that is one."""
        item, said = sequence.item, self._said
        try:
            token, logprob = sequence.sampler(sequence.tokens, logits)
        except ValueError as error:
            self._end(sequence)
            failure = AnswerError(status=500, code="engine_error", message=str(error))
            said.failed.append(Failed(item.request_id, item.attempt, failure))
            return
        index = sequence.generated
        if not index:
            said.first_tokens.append(FirstToken(item.request_id, item.attempt, sequence.cached_tokens))
        sequence.tokens.append(token)
        logprobs = () if logprob is None else (logprob,)
        said.emitted.append(Emitted(item.request_id, item.attempt, index, pack_u32([token]), logprobs))
        stops = token in sequence.stop_tokens
        if stops or sequence.generated == item.sampling.max_tokens:
            self._finish(sequence, stops=stops)

    def _tell_embedding(self, sequence: _Sequence) -> None:
        item = sequence.item
        packed = self._runner.embedding(sequence.hidden_sum, sequence.prompt_tokens)
        self._said.vectors.append(Vector(item.request_id, item.attempt, packed))
        self._finish(sequence, stops=True)

    def _finish(self, sequence: _Sequence, *, stops: bool) -> None:
        item = sequence.item
        self._end(sequence)
        self._said.finished.append(
            Finished(
                item.request_id,
                item.attempt,
                "stop" if stops else "length",
                sequence.prompt_tokens,
                sequence.generated,
                sequence.cached_tokens,
            )
        )
