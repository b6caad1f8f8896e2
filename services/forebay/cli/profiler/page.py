"""The HTML page of `forebay profile run`."""

from collections.abc import Iterator
from typing import Any

from plotly import graph_objects

from forebay.cli.common.page import LAYOUT, Chart, render
from forebay.cli.profiler.profile_file import MeasuredProfile

COLOURS = 6  # names curve-0, curve-1, ... in curve_colours.css; more curves repeat them
AXES: dict[str, Any] = {"type": "log", "dtick": 1}


def page(profile: MeasuredProfile) -> str:
    return render(
        "profiler/profile_page.html",
        [*_prefill(profile), *_decode(profile)],
        profile=profile,
        settings=profile.settings,
    )


def _prefill(profile: MeasuredProfile) -> Iterator[Chart]:
    if not profile.prefill:
        return
    points = sorted(profile.prefill, key=lambda one: one.isl)
    tokens = [one.isl for one in points]
    for name, title, text, values in (
        ("ttft_ms", "Time to first token (ms)", "Of one prompt alone.", [one.ttft_ms for one in points]),
        ("prefill_rate", "Prefill throughput (tokens/s)", "Of a busy worker.", [one.tokens_per_s for one in points]),
    ):
        figure = graph_objects.Figure(layout=LAYOUT)
        figure.add_scatter(x=tokens, y=values, mode="lines+markers", meta="curve-0", line={}, marker={})
        figure.update_layout(showlegend=False)
        figure.update_xaxes(title_text="prompt tokens", **AXES)
        figure.update_yaxes(title_text=title, rangemode="tozero")
        is_first = name == "ttft_ms"
        yield Chart(id=name, title=title, text=text, figure=figure, begins_pair=is_first, ends_pair=not is_first)


def _decode(profile: MeasuredProfile) -> Iterator[Chart]:
    if not profile.decode:
        return
    for name, title, text in (
        ("itl_ms", "Inter-token latency (ms)", "A curve per context length in tokens."),
        ("tokens_per_s", "Decode throughput (tokens/s)", "A curve per context length in tokens."),
    ):
        figure = graph_objects.Figure(layout=LAYOUT)
        for number, context in enumerate(sorted({one.context for one in profile.decode})):
            curve = sorted((one for one in profile.decode if one.context == context), key=lambda one: one.concurrency)
            figure.add_scatter(
                x=[one.concurrency for one in curve],
                y=[getattr(one, name) for one in curve],
                mode="lines+markers",
                name=f"{context:,.0f}",
                meta=f"curve-{number % COLOURS}",
                line={},
                marker={},
            )
        figure.update_layout(showlegend=True)
        figure.update_xaxes(title_text="concurrent requests", **AXES)
        figure.update_yaxes(title_text=title, rangemode="tozero")
        is_first = name == "itl_ms"
        yield Chart(id=name, title=title, text=text, figure=figure, begins_pair=is_first, ends_pair=not is_first)
