"""The HTML page of `forebay replay diff --report`."""

from plotly import graph_objects
from plotly.subplots import make_subplots

from forebay.cli.common.page import LAYOUT, Chart, plain, render, short
from forebay.cli.replay.closed_loop import ClosedLoop
from forebay.cli.replay.diff_view import HINT, closed_rows, outcome_text, rows, terms_text
from forebay.replay.checks import UNVERIFIED
from forebay.replay.diff.report import DiffReport

MARK_MAX, MARK_MIN = 26.0, 5.0  # diameters in pixels
HISTORY, ALTERNATIVE = "history", "alternative"


def page(report: DiffReport, simulated: ClosedLoop | None, source: str) -> str:
    """Return the HTML page of a comparison.

    Args:
        simulated: result of the closed-loop simulation; None if there is none.
    """
    charts = [*_overlap_and_load(report), _series(report), *_waits(report)]
    fork = report.fork
    there = None if fork is None else fork.alternative.there
    return render(
        "replay/diff_page.html",
        charts,
        report=report,
        source=source,
        unverified=[f"{count} {UNVERIFIED[name]}" for name, count in report.unverified.items()],
        rows=rows(report),
        cards=_cards(report),
        hint=HINT if simulated is None and not report.identical else "",
        closed=simulated,
        closed_rows=[] if simulated is None else closed_rows(simulated),
        fork_history="" if fork is None else outcome_text(fork.history),
        fork_alternative="" if fork is None else outcome_text(fork.alternative),
        fork_there="" if there is None else terms_text(there),
    )


def _cards(report: DiffReport) -> list[dict[str, str]]:
    moved, history, other = report.moved, report.history, report.other
    share = moved.moved / moved.compared if moved.compared else 0.0
    landed = "-" if other.landed is None else f"{other.landed:.1%}"
    won, lost = report.overlap.won, report.overlap.lost
    gained = won.device + won.host + won.disk + won.store
    missed = lost.device + lost.host + lost.disk + lost.store

    def card(name: str, value: str, more: str) -> dict[str, str]:
        return {"name": name, "value": value, "more": more}

    return [
        card("moved requests", f"{share:.1%}", f"{moved.moved:,} of {moved.compared:,}"),
        card("exact, before the fork", f"{report.before_fork:.1%}", "of history's decisions"),
        card("prefix reuse, predicted", f"{other.reuse:.1%}", f"history {history.reuse:.1%}"),
        card("blocks won, lost", f"{gained - missed:+,}", f"{gained:,} won, {missed:,} lost"),
        card("busiest worker over the mean", f"{other.max_over_mean:.3f}", f"history {history.max_over_mean:.3f}"),
        card("prompt blocks cached where sent", landed, "lower values mean a less valid comparison"),
    ]


def _overlap_and_load(report: DiffReport) -> list[Chart]:
    return [
        Chart(
            id="overlap",
            title="Overlap per request",
            text="Above the line the alternative has more overlap than history. Larger marks stand for more requests.",
            figure=_overlap(report),
            begins_pair=True,
        ),
        Chart(
            id="load",
            title="Prompt tokens to compute, by worker",
            text="Uncached prompt tokens sent to each rank, according to each world's index.",
            figure=_load(report),
            ends_pair=True,
        ),
    ]


def _overlap(report: DiffReport) -> graph_objects.Figure:
    most = max((pair.requests for pair in report.pairs), default=1)
    sizes = [MARK_MIN + (MARK_MAX - MARK_MIN) * (pair.requests / most) ** 0.5 for pair in report.pairs]
    wide = report.bin_blocks
    bins = "" if wide == 1 else f" (bins of {wide} blocks)"
    end = max((max(pair.history, pair.alternative) for pair in report.pairs), default=1) + wide
    figure = graph_objects.Figure(layout=LAYOUT)
    figure.add_scatter(
        x=[0, end], y=[0, end], mode="lines", line={"width": 1, "dash": "dot"}, hoverinfo="skip", meta="soft"
    )
    figure.add_scatter(
        x=[pair.history for pair in report.pairs],
        y=[pair.alternative for pair in report.pairs],
        customdata=[pair.requests for pair in report.pairs],
        mode="markers",
        marker={"size": sizes, "opacity": 0.6, "line": {"width": 0}},
        hovertemplate="history %{x}, alternative %{y}: %{customdata:,} requests<extra></extra>",
        meta=ALTERNATIVE,
    )
    figure.update_layout(showlegend=False)
    figure.update_xaxes(title_text=f"overlap in history, blocks{bins}", rangemode="tozero")
    figure.update_yaxes(title_text="in the alternative", rangemode="tozero")
    return figure


def _load(report: DiffReport) -> graph_objects.Figure:
    names = [plain(f"{rank.worker_id}/{rank.rank}") for rank in report.ranks]
    figure = graph_objects.Figure(layout=LAYOUT)
    for name in (HISTORY, ALTERNATIVE):
        loads = [getattr(rank, name).computed_tokens for rank in report.ranks]
        requests = [getattr(rank, name).requests for rank in report.ranks]
        figure.add_bar(
            x=list(range(len(names))),
            y=loads,
            customdata=list(zip(names, requests, strict=True)),
            hovertemplate="%{customdata[0]}: %{y:,} tokens of %{customdata[1]:,} requests<extra>" + name + "</extra>",
            name=name,
            marker={"line": {"width": 0}},
            meta=name,
        )
    step = max(1, -(-len(names) // 16))  # show at most 16 labels
    at = list(range(0, len(names), step))
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_xaxes(tickvals=at, ticktext=[short(names[number]) for number in at], type="linear")
    # Without this, plotly hides a label at the edge that is wider than the margin.
    figure.update_xaxes(ticklabeloverflow="allow", automargin=True)
    figure.update_yaxes(title_text="tokens", rangemode="tozero")
    return figure


def _series(report: DiffReport) -> Chart:
    times = [one.after_s for one in report.series]
    titles = ("share of moved requests", "prefix reuse, predicted", "busiest worker over the mean")
    figure = make_subplots(rows=3, cols=1, shared_xaxes=True, vertical_spacing=0.09, subplot_titles=titles)
    figure.update_layout(LAYOUT)
    moved = [one.moved / one.compared if one.compared else None for one in report.series]
    curves = (
        (1, ALTERNATIVE, moved, False),
        (2, HISTORY, [one.reuse for one in report.series], True),
        (2, ALTERNATIVE, [one.other_reuse for one in report.series], True),
        (3, HISTORY, [one.max_over_mean for one in report.series], False),
        (3, ALTERNATIVE, [one.other_max_over_mean for one in report.series], False),
    )
    for row, name, values, legend in curves:
        figure.add_scatter(
            x=times,
            y=values,
            mode="lines+markers" if len(times) < 3 else "lines",
            line={"width": 2, "shape": "hv"},
            marker={"size": 4},
            name=name,
            meta=name,
            showlegend=legend,
            hovertemplate="from %{x:,.2f} s: %{y:.3f}<extra>" + name + "</extra>",
            row=row,
            col=1,
        )
    figure.update_annotations(font_size=12, xanchor="left", x=0)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(range=[0, 1.02], tickformat=".0%", row=1, col=1)
    figure.update_yaxes(tickformat=".0%", row=2, col=1)
    figure.update_xaxes(title_text="seconds from the start", row=3, col=1)
    figure.update_layout(margin={"l": 56, "r": 16, "t": 52, "b": 48}, legend={"y": 1.07})
    if report.fork is not None:
        figure.add_vline(x=report.fork.after_s, line={"width": 1.5, "dash": "dash"}, name="fork")
        figure.add_annotation(
            x=report.fork.after_s,
            xref="x",
            y=0.0,
            yref="paper",
            yanchor="bottom",
            xanchor="left",
            text="fork",
            showarrow=False,
            name="fork",
        )
    text = (
        f"In intervals of {report.interval_s:g} s on the owner's clock. The dashed line marks the fork: the first "
        "difference between history and the alternative."
    )
    return Chart(id="series", title="Over time", text=text, figure=figure, height=620)


def _waits(report: DiffReport) -> list[Chart]:
    sides = {HISTORY: report.history, ALTERNATIVE: report.other}
    if not any(side.waits for side in sides.values()):
        return []
    bins = sorted({one.below_ms for side in sides.values() for one in side.waits})
    figure = graph_objects.Figure(layout=LAYOUT)
    for name, side in sides.items():
        counts = {one.below_ms: one.requests for one in side.waits}
        figure.add_bar(
            x=[f"≤ {_duration(below_ms)}" for below_ms in bins],
            y=[counts.get(below_ms, 0) for below_ms in bins],
            hovertemplate="%{x}: %{y:,} requests<extra>" + name + "</extra>",
            name=name,
            marker={"line": {"width": 0}},
            meta=name,
        )
    figure.update_layout(barmode="group", bargap=0.25)
    figure.update_xaxes(title_text="time in the router's queue", type="category")
    figure.update_yaxes(title_text="requests")
    held = f"The router queued {report.history.held:,} requests in history, {report.other.held:,} in the alternative."
    return [Chart(id="waits", title="Time in the router's queue", text=held, figure=figure, height=340)]


def _duration(below_ms: int) -> str:
    return f"{below_ms} ms" if below_ms < 1_000 else f"{below_ms / 1_000:.3g} s"
