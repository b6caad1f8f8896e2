"""`forebay verify`: derive the decisions of a recorded log again."""

import asyncio
from collections.abc import Set

import click
import msgspec

from forebay.cli.common.errors import OTHER_RULES, complain, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import own_stdout
from forebay.cli.common.unverified import DIVERGED, allowed_of, complaint, exit_code
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.command import VerifyCommand
from forebay.cli.replay.verify import show, shown_progress
from forebay.core.routing.policies import CustomPolicies
from forebay.core.world import CORE_VERSION
from forebay.events.topics import DECISIONS
from forebay.replay.checks import UNVERIFIED
from forebay.replay.policies import require_allowed
from forebay.replay.scaling.journal import has_scaling
from forebay.replay.verify.verify import OnProgress, VerifyReport, include_scaling, verify
from forebay.transport.history.groups import groups_of
from forebay.transport.history.release import rules_text
from forebay.transport.sqlite.log import SqliteLog


def run_verify(options: VerifyCommand) -> None:
    options.recording.require_one_source()
    allowed = allowed_of(options.allow, UNVERIFIED)
    with explained():
        custom = allowed_policies(options.allow_policy)
    with explained(), shown_progress() as on_progress, own_stdout():
        report = asyncio.run(_verify(options.recording, on_progress, allowed, custom))
    if options.json:
        click.echo(msgspec.json.encode(report).decode())
    else:
        show(report)
    if report.diverged:
        raise click.exceptions.Exit(DIVERGED)
    if report.failed:
        complain(complaint(report.failed, report.unknown_event))
        raise click.exceptions.Exit(exit_code(report.failed))
    if report.is_empty:
        versions = " and ".join(sorted({rules_text(span.rules, span.release) for span in report.others}))
        complain(
            f"nothing was verified: this program has version {CORE_VERSION} of the rules, the journal was decided by"
            f" {versions}; run `verify` of a forebay with that version"
        )
        raise click.exceptions.Exit(OTHER_RULES)


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
