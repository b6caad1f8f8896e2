"""Statistics of a workload: arrivals, lengths and prefix reuse."""

from array import array
from collections.abc import Iterable
from itertools import takewhile
from typing import Any

import msgspec

from forebay.simulate.outcome import percentiles
from forebay.simulate.workload import Turn
from forebay.simulate.workloads.source import LATEST_US, US_PER_S

FOUND_IDS_MAX = 1 << 24  # maximum number of distinct block ids to remember, about 100 bytes each


class Reuse(msgspec.Struct, frozen=True, kw_only=True):
    """Prefix reuse in one unbounded cache, if requests run one after another in order. No policy can reach more."""

    tokens: float  # share of the prompt tokens that are found in the cache
    distinct_blocks: int
    # Whether all block ids were remembered. False if there were more than `FOUND_IDS_MAX`, so the reuse is
    # underestimated.
    whole: bool


class WorkloadStatistics(msgspec.Struct, frozen=True, kw_only=True):
    """Statistics of a workload: arrivals, lengths and prefix reuse.

    Distributions are dicts of mean, p50, p90, p99 and max.
    """

    requests: int
    own_times: int  # number of requests with a fixed arrival time. The other requests wait for responses.
    duration_s: float  # seconds from the first to the last arrival, computed as if every response were instant
    rate_per_s: float  # mean arrivals per second
    prompt_tokens: dict[str, float]
    output_tokens: dict[str, float]  # distribution of response lengths
    # Distribution of the delays between a response and a request that waits for it, in seconds.
    delay_s: dict[str, float]
    ideal_reuse: Reuse  # upper bound of prefix reuse


def workload_statistics(turns: Iterable[Turn], block_tokens: int) -> WorkloadStatistics:
    """Return the statistics of a workload. Errors of its iterator propagate."""
    earliest_us, delays_us = array("q"), array("q")
    prompts, outputs = array("q"), array("q")
    seen: set[int] = set()
    found_tokens = 0
    for turn in turns:
        before_us = max((earliest_us[one] for one in turn.after), default=0)
        earliest_us.append(min(max(turn.at_us, before_us + turn.delay_us), LATEST_US))
        if turn.after:
            delays_us.append(turn.delay_us)
        prompts.append(turn.prompt_tokens)
        outputs.append(turn.output_tokens)
        blocks = -(-turn.prompt_tokens // block_tokens)
        found = sum(1 for _ in takewhile(seen.__contains__, turn.block_ids[:blocks]))
        found_tokens += min(found * block_tokens, turn.prompt_tokens)
        if len(seen) < FOUND_IDS_MAX:
            seen.update(turn.block_ids)
    first_us, last_us = min(earliest_us), max(earliest_us)
    return WorkloadStatistics(
        requests=len(prompts),
        own_times=len(prompts) - len(delays_us),
        duration_s=(last_us - first_us) / US_PER_S,
        rate_per_s=len(prompts) / ((last_us - first_us) / US_PER_S) if last_us > first_us else 0.0,
        prompt_tokens=_spread(prompts),
        output_tokens=_spread(outputs),
        delay_s=_spread(delays_us, US_PER_S),
        ideal_reuse=Reuse(
            tokens=found_tokens / sum(prompts),
            distinct_blocks=len(seen),
            whole=len(seen) < FOUND_IDS_MAX,
        ),
    )


def _spread(values: "array[int]", unit: int = 1) -> dict[str, Any]:
    if not values:
        return {}
    ordered = [one / unit for one in values]
    return {**percentiles(ordered), "max": max(ordered)}
