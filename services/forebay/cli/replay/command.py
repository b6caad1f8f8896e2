"""Options of `forebay replay`. The code is imported when a command runs, so that --help does not wait for it."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import GroupOption, KafkaSource, Recording
from forebay.cli.common.unverified import allow_option
from forebay.cli.policies.allowed import AllowPolicyOption
from forebay.cli.policies.alternative import AlternativeOptions
from forebay.cli.policies.pool_rules import PoolRuleOptions
from forebay.replay.checks import FOREIGN_RECORDS, UNKNOWN_EVENTS, UNREAD_FIELDS, UNVERIFIED

DIFF_CHECKS = (FOREIGN_RECORDS, UNREAD_FIELDS, UNKNOWN_EVENTS)  # checks that `replay diff` may skip

app = typer.Typer(help="Verify, explain and compare recorded decisions.", no_args_is_help=True)


@app.callback()
def _root() -> None:
    """Verify, explain and compare recorded decisions."""


@app.command("explain")
@spread
def explain(
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOG] REQUEST",
            help="LOG: log file of `forebay up` (may be in use) or recording; omit with --kafka. REQUEST: its ID.",
        ),
    ],
    source: KafkaSource,
    group: GroupOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Show every candidate, not only the cheapest.")] = False,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Show a request's timeline: every routing decision with all costs, its reason, and the outcome.

    Every decision is derived again and compared with the journal. Exits 1 if the journal diverges before the request's
    end.
    """
    from forebay.cli.replay.explain import run_explain  # noqa: PLC0415

    run_explain(where=where, source=source, group=group, everything=everything, allow_policy=allow_policy, json=json)


@app.command("at")
@spread
def at(
    recording: Recording,
    time: Annotated[
        str,
        typer.Option(
            help="Time on the owner's clock: 2026-01-31T12:00:00Z, 12:30 that day, -5m before the end, or microseconds."
        ),
    ] = "",
    offset: Annotated[int | None, typer.Option(min=0, help="Offset of a record of the journal `decisions`.")] = None,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print the complete state as one JSON object.")] = False,
) -> None:
    """Show a group's state at a time, or right after a journal record, by default the last one."""
    from forebay.cli.replay.at import run_at  # noqa: PLC0415

    run_at(recording=recording, time=time, offset=offset, allow_policy=allow_policy, json=json)


@app.command("export")
def export(
    log: Annotated[
        Path, typer.Argument(metavar="LOG", help="Log file of `forebay up` (may be in use) or a recording.")
    ],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Output directory, new or empty.")],
    token_ids: Annotated[
        bool, typer.Option("--token-ids", help="Include the token IDs of prompts and responses.")
    ] = False,
) -> None:
    """Write every topic as newline-delimited JSON, one file per topic, with DuckDB views."""
    from forebay.cli.replay.export import run_export  # noqa: PLC0415

    run_export(log=log, folder=folder, token_ids=token_ids)


@app.command("diff")
@spread
def diff(
    other_options: AlternativeOptions,
    rule_options: PoolRuleOptions,
    recording: Recording,
    start: Annotated[
        str,
        typer.Option("--from", metavar="TIME", help="Compare decisions from this time on; a time as in `replay at`."),
    ] = "",
    end: Annotated[str, typer.Option("--to", metavar="TIME", help="Compare decisions before this time.")] = "",
    allow: Annotated[list[str] | None, allow_option(DIFF_CHECKS)] = None,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Compare a recorded history with another configuration: which requests move, and the effect on caches and load.

    Open loop: the alternative receives the recorded events, including KV events. Exits 1 if history itself cannot be
    verified.
    """
    from forebay.cli.replay.diff import run_diff  # noqa: PLC0415

    run_diff(
        other_options=other_options,
        rule_options=rule_options,
        recording=recording,
        window=(start, end),
        allow=allow,
        allow_policy=allow_policy,
        json=json,
    )


@app.command("verify")
@spread
def verify(
    recording: Recording,
    allow: Annotated[list[str] | None, allow_option(UNVERIFIED)] = None,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Derive every routing and scaling decision again. Exits 1 if a decision differs from the recorded one.

    A part of the journal that owners with other decision rules wrote is named with the version that can verify it.
    Exits 3 if there is no other part.
    """
    from forebay.cli.replay.verify_log import run_verify  # noqa: PLC0415

    run_verify(recording=recording, allow=allow, allow_policy=allow_policy, json=json)
