"""Measurements for the report: latencies and metrics of each run, and SLO attainment per limit."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from forebay.analysis.runs import SimulationRun
from forebay.simulate.slo import Slo, goodput, latencies_us

# Round limits, 35 per decade, so that common values such as 500 ms are among them.
MANTISSAS = (*range(100, 200, 10), *range(200, 500, 20), *range(500, 1_000, 50))
DECADE_MIN, DECADE_MAX = -3, 9  # powers of ten of the limits in ms: from 1 us to 11 days
ROUND_MS = [float(f"{mantissa}e{decade - 2}") for decade in range(DECADE_MIN, DECADE_MAX) for mantissa in MANTISSAS]
US_PER_MS = 1e3
US_PER_S = 1e6
COLOURS = 8  # names curve-0, curve-1, ... in page.css; more curves repeat them


@dataclass(frozen=True, slots=True)
class Measured:
    run: SimulationRun
    group: str  # identifier of the run within the page: `r0`, `r1` and so on
    label: str  # unique name of the run; includes the fleet if several runs have the same name
    colour: str  # name of a colour of the page's style sheet
    metrics: dict[str, Any]  # metrics of the run as `--json` prints them, and those that only the report shows
    ttft_ms: list[float]  # TTFT of completed requests, ascending
    itl_ms: list[float]  # ITL of completed requests with at least two tokens, ascending
    requests: int
    failed: int
    span_s: float  # seconds from the first arrival to the last response


def measured(runs: Sequence[SimulationRun], slo: Slo | None) -> list[Measured]:
    names = [run.name for run in runs]
    if len(set(names)) < len(names):
        names = [f"{run.name}, {run.settings.workers} workers" for run in runs]
    seen: Counter[str] = Counter()
    found = []
    for at, (run, name) in enumerate(zip(runs, names, strict=True)):
        seen[name] += 1
        label = name if seen[name] == 1 else f"{name} ({seen[name]})"
        found.append(_measured(run, slo, f"r{at}", label, f"curve-{at % COLOURS}"))
    return found


def _measured(run: SimulationRun, slo: Slo | None, group: str, label: str, colour: str) -> Measured:
    outcome, requests = run.outcome, run.outcome.requests
    times = list(latencies_us(outcome))
    tokens = requests.column("output_tokens")
    begin_us = min(requests.column("arrived_us"), default=0)
    span_s = max(0, max(requests.column("last_us"), default=0) - begin_us) / US_PER_S
    metrics = {
        **run.summary,
        **(goodput(outcome, slo) if slo else {}),
        "gpu_hours": outcome.gpu_s / 3_600 or None,
        "tokens_per_s": run.summary["output_tokens"] / span_s if times and span_s else None,
        "load_max_over_mean": run.summary["load_max_over_mean"] or None,
        "prefix_reuse": run.summary["prefix_reuse"] if times else None,
    }
    return Measured(
        run=run,
        group=group,
        label=label,
        colour=colour,
        metrics=metrics,
        ttft_ms=sorted(ttft / US_PER_MS for _, ttft, _, _ in times),
        itl_ms=sorted(itl / US_PER_MS for place, _, itl, _ in times if tokens[place] > 1),
        requests=len(requests),
        failed=len(requests.failures),
        span_s=span_s,
    )


def limits(runs: Sequence[Measured], slo: Slo) -> dict[str, Any]:
    """Return the numbers from which the page computes how many requests meet a TTFT and an ITL limit.

    `ttft` and `itl`: limits in ms, ascending, including those of `slo`; every completed request meets the last one.
    `kept`: per run, [i, j, requests] for each pair of the lowest limits that a request meets, without requests that
    miss the E2E limit. `ttft_at` and `itl_at`: index of the limit to begin with.
    """
    ttft_ms = _limits_ms([one.ttft_ms for one in runs], slo.ttft_ms)
    itl_ms = _limits_ms([one.itl_ms for one in runs], slo.itl_ms)
    e2e_us = None if slo.e2e_ms is None else slo.e2e_ms * US_PER_MS
    kept = []
    for one in runs:
        pairs = Counter(
            (bisect_left(ttft_ms, ttft / US_PER_MS), bisect_left(itl_ms, itl / US_PER_MS))
            for _, ttft, itl, e2e in latencies_us(one.run.outcome)
            if e2e_us is None or e2e <= e2e_us
        )
        kept.append([[*pair, count] for pair, count in sorted(pairs.items())])
    return {
        "ttft": ttft_ms,
        "itl": itl_ms,
        "kept": kept,
        "ttft_at": _begin_at(ttft_ms, slo.ttft_ms, [one.metrics["ttft_ms"] for one in runs]),
        "itl_at": _begin_at(itl_ms, slo.itl_ms, [one.metrics["itl_ms"] for one in runs]),
        "requests": [one.requests for one in runs],
        "span_s": [one.span_s for one in runs],
    }


def _limits_ms(values: Sequence[Sequence[float]], given_ms: float | None) -> list[float]:
    """Return round numbers that span all sorted values, and the given limit."""
    found = set() if given_ms is None else {given_ms}
    if known := [some for some in values if some]:
        first = max(0, bisect_left(ROUND_MS, min(some[0] for some in known)) - 1)
        found.update(ROUND_MS[first : bisect_left(ROUND_MS, max(some[-1] for some in known)) + 1])
    return sorted(found or {1.0})


def _begin_at(limits_ms: Sequence[float], given_ms: float | None, percentiles: Sequence[dict[str, float]]) -> int:
    """Return the index of the given limit, or of one that 90 % of the requests of the best run meet."""
    wanted_ms = given_ms or min((one["p90"] for one in percentiles if one), default=0.0)
    return min(bisect_left(limits_ms, wanted_ms), len(limits_ms) - 1)


def group_size(count: int, at_most: int) -> int:
    """Return how many consecutive values to merge so that at most `at_most` remain."""
    return max(1, -(-count // at_most))
