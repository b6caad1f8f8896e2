"""The HTML page of `forebay replay planner`."""

from collections.abc import Iterator, Sequence

from plotly import graph_objects

from forebay.cli.common.page import LAYOUT, Chart, plain, render
from forebay.replay.scaling.counterfactual import PlannerReplay, ReplayedPool

RECORDED, REPLAYED, TARGET = "curve-0", "curve-1", "curve-2"  # names in curve_colours.css
POOLS = ("curve-0", "curve-1", "curve-3", "curve-4", "curve-5")  # more pools repeat them
US_PER_MINUTE = 60e6

Curve = tuple[str, str, Sequence[float | None]]  # name, colour and values


def page(found: PlannerReplay) -> str:
    charts = [*_sizes(found), *_latencies(found), _gpu_hours(found)]
    return render("replay/planner_page.html", charts, found=found, settings=found.settings)


def _sizes(found: PlannerReplay) -> Iterator[Chart]:
    for number, pool in enumerate(_pools(found)):
        series = _of_pool(found, pool)
        curves = [
            ("recorded", RECORDED, [one.recorded for one in series]),
            ("replayed", REPLAYED, [one.replayed for one in series]),
        ]
        yield _chart(found, f"sizes-{number}", f"Workers of {pool}", "After each observation.", curves)


def _latencies(found: PlannerReplay) -> Iterator[Chart]:
    settings = found.settings
    for name, title, target in (("ttft_ms", "TTFT (ms)", settings.ttft_ms), ("itl_ms", "ITL (ms)", settings.itl_ms)):
        curves: list[Curve] = []
        for number, pool in enumerate(_pools(found)):
            values = [getattr(one, name) for one in _of_pool(found, pool)]
            if any(value is not None for value in values):
                curves.append((pool, POOLS[number % len(POOLS)], values))
        if curves:
            curves.append(("target", TARGET, [target] * len(found.intervals)))
            text = "Recorded mean of each interval. Other sizes would have changed it."
            yield _chart(found, name, title, text, curves)


def _gpu_hours(found: PlannerReplay) -> Chart:
    curves = [
        ("recorded", RECORDED, [one.recorded_gpu_hours for one in found.intervals]),
        ("replayed", REPLAYED, [one.replayed_gpu_hours for one in found.intervals]),
    ]
    return _chart(found, "gpu-hours", "GPU hours", "Of the decided sizes since the first observation.", curves)


def _chart(found: PlannerReplay, name: str, title: str, text: str, curves: Sequence[Curve]) -> Chart:
    begin_us = found.intervals[0].at_us
    minutes = [(one.at_us - begin_us) / US_PER_MINUTE for one in found.intervals]
    figure = graph_objects.Figure(layout=LAYOUT)
    for label, colour, values in curves:
        figure.add_scatter(
            x=minutes, y=values, mode="lines", name=plain(label), meta=colour, line={"shape": "hv"}, marker={}
        )
    figure.update_layout(showlegend=True)
    figure.update_xaxes(title_text="minutes since the first observation")
    figure.update_yaxes(rangemode="tozero")
    return Chart(id=name, title=title, text=text, figure=figure)


def _pools(found: PlannerReplay) -> list[str]:
    return [one.pool for one in found.intervals[0].pools]


def _of_pool(found: PlannerReplay, pool: str) -> list[ReplayedPool]:
    return [one for interval in found.intervals for one in interval.pools if one.pool == pool]
