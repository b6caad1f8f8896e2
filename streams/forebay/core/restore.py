"""Restore a world from the parts of a snapshot. The result has the digest that the seal of the snapshot names."""

from collections.abc import Iterable
from typing import assert_never

from forebay.core.queue_entry import queued_request
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.index_digest import IndexTally
from forebay.core.state.index_scan import RecordedChange, ScannedBlocks
from forebay.core.state.prefix_index import PrefixIndex
from forebay.core.state.rank_load import kv_blocks_of
from forebay.core.world import World
from forebay.events.snapshots import (
    AdapterState,
    Booking,
    Chunk,
    CommandState,
    ComputedTokens,
    FinishedKeys,
    IndexBlocks,
    IndexChanges,
    IndexCursor,
    IngressState,
    MeasuredCosts,
    QueueTurns,
    Remembered,
    Reported,
    RequestState,
    RoutedBlocks,
    Sessions,
    StoreBlocks,
    StoreDropped,
    WorkerState,
    WorldState,
)


def restore(chunks: Iterable[Chunk], custom: CustomPolicies = ONLY_BUILT_IN) -> World:
    """Return the world of a snapshot from all its parts. Blocks of the prefix index may come before other parts."""
    world = World(custom)
    _restore(world, world.index, chunks)
    return world


def digest_of_snapshot(chunks: Iterable[Chunk]) -> int:
    """Return the digest of the world in a snapshot without building the prefix index, which is most of the work."""
    world, tally = World(), IndexTally()
    _restore(world, tally, chunks)
    return world.digest_with(tally)


def _restore(world: World, index: PrefixIndex | IndexTally, chunks: Iterable[Chunk]) -> None:
    blocks: list[ScannedBlocks] = []
    changes: list[RecordedChange] = []
    for chunk in chunks:
        match chunk:
            case WorldState():
                _restore_state(world, chunk)
            case WorkerState():
                worker = world.fleet.restore(chunk)
                world.index.use_store(worker.spec.worker_id, worker.spec.kv_store)
                for rank in worker.spec.ranks:
                    world.load.add_rank(worker.spec.worker_id, rank, worker.spec.block_size, kv_blocks_of(worker.spec))
                    world.routed.add_holder(worker.spec.worker_id, rank)
                    world.predicted.add_holder(worker.spec.worker_id, rank)
            case IngressState():
                world.fleet.restore_ingress(chunk)
            case IndexBlocks() | StoreBlocks():
                blocks.append(chunk)
            case IndexChanges() | StoreDropped():
                changes.append(chunk)
            case IndexCursor():
                index.restore(chunk)
            case Remembered() if chunk.commands:
                world.commands.restore(chunk)
            case RequestState() | Remembered() | FinishedKeys():
                world.requests.restore(chunk)
            case CommandState():
                world.commands.restore(chunk)
            case Booking() | ComputedTokens() | MeasuredCosts() | Reported():
                world.load.restore(chunk)
            case RoutedBlocks():
                (world.predicted if chunk.predicted else world.routed).restore(chunk)
            case QueueTurns():
                world.queues.restore(chunk)
            case AdapterState():
                world.adapters.put(chunk)
            case Sessions():
                world.sessions.restore(chunk)
            case _:
                assert_never(chunk)
    for late in blocks:
        index.restore(late)
    for change in changes:
        index.restore(change)
    for key in world.index.holders():
        cached = world.index.cached(key)
        assert cached is not None, "the index knows its holders"
        world.load.set_cached(key, *cached)
    world.strand_waiting()
    for request in world.requests.queued():
        world.queues.push(request.submitted.pool, queued_request(request, world.pools[request.submitted.pool]))


def _restore_state(world: World, chunk: WorldState) -> None:
    world.now_us, world.seq = chunk.now_us, chunk.seq
    world.turns = {pool.pool: pool.turns for pool in chunk.turns}
    world.view = {run.topic: run.count for run in chunk.view}
    world.settings.restore(chunk)
    for pool in chunk.pools:
        world.queues.configure(pool.pool, pool.router.queue)
    world.owner_epoch = chunk.owner_epoch
    world.owner_nonce = chunk.owner_nonce
    world.owner_policies = chunk.owner_policies
    world.owner_events = chunk.owner_events
    world.fleet.restore_owner(chunk.fleet_epoch)
