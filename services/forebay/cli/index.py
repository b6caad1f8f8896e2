"""`forebay index`: the prefix index of a group, restored from the log."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import get_args

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
from forebay.events.base import U64_BYTES
from forebay.events.kv import BlocksStored, StoreBlocksAdded, Tier
from forebay.events.names import unknown_name
from forebay.events.snapshots import IndexBlocks, StoreBlocks
from forebay.events.topics import DECISIONS
from forebay.live.standby import Standby

EVENT_HASHES_MAX = 8_192  # about 90 kB per line
DUMPED = "index"  # stands for the workers that reported the blocks of shared stores, which the index does not keep
LOOK_S = 0.2  # seconds between updates of the progress bar
TIERS: tuple[Tier, ...] = get_args(Tier)


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


def stored_events(index: PrefixIndex, worker: str = "") -> Iterator[BlocksStored | StoreBlocksAdded]:
    """Yield the blocks of a prefix index as events, sorted by worker, rank and tier, in the order of the index.

    The blocks of shared stores follow those of workers, unless `worker` selects one worker.
    """
    found = [*index.snapshot()]
    parts = [part for part in found if isinstance(part, IndexBlocks) and worker in ("", part.worker_id)]
    parts.sort(key=lambda part: (part.worker_id, part.rank, TIERS.index(part.tier)))
    seqs: Counter[tuple[str, int]] = Counter()
    size = EVENT_HASHES_MAX * U64_BYTES
    for part in parts:
        for start in range(0, len(part.sequence_hashes), size):
            seqs[part.worker_id, part.rank] += 1
            yield BlocksStored(
                worker_id=part.worker_id,
                worker_epoch=part.worker_epoch,
                rank=part.rank,
                seq=seqs[part.worker_id, part.rank],
                sequence_hashes=part.sequence_hashes[start : start + size],
                tier=part.tier,
            )
    stores = [part for part in found if isinstance(part, StoreBlocks) and not worker]
    for blocks in sorted(stores, key=lambda part: part.store):
        for start in range(0, len(blocks.sequence_hashes), size):
            hashes = blocks.sequence_hashes[start : start + size]
            yield StoreBlocksAdded(store=blocks.store, worker_id=DUMPED, sequence_hashes=hashes)
