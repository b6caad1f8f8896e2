"""Common base of the vLLM, SGLang and TensorRT-LLM adapters.

Theory of operation. `start` and `stop` have the same steps for every engine. KV events arrive separately from
responses. The prefix index may contain fewer blocks than the engine's cache, never more. So when a cache is being
cleared, the adapter reports it as empty at once, and ignores its changes until the engine confirms the clearing. A
decode request first fetches KV. If that fails before the first token, the owner lets the prompt be computed again.
"""

import asyncio
import logging
import shutil
import tempfile
from abc import abstractmethod
from collections.abc import Coroutine, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import msgspec
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.events.base import U32_BYTES
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import OnboardedTokens
from forebay.events.tokens import TokenLogprob
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines.async_engine import AsyncEngine
from forebay.workers.engines.kept_kv import KeptKv
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.loras import LoraAdapter
from forebay.workers.engines.metrics import PrefixedMetrics
from forebay.workers.engines.model_directory import check_model
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.kv_events.metrics import KvEventMetrics
from forebay.workers.kv_events.zmq_feed import KvFeed
from forebay.workers.runtime.clearing import Clearing
from forebay.workers.runtime.rank_buffer import RankBuffer

logger = logging.getLogger(__name__)

DROPS_WEIGHTS = 2  # sleep level that frees the weights, too


class RankCache(Protocol):
    """The blocks in the cache of one rank, as the engine's KV events report them."""

    def held(self) -> Sequence[int]:
        """Return the sequence hashes of the blocks in device memory."""

    def totals(self) -> Mapping[str, int]:
        """Return the counters of the rank's KV events by name, for `KvEventMetrics`."""


class GeneratedResponse:
    """Response to one request, whose output tokens it passes to the buffer of the request's rank.

    Args:
        rank: buffer of the rank that runs the request.

    Attributes:
        prompt_tokens: number of prompt tokens.
        tokens: number of output tokens so far.
        cached_tokens: number of prompt tokens in the engine's cache; 0 before the first token.
        lease: timeout of a decode request until its first token, because its KV may be gone later; None for others.
    """

    def __init__(self, item: WorkItem, rank: RankBuffer) -> None:
        self.item = item
        self.rank = rank
        self.prompt_tokens = len(item.token_ids) // U32_BYTES
        self.tokens = 0
        self.cached_tokens = 0
        self.lease: asyncio.Timeout | None = None

    def add(
        self,
        token_ids: Sequence[int],
        cached_tokens: int,
        logprobs: Sequence[TokenLogprob] = (),
        onboarded: tuple[OnboardedTokens, ...] = (),
    ) -> None:
        """Add output tokens.

        Args:
            token_ids: the tokens; if there are none, nothing happens.
            cached_tokens: number of prompt tokens found in the engine's cache. Only the first call stores this number.
            logprobs: log probability of each token; empty if none were requested.
            onboarded: the part of the cached tokens that was loaded from other tiers. Only the first call reports it.
        """
        if not token_ids:
            return
        if not self.tokens:
            if self.lease is not None:
                self.lease.reschedule(None)
            self.cached_tokens = cached_tokens
            self.rank.began(self.item, cached_tokens, onboarded)
        self.rank.add_tokens(self.item, self.tokens, token_ids, logprobs)
        self.tokens += len(token_ids)


class ModelEngine(AsyncEngine):
    """Base of the adapters for vLLM, SGLang and TensorRT-LLM: adds KV events, LoRA adapters and KV transfers.

    Attributes:
        METRICS: prefixes of the names of the engine's own metrics.
        EXPERIMENTAL: why this adapter is experimental; empty if it is not.
    """

    METRICS: ClassVar[tuple[str, ...]]
    LORA_ARGUMENT: ClassVar[str]
    EXPERIMENTAL: ClassVar[str] = ""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._worker_id = ""
        self._caches: dict[int, RankCache] = {}  # empty without KV events
        self._sockets: Path | None = None
        self._clearing = Clearing(self._clear_in_background, self._fail)
        self._kept = KeptKv()
        self._slept_level = 0

    @abstractmethod
    async def _launch(self, spec: WorkerSpec) -> None:
        """Start the engine and set tasks, context length, ranks and caches."""

    @abstractmethod
    async def _sized(self, spec: WorkerSpec) -> WorkerSpec: ...

    @abstractmethod
    async def _shut_down(self) -> None:
        """Stop the engine. Its start may have failed or been cancelled."""

    @abstractmethod
    async def _prefill(self, item: WorkItem, prompt: Any, rank: RankBuffer) -> None:
        """Compute a prompt and report the descriptor of its KV."""

    @abstractmethod
    async def _generate(self, prompt: Any, response: GeneratedResponse, transfer: Any) -> None:
        """Generate a response. `transfer`, from `_transfer`, describes the KV to fetch first; None for no KV."""

    @abstractmethod
    def _transfer(self, item: WorkItem, prompt_tokens: int) -> Any:
        """Return what the engine needs to fetch the KV of a prompt.

        Raises Unfetchable if this engine cannot fetch the KV.
        """

    @abstractmethod
    def _lease_s(self, item: WorkItem) -> float | None:
        """Return the maximum seconds from a decode request to its first token; None for no limit."""

    @abstractmethod
    def _has_lora(self) -> bool: ...

    @abstractmethod
    async def _add_lora(self, adapter: LoraAdapter) -> None:
        """Load an adapter into the engine. Raises EngineRefused if the engine refuses or fails."""

    async def _remove_lora(self, adapter: LoraAdapter) -> None:
        """Unload an adapter from the engine. Raises EngineRefused if the engine refuses or fails."""

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Start the engine, load the configured LoRA adapters, and run a first prompt on each rank.

        Returns:
            The spec of the worker, with the actual sizes of the started engine.

        Raises:
            EngineError: the model directory is invalid, or the engine cannot start.
        """
        if self.EXPERIMENTAL:
            logger.warning("the %s engine is experimental: %s", self.NAME, self.EXPERIMENTAL)
        self._worker_id = spec.worker_id
        await runtime.offload(check_model, self._settings)
        await self._launch(spec)
        for name, directory in self._settings.loras.items():
            try:
                await self._load_configured_lora(name, str(directory))
            except EngineRefused as refusal:
                raise EngineError(f"cannot load the adapter {name}: {refusal}") from None
        await self._warm_up()
        return msgspec.structs.replace(
            await self._sized(spec),
            tasks=self._tasks,
            loras=tuple(self._loras.loaded),
            kv_events=bool(self._caches),
        )

    async def stop(self) -> None:
        await self._end_tasks(self._clearing.task)
        await self._shut_down()
        if self._sockets is not None:
            await runtime.offload(shutil.rmtree, self._sockets, ignore_errors=True)

    def _make_sockets(self) -> Path:
        """Return a new private directory for sockets, removed by `stop`."""
        self._sockets = Path(tempfile.mkdtemp(prefix="forebay-engine-"))
        return self._sockets

    # KV events

    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        feeds = [cache for cache in self._caches.values() if isinstance(cache, KvFeed)]
        return [feed.run(self._on_changes, self._on_lost) for feed in feeds]

    def _on_lost(self, _rank: int, _reason: str) -> None:
        self._clearing.soon()  # blocks that the index does not know are dropped, so that engine and index agree again

    def held(self, rank: int) -> Sequence[int]:
        """Return the sequence hashes of a rank's blocks in device memory, as reported by KV events.

        Changes that were collected for the next batch are dropped, because the result already contains them. The next
        batch reports the blocks in slower tiers.
        """
        cache = self._caches.get(rank)
        if cache is None or self._ranks[rank].muted:
            return ()
        self._ranks[rank].discard_changes()
        if isinstance(cache, KvFeed):
            self._ranks[rank].changed(cache.resident.lower())
        return cache.held()

    def stored(self) -> Sequence[int]:
        """Return the sequence hashes of the blocks in the shared store, as the ranks have reported them."""
        feeds = [cache for cache in self._caches.values() if isinstance(cache, KvFeed)]
        return tuple({block: None for feed in feeds for block in feed.resident.shared()})

    def _drop_cache(self) -> None:
        for rank in self._ranks.values():
            rank.reset(clears=rank.rank in self._caches)
        self._clearing.soon()

    async def _clear_in_background(self) -> None:
        await self._clear()

    def _clears(self) -> dict[int, int]:
        """Return how often each rank has reported an empty cache, for `_report_cleared`."""
        return {rank: self._ranks[rank].clears for rank in self._caches}

    def _report_cleared(self, clears_before: Mapping[int, int]) -> None:
        """Report the caches as empty, except those that the engine has reported as empty since `_clears`."""
        for rank, clears in clears_before.items():
            self._ranks[rank].cleared(clears)
        self._wake.set()

    async def _ready(self) -> None:
        await self._clearing.over()

    # Requests

    async def _run_request(self, item: WorkItem, prompt: Any, rank: RankBuffer) -> None:
        if item.task == "embed":
            await self._embed(item, prompt, rank)
        elif item.stage == "prefill":
            await self._prefill(item, prompt, rank)
        else:
            await self._respond(item, prompt, GeneratedResponse(item, rank))

    async def _respond(self, item: WorkItem, prompt: Any, response: GeneratedResponse) -> None:
        """Generate a response. Report KV that cannot be fetched, or not before its lease ends."""
        transfer: Any = None
        try:
            if item.stage == "decode":
                transfer = self._transfer(item, response.prompt_tokens)
            async with asyncio.timeout(self._lease_s(item) if transfer is not None else None) as response.lease:
                await self._generate(prompt, response, transfer)
        except Exception as error:
            reason = self._fetch_failure(error) if item.stage == "decode" and not response.tokens else None
            if reason is None:
                raise
            response.rank.not_fetched(item, reason)

    def _fetch_failure(self, error: Exception) -> str | None:
        """Return why a decode request without output could not fetch its KV; None if that is not its error."""
        if isinstance(error, TimeoutError):
            return f"{self.NAME} emitted no token before the lease of the KV ended"
        return str(error) if isinstance(error, Unfetchable) else None

    async def _embed(self, item: WorkItem, prompt: Any, rank: RankBuffer) -> None:
        """Compute an embedding. An engine whose `_tasks` contain `embed` overrides this method."""
        raise AssertionError(f"{self.NAME} computes no embeddings")

    def _end_response(self, response: GeneratedResponse, reason: str) -> None:
        tokens = response.prompt_tokens, response.tokens, response.cached_tokens
        self._finish(response.item, response.rank, reason, tokens)

    def release(self, request_id: str) -> None:
        """Forget that KV is kept for a request. The engine itself frees the KV when the lease ends."""
        self._kept.pop(request_id)

    def drop(self, prefilled: Prefilled) -> None:
        """Do nothing, because this engine cannot notify the prefill worker that its KV is not needed."""

    def kept(self) -> int:
        """Return the number of requests whose KV may still be kept for other workers.

        If no request runs and no rank reports used blocks, the result is 0.
        """
        if not self._requests and not any(rank.load.kv_blocks_used for rank in self._ranks.values()):
            self._kept.clear()
        return len(self._kept)

    # Commands

    async def command(self, command: Command) -> tuple[str, ...]:
        """Execute a command after all earlier ones, and return the names of the loaded adapters.

        The command `sleep` waits until requests in flight have ended. Requests that arrive later wait for `wake_up`.

        Raises:
            EngineRefused: the engine does not support the command, or cannot execute it now.
        """
        async with self._commands:
            match command.action:
                case "load_lora":
                    await self._load_lora(command.lora_name, command.lora_path)
                case "unload_lora":
                    with self._loras.removing(command.lora_name) as adapter:
                        await self._remove_lora(adapter)
                case "clear_kv_blocks":
                    await self._clear()
                case "sleep":
                    await self._sleep(command.level)
                case "wake_up":
                    await self._wake_up()
                case "pause":
                    await self._pause()
                    self._resting.add("pause")
                case "resume":
                    await self._resume()
                    self._resting.discard("pause")
                case "list_loras":
                    pass
            return tuple(self._loras.loaded)

    async def _load_configured_lora(self, name: str, directory: str) -> None:
        """Load an adapter of the settings. Raises EngineRefused if the engine refuses or fails."""
        await self._load_lora(name, directory)

    async def _load_lora(self, name: str, directory: str) -> None:
        if not self._has_lora():
            raise EngineRefused(f"{self.NAME} was started without LoRA: set its argument {self.LORA_ARGUMENT}")
        if (adapter := self._loras.offered(name, directory)) is None:
            return
        await self._add_lora(adapter)
        if self._loras.is_reused(name):
            await self._clear()
        self._loras.add(adapter)

    async def _clear(self) -> None:
        """Clear the prefix cache. Raises EngineRefused if the engine cannot clear it."""
        raise EngineRefused(f"the {self.NAME} engine does not support clearing its KV cache")

    async def _sleep(self, _level: int) -> None:
        raise EngineRefused(f"the {self.NAME} engine does not support sleep")

    async def _wake_up(self) -> None:
        raise EngineRefused(f"the {self.NAME} engine does not support wake_up")

    async def _pause(self) -> None:
        raise EngineRefused(f"the {self.NAME} engine does not support pause")

    async def _resume(self) -> None:
        raise EngineRefused(f"the {self.NAME} engine does not support resume")

    def collectors(self) -> Sequence[Collector]:
        """Return Prometheus collectors of the engine's own metrics and of its KV event counters."""
        totals = {rank: cache.totals for rank, cache in self._caches.items()}
        return (PrefixedMetrics(*self.METRICS), KvEventMetrics(self._worker_id, totals))
