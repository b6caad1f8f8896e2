"""Charts of the report. Each run has one colour on all charts."""

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from plotly import graph_objects

from forebay.cli.common.page import LAYOUT, Chart, plain
from forebay.cli.simulate.report.heat import Heat
from forebay.cli.simulate.report.measures import Limits, Measured, quantile, shares
from forebay.cli.simulate.report.times import loads, over_time, short_label
from forebay.cli.simulate.report.words import duration

BINS, BINS_PER_DECADE = 70, (25, 250)  # bins over all distributions of a chart; minimum and maximum per decade
KERNEL = (1, 3, 4, 3, 1)  # smoothing weights over five bins
RIDGE_HEIGHT = 0.86  # height of the highest ridge, relative to the distance between ridges
RIDGE_PX, AXIS_PX = 64, 90
DECADES_WITH_FEW_TICKS = 2.5
NAMES_WIDTH = 0.25  # width of the labels at the left, relative to the axis
SAME_COST = 1.02  # equal fleets differ slightly in cost, because their runs end at different times


def charts(runs: Sequence[Measured], limits: Limits, heats: Sequence[Heat]) -> list[Chart]:
    """Return the charts of the report, except those without data."""
    answered = [one for one in runs if one.ttft_ms]
    found: list[Chart] = []
    if answered:
        found += _distributions(answered)
        found += _attainment(runs, limits)
    found += over_time(runs)
    found += loads(runs, heats)
    found += _costs(answered)
    return found


def _blank() -> graph_objects.Figure:
    return graph_objects.Figure(layout={**LAYOUT, "template": "none", "showlegend": False})


def _distributions(runs: Sequence[Measured]) -> Iterator[Chart]:
    text = "Distribution of requests by TTFT, on a logarithmic scale. ● p50, ◆ p90, ▮ p99."
    itl = "Mean time between the tokens of a response, per request. Responses of one token have none."
    height = RIDGE_PX * len(runs) + AXIS_PX
    times = [("ttft", "Time to first token", text, [one.ttft_ms for one in runs])]
    if any(one.itl_ms for one in runs):
        times.append(("itl", "Inter-token latency", itl, [one.itl_ms for one in runs]))
    for name, title, caption, values in times:
        yield Chart(
            id=name,
            title=title,
            text=caption,
            figure=_ridges(runs, values),
            height=height,
            begins_pair=name == "ttft" and len(times) > 1,
            ends_pair=name == "itl",
        )


def _ridges(runs: Sequence[Measured], values: Sequence[Sequence[float]]) -> graph_objects.Figure:
    figure = _blank()
    decades = math.log10(max(some[-1] for some in values if some) / max(1e-3, min(some[0] for some in values if some)))
    fine, finest = BINS_PER_DECADE
    per_decade = min(max(fine, round(BINS / max(decades, 1e-3))), finest)
    shapes = [_density(some, per_decade) for some in values]
    highest = max(max(heights, default=0.0) for _, heights in shapes)
    for row, (one, some, (at_ms, heights)) in enumerate(zip(runs, values, shapes, strict=True)):
        base = len(runs) - 1 - row
        name = plain(one.label)
        figure.add_scatter(
            x=[*at_ms, *at_ms[-1:], *at_ms[:1]],
            y=[*(round(base + RIDGE_HEIGHT * height / highest, 4) for height in heights), base, base],
            mode="lines",
            fill="toself",
            line={"width": 1.5},
            name=name,
            meta=one.colour,
            legendgroup=one.group,
            hoverinfo="skip",
        )
        marks = [("p50", 0.5, "circle"), ("p90", 0.9, "diamond"), ("p99", 0.99, "line-ns-open")]
        figure.add_scatter(
            x=[quantile(some, share) for _, share, _ in marks] if some else [],
            y=[base] * len(marks) if some else [],
            customdata=[[p, duration(quantile(some, share))] for p, share, _ in marks] if some else [],
            mode="markers",
            marker={"size": [9, 8, 13], "symbol": [symbol for *_, symbol in marks], "line": {"width": 2.5}},
            name=name,
            meta=one.colour,
            legendgroup=one.group,
            showlegend=False,
            cliponaxis=False,
            hovertemplate="%{customdata[0]}: %{customdata[1]}<extra>" + name + "</extra>",
        )
        figure.add_annotation(
            x=0, xref="paper", xanchor="left", y=base + 0.5, yanchor="bottom", text=short_label(one), showarrow=False,
            name=one.colour, font={"size": 12},
        )  # fmt: skip
    figure.update_yaxes(showticklabels=False, showgrid=False, zeroline=False, range=[-0.22, len(runs)], fixedrange=True)
    axis = _log_ms([at_ms for at_ms, _ in shapes])
    low, high = axis["range"]
    figure.update_xaxes({**axis, "range": [low - NAMES_WIDTH * (high - low), high]})
    figure.update_layout(margin={"l": 12, "r": 16, "t": 10, "b": 44})
    return figure


def _density(ordered: Sequence[float], per_decade: int) -> tuple[list[float], list[float]]:
    """Return times, and the smoothed share of values per decade around each."""
    positive = ordered[bisect_left(ordered, 1e-3) :]
    if not positive:
        return [], []
    first = math.floor(math.log10(positive[0]) * per_decade) - len(KERNEL)
    last = math.ceil(math.log10(positive[-1]) * per_decade) + len(KERNEL)
    edges = [10 ** (at / per_decade) for at in range(first, last + 1)]
    ranks = [bisect_left(positive, edge) for edge in edges]
    counts = [after - before for before, after in pairwise(ranks)]
    middle = len(KERNEL) // 2
    heights = [
        sum(weight * counts[at + by - middle] for by, weight in enumerate(KERNEL)) * per_decade / len(ordered)
        for at in range(middle, len(counts) - middle)
    ]
    centres = [10 ** ((first + at + 0.5) / per_decade) for at in range(middle, len(counts) - middle)]
    return [round(one, 6) for one in centres], heights


def _attainment(runs: Sequence[Measured], limits: Limits) -> Iterator[Chart]:
    caption = "Share of all requests within the limit. Failed requests miss every limit."
    kinds = (
        ("ttft-slo", "Attainment by TTFT limit", limits.ttft_ms, [one.ttft_ms for one in runs]),
        ("itl-slo", "Attainment by ITL limit", limits.itl_ms, [one.itl_ms for one in runs]),
    )
    for name, title, limits_ms, values in kinds:
        figure = _blank()
        for one, some in zip(runs, values, strict=True):
            # Responses of one token have no ITL, so they meet every ITL limit.
            free = one.requests - one.failed - len(some)
            kept = shares(some, limits_ms, one.requests, free)
            figure.add_scatter(
                x=limits_ms,
                y=kept,
                mode="lines",
                line={"width": 2},
                name=plain(one.label),
                meta=one.colour,
                legendgroup=one.group,
                hovertemplate="%{y:.1%}<extra>" + plain(one.label) + "</extra>",
            )
        figure.update_layout(hovermode="x unified")
        figure.update_xaxes(**_log_ms([limits_ms]), hoverformat=",.4~g")
        figure.update_yaxes(range=[0, 1.02], tickformat=".0%")
        figure.add_vline(x=limits_ms[len(limits_ms) // 2], line={"width": 1.5, "dash": "dot"}, name="ink")
        yield Chart(
            id=name,
            title=title,
            text=caption,
            figure=figure,
            begins_pair=name == "ttft-slo",
            ends_pair=name == "itl-slo",
        )


def _costs(runs: Sequence[Measured]) -> Iterator[Chart]:
    spent = [one.run.outcome.gpu_s for one in runs]
    if not spent or max(spent) <= min(spent) * SAME_COST:
        return
    figure = _blank()
    for one in runs:
        middle, far = quantile(one.ttft_ms, 0.5), quantile(one.ttft_ms, 0.99)
        hours = one.run.outcome.gpu_s / 3_600
        label = f"{hours:,.3g} GPU hours: TTFT p50 {duration(middle)}, p99 {duration(far)}"
        figure.add_scatter(
            x=[hours, hours],
            y=[middle, far],
            mode="lines+markers+text",
            line={"width": 2},
            marker={"size": [11, 9], "symbol": ["circle", "line-ew-open"], "line": {"width": 2.5}},
            text=[short_label(one), ""],
            textposition="bottom center",
            name=plain(one.label),
            meta=one.colour,
            legendgroup=one.group,
            hovertemplate=label + "<extra>" + plain(one.label) + "</extra>",
            cliponaxis=False,
        )
    figure.update_xaxes(title_text="GPU hours", rangemode="tozero")
    axis = _log_ms([one.ttft_ms for one in runs])
    axis["title_text"] = "TTFT"
    figure.update_yaxes(**axis)
    yield Chart(
        id="cost",
        title="Cost and latency",
        text="GPU hours of all workers, and TTFT from its median up to its 99th percentile.",
        figure=figure,
    )


def _log_ms(values: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Return a logarithmic axis in milliseconds that spans all sorted values."""
    low = min((some[0] for some in values if some), default=1.0)
    high = max((some[-1] for some in values if some), default=1.0)
    few = math.log10(high / low) > DECADES_WITH_FEW_TICKS
    ticks = [float(f"{step}e{at}") for at in range(-4, 10) for step in ((1,) if few else (1, 2, 5))]
    return {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [duration(tick) for tick in ticks],
        "range": [math.log10(low * 0.97), math.log10(high * 1.03)],
        "zeroline": False,
    }
