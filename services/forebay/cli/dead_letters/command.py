"""Options of `forebay dead-letters`. The code is imported when a command runs, so that --help does not wait for it."""

from typing import Annotated

import typer

from forebay.cli.common.errors import fail
from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import KafkaSource, LogArgument
from forebay.cli.common.times import TIMES_HELP

app = typer.Typer(
    help="List records that did not decode or were rejected, and retry them.",
    no_args_is_help=True,
)

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object per letter on stdout.")]


@app.command("list")
@spread
def list_letters(
    source: KafkaSource,
    log: LogArgument = None,
    letter: Annotated[
        str, typer.Option(metavar="LETTER", help="Show only this letter, with its record, as PARTITION/OFFSET.")
    ] = "",
    topic: Annotated[str, typer.Option(help="Only records of this topic.")] = "",
    reason: Annotated[str, typer.Option(metavar="TEXT", help="Only letters whose reason contains TEXT.")] = "",
    start: Annotated[str, typer.Option("--from", metavar="TIME", help=f"Only letters since TIME: {TIMES_HELP}.")] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Only letters before TIME.")] = "",
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="Print the newest N letters.")] = 50,
    json: JsonOption = False,
) -> None:
    """List dead letters, newest first, or show one with its record, and whether it can be retried."""
    from forebay.cli.dead_letters.run import run_list, run_show  # noqa: PLC0415

    if letter:
        if topic or reason or start or end:
            fail("--letter shows one letter; omit --topic, --reason, --from and --to")
        run_show(source=source, log=log, letter=letter, json=json)
    else:
        run_list(source=source, log=log, topic=topic, reason=reason, start=start, end=end, limit=limit, json=json)


@app.command("retry")
@spread
def retry(
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOG] LETTER",
            help="LOG: log file of `forebay up`; omit with --kafka. LETTER: PARTITION/OFFSET, as `list` prints it.",
        ),
    ],
    source: KafkaSource,
    json: JsonOption = False,
) -> None:
    """Append the record of a dead letter to its topic again, if it decodes in this version.

    The letter is marked as retried, and cannot be retried a second time. The records of some topics are never appended
    again, because they are stale. Stop `forebay up` before you retry a letter of its log file. Exits 1 if the letter is
    refused.
    """
    from forebay.cli.dead_letters.run import run_retry  # noqa: PLC0415

    run_retry(where=where, source=source, json=json)
