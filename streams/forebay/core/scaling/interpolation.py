"""Read speeds of one worker from its measured profile.

Prefill points form one curve over the prompt length. Decode points with the same context length form one curve over the
number of concurrent requests, and contexts between two curves mix the values of both. All values between two points are
linear. Outside of the measured range the nearest point counts, and the result says that the profile does not cover it.
"""

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from forebay.events.scaling import DecodePoint, PrefillPoint

DecodeCurve = Sequence[DecodePoint]  # points of one context length, by rising concurrency


@dataclass(frozen=True, slots=True)
class PrefillSpeed:
    """Prefill of one worker at one prompt length."""

    ttft_ms: float
    tokens_per_s: float
    covered: bool


@dataclass(frozen=True, slots=True)
class DecodeCapacity:
    """Highest decode throughput of one worker within a target of the inter-token latency.

    Attributes:
        tokens_per_s: output tokens per second. If the target is not attainable, those at the lowest concurrency.
        attainable: whether the lowest measured concurrency meets the target.
        covered: whether the profile covers the context length, and a concurrency that the KV cache allows.
    """

    tokens_per_s: float
    attainable: bool
    covered: bool


def uncached(isl: float, kv_hit_rate: float | None) -> float:
    return isl * (1 - kv_hit_rate) if kv_hit_rate is not None and 0 <= kv_hit_rate <= 1 else isl


def prefill_speed(points: Sequence[PrefillPoint], isl: float) -> PrefillSpeed:
    """Return the prefill speed for prompts with `isl` uncached tokens. `points` has at least one point."""
    curve = sorted(points, key=lambda point: point.isl)
    lower, upper, share, covered = _bracket([point.isl for point in curve], isl)
    first, second = curve[lower], curve[upper]
    return PrefillSpeed(
        ttft_ms=_mix(first.ttft_ms, second.ttft_ms, share),
        tokens_per_s=_mix(first.tokens_per_s, second.tokens_per_s, share),
        covered=covered,
    )


def decode_itl_ms(points: Sequence[DecodePoint], context: float, concurrency: float) -> float:
    """Return the inter-token latency at a mean context length in tokens. `points` has at least one point."""

    def itl_ms(curve: DecodeCurve) -> float:
        return _at_concurrency(curve, concurrency).itl_ms

    return _over_contexts(points, context, itl_ms)[0]


def decode_capacity(
    points: Sequence[DecodePoint], context: float, itl_ms: float, concurrency_max: float | None
) -> DecodeCapacity:
    """Return the highest throughput within a target ITL, at a mean context length in tokens. `points` is not empty.

    `concurrency_max` is the number of requests for which the KV cache has room; None if unknown.
    """

    def tokens_per_s(curve: DecodeCurve) -> float:
        return _best_tokens_per_s(_with_room(curve, concurrency_max), itl_ms)

    capacity, covered = _over_contexts(points, context, tokens_per_s)
    lowest_itl_ms, _ = _over_contexts(points, context, lambda curve: curve[0].itl_ms)
    lowest, _ = _over_contexts(points, context, lambda curve: curve[0].concurrency)
    has_room = concurrency_max is None or concurrency_max >= lowest
    return DecodeCapacity(capacity, attainable=lowest_itl_ms <= itl_ms, covered=covered and has_room)


def _over_contexts(
    points: Sequence[DecodePoint], context: float, value: Callable[[DecodeCurve], float]
) -> tuple[float, bool]:
    """Return the value of the curves around a context length, and whether the profile covers this length."""
    contexts = sorted({point.context for point in points})
    lower, upper, share, covered = _bracket(contexts, context)

    def curve(index: int) -> DecodeCurve:
        return sorted((one for one in points if one.context == contexts[index]), key=lambda one: one.concurrency)

    return _mix(value(curve(lower)), value(curve(upper)), share), covered


def _best_tokens_per_s(curve: DecodeCurve, itl_ms: float) -> float:
    """Return the highest throughput on a curve where the latency is within the target, or that of the first point."""
    within = [point.tokens_per_s for point in curve if point.itl_ms <= itl_ms]
    for first, second in pairwise(curve):
        if (first.itl_ms <= itl_ms) != (second.itl_ms <= itl_ms):
            share = (itl_ms - first.itl_ms) / (second.itl_ms - first.itl_ms)
            within.append(_mix(first.tokens_per_s, second.tokens_per_s, share))
    return max(within, default=curve[0].tokens_per_s)


def _with_room(curve: DecodeCurve, concurrency_max: float | None) -> DecodeCurve:
    """Return the part of a curve for which the KV cache has room: at least one point."""
    if concurrency_max is None or concurrency_max >= curve[-1].concurrency:
        return curve
    last = _at_concurrency(curve, concurrency_max)
    return [*(point for point in curve if point.concurrency < last.concurrency), last]


def _at_concurrency(curve: DecodeCurve, concurrency: float) -> DecodePoint:
    lower, upper, share, _ = _bracket([point.concurrency for point in curve], concurrency)
    first, second = curve[lower], curve[upper]
    return DecodePoint(
        context=first.context,
        concurrency=_mix(first.concurrency, second.concurrency, share),
        itl_ms=_mix(first.itl_ms, second.itl_ms, share),
        tokens_per_s=_mix(first.tokens_per_s, second.tokens_per_s, share),
    )


def _bracket(keys: Sequence[float], key: float) -> tuple[int, int, float, bool]:
    """Return the positions of the sorted keys around a key, its share of the way between them, and if it is in range.

    Outside, both positions are that of the nearest key.
    """
    if key <= keys[0] or key >= keys[-1]:
        nearest = 0 if key <= keys[0] else len(keys) - 1
        return nearest, nearest, 0.0, key == keys[nearest]
    upper = bisect_right(keys, key)
    lower = upper - 1
    return lower, upper, (key - keys[lower]) / (keys[upper] - keys[lower]), True


def _mix(first: float, second: float, share: float) -> float:
    return first + (second - first) * share
