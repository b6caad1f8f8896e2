"""What a service promises, and how much of a run kept the promise."""

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from forebay.simulate.outcome import Outcome

PARTS = {"ttft": "ttft_ms", "itl": "itl_ms", "e2e": "e2e_ms"}
US_PER_MS = 1e3
US_PER_S = 1e6

Limit = Annotated[float, msgspec.Meta(gt=0)]


class SloUnusable(ValueError):
    """No service level objective; the text says why."""


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Service level objectives of one request, in milliseconds; None for what is not promised.

    Attributes:
        ttft_ms: from arrival to the first token.
        itl_ms: the mean time between tokens of the answer; an answer of one token has none, and keeps it.
        e2e_ms: from arrival to the last token.
    """

    ttft_ms: Limit | None = None
    itl_ms: Limit | None = None
    e2e_ms: Limit | None = None


def service_levels(text: str) -> Slo:
    """The objectives that `ttft=500,itl=20,e2e=9000` stands for, at least one of them. Raises SloUnusable."""
    limits: dict[str, float] = {}
    for one in text.split(","):
        name, _, value = one.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in PARTS or not 0 < limit < math.inf:
            raise SloUnusable(f"{one!r} is no {'=, '.join(PARTS)}= with milliseconds above 0, as in ttft=500,itl=20")
        if PARTS[name] in limits:
            raise SloUnusable(f"{name} is given twice")
        limits[PARTS[name]] = limit
    return Slo(**limits)


def goodput(outcome: Outcome, slo: Slo) -> dict[str, Any]:
    """How much of a run kept its promise; a request without an answer kept none.

    Returns:
        `attained`, the share of all requests that kept every objective; `attained_each`, the share that kept each;
        `goodput_per_s`, requests that kept them all, a second from the first arrival to the last answer (the goodput
        of Zhong et al., DistServe, OSDI 2024).
    """
    kept = {name: 0 for name in PARTS if getattr(slo, PARTS[name]) is not None}
    kept_all = 0
    for times in _times_us(outcome):
        every = True
        for name in kept:
            holds = times[name] <= getattr(slo, PARTS[name]) * US_PER_MS
            kept[name] += holds
            every &= holds
        kept_all += every
    requests = len(outcome.requests)
    lasted_us = _lasted_us(outcome)
    return {
        "attained": kept_all / requests if requests else 0.0,
        "attained_each": {name: count / requests if requests else 0.0 for name, count in kept.items()},
        "goodput_per_s": kept_all * US_PER_S / lasted_us if lasted_us else 0.0,
    }


def _times_us(outcome: Outcome) -> Iterator[dict[str, float]]:
    """Of each request that was answered."""
    requests = outcome.requests
    columns = (requests.column(name) for name in ("arrived_us", "first_us", "last_us", "output_tokens"))
    for place, (arrived_us, first_us, last_us, output_tokens) in enumerate(zip(*columns, strict=True)):
        if place not in requests.failures:
            yield {
                "ttft": first_us - arrived_us,
                "itl": (last_us - first_us) / (output_tokens - 1) if output_tokens > 1 else 0.0,
                "e2e": last_us - arrived_us,
            }


def _lasted_us(outcome: Outcome) -> int:
    """From the first arrival to the last answer."""
    return max(outcome.requests.column("last_us"), default=0) - min(outcome.requests.column("arrived_us"), default=0)


def requests_per_s(outcome: Outcome) -> float:
    """The rate at which requests arrived, from the first to the last; 0 where they came at one time."""
    arrived_us = outcome.requests.column("arrived_us")
    lasted_us = max(arrived_us, default=0) - min(arrived_us, default=0)
    return (len(arrived_us) - 1) * US_PER_S / lasted_us if lasted_us else 0.0
