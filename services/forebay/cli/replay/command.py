"""`forebay replay`: verify, explain and compare the decisions of a recorded log."""

import asyncio
from collections.abc import Set
from typing import Annotated

import msgspec
import typer

from forebay.cli.common.errors import complain, explained, fail
from forebay.cli.common.option_groups import spread
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED, allow_option, allowed_of, complaint, exit_code
from forebay.cli.policies.allowed import AllowPolicyOption, allowed_policies
from forebay.cli.replay import at as replay_at
from forebay.cli.replay import export as replay_export
from forebay.cli.replay.diff import diff_command
from forebay.cli.replay.explain import explain_command
from forebay.cli.replay.planner import planner_command
from forebay.cli.replay.verify import show, shown_progress
from forebay.core.routing.policies import CustomPolicies
from forebay.events.topics import DECISIONS
from forebay.replay.policies import require_allowed
from forebay.replay.scaling.journal import has_scaling
from forebay.replay.verify.verify import UNVERIFIED, OnProgress, VerifyReport, include_scaling, verify
from forebay.transport.history.groups import groups_of
from forebay.transport.sqlite.log import SqliteLog

app = typer.Typer(help="Verify, explain and compare recorded decisions.", no_args_is_help=True)
app.command("explain")(explain_command)
app.command("at")(replay_at.at)
app.command("export")(replay_export.export)
app.command("diff")(diff_command)
app.command("planner")(planner_command)


@app.callback()
def _root() -> None:
    """Verify, explain and compare recorded decisions."""


@app.command("verify")
@spread
def verify_command(
    recording: Recording,
    allow: Annotated[list[str] | None, allow_option(UNVERIFIED)] = None,
    allow_policy: AllowPolicyOption = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")] = False,
) -> None:
    """Derive every routing and scaling decision again. Exits 1 if a decision differs from the recorded one."""
    recording.require_one_source()
    allowed = allowed_of(allow, UNVERIFIED)
    with explained():
        custom = allowed_policies(allow_policy)
    with explained(), shown_progress() as on_progress, own_stdout():
        report = asyncio.run(_verify(recording, on_progress, allowed, custom))
    if json:
        typer.echo(msgspec.json.encode(report).decode())
    else:
        show(report)
    if report.diverged:
        raise typer.Exit(DIVERGED)
    if report.failed:
        complain(complaint(report.failed, report.unknown_event))
        raise typer.Exit(exit_code(report.failed))


async def _verify(
    recording: Recording, on_progress: OnProgress, allowed: Set[str], custom: CustomPolicies
) -> VerifyReport:
    async with recording.opened() as (log, partition):
        if isinstance(log, SqliteLog):
            log.check()
        await require_allowed(log, partition, custom)
        ends = [await of(DECISIONS.name, partition) for of in (log.begin, log.end)]
        if ends[0] == ends[1] and "" not in await groups_of(log) and not await has_scaling(log):
            fail(f"nothing to verify: the journal of control partition {partition} in {recording.name} is empty")
        report = await verify(log, partition, on_progress, allowed, custom)
        await include_scaling(log, report)
        return report
