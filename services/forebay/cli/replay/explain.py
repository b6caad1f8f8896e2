"""`forebay explain`: timeline and routing decisions of one request."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import click
import msgspec

from forebay.cli.common.errors import OTHER_RULES, explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.terminal import bar, own_stdout
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.allowed import allowed_policies
from forebay.cli.replay.command import ExplainCommand
from forebay.cli.replay.explain_view import show
from forebay.core.routing.policies import CustomPolicies
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.replay.explain.find import OnProgress, UnknownRequest
from forebay.replay.policies import require_allowed


def run_explain(options: ExplainCommand) -> None:
    recording = options.source.recording(options.where, "REQUEST", options.group)
    with explained():
        custom = allowed_policies(options.allow_policy)
    with explained(), _shown_progress() as on_progress, own_stdout():
        try:
            explanation = asyncio.run(_explain(recording, options.where[-1], on_progress, custom))
        except UnknownRequest as unknown:
            fail(f"{recording.name}: {unknown}")
    if options.json:
        click.echo(msgspec.json.encode(explanation).decode())
    else:
        show(explanation, everything=options.everything)
    if explanation.divergence is not None:
        raise click.exceptions.Exit(DIVERGED)
    tell_unverified(explanation.unverified)
    if explanation.recorded and explanation.derived_to == explanation.derived_from:
        raise click.exceptions.Exit(OTHER_RULES)


async def _explain(
    recording: Recording, request_id: str, on_progress: OnProgress, custom: CustomPolicies
) -> Explanation:
    async with recording.opened() as (log, partition):
        await require_allowed(log, partition, custom)
        return await explain(log, partition, request_id, progress=on_progress, custom=custom)


@contextmanager
def _shown_progress() -> Iterator[OnProgress]:
    """Show on stderr how many journal records were read, if stderr is a terminal."""
    with bar() as progress:
        task = progress.add_task("searching the journal", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield on_progress
