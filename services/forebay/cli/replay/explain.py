"""`forebay replay explain`: one request's life, and why it went where it did."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from forebay.cli.common.cluster import NAMESPACE, KafkaSource, NamespaceOption, PropertiesOption
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import GroupOption, Recording
from forebay.cli.common.terminal import bar, own_stdout
from forebay.cli.common.unverified import DIVERGED, tell_unverified
from forebay.cli.policies.recorded import require_policies
from forebay.cli.replay.explain_view import show
from forebay.replay.explain.explain import Explanation, UnknownRequest, explain
from forebay.replay.explain.find import OnProgress


def explain_command(
    where: Annotated[
        list[str],
        typer.Argument(
            metavar="[LOG] REQUEST",
            help="A log file of `forebay up`, which may be in use, or a recording, unless --kafka; a request's id.",
        ),
    ],
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    group: GroupOption = "",
    everything: Annotated[bool, typer.Option("--all", help="Every candidate, not the cheapest ones.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """Tell a request's life: every choice made for it with every cost, why it fell so, and what became of it.

    All is derived again and compared with the journal; exit 1 where the journal diverges before the request's end.
    """
    if len(where) != (1 if kafka else 2):
        fail("give LOG and REQUEST, or REQUEST and --kafka")
    log = None if kafka else Path(where[0])
    recording = Recording(log, kafka, namespace, kafka_config, group)
    with explained(), _shown_progress() as on_progress, own_stdout():
        try:
            explanation = asyncio.run(_explain(recording, where[-1], on_progress))
        except UnknownRequest as unknown:
            fail(f"{recording.name}: {unknown}")
    if json:
        typer.echo(msgspec.json.encode(explanation).decode())
    else:
        show(explanation, everything=everything)
    if explanation.divergence is not None:
        raise typer.Exit(DIVERGED)
    tell_unverified(explanation.unverified)


async def _explain(recording: Recording, request_id: str, on_progress: OnProgress) -> Explanation:
    async with recording.opened() as (log, partition):
        await require_policies(log, partition)
        return await explain(log, partition, request_id, progress=on_progress)


@contextmanager
def _shown_progress() -> Iterator[OnProgress]:
    """Journal records done, on stderr if that is a terminal."""
    with bar() as progress:
        task = progress.add_task("looking through the journal", total=None)

        def on_progress(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total)

        yield on_progress
