"""A linear timing from the measured operations that AIConfigurator's package holds, for a model, a GPU and an engine.

Its estimates of single steps, prompts alone and decoding alone, are asked for on a grid; the costs that come nearest to
all of them are the profile. Source: NVIDIA AIConfigurator, https://github.com/ai-dynamo/aiconfigurator (Apache-2.0).
"""

from itertools import product
from typing import NamedTuple

import numpy as np
from aiconfigurator_core.sdk.engine import EngineHandle
from numpy.typing import NDArray

from forebay.engine_model.timing import LinearTiming
from forebay.simulate.profiles.regression import regression
from forebay.simulate.profiles.sheets import ProfileUnusable

PROMPTS = (64, 256, 1024, 2048, 4096, 8192)
CACHED = (0, 2048, 8192)
SEQUENCES = (1, 4, 16, 64, 128, 256)
CONTEXTS = (256, 1024, 4096, 16_384)
CONTEXT_ALL_MAX = 1 << 20  # more tokens than caches hold beside a model
US_PER_MS = 1_000.0


class Estimated(NamedTuple):
    """The timing, and the relative errors of its single steps against the estimates: percentiles 50 and 90."""

    timing: LinearTiming
    prefill: tuple[float, float]
    decode: tuple[float, float]


def estimated(model: str, system: str, backend: str, tensor_parallel: int) -> Estimated:
    """What AIConfigurator estimates, as a linear timing.

    Args:
        model: a name on Hugging Face that it knows, or a directory with a config.json.
        system: its name of a GPU, as h100_sxm.
        backend: its name of an engine, as vllm.
        tensor_parallel: GPUs that share each matrix.

    Raises:
        ProfileUnusable: it knows no such combination.
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
    except Exception as error:  # noqa: BLE001 - its errors have no common class, and none of them is this program's
        raise ProfileUnusable(
            f"AIConfigurator has no estimate of {model} on {system} with {backend}: {error}"
        ) from None
    rows = np.array([amounts for amounts, _ in (*prefill, *decode)])
    times = np.array([us for _, us in (*prefill, *decode)])
    if not (times > 0).all():
        raise ProfileUnusable(f"AIConfigurator estimates steps of no time for {model} on {system} with {backend}")
    shares = rows / times[:, None]
    costs = regression(shares)
    errors: NDArray[np.float64] = np.abs(shares @ costs - 1.0)
    parts = errors[: len(prefill)], errors[len(prefill) :]
    of_prefill, of_decode = ((float(np.percentile(part, 50)), float(np.percentile(part, 90))) for part in parts)
    timing = LinearTiming(**dict(zip(LinearTiming.__struct_fields__, map(float, costs), strict=True)))
    return Estimated(timing, of_prefill, of_decode)


def _prompt(tokens: int, cached: int) -> tuple[float, ...]:
    return (1, tokens, tokens * cached + tokens * (tokens + 1) // 2, 0, 0, 0)


def _decoding(sequences: int, context: int) -> tuple[float, ...]:
    return (1, 0, 0, 1, sequences, sequences * context)
