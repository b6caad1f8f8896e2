"""An engine without a GPU: `EngineModel` in real time, or faster; never sooner than the model says.

Virtual time runs against one deadline that is moved by each step's scaled duration, so that what one sleep
is late the next one makes good. Steps far shorter than a timer's resolution are published together.
"""

import asyncio
import time
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from forebay.core.blocks import hash_seed
from forebay.core.engine_model import (
    CacheChange,
    Emitted,
    EngineConfig,
    EngineModel,
    EngineRequest,
    Finished,
    FirstToken,
    QueueFull,
    RequestMalformed,
    RequestRefused,
    RequestTooLarge,
    Step,
)
from forebay.events.base import U64_MASK
from forebay.events.tokens import AnswerError
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch, Failed, Publish

US_PER_S = 1_000_000
QUANTUM_US = 1_000  # real time that a batch should cover: the resolution of an event loop's timers
BATCH_TOKENS_MAX = 4_096  # at any speedup the event loop is given back after some milliseconds
LAG_S_MAX = 0.1  # a machine that cannot keep up is late, and does not run faster later to make up for more


class MockEngine:
    """`dp_size` independent ranks of `config` from `dp_start_rank` on, `speedup` times as fast as the real thing.

    Like vLLM with its default scheduling policy it serves first come, first served, whatever an item's priority.
    """

    def __init__(self, config: EngineConfig, *, dp_size: int = 1, dp_start_rank: int = 0, speedup: float = 1.0) -> None:
        if not 0 < speedup < float("inf"):
            raise ValueError(f"speedup must be a positive number, not {speedup}")
        ranks = range(dp_start_rank, dp_start_rank + dp_size)
        self._ranks = {rank: _Rank(rank, config, speedup) for rank in ranks}

    async def start(self) -> None:
        """There is no model to load."""

    async def run(self, publish: Publish) -> None:
        """Run every rank until cancelled."""
        async with asyncio.TaskGroup() as group:
            for rank in self._ranks.values():
                group.create_task(rank.run(publish))

    async def stop(self) -> None:
        """There is nothing to free."""

    def warm(self, hashes: Sequence[int], rank: int = 0) -> None:
        """Start a rank with these blocks in its cache."""
        self._ranks[rank].model.warm(hashes)

    def held(self, rank: int) -> list[int]:
        """The blocks in a rank's cache."""
        return self._ranks[rank].model.held()

    def submit(self, item: WorkItem) -> None:
        """Queue an item on the rank that it names, which must be one of this engine's."""
        self._ranks[item.rank].submit(item)

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it is under way."""
        for rank in self._ranks.values():
            rank.cancel(request_id)

    def reset(self) -> None:
        """Drop every request and the caches."""
        for rank in self._ranks.values():
            rank.reset()


class _Rank:
    def __init__(self, number: int, config: EngineConfig, speedup: float) -> None:
        self._number = number
        self.model = EngineModel(config)
        self._speedup = speedup
        self._span_us = max(1, round(QUANTUM_US * speedup))
        self._wake = asyncio.Event()
        self._failed: list[Failed] = []
        self._published = self.model.load()
        self._life = 0  # counts resets: a batch of an earlier life is not published

    def submit(self, item: WorkItem) -> None:
        request = EngineRequest(
            request_id=item.request_id,
            attempt=item.attempt,
            token_ids=item.token_ids,
            sequence_hashes=item.sequence_hashes,
            token_seed=xxh3_64_intdigest(item.token_ids, (item.sampling.seed or 0) & U64_MASK),
            max_tokens=item.sampling.max_tokens,
            hash_seed=hash_seed(item.lora_name, item.cache_namespace),
        )
        try:
            self.model.submit(request)
        except RequestRefused as refusal:
            self._failed.append(Failed(item.request_id, item.attempt, _answer(refusal)))
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        if self.model.cancel(request_id):
            self._wake.set()

    def reset(self) -> None:
        self._life += 1
        self.model.reset()
        self._failed.clear()
        self._published = self.model.load()

    async def run(self, publish: Publish) -> None:
        due = time.monotonic()
        while True:
            life = self._life
            batch, span_us = self._collect()
            if batch is None:
                self._wake.clear()
                await self._wake.wait()
                due = time.monotonic()
                continue
            now = time.monotonic()
            due = max(due, now - LAG_S_MAX) + span_us / (self._speedup * US_PER_S)
            await asyncio.sleep(max(0.0, due - now))
            if life == self._life:
                self._published = batch.load
                publish(batch)

    def _collect(self) -> tuple[EngineBatch | None, int]:
        """Steps for about a quantum and the virtual time they take; None when there is nothing to say."""
        steps: list[Step] = []
        span_us = tokens = 0
        while span_us < self._span_us and tokens < BATCH_TOKENS_MAX:
            step = self.model.step(self._span_us - span_us)
            if step is None:
                break
            steps.append(step)
            span_us += step.duration_us
            tokens += len(step.emitted) * step.iterations
        failed, self._failed = self._failed, []
        load = self.model.load()
        if not steps:
            if not failed and load == self._published:
                return None, 0
            return EngineBatch(rank=self._number, load=load, failed=failed), 0
        cache_changes: list[CacheChange] = []
        first_tokens: list[FirstToken] = []
        finished: list[Finished] = []
        for step in steps:
            cache_changes += step.cache_changes
            first_tokens += step.first_tokens
            finished += step.finished
        batch = EngineBatch(
            rank=self._number,
            load=load,
            cache_changes=cache_changes,
            emitted=steps[0].emitted if len(steps) == 1 else _merge(steps),
            first_tokens=first_tokens,
            finished=finished,
            failed=failed,
        )
        return batch, span_us


def _merge(steps: list[Step]) -> list[Emitted]:
    """One chunk for each request, in the order in which they first spoke."""
    chunks: dict[str, list[Emitted]] = {}
    for step in steps:
        for chunk in step.emitted:
            chunks.setdefault(chunk.request_id, []).append(chunk)
    return [
        Emitted(
            parts[0].request_id,
            parts[0].attempt,
            parts[0].first_index,
            b"".join([part.token_ids for part in parts]),
        )
        for parts in chunks.values()
    ]


def _answer(refusal: RequestRefused) -> AnswerError:
    match refusal:
        case RequestTooLarge():
            return AnswerError(status=400, code="context_length_exceeded", message=str(refusal))
        case RequestMalformed():
            return AnswerError(status=400, code="invalid_request", message=str(refusal))
        case QueueFull():
            return AnswerError(status=503, code="engine_overloaded", message=str(refusal))
        case _:
            raise AssertionError(f"a new kind of refusal: {refusal!r}")
