"""HTML page of `forebay simulate --report`: texts, charts, and the data for its scripts."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.progress import SpinnerColumn, TextColumn

from forebay.cli.common.page import Chart, Part, render, require_writable, write
from forebay.cli.common.terminal import bar
from forebay.cli.simulate.report.charts import KINDS, TEMPLATE, LoadMap, charts
from forebay.cli.simulate.report.measures import Limits, Measured, limits, measured, quantile
from forebay.cli.simulate.report.rows import explored
from forebay.cli.simulate.report.words import (
    cards,
    duration,
    findings,
    headline,
    notes,
    settings_shown,
    slo_text,
    table,
)
from forebay.cli.simulate.simulations import SimulationRun
from forebay.simulate.outcome import EXPLAINED_MAX
from forebay.simulate.slo import Slo

RUNS_MAX = 12  # runs on one page; charts with more lines are unreadable
OPTION = "--report"
TITLE = "forebay simulate"
FOLDER = "simulate/report"


def require_report(path: Path) -> None:
    """Check, before anything is simulated, that the report can be written to `path`. Raises typer.Exit if not."""
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
    """Write the report. The arguments are those of `page`. Raises typer.Exit if the file cannot be written."""
    with bar(SpinnerColumn(), TextColumn("{task.description}")) as progress:
        progress.add_task("writing the report")
        write(OPTION, path, lambda: page(runs, workload=workload, slo=slo, digest=digest, survey_notes=survey_notes))


def page(
    runs: Sequence[SimulationRun], *, workload: str, slo: Slo | None, digest: str, survey_notes: Sequence[str] = ()
) -> str:
    """Return the page. Only the first `RUNS_MAX` runs are shown, with a note on the page.

    Args:
        runs: finished simulations of one workload, at least one.
        slo: latency limits; None if there are none.
        digest: hash of all decisions, equal for equal runs.
        survey_notes: remarks on how the workload was read.
    """
    shown = measured(runs[:RUNS_MAX])
    kept = limits(shown, slo)
    heats = [LoadMap.of(one.run.outcome) for one in shown]
    rows = explored(shown)
    found = [*survey_notes, *findings(shown)]
    if len(runs) > RUNS_MAX:
        found.append(f"The report shows the first {RUNS_MAX} of {len(runs)} runs.")
    subject = _subject(shown, workload)
    settings = msgspec.json.format(msgspec.json.encode(settings_shown(shown)), indent=2).decode()
    of_runs = Part(kind=TEMPLATE, title="runs", items=found, rows=table(shown), values=cards(shown, slo), text=subject)
    explorer = Part(kind=TEMPLATE, title="explorer", values=(len(rows["rows"]), rows["of"], shown))
    end = Part(kind=TEMPLATE, title="end", items=settings.splitlines(), text=digest)
    parts: list[Part | Chart] = [
        of_runs,
        *charts(shown, kept, heats, slo_text(slo) if slo else ""),
        explorer,
        Part(kind="notes", title="Definitions of the metrics", items=notes(shown)),
        end,
    ]
    return render(
        f"{TITLE}: {subject}",
        parts,
        heading=headline(shown, slo),
        data=_data(shown, slo, kept, heats, rows),
        style=f"{FOLDER}/report.css",
        scripts=[f"{FOLDER}/explorer.js", f"{FOLDER}/report.js"],
    )


def _data(
    runs: Sequence[Measured], slo: Slo | None, kept: Limits, heats: Sequence[LoadMap], rows: dict[str, Any]
) -> dict[str, Any]:
    slo = slo or Slo()
    return {
        "labels": [one.label for one in runs],
        "colours": [one.colour for one in runs],
        "limits": {
            "ttft": kept.ttft_ms,
            "itl": kept.itl_ms,
            "kept": [[[*key, count] for key, count in sorted(of_run.items())] for of_run in kept.kept],
            "requests": [one.requests for one in runs],
            "span_s": [one.span_s for one in runs],
            "ttft_at": _nearest(kept.ttft_ms, slo.ttft_ms, [one.ttft_ms for one in runs]),
            "itl_at": _nearest(kept.itl_ms, slo.itl_ms, [one.itl_ms for one in runs]),
            "e2e": "" if slo.e2e_ms is None else duration(slo.e2e_ms),
        },
        "heat": [{kind: heat.values[kind] for kind in KINDS} for heat in heats if heat.rows],
        "explained": EXPLAINED_MAX,
        "explorer": rows,
    }


def _nearest(limits_ms: Sequence[float], given_ms: float | None, values: Sequence[Sequence[float]]) -> int:
    """Return the index of the given limit, or of one that 90 % of the requests of the best run meet."""
    wanted_ms = given_ms or min((quantile(some, 0.9) for some in values if some), default=0.0)
    return next((at for at, limit in enumerate(limits_ms) if limit >= wanted_ms), len(limits_ms) - 1)


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
        for group in pool.groups:
            engine = group.engine
            role = "" if pool.role == "aggregated" else f"{pool.role} "
            kinds[role, f"{group.profile}, {engine.kv_blocks_total:,} blocks of {engine.block_size} tokens"] += (
                group.count
            )
    return " and ".join(f"{count} {role}worker{'s' * (count > 1)} ({kind})" for (role, kind), count in kinds.items())
