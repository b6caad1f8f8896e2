"""`forebay trace`: play a workload into a running system over HTTP, and report latencies, failures and pace."""

from dataclasses import dataclass
from typing import Annotated, ClassVar

from forebay.cli.common.credentials import ClientKeyOption
from forebay.cli.common.options import Argument, JsonOption, Option

URL = "http://127.0.0.1:8000"
CONCURRENCY_MAX = 4_000  # a system that falls behind delays the trace instead of exhausting sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceCommand:
    """Play a recorded or synthetic workload into a running system.

    Exits 1 if a request failed, 2 if the system does not respond at the start. Ctrl-C prints the results so far and
    exits 130.
    """

    RUN: ClassVar = "trace.run:run_trace"

    workload: Annotated[str, Argument(help="A file, or synthetic:SETTINGS. See docs/workloads.md.")]
    speed: Annotated[
        float, Option(min=0.001, max=1e6, help="Divide the times between arrivals by this number. Think times stay.")
    ] = 1.0
    url: Annotated[
        list[str] | None,
        Option(
            metavar="URL", help="URL of the running system. Repeatable; the URLs share the requests.", default_text=URL
        ),
    ] = None
    api_key: ClientKeyOption = None
    duration_s: Annotated[float | None, Option(min=0.001, help="Play only the first SECONDS of the workload.")] = None
    max_concurrency: Annotated[
        int, Option(min=1, max=CONCURRENCY_MAX, help="Maximum number of requests in flight.")
    ] = CONCURRENCY_MAX
    skip_bad_rows: Annotated[
        bool, Option("--skip-bad-rows", help="Skip and count unusable rows instead of failing.")
    ] = False
    json: JsonOption = False
