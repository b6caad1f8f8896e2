"""An engine without a GPU: `EngineModel` in real time, or faster; never sooner than the model says.

Virtual time runs against one deadline that is moved by each step's scaled duration, so that what one sleep
is late the next one makes good. Steps far shorter than a timer's resolution are published together.
Probabilities and embeddings are made up from hashes; a structure that is asked of an answer is not kept to.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec
from prometheus_client.registry import Collector
from xxhash import xxh3_64_intdigest

from forebay.core.blocks import hash_seed, mm_hashes, sequence_hashes
from forebay.core.engine_model import (
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
from forebay.events.base import U32_BYTES, U64_MASK
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import AnswerError
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, Cleared, EngineBatch, EngineError, EngineRefused, Failed, Publish
from forebay.workers.mock_answers import TASKS, MockAnswers
from forebay.workers.standin_encoder import MediaUnusable, StandInEncoder

if TYPE_CHECKING:
    from forebay.workers.nixl_read import Array

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
        self._loras: dict[str, str] = {}  # the directories of adapters; none of those that were there at the start

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """There is no model to load."""
        self._loras = dict.fromkeys(spec.loras, "")
        return msgspec.structs.replace(spec, tasks=TASKS)

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
        rank, lora = self._ranks[item.rank], item.lora_name
        if lora and lora not in self._loras:
            rank.refuse(item, AnswerError(status=404, code="adapter_not_loaded", message=_not_loaded(lora)))
        elif item.media:
            try:
                self.submit_embedded(item, StandInEncoder().encode_all(item.media))
            except (MediaUnusable, EngineError) as error:
                status = 400 if isinstance(error, MediaUnusable) else 500
                rank.refuse(item, AnswerError(status=status, code="media_not_encoded", message=str(error)))
        else:
            rank.submit(item)

    def submit_embedded(self, item: WorkItem, embeddings: "Array") -> None:
        """As `submit`: what it says depends on every byte of the embeddings."""
        checksum = xxh3_64_intdigest(embeddings.tobytes())
        self._ranks[item.rank].submit(item, checksum)

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it is under way."""
        for rank in self._ranks.values():
            rank.cancel(request_id)

    async def command(self, command: Command) -> tuple[str, ...]:
        """As vLLM does it: the cache can be cleared while nothing runs; who is paused or asleep keeps its requests.

        Asleep it has no cache, so requests that ran are computed again when it wakes up.
        """
        ranks = self._ranks.values()
        match command.action:
            case "clear_kv_blocks":
                used = sum(rank.model.pool.used for rank in ranks)
                if used:
                    raise EngineRefused(f"{used} KV blocks are used by requests that run; try again when they are done")
                for rank in ranks:
                    rank.clear()
            case "load_lora":
                self._load(command.lora_name, command.lora_path)
            case "unload_lora":
                if command.lora_name not in self._loras:
                    raise EngineRefused(_not_loaded(command.lora_name))
                del self._loras[command.lora_name]
            case "list_loras":
                pass
            case "sleep":
                for rank in ranks:
                    rank.hold(asleep=True)
                    rank.clear()
            case "wake_up":
                for rank in ranks:
                    rank.hold(asleep=False)
            case "pause":
                for rank in ranks:
                    rank.hold(paused=True)
            case "resume":
                for rank in ranks:
                    rank.hold(paused=False)
            case _:
                assert_never(command.action)
        return tuple(self._loras)

    def _load(self, name: str, path: str) -> None:
        """Nothing is read from the adapter's directory, but it must be there."""
        if not name or not path:
            raise EngineRefused("an adapter needs a name and a directory")
        if name in self._loras and self._loras[name] != path:
            raise EngineRefused(f"another adapter {name} is loaded already; unload it first")
        if not Path(path).is_dir():
            raise EngineRefused(f"there is no directory {path}")
        self._loras[name] = path

    async def check(self) -> None:
        """It lives as long as its process."""

    def collectors(self) -> Sequence[Collector]:
        """It has no metrics of its own."""
        return ()

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
        self._answers = MockAnswers(config.vocabulary or ())
        self._published = self.model.load()
        self._life = 0  # counts resets: a batch of an earlier life is not published
        self._changes: list[CacheChange] = []
        self._paused = self._asleep = False

    def submit(self, item: WorkItem, seen: int = 0) -> None:
        """`seen` is a checksum of what it is shown beside the text."""
        block_size = self.model.config.block_size
        last = len(item.token_ids) // U32_BYTES // block_size
        media = mm_hashes(item.media, block_size)
        seed = hash_seed(item.lora_name, item.cache_namespace)
        request = EngineRequest(
            request_id=item.request_id,
            attempt=item.attempt,
            token_ids=item.token_ids,
            sequence_hashes=item.sequence_hashes,
            token_seed=xxh3_64_intdigest(item.token_ids, ((item.sampling.seed or 0) + seen) & U64_MASK),
            max_tokens=1 if item.task == "embed" else item.sampling.max_tokens,
            hash_seed=seed,
            tail_mm_hashes=tuple(media.get(last, ())),
        )
        try:
            # The model's pool takes them for chains; whoever writes to the log can say anything.
            if item.sequence_hashes != sequence_hashes(item.token_ids, block_size, seed, media):
                raise RequestMalformed("the block hashes are not those of the prompt")
            self.model.submit(request)
        except RequestRefused as refusal:
            self.refuse(item, _answer(refusal))
        else:
            self._answers.begin(item)
        self._wake.set()

    def refuse(self, item: WorkItem, error: AnswerError) -> None:
        """The item is not taken."""
        self._failed.append(Failed(item.request_id, item.attempt, error))
        self._wake.set()

    def hold(self, *, paused: bool | None = None, asleep: bool | None = None) -> None:
        """Whether nothing is computed; what is None stays as it is."""
        self._paused = self._paused if paused is None else paused
        self._asleep = self._asleep if asleep is None else asleep
        self._wake.set()

    def clear(self) -> None:
        """Empty the cache. What runs has to be computed again."""
        self.model.clear_cache()
        self._changes.append(Cleared())
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        if self.model.cancel(request_id):
            self._answers.end(request_id)
            self._wake.set()

    def reset(self) -> None:
        self._life += 1
        self.model.reset()
        self._answers.clear()
        self._failed.clear()
        self._changes.clear()
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
        cache_changes, self._changes = self._changes, []
        held = self._paused or self._asleep
        while not held and span_us < self._span_us and tokens < BATCH_TOKENS_MAX:
            step = self.model.step(self._span_us - span_us)
            if step is None:
                break
            steps.append(step)
            span_us += step.duration_us
            tokens += len(step.emitted) * step.iterations
        failed, self._failed = self._failed, []
        load = self.model.load()
        if not steps:
            if not failed and not cache_changes and load == self._published:
                return None, 0
            return EngineBatch(rank=self._number, load=load, cache_changes=cache_changes, failed=failed), 0
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
        return self._answers.worded(batch), span_us


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


def _not_loaded(name: str) -> str:
    return f"the adapter {name} is not loaded"


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
