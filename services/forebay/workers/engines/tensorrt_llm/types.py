"""Types of TensorRT-LLM's API. Imports TensorRT-LLM, so import this module only in a worker that runs it."""

from tensorrt_llm import LLM, SamplingParams
from tensorrt_llm.executor.request import LoRARequest
from tensorrt_llm.executor.result import Logprob
from tensorrt_llm.llmapi import DisaggregatedParams
from tensorrt_llm.sampling_params import GuidedDecodingParams
from tensorrt_llm.scheduling_params import SchedulingParams

__all__ = [
    "LLM",
    "DisaggregatedParams",
    "GuidedDecodingParams",
    "LoRARequest",
    "Logprob",
    "SamplingParams",
    "SchedulingParams",
]
