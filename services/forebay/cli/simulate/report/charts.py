"""Charts of the report. Each run has one colour on all charts."""

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from forebay.cli.common.page import Axis, Chart, Curve, Heat, Mark, Panel, Part, Unit
from forebay.cli.simulate.report.measures import US_PER_S, Limits, Measured, group_size, quantile, shares
from forebay.cli.simulate.report.words import duration
from forebay.simulate.outcome import SimulationOutcome, UtilizationTimeline, worker_names

BINS, BINS_PER_DECADE = 70, (25, 250)  # bins over all distributions of a chart; minimum and maximum per decade
SAME_COST = 1.02  # equal fleets differ slightly in cost, because their runs end at different times
RATE_POINTS, DEPTH_POINTS = 60, 240  # maximum number of points of a panel
ROWS, COLUMNS = 64, 120  # of a heat map
HEAT_ROW_PX, HEAT_PX_MIN, HEAT_PX_MAX = 18, 70, 340
PANEL_PX = 130
KINDS = {
    "computed": "prompt tokens computed per second",
    "running": "running requests",
    "waiting": "requests waiting in the engine",
    "blocks_used": "KV blocks in use",
}

TEMPLATE = "simulate/report/report.html"

Series = Callable[[Measured], Sequence[float | None]]


def charts(runs: Sequence[Measured], limits: Limits, heats: Sequence["LoadMap"], slo: str) -> Iterator[Chart | Part]:
    """Yield the charts of the report, with their controls, except those without data.

    Args:
        slo: the given SLO as text; empty if there is none.
    """
    answered = [one for one in runs if one.ttft_ms]
    if answered:
        yield from _distributions(answered)
        yield Part(kind=TEMPLATE, title="limits", text=slo, values=runs)
        yield from _attainment(runs, limits)
    yield from _over_time(runs)
    yield from _loads(runs, heats)
    yield from _costs(answered)


def _curve(one: Measured, x: Sequence[float], y: Sequence[float | None], **more: Any) -> Curve:
    return Curve(x=x, y=y, name=one.label, colour=one.colour, group=one.group, **more)


def _distributions(runs: Sequence[Measured]) -> Iterator[Chart]:
    text = "Share of the completed requests by TTFT, on a logarithmic scale."
    itl = "Mean time between the tokens of a response, per request. Responses of one token have none."
    times = [("ttft", "Time to first token", text, [one.ttft_ms for one in runs])]
    if any(one.itl_ms for one in runs):
        times.append(("itl", "Inter-token latency", itl, [one.itl_ms for one in runs]))
    for name, title, caption, values in times:
        curves = [_curve(one, *line, style="area") for one, line in zip(runs, _densities(values), strict=True)]
        yield Chart(
            id=name,
            title=title,
            text=caption,
            panels=[Panel(curves=curves, y=Axis(unit="share"))],
            x=Axis(unit="ms", log=True),
            paired=len(times) > 1,
        )


def _densities(values: Sequence[Sequence[float]]) -> list[tuple[list[float], list[float | None]]]:
    """Return times, and the share of the values in the bin around each, for sorted values of each run."""
    known = [some for some in values if some and some[-1] > 0]
    if not known:
        return [([1.0], [0.0]) for _ in values]
    least = min(some[bisect_left(some, 1e-3)] for some in known if some[-1] >= 1e-3)
    most = max(some[-1] for some in known)
    fewest, finest = BINS_PER_DECADE
    per_decade = min(max(fewest, round(BINS / max(math.log10(most / least), 1e-3))), finest)
    first, last = math.floor(math.log10(least) * per_decade) - 1, math.ceil(math.log10(most) * per_decade) + 1
    edges = [10 ** (at / per_decade) for at in range(first, last + 1)]
    centres = [round(10 ** ((at + 0.5) / per_decade), 6) for at in range(first, last)]
    found: list[tuple[list[float], list[float | None]]] = []
    for some in values:
        ranks = [bisect_left(some, edge) for edge in edges]
        counts = pairwise(ranks)
        found.append((centres, [round((after - before) / max(1, len(some)), 5) for before, after in counts]))
    return found


def _attainment(runs: Sequence[Measured], limits: Limits) -> Iterator[Chart]:
    kinds = (
        ("ttft-slo", "Attainment by TTFT limit", limits.ttft_ms, [one.ttft_ms for one in runs]),
        ("itl-slo", "Attainment by ITL limit", limits.itl_ms, [one.itl_ms for one in runs]),
    )
    for name, title, limits_ms, values in kinds:
        curves = []
        for one, some in zip(runs, values, strict=True):
            # Responses of one token have no ITL, so they meet every ITL limit.
            free = one.requests - one.failed - len(some)
            curves.append(_curve(one, limits_ms, shares(some, limits_ms, one.requests, free)))
        yield Chart(
            id=name,
            title=title,
            text="Share of all requests within the limit. Failed requests miss every limit.",
            panels=[Panel(curves=curves, y=Axis(unit="share", end=1.02))],
            x=Axis(unit="ms", log=True),
            marks=[Mark(at=limits_ms[len(limits_ms) // 2])],
            paired=True,
        )


def _costs(runs: Sequence[Measured]) -> Iterator[Part]:
    spent = [one.run.outcome.gpu_s for one in runs]
    if not spent or max(spent) <= min(spent) * SAME_COST:
        return
    points = ("p50", 0.5), ("p90", 0.9), ("p99", 0.99)
    rows = [
        [one.label, f"{one.run.outcome.gpu_s / 3_600:,.3g}", *(duration(quantile(one.ttft_ms, of)) for _, of in points)]
        for one in sorted(runs, key=lambda one: one.run.outcome.gpu_s)
    ]
    yield Part(
        kind="table",
        title="Cost and latency",
        text="GPU hours of all workers, and TTFT.",
        head=["run", "GPU hours", *(name for name, _ in points)],
        rows=rows,
    )


def _over_time(runs: Sequence[Measured]) -> Iterator[Chart]:
    """Yield a chart of panels with a common time axis. Panels without data are left out."""
    timed = [one for one in runs if one.run.outcome.timeline.arrived]
    if not timed:
        return
    divisor, unit = time_unit(_end_s(timed))
    panels = []
    for title, of_values, series, shown in _panels(timed):
        curves = []
        for one in shown:
            values = series(one)
            timeline = one.run.outcome.timeline
            width = timeline.bin_us * group_size(len(timeline.arrived), len(values))
            x = [round(at * width / US_PER_S / divisor, 4) for at in range(len(values))]
            if len(shown) < len(timed):  # equal under all runs
                curves.append(Curve(x=x, y=values, name="all", style="step"))
            else:
                curves.append(_curve(one, x, values, style="step"))
        panels.append(Panel(title=title, curves=curves, y=Axis(unit=of_values), height=PANEL_PX))
    width_s = max(one.run.outcome.timeline.bin_us for one in timed) / US_PER_S
    yield Chart(
        id="time",
        title="Over time",
        text=f"Queues and running requests are sampled every {width_s:,.3g} s. Drag over a panel to zoom all panels; "
        "double-click to reset.",
        panels=panels,
        x=Axis(title=f"time of the run, {unit}", end=_end_s(timed) / divisor),
    )


def _panels(runs: Sequence[Measured]) -> Iterator[tuple[str, Unit, Series, Sequence[Measured]]]:
    """Yield title, unit, series and runs of each panel."""

    def timeline(one: Measured) -> UtilizationTimeline:
        return one.run.outcome.timeline

    def summed(values: Sequence[int], points: int) -> list[int]:
        size = group_size(len(values), points)
        return [sum(values[at : at + size]) for at in range(0, len(values), size)]

    def most(values: Sequence[int]) -> list[int]:
        size = group_size(len(values), DEPTH_POINTS)
        return [max(values[at : at + size]) for at in range(0, len(values), size)]

    def arrivals(one: Measured) -> list[float]:
        wide_s = timeline(one).bin_us * group_size(len(timeline(one).arrived), RATE_POINTS) / US_PER_S
        return [round(count / wide_s, 4) for count in summed(timeline(one).arrived, RATE_POINTS)]

    def reuse(one: Measured) -> list[float | None]:
        parts = zip(
            summed(timeline(one).cached_tokens, RATE_POINTS),
            summed(timeline(one).prompt_tokens, RATE_POINTS),
            strict=True,
        )
        return [round(cached / whole, 4) if whole else None for cached, whole in parts]

    def of_workers(name: str) -> Series:
        return lambda one: most([sum(some) for some in zip(*getattr(timeline(one), name), strict=True)])

    def trouble(one: Measured) -> list[int]:
        bins = [0] * len(timeline(one).arrived)
        arrived_us = one.run.outcome.requests.column("arrived_us")
        for place in _trouble(one):
            bins[min(arrived_us[place] // timeline(one).bin_us, len(bins) - 1)] += 1
        return summed(bins, DEPTH_POINTS)

    def of_planner(value: Callable[[dict[str, Any]], float | None]) -> Series:
        return lambda one: _of_intervals(one, value)

    same = (
        len({timeline(one).bin_us for one in runs}) == 1 and len({_trimmed(timeline(one).arrived) for one in runs}) == 1
    )
    yield "arrivals per second", "number", arrivals, runs[:1] if same else runs
    yield "prompt tokens found in the cache", "share", reuse, runs
    if any(any(timeline(one).queued) for one in runs):
        yield "requests queued in the router", "number", lambda one: most(timeline(one).queued), runs
    yield "requests waiting in engines", "number", of_workers("waiting"), runs
    yield "running requests", "number", of_workers("running"), runs
    if any(_trouble(one) for one in runs):
        yield "failed or retried requests, by arrival", "number", trouble, runs
    if any(len(set(timeline(one).workers)) > 1 for one in runs):
        yield "workers in the fleet", "number", lambda one: most(timeline(one).workers), runs
    planned = [one for one in runs if "planner" in one.run.summary]
    if planned:
        decided = of_planner(lambda interval: sum(pool["workers"] for pool in interval["pools"].values()))
        yield "workers by the planner's decisions", "number", decided, planned
        yield "SLO attainment, by arrival", "share", of_planner(lambda interval: interval["attained"]), planned


def _of_intervals(one: Measured, value: Callable[[dict[str, Any]], float | None]) -> list[float | None]:
    """Return a value of the planner's intervals at the centre of each group of bins; None outside of all intervals."""
    timeline, intervals = one.run.outcome.timeline, one.run.summary["planner"]["intervals"]
    ends_s = [interval["end_s"] for interval in intervals]
    size = group_size(len(timeline.arrived), DEPTH_POINTS)
    found: list[float | None] = []
    for at in range(0, len(timeline.arrived), size):
        place = bisect_left(ends_s, (at + size / 2) * timeline.bin_us / US_PER_S)
        found.append(value(intervals[place]) if place < len(intervals) else None)
    return found


def _trouble(one: Measured) -> set[int]:
    requests = one.run.outcome.requests
    return {*requests.failures, *(place for place, times in enumerate(requests.column("attempts")) if times > 1)}


def _trimmed(counts: Sequence[int]) -> tuple[int, ...]:
    """Return the counts without trailing zeros, because runs with equal arrivals end at different times."""
    last = max((at for at, count in enumerate(counts) if count), default=-1)
    return tuple(counts[: last + 1])


@dataclass(frozen=True, slots=True)
class LoadMap:
    """Load per worker and time of one run. If there are too many workers or bins, neighbours are averaged.

    Attributes:
        rows: label of each row, with the names of its workers.
        bin_s: seconds per column.
        values: for each kind of load, a list of values per row, with one value per column.
    """

    rows: list[str]
    bin_s: float
    values: dict[str, list[list[float]]]

    @classmethod
    def of(cls, outcome: SimulationOutcome) -> "LoadMap":
        """Return the map of a run. It has no rows if the run has no timeline."""
        timeline = outcome.timeline
        workers, times = len(timeline.computed), len(timeline.arrived)
        down, across = group_size(workers, ROWS), group_size(times, COLUMNS)
        names = worker_names(outcome) or [str(number) for number in range(workers)]
        groups = [names[at : at + down] for at in range(0, workers, down)] if times else []
        values = {kind: _averaged(getattr(timeline, kind), down, across) for kind in KINDS}
        for line in values["computed"]:
            line[:] = [round(value / (timeline.bin_us / US_PER_S)) for value in line]
        rows = [some[0] if len(some) == 1 else f"{some[0]} … {some[-1]}" for some in groups]
        return cls(rows, timeline.bin_us * across / US_PER_S, values)


def _averaged(lines: Sequence[Sequence[int]], down: int, across: int) -> list[list[float]]:
    found = []
    for at in range(0, len(lines), down):
        some = lines[at : at + down]
        sums = [sum(values) for values in zip(*some, strict=True)]
        chunks = (sums[start : start + across] for start in range(0, len(sums), across))
        found.append([round(sum(chunk) / (len(chunk) * len(some)), 1) for chunk in chunks])
    return found


def _loads(runs: Sequence[Measured], heats: Sequence[LoadMap]) -> Iterator[Chart | Part]:
    """Yield a heat map of workers over time for each run, on one colour scale."""
    shown = [(one, heat) for one, heat in zip(runs, heats, strict=True) if heat.rows]
    if not shown:
        return
    divisor, unit = time_unit(_end_s(runs))
    most = max(max(map(max, heat.values["computed"])) for _, heat in shown)
    panels = []
    for one, heat in shown:
        values = Heat(rows=heat.rows, width=heat.bin_s / divisor, values=heat.values["computed"], max=most)
        height = min(max(HEAT_ROW_PX * len(heat.rows), HEAT_PX_MIN), HEAT_PX_MAX)
        panels.append(Panel(title=one.label, colour=one.colour, heat=values, height=height))
    yield Chart(
        id="load",
        title="Load of each worker over time",
        text="One row per worker. Even colours mean an even load; a dark row among light ones is an overloaded worker.",
        panels=panels,
        x=Axis(title=f"time of the run, {unit}", end=_end_s(runs) / divisor),
    )
    yield Part(kind=TEMPLATE, title="load", values=KINDS)


def time_unit(span_s: float) -> tuple[float, str]:
    """Return the time unit for the axis of a run of `span_s` seconds: seconds per unit, and the name of the unit."""
    if span_s <= 600:
        return 1.0, "s"
    return (60.0, "min") if span_s <= 4 * 3_600 else (3_600.0, "h")


def _end_s(runs: Sequence[Measured]) -> float:
    timelines = [one.run.outcome.timeline for one in runs]
    return max((one.bin_us * len(one.arrived) / US_PER_S for one in timelines), default=0.0)
