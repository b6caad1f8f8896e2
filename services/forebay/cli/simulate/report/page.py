"""HTML page of `forebay simulate --report`: a self-contained file that loads nothing from the network.

`page.html` is the template. The page shares its style and uPlot, which draws the charts, with the page of `forebay
console`. Names chosen by users are always text, never markup: the template escapes them, scripts receive them as data
and insert text nodes, and the content security policy of the page blocks all external resources.
"""

import zlib
from base64 import b64encode
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.progress import SpinnerColumn, TextColumn

from forebay.analysis.runs import SimulationRun
from forebay.cli.common.errors import BROKEN, fail
from forebay.cli.common.tables import bar
from forebay.cli.common.terminal import printable
from forebay.cli.simulate.report.charts import attainment, loads, over_time
from forebay.cli.simulate.report.measures import Measured, limits, measured
from forebay.cli.simulate.report.words import duration, findings, headline, metric_rows, notes, settings_shown, slo_text
from forebay.simulate.slo import Slo

RUNS_MAX = 12  # runs on one page; charts with more lines are unreadable
TITLE = "forebay simulate"
HEAD_BYTES = 1024  # the first bytes of a report, which contain its title


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
    part = path.with_name(f"{path.name}.part")
    with bar(SpinnerColumn(), TextColumn("{task.description}")) as progress:
        progress.add_task("writing the report")
        try:
            content = page(runs, workload=workload, slo=slo, digest=digest, survey_notes=survey_notes)
            part.write_text(content, encoding="utf-8")
            part.replace(path)
        except OSError as error:
            fail(f"--report {path}: {error.strerror}", BROKEN)
        finally:
            part.unlink(missing_ok=True)


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
