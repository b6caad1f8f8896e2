"""Convert work items to TensorRT-LLM's arguments, and decode its statistics. Does not import TensorRT-LLM."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import msgspec

from forebay.events.requests import Sampling, StructuredOutput
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang.requests import choice_regex
from forebay.workers.engines.vllm.requests import structured_arguments

EVENTS_MAX = 100_000  # unread KV events that the engine keeps; one step of a busy engine creates some hundred
DEFAULT_PRIORITY = 0.5
COUNT_END = 10**9  # larger numbers are malformed
CACHE = "kv_cache_config"
DISAGGREGATED = ("prefill", "decode")
SCALED_CONTEXTS = ("su", "longrope", "llama3", "yarn")  # RoPE scaling that the length in config.json includes
UNLIMITED = 1 << 31

Count = Annotated[int, msgspec.Meta(ge=0, lt=COUNT_END)]

_AS_IS = ("top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "ignore_eos")


def engine_arguments(settings: EngineSettings, *, kv_events: bool) -> dict[str, Any]:
    """Return the arguments of TensorRT-LLM's `LLM`, of which `settings.arguments` override all others.

    Nested configurations are dictionaries.
    """
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
        "guided_decoding_backend": "xgrammar",  # TensorRT-LLM has no default and then rejects structured output
    }
    if settings.dp_size > 1:
        arguments["tensor_parallel_size"] = settings.dp_size
        arguments["enable_attention_dp"] = True
    if settings.loras:
        arguments["lora_config"] = {"lora_dir": [str(directory) for directory in settings.loras.values()]}
    if settings.role in DISAGGREGATED:
        arguments["cache_transceiver_config"] = {"backend": "DEFAULT"}
    if settings.role == "prefill":
        arguments["disable_overlap_scheduler"] = True  # it does not support prompts without output
    arguments |= given
    arguments[CACHE] = _present(cache | own_cache)
    return _present(arguments)


def context_tokens(model: Path) -> int:
    """Return the context length that TensorRT-LLM infers from the config.json of a model without `max_seq_len`.

    If config.json has no length, there is no limit here, because the default is that of the model's class.
    """
    config = json.loads((model / "config.json").read_bytes())
    text = config if "max_position_embeddings" in config else config.get("text_config") or {}
    scaling = config.get("rope_scaling") or {}
    is_included = scaling.get("type", scaling.get("rope_type")) in SCALED_CONTEXTS
    factor = 1.0 if is_included else scaling.get("factor") or 1.0
    return math.ceil((text.get("max_position_embeddings") or UNLIMITED) * factor)


def _present(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in arguments.items() if value is not None}


def sampling_arguments(sampling: Sampling) -> dict[str, Any]:
    """Return the arguments of TensorRT-LLM's `SamplingParams`, except `guided_decoding`.

    The engine does not detokenize and gets no stop strings, because the ingress handles text. Raises ValueError if
    TensorRT-LLM does not support a parameter.
    """
    if sampling.logit_bias:
        raise ValueError("the TensorRT-LLM engine does not support logit_bias")
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
        arguments["logprobs"] = max(1, sampling.logprobs)  # with 0, the token's own is not reported either
    return arguments


def guided_arguments(structured: StructuredOutput) -> dict[str, Any]:
    """Return the arguments of TensorRT-LLM's `GuidedDecodingParams`. Raises ValueError for a bad `choice` list."""
    if structured.kind == "choice":
        return {"regex": choice_regex(structured.text)}
    return structured_arguments(structured)


def engine_priority(priority: int) -> float:
    """Return the priority of a request for TensorRT-LLM, a number between 0 and 1; higher values run sooner."""
    return DEFAULT_PRIORITY * (1.0 + priority / (1.0 + abs(priority)))


class _KvCache(msgspec.Struct, frozen=True, rename="camel"):
    used_num_blocks: Count = 0
    max_num_blocks: Count = 0
    tokens_per_block: Count = 0


class _Batching(msgspec.Struct, frozen=True, rename="camel"):
    num_context_requests: Count = 0
    num_gen_requests: Count = 0
    num_paused_requests: Count = 0
    num_queued_context_requests: Count = 0
    num_queued_gen_requests: Count = 0


class TrtLlmStepStats(msgspec.Struct, frozen=True, rename="camel"):
    """Statistics of one engine step, of TensorRT-LLM's `get_stats_async` and of the `/metrics` of its server."""

    kv_cache_stats: _KvCache = _KvCache()
    inflight_batching_stats: _Batching = _Batching()
    attention_dp_rank: int | None = None
    num_queued_requests: Count = 0

    @property
    def rank(self) -> int:
        """Index of the rank in the engine, from 0."""
        return self.attention_dp_rank or 0

    @property
    def running(self) -> int:
        """Number of requests that have KV blocks."""
        batch = self.inflight_batching_stats
        return batch.num_context_requests + batch.num_gen_requests + batch.num_paused_requests

    @property
    def waiting(self) -> int:
        """Number of queued requests: the larger of two fields, because a release of TensorRT-LLM sets only one."""
        batch = self.inflight_batching_stats
        return max(self.num_queued_requests, batch.num_queued_context_requests + batch.num_queued_gen_requests)

    @property
    def usage(self) -> float:
        """Share of KV blocks in use, from 0 to 1."""
        cache = self.kv_cache_stats
        return min(1.0, cache.used_num_blocks / cache.max_num_blocks) if cache.max_num_blocks else 0.0


def step_stats(raw: object) -> TrtLlmStepStats | None:
    """Return the decoded statistics of a step; None if they are invalid or have no part for the KV cache."""
    try:
        stats = msgspec.convert(raw, TrtLlmStepStats)
    except msgspec.ValidationError:
        return None
    return stats if stats.kv_cache_stats.max_num_blocks else None


def is_refusal(error: BaseException) -> bool:
    """Return whether an exception of TensorRT-LLM means that the request is invalid, and not that the engine failed."""
    return isinstance(error, ValueError | TypeError | NotImplementedError) or type(error).__name__ == "RequestError"
