"""Measurements for the report: sorted latencies, SLO attainment per limit, and sums over bins."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from forebay.cli.common.page import COLOURS
from forebay.cli.simulate.simulations import SimulationRun
from forebay.simulate.outcome import SimulationOutcome
from forebay.simulate.slo import Slo

# Round limits, 35 per decade, so that common values such as 500 ms are among them.
MANTISSAS = (*range(100, 200, 10), *range(200, 500, 20), *range(500, 1_000, 50))
DECADE_MIN, DECADE_MAX = -3, 9  # powers of ten of the limits in ms: from 1 us to 11 days
US_PER_MS = 1e3
US_PER_S = 1e6


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurements of one run for the report.

    Attributes:
        group: identifier of the run within the page: `r0`, `r1` and so on.
        label: unique name of the run; includes the fleet if several runs have the same name.
        colour: name of a colour of the page's style sheet.
        ttft_ms: TTFT of completed requests, ascending.
        itl_ms: ITL of completed requests with at least two tokens, ascending.
        e2e_ms: E2E latency of completed requests, ascending.
        span_s: seconds from the first arrival to the last response.
    """

    run: SimulationRun
    group: str
    label: str
    colour: str
    ttft_ms: list[float]
    itl_ms: list[float]
    e2e_ms: list[float]
    requests: int
    failed: int
    span_s: float


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers from which the page computes how many requests meet any combination of a TTFT and an ITL limit.

    Attributes:
        ttft_ms: TTFT limits, ascending. Every completed request meets the last limit.
        itl_ms: ITL limits, ascending. Every completed request meets the last limit.
        kept: per run, the number of requests for each pair (i, j): the i-th TTFT limit and the j-th ITL limit are the
            lowest that the request meets.
    """

    ttft_ms: list[float]
    itl_ms: list[float]
    kept: list[dict[tuple[int, int], int]]


def measured(runs: Sequence[SimulationRun]) -> list[Measured]:
    labels = _labels(runs)
    return [
        _measured(run, f"r{at}", label, f"curve-{at % COLOURS}")
        for at, (run, label) in enumerate(zip(runs, labels, strict=True))
    ]


def times_of(outcome: SimulationOutcome) -> Iterable[tuple[int, float, float, float]]:
    """Yield index, TTFT, ITL and E2E latency of each completed request, in ms. ITL is 0 for one output token."""
    requests = outcome.requests
    columns = (requests.column(name) for name in ("arrived_us", "first_us", "last_us", "output_tokens"))
    failures = requests.failures
    for place, (arrived_us, first_us, last_us, tokens) in enumerate(zip(*columns, strict=True)):
        if place not in failures:
            itl_ms = (last_us - first_us) / US_PER_MS / (tokens - 1) if tokens > 1 else 0.0
            yield place, (first_us - arrived_us) / US_PER_MS, itl_ms, (last_us - arrived_us) / US_PER_MS


def limits(runs: Sequence[Measured], slo: Slo | None) -> Limits:
    """Count the completed requests per combination of a TTFT and an ITL limit.

    The limits include those of `slo`. Requests that miss the E2E limit of `slo` are not counted.
    """
    slo = slo or Slo()
    ttft_ms = _round_limits([one.ttft_ms for one in runs], slo.ttft_ms)
    itl_ms = _round_limits([one.itl_ms for one in runs], slo.itl_ms)
    kept = [
        dict(
            Counter(
                (bisect_left(ttft_ms, ttft), bisect_left(itl_ms, itl))
                for _, ttft, itl, e2e in times_of(one.run.outcome)
                if slo.e2e_ms is None or e2e <= slo.e2e_ms
            )
        )
        for one in runs
    ]
    return Limits(ttft_ms, itl_ms, kept)


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return the quantile at `share` of sorted values, interpolated between values. At least one value is required."""
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def shares(ordered: Sequence[float], limits_ms: Sequence[float], of: int, free: int) -> list[float]:
    """Return for each limit the share of requests that meet it.

    Args:
        free: number of requests without this latency, which therefore meet every limit.
    """
    found, at = [], 0
    for limit in limits_ms:
        while at < len(ordered) and ordered[at] <= limit:
            at += 1
        found.append(round((at + free) / of, 5) if of else 0.0)
    return found


def group_size(count: int, at_most: int) -> int:
    """Return how many consecutive values to merge so that at most `at_most` remain."""
    return max(1, -(-count // at_most))


def _measured(run: SimulationRun, group: str, label: str, colour: str) -> Measured:
    outcome = run.outcome
    times = list(times_of(outcome))
    tokens = outcome.requests.column("output_tokens")
    first_us = min(outcome.requests.column("arrived_us"), default=0)
    last_us = max(outcome.requests.column("last_us"), default=0)
    return Measured(
        run=run,
        group=group,
        label=label,
        colour=colour,
        ttft_ms=sorted(ttft for _, ttft, _, _ in times),
        itl_ms=sorted(itl for place, _, itl, _ in times if tokens[place] > 1),
        e2e_ms=sorted(e2e for _, _, _, e2e in times),
        requests=len(outcome.requests),
        failed=len(outcome.requests.failures),
        span_s=max(0, last_us - first_us) / US_PER_S,
    )


def _labels(runs: Sequence[SimulationRun]) -> list[str]:
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.name}, {run.settings.workers} workers" for run in runs]
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found


def _round_limits(values: Iterable[Sequence[float]], given_ms: float | None) -> list[float]:
    """Return round numbers as limits that span all values. `given_ms` is included if it is not None."""
    ends = [(some[0], some[-1]) for some in values if some]
    if not ends:
        return [1.0] if given_ms is None else [given_ms]
    low, high = min(one for one, _ in ends), max(one for _, one in ends)
    every = [float(f"{mantissa}e{decade - 2}") for decade in range(DECADE_MIN, DECADE_MAX) for mantissa in MANTISSAS]
    first = max(0, bisect_left(every, low) - 1)
    last = min(len(every) - 1, bisect_left(every, high))
    found = set(every[first : last + 1])
    if given_ms is not None:
        found.add(given_ms)
    return sorted(found)
