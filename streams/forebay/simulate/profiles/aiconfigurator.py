"""Linear timing fitted to the estimates of NVIDIA AIConfigurator for a model, a GPU and an engine.

AIConfigurator has a database of measured operations. It is queried for a grid of single steps, each with prefill alone
or decode alone. The linear costs with the smallest errors over all these steps become the profile. Source:
https://github.com/ai-dynamo/aiconfigurator (Apache-2.0).
"""

from itertools import product
from typing import NamedTuple

import numpy as np
from aiconfigurator_core.sdk.engine import EngineHandle

from forebay.engine_model.timing import LinearTiming
from forebay.simulate.profiles.regression import Errors, fitted
from forebay.simulate.profiles.sheets import ProfileUnusable

PROMPTS = (64, 256, 1024, 2048, 4096, 8192)
CACHED = (0, 2048, 8192)
SEQUENCES = (1, 4, 16, 64, 128, 256)
CONTEXTS = (256, 1024, 4096, 16_384)
CONTEXT_ALL_MAX = 1 << 20  # tokens; more than the KV cache of a GPU holds
US_PER_MS = 1_000.0


class EstimatedTiming(NamedTuple):
    """Linear timing fitted to AIConfigurator's estimates, and its relative errors against them per step."""

    timing: LinearTiming
    prefill: Errors  # of prefill steps
    decode: Errors  # of decode steps


def fit_estimates(model: str, system: str, backend: str, tensor_parallel: int) -> EstimatedTiming:
    """Return a linear timing fitted to AIConfigurator's estimates.

    Args:
        model: name of a model on Hugging Face, or a directory with a config.json.
        system: AIConfigurator's name of a GPU, such as h100_sxm.
        backend: AIConfigurator's name of an engine, such as vllm.
        tensor_parallel: GPUs per engine.

    Raises ProfileUnusable if AIConfigurator does not support this combination.
    """
    try:
        engine = EngineHandle.compile(model, system, backend, tp_size=tensor_parallel)
        prefill = [
            (_prompt(tokens, cached), engine.predict_prefill_latency(1, tokens + cached, cached) * US_PER_MS)
            for tokens, cached in product(PROMPTS, CACHED)
        ]
        decode = [
            (_decoding(sequences, context), engine.predict_decode_latency(sequences, context) * US_PER_MS)
            for sequences, context in product(SEQUENCES, CONTEXTS)
            if sequences * context <= CONTEXT_ALL_MAX
        ]
    except Exception as error:  # noqa: BLE001 - its exceptions have no common base class
        raise ProfileUnusable(f"AIConfigurator cannot estimate {model} on {system} with {backend}: {error}") from None
    rows = np.array([amounts for amounts, _ in (*prefill, *decode)])
    times = np.array([us for _, us in (*prefill, *decode)])
    if not (times > 0).all():
        raise ProfileUnusable(
            f"cannot use the estimate of AIConfigurator for {model} on {system} with {backend}: it contains a step time"
            " of 0; choose another system or engine"
        )
    costs, of_prefill, of_decode = fitted(rows, times, len(prefill))
    timing = LinearTiming(**dict(zip(LinearTiming.__struct_fields__, costs, strict=True)))
    return EstimatedTiming(timing, of_prefill, of_decode)


def _prompt(tokens: int, cached: int) -> tuple[float, ...]:
    return (1, tokens, tokens * cached + tokens * (tokens + 1) // 2, 0, 0, 0)


def _decoding(sequences: int, context: int) -> tuple[float, ...]:
    return (1, 0, 0, 1, sequences, sequences * context)
