"""`forebay simulate --report`: what came of a workload under several policies, as one page to look at."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import SpinnerColumn, TextColumn

from forebay.cli.common.page_file import require_writable, write
from forebay.cli.common.terminal import bar
from forebay.cli.simulate.simulations import Run
from forebay.simulate.slo import Slo

OPTION = "--report"
TITLE = "forebay simulate"

ReportOption = Annotated[
    Path | None, typer.Option(OPTION, dir_okay=False, help="Write a page to look at, which needs nothing else.")
]


def require_report(path: Path) -> None:
    """Refuse, before anything is simulated, a path where no report can go. Raises typer.Exit."""
    require_writable(OPTION, path, TITLE)


def write_report(
    path: Path, runs: Sequence[Run], *, workload: str, slo: Slo | None, digest: str, said: Sequence[str] = ()
) -> None:
    """Write the page of these runs of one workload, at least one; `said` is what was noted as the workload was read.

    Raises typer.Exit.
    """
    from forebay.cli.simulate.report.page import page  # noqa: PLC0415 - plotly takes a second, which only pages are worth

    with bar(SpinnerColumn(), TextColumn("{task.description}")) as progress:
        progress.add_task("writing the report")
        write(OPTION, path, lambda: page(runs, workload=workload, slo=slo, digest=digest, said=said))
