"""Engine adapter of a server that already runs, such as `vllm serve`.

Theory of operation. The server keeps its engine, its cache and its other clients. forebay sends prompts as token ids
and reads token ids back, so that a response can continue on another worker. A server that returns text only is served,
too: `TextEncoder` converts the text to tokens, and a response that it has begun cannot continue.

If a stream is cut, but the server is healthy, the request continues there from the tokens received so far. If the
server does not respond, the engine ends, so that the requests continue on other workers. The caller of the worker then
waits for the server and attaches it again.

The server's cache is never cleared by forebay itself, because other clients use it. After a loss of KV events the index
has fewer blocks than the server.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.events.base import U32_BYTES, unpack_u64
from forebay.events.codec import MALFORMED
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.events.work import WorkItem
from forebay.runtime.errors import ConfigError
from forebay.runtime.metrics import collector, counter
from forebay.workers.engine import AttemptFailed, EngineError, EngineRefused, one_line
from forebay.workers.engines.attached.completions import (
    HALF_LEASE_S,
    LAYOUT,
    PREFILL_PARAMS,
    Call,
    Completions,
    TextEncoder,
    fetch_params,
    offer,
)
from forebay.workers.engines.attached.errors import OVERLOADED_CODE, Rejected, StreamCut, message_of
from forebay.workers.engines.attached.server import MetricsUnreadable, ServerInfo, ServerLoad, UpstreamServer, read_load
from forebay.workers.engines.loras import LoraAdapter, Loras
from forebay.workers.engines.model_engine import CANARY_TOKENS, GeneratedResponse, ModelEngine
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang import requests as sglang_requests
from forebay.workers.engines.tokenizer_check import check_tokenizer
from forebay.workers.engines.vllm.transfer import PREFILL_SAMPLING, VLLM_LEASE_S
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.zmq_feed import KvFeed, KvSource
from forebay.workers.kv_events.zmq_wire import VllmDecoder, decode_sglang
from forebay.workers.runtime.rank_buffer import RankBuffer


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachedSettings:
    """Address and properties of a server, and the tokenizer of its model.

    Attributes:
        encode: returns the tokens of a text, without the special tokens around a prompt.
        context_tokens: context length of the model, for servers that do not publish it.
        allow_shared_cache: whether the server gets requests with a cache namespace, even if it cannot separate them.
    """

    url: str
    info: ServerInfo
    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]
    context_tokens: int
    api_key: str = ""
    kv_events: KvSource | None = None
    allow_shared_cache: bool = False


logger = logging.getLogger(__name__)

LOAD_S = 1.0  # interval between two readings of the server's metrics; each costs the server some milliseconds
CONTINUATIONS_MAX = 3  # cut streams per request; the server is probably broken then
BLOCK_SIZE = 16  # for servers that do not publish theirs; vLLM's default
KV_BLOCKS = 16_384  # likewise
MAX_NUM_SEQS = 256  # likewise
MAX_NUM_BATCHED_TOKENS = 8_192  # likewise
NOT_FOUND = 404
SERVER_ERROR = 500  # lowest HTTP status for which the server, not the request, is responsible
ROLES = ("aggregated", "prefill", "decode")


class _Result(msgspec.Struct):
    success: bool = True


class AttachedEngine(ModelEngine):
    """Adapter of one server, with one rank. Its model directory has the tokenizer; weights are not needed.

    `start` sets `_api`.
    """

    NAME = "attached server"
    METRICS = ()
    LORA_ARGUMENT = ""
    _api: Completions

    def __init__(self, settings: EngineSettings, attached: AttachedSettings) -> None:
        super().__init__(settings)
        self.counts: Counter[str] = Counter()
        self._attached = attached
        self._info = attached.info
        self._url = attached.url
        self._is_sglang = attached.info.kind == "sglang"
        self._block_size = settings.block_size or attached.info.block_size or BLOCK_SIZE
        self._server: UpstreamServer | None = None
        self._loras = Loras(keeps_numbers=True, checks_directories=False)  # the server's directories, and its cache
        self._warned = False  # of unreadable metrics

    # Start and stop

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Connect to the server, run a small request, and return the spec with the sizes of the server.

        Raises EngineError if the server cannot be reached, or does not serve the model.
        """
        self._worker_id = spec.worker_id
        await self._launch(spec)
        salts_cache = self._api.salts_cache or self._attached.allow_shared_cache
        return msgspec.structs.replace(await self._described(spec), salts_cache=salts_cache)

    async def check_tokenizer(self) -> None:
        """Raise ConfigError if the server has other token ids for a text than the tokenizer of the model directory."""
        server = UpstreamServer(self._attached.url, self._attached.api_key)
        try:
            tokenize = partial(server.tokenize, self._info.model)
            await check_tokenizer(self._settings, tokenize, f"the server {server.url}", ConfigError)
        finally:
            await server.close()

    async def _launch(self, spec: WorkerSpec) -> None:
        settings, info = self._settings, self._info
        self._server = server = UpstreamServer(self._attached.url, self._attached.api_key)
        self._api = Completions(server, info.model, info.kind)
        self._context_tokens = info.context_tokens or self._attached.context_tokens
        self._tasks = ("generate",)
        for number, (name, directory) in enumerate(info.loras.items(), 1):
            self._loras.add(LoraAdapter(name, number, directory))
        canary = [0] * max(1, min(CANARY_TOKENS, self._context_tokens - 1))
        await self._api.probe(canary, self._attached.decode(canary) or "a")
        (rank,) = spec.ranks
        blocks_total = settings.kv_blocks or info.kv_blocks or KV_BLOCKS
        self._ranks = {rank: RankBuffer(rank, blocks_total, text_only=not self._api.returns_token_ids)}
        if not self._api.returns_token_ids:
            logger.warning(
                "the server %s returns text only: usage is approximate, and a response that is interrupted ends with an"
                " error",
                server.url,
            )
        if settings.role != "aggregated" and info.kind != "vllm":
            raise EngineError(f"--role {settings.role}: only vLLM transfers KV for attached servers, got {info.kind}")
        self._last_response_s = runtime.monotonic_s()
        if self._attached.kv_events is not None:
            decoder = decode_sglang if self._is_sglang else VllmDecoder()
            blocks = ResidentBlocks(self._block_size, counts_copies=not self._is_sglang)
            self._caches = {rank: KvFeed(rank, self._attached.kv_events, decoder, blocks)}

    async def _sized(self, spec: WorkerSpec) -> WorkerSpec:
        settings = self._settings
        return msgspec.structs.replace(
            spec,
            block_size=self._block_size,
            kv_blocks_total=settings.kv_blocks or self._info.kv_blocks or KV_BLOCKS,
            max_num_seqs=settings.max_num_seqs or MAX_NUM_SEQS,
            max_num_batched_tokens=settings.max_num_batched_tokens or MAX_NUM_BATCHED_TOKENS,
            kv_layout=LAYOUT if settings.role != "aggregated" else None,
        )

    async def _shut_down(self) -> None:
        if self._server is not None:
            await self._server.close()

    # Health, load and cache

    def _is_dead(self) -> bool:
        return False  # the health check ends the engine

    def _death(self) -> str:
        return f"the server {self._url} does not respond"

    async def _run_canary(self, rank: int) -> None:
        call = Call(token_ids=[0], text="a", sampling=Sampling(max_tokens=1, temperature=0.0), request_id=_new_id())
        with suppress(Rejected, StreamCut):  # a server that rejects a request does respond
            async for _ in self._api.generate(call):
                pass

    async def check(self) -> None:
        """Check that the server is healthy and still serves the model. If it is idle, run a request from time to time.

        Raises EngineError if the server does not respond, is not healthy, or serves another model.
        """
        if self._dead.is_set():
            raise EngineError(self._death())
        await self._check_server()
        is_idle = not any(rank.load.running or rank.load.waiting for rank in self._ranks.values())
        if is_idle or self._canary is not None:  # behind requests of other clients, a health request may wait long
            await super().check()

    async def _check_server(self) -> None:
        await self._api.server.check_health()
        served = {one.id: one.root or "" for one in await self._api.server.models()}
        if self._info.model not in served:
            raise EngineError(f"the server {self._url} serves {', '.join(served)}, not {self._info.model}")
        if (root := served[self._info.model]) and root != self._info.root:
            raise EngineError(f"the server {self._url} serves {self._info.model} from {root}, not {self._info.root}")

    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super()._followers(), self._follow_load()]

    def _on_lost(self, rank: int, reason: str) -> None:
        logger.warning("rank %d: the index lacks blocks of %s until they are stored again: %s", rank, self._url, reason)

    def _drop_cache(self) -> None:
        for rank in self._ranks.values():
            rank.reset(clears=False)  # the server keeps its cache, and `held` reports it

    async def _follow_load(self) -> None:
        while True:
            load = await self._read_load()
            for rank in self._ranks.values():
                if load is not None:
                    rank.report(*load)
            self._wake.set()
            await asyncio.sleep(LOAD_S)

    async def _read_load(self) -> ServerLoad | None:
        """Return the load of the server; without readable metrics the requests of this worker."""
        own = ServerLoad(len(self._requests), 0, 0.0)
        try:
            status, body = await self._api.server.get("/metrics")
        except EngineError:
            return None  # the health check decides whether the server is lost
        try:
            if status != 200:
                raise MetricsUnreadable(f"/metrics responded with {status}")
            load = read_load(body.decode(errors="replace"))
        except MetricsUnreadable as error:
            self.counts["metrics_unreadable"] += 1
            if not self._warned:
                self._warned = True
                logger.warning("the load of %s is that of this worker's requests only: %s", self._url, one_line(error))
            return own
        self._warned = False
        return load

    # Requests

    def _check_request(self, item: WorkItem, prompt_tokens: int) -> None:
        if item.cache_namespace and not (self._api.salts_cache or self._attached.allow_shared_cache):
            message = (
                f"the server {self._url} cannot separate the cache of the namespace of this request;"
                " --allow-shared-cache permits it"
            )
            raise AttemptFailed(501, "not_supported", message)
        if item.sampling.logprobs is not None and not self._api.returns_logprobs:
            message = f"the server {self._url} returns no log probabilities with token ids; only vLLM does"
            raise AttemptFailed(501, "not_supported", message)
        if self._is_sglang:
            arguments = {"enable_deterministic_inference": self._info.is_deterministic}
            if (reason := sglang_requests.ignored(item.sampling, arguments)) is not None:
                raise AttemptFailed(400, "unsupported_parameter", reason)
        if item.output_tokens:
            reason = why_not_continued(item.sampling)
            if not reason and not self._api.takes_token_ids:
                reason = f"the server {self._url} accepts text only"
            if reason:
                raise interrupted(item.output_tokens, reason)
        super()._check_request(item, prompt_tokens)

    async def _run_request(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        try:
            await super()._run_request(item, prompt, rank)
        except Rejected:
            self.counts["rejected"] += 1
            raise

    def _request_error(self, error: Exception) -> AttemptFailed | None:
        if isinstance(error, EngineError):
            logger.warning("the server is lost: %s", error)
            return None
        logger.error("unexpected error of a request; the worker continues", exc_info=error)
        return AttemptFailed(500, "engine_error", one_line(error))

    def _call(self, item: WorkItem, prompt: list[int], sampling: Sampling, transfer: Mapping[str, Any] | None) -> Call:
        return Call(
            token_ids=prompt,
            text="" if self._api.takes_token_ids else self._attached.decode(prompt),
            sampling=sampling,
            lora_name=item.lora_name,
            cache_salt=item.cache_namespace if self._api.salts_cache else "",
            request_id=_new_id(item.request_id),
            transfer=transfer,
            traceparent=item.traceparent,
        )

    async def _generate(self, prompt: list[int], response: GeneratedResponse, transfer: Any) -> None:
        """Run a request. If its stream is cut, continue it on the same server while the server is healthy."""
        output: list[int] = []
        allowed = limited(response.item.sampling, self._context_tokens - len(prompt))
        for attempt in range(CONTINUATIONS_MAX + 1):
            sampling = remaining(allowed, len(output))
            call = self._call(response.item, prompt + output, sampling, None if output or attempt else transfer)
            try:
                return await self._stream(call, response, output)
            except Rejected as rejected:
                if _may_be_lost(rejected):
                    await self._require_alive(response, rejected)
                raise
            except StreamCut as cut:
                self.counts["cut"] += 1
                logger.warning("a stream of %s was cut after %d tokens: %s", self._url, response.tokens, cut)
                await self._require_alive(response, cut)
                if self._api.returns_token_ids and len(output) >= allowed.max_tokens:
                    return self._end_response(response, "length")
                if attempt == CONTINUATIONS_MAX:
                    reason = f"the server cut its stream again: {cut}"
                    raise interrupted(response.tokens, reason, may_move=True) from None
                reason = self._why_not_repeated(response)
                if reason:
                    raise interrupted(response.tokens, reason) from None
                self.counts["continued"] += 1

    async def _require_alive(self, response: GeneratedResponse, cut: Exception) -> None:
        """Raise if the server is lost: EngineError for a response that can continue on another worker."""
        try:
            await self._check_server()
        except EngineError:
            if response.tokens and not self._api.returns_token_ids:
                # Another worker would continue with tokens that the server did not generate.
                self._dead.set()
                raise interrupted(response.tokens, f"the server returned text only: {cut}") from None
            raise

    def _why_not_repeated(self, response: GeneratedResponse) -> str:
        """Return why a response cannot continue on the same server; empty if it can."""
        if not response.tokens:
            return ""
        if not self._api.returns_token_ids:
            return "the server returned text only"
        return why_not_continued(response.item.sampling)

    async def _stream(self, call: Call, response: GeneratedResponse, output: list[int]) -> None:
        text = None if self._api.returns_token_ids else TextEncoder(self._attached.encode, self._attached.decode)
        expected, reason, is_first = self._cached_tokens(response.item), "", not output
        deltas, left = self._api.generate(call), call.sampling.max_tokens
        try:
            async for delta in deltas:
                reason = delta.finish_reason or reason
                token_ids = delta.token_ids
                if token_ids is None:
                    assert text is not None
                    token_ids = text.push(delta.text, is_last=bool(delta.finish_reason))
                    if len(token_ids) > left:  # the server ignores max_tokens, or counts other tokens
                        token_ids, reason = token_ids[:left], "length"
                    left -= len(token_ids)
                if delta.cached_tokens is not None and is_first:  # a continuation has the whole prompt cached
                    expected = response.cached_tokens = min(delta.cached_tokens, response.prompt_tokens)
                output += token_ids
                response.add(token_ids, expected, delta.logprobs)
                self._wake.set()
                if reason == "length" and not delta.finish_reason:
                    break
        finally:
            await deltas.aclose()  # aborts the request
            if text is not None:
                self.counts["inexact_text"] += text.inexact
        self._end_response(response, reason)

    def _cached_tokens(self, item: WorkItem) -> int:
        """Return how many prompt tokens the server probably has cached: those of blocks that its events report."""
        if (cache := self._caches.get(item.rank)) is None:
            return 0
        # An engine computes the last token of a prompt always, and with it its block.
        most = (len(item.token_ids) // U32_BYTES - 1) // self._block_size
        return min(most, cache.resident.leading(unpack_u64(item.sequence_hashes))) * self._block_size

    async def _prefill(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        sampling = msgspec.structs.replace(item.sampling, **PREFILL_SAMPLING)
        expected = self._cached_tokens(item)  # before the server reports the blocks of this prompt
        try:
            transfer, cached = await self._api.prefill(self._call(item, prompt, sampling, PREFILL_PARAMS))
        except Rejected as rejected:
            if _may_be_lost(rejected):
                await self._check_server()
            raise
        except StreamCut as cut:
            raise Rejected(502, "engine_error", str(cut), may_move=True) from None
        if transfer is None:
            message = f"the server {self._url} keeps no KV for others: start it with --kv-transfer-config"
            raise Rejected(501, "not_supported", message)
        prefilled = offer(item, self._worker_id, self._settings.model_name, transfer)
        self._kept.add(item.request_id, VLLM_LEASE_S)
        rank.prefilled(item, prefilled, expected if cached is None else cached)

    def release(self, request_id: str) -> None:
        """Count KV that no worker fetches. The server frees it after its own timeout."""
        if self._kept.pop(request_id) is not None:
            self.counts["unfetched_kv"] += 1

    def _transfer(self, item: WorkItem, prompt_tokens: int) -> tuple[dict[str, Any], float]:
        return fetch_params(item.prefilled, self._settings.model_name, prompt_tokens), HALF_LEASE_S

    def _fetch_failure(self, error: Exception) -> str | None:
        if isinstance(error, Rejected) and error.error.status >= SERVER_ERROR and error.error.code != OVERLOADED_CODE:
            return error.error.message  # vLLM does not report whether the fetch failed
        return super()._fetch_failure(error)

    # Commands

    def _has_lora(self) -> bool:
        return True  # otherwise the server rejects the command

    async def _add_lora(self, adapter: LoraAdapter) -> None:
        body = {"lora_name": adapter.name, "lora_path": adapter.directory}
        await self._command("/load_lora_adapter" if self._is_sglang else "/v1/load_lora_adapter", body)

    async def _remove_lora(self, adapter: LoraAdapter) -> None:
        path = "/unload_lora_adapter" if self._is_sglang else "/v1/unload_lora_adapter"
        await self._command(path, {"lora_name": adapter.name})

    async def _clear(self) -> None:
        before = self._clears()
        await self._command("/flush_cache" if self._is_sglang else "/reset_prefix_cache", {})
        self._report_cleared(before)

    async def _command(self, path: str, body: Mapping[str, Any]) -> None:
        try:
            reply = await self._api.server.post(path, body)
        except (Rejected, EngineError) as error:
            raise EngineRefused(f"the server {self._url} did not execute {path}: {one_line(error)}") from error
        if not _is_success(reply):
            raise EngineRefused(f"the server {self._url} did not execute {path}: {message_of(reply)}")

    # Metrics

    def collectors(self) -> Sequence[Collector]:
        return (attached_metrics(self._worker_id, self.counts), *super().collectors())


def _new_id(request_id: str = "health") -> str:
    # A request that was aborted may still be in flight at the server when it is sent again.
    return f"{request_id}-{runtime.random_id()[:8]}"


def _may_be_lost(rejected: Rejected) -> bool:
    """Return whether a server may respond with this error because it is ending, or serves another model by now."""
    return rejected.error.status == NOT_FOUND or rejected.error.status >= SERVER_ERROR


def _is_success(reply: bytes) -> bool:
    """Return whether a server executed a command. vLLM responds with status 200 even if it cleared no cache."""
    try:
        return msgspec.json.decode(reply, type=_Result).success
    except MALFORMED:
        return True  # a text


@collector
def attached_metrics(worker_id: str, counts: Mapping[str, int]) -> Iterator[Metric]:
    kinds = ("cut", "continued", "rejected", "metrics_unreadable", "inexact_text", "unfetched_kv")
    events = {(worker_id, kind): counts.get(kind, 0) for kind in kinds}
    text = "Events of an attached server, by kind."
    yield counter("forebay_upstream_events", text, events, "worker_id", "kind")


def limited(sampling: Sampling, room: int) -> Sampling:
    """Return the sampling parameters for an output of at most `room` tokens, because vLLM rejects larger limits."""
    most = min(sampling.max_tokens, room)
    return msgspec.structs.replace(sampling, max_tokens=most, min_tokens=min(sampling.min_tokens, most))


def remaining(sampling: Sampling, done: int) -> Sampling:
    if not done:
        return sampling
    left = max(1, sampling.max_tokens - done)
    return msgspec.structs.replace(sampling, max_tokens=left, min_tokens=max(0, sampling.min_tokens - done))


def why_not_continued(sampling: Sampling) -> str:
    """Return why a response with some output cannot continue as part of a prompt; empty if it can."""
    if sampling.structured is not None:
        return "a structured response cannot go on"
    if sampling.presence_penalty or sampling.frequency_penalty:
        return "penalties count output tokens only, and the server would count the earlier output as prompt"
    return ""


def interrupted(tokens: int, reason: str, *, may_move: bool = False) -> Rejected:
    message = f"the response was interrupted after {tokens} output tokens: {reason}"
    return Rejected(502, "response_interrupted", message, may_move=may_move)
