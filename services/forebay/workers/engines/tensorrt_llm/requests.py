"""Work items in TensorRT-LLM's terms, and its statistics in ours. Pure: TensorRT-LLM is not imported here."""

from collections.abc import Mapping
from typing import Any

import msgspec

from forebay.events.requests import Sampling, StructuredOutput
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang.requests import choice_regex

EVENTS_MAX = 100_000  # that the engine keeps until they are read; a step of a busy engine has some hundred
DEFAULT_PRIORITY = 0.5
CACHE = "kv_cache_config"
APART = ("prefill", "decode")

_AS_IS = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")


def engine_arguments(settings: EngineSettings, *, kv_events: bool) -> dict[str, Any]:
    """The keyword arguments of `LLM`, configurations of their own as dictionaries; those of the operator win."""
    given = dict(settings.arguments)
    own_cache = dict(given.pop(CACHE, {}))
    block_size = own_cache.get("tokens_per_block", settings.block_size)
    cache: dict[str, Any] = {"enable_block_reuse": True, "tokens_per_block": settings.block_size}
    if settings.kv_blocks is not None:
        cache["max_tokens"] = settings.kv_blocks * (block_size or 32)  # TensorRT-LLM's own block size
    if kv_events:
        cache["event_buffer_max_size"] = EVENTS_MAX
    arguments: dict[str, Any] = {
        "model": str(settings.model),
        "max_batch_size": settings.max_num_seqs,
        "max_num_tokens": settings.max_num_batched_tokens,
        "enable_iter_perf_stats": True,
        "return_perf_metrics": True,
    }
    if settings.dp_size > 1:
        arguments["tensor_parallel_size"] = settings.dp_size
        arguments["enable_attention_dp"] = True
    if settings.loras:
        arguments["lora_config"] = {"lora_dir": [str(directory) for directory in settings.loras.values()]}
    if settings.role in APART:
        arguments["cache_transceiver_config"] = {"backend": "DEFAULT"}
    if settings.role == "prefill":
        arguments["disable_overlap_scheduler"] = True  # which does not know prompts without an answer
    arguments |= given
    arguments[CACHE] = _told(cache | own_cache)
    return _told(arguments)


def _told(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """The keyword arguments of `SamplingParams`, without `guided_decoding`; text stays with the ingress.

    Raises ValueError for what the adapter has no word for.
    """
    if sampling.logit_bias:
        raise ValueError("the TensorRT-LLM adapter has no logit_bias")
    arguments: dict[str, Any] = {name: getattr(sampling, name) for name in _AS_IS}
    arguments |= {"max_tokens": sampling.max_tokens, "detokenize": False}
    if sampling.temperature == 0.0:  # a temperature must be above 0
        arguments["top_k"] = 1
    else:
        arguments["temperature"] = sampling.temperature
        if sampling.top_k:
            arguments["top_k"] = sampling.top_k
    if sampling.seed is not None:
        arguments["seed"] = sampling.seed
    if sampling.min_tokens:
        arguments["min_tokens"] = sampling.min_tokens
    if sampling.stop_token_ids:
        arguments["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.logprobs is not None:
        arguments["logprobs"] = max(1, sampling.logprobs)  # 0 is none at all, not even the token's own
    return arguments


def guided_arguments(structured: StructuredOutput) -> dict[str, Any]:
    """The keyword arguments of `GuidedDecodingParams`; raises ValueError for choices that are no list of texts."""
    match structured.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": structured.text}
        case "choice":
            return {"regex": choice_regex(structured.text)}
        case "regex" | "grammar" as kind:
            return {kind: structured.text}


def engine_priority(priority: int) -> float:
    """An item's priority for TensorRT-LLM: from 0 to 1, higher is sooner; above some thousand they are as one."""
    return DEFAULT_PRIORITY * (1.0 + priority / (1.0 + abs(priority)))


class _KvCache(msgspec.Struct, frozen=True, rename="camel"):
    used_num_blocks: int
    max_num_blocks: int
    tokens_per_block: int = 0


class _Batching(msgspec.Struct, frozen=True, rename="camel"):
    num_context_requests: int = 0
    num_gen_requests: int = 0
    num_paused_requests: int = 0
    num_queued_context_requests: int = 0
    num_queued_gen_requests: int = 0


class TrtLlmStepStats(msgspec.Struct, frozen=True, rename="camel"):
    """One step's statistics, as `get_stats_async` gives them."""

    kv_cache_stats: _KvCache
    inflight_batching_stats: _Batching = _Batching()
    attention_dp_rank: int | None = None
    num_queued_requests: int = 0

    @property
    def rank(self) -> int:
        """Counted from 0."""
        return self.attention_dp_rank or 0

    @property
    def running(self) -> int:
        """Requests that have KV blocks."""
        batch = self.inflight_batching_stats
        return batch.num_context_requests + batch.num_gen_requests + batch.num_paused_requests

    @property
    def waiting(self) -> int:
        """Requests in the queue, whichever of the two counts knows of them."""
        batch = self.inflight_batching_stats
        return max(self.num_queued_requests, batch.num_queued_context_requests + batch.num_queued_gen_requests)

    @property
    def usage(self) -> float:
        """The share of KV blocks in use."""
        cache = self.kv_cache_stats
        return min(1.0, cache.used_num_blocks / cache.max_num_blocks) if cache.max_num_blocks else 0.0


def step_stats(told: object) -> TrtLlmStepStats | None:
    """A step's statistics; None for those without a word on the KV cache, and for what are none."""
    try:
        return msgspec.convert(told, TrtLlmStepStats)
    except msgspec.ValidationError:
        return None


def is_refusal(error: BaseException) -> bool:
    """Whether the engine refused a request: its `RequestError` is named so, and validation errors are Python's own."""
    return isinstance(error, ValueError | TypeError | NotImplementedError) or type(error).__name__ == "RequestError"
