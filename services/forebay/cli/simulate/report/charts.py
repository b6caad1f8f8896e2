"""Charts of the report. Each run has one colour on all charts."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import msgspec

from forebay.cli.simulate.report.measures import US_PER_S, Measured, group_size
from forebay.simulate.outcome import worker_names

# --- data of the charts, which `page.js` draws with uPlot -------------------------------------------------------------

Unit = Literal["number", "ms", "share"]  # a share is shown in percent


class Axis(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An axis of a chart. An `end` of None is the largest value."""

    title: str = ""
    unit: Unit = "number"
    log: bool = False
    end: float | None = None


class Curve(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Values of one series of a panel.

    Attributes:
        x: ascending.
        y: None where the curve is interrupted.
        group: identifier by which the page shows and hides curves together.
    """

    x: Sequence[float]
    y: Sequence[float | None]
    name: str
    colour: str
    group: str
    is_step: bool = False


class Heat(msgspec.Struct, kw_only=True):
    """Values of a heat map, per row and column, instead of curves."""

    rows: list[str]
    width: float  # of a column on the x axis
    values: list[list[float]]
    max: float


class Panel(msgspec.Struct, kw_only=True, omit_defaults=True):
    curves: list[Curve] = []
    y: Axis = Axis()
    title: str = ""
    colour: str = ""
    heat: Heat | None = None
    height: int = 280


class Chart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Panels with a common x axis, and an x value that a vertical line marks in all of them."""

    id: str
    title: str
    text: str
    panels: list[Panel]
    x: Axis
    mark: float | None = None


POINTS = 120  # maximum number of points of a panel
ROWS, COLUMNS = 64, 120  # of a heat map
HEAT_ROW_PX, HEAT_PX_MIN, HEAT_PX_MAX = 18, 70, 340
PANEL_PX = 130


def attainment(runs: Sequence[Measured], limits: dict[str, Any]) -> Iterator[Chart]:
    """Yield the share of requests within each TTFT and each ITL limit, which is also the distribution of the times."""
    for name, values in (("ttft", [one.ttft_ms for one in runs]), ("itl", [one.itl_ms for one in runs])):
        curves = []
        for one, some in zip(runs, values, strict=True):
            # Responses of one token have no ITL, so they meet every ITL limit.
            free = one.requests - one.failed - len(some)
            y = [round((bisect_right(some, limit_ms) + free) / max(1, one.requests), 5) for limit_ms in limits[name]]
            curves.append(_curve(one, limits[name], y))
        yield Chart(
            id=name,
            title=f"Requests by {name.upper()}",
            text=f"Share of all requests with at most this {name.upper()}. Failed requests miss every limit.",
            panels=[Panel(curves=curves, y=Axis(unit="share", end=1.02))],
            x=Axis(unit="ms", log=True),
            mark=limits[name][limits[f"{name}_at"]],
        )


def _curve(one: Measured, x: Sequence[float], y: Sequence[float | None], **more: Any) -> Curve:
    return Curve(x=x, y=y, name=one.label, colour=one.colour, group=one.group, **more)


def over_time(runs: Sequence[Measured]) -> Iterator[Chart]:
    """Yield a chart of panels with a common time axis. Panels without a value above 0 are left out."""
    timed = [one for one in runs if one.run.outcome.timeline.arrived]
    if not timed:
        return
    divisor, unit = _time_unit(_end_s(timed))
    panels: dict[str, Panel] = {}
    for one in timed:
        timeline = one.run.outcome.timeline
        width_s = timeline.bin_us * group_size(len(timeline.arrived), POINTS) / US_PER_S
        for title, of_values, values in _series(one):
            panel = panels.setdefault(title, Panel(title=title, curves=[], y=Axis(unit=of_values), height=PANEL_PX))
            x = [round(at * width_s / divisor, 4) for at in range(len(values))]
            panel.curves.append(_curve(one, x, values, is_step=True))
    sampled_s = max(one.run.outcome.timeline.bin_us for one in timed) / US_PER_S
    yield Chart(
        id="time",
        title="Over time",
        text=f"Queues and running requests are sampled every {sampled_s:,.3g} s. Drag over a panel to zoom all panels; "
        "double-click to reset.",
        panels=[panel for panel in panels.values() if any(any(curve.y) for curve in panel.curves)],
        x=Axis(title=f"time of the run, {unit}", end=_end_s(timed) / divisor),
    )


def _series(one: Measured) -> Iterator[tuple[str, Unit, Sequence[float | None]]]:
    """Yield title, unit and values of each panel."""
    timeline, requests = one.run.outcome.timeline, one.run.outcome.requests
    size = group_size(len(timeline.arrived), POINTS)

    def grouped(values: Sequence[int], merge: Callable[[Sequence[int]], int]) -> list[int]:
        return [merge(values[at : at + size]) for at in range(0, len(values), size)]

    def of_workers(lines: Sequence[Sequence[int]]) -> list[int]:
        return grouped([sum(some) for some in zip(*lines, strict=True)], max)

    troubled = [0] * len(timeline.arrived)
    for place, (arrived_us, attempts) in enumerate(
        zip(requests.column("arrived_us"), requests.column("attempts"), strict=True)
    ):
        if attempts > 1 or place in requests.failures:
            troubled[min(arrived_us // timeline.bin_us, len(troubled) - 1)] += 1
    width_s = size * timeline.bin_us / US_PER_S
    tokens = zip(grouped(timeline.cached_tokens, sum), grouped(timeline.prompt_tokens, sum), strict=True)
    yield "arrivals per second", "number", [round(count / width_s, 4) for count in grouped(timeline.arrived, sum)]
    yield "prompt tokens found in the cache", "share", [round(part / of, 4) if of else None for part, of in tokens]
    yield "requests queued in the router", "number", grouped(timeline.queued, max)
    yield "requests waiting in engines", "number", of_workers(timeline.waiting)
    yield "running requests", "number", of_workers(timeline.running)
    yield "failed or retried requests, by arrival", "number", grouped(troubled, sum)
    yield "workers in the fleet", "number", grouped(timeline.workers, max)
    if planner := one.run.summary.get("planner"):
        intervals = planner["intervals"]
        ends_s = [interval["end_s"] for interval in intervals]
        places = [bisect_left(ends_s, (at + 0.5) * width_s) for at in range(-(-len(timeline.arrived) // size))]
        shown = [intervals[place] if place < len(intervals) else None for place in places]  # None after the last one
        sizes = [one and sum(pool["workers"] for pool in one["pools"].values()) for one in shown]
        yield "workers by the planner's decisions", "number", sizes
        yield "SLO attainment, by arrival", "share", [one and one["attained"] for one in shown]


def loads(runs: Sequence[Measured]) -> Iterator[Chart]:
    """Yield a heat map of workers over time for each run, on one colour scale."""
    timed = [one for one in runs if one.run.outcome.timeline.arrived and one.run.outcome.timeline.computed]
    if not timed:
        return
    divisor, unit = _time_unit(_end_s(runs))
    panels = []
    for one in timed:
        outcome, timeline = one.run.outcome, one.run.outcome.timeline
        down, across = group_size(len(timeline.computed), ROWS), group_size(len(timeline.arrived), COLUMNS)
        names = worker_names(outcome) or [str(number) for number in range(len(timeline.computed))]
        groups = [names[at : at + down] for at in range(0, len(names), down)]
        bin_s = timeline.bin_us / US_PER_S
        heat = Heat(
            rows=[some[0] if len(some) == 1 else f"{some[0]} … {some[-1]}" for some in groups],
            width=bin_s * across / divisor,
            values=[[round(value / bin_s) for value in line] for line in _averaged(timeline.computed, down, across)],
            max=0,
        )
        height = min(max(HEAT_ROW_PX * len(groups), HEAT_PX_MIN), HEAT_PX_MAX)
        panels.append(Panel(title=one.label, colour=one.colour, heat=heat, height=height))
    most = max(max(map(max, panel.heat.values)) for panel in panels if panel.heat)
    for panel in panels:
        if panel.heat:
            panel.heat.max = most
    yield Chart(
        id="load",
        title="Load of each worker over time",
        text="Prompt tokens computed per second. Even colours mean an even load; a dark row is an overloaded worker.",
        panels=panels,
        x=Axis(title=f"time of the run, {unit}", end=_end_s(runs) / divisor),
    )


def _averaged(lines: Sequence[Sequence[int]], down: int, across: int) -> Iterator[list[float]]:
    """Yield lines of which `down` neighbours, and in each of them `across` neighbours, are averaged."""
    for at in range(0, len(lines), down):
        some = lines[at : at + down]
        sums = [sum(values) for values in zip(*some, strict=True)]
        chunks = (sums[start : start + across] for start in range(0, len(sums), across))
        yield [sum(chunk) / (len(chunk) * len(some)) for chunk in chunks]


def _time_unit(span_s: float) -> tuple[float, str]:
    """Return the unit of a time axis of `span_s` seconds: seconds per unit, and its name."""
    if span_s <= 600:
        return 1.0, "s"
    return (60.0, "min") if span_s <= 4 * 3_600 else (3_600.0, "h")


def _end_s(runs: Sequence[Measured]) -> float:
    timelines = [one.run.outcome.timeline for one in runs]
    return max((one.bin_us * len(one.arrived) / US_PER_S for one in timelines), default=0.0)
