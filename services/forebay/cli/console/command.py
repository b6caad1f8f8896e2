"""Command that serves a web page about a log."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

from forebay.cli.common.logs import LoggingOptions
from forebay.cli.common.options import Option
from forebay.cli.common.recording import Recording
from forebay.cli.policies.allowed import AllowPolicyOption

PORT = 8100


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsoleCommand:
    """Serve a web page that shows a log, live or at any moment of the past.

    The console follows the log and writes nothing to it. LOG may be the log of a running `forebay up`.
    """

    RUN: ClassVar = "console.run:run_console"

    recording: Recording
    port: Annotated[int, Option(min=1, max=65535, help="HTTP port.")] = PORT
    host: Annotated[str, Option(help="Address to listen on.")] = "127.0.0.1"
    allow_host: Annotated[list[str] | None, Option(help="Additional allowed value of the Host header. Repeatable.")] = (
        None
    )
    ssl_certfile: Annotated[Path | None, Option(help="Serve HTTPS with this certificate, a PEM file.")] = None
    ssl_keyfile: Annotated[
        Path | None, Option(help="Private key of the certificate. Default: the key in --ssl-certfile.")
    ] = None
    token_file: Annotated[
        Path | None,
        Option(
            help="File with the token that clients must send. Default: environment variable FOREBAY_CONSOLE_TOKEN, or a"
            " random token.",
            has_variable=False,  # FOREBAY_TOKEN_FILE names the token of the admin API
        ),
    ] = None
    ingress: Annotated[
        str | None,
        Option(
            "--url",
            metavar="URL",
            help="Ingress with an admin API, through which operators change the system.",
            has_variable=False,  # a variable for `status` must not attach a console of a recording to a live system
        ),
    ] = None
    cache_dir: Annotated[
        Path | None,
        Option(help="Folder for the catalog. Default: the folder of LOG; with --kafka, the user's cache folder."),
    ] = None
    allow_policy: AllowPolicyOption = None
    logs: LoggingOptions
