"""Create arguments for vLLM in its own types. Imports vLLM, so import this module only in a worker that runs vLLM."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors.torch import load_file
from vllm import PoolingParams, SamplingParams
from vllm.config import ModelConfig
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMError
from vllm.lora.request import LoRARequest
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.video import Qwen2VLVideoBackend
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from forebay.events.media import MediaKind
from forebay.events.requests import Sampling
from forebay.workers.engine import AttemptFailed, one_line
from forebay.workers.engines.loras import LoraAdapter
from forebay.workers.engines.vllm.requests import sampling_arguments, structured_arguments
from forebay.workers.engines.vllm.tiers.configuration import HINTS, RequestHints
from forebay.workers.kv_transfer.embeddings import Array

__all__ = [
    "EngineDeadError",
    "VLLMError",
    "lora_request",
    "placeholder",
    "pooling_params",
    "read_tensor",
    "request_error",
    "sampled_video",
    "sampling_params",
]


def sampling_params(
    sampling: Sampling, transfer: Mapping[str, Any] | None = None, hints: RequestHints | None = None
) -> SamplingParams:
    """Return vLLM's sampling parameters of a request; vLLM then returns only new tokens with each output.

    Raises ValueError or VLLMError if vLLM rejects a parameter.
    """
    arguments = sampling_arguments(sampling)
    extra: dict[str, Any] = {}
    if transfer is not None:
        extra["kv_transfer_params"] = dict(transfer)
    if hints is not None:
        extra[HINTS] = msgspec.to_builtins(hints)
    if extra:
        arguments["extra_args"] = extra
    if sampling.structured is not None:
        arguments["structured_outputs"] = StructuredOutputsParams(**structured_arguments(sampling.structured))
    return SamplingParams(output_kind=RequestOutputKind.DELTA, **arguments)


def pooling_params() -> PoolingParams:
    return PoolingParams(task="embed")


def placeholder(model_config: ModelConfig, kind: MediaKind) -> str:
    """Return a prompt that consists of one image or video, before the model's processor replaces its placeholder."""
    text: str = MULTIMODAL_REGISTRY.create_processor(model_config).dummy_inputs.get_dummy_text({kind: 1})
    return text


def sampled_video(content: bytes) -> tuple[Any, dict[str, Any]]:
    """Return the frames that vLLM's server samples of a video for Qwen2-VL and Qwen2.5-VL, and their metadata."""
    frames, metadata = Qwen2VLVideoBackend.load_bytes(content)
    return frames, metadata


def read_tensor(file: Path, name: str) -> Array:
    """Return a tensor in a file as float32, because numpy has no bfloat16."""
    array: Array = load_file(file)[name].float().numpy()
    return array


def lora_request(adapter: LoraAdapter) -> LoRARequest:
    return LoRARequest(adapter.name, adapter.number, adapter.directory)


def request_error(error: Exception) -> AttemptFailed:
    if isinstance(error, GracefulHTTPError):
        return AttemptFailed(int(error.http_status), "engine_overloaded", one_line(error))
    cause = error.__cause__ or error
    if isinstance(error, VLLMClientError) or isinstance(cause, ValueError | VLLMClientError):
        return AttemptFailed(400, "invalid_request", one_line(cause))
    return AttemptFailed(500, "engine_error", f"vLLM failed: {one_line(cause)}")
