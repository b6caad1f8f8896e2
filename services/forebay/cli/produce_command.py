"""Options of `forebay produce`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.cluster_options import KafkaOptions
from forebay.cli.common.errors import explained
from forebay.cli.common.option_groups import spread


@spread
def produce(
    file: Annotated[
        typer.FileBinaryRead, typer.Argument(help="JSON lines with one request body each; - for standard input.")
    ],
    kafka: KafkaOptions,
    wait: Annotated[bool, typer.Option("--wait", help="Print each response as a JSON line.")] = False,
    timeout_s: Annotated[float, typer.Option(min=0.001, help="Seconds to wait after the last request.")] = 600.0,
) -> None:
    """Send requests through the Kafka API. With --wait, exits 1 if a response is missing or an error.

    After Ctrl-C, or if Kafka fails, prints how many requests were sent and answered.
    """
    from forebay.cli.produce import run_produce  # noqa: PLC0415

    with explained():
        settings = kafka.settings()
    run_produce(file, settings, timeout_s if wait else None)
