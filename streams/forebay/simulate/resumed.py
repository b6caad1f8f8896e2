"""A simulation that goes on from a state: its fleet, its caches and its configuration, and what comes later.

Caches begin with what the index says of them, in the index's order: how recently a block was used is not known. What
lies on hosts and disks is left out, as the engine model has no such tiers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from forebay.core.engine_model import EngineConfig, EngineModel
from forebay.core.holder_bits import HolderKey
from forebay.core.world import World, restore
from forebay.events.base import U64_BYTES, unpack_u64
from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerSpec
from forebay.events.snapshots import Chunk, IndexBlocks, IndexCursor, WorkerState
from forebay.simulate.cluster import Arrival, Cluster, OnArrived, needs_reports
from forebay.simulate.outcome import Served
from forebay.simulate.rank import EngineRank


class NotSimulable(Exception):
    """A state that cannot be simulated; the text says why."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What came of it: each request by its id, and a digest of all decisions, in hexadecimal."""

    served: dict[str, Served]
    digest: str


def resume(
    state: Sequence[Chunk], arrivals: Sequence[Arrival], on_arrived: OnArrived, *, speedup: float = 1.0
) -> Resumed:
    """Play what arrives until all have an answer.

    Args:
        state: a snapshot without requests.
        arrivals: in the order of their times, none before the state's. Ids of requests come once, and their
            `sampling.max_tokens` is how long their answers are.
        on_arrived: gets how many requests did arrive.
        speedup: how much faster than their model the engines are.

    Raises:
        NotSimulable: there is no worker, or its sizes do not go together.
    """
    fitting = list(_fitting(state))
    world = restore(fitting)
    configured = [arrival.event for arrival in arrivals if isinstance(arrival.event, PoolConfigured)]
    reports = any(needs_reports(pool.router) for pool in (*world.pools.values(), *configured))
    cluster = Cluster(world, reports=reports, speedup=speedup)
    for rank in _ranks(world, fitting):
        cluster.add(rank)
    cluster.play(arrivals, on_arrived)
    return Resumed(cluster.served, cluster.digest())


def rank_keys(state: Sequence[Chunk]) -> list[HolderKey]:
    """Every worker rank of a state; `Served.worker` is the place in this list."""
    specs = [chunk.spec for chunk in state if isinstance(chunk, WorkerState)]
    return sorted((spec.worker_id, rank) for spec in specs for rank in spec.ranks)


def _fitting(state: Sequence[Chunk]) -> Iterator[Chunk]:
    """The state with as many blocks of each rank, all on its device, as its cache has."""
    room = {chunk.spec.worker_id: chunk.spec.kv_blocks_total for chunk in state if isinstance(chunk, WorkerState)}
    held: dict[HolderKey, int] = {}
    for chunk in state:
        if not isinstance(chunk, IndexBlocks):
            yield chunk
        elif chunk.tier == "device":
            key = (chunk.worker_id, chunk.rank)
            left = room[chunk.worker_id] - held.get(key, 0)
            hashes = chunk.sequence_hashes[: left * U64_BYTES]
            held[key] = held.get(key, 0) + len(hashes) // U64_BYTES
            yield msgspec.structs.replace(chunk, sequence_hashes=hashes)


def _ranks(world: World, state: Sequence[Chunk]) -> Iterator[EngineRank]:
    cached: dict[HolderKey, list[int]] = {}
    said: dict[HolderKey, int] = {}
    for chunk in state:
        if isinstance(chunk, IndexBlocks):
            cached.setdefault((chunk.worker_id, chunk.rank), []).extend(unpack_u64(chunk.sequence_hashes))
        elif isinstance(chunk, IndexCursor):
            said[chunk.worker_id, chunk.rank] = chunk.last_seq
    keys = rank_keys(state)
    if not keys:
        raise NotSimulable("no worker is there where the simulation would begin")
    for number, key in enumerate(keys):
        worker = world.fleet.get(key[0])
        assert worker is not None, "it is in the state"
        engine = EngineModel(_config(worker.spec))
        engine.warm(cached.get(key, []))
        yield EngineRank(number, worker.spec, key[1], worker.worker_epoch, engine, kv_seq=said.get(key, 0))


def _config(spec: WorkerSpec) -> EngineConfig:
    try:
        return EngineConfig(
            vocabulary=None,  # the answers' lengths are known, nobody needs to speak
            block_size=spec.block_size,
            kv_blocks_total=spec.kv_blocks_total,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
        )
    except ValueError as error:
        raise NotSimulable(f"the worker {spec.worker_id} cannot be modelled: {error}") from None
