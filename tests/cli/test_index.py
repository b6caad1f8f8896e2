"""`forebay index` prints the prefix index, including that of a log being written."""

import asyncio
from pathlib import Path
from typing import get_args

import msgspec
import pytest

from forebay.core.block_hashes import sequence_hashes
from forebay.core.state.prefix_index import PrefixIndex
from forebay.events.base import pack_u32, pack_u64, unpack_u64
from forebay.events.codec import decode, encode
from forebay.events.kv import AnyKvEvent, BlocksStored, StoreBlocksAdded, Tier
from forebay.events.topics import KV_EVENTS
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay
from tests.cli.up import forebay as process
from tests.system import BLOCK, System, submitted, until, until_ended

PROMPT = list(range(4 * BLOCK))
ON_DISK = list(range(1, 9_001))  # too many for one line
TIERS: tuple[Tier, ...] = get_args(Tier)


async def write(path: Path, *, dump_while_it_runs: bool = False) -> tuple[PrefixIndex, str]:
    """Write a log of two workers with cached blocks. Return its index and the dump made while it was written."""
    log = SqliteLog.open(path)
    printed = ""
    async with System(log).started(workers=2) as system:
        async with system.owned() as owner:
            await until(lambda: len(owner.world.fleet) == 2)
            system.send(submitted("a", PROMPT))
            await until_ended(system, "a")
            await until(lambda: not len(owner.world.requests))
            epoch = owner.world.fleet.workers()[0].worker_epoch
            seq = max(event.seq for event in [*system.events(KV_EVENTS), first(epoch)] if event.worker_id == "w0") + 1
            stored = BlocksStored(
                worker_id="w0", worker_epoch=epoch, seq=seq, sequence_hashes=pack_u64(ON_DISK), tier="disk"
            )
            log.append_soon([Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, stored))])
            await until(lambda: owner.world.index.blocks_held("w0", 0, "disk") == len(ON_DISK))
            for store in ("t", "s"):
                shared = StoreBlocksAdded(store=store, worker_id="w0", sequence_hashes=pack_u64(ON_DISK))
                log.append_soon([Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, shared))])
            await until(lambda: len(owner.world.index.stores.names) == 2)
            system.send(submitted("b", PROMPT))  # its decision ends the journal
            await until_ended(system, "b")
            await until(lambda: not len(owner.world.requests))
            if dump_while_it_runs:
                printed = (await asyncio.to_thread(process, "index", str(path))).stdout
        index = owner.world.index
    log.close()
    return index, printed


def first(epoch: int) -> BlocksStored:
    return BlocksStored(worker_id="w0", worker_epoch=epoch, seq=0, sequence_hashes=b"")


def applied(lines: str, like: PrefixIndex) -> PrefixIndex:
    """Return an index with the workers of `like` and the events of `lines`."""
    index = PrefixIndex()
    events = [msgspec.json.decode(line, type=AnyKvEvent) for line in lines.splitlines()]
    epochs = {(event.worker_id, event.rank): event.worker_epoch for event in events if isinstance(event, BlocksStored)}
    for worker_id, rank in like.holders():
        index.add_holder(worker_id, rank, epochs.get((worker_id, rank), 0))
        index.use_store(worker_id, "t" if worker_id == "w0" else "")
    for event in events:
        read = decode(KV_EVENTS, encode(KV_EVENTS, event))
        (index.apply_store if isinstance(read, StoreBlocksAdded) else index.apply)(read)
    assert not {"gap", "duplicate", "unknown_worker", "unknown_parent"} & set(index.counts)
    return index


def held(index: PrefixIndex) -> list[int]:
    return [index.blocks_held(worker_id, rank, tier) for worker_id, rank in index.holders() for tier in TIERS]


@pytest.mark.parametrize("while_it_runs", [False, True])
def test_the_printed_events_give_the_same_index(tmp_path: Path, *, while_it_runs: bool) -> None:
    path = tmp_path / "log.db"
    index, printed = asyncio.run(write(path, dump_while_it_runs=while_it_runs))
    if not while_it_runs:
        run = forebay("index", str(path))
        assert run.returncode == 0, run.stderr
        printed = run.stdout
    copy = applied(printed, index)
    assert held(copy) == held(index)
    assert copy.stores.sizes() == index.stores.sizes() == {"s": len(ON_DISK), "t": len(ON_DISK)}
    for query in (unpack_u64(sequence_hashes(pack_u32(PROMPT), BLOCK)), ON_DISK, ON_DISK[8_000:]):
        assert copy.overlaps(query) == index.overlaps(query) != {}


def test_one_worker_can_be_selected_and_an_unknown_one_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    index, _ = asyncio.run(write(path))
    run = forebay("index", str(path), "--worker", "w0")
    events = [msgspec.json.decode(line, type=AnyKvEvent) for line in run.stdout.splitlines()]
    assert {event.worker_id for event in events} == {"w0"}
    blocks = sum(len(event.sequence_hashes) // 8 for event in events if isinstance(event, BlocksStored))
    assert blocks == sum(index.blocks_held("w0", 0, tier) for tier in TIERS)
    run = forebay("index", str(path), "--worker", "nobody")
    assert (run.returncode, "unknown worker 'nobody'; workers are: w0, w1" in run.stderr) == (2, True)


def test_a_log_and_kafka_are_exclusive(tmp_path: Path) -> None:
    for arguments in ([], [str(tmp_path / "log.db"), "--kafka", "127.0.0.1:1"]):
        run = forebay("index", *arguments)
        assert (run.returncode, "expected either a log file or --kafka" in run.stderr) == (2, True)


def test_an_empty_log_has_an_empty_index(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    SqliteLog.open(path).close()
    run = forebay("index", str(path))
    assert (run.returncode, run.stdout) == (0, "")
