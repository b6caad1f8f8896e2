"""`forebay simulate --report`: write the results of all policies to one HTML page."""

from collections.abc import Sequence
from pathlib import Path

from rich.progress import SpinnerColumn, TextColumn

from forebay.cli.common.page_file import require_writable, write
from forebay.cli.common.terminal import bar
from forebay.cli.simulate.simulations import SimulationRun
from forebay.simulate.slo import Slo

OPTION = "--report"
TITLE = "forebay simulate"


def require_report(path: Path) -> None:
    """Check, before anything is simulated, that the report can be written to `path`.

    Raises:
        typer.Exit: the report cannot be written.
    """
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
    """Write the report.

    Args:
        runs: finished simulations of one workload, at least one.
        slo: latency limits; None if there are none.
        digest: hash of all decisions, equal for equal runs.
        survey_notes: remarks on how the workload was read.

    Raises:
        typer.Exit: the file cannot be written.
    """
    from forebay.cli.simulate.report.page import page  # noqa: PLC0415 - plotly takes 1 s to import

    with bar(SpinnerColumn(), TextColumn("{task.description}")) as progress:
        progress.add_task("writing the report")
        write(OPTION, path, lambda: page(runs, workload=workload, slo=slo, digest=digest, survey_notes=survey_notes))
