"""HTML page of `forebay simulate --report`: a self-contained file that loads nothing from the network.

`page.html` is the template. The page shares its style and uPlot, which draws the charts, with the page of `forebay
console`. Names chosen by users are always text, never markup: the template escapes them, scripts receive them as data
and insert text nodes, and the content security policy of the page blocks all external resources.
"""

import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from rich.progress import SpinnerColumn, TextColumn

from forebay.analysis.runs import SimulationRun
from forebay.cli.common.errors import BROKEN, fail
from forebay.cli.common.tables import bar
from forebay.cli.common.terminal import printable
from forebay.cli.simulate.options import to_json
from forebay.cli.simulate.report.charts import attainment, loads, over_time
from forebay.cli.simulate.report.measures import Measured, limits, measured
from forebay.runtime.files import replacing
from forebay.simulate.pareto import metric_at
from forebay.simulate.slo import Slo

RUNS_MAX = 12  # runs on one page; charts with more lines are unreadable
TITLE = "forebay simulate"
HEAD_BYTES = 1024  # the first bytes of a report, which contain its title
TIE = 0.01  # relative difference below which metrics are reported as equal; other seeds change them as much
NAMED = 3  # maximum number of runs to name in a sentence
LESS, MORE = 1, -1  # which direction is better


def duration(ms: float) -> str:
    """Return a duration as text with three significant digits and a unit."""
    if ms < 0.9995:
        return "0 ms" if ms == 0 else f"{ms * 1e3:.3g} µs"
    if ms < 999.5:
        return f"{ms:.3g} ms"
    if ms < 600_000:
        return f"{ms / 1e3:.3g} s"
    return f"{ms / 6e4:.3g} min" if ms < 7_200_000 else f"{ms / 3.6e6:,.1f} h"


class Metric(NamedTuple):
    """A row of the table. `path` is that of the metric in `Measured.metrics`."""

    name: str
    path: str
    text: Callable[[float], str]
    better: int


ATTAINED = Metric("SLO attainment", "attained", "{:.1%}".format, MORE)
TTFT = Metric("TTFT mean", "ttft_ms.mean", duration, LESS)
METRICS = (
    ATTAINED,
    Metric("goodput, requests/s", "goodput_per_s", "{:,.3g}".format, MORE),
    TTFT,
    *(Metric(f"TTFT {of}", f"ttft_ms.{of}", duration, LESS) for of in ("p50", "p90", "p99")),
    *(Metric(f"ITL {of}", f"itl_ms.{of}", duration, LESS) for of in ("mean", "p50", "p90", "p99")),
    *(Metric(f"E2E {of}", f"e2e_ms.{of}", duration, LESS) for of in ("mean", "p50", "p90", "p99")),
    Metric("prefix reuse", "prefix_reuse", "{:.1%}".format, MORE),
    Metric("load, max / mean", "load_max_over_mean", "{:.3f}".format, LESS),
    Metric("output tokens/s", "tokens_per_s", "{:,.0f}".format, MORE),
    Metric("GPU hours", "gpu_hours", "{:,.3g}".format, LESS),
)
NOTES = (
    "TTFT: time from the arrival of a request to its first token. ITL: mean time between the tokens of a response. "
    "E2E: time from arrival to the last token. Latencies are those of completed requests.",
    "Prefix reuse: share of prompt tokens found in the selected worker's cache. Load, max / mean: prompt tokens "
    "computed by the busiest worker, divided by the mean of all workers. Output tokens/s: from the first arrival to "
    "the last response.",
    f"★ marks the best runs. Values that differ by less than {TIE:.0%} are called equal, because another seed may "
    "change them as much.",
)
OF_DISAGGREGATION = (
    "Prefill workers compute prompts for decode workers. Prefix reuse then refers to the cache of the worker that "
    "computed the prompt, and load to the prefill workers. TTFT includes the KV transfer."
)
OF_MOCKER = (
    "Step times of profile mocker are those of Dynamo's mocker and match no hardware. Compare reuse, balance and "
    "order, but do not rely on the milliseconds."
)


def slo_text(slo: Slo) -> str:
    limits = (("TTFT", slo.ttft_ms), ("ITL", slo.itl_ms), ("E2E", slo.e2e_ms))
    return ", ".join(f"{name} ≤ {duration(limit)}" for name, limit in limits if limit is not None)


def headline(runs: Sequence[Measured], slo: Slo | None) -> str:
    """Return a sentence that says which run is best: by SLO attainment, or without an SLO by mean TTFT."""
    answered = [one for one in runs if one.ttft_ms]
    if not answered:
        return "No request completed."
    metric = ATTAINED if slo else TTFT
    best, others = _ranked(answered, metric)
    of = f"SLO attainment ({slo_text(slo)})" if slo else metric.name
    text = f"Best {of}: {_names(best)}, {metric.text(_value(best[0], metric))}"
    return f"{text}; {others[0].label} has {metric.text(_value(others[0], metric))}." if others else f"{text}."


def findings(runs: Sequence[Measured]) -> list[str]:
    """Return what a reader needs to know before comparing latencies: the failed requests."""
    found = []
    for one in runs:
        if failures := one.run.outcome.requests.failures:
            reason = failures[min(failures)]
            found.append(f"{one.label}: {one.failed:,} of {one.requests:,} requests failed; the first reason: {reason}")
    return found


def metric_rows(runs: Sequence[Measured]) -> list[list[str]]:
    """Return the rows of the table: the name of a metric, and its value under each run."""
    rows = []
    for metric in METRICS:
        values = [metric_at(one.metrics, metric.path) for one in runs]
        known = [one for one, value in zip(runs, values, strict=True) if value is not None]
        if known:
            best, others = _ranked(known, metric)
            marked = best if others else []
            cells = [
                "-" if value is None else metric.text(value) + " ★" * (one in marked)
                for one, value in zip(runs, values, strict=True)
            ]
            rows.append([metric.name, *cells])
    return rows


def notes(runs: Sequence[Measured]) -> list[str]:
    pools = [pool for one in runs for pool in one.run.settings.pools]
    found = list(NOTES)
    if any(pool.role == "prefill" for pool in pools):
        found.append(OF_DISAGGREGATION)
    if any(group.profile == "mocker" for pool in pools for group in pool.groups):
        found.append(OF_MOCKER)
    return found


def settings_shown(runs: Sequence[Measured]) -> list[dict[str, Any]]:
    """Return the settings of all runs for display. Equal fleets are listed once."""
    found: list[dict[str, Any]] = []
    fleets: dict[bytes, str] = {}
    for one in runs:
        fleet = msgspec.json.encode(one.run.settings)
        fleet_shown: Any = f"as under {fleets[fleet]}" if fleet in fleets else to_json(one.run.settings)
        fleets.setdefault(fleet, one.label)
        found.append({"run": one.label, "router": to_json(one.run.router), "fleet": fleet_shown})
    return found


def _value(one: Measured, metric: Metric) -> float:
    value = metric_at(one.metrics, metric.path)
    assert value is not None, "only runs with this metric are compared"
    return value


def _ranked(runs: Sequence[Measured], metric: Metric) -> tuple[list[Measured], list[Measured]]:
    """Return the best runs, which are equal within `TIE`, and the other runs in order."""
    order = sorted(runs, key=lambda one: metric.better * _value(one, metric))
    top = _value(order[0], metric)
    best = [one for one in order if abs(_value(one, metric) - top) <= TIE * min(top, _value(one, metric))]
    return best, order[len(best) :]


def _names(runs: Sequence[Measured]) -> str:
    labels = [one.label for one in runs]
    if len(labels) > NAMED:
        return f"{', '.join(labels[: NAMED - 1])} and {len(labels) - NAMED + 1} others"
    return labels[0] if len(labels) == 1 else f"{', '.join(labels[:-1])} and {labels[-1]}"


def require_report(path: Path) -> None:
    """Check, before anything is simulated, that the report can be written to `path`.

    Exits if the file cannot be written, or exists and is not an earlier report.
    """
    if not path.parent.is_dir():
        fail(f"--report {path}: no such directory {path.parent}")
    if not path.exists():
        return
    if not path.is_file():  # reading a pipe or a terminal would wait
        fail(f"--report {path}: not a regular file; choose another name")
    try:
        with path.open("rb") as file:
            is_page = f"<title>{TITLE}".encode() in file.read(HEAD_BYTES)
    except OSError as error:
        fail(f"--report {path}: {error.strerror}")
    if not is_page:
        fail(f"--report {path}: the file exists and is not a report of this command; choose another name")


def write_report(
    path: Path,
    runs: Sequence[SimulationRun],
    *,
    workload: str,
    slo: Slo | None,
    digest: str,
    survey_notes: Sequence[str] = (),
) -> None:
    """Write the report atomically, with the arguments of `page`. A file that cannot be written ends the command."""
    with bar(SpinnerColumn(), TextColumn("{task.description}")) as progress:
        progress.add_task("writing the report")
        try:
            content = page(runs, workload=workload, slo=slo, digest=digest, survey_notes=survey_notes)
            with replacing(path) as file:
                file.write(content.encode())
        except OSError as error:
            fail(f"--report {path}: {error.strerror}", BROKEN)


def page(
    runs: Sequence[SimulationRun], *, workload: str, slo: Slo | None, digest: str, survey_notes: Sequence[str] = ()
) -> str:
    """Return the page of one or more runs of a workload. Only the first `RUNS_MAX` are shown, with a note.

    `digest` is the hash of all decisions, equal for equal runs. `survey_notes` say how the workload was read.
    """
    import jinja2  # noqa: PLC0415 - a simulation without a report does not wait for it

    shown = measured(runs[:RUNS_MAX], slo)
    found = [*survey_notes, *findings(shown)]
    if len(runs) > RUNS_MAX:
        found.append(f"The report shows the first {RUNS_MAX} of {len(runs)} runs.")
    kept = limits(shown, slo or Slo())
    attained = list(attainment(shown, kept)) if any(one.ttft_ms for one in shown) else []
    charts = [*over_time(shown), *loads(shown)]
    data = {
        "charts": {chart.id: chart for chart in (*attained, *charts)},
        "labels": [one.label for one in shown],
        "limits": {**kept, "e2e": duration(slo.e2e_ms) if slo and slo.e2e_ms else ""},
    }
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader("forebay.cli.simulate", "report"), jinja2.PackageLoader("forebay.console", "static")]
        ),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        # Unprintable characters are escaped, such as marks that reverse the text direction.
        finalize=lambda value: printable(value) if type(value) is str else value,
        keep_trailing_newline=True,
    )
    return environment.get_template("page.html").render(
        title=TITLE,
        heading=headline(shown, slo),
        subject=_subject(shown, workload),
        findings=found,
        runs=shown,
        metrics=metric_rows(shown),
        slo=slo_text(slo) if slo else "",
        attained=attained,
        charts=charts,
        notes=notes(shown),
        settings=msgspec.json.format(msgspec.json.encode(settings_shown(shown)), indent=2).decode().splitlines(),
        digest=digest,
        data=b64encode(zlib.compress(msgspec.json.encode(data), 9)).decode(),
    )


def _subject(runs: Sequence[Measured], workload: str) -> str:
    """Return a summary of workload and fleet in one line."""
    counts = sorted({one.requests for one in runs})
    fleets = list(dict.fromkeys(_fleet(one) for one in runs))
    span = duration(max(one.span_s for one in runs) * 1e3)
    requests = f"{counts[0]:,}" if len(counts) == 1 else f"{counts[0]:,} to {counts[-1]:,}"
    fleet = fleets[0] if len(fleets) == 1 else "fleets of different sizes"
    return f"{workload}: {requests} requests in {span} of simulated time, {fleet}"


def _fleet(one: Measured) -> str:
    kinds: Counter[tuple[str, str]] = Counter()
    for pool in one.run.settings.pools:
        role = "" if pool.role == "aggregated" else f"{pool.role} "
        for group in pool.groups:
            cache = f"{group.engine.kv_blocks_total:,} blocks of {group.engine.block_size} tokens"
            kinds[role, f"{group.profile}, {cache}"] += group.count
    return " and ".join(f"{count} {role}worker{'s' * (count > 1)} ({kind})" for (role, kind), count in kinds.items())
