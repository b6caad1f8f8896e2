"""Results of `forebay profile run`: tables on the terminal, an engine profile, and an HTML page with charts."""

from collections.abc import Iterator
from pathlib import Path

from rich.table import Table

from forebay.cli.common.page import COLOURS, Axis, Chart, Curve, Panel, Part, render, write
from forebay.cli.common.terminal import results, table
from forebay.cli.profiler.profile_file import MeasuredProfile
from forebay.cli.simulate.profile import write_profile
from forebay.ingress.errors import Unusable
from forebay.simulate.profiles.profile import EngineSizes, Profile
from forebay.simulate.profiles.sheets import ProfileUnusable


def show(profile: MeasuredProfile) -> None:
    """Print the measured points as tables, and the points that were left out."""
    console = results()
    if profile.prefill:
        console.print(_table("prefill", ("isl", "ttft_ms", "tokens_per_s"), profile))
    if profile.decode:
        console.print(_table("decode", ("context", "concurrency", "itl_ms", "tokens_per_s"), profile))
    for one in profile.left_out:
        console.print(f"left out: {one.point}: {one.reason}", markup=False)


def write_engine_profile(profile: MeasuredProfile, batched_tokens: int, out: Path) -> None:
    """Fit an engine profile to the points and write it. Raises Unusable if there are too few points."""
    from forebay.simulate.profiles.measured import fit_measured  # noqa: PLC0415 - an extra, which takes 1 s to import

    try:
        found = fit_measured(profile.prefill, profile.decode, batched_tokens)
    except ProfileUnusable as error:
        raise Unusable(str(error)) from None
    name = profile.settings.worker or profile.settings.model
    errors = (f"{stage} {p50:.1%} / {p90:.1%}" for stage, (p50, p90) in zip(("TTFT", "ITL"), found[2:], strict=True))
    write_profile(
        Profile(
            timing=found.timing,
            sizes=EngineSizes(max_num_batched_tokens=batched_tokens),
            name=f"{name}, measured",
            source="forebay profile run",
            work_us=found.work_us,
        ),
        f"relative errors against the measured points, p50 / p90: {', '.join(errors)}",
        out,
    )


def write_report(profile: MeasuredProfile, report: Path) -> None:
    """Write the HTML page. Raises click.exceptions.Exit if it cannot be written."""
    write("--report", report, lambda: _page(profile))


def _table(stage: str, columns: tuple[str, ...], profile: MeasuredProfile) -> Table:
    shown = table(stage, columns, left=0)
    for point in getattr(profile, stage):
        values = (getattr(point, column) for column in columns)
        shown.add_row(*(f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" for value in values))
    return shown


# --- the HTML page ----------------------------------------------------------------------------------------------------


def _page(profile: MeasuredProfile) -> str:
    settings = profile.settings
    text = (
        f"Role {settings.role}. Each point is the median of {settings.repeats} measurements. Decode was measured with "
        f"{settings.output_tokens} output tokens per request."
    )
    parts: list[Part | Chart] = [Part(kind="text", text=text)]
    if profile.left_out:
        parts.append(
            Part(kind="notes", title="Left out", items=[f"{one.point}: {one.reason}" for one in profile.left_out])
        )
    title = f"forebay profile: {settings.model}"
    heading = f"Profile of {settings.worker or settings.model}"
    return render(title, [*parts, *_prefill(profile), *_decode(profile)], heading=heading)


def _prefill(profile: MeasuredProfile) -> Iterator[Chart]:
    points = sorted(profile.prefill, key=lambda one: one.isl)
    tokens = [one.isl for one in points]
    for name, title, text, values in (
        ("ttft_ms", "Time to first token (ms)", "Of one prompt alone.", [one.ttft_ms for one in points]),
        ("prefill_rate", "Prefill throughput (tokens/s)", "Of a busy worker.", [one.tokens_per_s for one in points]),
    ):
        if points:
            yield _chart(name, title, text, "prompt tokens", [Curve(x=tokens, y=values, colour="curve-0")])


def _decode(profile: MeasuredProfile) -> Iterator[Chart]:
    contexts = sorted({one.context for one in profile.decode})
    for name, title in (("itl_ms", "Inter-token latency (ms)"), ("tokens_per_s", "Decode throughput (tokens/s)")):
        curves = []
        for number, context in enumerate(contexts):
            found = sorted((one for one in profile.decode if one.context == context), key=lambda one: one.concurrency)
            x = [one.concurrency for one in found]
            y = [getattr(one, name) for one in found]
            curves.append(Curve(x=x, y=y, name=f"{context:,.0f}", colour=f"curve-{number % COLOURS}"))
        if curves:
            yield _chart(name, title, "A curve per context length in tokens.", "concurrent requests", curves)


def _chart(name: str, title: str, text: str, of: str, curves: list[Curve]) -> Chart:
    for curve in curves:
        curve.style = "points"
    return Chart(
        id=name, title=title, text=text, panels=[Panel(curves=curves)], x=Axis(title=of, log=True), paired=True
    )
