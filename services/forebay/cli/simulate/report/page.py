"""HTML page of `forebay simulate --report`: texts, charts, and the data for its scripts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import msgspec
from rich.progress import SpinnerColumn, TextColumn

from forebay.cli.common.page import Chart, Part, render, require_writable, write
from forebay.cli.common.terminal import bar
from forebay.cli.simulate.report.charts import attainment, loads, over_time
from forebay.cli.simulate.report.measures import Measured, limits, measured
from forebay.cli.simulate.report.words import (
    duration,
    findings,
    headline,
    metrics_table,
    notes,
    settings_shown,
    slo_text,
)
from forebay.cli.simulate.simulations import SimulationRun
from forebay.simulate.slo import Slo

RUNS_MAX = 12  # runs on one page; charts with more lines are unreadable
OPTION = "--report"
TITLE = "forebay simulate"
FOLDER = "simulate/report"
TEMPLATE = f"{FOLDER}/report.html"


def require_report(path: Path) -> None:
    """Check, before anything is simulated, that the report can be written to `path`. Otherwise the command ends."""
    require_writable(OPTION, path, TITLE)


def write_report(
    path: Path,
    runs: Sequence[SimulationRun],
    *,
    workload: str,
    slo: Slo | None,
    digest: str,
    survey_notes: Sequence[str] = (),
) -> None:
    """Write the report. The arguments are those of `page`. A file that cannot be written ends the command."""
    with bar(SpinnerColumn(), TextColumn("{task.description}")) as progress:
        progress.add_task("writing the report")
        write(OPTION, path, lambda: page(runs, workload=workload, slo=slo, digest=digest, survey_notes=survey_notes))


def page(
    runs: Sequence[SimulationRun], *, workload: str, slo: Slo | None, digest: str, survey_notes: Sequence[str] = ()
) -> str:
    """Return the page of one or more runs of a workload. Only the first `RUNS_MAX` are shown, with a note.

    `digest` is the hash of all decisions, equal for equal runs. `survey_notes` say how the workload was read.
    """
    shown = measured(runs[:RUNS_MAX], slo)
    found = [*survey_notes, *findings(shown)]
    if len(runs) > RUNS_MAX:
        found.append(f"The report shows the first {RUNS_MAX} of {len(runs)} runs.")
    subject = _subject(shown, workload)
    parts: list[Part | Chart] = [
        Part(kind=TEMPLATE, title="runs", text=subject, items=found, values=shown),
        metrics_table(shown),
    ]
    kept = limits(shown, slo or Slo())
    if any(one.ttft_ms for one in shown):
        parts += [Part(kind=TEMPLATE, title="limits", text=slo_text(slo) if slo else "", values=shown)]
        parts += attainment(shown, kept)
    settings = msgspec.json.format(msgspec.json.encode(settings_shown(shown)), indent=2).decode()
    parts += [
        *over_time(shown),
        *loads(shown),
        Part(kind="notes", title="Definitions of the metrics", items=notes(shown)),
        Part(kind=TEMPLATE, title="end", items=settings.splitlines(), text=digest),
    ]
    return render(
        f"{TITLE}: {subject}",
        parts,
        heading=headline(shown, slo),
        colours={one.label: one.colour for one in shown},
        data={
            "labels": [one.label for one in shown],
            "limits": {**kept, "e2e": duration(slo.e2e_ms) if slo and slo.e2e_ms else ""},
        },
        style=f"{FOLDER}/report.css",
        scripts=[f"{FOLDER}/report.js"],
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
