"""Options of `forebay console`. The code is imported when a command runs, so that --help does not wait for it."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import Recording
from forebay.cli.policies.allowed import AllowPolicyOption

PORT = 8100


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleOptions:
    port: Annotated[int, typer.Option(min=1, max=65535, help="HTTP port.")] = PORT
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1"
    allow_host: Annotated[
        list[str] | None, typer.Option(help="Additional allowed value of the Host header. Repeatable.")
    ] = None
    ssl_certfile: Annotated[Path | None, typer.Option(help="Serve HTTPS with this certificate, a PEM file.")] = None
    ssl_keyfile: Annotated[
        Path | None, typer.Option(help="Private key of the certificate. Default: the key in --ssl-certfile.")
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(
            help="File with the token that clients must send. Default: environment variable FOREBAY_CONSOLE_TOKEN, or a"
            " random token."
        ),
    ] = None
    ingress: Annotated[
        str | None,
        typer.Option(metavar="URL", help="Ingress with an admin API, through which operators change the system."),
    ] = None
    cache_dir: Annotated[
        Path | None,
        typer.Option(help="Folder for the catalog. Default: the folder of LOG; with --kafka, the user's cache folder."),
    ] = None
    allow_policy: AllowPolicyOption = None


@spread
def console(recording: Recording, *, options: ConsoleOptions, logs: LoggingOptions) -> None:
    """Serve a web page that shows a log, live or at any moment of the past.

    The console follows the log and writes nothing to it. LOG may be the log of a running `forebay up`.
    """
    logs.start(("forebay.live", "forebay.transport"), has_access_log=False)
    from forebay.cli.console.run import run_console  # noqa: PLC0415

    run_console(recording, options)
