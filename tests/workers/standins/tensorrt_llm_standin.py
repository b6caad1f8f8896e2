"""Stand-in for TensorRT-LLM with the signatures of its source after 1.2. It rejects everything else."""

import asyncio
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from tests.harness.openai_server.cache import BlockRemoved, BlocksStored, CacheEvent, LittleCache, StandinRequest
from tests.workers.standins.little import install_modules, next_token, struct

LLM_ARGS: dict[str, Any] = {
    "model": None, "tensor_parallel_size": 1, "enable_attention_dp": False, "max_batch_size": 2048,
    "max_num_tokens": 8192, "max_seq_len": None, "kv_cache_config": None, "enable_iter_perf_stats": False,
    "return_perf_metrics": False, "cache_transceiver_config": None, "disable_overlap_scheduler": False,
    "guided_decoding_backend": None, "lora_config": None, "load_format": "auto", "backend": "pytorch",
}  # fmt: skip
KV_CACHE_ARGS: dict[str, Any] = {
    "enable_block_reuse": True, "max_tokens": 256, "tokens_per_block": 32, "event_buffer_max_size": 0,
    "free_gpu_memory_fraction": 0.9, "host_cache_size": None,
}  # fmt: skip


def strict(known: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    unknown = set(given) - set(known)
    if unknown:
        raise ValueError(f"Extra inputs are not permitted: {unknown.pop()}")
    return {**known, **given}


GuidedDecodingParams = struct(
    "GuidedDecodingParams", json=None, regex=None, grammar=None, json_object=False, structural_tag=None
)
SchedulingParams = struct("SchedulingParams", attention_dp_rank=None, attention_dp_relax=True)
SamplingFields = struct(
    "SamplingFields", end_id=None, max_tokens=32, stop_token_ids=None, n=1, top_k=None, top_p=None, seed=None,
    temperature=None, min_tokens=None, repetition_penalty=None, presence_penalty=None, frequency_penalty=None,
    min_p=None, logprobs=None, guided_decoding=None, ignore_eos=False, detokenize=True,
)  # fmt: skip
GENERATE_ARGUMENTS: dict[str, Any] = {
    "inputs": None, "sampling_params": None, "lora_request": None, "prompt_adapter_request": None, "streaming": False,
    "kv_cache_retention_config": None, "disaggregated_params": None, "trace_headers": None, "scheduling_params": None,
    "cache_salt": None, "priority": 0.5,
}  # fmt: skip


def SamplingParams(**given: Any) -> Any:  # noqa: N802 - as the real one
    params = SamplingFields(**given)
    if params.top_p is not None and not 0 <= params.top_p <= 1:
        raise ValueError(f"require 0 <= top_p <= 1, got top_p={params.top_p}")
    return params


@dataclass(slots=True)
class LoRARequest:
    lora_name: str
    lora_int_id: int
    lora_path: str = ""

    def __post_init__(self) -> None:
        if not os.path.exists(self.lora_path):  # noqa: PTH110 - as the real one
            raise ValueError(f"lora_path ({self.lora_path}) does not exist.")


@dataclass(slots=True)
class ContextUsage:
    prompt_tokens: int
    total_tokens: int = field(init=False, default=0)


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list[Any] | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_usage: Any = None


class RequestError(RuntimeError):
    """As in `tensorrt_llm.executor.utils`."""


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    disaggregated_params: Any = None


class RequestOutput:
    """Result of `generate_async`: yields itself repeatedly, with all tokens so far."""

    def __init__(self, llm: "LLM", requested: StandinRequest, params: Any) -> None:
        self.llm = llm
        self.requested = requested
        self.params = params
        self.outputs = [CompletionOutput()]
        self.finished = False
        self.cached_tokens = 0
        self.error: Exception | None = None
        self.news = asyncio.Event()
        self.metrics_dict: dict[str, Any] = {}
        self.apart: Any = None

    def abort(self) -> None:
        self.llm.aborted.append(self.requested.name)
        is_running = self.llm.running.pop(self.requested.name, None) is not None
        fetches = self.apart is not None and self.apart.request_type == "generation_only"
        if is_running and fetches and not self.requested.generated and not self.llm.deaf:
            self.llm.healthy = False  # its KV was moving

    async def aresult(self) -> "RequestOutput":
        async for _ in self:
            pass
        return self

    def __aiter__(self) -> "RequestOutput":
        return self

    async def __anext__(self) -> "RequestOutput":
        if self.finished:
            raise StopAsyncIteration
        await self.news.wait()
        self.news.clear()
        if self.error is not None:
            raise self.error
        return self


class MetricsCollector:
    reported: list[Any] = []  # noqa: RUF012 - shared by all instances

    def __init__(self, labels: dict[str, str]) -> None:
        assert set(labels) == {"model_name", "engine_type"}

    def log_iteration_stats(self, iteration_stats: dict[str, Any]) -> None:
        assert "kvCacheStats" in iteration_stats

    def log_request_metrics_dict(self, metrics_dict: dict[str, Any]) -> None:
        MetricsCollector.reported.append(metrics_dict)


class LLM:
    """`made` is the newest LLM; `fails` is the exception of the next constructor call."""

    made: "LLM | None" = None
    fails: Exception | None = None
    tokenizer: Any = None

    def __init__(self, model: str, **kwargs: Any) -> None:
        if LLM.fails is not None:
            raise LLM.fails
        arguments = strict(LLM_ARGS, {"model": model, **kwargs})
        cache = strict(KV_CACHE_ARGS, arguments["kv_cache_config"] or {})
        self.args = SimpleNamespace(**arguments)
        ranks = arguments["tensor_parallel_size"] if arguments["enable_attention_dp"] else 1
        self.block_size = cache["tokens_per_block"]
        self.caches = [LittleCache(self.block_size, cache["max_tokens"] // self.block_size) for _ in range(ranks)]
        self.buffered = cache["event_buffer_max_size"]
        self.events: list[dict[str, Any]] = []
        self.stats: list[dict[str, Any]] = []
        self.next_ids = [0] * ranks
        self.numbers = 0
        self.simple_logprobs = False
        self.request_ids: set[int] = set()
        self.running: dict[str, RequestOutput] = {}
        self.aborted: list[str] = []
        self.requested_with: list[dict[str, Any]] = []
        self.fail_after: dict[int, Exception] = {}  # by the first token of a prompt
        self.end_after: dict[int, str] = {}
        self.healthy = True
        self.deaf = False
        self.step = asyncio.Event()
        self.step.set()
        self.stepping: asyncio.Task[None] | None = None
        for rank in range(ranks):
            self._event(rank, {"type": "created", "num_blocks_per_cache_level": [8, 0]})
        LLM.made = self

    def _event(self, rank: int, data: dict[str, Any]) -> None:
        if self.buffered:
            event = {"event_id": self.next_ids[rank], "window_size": 128, "data": data}
            self.events.append(event if len(self.caches) == 1 else {**event, "attention_dp_rank": rank})
        self.next_ids[rank] += 1

    def _emit(self, rank: int, changes: list[CacheEvent]) -> None:
        for change in changes:
            match change:
                case BlockRemoved(block):
                    self._event(rank, {"type": "removed", "block_hashes": [block]})
                case BlocksStored(hashes, parent, token_ids, prefix):
                    size = self.block_size
                    blocks = [
                        {
                            "type": "stored_block",
                            "block_hash": name,
                            "tokens": [
                                {"type": "unique_token", "token_id": one, "token_extra_id": 0}
                                for one in token_ids[at * size : (at + 1) * size]
                            ],
                            "cache_level": 0,
                            "priority": 35,
                        }
                        for at, name in enumerate(hashes)
                    ]
                    salted = {"cache_salt": prefix.salt} if prefix.salt else {}
                    named = {"lora_name": prefix.lora_name} if prefix.lora_name else {}
                    self._event(rank, {"type": "stored", "parent_hash": parent, "blocks": blocks, **salted, **named})

    def generate_async(self, **given: Any) -> RequestOutput:
        arguments = strict(GENERATE_ARGUMENTS, given)
        self.requested_with.append(arguments)
        prompt, params, scheduling = arguments["inputs"], arguments["sampling_params"], arguments["scheduling_params"]
        if not 0.0 <= arguments["priority"] <= 1.0:
            raise ValueError(f"priority must be a float in [0.0, 1.0], got {arguments['priority']}")
        if len(prompt) > self.args.max_num_tokens:
            raise RequestError("The sum of prompt length, query length should not exceed max_num_tokens")
        if params.guided_decoding is not None and self.args.guided_decoding_backend is None:
            raise ValueError("Guided decoding is not enabled for this server")
        self.numbers += 1
        salt, adapter = arguments["cache_salt"] or "", arguments["lora_request"]
        requested = StandinRequest(str(self.numbers), list(prompt), params.max_tokens, salt=salt)
        requested.lora = adapter.lora_name if adapter else ""
        if scheduling is not None:
            assert scheduling.attention_dp_rank is not None and not scheduling.attention_dp_relax
            requested.rank = scheduling.attention_dp_rank
        result = self.running[requested.name] = RequestOutput(self, requested, params)
        result.apart = arguments["disaggregated_params"]
        if result.apart is not None:
            self._check_apart(result.apart)
        if self.stepping is None:
            self.stepping = asyncio.create_task(self._step_for_ever())
        return result

    def _check_apart(self, params: Any) -> None:
        if not self.args.cache_transceiver_config:
            raise ValueError("Disaggregated requests need cache_transceiver_config")
        if params.request_type == "context_only":
            assert params.first_gen_tokens is None and (1 << 40) <= params.disagg_request_id < 1 << 63
            assert params.disagg_request_id not in self.request_ids, "the transceiver tracks requests by this id"
            self.request_ids.add(params.disagg_request_id)
            return
        assert params.request_type == "generation_only" and params.first_gen_tokens and params.opaque_state

    async def _step_for_ever(self) -> None:
        while True:
            await asyncio.sleep(0)
            await self.step.wait()
            if not self.deaf:
                advanced = list(self.running.values())
                for result in advanced:
                    self._advance(result)
                self._iterated(advanced)
            if not self.running:
                await asyncio.sleep(0.001)

    def _advance(self, result: RequestOutput) -> None:
        requested = result.requested
        cache = self.caches[requested.rank]
        (output,) = result.outputs
        if not requested.generated:
            result.cached_tokens = cache.cached_tokens(requested)
            self._emit(requested.rank, cache.store(requested, requested.prompt))
        elif (failure := self.fail_after.get(requested.prompt[0])) is not None:
            result.error = failure
            del self.running[requested.name]
            result.news.set()
            return
        apart = result.apart
        fetches = apart is not None and apart.request_type == "generation_only" and not requested.generated
        if fetches and apart is not None and apart.opaque_state != b"state \xff of " + bytes(requested.prompt[:1]):
            result.error = RuntimeError("KV cache transfer failed")
            del self.running[requested.name]
            result.news.set()
            return
        token = next_token([*requested.prompt, *requested.generated])
        if fetches and apart is not None:
            assert apart.first_gen_tokens is not None
            (token,) = apart.first_gen_tokens
        requested.generated.append(token)
        output.token_ids.append(token)
        if result.params.logprobs is not None:
            output.logprobs.append({token: Logprob(-0.5, 1), 7: Logprob(float("-inf"), 2)})
        if (why := self.end_after.get(requested.prompt[0])) is not None:
            output.finish_reason = why
        elif len(requested.generated) >= requested.max_tokens:
            output.finish_reason = "length"
        if output.finish_reason is not None:
            self._emit(requested.rank, cache.store(requested, [*requested.prompt, *requested.generated[:-1]]))
            result.finished = True
            if apart is not None and apart.request_type == "context_only":
                places = [-0.5] if self.simple_logprobs else list(output.logprobs)
                output.disaggregated_params = DisaggregatedParams(
                    disagg_request_id=apart.disagg_request_id,
                    ctx_usage=ContextUsage(len(requested.prompt)),
                    request_type="context_only",
                    first_gen_tokens=list(requested.generated),
                    first_gen_log_probs=places or None,
                    ctx_request_id=1 << 62,
                    opaque_state=b"state \xff of " + bytes(requested.prompt[:1]),
                )
            result.metrics_dict = {"request_id": requested.name}
            del self.running[requested.name]
        result.news.set()

    def _iterated(self, advanced: list[RequestOutput]) -> None:
        if not advanced:
            return
        for rank, cache in enumerate(self.caches):
            running = sum(result.requested.rank == rank for result in advanced)
            self.stats.append(
                {
                    "iter": 1,
                    "attentionDpRank": rank,
                    "kvCacheStats": {
                        "usedNumBlocks": min(running, cache.blocks),
                        "maxNumBlocks": cache.blocks,
                        "tokensPerBlock": self.block_size,
                    },
                    "inflightBatchingStats": {"numContextRequests": 0, "numGenRequests": running},
                    "numQueuedRequests": 0,
                }
            )
        del self.stats[:-64]

    def get_stats_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        return _drained(self.stats)

    def get_kv_cache_events_async(self, timeout: float | None = 2) -> AsyncIterator[dict[str, Any]]:
        return _drained(self.events)

    def get_kv_cache_capacity(self) -> dict[str, int]:
        cache = self.caches[0]
        return {"maxNumBlocks": cache.blocks, "tokensPerBlock": self.block_size, "maxNumTokens": 0}

    def _check_health(self) -> bool:
        return self.healthy

    def shutdown(self) -> None:
        self.healthy = False
        if self.stepping is not None:
            self.stepping.get_loop().call_soon_threadsafe(self.stepping.cancel)


async def _drained(queue: list[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    while queue:
        yield queue.pop(0)


def install(monkeypatch: pytest.MonkeyPatch) -> type[LLM]:
    """Make the stand-in importable as TensorRT-LLM."""
    contents: dict[str, tuple[Any, ...]] = {
        "tensorrt_llm": (LLM, SamplingParams),
        "tensorrt_llm.executor": (),
        "tensorrt_llm.executor.request": (LoRARequest,),
        "tensorrt_llm.executor.result": (Logprob,),
        "tensorrt_llm.llmapi": (DisaggregatedParams,),
        "tensorrt_llm.sampling_params": (GuidedDecodingParams,),
        "tensorrt_llm.scheduling_params": (SchedulingParams,),
        "tensorrt_llm.metrics": (MetricsCollector,),
    }
    install_modules(monkeypatch, contents)
    monkeypatch.setattr(LLM, "made", None)
    monkeypatch.setattr(LLM, "fails", None)
    monkeypatch.setattr(MetricsCollector, "reported", [])
    return LLM
