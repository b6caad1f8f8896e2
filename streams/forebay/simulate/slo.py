"""Service level objectives (SLOs), and the share of a run's requests that met them."""

import math
from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from forebay.events.names import unknown_name
from forebay.runtime.errors import ConfigError
from forebay.simulate.outcome import SimulationOutcome

PARTS = {"ttft": "ttft_ms", "itl": "itl_ms", "e2e": "e2e_ms"}
US_PER_MS = 1e3
US_PER_S = 1e6

Limit = Annotated[float, msgspec.Meta(gt=0)]


class Slo(msgspec.Struct, frozen=True, kw_only=True):
    """Limits for the latencies of each request, in milliseconds. None means no limit."""

    ttft_ms: Limit | None = None  # limit for the time from arrival to the first token
    # Limit for the mean time between output tokens. A response of one token always meets it.
    itl_ms: Limit | None = None
    e2e_ms: Limit | None = None  # limit for the time from arrival to the last token


def parse_slo(text: str) -> Slo:
    """Parse the limits of an SLO, such as `ttft=500,itl=20,e2e=9000`. At least one limit is required.

    Raises ConfigError if a limit is unknown, duplicate or not a positive number.
    """
    limits: dict[str, float] = {}
    for one in text.split(","):
        name, equals, value = one.partition("=")
        if equals and name not in PARTS:
            raise ConfigError(unknown_name("objective", name, PARTS))
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if not equals or not 0 < limit < math.inf:
            expected = " or ".join(f"{part}=MS" for part in PARTS)
            raise ConfigError(f"invalid objective {one!r}; expected {expected} with MS above 0, as in ttft=500,itl=20")
        if PARTS[name] in limits:
            raise ConfigError(f"duplicate objective {name}")
        limits[PARTS[name]] = limit
    return Slo(**limits)


def goodput(outcome: SimulationOutcome, slo: Slo) -> dict[str, Any]:
    """Return the SLO attainment and the goodput of a run, by key. A failed request meets no limit.

    `attained` is the share of requests that met every limit. `attained_each` is the share that met each single limit.
    `goodput_per_s` is the number of requests that met every limit, divided by the seconds from the first arrival to the
    last response. Goodput is defined as by Zhong et al., DistServe, OSDI 2024.
    """
    limits = _limits_us(slo)
    kept = dict.fromkeys(limits, 0)
    kept_all = 0
    for _, *times in latencies_us(outcome):
        holds = {name: time_us <= limits[name] for name, time_us in zip(PARTS, times, strict=True) if name in limits}
        kept_all += all(holds.values())
        for name, is_met in holds.items():
            kept[name] += is_met
    arrived_us, last_us = (outcome.requests.column(name) for name in ("arrived_us", "last_us"))
    requests, lasted_us = len(arrived_us), max(last_us, default=0) - min(arrived_us, default=0)
    return {
        "attained": kept_all / requests if requests else 0.0,
        "attained_each": {name: count / requests if requests else 0.0 for name, count in kept.items()},
        "goodput_per_s": kept_all * US_PER_S / lasted_us if lasted_us else 0.0,
    }


def meets(outcome: SimulationOutcome, slo: Slo) -> list[bool]:
    """Return for each request, in the order of arrival, whether it met every limit."""
    limits = _limits_us(slo)
    found = [False] * len(outcome.requests)
    for place, *times in latencies_us(outcome):
        found[place] = all(time_us <= limits.get(name, math.inf) for name, time_us in zip(PARTS, times, strict=True))
    return found


def latencies_us(outcome: SimulationOutcome) -> Iterator[tuple[int, float, float, float]]:
    """Yield index, TTFT, ITL and E2E latency of each completed request. The ITL of a response of one token is 0."""
    requests = outcome.requests
    columns = (requests.column(name) for name in ("arrived_us", "first_us", "last_us", "output_tokens"))
    for place, (arrived_us, first_us, last_us, tokens) in enumerate(zip(*columns, strict=True)):
        if place not in requests.failures:
            itl_us = (last_us - first_us) / (tokens - 1) if tokens > 1 else 0.0
            yield place, first_us - arrived_us, itl_us, last_us - arrived_us


def _limits_us(slo: Slo) -> dict[str, float]:
    limits_ms = {name: getattr(slo, field) for name, field in PARTS.items()}
    return {name: limit_ms * US_PER_MS for name, limit_ms in limits_ms.items() if limit_ms is not None}


def requests_per_s(outcome: SimulationOutcome) -> float:
    """Return the mean arrival rate from the first to the last arrival; 0 if all arrived at one time."""
    arrived_us = outcome.requests.column("arrived_us")
    lasted_us = max(arrived_us, default=0) - min(arrived_us, default=0)
    return (len(arrived_us) - 1) * US_PER_S / lasted_us if lasted_us else 0.0
