"""`forebay index`: what a group's owner knows of its workers' caches."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, get_args

import msgspec
import typer
from rich.progress import Progress, TaskID

from forebay.cli.common.cluster import NAMESPACE, KafkaSource, NamespaceOption, PropertiesOption
from forebay.cli.common.errors import explained, fail
from forebay.cli.common.recording import LogArgument, Recording
from forebay.cli.common.terminal import bar
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.base import U64_BYTES
from forebay.events.kv import BlocksStored, Tier
from forebay.events.snapshots import IndexBlocks
from forebay.events.topics import DECISIONS
from forebay.live.router.standby import Standby

app = typer.Typer(help="What workers have cached, as the log says.", no_args_is_help=True)

EVENT_HASHES_MAX = 8_192  # some 90 kB a line
LOOK_S = 0.2  # between two looks at how far it is
TIERS: tuple[Tier, ...] = get_args(Tier)


@app.callback()
def _root() -> None:
    """What workers have cached, as the log says."""


@app.command("dump")
def dump(
    log: LogArgument = None,
    kafka: KafkaSource = None,
    namespace: NamespaceOption = NAMESPACE,
    kafka_config: PropertiesOption = None,
    group: Annotated[str, typer.Option(help="The model whose index is printed, if there are several.")] = "",
    worker: Annotated[str, typer.Option(help="Only what this worker has.")] = "",
) -> None:
    """Print the prefix index at the journal's end as `kv.blocks_stored` events, one JSON object a line.

    They are in the JSON form of the topic `kv-events` (hashes are base64 of little-endian u64), and number the events
    of each rank from 1 on: applied to an empty index they give this one again.
    """
    recording = Recording(log, kafka, namespace, kafka_config, group)
    recording.require_one_source()
    with explained():
        with bar() as progress:
            index = asyncio.run(_index_of(recording, progress, progress.add_task("following the journal", total=None)))
        names = sorted({name for name, _ in index.holders()})
        if worker and worker not in names:
            fail(f"there is no worker {worker}; there are {', '.join(names) or 'none'}")
        for event in stored_events(index, worker):
            typer.echo(msgspec.json.encode(event))


async def _index_of(recording: Recording, progress: Progress, task: TaskID) -> PrefixIndex:
    """The index as recovery would find it."""
    async with recording.opened() as (log, partition):
        end = await log.end(DECISIONS.name, partition)
        standby = Standby(log, partition)
        following = asyncio.create_task(standby.catch_up(end))
        while not following.done():
            progress.update(task, completed=standby.position, total=end)
            await asyncio.wait([following], timeout=LOOK_S)
        await following
    return standby.world.index


def stored_events(index: PrefixIndex, worker: str = "") -> Iterator[BlocksStored]:
    """All that an index holds, or of one worker: by worker, rank and tier, each as the index has it in order."""
    parts = [part for part in index.snapshot() if isinstance(part, IndexBlocks) and worker in ("", part.worker_id)]
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
