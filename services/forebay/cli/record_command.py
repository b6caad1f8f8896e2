"""Options of `forebay record`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import KafkaSource
from forebay.cli.common.times import TIMES_HELP
from forebay.cli.policies.allowed import AllowPolicyOption


@spread
def record(
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOG] OUT", help="LOG: log file or recording; omit with --kafka. OUT: the new recording."
        ),
    ],
    kafka: KafkaSource,
    start: Annotated[
        str, typer.Option("--from", metavar="TIME", help=f"Record decisions from this time on: {TIMES_HELP}.")
    ] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Record decisions before this time.")] = "",
    last: Annotated[
        str,
        typer.Option(
            "--last",
            metavar="DURATION",
            help="Record only the most recent DURATION up to the newest decision, for example 90s, 5m or 2h.",
        ),
    ] = "",
    group: Annotated[list[str] | None, typer.Option(help="Record this model. Repeatable. Default: all models.")] = None,
    check: Annotated[
        bool, typer.Option("--verify/--no-verify", help="Derive the recorded decisions again and compare them.")
    ] = True,
    anonymize: Annotated[
        bool, typer.Option("--anonymize", help="Remove client content; every decision stays the same.")
    ] = False,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Record a slice of a log into OUT, including everything needed to derive its decisions again.

    The same command resumes an interrupted recording; an anonymised one starts again. Exits 1 if a decision cannot be
    derived again; the recording is kept for analysis.
    """
    from forebay.cli.record import run_record  # noqa: PLC0415

    run_record(
        where=where,
        kafka=kafka,
        start=start,
        end=end,
        last=last,
        group=group,
        check=check,
        anonymize=anonymize,
        allow_policy=allow_policy,
        json=json,
    )
