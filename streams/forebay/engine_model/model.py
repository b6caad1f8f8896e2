"""Deterministic engine in virtual time: a small version of vLLM's v1 scheduler with prefix caching.

Running sequences decode one token per iteration. At most one sequence, the newest, is still prefilling, because a
prompt is only split when the token budget of the iteration is spent. Waiting sequences are admitted first come, first
served. If blocks run out, the newest running sequence is preempted. Until a block is full or a sequence ends, nothing
else can change, so these iterations are computed at once. The result of a step contains its duration; the caller
advances the time. Disaggregated prefill and decode work as with vLLM's KV connectors: one engine keeps the blocks of a
prompt, another allocates blocks and waits until they were fetched. Blocks that a slower tier has are loaded before a
prompt is computed, while other sequences run.
"""

from collections import deque
from collections.abc import Sequence

from forebay.engine_model.allocation import BlockAllocator
from forebay.engine_model.chain_pool import PrefixMatch
from forebay.engine_model.decoding import NONE_JOINING, DecodingBatch, JoiningSequences
from forebay.engine_model.loading import LoadingSequences, OutputBlockNamed, TierMatch
from forebay.engine_model.requests import (
    EngineConfig,
    EngineRequest,
    EngineStage,
    QueueFull,
    RequestMalformed,
    RequestRefused,
    RequestTooLarge,
)
from forebay.engine_model.sequence import EngineSequence, open_sequence
from forebay.engine_model.steps import (
    CacheChange,
    Computed,
    Emitted,
    EngineLoad,
    EngineStep,
    Fetch,
    Finished,
    FirstTokenStep,
    Load,
    Removed,
    Stored,
)
from forebay.engine_model.timing import StepWork
from forebay.events.base import U32_BYTES

__all__ = [
    "CacheChange", "Computed", "Emitted", "EngineConfig", "EngineLoad", "EngineModel", "EngineRequest", "EngineStage",
    "EngineStep", "Fetch", "Finished", "FirstTokenStep", "Load", "QueueFull", "Removed", "RequestMalformed",
    "RequestRefused", "RequestTooLarge", "Stored",
]  # fmt: skip

WAITING_MAX = 65_536  # longer than any router queue; if more requests wait, nothing limits the callers
NO_SEQUENCES: list[EngineSequence] = []


class EngineModel:
    """Model of one engine rank. Submit requests, then call `step` until it returns None; each step has a duration.

    `match` tells how many blocks can be loaded from slower tiers. `named` is called for each output block that gets a
    hash.
    """

    def __init__(
        self, config: EngineConfig, match: TierMatch | None = None, named: OutputBlockNamed | None = None
    ) -> None:
        self.config = config
        self._match = match
        self._blocks = BlockAllocator(config, named)
        self.pool = self._blocks.pool
        self._cache_tokens = self.pool.total * config.block_size
        self._sequences: dict[str, EngineSequence] = {}
        self._waiting: deque[EngineSequence] = deque()
        self._prefilling: EngineSequence | None = None
        self._decoding = DecodingBatch()  # the prefilling sequence is newer than all of these
        self._iteration = 0  # counts iterations in which a sequence decoded
        self._full: list[EngineSequence] = []  # sequences that need a block to continue, oldest first
        self._calm = True  # no sequence was preempted since the last step
        self._fetching: dict[str, EngineSequence] = {}
        self._new_fetches: list[Fetch] = []  # fetches that the caller has not received yet
        self._loading = LoadingSequences()
        self._submitted = 0  # number of requests so far
        self._joining = NONE_JOINING  # sequences that start to decode in the current iteration
        self._kept: dict[str, EngineSequence] = {}  # computed prompts, kept for another engine

    def load(self) -> EngineLoad:
        running = len(self._decoding.by_turn) + (self._prefilling is not None)
        waiting = len(self._waiting) + len(self._fetching) + len(self._loading)
        return EngineLoad(running, waiting, self.pool.used, self.pool.total)

    def warm(self, hashes: Sequence[int]) -> None:
        """Fill the empty cache with these blocks, oldest first, as if it had survived a restart of the worker."""
        self.pool.warm(hashes)

    def held(self) -> list[int]:
        """Return the sequence hashes of all blocks in the cache, in ascending order."""
        return sorted(self.pool.content())

    def generated(self, undone: int = 0) -> dict[str, int]:
        """Return the number of output tokens of every request in flight, not counting the last `undone` iterations."""
        now = self._iteration - undone
        return {
            name: now - one.since if one.turn in self._decoding.by_turn else one.generated
            for name, one in self._sequences.items()
        }

    def submit(self, request: EngineRequest) -> None:
        """Queue a request. Its id must not be in flight. Raises RequestRefused if the engine cannot serve it."""
        assert request.request_id not in self._sequences
        sequence = open_sequence(request, self.config, self._submitted)
        if len(self._waiting) >= WAITING_MAX:
            raise QueueFull(f"the engine's queue is full: {WAITING_MAX} requests are waiting")
        self._submitted += 1
        self._sequences[request.request_id] = sequence
        self._waiting.append(sequence)

    def cancel(self, request_id: str) -> bool:
        """Drop a request and free its blocks, also kept and fetched blocks. Returns False if it is not in flight."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return False
        if sequence is self._prefilling:
            self._prefilling = None
        elif sequence.turn in self._decoding.by_turn:
            self._stop_decoding(sequence)
        elif self._fetching.pop(request_id, None) is not None:
            self._new_fetches = [fetch for fetch in self._new_fetches if fetch.request_id != request_id]
        elif self._loading.end(request_id) is None and self._kept.pop(request_id, None) is None:
            self._waiting.remove(sequence)
        self._blocks.release(sequence)
        return True

    def fetches(self) -> list[Fetch]:
        """Return the new requests to fetch KV. Call this before every step, and end each with `fetched` or `cancel`."""
        waiting = self._waiting
        at = self._ready()
        running = len(self._decoding.by_turn) + (self._prefilling is not None) + at + len(self._loading)
        if at < len(waiting) and waiting[at].stage == "decode" and running < self.config.max_num_seqs:
            # Running sequences take their blocks first, as in a step.
            self._calm &= self._make_room()
            at = self._ready()
            may_admit = self._calm or not self._decoding.by_turn
            while may_admit and at < len(waiting) and waiting[at].stage == "decode" and self._fetch(waiting[at]):
                del waiting[at]
        fetches, self._new_fetches = self._new_fetches, []
        return fetches

    def fetched(self, request_id: str, token_seed: int | None = None) -> bool:
        """Record that the KV of a prompt has arrived. A later step computes the last prompt token.

        `token_seed` replaces the submitted seed unless it is None. Returns False if no such fetch is in flight.
        """
        sequence = self._fetching.pop(request_id, None)
        if sequence is None:
            return False
        sequence.stage = "aggregated"  # after a preemption it is computed here
        sequence.token_seed = sequence.token_seed if token_seed is None else token_seed
        self._blocks.fill(sequence, sequence.prompt_tokens)
        self._waiting.insert(self._ready(), sequence)
        return True

    def loads(self) -> list[Load]:
        """Return the new loads from slower tiers. Call this after every call of `step`, also if it returned None.

        End each load with `loaded` or `cancel`.
        """
        return self._loading.take_new()

    def loaded(self, request_id: str, blocks: int) -> bool:
        """End a load of which the first `blocks` blocks have arrived. A later step computes the rest of the prompt.

        Returns False if no such load is in flight: its blocks were given to others.
        """
        sequence = self._loading.end(request_id)
        if sequence is None:
            return False
        assert 0 <= blocks <= sequence.blocks - sequence.held
        self._blocks.fill(sequence, (sequence.held + blocks) * self.config.block_size)
        self._blocks.release(sequence)
        self._requeue(sequence)
        return True

    def release(self, request_id: str) -> bool:
        """Free the blocks kept for a request that no engine will fetch. Returns False if no blocks are kept for it."""
        sequence = self._kept.pop(request_id, None)
        if sequence is None:
            return False
        del self._sequences[request_id]
        self._blocks.release(sequence)
        return True

    def reset(self) -> None:
        """Drop every request and clear the cache, without reporting cache changes."""
        self.pool.clear()
        self._loading.clear()
        self._prefilling = None
        self._decoding.clear()
        for some in (self._sequences, self._fetching, self._kept):
            some.clear()
        for others in (self._waiting, self._full, self._new_fetches, self._blocks.changes):
            others.clear()

    def clear_cache(self) -> None:
        """Clear the cache. Running and fetching sequences are queued to be computed again; kept prompts are dropped.

        A sequence whose blocks are being loaded is queued without them.
        """
        while self._decoding.by_turn or self._prefilling is not None:
            self._preempt()
        self._full.clear()
        for request_id in list(self._kept):
            self.release(request_id)
        self._waiting.extendleft(reversed(self._fetching.values()))
        self._fetching.clear()
        self._new_fetches.clear()
        for sequence in self._waiting:
            if sequence.blocks:
                self._blocks.release(sequence)
                sequence.stage, sequence.cached_tokens = "aggregated", -1
        for sequence in self._loading.clear():
            self._blocks.release(sequence)
            self._requeue(sequence)
        self._blocks.changes.clear()
        self.pool.clear()

    def step(self, until_us: int = 0) -> EngineStep | None:
        """Run the next scheduler iteration. Return None if there is nothing to compute or report now.

        If an iteration only decodes, it is repeated until `until_us` microseconds have passed or something else than
        time changes. The result is the same as that of single steps.
        """
        if not self._sequences and not self._blocks.changes:
            return None
        running = self._decoding.by_turn
        calm = (not self._full or self._make_room()) and self._calm
        self._calm = True
        # Evictions that made this room are reported at the end of the iteration, so do not repeat it.
        steady = calm and self._prefilling is None and not self._blocks.changes
        prefill_tokens, attended, completed = 0, 0, NO_SEQUENCES
        if self._waiting or self._prefilling is not None:
            # Without a running sequence, the preemption made room for kept or fetched blocks, so others may start.
            prefill_tokens, attended, completed = self._prefill(may_admit=calm or not running)
        decoding, self._joining = self._joining, NONE_JOINING
        if not prefill_tokens and not running and not decoding.sequences:
            return self._stand_still()
        emitted: list[Emitted] = []
        finished: list[Finished] = []
        iterations = 1
        sequences, blocks = len(running) + decoding.sequences, self._decoding.blocks + decoding.blocks
        # Every sequence reads its own context: a shared block counts once per sequence.
        tokens = blocks * self.config.block_size
        duration_us = self.config.timing.step_us(
            StepWork(prefill_tokens, attended, sequences, tokens, self._cache_tokens)
        )
        if running:
            steady &= not (completed or prefill_tokens or self._loading.has_new)  # a new load may end in between
            if steady and until_us > duration_us:
                iterations = min(-(-until_us // duration_us), self._decoding.next_due() - self._iteration)
                duration_us *= iterations
            self._decode(iterations, emitted, finished)
        computed: list[Computed] = []
        first_tokens = self._begin(completed, emitted, finished, computed) if completed else []
        assert duration_us > 0
        changes = self._blocks.take_changes()
        return EngineStep(duration_us, iterations, emitted, first_tokens, finished, changes, self.load(), computed)

    def _stand_still(self) -> EngineStep | None:
        """Return a step that only reports cache changes, or None; no sequence runs and none can be admitted."""
        changes = self._blocks.take_changes()
        return EngineStep(0, 0, [], [], [], changes, self.load()) if changes else None

    def _make_room(self) -> bool:
        """Allocate a block for every decoding sequence whose last block is full; return False if any was preempted."""
        calm = True
        for sequence in self._full:
            while sequence.blocks and not self._blocks.take(sequence, 1):
                self._preempt()
                calm = False
            if sequence.blocks:
                self._decoding.blocks += 1
                done = self._iteration - sequence.since
                self._go_on(sequence, done, min(self.config.block_size, sequence.max_tokens - done))
        self._full.clear()
        return calm

    def _preempt(self) -> None:
        """Return the newest running sequence to the head of the queue, to be computed again."""
        if self._prefilling is None:
            victim = self._decoding.newest()
            self._stop_decoding(victim)
        else:
            victim = self._prefilling
            self._prefilling = None
        self._blocks.release(victim)
        victim.may_load = True
        self._waiting.insert(self._ready(), victim)

    def _ready(self) -> int:
        """Return how many fetched sequences wait. They are first in the queue, because they need no more blocks."""
        return next((at for at, sequence in enumerate(self._waiting) if not sequence.blocks), len(self._waiting))

    def _requeue(self, sequence: EngineSequence) -> None:
        """Return a sequence without blocks to its place in the queue: before those that were submitted later."""
        at = self._ready()
        while at < len(self._waiting) and self._waiting[at].number < sequence.number:
            at += 1
        self._waiting.insert(at, sequence)

    def _loadable(self, sequence: EngineSequence, found: PrefixMatch) -> int:
        """Return how many blocks after those found a slower tier can load for a sequence that is to be admitted."""
        if self._match is None or not sequence.may_load:
            return 0
        if not (missing := self._blocks.reusable(sequence) - found.blocks):
            return 0
        blocks = self._match(sequence.request_id, sequence.hashes, found.blocks)
        sequence.may_load = blocks > 0
        return min(missing, blocks)

    def _load(self, sequence: EngineSequence, found: PrefixMatch, blocks: int) -> bool:
        if not self._blocks.reserve(sequence, found, found.blocks + blocks):
            return False
        sequence.may_load = False
        self._loading.begin(sequence, blocks)
        return True

    def _fetch(self, sequence: EngineSequence) -> bool:
        """Allocate blocks for a prompt to fetch, whose last block is always fetched; return False without room.

        Blocks that a slower tier has are loaded first.
        """
        found = self._blocks.find(sequence)
        if loadable := self._loadable(sequence, found):
            return self._load(sequence, found, loadable)
        blocks = self._blocks.needed(sequence.prompt_tokens)
        if not self._blocks.reserve(sequence, found, blocks):
            return False
        # The first output token needs the last prompt token, which is computed once more.
        sequence.computed = sequence.cached_tokens = sequence.prompt_tokens - 1
        self._fetching[sequence.request_id] = sequence
        self._new_fetches.append(Fetch(sequence.request_id, sequence.attempt, found.blocks, blocks))
        return True

    def _prefill(self, *, may_admit: bool) -> tuple[int, int, list[EngineSequence]]:
        """Spend the token budget on prompts.

        Return computed tokens, attended pairs, and sequences whose prompt is done.
        """
        decoding = len(self._decoding.by_turn)
        budget = budget_all = self.config.max_num_batched_tokens - decoding
        attended = 0
        completed: list[EngineSequence] = []
        while budget:
            sequence = self._prefilling
            if sequence is None:
                running = decoding + len(completed) + len(self._loading)
                if not may_admit or not self._waiting or running >= self.config.max_num_seqs:
                    break
                sequence = self._waiting[0]
                if sequence.stage == "decode":
                    if not self._fetch(sequence):
                        break
                    self._waiting.popleft()
                    continue
                if sequence.blocks:
                    # The one remaining token costs what a decoded token costs, not what a prompt token costs.
                    joining = self._joining
                    self._joining = JoiningSequences(joining.sequences + 1, joining.blocks + sequence.blocks)
                    self._waiting.popleft()
                    budget, budget_all = budget - 1, budget_all - 1
                    sequence.computed += 1
                    completed.append(sequence)
                    continue
                found = self._blocks.find(sequence)
                if loadable := self._loadable(sequence, found):
                    if not self._load(sequence, found, loadable):
                        break
                    self._waiting.popleft()
                    continue
                chunk = self._admit(sequence, found, budget)
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
            self._blocks.fill(sequence, sequence.computed)
            if sequence.computed == sequence.prompt_tokens + sequence.generated:
                self._prefilling = None
                completed.append(sequence)
        return budget_all - budget, attended, completed

    def _admit(self, sequence: EngineSequence, found: PrefixMatch, budget: int) -> int:
        """Allocate blocks for the first chunk of a waiting sequence. Return the tokens to compute, 0 without room."""
        known = sequence.prompt_tokens + sequence.generated
        cached_tokens = found.blocks * self.config.block_size
        chunk = min(budget, known - cached_tokens)
        blocks = self._blocks.needed(cached_tokens + chunk)
        if not self._blocks.reserve(sequence, found, blocks):
            return 0
        sequence.computed = cached_tokens
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = cached_tokens
        return chunk

    def _continue(self, sequence: EngineSequence, budget: int) -> int:
        """Allocate blocks for the next chunk of a prompt; return the tokens to compute, 0 if it was preempted."""
        chunk = min(budget, sequence.prompt_tokens + sequence.generated - sequence.computed)
        if not self._blocks.take(sequence, self._blocks.needed(sequence.computed + chunk) - sequence.blocks):
            self._preempt()
            return 0
        return chunk

    def _decode(self, iterations: int, emitted: list[Emitted], finished: list[Finished]) -> None:
        """Generate `iterations` tokens per decoding sequence; no sequence reaches a boundary before the last one."""
        now = self._iteration
        self._iteration = now + iterations
        if self.config.vocabulary is not None:
            span = iterations * U32_BYTES
            for sequence in self._decoding.by_turn.values():
                at = (now - sequence.text_origin) * U32_BYTES
                token_ids = sequence.text[at : at + span]
                emitted.append(Emitted(sequence.request_id, sequence.attempt, now - sequence.since, token_ids))
        for sequence in self._decoding.take_due(self._iteration):
            generated = self._iteration - sequence.since
            self._blocks.fill(sequence, sequence.prompt_tokens + generated - 1)
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
    ) -> list[FirstTokenStep]:
        """Emit the first token of each computed prompt; the sequence decodes from the next iteration on."""
        vocabulary = self.config.vocabulary
        first_tokens: list[FirstTokenStep] = []
        for sequence in completed:
            request_id, attempt, generated = sequence.request_id, sequence.attempt, sequence.generated
            if sequence.stage == "prefill":
                self._kept[request_id] = sequence
                computed.append(Computed(request_id, attempt, sequence.cached_tokens))
                continue
            if vocabulary is not None:
                sequence.extend_text(generated + 1, self.config.block_size, vocabulary)
                at = (sequence.computed - len(sequence.hashes) * self.config.block_size) * U32_BYTES
                emitted.append(Emitted(request_id, attempt, generated, sequence.text[at : at + U32_BYTES]))
            if not generated:
                first_tokens.append(FirstTokenStep(request_id, attempt, sequence.cached_tokens))
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
        """Let a sequence with `done` output tokens generate `more` tokens before it is checked again."""
        self._decoding.look_at(sequence, self._iteration + more)
        if self.config.vocabulary is not None:
            block_size = self.config.block_size
            sequence.extend_text(done + more, block_size, self.config.vocabulary)
            known = sequence.prompt_tokens + done - len(sequence.hashes) * block_size
            sequence.text_origin = self._iteration - known

    def _stop_decoding(self, sequence: EngineSequence) -> None:
        self._decoding.remove(sequence)
        sequence.generated = self._iteration - sequence.since

    def _finish(self, sequence: EngineSequence, finished: list[Finished]) -> None:
        self._blocks.release(sequence)
        del self._sequences[sequence.request_id]
        usage = sequence.prompt_tokens, sequence.generated, sequence.cached_tokens
        finished.append(Finished(sequence.request_id, sequence.attempt, "length", *usage))
