"""Options of `forebay top`. The code is imported when a command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import Recording
from forebay.cli.policies.allowed import AllowPolicyOption

URL = "http://127.0.0.1:8100"


@spread
def top(
    recording: Recording,
    url: Annotated[str, typer.Option(metavar="URL", help="URL of a console or an ingress.")] = URL,
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token of the console, or with an API key of the ingress. Default: environment variable"
            " FOREBAY_CONSOLE_TOKEN."
        ),
    ] = None,
    allow_policy: AllowPolicyOption = None,
) -> None:
    """Show workers and requests in the terminal, and explain requests.

    Without LOG and --kafka, the console at --url is read every second. An ingress has no list of requests, so with its
    address only workers are shown. With LOG or --kafka, child processes follow the log as those of `forebay console`
    do, and write the same catalog.
    """
    from forebay.cli.common.extras import require_extra  # noqa: PLC0415

    require_extra("console", "forebay top", "textual")
    from forebay.cli.top.run import run_top  # noqa: PLC0415

    run_top(recording=recording, url=url, token_file=token_file, allow_policy=allow_policy)
