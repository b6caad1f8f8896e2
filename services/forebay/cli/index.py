"""`forebay index`: the prefix index of a group, restored from the log."""

import asyncio

import click
import msgspec
from rich.progress import Progress, TaskID

from forebay.cli.command import IndexCommand
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import Recording
from forebay.cli.common.tables import bar
from forebay.cli.policies.allowed import allowed_policies
from forebay.core.routing.policies import CustomPolicies
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.names import unknown_name
from forebay.events.topics import DECISIONS
from forebay.live.indexer.dump import stored_events
from forebay.live.standby import Standby

LOOK_S = 0.2  # seconds between updates of the progress bar


def run_dump(options: IndexCommand) -> None:
    recording = options.recording
    recording.require_one_source()
    with explained():
        custom = allowed_policies(options.allow_policy)
        with bar() as progress:
            task = progress.add_task("following the journal", total=None)
            index = asyncio.run(_index_of(recording, progress, task, custom))
        names = sorted({name for name, _ in index.holders()})
        if options.worker and options.worker not in names:
            fail(f"{recording.name}: {unknown_name('worker', options.worker, names)}")
        for event in stored_events(index, options.worker):
            click.echo(msgspec.json.encode(event))


async def _index_of(recording: Recording, progress: Progress, task: TaskID, custom: CustomPolicies) -> PrefixIndex:
    """Return the prefix index that a new owner would restore from the log."""
    async with recording.opened(custom) as (log, partition):
        end = await log.end(DECISIONS.name, partition)
        standby = Standby(log, partition, custom=custom)
        following = asyncio.create_task(standby.catch_up(end))
        while not following.done():
            progress.update(task, completed=standby.position, total=end)
            await asyncio.wait([following], timeout=LOOK_S)
        await following
    return standby.world.index
