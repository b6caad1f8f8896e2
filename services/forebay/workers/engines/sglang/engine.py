"""SGLang behind a worker: `Engine` in this process, its schedulers and detokenizer in child processes.

Theory of operation. Responses are streamed, KV events arrive over sockets, and loads are read from shared memory. An
abort in SGLang affects all requests whose ids begin with the given text, and SGLang remembers an id until its scheduler
has dropped the request. Each request therefore gets a new id that is no prefix of another one.

A prefill engine and a decode engine identify a request by a room number. The prefill engine computes a prompt only
after the decode engine has connected with the number. The KV descriptor is therefore published as soon as the number is
drawn, before the prompt is computed.

If an engine spans several nodes, `start` returns on the first node only. On any other node it ends only with an error,
so the worker of that node never acquires a lease.
"""

import asyncio
import itertools
import logging
import secrets
import struct
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from functools import partial
from importlib import import_module
from typing import Annotated, Any

import msgspec

from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import TokenLogprob
from forebay.events.work import WorkItem
from forebay.workers.engine import AttemptFailed, EngineError, EngineRefused, one_line
from forebay.workers.engines.kv_descriptor import decoded
from forebay.workers.engines.loras import LoraAdapter
from forebay.workers.engines.model_engine import CANARY_TOKENS, DROPS_WEIGHTS, WATCH_S, GeneratedResponse, ModelEngine
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang import requests as sglang_requests
from forebay.workers.engines.sglang.core import (
    DISAGGREGATION,
    PORT,
    SglangCore,
    bootstrap_host,
    engine_arguments,
    kv_sources,
    own_sources,
)
from forebay.workers.kv_events.resident import ResidentBlocks
from forebay.workers.kv_events.zmq_feed import KvFeed
from forebay.workers.kv_events.zmq_wire import decode_sglang
from forebay.workers.runtime.rank_buffer import RankBuffer

logger = logging.getLogger(__name__)

LOADS_EVERY_S = 0.1  # a worker reports loads at the same interval
FLUSH_S = 10.0  # time for the scheduler to drop aborted requests
FLUSH_ATTEMPTS = 20
FLUSH_EVERY_S = 0.1
NO_TRANSFER_HOST = "2.2.2.2"  # SGLang's own placeholder for a missing prefill or decode side
SERVER_ERROR = 500  # errors with this HTTP status or above are not the fault of the request
IDS = itertools.count(1)
CONNECTOR = "sglang"
LEASE_S = 120.0  # time until the decode engine has connected, including its queue, and the prompt is computed
PREFILL_SAMPLING = {"max_new_tokens": 1, "min_new_tokens": 0}
ROOM_BITS = 62


class Rendezvous(msgspec.Struct, frozen=True, kw_only=True):
    """Descriptor of the KV of one request: the address of the prefill engine, and the room number of the request.

    The room number modulo the number of ranks is the rank of the prefill engine.
    """

    host: Annotated[str, msgspec.Meta(min_length=1, max_length=255)]
    port: Annotated[int, msgspec.Meta(ge=1, le=65_535)]
    room: Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]

    def arguments(self) -> dict[str, str | int]:
        return {"bootstrap_host": self.host, "bootstrap_port": self.port, "bootstrap_room": self.room}


def new_room(rank: int, dp_size: int) -> int:
    return secrets.randbits(ROOM_BITS) // dp_size * dp_size + rank


class SglangEngine(ModelEngine):
    """Adapter of one SGLang engine. Its ranks are data-parallel replicas, or attention ranks if these are enabled."""

    NAME = "SGLang"
    METRICS = ("sglang:",)
    LORA_ARGUMENT = "enable_lora"
    EXPERIMENTAL = "it was run on a CPU only, and its prefill and decode roles were not run with a real SGLang"
    ABORT_WITHIN_S = 5.0  # the prefill engine may have been aborted before it sent KV, and no token will arrive

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings)
        self._core = SglangCore(self._dead.set)
        self._manager: Any = None
        self._io: Any = None  # module of SGLang's request types
        self._resolved: dict[str, Any] = {}
        self._awake = asyncio.Event()
        self._awake.set()
        self._submitted: set[asyncio.Task[Any]] = set()  # requests that SGLang has received

    async def _launch(self, spec: WorkerSpec) -> None:
        settings = self._settings
        sources = own_sources(settings.dp_size, self._make_sockets()) if spec.kv_events else None
        engine = await self._core.start(engine_arguments(settings, sources), self._fail)
        self._manager = engine.tokenizer_manager
        if self._manager is None:
            await self._watch()
        self._io = import_module("sglang.srt.managers.io_struct")
        self._resolved = engine.server_args.resolved_dict()
        self._context_tokens = self._manager.context_len
        self._tokenizer = self._manager.tokenizer  # None with `skip_tokenizer_init`
        self._tasks = ("generate",) if self._manager.is_generation else ("embed",)
        page_size = self._resolved["page_size"]
        kv_blocks = engine._scheduler_init_result.scheduler_infos[0]["max_total_num_tokens"] // page_size
        self._ranks = {rank: RankBuffer(rank, kv_blocks) for rank in spec.ranks}
        if not self._resolved["disable_radix_cache"]:
            decode = partial(decode_sglang, has_store=bool(settings.kv_store_name))
            self._caches = {
                rank: KvFeed(rank, source, decode, ResidentBlocks(page_size, counts_copies=False))
                for rank, source in kv_sources(self._resolved, spec.ranks).items()
            }

    async def _load_configured_lora(self, name: str, directory: str) -> None:
        # SGLang loaded the adapter at its own start.
        if (adapter := self._loras.offered(name, directory)) is not None:
            self._loras.add(adapter)

    async def _sized(self, spec: WorkerSpec) -> WorkerSpec:
        loads = await self._manager.get_loads()
        sizes = (self._resolved["chunked_prefill_size"], self._resolved["max_prefill_tokens"])
        reported = max((load.max_running_requests for load in loads), default=0)
        if self._resolved.get("dllm_algorithm"):
            reported = 1  # SGLang's default for diffusion models, which its loads do not report
        return msgspec.structs.replace(
            spec,
            block_size=self._resolved["page_size"],
            kv_blocks_total=self._ranks[spec.ranks[0]].load.kv_blocks_total,
            max_num_seqs=self._resolved["max_running_requests"] or max(1, reported),
            max_num_batched_tokens=min(size for size in sizes if size and size > 0),
            kv_store=self._settings.kv_store_name,
        )

    async def _shut_down(self) -> None:
        await self._core.stop()

    def _is_dead(self) -> bool:
        return self._core.is_dead

    async def _run_canary(self, rank: int) -> None:
        prompt = [0] * min(CANARY_TOKENS, self._context_tokens - 1)
        rid = f"{next(IDS)}:canary"
        if self._tasks == ("embed",):
            request = self._io.EmbeddingReqInput(input_ids=prompt, rid=rid)
            async for _ in self._manager.generate_request(request):
                pass
            return
        alone: dict[str, Any] = {}  # arguments for a prefill or decode worker without the other side
        if self._settings.role in DISAGGREGATION:
            alone = {"bootstrap_host": NO_TRANSFER_HOST, "bootstrap_room": self._index(rank)}
        outputs = await self._core.engine.async_generate(
            input_ids=prompt,
            sampling_params={"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True},
            stream=True,
            rid=rid,
            routed_dp_rank=self._index(rank),
            **alone,
        )
        async for output in outputs:
            if (reason := output["meta_info"]["finish_reason"]) and reason["type"] == "abort":
                raise EngineError(reason.get("message") or "aborted")

    def _followers(self) -> Sequence[Coroutine[Any, Any, None]]:
        return [*super()._followers(), self._read_loads()]

    async def _read_loads(self) -> None:
        while True:
            for load in await self._manager.get_loads():
                rank = self._rank_at(load.dp_rank)
                if rank is not None and load.max_total_num_tokens:
                    used = load.num_used_tokens / load.max_total_num_tokens
                    rank.report(load.num_running_reqs, load.num_waiting_reqs, min(1.0, used))
            self._wake.set()
            await asyncio.sleep(LOADS_EVERY_S)

    async def _clear(self) -> None:
        """Flush the cache; requests in flight are computed again.

        Raises EngineRefused if the cache cannot be cleared.
        """
        if self._ending:
            await asyncio.wait(tuple(self._ending))
        if "sleep" in self._resting:
            return  # a sleeping engine has no cache
        before = self._clears()
        flushed = await self._call("flush_cache", timeout_s=None if self._submitted else FLUSH_S)
        if not flushed.success:
            await self._call("pause_generation", self._io.PauseGenerationReqInput(mode="retract"))
            try:
                # Without a timeout, which waits for requests to end; retracted ones do not.
                for _ in range(FLUSH_ATTEMPTS):
                    flushed = await self._call("flush_cache")
                    if flushed.success:
                        break
                    await asyncio.sleep(FLUSH_EVERY_S)
            finally:
                if "pause" not in self._resting:
                    await self._resume()
        if not flushed.success:
            raise EngineRefused(f"cannot clear the prefix cache: {flushed.message or 'SGLang gives no reason'}")
        self._report_cleared(before)

    async def _ready(self) -> None:
        await super()._ready()
        await self._awake.wait()

    async def _run_request(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        if (highest := max(prompt, default=0)) >= (size := self._manager.model_config.vocab_size):
            # SGLang's schedulers would die.
            raise AttemptFailed(400, "invalid_request", f"token id {highest} is not in the model's {size} token ids")
        task = asyncio.current_task()
        assert task is not None
        self._submitted.add(task)
        try:
            await super()._run_request(item, prompt, rank)
        finally:
            self._submitted.discard(task)

    def _check_request(self, item: WorkItem, prompt_tokens: int) -> None:
        stage = self._settings.role if self._settings.role in DISAGGREGATION else "aggregated"
        if item.stage != stage:
            message = f"this SGLang worker runs only the stage {stage}, got {item.stage}"
            if stage == "decode":
                message += ": it computes no prompts, so its pool needs prefill workers for every request"
            raise AttemptFailed(501, "not_supported", message)
        if (reason := sglang_requests.ignored(item.sampling, self._resolved)) is not None:
            raise AttemptFailed(400, "unsupported_parameter", reason)
        super()._check_request(item, prompt_tokens)

    async def _prefill(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        """Report the descriptor at once, because SGLang computes the prompt only after the decode worker connected."""
        room = new_room(self._index(item.rank), self._settings.dp_size)
        meet = Rendezvous(host=bootstrap_host(self._resolved), port=self._resolved[PORT], room=room)
        self._offer(item, rank, CONNECTOR, msgspec.json.encode(meet), LEASE_S)
        self._wake.set()
        sampling = sglang_requests.sampling_arguments(item.sampling) | PREFILL_SAMPLING
        try:
            outputs = self._outputs(item, prompt, sampling, meet.arguments())
            async with asyncio.timeout(LEASE_S), aclosing(outputs):
                async for _ in outputs:
                    pass
        except Exception as error:
            if self._core.is_dead:
                raise
            # The decode worker is not notified; its own timeout ends the wait.
            text = "SGLang did not compute the prompt of %s: %s"
            logger.warning(text, item.request_id, one_line(error), extra=item.log_extra)
        finally:
            self._kept.pop(item.request_id)

    def release(self, request_id: str) -> None:
        if request_id in self._kept:
            self.cancel(request_id)

    def _transfer(self, item: WorkItem, prompt_tokens: int) -> tuple[Rendezvous, float]:
        decode = msgspec.json.Decoder(Rendezvous).decode
        return decoded(item.prefilled, CONNECTOR, self._settings.model_name, prompt_tokens, decode), LEASE_S

    def _fetch_failure(self, error: Exception) -> str | None:
        if isinstance(error, AttemptFailed) and error.error.status >= SERVER_ERROR:
            return error.error.message
        return super()._fetch_failure(error)

    async def _outputs(
        self, item: WorkItem, prompt: list[int], sampling: dict[str, Any], meet: dict[str, Any]
    ) -> AsyncGenerator[Any]:
        """Yield the outputs of a request. Closing the generator aborts the request unless it has ended.

        SGLang rejects a request whose maximum output does not fit into the context, so the maximum is reduced.
        """
        most = min(sampling["max_new_tokens"], self._context_tokens - len(prompt))
        outputs = await self._core.engine.async_generate(
            input_ids=prompt,
            sampling_params=sampling | {"max_new_tokens": most},
            stream=True,
            rid=_rid(item),
            lora_path=item.lora_name or None,
            routed_dp_rank=self._index(item.rank),
            priority=sglang_requests.engine_priority(item.priority, self._resolved),
            cache_salt=item.cache_namespace or None,
            **({"external_trace_header": {"traceparent": item.traceparent}} if item.traceparent else {}),
            **sglang_requests.logprob_arguments(item.sampling),
            **meet,
        )
        async with aclosing(outputs):
            async for output in outputs:
                if (reason := output["meta_info"]["finish_reason"]) and reason["type"] == "abort":
                    raise sglang_requests.abort_error(reason)  # its tokens repeat the previous ones
                yield output

    async def _generate(self, prompt: list[int], response: GeneratedResponse, transfer: Rendezvous | None) -> None:
        item, top = response.item, response.item.sampling.logprobs
        meet = {} if transfer is None else transfer.arguments()
        outputs = self._outputs(item, prompt, sglang_requests.sampling_arguments(item.sampling), meet)
        async with aclosing(outputs):
            async for output in outputs:
                meta = output["meta_info"]
                token_ids = output["output_ids"]
                logprobs: Sequence[TokenLogprob] = ()
                if token_ids and top is not None:
                    logprobs = sglang_requests.token_logprobs(meta, top)
                response.add(token_ids, meta.get("cached_tokens", 0), logprobs)
                if (reason := meta["finish_reason"]) is not None:
                    self._end_response(response, reason["type"])
                self._wake.set()

    async def _embed(self, item: WorkItem, prompt: list[int], rank: RankBuffer) -> None:
        request = self._io.EmbeddingReqInput(
            input_ids=prompt,
            rid=_rid(item),
            lora_path=item.lora_name or None,
            priority=sglang_requests.engine_priority(item.priority, self._resolved),
        )
        async for output in self._manager.generate_request(request):
            vector = output["embedding"]
            rank.embedded(item, struct.pack(f"<{len(vector)}f", *vector))
            self._finish(item, rank, "stop", (len(prompt), 0, 0))

    def _request_error(self, error: Exception) -> AttemptFailed | None:
        if self._core.is_dead:
            return None
        if isinstance(error, ValueError):
            return AttemptFailed(400, "invalid_request", one_line(error))
        status = getattr(error, "status_code", 500)  # of an HTTP exception
        return sglang_requests.status_error(status, str(getattr(error, "detail", None) or one_line(error)))

    async def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """Call the tokenizer manager, which never returns if its scheduler dies.

        Raises EngineRefused if the call fails or the engine dies.
        """
        call = asyncio.ensure_future(getattr(self._manager, name)(*arguments, **named))
        try:
            while not call.done():
                await asyncio.wait([call], timeout=WATCH_S)
                if self._core.is_dead or self._dead.is_set():
                    raise EngineRefused("the engine died")
            return call.result()
        except EngineRefused:
            raise
        except Exception as error:
            raise EngineRefused(one_line(error)) from error
        finally:
            call.cancel()

    def _has_lora(self) -> bool:
        return bool(self._resolved["enable_lora"])

    async def _add_lora(self, adapter: LoraAdapter) -> None:
        request = self._io.LoadLoRAAdapterReqInput(lora_name=adapter.name, lora_path=adapter.directory)
        _require(await self._call("load_lora_adapter", request))

    async def _remove_lora(self, adapter: LoraAdapter) -> None:
        request = self._io.UnloadLoRAAdapterReqInput(lora_name=adapter.name)
        _require(await self._call("unload_lora_adapter", request))

    async def _pause(self) -> None:
        await self._call("pause_generation", self._io.PauseGenerationReqInput(mode="in_place"))

    async def _resume(self) -> None:
        await self._call("continue_generation", self._io.ContinueGenerationReqInput())

    async def _sleep(self, level: int) -> None:
        """Free the KV cache, and at the highest level the weights, if they can be restored."""
        if not self._resolved["enable_memory_saver"]:
            raise EngineRefused("SGLang was started without enable_memory_saver, so it cannot free memory")
        if "sleep" in self._resting:
            raise EngineRefused("the engine is already asleep")
        if "pause" in self._resting and self._submitted:
            raise EngineRefused("the engine is paused with requests in flight: resume it first")
        self._awake.clear()
        try:
            if self._submitted:
                await asyncio.wait(tuple(self._submitted))
            await self._clear()  # if any work were left, the release would kill the scheduler
            request = self._io.ReleaseMemoryOccupationReqInput(tags=self._memory_tags(level))
            await self._call("release_memory_occupation", request)
        except BaseException:
            self._awake.set()
            raise
        self._slept_level = level

    def _memory_tags(self, level: int) -> list[str] | None:
        """Return the kinds of memory that a sleep level frees, None for all. Without a host copy, weights are lost."""
        keeps_weights = level < DROPS_WEIGHTS and not self._resolved["enable_weights_cpu_backup"]
        return ["kv_cache"] if keeps_weights else None

    async def _wake_up(self) -> None:
        if "sleep" not in self._resting:
            return
        request = self._io.ResumeMemoryOccupationReqInput(tags=self._memory_tags(self._slept_level))
        await self._call("resume_memory_occupation", request)
        if self._slept_level == DROPS_WEIGHTS and not self._resolved["enable_weights_cpu_backup"]:
            reload = self._io.UpdateWeightFromDiskReqInput(model_path=str(self._settings.model))
            success, message, _ = await self._call("update_weights_from_disk", reload)
            if not success:
                raise EngineRefused(f"cannot reload the weights: {message}")
        self._awake.set()


def _rid(item: WorkItem) -> str:
    return f"{next(IDS)}:{item.request_id}"


def _require(outcome: Any) -> None:
    if not outcome.success:
        raise EngineRefused(one_line(RuntimeError(outcome.error_message or "SGLang gives no reason")))
