"""`forebay trace`: play a workload into a running system over HTTP, and report latencies, failures and pace."""

from typing import Annotated

import typer

from forebay.cli.common.api_key import ClientKeyOption, client_headers
from forebay.cli.common.errors import explained

URL = "http://127.0.0.1:8000"
CONCURRENCY_MAX = 4_000  # a system that falls behind delays the trace instead of exhausting sockets


def trace(
    workload: Annotated[str, typer.Argument(help="A file, or synthetic:SETTINGS. See docs/workloads.md.")],
    speed: Annotated[
        float,
        typer.Option(min=0.001, max=1e6, help="Divide the times between arrivals by this number. Think times stay."),
    ] = 1.0,
    url: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL", help="URL of the running system. Repeatable; the URLs share the requests.", show_default=URL
        ),
    ] = None,
    api_key: ClientKeyOption = None,
    duration_s: Annotated[
        float | None, typer.Option(min=0.001, help="Play only the first SECONDS of the workload.")
    ] = None,
    max_concurrency: Annotated[
        int, typer.Option(min=1, max=CONCURRENCY_MAX, help="Maximum number of requests in flight.")
    ] = CONCURRENCY_MAX,
    skip_bad_rows: Annotated[
        bool, typer.Option("--skip-bad-rows", help="Skip and count unusable rows instead of failing.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Play a recorded or synthetic workload into a running system.

    Exits 1 if a request failed, 2 if the system does not respond at the start. Ctrl-C prints the results so far and
    exits 130.
    """
    with explained():
        headers = client_headers(api_key)
    # Imported here, because --help should not wait for the HTTP client.
    from forebay.cli.trace.run import run_trace  # noqa: PLC0415
    from forebay.simulate.workload import WorkloadOptions  # noqa: PLC0415

    options = WorkloadOptions(speed=speed, duration_s=duration_s, skip_bad_rows=skip_bad_rows)
    run_trace(workload, options, [one.rstrip("/") for one in url or [URL]], headers, max_concurrency, json=json)
