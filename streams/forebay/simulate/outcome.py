"""What came of a simulated workload, and its figures."""

import statistics
from dataclasses import dataclass, field
from typing import Any

FAILURES_SHOWN = 20  # a trace that fits nowhere fails in thousands of rows for the same reason


@dataclass(slots=True)
class Served:
    """One request of the workload; times in virtual microseconds.

    Attributes:
        worker: the number of the worker that it was routed to; None before, and for those refused.
        cached_tokens: prompt tokens that the worker found in its cache.
        failure: why it has no answer; empty for one that has.
    """

    arrived_us: int
    prompt_tokens: int
    output_tokens: int
    worker: int | None = None
    cached_tokens: int = 0
    first_us: int = 0
    last_us: int = 0
    failure: str = ""


@dataclass(slots=True)
class Outcome:
    """A whole run: every request in the order of arrival, and a digest of all decisions, in hexadecimal."""

    requests: list[Served] = field(default_factory=list)
    digest: str = ""


def summary(outcome: Outcome, workers: int) -> dict[str, Any]:
    """The figures of a run, as JSON prints them. Names are those of `forebay trace`."""
    answered = [one for one in outcome.requests if not one.failure]
    failed = [(number, one.failure) for number, one in enumerate(outcome.requests, 1) if one.failure]
    prompt_tokens = sum(one.prompt_tokens for one in answered)
    cached_tokens = sum(one.cached_tokens for one in answered)
    computed = [0] * workers
    requests = [0] * workers
    for one in answered:
        assert one.worker is not None, "who has an answer has it from a worker"
        computed[one.worker] += one.prompt_tokens - one.cached_tokens
        requests[one.worker] += 1
    long = [one for one in answered if one.output_tokens > 1]
    return {
        "requests": len(answered),
        "failed": len(failed),
        "failures": [{"request": number, "reason": reason} for number, reason in failed[:FAILURES_SHOWN]],
        "prefix_reuse": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "load_max_over_mean": max(computed) * workers / sum(computed) if sum(computed) else 0.0,
        "prompt_tokens": prompt_tokens,
        "output_tokens": sum(one.output_tokens for one in answered),
        "ttft_ms": percentiles([(one.first_us - one.arrived_us) / 1e3 for one in answered]),
        "itl_ms": percentiles([(one.last_us - one.first_us) / 1e3 / (one.output_tokens - 1) for one in long]),
        "e2e_ms": percentiles([(one.last_us - one.arrived_us) / 1e3 for one in answered]),
        "workers": [
            {"requests": count, "computed_tokens": tokens} for count, tokens in zip(requests, computed, strict=True)
        ],
        "digest": outcome.digest,
    }


def percentiles(values: list[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99, interpolated between ranks; empty for no values."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    return {"mean": statistics.fmean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
