"""A deterministic engine: vLLM's v1 scheduler in small, with prefix caching, in virtual time.

Theory of operation. Running sequences decode one token per iteration; at most one, the newest, is still
prefilling, because a prompt is only cut when the token budget of the iteration is spent. Waiting ones are
admitted first come, first served. When blocks run out the newest running sequence is preempted and later
computed again. Between two block boundaries or ends nothing can change, so iterations there are made at once, and
what a sequence has generated follows from the number of iterations: a step touches only those at a boundary, and those
that speak. A step says how long it takes, the caller lets that time go by. Of prefill and decode apart, as with vLLM's
KV connectors, one engine keeps the blocks of a computed prompt; another takes blocks for it and waits until they came.
"""

from collections import deque
from collections.abc import Sequence

from forebay.engine_model.chain_pool import ChainPool, Found
from forebay.engine_model.decoding import NOBODY_JOINS, Decoding, Joining
from forebay.engine_model.requests import (
    EngineConfig,
    EngineRequest,
    EngineStage,
    QueueFull,
    RequestMalformed,
    RequestRefused,
    RequestTooLarge,
)
from forebay.engine_model.sequence import EngineSequence
from forebay.engine_model.steps import (
    CacheChange,
    Computed,
    Emitted,
    Fetch,
    Finished,
    FirstToken,
    Load,
    Removed,
    Step,
    Stored,
)
from forebay.events.base import U32_BYTES, U64_BYTES, array_u64

__all__ = [
    "CacheChange", "Computed", "Emitted", "EngineConfig", "EngineModel", "EngineRequest", "EngineStage", "Fetch",
    "Finished", "FirstToken", "Load", "QueueFull", "Removed", "RequestMalformed", "RequestRefused", "RequestTooLarge",
    "Step", "Stored",
]  # fmt: skip

WAITING_MAX = 65_536  # beyond any router's queue bound; more means that nobody limits the callers
NOTHING_FOUND = Found(0, [])
NOBODY: list[EngineSequence] = []


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
        self._calm = True  # nobody was preempted since the last step
        self._fetching: dict[str, EngineSequence] = {}
        self._asked: list[Fetch] = []  # of those, what the caller was not told yet
        self._joining = NOBODY_JOINS  # in the iteration that is made
        self._kept: dict[str, EngineSequence] = {}  # computed for another engine
        self._changes: list[CacheChange] = []

    def load(self) -> Load:
        """How busy the engine is now."""
        running = len(self._decoding.by_turn) + (self._prefilling is not None)
        return Load(running, len(self._waiting) + len(self._fetching), self.pool.used, self.pool.total)

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
        here = 0 if request.stage == "prefill" else request.max_tokens
        needed = self._blocks_for(prompt_tokens + here)
        if needed > self.pool.total:
            raise RequestTooLarge(
                f"{prompt_tokens} prompt tokens and {here} to generate need {needed} KV blocks "
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
            request.stage,
        )
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> bool:
        """Drop a request and free its blocks, also those that are kept or fetched. False when it is not under way."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence.turn in self._decoding.by_turn:
            self._stop_decoding(sequence)
        elif self._fetching.pop(request_id, None) is not None:
            self._asked = [fetch for fetch in self._asked if fetch.request_id != request_id]
        elif self._kept.pop(request_id, None) is None:
            self._waiting.remove(sequence)
        self._release(sequence)
        return True

    def fetches(self) -> list[Fetch]:
        """What is to be fetched now, each said once; to be asked before each step. It takes no time.

        Requests of the stage `decode` get their blocks first come, first served with the others, which a step admits;
        say `fetched` when the KV of one is there, or `cancel` it.
        """
        waiting = self._waiting
        at = self._ready()
        running = len(self._decoding.by_turn) + (self._prefilling is not None) + at
        if at < len(waiting) and waiting[at].stage == "decode" and running < self.config.max_num_seqs:
            # Who runs takes its blocks first, as in a step.
            self._calm &= self._make_room()
            at = self._ready()
            may_admit = self._calm or not self._decoding.by_turn
            while may_admit and at < len(waiting) and waiting[at].stage == "decode" and self._fetch(waiting[at]):
                del waiting[at]
        asked, self._asked = self._asked, []
        return asked

    def fetched(self, request_id: str, token_seed: int | None = None) -> bool:
        """The KV of a prompt is there: a next step computes its last token. False when nobody fetches it.

        `token_seed` is what the answer is made from where that came with the KV; None if it is as submitted.
        """
        sequence = self._fetching.pop(request_id, None)
        if sequence is None:
            return False
        sequence.stage = "aggregated"  # preempted, it is computed here
        sequence.token_seed = sequence.token_seed if token_seed is None else token_seed
        self._fill(sequence, sequence.prompt_tokens)
        self._waiting.insert(self._ready(), sequence)
        return True

    def release(self, request_id: str) -> bool:
        """Nobody will fetch what is kept for a request. False when nothing is."""
        sequence = self._kept.pop(request_id, None)
        if sequence is None:
            return False
        del self._sequences[request_id]
        self._release(sequence)
        return True

    def reset(self) -> None:
        """Drop every request and the cache."""
        self.pool.clear()
        self._prefilling = None
        self._decoding.clear()
        for some in (self._sequences, self._fetching, self._kept):
            some.clear()
        for others in (self._waiting, self._full, self._asked, self._changes):
            others.clear()

    def clear_cache(self) -> None:
        """Empty the cache; what runs goes back to the head of the queue, to be computed again.

        So does what is being fetched, and is computed here; what is kept is kept no longer.
        """
        while self._decoding.by_turn or self._prefilling is not None:
            self._preempt()
        self._full.clear()
        for request_id in list(self._kept):
            self.release(request_id)
        self._waiting.extendleft(reversed(self._fetching.values()))
        self._fetching.clear()
        self._asked.clear()
        for sequence in self._waiting:
            if sequence.blocks:
                self._release(sequence)
                sequence.stage, sequence.cached_tokens = "aggregated", -1
        self._changes.clear()
        self.pool.clear()

    def step(self, until_us: int = 0) -> Step | None:
        """The next scheduler iteration; None when there is nothing to do until something is fetched or released.

        Iterations that only decode are repeated in one step, while nothing but time changes, until they
        took `until_us`: the same as single steps, but cheaper.
        """
        if not self._sequences and not self._changes:
            return None
        calm = self._make_room() and self._calm
        self._calm = True
        # What was evicted for that is told when the step ends: at the end of this iteration, not of later ones.
        steady = calm and self._prefilling is None and not self._changes
        prefill_tokens, attended, completed = 0, 0, NOBODY
        if self._waiting or self._prefilling is not None:
            # If nobody is left it was for what is kept or fetched that somebody was preempted: others may go on.
            prefill_tokens, attended, completed = self._prefill(may_admit=calm or not self._decoding.by_turn)
        decoding, self._joining = self._joining, NOBODY_JOINS
        if not prefill_tokens and not self._decoding.by_turn and not decoding.sequences:
            return self._stand_still()
        emitted: list[Emitted] = []
        finished: list[Finished] = []
        iterations = 1
        config = self.config
        # Each reads its own context: a shared block counts for each, one of a prompt not yet computed for none.
        duration_us = config.timing.step_us(
            prefill_tokens=prefill_tokens,
            prefill_attended=attended,
            decode_sequences=len(self._decoding.by_turn) + decoding.sequences,
            decode_tokens=(self._decoding.blocks + decoding.blocks) * config.block_size,
            cache_tokens=self.pool.total * config.block_size,
        )
        if self._decoding.by_turn:
            if until_us > duration_us and steady and not completed and not prefill_tokens:
                iterations = min(-(-until_us // duration_us), self._decoding.next_due() - self._iteration)
                duration_us *= iterations
            self._decode(iterations, emitted, finished)
        computed: list[Computed] = []
        first_tokens = self._begin(completed, emitted, finished, computed) if completed else []
        assert duration_us > 0
        changes, self._changes = self._changes, []
        return Step(duration_us, iterations, emitted, first_tokens, finished, changes, self.load(), computed)

    def _stand_still(self) -> Step | None:
        """Nobody runs, and nobody can be admitted."""
        changes, self._changes = self._changes, []
        return Step(0, 0, [], [], [], changes, self.load()) if changes else None

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
        self._waiting.insert(self._ready(), victim)

    def _ready(self) -> int:
        """How many are fetched and wait. They stand first: they need no room, and others may wait for theirs."""
        return next((at for at, sequence in enumerate(self._waiting) if not sequence.blocks), len(self._waiting))

    def _reserve(self, sequence: EngineSequence, found: Found, blocks: int) -> bool:
        """So many blocks for a sequence that has none, with those that were found, if there is room."""
        evicted = self.pool.take(found, blocks - found.blocks)
        if evicted is None:
            return False
        if evicted:
            self._changes.append(Removed(evicted))
        sequence.blocks, sequence.held = blocks, found.blocks
        return True

    def _fetch(self, sequence: EngineSequence) -> bool:
        """Blocks for a prompt that another engine computed, if there is room; its last block is always fetched."""
        found = self.pool.find(sequence.hashes, (sequence.prompt_tokens - 1) // self.config.block_size)
        blocks = self._blocks_for(sequence.prompt_tokens)
        if not self._reserve(sequence, found, blocks):
            return False
        # The first token is made from the last one of the prompt, which is computed once more.
        sequence.computed = sequence.cached_tokens = sequence.prompt_tokens - 1
        self._fetching[sequence.request_id] = sequence
        self._asked.append(Fetch(sequence.request_id, sequence.attempt, found.blocks, blocks))
        return True

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
                if sequence.stage == "decode":
                    if not self._fetch(sequence):
                        break
                    self._waiting.popleft()
                    continue
                if sequence.blocks:
                    # The one token that is left to be computed costs what those of answers do, not what prompts do.
                    self._joining = Joining(self._joining.sequences + 1, self._joining.blocks + sequence.blocks)
                    self._waiting.popleft()
                    budget, budget_all = budget - 1, budget_all - 1
                    sequence.computed += 1
                    completed.append(sequence)
                    continue
                chunk = self._admit(sequence, budget)
                if not chunk:
                    break
                self._waiting.popleft()
                self._prefilling = sequence
            else:
                chunk = self._continue(sequence, budget)
                if not chunk:
                    if decoding:
                        break
                    continue
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
        if not self._reserve(sequence, found, blocks):
            return 0
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
        self,
        completed: list[EngineSequence],
        emitted: list[Emitted],
        finished: list[Finished],
        computed: list[Computed],
    ) -> list[FirstToken]:
        """The token that a computed prompt yields in the same iteration; from the next on it decodes."""
        vocabulary = self.config.vocabulary
        first_tokens: list[FirstToken] = []
        for sequence in completed:
            request_id, attempt, generated = sequence.request_id, sequence.attempt, sequence.generated
            if sequence.stage == "prefill":
                self._kept[request_id] = sequence
                computed.append(Computed(request_id, attempt, sequence.cached_tokens))
                continue
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
