"""The HTML page of `forebay profile run`."""

from collections.abc import Iterator

from forebay.cli.common.page import COLOURS, Axis, Chart, Curve, Panel, Part, render
from forebay.cli.profiler.profile_file import MeasuredProfile


def page(profile: MeasuredProfile) -> str:
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
