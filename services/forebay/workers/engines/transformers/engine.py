"""Real text without a GPU: a model directory run by transformers and torch, for `forebay up --engine transformers`.

Theory of operation. One thread loads the model and steps the scheduler; the event loop only tells it what to do and
hands its batches on. What is told is done between two steps, in order. A reset begins another life: batches of an
earlier one that are still on their way are dropped, and the thread empties its cache before it does anything else.
"""

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from importlib import import_module

import msgspec
from prometheus_client.registry import Collector

from forebay.engine_model.model import EngineConfig, Removed, Stored
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.work import WorkItem
from forebay.workers.engine import Cleared, EngineBatch, EngineError, EngineRefused, Publish
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.transformers.scheduler import Runner, Scheduler

logger = logging.getLogger(__name__)

BLOCK_SIZE = 32
KV_BYTES = 1 << 30  # of the KV blocks that nobody asked for: a laptop has as much
KV_BLOCKS_MAX = 16_384
MAX_NUM_SEQS = 16
MAX_NUM_BATCHED_TOKENS = 256  # a prompt's chunk, for which the others wait
BEHIND_MAX = 64  # batches that the event loop may be late; the model waits for it then
STOP_S = 10.0  # a step, or the rest of a model that is being loaded

Act = Callable[[Scheduler], None]


class TransformersEngine:
    """One rank, greedy and sampled text and mean-pooled embeddings; first come, first served, whatever the priority."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._told: deque[Act] = deque()
        self._turn = threading.Condition()  # guards `_told`, `_behind` and `_stopping`
        self._behind = 0
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._ended: asyncio.Future[None] | None = None
        self._life = 0
        self._thread_life = 0
        self._publish: Publish | None = None
        self._held: dict[int, None] = {}

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Load the model and try it. Raises EngineError."""
        _require_possible(self._settings)
        loop = asyncio.get_running_loop()
        loaded: asyncio.Future[EngineConfig] = loop.create_future()
        self._ended = loop.create_future()
        self._ended.add_done_callback(_seen)
        rank = spec.dp_start_rank
        # No daemon: torch does not survive an interpreter that goes away under its threads.
        self._thread = threading.Thread(target=self._work, args=(loop, rank, loaded, self._ended), name="transformers")
        self._thread.start()
        await asyncio.wait((loaded, self._ended), return_when=asyncio.FIRST_COMPLETED)
        if not loaded.done():
            self._ended.result()
        config = loaded.result()
        return msgspec.structs.replace(
            spec,
            block_size=config.block_size,
            kv_blocks_total=config.kv_blocks_total,
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            tasks=("generate", "embed"),
        )

    async def run(self, publish: Publish) -> None:
        """Hand batches over until cancelled. Raises EngineError."""
        assert self._ended is not None
        self._publish = publish
        try:
            await asyncio.shield(self._ended)
        finally:
            self._publish = None

    async def stop(self) -> None:
        """End the thread, after the step that it is in."""
        with self._turn:
            self._stopping = True
            self._turn.notify()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join, STOP_S)
            if self._thread.is_alive():
                logger.warning("the transformers engine is still busy %g s after it was stopped: waiting", STOP_S)

    def held(self, rank: int) -> Sequence[int]:
        """The blocks of the batches that were handed over."""
        return list(self._held)

    def submit(self, item: WorkItem) -> None:
        """Queue a request."""
        self._tell(lambda scheduler: scheduler.submit(item))

    def cancel(self, request_id: str) -> None:
        """Drop a request before the next step."""
        self._tell(lambda scheduler: scheduler.cancel(request_id))

    async def command(self, command: Command) -> tuple[str, ...]:
        """Empties its cache; there are no adapters and there is no sleep. Raises EngineRefused."""
        if command.action == "clear_kv_blocks":
            loop = asyncio.get_running_loop()
            done: asyncio.Future[None] = loop.create_future()

            def clear(scheduler: Scheduler) -> None:
                scheduler.clear()
                # Behind the batch that tells of it.
                self._tell(lambda _: self._call(loop, _settle, done))

            self._tell(clear)
            assert self._ended is not None
            await asyncio.wait((done, self._ended), return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                raise EngineRefused("the transformers engine has ended")
        elif command.action != "list_loras":
            raise EngineRefused(f"the transformers engine does not {command.action}")
        return ()

    async def check(self) -> None:
        """Raises EngineError when its thread has ended."""
        if self._ended is None or self._ended.done():
            raise EngineError("the transformers engine has ended")

    def collectors(self) -> Sequence[Collector]:
        """It has no metrics of its own."""
        return ()

    def reset(self) -> None:
        """Drop every request and the cache."""
        self._life = life = self._life + 1
        self._held.clear()

        def reset(scheduler: Scheduler) -> None:
            self._thread_life = life
            scheduler.reset()

        self._tell(reset)

    def _tell(self, act: Act) -> None:
        with self._turn:
            self._told.append(act)
            self._turn.notify()

    def _hand_over(self, life: int, batch: EngineBatch) -> None:
        """On the event loop: a batch of this life is remembered and published."""
        with self._turn:
            self._behind -= 1
            self._turn.notify()
        if life != self._life:
            return
        for change in batch.cache_changes:
            match change:
                case Stored(hashes=hashes):
                    self._held.update(dict.fromkeys(hashes))
                case Removed(hashes=hashes):
                    for block in hashes:
                        self._held.pop(block, None)
                case Cleared():
                    self._held.clear()
        if self._publish is not None:
            self._publish(batch)

    def _work(
        self,
        loop: asyncio.AbstractEventLoop,
        rank: int,
        loaded: "asyncio.Future[EngineConfig]",
        ended: "asyncio.Future[None]",
    ) -> None:
        """On the thread: load the model, then step until told to stop."""
        try:
            runner, config = _load(self._settings, self._require_wanted)
            self._call(loop, _settle, loaded, config)
            scheduler = Scheduler(runner, config, rank)
            while (acts := self._next_acts(busy=scheduler.busy)) is not None:
                for act in acts:
                    act(scheduler)
                batch = scheduler.step()
                if batch is not None:
                    with self._turn:
                        self._behind += 1
                    self._call(loop, self._hand_over, self._thread_life, batch)
        except EngineError as error:
            self._call(loop, _fail, ended, error)
        except Exception as error:  # whatever it is, the worker must hear of it
            logger.exception("the transformers engine broke")
            self._call(loop, _fail, ended, EngineError(f"the transformers engine broke: {error!r}"))
        else:
            self._call(loop, _settle, ended)

    def _require_wanted(self) -> None:
        if self._stopping:
            raise EngineError("the transformers engine was stopped before it had started")

    def _next_acts(self, *, busy: bool) -> list[Act] | None:
        """What is to be done before the next step, which waits while there is nothing to do; None to stop."""
        with self._turn:
            while not self._stopping and (self._behind >= BEHIND_MAX or not (busy or self._told)):
                self._turn.wait()
            if self._stopping:
                return None
            acts = list(self._told)
            self._told.clear()
            return acts

    @staticmethod
    def _call(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *arguments: object) -> None:
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop is closed: nobody listens any more
            logger.info("the event loop ended before the transformers engine")


def _require_possible(settings: EngineSettings) -> None:
    if settings.dp_size != 1:
        raise EngineError(f"the transformers engine has one rank, not {settings.dp_size}: start more workers instead")
    if settings.role != "aggregated":
        raise EngineError(f"the transformers engine answers whole requests: it is no {settings.role} worker")
    if settings.loras:
        raise EngineError("the transformers engine has no LoRA adapters: the vllm engine has")
    if not settings.model.is_dir():
        raise EngineError(f"{settings.model}: no such model directory")


def _load(settings: EngineSettings, require_wanted: Callable[[], None]) -> tuple[Runner, EngineConfig]:
    """Raises EngineError, also between two parts that take long when it is not wanted any more."""
    # Seconds and a gigabyte of imports, which only this engine needs.
    module = import_module("forebay.workers.engines.transformers.model")
    require_wanted()
    model = module.TransformersModel(settings.model, settings.arguments)
    require_wanted()
    block_size = settings.block_size or BLOCK_SIZE
    fitting = max(1, KV_BYTES // (model.probe() * block_size))
    max_num_seqs = settings.max_num_seqs or min(MAX_NUM_SEQS, settings.max_num_batched_tokens or MAX_NUM_SEQS)
    try:
        config = EngineConfig(
            vocabulary=None,
            block_size=block_size,
            kv_blocks_total=settings.kv_blocks or min(KV_BLOCKS_MAX, fitting),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens or max(MAX_NUM_BATCHED_TOKENS, max_num_seqs),
        )
    except ValueError as error:
        raise EngineError(str(error)) from None
    model.allocate(config.block_size, config.kv_blocks_total)
    runner: Runner = model
    return runner, config


def _settle(future: "asyncio.Future[object]", result: object = None) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[object]", error: EngineError) -> None:
    if not future.done():
        future.set_exception(error)


def _seen(future: "asyncio.Future[None]") -> None:
    """Its error is told by `start` or `run`, if they are still there."""
    if not future.cancelled():
        future.exception()
