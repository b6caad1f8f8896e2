"""Charts of the report over time: rates, queues, and the load of each worker."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from plotly.subplots import make_subplots

from forebay.cli.common.page import LAYOUT, Chart, plain, short
from forebay.cli.simulate.report.heat import Heat
from forebay.cli.simulate.report.measures import US_PER_S, Measured, group_size, most, ratios
from forebay.simulate.outcome import UtilizationTimeline

REUSE_POINTS, DEPTH_POINTS = 60, 240
PANEL_PX, AXIS_PX = 150, 90
HEAT_ROW_PX, HEAT_PX_MIN, HEAT_PX_MAX = 14, 90, 330
ROWS_NAMED = 8
LABEL_MAX = 40

Series = Callable[[Measured], Sequence[float | None]]


def over_time(runs: Sequence[Measured]) -> Iterator[Chart]:
    """Yield a chart of panels with a common time axis. Panels without data are left out."""
    timed = [one for one in runs if one.run.outcome.timeline.arrived]
    if not timed:
        return
    panels = list(_panels(timed))
    divisor, unit = time_unit(_end_s(timed))
    width_s = max(one.run.outcome.timeline.bin_us for one in timed) / US_PER_S
    figure = make_subplots(
        rows=len(panels), cols=1, shared_xaxes=True, vertical_spacing=0.28 / len(panels),
        subplot_titles=[title for title, *_ in panels],
    )  # fmt: skip
    figure.update_layout(LAYOUT, template="none", showlegend=False)
    for row, (_, form, points, series, shown) in enumerate(panels, 1):
        for one in shown:
            timeline = one.run.outcome.timeline
            values = series(one)
            size = group_size(len(timeline.arrived), points)
            width = timeline.bin_us * size / US_PER_S / divisor
            figure.add_scatter(
                x=[round(at * width, 4) for at in range(len(values))],
                y=values,
                mode="lines" if len(values) > 2 else "lines+markers",
                line={"width": 1.6, "shape": "hv"},
                name=plain(one.label),
                meta="soft" if len(shown) < len(timed) else one.colour,
                legendgroup="" if len(shown) < len(timed) else one.group,
                showlegend=row == len(panels) and len(shown) == len(timed),
                hovertemplate="%{y:" + form + "}<extra>" + plain(one.label if len(shown) > 1 else "all") + "</extra>",
                row=row,
                col=1,
            )
        figure.update_yaxes(tickformat=form, row=row, col=1)
    figure.update_annotations(font_size=12, xanchor="left", x=0)
    figure.update_yaxes(rangemode="tozero", nticks=4)
    figure.update_xaxes(title={"text": f"time of the run, {unit}", "standoff": 8}, row=len(panels), col=1)
    figure.update_xaxes(showgrid=True, hoverformat=",.2f", range=[0, _end_s(timed) / divisor])
    figure.update_layout(margin={"l": 56, "r": 16, "t": 30, "b": 52}, hovermode="x unified")
    yield Chart(
        id="time",
        title="Over time",
        text=f"Queues and running requests are sampled every {width_s:,.3g} s. Drag over a panel to zoom all panels; "
        "double-click to reset.",
        figure=figure,
        height=PANEL_PX * len(panels) + AXIS_PX,
    )


def _panels(runs: Sequence[Measured]) -> Iterator[tuple[str, str, int, Series, Sequence[Measured]]]:
    """Yield title, number format, maximum number of points, series and runs of each panel."""

    def timeline(one: Measured) -> UtilizationTimeline:
        return one.run.outcome.timeline

    def rate(counts: Sequence[int], one: Measured) -> list[float | None]:
        size = group_size(len(counts), REUSE_POINTS)
        wide_s = timeline(one).bin_us * size / US_PER_S
        return [round(sum(counts[at : at + size]) / wide_s, 4) for at in range(0, len(counts), size)]

    def depth(values: Sequence[Sequence[int]]) -> list[int]:
        sums = [sum(some) for some in zip(*values, strict=True)]
        return most(sums, group_size(len(sums), DEPTH_POINTS))

    def held(one: Measured) -> list[int]:
        return most(timeline(one).queued, group_size(len(timeline(one).queued), DEPTH_POINTS))

    def members(one: Measured) -> list[int]:
        return most(timeline(one).workers, group_size(len(timeline(one).workers), DEPTH_POINTS))

    def trouble(one: Measured) -> list[int]:
        bins = [0] * len(timeline(one).arrived)
        for place in _trouble(one):
            bins[min(one.run.outcome.requests.column("arrived_us")[place] // timeline(one).bin_us, len(bins) - 1)] += 1
        size = group_size(len(bins), DEPTH_POINTS)
        return [sum(bins[at : at + size]) for at in range(0, len(bins), size)]

    def reuse(one: Measured) -> list[float | None]:
        found = timeline(one)
        size = group_size(len(found.arrived), REUSE_POINTS)
        return [
            None if ratio is None else round(ratio, 4)
            for ratio in ratios(found.cached_tokens, found.prompt_tokens, size)
        ]

    same = (
        all(timeline(one).bin_us == timeline(runs[0]).bin_us for one in runs)
        and len({_trimmed(timeline(one).arrived) for one in runs}) == 1
    )
    yield (
        "arrivals per second",
        ",.3~g",
        REUSE_POINTS,
        lambda one: rate(timeline(one).arrived, one),
        runs[:1] if same else runs,
    )
    yield "prompt tokens found in the cache", ".0%", REUSE_POINTS, reuse, runs
    if any(any(timeline(one).queued) for one in runs):
        yield "requests queued in the router", ",.3~s", DEPTH_POINTS, held, runs
    yield "requests waiting in engines", ",.3~s", DEPTH_POINTS, lambda one: depth(timeline(one).waiting), runs
    yield "running requests", ",.3~s", DEPTH_POINTS, lambda one: depth(timeline(one).running), runs
    if any(_trouble(one) for one in runs):
        yield "failed or retried requests, by arrival", ",.3~s", DEPTH_POINTS, trouble, runs
    if any(len(set(timeline(one).workers)) > 1 for one in runs):
        yield "workers in the fleet", ",d", DEPTH_POINTS, members, runs
    planned = [one for one in runs if "planner" in one.run.summary]
    if planned:
        yield "workers by the planner's decisions", ",d", DEPTH_POINTS, _decided, planned
        yield "SLO attainment, by arrival", ".0%", DEPTH_POINTS, _attained, planned


def _decided(one: Measured) -> list[float | None]:
    return _of_intervals(one, lambda interval: sum(pool["workers"] for pool in interval["pools"].values()))


def _attained(one: Measured) -> list[float | None]:
    return _of_intervals(one, lambda interval: interval["attained"])


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


def loads(runs: Sequence[Measured], heats: Sequence[Heat]) -> Iterator[Chart]:
    """Yield a heat map of workers over time for each run, on one colour scale."""
    shown = [(one, heat) for one, heat in zip(runs, heats, strict=True) if heat.rows]
    if not shown:
        return
    divisor, unit = time_unit(_end_s(runs))
    heights = [min(max(HEAT_ROW_PX * len(heat.rows), HEAT_PX_MIN), HEAT_PX_MAX) for _, heat in shown]
    height = sum(heights) + 38 * len(shown) + AXIS_PX
    figure = make_subplots(
        rows=len(shown), cols=1, shared_xaxes=True, vertical_spacing=min(34 / height, 0.9 / len(shown)),
        row_heights=heights, subplot_titles=[short_label(one) for one, _ in shown],
    )  # fmt: skip
    figure.update_layout(LAYOUT, template="none", showlegend=False)
    for row, (one, heat) in enumerate(shown, 1):
        names = [plain(name) for name in heat.rows]
        figure.add_heatmap(
            z=heat.values["computed"],
            x0=heat.bin_s / divisor / 2,
            dx=heat.bin_s / divisor,
            y=list(range(len(names))),
            customdata=[[name] * len(heat.values["computed"][0]) for name in names],
            coloraxis="coloraxis",
            name=plain(one.label),
            hovertemplate="%{customdata}, %{x:,.1f} " + unit + ": %{z:,}<extra>" + plain(one.label) + "</extra>",
            row=row,
            col=1,
        )
        step = group_size(len(names), ROWS_NAMED)
        at = list(range(0, len(names), step))
        figure.update_yaxes(
            tickvals=at,
            ticktext=[short(names[number]) for number in at],
            showgrid=False,
            zeroline=False,
            autorange="reversed",
            row=row,
            col=1,
        )
    figure.update_annotations(font_size=12, xanchor="left", x=0)
    for label, (one, _) in zip(figure.layout.annotations, shown, strict=True):
        label.name = one.colour
    figure.update_xaxes(showgrid=False, zeroline=False, range=[0, _end_s(runs) / divisor])
    figure.update_xaxes(title={"text": f"time of the run, {unit}", "standoff": 8}, row=len(shown), col=1)
    figure.update_layout(
        margin={"l": 84, "r": 8, "t": 30, "b": 52},
        coloraxis={
            "colorbar": {"thickness": 10, "outlinewidth": 0, "tickformat": ",.3~s"},
            "cmin": 0,
            "cmax": max(max(map(max, heat.values["computed"])) for _, heat in shown),
        },
    )
    yield Chart(
        id="load",
        title="Load of each worker over time",
        text="One row per worker. Even colours mean an even load; a dark row among light ones is an overloaded worker.",
        figure=figure,
        height=height,
    )


def time_unit(span_s: float) -> tuple[float, str]:
    """Return the time unit for the axis of a run of `span_s` seconds: seconds per unit, and the name of the unit."""
    if span_s <= 600:
        return 1.0, "s"
    return (60.0, "min") if span_s <= 4 * 3_600 else (3_600.0, "h")


def _end_s(runs: Sequence[Measured]) -> float:
    timelines = [one.run.outcome.timeline for one in runs]
    return max((one.bin_us * len(one.arrived) / US_PER_S for one in timelines), default=0.0)


def short_label(one: Measured) -> str:
    """Return the label of a run, shortened and escaped for plotly."""
    label = one.label if len(one.label) <= LABEL_MAX else f"{one.label[:20]}…{one.label[-19:]}"
    return plain(label)
