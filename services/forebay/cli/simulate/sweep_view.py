"""A sweep as people read it: a line a run, and as a file for a spreadsheet."""

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from forebay.cli.common.terminal import in_markup, printable, results
from forebay.simulate.pareto import costs

TIMES = {"TTFT": ("ttft_ms", ".0f"), "ITL": ("itl_ms", ".1f")}
SHOWN = ("p50", "p90", "p99")
COLUMNS_MAX = 10_000  # of characters: more than any table has
STEPS_SHOWN_MAX = 20  # searches whose steps are printed; --json has all

Figures = Mapping[str, Any]


def show(name: str, result: Figures) -> None:
    """The table, what is cheapest and, of searches, what was tried."""
    runs: Sequence[Figures] = result["runs"]
    searched = any("capacity" in run for run in runs)
    promised = result["settings"]["slo"] is not None
    varied = list(dict.fromkeys(setting for run in runs for setting in run["set"]))
    title = f"{name}; * is Pareto-optimal in {', '.join(result['objectives'])}; milliseconds as {'/'.join(SHOWN)}"
    table = Table(title=in_markup(title), box=SIMPLE, padding=(0, 0, 0, 1))
    columns = ["", "policy", *varied]
    columns += ["requests/s", "speed"] if searched else []
    columns += ["GPU-h", "failed", "reuse", "max/mean", *TIMES]
    columns += ["SLO kept", "goodput/s"] if promised else []
    for column in columns:
        table.add_column(in_markup(column), justify="left" if column in ("", "policy") else "right", no_wrap=True)
    for run in runs:
        cells = ["*" if run["pareto"] else "", run["policy"], *(run["set"].get(setting, "-") for setting in varied)]
        cells += _rate(run["capacity"]) if searched else []
        cells += [f"{run['gpu_hours']:.4g}", str(run["failed"])]
        cells += [f"{run['prefix_reuse']:.4f}", f"{run['load_max_over_mean']:.3f}"]
        cells += ["/".join(f"{run[key][of]:{width}}" for of in SHOWN if run[key]) for key, width in TIMES.values()]
        cells += [f"{run['attained']:.2%}", f"{run['goodput_per_s']:.3f}"] if promised else []
        table.add_row(*map(in_markup, cells))
    # Lines of a narrow terminal go on in the next one: figures that are cut say nothing.
    width = Console(width=COLUMNS_MAX).measure(table).maximum
    Console(width=max(results().width, width), highlight=False).print(table)
    for line in _said(result, searched):
        typer.echo(printable(line))
    typer.echo(f"digest {result['digest']}")


def as_csv(runs: Sequence[Figures]) -> str:
    """A line a run: what was varied, then every figure by its path; lists have no column."""
    rows = [dict(_flat(run)) for run in runs]
    columns = list(dict.fromkeys(column for row in rows for column in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def keeping(runs: Sequence[Figures], dead: Sequence[Figures], attain: float) -> dict[str, list[Figures]]:
    """The settings whose runs, one for each seed, all keep the promise, by their name without a seed.

    None of those with a run that is `dead`.
    """
    found: dict[str, list[Figures]] = {}
    for run in runs:
        found.setdefault(_unseeded(run), []).append(run)
    broken = {_unseeded(run) for run in dead}
    return {
        name: of for name, of in found.items() if name not in broken and all(run["attained"] >= attain for run in of)
    }


def _unseeded(run: Figures) -> str:
    return ", ".join([run["policy"], *(f"{name}={value}" for name, value in run["set"].items() if name != "seed")])


def _flat(figures: Figures, path: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}{name}.")
        elif not isinstance(value, list | tuple):
            yield path + name, value


def _rate(capacity: Figures) -> tuple[str, str]:
    """Requests a second, and the speed that is."""
    step = capacity["step"]
    if step is None:
        return "none", "-"
    at_least = ">= " if capacity["answer"] == "always" else ""
    return f"{at_least}{step['requests_per_s']:.4g}", f"{step['speed']:.4g}"


def _said(result: Figures, searched: bool) -> Iterator[str]:
    """Sentences below the table."""
    runs: Sequence[Figures] = result["runs"]
    attain = result["settings"]["attain"]
    if searched:
        yield "taken for granted: what keeps the promise at a rate keeps it at every lower one"
        for run in runs[:STEPS_SHOWN_MAX]:
            tried = ", ".join(
                f"{step['requests_per_s']:.4g}/s {step['attained']:.2%}{'' if step['holds'] else ' (not kept)'}"
                for step in run["capacity"]["steps"]
            )
            odd = "" if run["capacity"]["monotone"] else "; more was kept at a higher rate than at a lower one"
            yield f"{run['name']}: tried {tried}{odd}"
    elif attain is not None:
        seeded = any("seed" in run["set"] for run in runs)
        kept = keeping(runs, result["dead"], attain)
        if kept:
            # A seed is nothing to choose: what counts is how bad it can come.
            cheapest = min(kept, key=lambda name: max(costs(run, ["gpu_hours"]) for run in kept[name]))
            seeds = len(kept[cheapest])
            worst = f", with each of {seeds} seeds" if seeds > 1 else ""
            yield f"cheapest that keeps the promise to {attain:.2%}{worst}: {cheapest}"
        else:
            yield f"no run keeps the promise to {attain:.2%} of the requests{' with every seed' if seeded else ''}"
