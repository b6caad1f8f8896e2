"""Driver of an engine without a worker: runs requests and collects the batches."""

import asyncio
import contextlib
import itertools
import struct
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from prometheus_client import CollectorRegistry

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.engine_model.model import Finished, Stored
from forebay.events.base import pack_u32, unpack_u32, unpack_u64
from forebay.events.decisions import Stage
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import Tier
from forebay.events.progress import OnboardedTokens
from forebay.events.requests import Sampling, Task
from forebay.events.tokens import ResponseError, TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import Cleared, Engine, EngineBatch

DEADLINE_S = 60.0
NUMBERS = itertools.count(1)
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@dataclass
class Answer:
    """Response of an engine to one request."""

    item: WorkItem
    tokens: list[int] = field(default_factory=list)
    chunks: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    cached: int | None = None  # as reported with the first token
    onboarded: tuple[OnboardedTokens, ...] = ()
    finished: Finished | None = None
    error: ResponseError | None = None
    vector: tuple[float, ...] = ()
    prefilled: Prefilled | None = None
    not_fetched: str | None = None
    missing: tuple[int, ...] | None = None  # blocks of the prompt that were not reported when it ended

    @property
    def over(self) -> bool:
        return any(end is not None for end in (self.finished, self.error, self.prefilled, self.not_fetched))


class Driven:
    """Driver of one engine.

    `held` are the blocks of an index in device memory, by rank, from the cache changes. `lower` are those in other
    tiers of all ranks, and `shared` those in the shared store.
    """

    def __init__(self, engine: Engine, spec: WorkerSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.batches: list[EngineBatch] = []
        self.held: dict[int, set[int]] = {rank: set() for rank in spec.ranks}
        self.lower: dict[Tier, set[int]] = {"host": set(), "disk": set()}
        self.shared: set[int] = set()
        self.answers: dict[str, Answer] = {}
        self.ended: BaseException | None = None
        self._news = asyncio.Event()

    @classmethod
    @contextlib.asynccontextmanager
    async def running(cls, engine: Engine, spec: WorkerSpec) -> AsyncIterator[Self]:
        """Start and run an engine, and stop it at the end."""
        try:
            one = cls(engine, await engine.start(spec))
            running = asyncio.create_task(engine.run(one.publish))
            running.add_done_callback(one.on_end)
            try:
                yield one
            finally:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)
        finally:
            await engine.stop()

    def publish(self, batch: EngineBatch) -> None:
        self.batches.append(batch)
        held = self.held[batch.rank]
        for change in batch.cache_changes:
            match change:
                case Stored(hashes=hashes):
                    blocks = self.lower.get(change.tier, held)
                    assert change.parent is None or change.parent in blocks
                    blocks.update(hashes)
                case Cleared():
                    for blocks in (held, *self.lower.values()):
                        blocks.clear()
                case _:
                    self.lower.get(change.tier, held).difference_update(change.hashes)
        for one_change in batch.store_changes:
            self.shared.difference_update(one_change.removed, one_change.stale)
            self.shared.update(one_change.stored)
        for generated in batch.emitted:
            one = self.answers[generated.request_id]
            assert generated.first_index == len(one.tokens)
            one.tokens += unpack_u32(generated.token_ids)
            one.logprobs += generated.logprobs
            one.chunks += 1
        for first in batch.first_tokens:
            self.answers[first.request_id].cached = first.cached_tokens
            self.answers[first.request_id].onboarded = first.onboarded
        for vector in batch.vectors:
            self.answers[vector.request_id].vector = struct.unpack(f"<{len(vector.packed) // 4}f", vector.packed)
        for end in batch.finished:
            one = self.answers[end.request_id]
            one.finished = end
            one.missing = tuple(set(unpack_u64(one.item.sequence_hashes)) - held)
        for failed in batch.failed:
            self.answers[failed.request_id].error = failed.error
        for prefilled in batch.prefilled:
            self.answers[prefilled.request_id].prefilled = prefilled.prefilled
            self.answers[prefilled.request_id].cached = prefilled.cached_tokens
            self.answers[prefilled.request_id].onboarded = prefilled.onboarded
        for missed in batch.not_fetched:
            self.answers[missed.request_id].not_fetched = missed.error
        self._news.set()

    async def until(self, generated: Callable[[], Any]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not generated():
                if self.ended is not None:
                    raise self.ended
                self._news.clear()
                await self._news.wait()

    def item(
        self,
        prompt: Sequence[int],
        max_tokens: int = 8,
        *,
        lora_name: str = "",
        cache_namespace: str = "",
        priority: int = 0,
        task: Task = "generate",
        rank: int | None = None,
        stage: Stage = "aggregated",
        prefilled: Prefilled | None = None,
        store_blocks: int = 0,
        kv_pin_s: int = 0,
        traceparent: str = "",
        **sampling: Any,
    ) -> WorkItem:
        """Return a request, by default greedy and with `ignore_eos`."""
        packed = pack_u32(prompt)
        seed = hash_seed(lora_name, cache_namespace)
        return WorkItem(
            request_id=f"r{next(NUMBERS)}",
            attempt=1,
            owner_epoch=1,
            worker_epoch=1,
            rank=self.spec.dp_start_rank if rank is None else rank,
            token_ids=packed,
            sequence_hashes=sequence_hashes(packed, self.spec.block_size, seed),
            reply_slot=0,
            sampling=Sampling(max_tokens=max_tokens, **(GREEDY | sampling)),
            lora_name=lora_name,
            cache_namespace=cache_namespace,
            priority=priority,
            task=task,
            stage=stage,
            prefilled=prefilled,
            store_blocks=store_blocks,
            kv_pin_s=kv_pin_s,
            traceparent=traceparent,
        )

    def expect(self, item: WorkItem) -> Answer:
        """Return the response of a request, before it is submitted."""
        answer = self.answers[item.request_id] = Answer(item)
        return answer

    def submit(self, item: WorkItem) -> Answer:
        """Submit a request and return its response at once."""
        answer = self.expect(item)
        self.engine.submit(item)
        return answer

    async def ask(self, prompt: Sequence[int], max_tokens: int = 8, **options: Any) -> Answer:
        answer = self.submit(self.item(prompt, max_tokens, **options))
        await self.until(lambda: answer.over)
        return answer

    def on_end(self, task: "asyncio.Task[None]") -> None:
        """Record the end of the engine's `run`."""
        self.ended = None if task.cancelled() else task.exception()
        self._news.set()

    def metric(self, name: str) -> float:
        """The sum of a metric of the engine over its labels."""
        registry = CollectorRegistry()
        for collector in self.engine.collectors():
            registry.register(collector)
        return sum(sample.value for family in registry.collect() for sample in family.samples if sample.name == name)

    def blocks(self, prompt: Sequence[int], **options: Any) -> set[int]:
        return set(unpack_u64(self.item(prompt, **options).sequence_hashes))


driven = Driven.running
