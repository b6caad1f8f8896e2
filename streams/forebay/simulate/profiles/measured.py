"""Linear timing fitted to the points of a measured profile."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from forebay.engine_model.timing import LinearTiming
from forebay.events.scaling import DecodePoint, PrefillPoint
from forebay.runtime.errors import ConfigError
from forebay.simulate.profiles.regression import Errors, fitted

POINTS_MIN = 3  # per stage; two points would fit any line
US_PER_MS = 1_000.0


class MeasuredTiming(NamedTuple):
    """Linear timing fitted to measured points."""

    timing: LinearTiming
    work_us: int  # microseconds of a request outside of the engine's steps
    prefill: Errors  # of the times to first token
    decode: Errors  # of the inter-token latencies


def fit_measured(prefill: Sequence[PrefillPoint], decode: Sequence[DecodePoint], batched_tokens: int) -> MeasuredTiming:
    """Return the linear timing with the smallest errors over all points. Raises ConfigError for too few points.

    A step has at most `batched_tokens` tokens, by which long prompts are divided.
    """
    for stage, points in (("prefill", prefill), ("decode", decode)):
        if len(points) < POINTS_MIN:
            text = f"an engine profile requires {POINTS_MIN} points of each stage, got {len(points)} of {stage}"
            raise ConfigError(text)
    rows = np.array([*(_prompt(one, batched_tokens) for one in prefill), *map(_decoding, decode)], dtype=np.float64)
    times = np.array([*(one.ttft_ms for one in prefill), *(one.itl_ms for one in decode)]) * US_PER_MS
    (*costs, work), of_prefill, of_decode = fitted(rows, times, len(prefill))
    timing = LinearTiming(**dict(zip(LinearTiming.__struct_fields__, costs, strict=True)))
    return MeasuredTiming(timing, round(work), of_prefill, of_decode)


def _prompt(point: PrefillPoint, batched_tokens: int) -> tuple[float, ...]:
    """Return the amounts of work of a prompt alone: steps, tokens, attended pairs, and the request itself."""
    steps = -(-point.isl // batched_tokens)
    return (steps, point.isl, point.isl * (point.isl + 1) / 2, 0, 0, 0, 1)


def _decoding(point: DecodePoint) -> tuple[float, ...]:
    return (1, 0, 0, 1, point.concurrency, point.concurrency * point.context, 0)
