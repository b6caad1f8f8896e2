"""Proposal of a size for one pool, as the methods return it, and the numbers from which it follows."""

from dataclasses import dataclass, field
from typing import Literal

from forebay.events.scaling import Reason

SIZE_MAX = 10_000  # the largest size that an event can carry


@dataclass(frozen=True, slots=True)
class PrefillNeed:
    """Workers that the forecast keeps busy with prefill.

    Attributes:
        isl: uncached prompt tokens per request.
        ttft_ms: TTFT of such a request alone according to the profile, in milliseconds.
        correction: observed TTFT divided by that of the profile, at most 1; 1 without the equations `corrected`.
        tokens_per_s: prompt tokens per second of the forecast, multiplied by `correction`.
        worker_tokens_per_s: prompt tokens per second of one worker according to the profile.
        attainable: whether a request alone meets the target.
    """

    isl: float
    ttft_ms: float
    correction: float
    tokens_per_s: float
    worker_tokens_per_s: float
    workers: float
    attainable: bool
    covered: bool


@dataclass(frozen=True, slots=True)
class DecodeNeed:
    """Workers that the forecast keeps busy with decode.

    Attributes:
        context: mean context length of a request while it generates, in tokens.
        concurrency_max: requests for which the KV cache of one worker has room; None if unknown.
        correction: ITL of the profile divided by the observed one; 1 without the equations `corrected`.
        itl_ms: target of the ITL in milliseconds, multiplied by `correction`.
        tokens_per_s: output tokens per second of the forecast.
        worker_tokens_per_s: output tokens per second of one worker within this target according to the profile.
        attainable: whether the lowest measured concurrency meets the target.
        covered: whether the profile covers the context length, and a concurrency that the KV cache allows.
    """

    context: float
    concurrency_max: float | None
    correction: float
    itl_ms: float
    tokens_per_s: float
    worker_tokens_per_s: float
    workers: float
    attainable: bool
    covered: bool


@dataclass(frozen=True, slots=True)
class LoadSignal:
    """What one latency says about the size of a pool.

    Attributes:
        intervals: observations in which at least one worker has this latency.
        known: whether these are enough. If not, the following attributes are the defaults.
        above: whether the estimates of all workers exceed the target.
        below: whether one worker less keeps the estimates below `shrink_below_ms`, and its KV fits.
        attainable: whether a request alone meets the target.
        target_ms: latency above which the pool grows, in milliseconds.
        shrink_below_ms: latency below which the pool shrinks, in milliseconds.
        base_ms: latency without load according to the regression, in milliseconds.
        slope_ms: milliseconds per token of load according to the regression.
        estimates_ms: estimate for each worker, in milliseconds.
        fewer_ms: estimate for each worker with one worker less, in milliseconds.
    """

    latency: Literal["ttft", "itl"]
    intervals: int
    known: bool
    above: bool = False
    below: bool = False
    attainable: bool = True
    target_ms: float = 0.0
    shrink_below_ms: float = 0.0
    base_ms: float = 0.0
    slope_ms: float = 0.0
    estimates_ms: tuple[float, ...] = ()
    fewer_ms: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SimulatedAttainment:
    """Pairs of a size and the simulated share of requests that meet both targets, and the share that must meet them."""

    target: float
    sizes: tuple[tuple[int, float], ...]


# These numbers explain a proposal, and nothing else reads them.
Basis = PrefillNeed | DecodeNeed | LoadSignal | SimulatedAttainment


@dataclass(frozen=True, slots=True)
class Proposal:
    """Size that a method proposes for a pool, before limits and guards.

    Attributes:
        size: number of workers, from 0 to `SIZE_MAX`.
        reason: what is noteworthy about it, for example `profile_exceeded` or `no_demand`; None for an ordinary one.
            With `no_observation`, `no_demand`, `no_profile` or `insufficient_data` the size is the present one.
        basis: numbers from which it follows. They are not part of the comparison of two proposals.
    """

    size: int
    reason: Reason | None = None
    basis: tuple[Basis, ...] = field(default=(), compare=False)
