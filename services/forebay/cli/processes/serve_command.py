"""Options of `forebay serve`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.cluster_options import MetricsPortOption
from forebay.workers.service import PROCESSES_MAX


def serve(
    context: typer.Context,
    service: Annotated[str, typer.Argument(metavar="FILE.py:Class", help="Class decorated with @service.")],
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=PROCESSES_MAX,
            help="Number of worker processes. Default: the number that the service class declares.",
        ),
    ] = None,
    worker_id_prefix: Annotated[
        str, typer.Option(help="Prefix of the worker ids; a number follows. Default: host name and process id.")
    ] = "",
    metrics_port: MetricsPortOption = None,
) -> None:
    """Run the workers of a service class, one process per worker.

    Other options are passed to `forebay worker`.
    """
    from forebay.cli.processes.serve import run_serve  # noqa: PLC0415

    run_serve(
        context=context, service=service, workers=workers, worker_id_prefix=worker_id_prefix, metrics_port=metrics_port
    )
