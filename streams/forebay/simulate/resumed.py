"""Simulation that starts with the fleet, the caches and the configuration of a snapshot, and plays later arrivals.

The cache of each rank starts with its blocks of the prefix index, in the order of the index, because the index does not
record when a block was used. Other tiers start empty.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import msgspec

from forebay.core.restore import restore
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.state.holder_bits import HolderKey
from forebay.core.step import claim
from forebay.core.world import World
from forebay.engine_model.model import EngineConfig, EngineModel
from forebay.engine_model.timing import EngineTiming, MockerTiming
from forebay.events.base import U64_BYTES, unpack_u64
from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerFact, WorkerJoined, WorkerLost, WorkerSpec
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import Chunk, IndexBlocks, IndexCursor, StoreBlocks, StoreDropped, WorkerState
from forebay.events.topics import FLEET
from forebay.events.versions import EVENTS_VERSION
from forebay.runtime.errors import prefixed
from forebay.simulate.arrivals import Arrival, ListedArrivals
from forebay.simulate.cluster import NO_TRANSFER, OnArrived, SimulatedCluster
from forebay.simulate.delays import ROUTER, Hops
from forebay.simulate.outcome import RequestOutcome
from forebay.simulate.rank import EngineRank, needs_reports
from forebay.simulate.settings import Delays, Transfer
from forebay.simulate.tiers.fleet import TierFleet, store_name
from forebay.simulate.tiers.settings import FleetTiers

NO_DELAYS = Delays()


class SimulatedHardware(msgspec.Struct, frozen=True):
    """What a recording does not tell about the machines of a fleet."""

    timing: EngineTiming = MockerTiming()
    transfer: Transfer = NO_TRANSFER  # time that KV transfers take; used only if there are prefill workers
    # Tiers of the workers. The size of a block is that of the worker's KV layout, or follows from `transfer`.
    tiers: FleetTiers = FleetTiers()


ANY_HARDWARE = SimulatedHardware()


@dataclass(frozen=True, slots=True)
class ResumedOutcome:
    """Outcome of a simulation that started from a snapshot."""

    # Outcome of each request by id. `RequestOutcome.worker` and `RequestOutcome.prefiller` are indexes into `ranks`.
    served: dict[str, RequestOutcome]
    digest: str  # hash of all decisions, in hexadecimal
    ranks: list[HolderKey]  # all worker ranks that ever joined


def resume(
    state: Sequence[Chunk],
    arrivals: Sequence[Arrival],
    on_arrived: OnArrived,
    *,
    speedup: float = 1.0,
    delays: Delays = NO_DELAYS,
    hardware: SimulatedHardware = ANY_HARDWARE,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> ResumedOutcome:
    """Simulate all arrivals, starting from a state, until every request has ended.

    Args:
        state: chunks of a snapshot without requests.
        arrivals: records in the order of time, none before the time of the state. Request ids must be unique, and
            `sampling.max_tokens` is the length of the response. Events of `fleet` must refer to current members. A
            worker that joins starts with an empty cache, and a worker that is lost dies at that moment.
        speedup: how much faster than their model the engines run.

    Raises ConfigError if the sizes of a worker contradict each other.
    """
    state = list(_device_chunks(state))
    world = restore(state, custom)
    claim(world, max(world.owner_epoch, 0), tuple(sorted(custom)), EVENTS_VERSION)
    configured = [arrival.event for arrival in arrivals if isinstance(arrival.event, PoolConfigured)]
    routers = [pool.router for pool in (*world.pools.values(), *configured)]
    reports = any(map(needs_reports, routers))
    measured = any(router.tier_credit == "measured" for router in routers)
    cluster = _ResumedCluster(world, delays, hardware, reports=reports, reports_costs=measured, speedup=speedup)
    cluster.begin(state)
    cluster.play(ListedArrivals(arrivals), on_arrived)
    ids = [arrival.event.request_id for arrival in arrivals if isinstance(arrival.event, RequestSubmitted)]
    return ResumedOutcome(dict(zip(ids, cluster.requests, strict=True)), cluster.digest(), list(cluster.numbers))


def _device_chunks(state: Sequence[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks of a state without blocks of other tiers, and with the device blocks that fit into a rank.

    The router gives credit for all blocks of the index, so the index must not have blocks that the engine lacks.
    """
    specs = [chunk.spec for chunk in state if isinstance(chunk, WorkerState)]
    room = {(spec.worker_id, rank): spec.kv_blocks_total for spec in specs for rank in spec.ranks}
    for chunk in state:
        if isinstance(chunk, IndexBlocks):
            if chunk.tier != "device":
                continue
            key = (chunk.worker_id, chunk.rank)
            hashes = chunk.sequence_hashes[: room[key] * U64_BYTES]
            room[key] -= len(hashes) // U64_BYTES
            yield msgspec.structs.replace(chunk, sequence_hashes=hashes)
        elif not isinstance(chunk, StoreBlocks | StoreDropped):
            yield chunk


class _ResumedCluster(SimulatedCluster):
    """Cluster whose workers join and leave according to the fleet facts among the arrivals.

    `numbers` has the number of each rank that ever joined. A rank that rejoins keeps its number.
    """

    def __init__(
        self, world: World, delays: Delays, hardware: SimulatedHardware, *,
        reports: bool, reports_costs: bool, speedup: float,
    ) -> None:  # fmt: skip
        hops = Hops(delays, 0, ROUTER)
        super().__init__(world, reports=reports, speedup=speedup, hops=hops, transfer=hardware.transfer)
        self.numbers: dict[HolderKey, int] = {}
        self._delays = delays
        self._hardware = hardware
        self._tier_fleet = TierFleet(self, reports_costs=reports_costs)
        self._members: dict[str, list[EngineRank]] = {}

    def begin(self, state: Sequence[Chunk]) -> None:
        """Add the ranks of all current members, with warm caches. Ranks are numbered in order of their names."""
        cached: dict[HolderKey, list[int]] = {}
        kv_seqs: dict[HolderKey, int] = {}
        workers: dict[str, WorkerState] = {}
        for chunk in state:
            if isinstance(chunk, WorkerState):
                workers[chunk.spec.worker_id] = chunk
            elif isinstance(chunk, IndexBlocks):
                cached.setdefault((chunk.worker_id, chunk.rank), []).extend(unpack_u64(chunk.sequence_hashes))
            elif isinstance(chunk, IndexCursor):
                kv_seqs[chunk.worker_id, chunk.rank] = chunk.last_seq
        for name, worker in sorted(workers.items()):
            for number in worker.spec.ranks if worker.spec.role != "encode" else ():
                rank = self._join(worker.spec, number, worker.worker_epoch, kv_seqs.get((name, number), 0))
                rank.engine.warm(cached.get((name, number), []))

    def _arrive(self, arrival: Arrival) -> None:
        event = arrival.event
        if isinstance(event, WorkerJoined):
            event = msgspec.structs.replace(event, owner_epoch=self.world.owner_epoch)
            epoch = self.world.view.get(FLEET.name, 0)
            for number in event.spec.ranks if event.spec.role != "encode" else ():
                self._join(event.spec, number, epoch)
        elif isinstance(event, WorkerFact):
            worker = self.world.fleet.get(event.worker_id)
            assert worker is not None, "facts refer to members"
            event = msgspec.structs.replace(event, owner_epoch=self.world.owner_epoch, worker_epoch=worker.worker_epoch)
            if isinstance(event, WorkerLost):
                for rank in self._members.pop(event.worker_id, ()):
                    self.die(rank)
        super()._arrive(arrival._replace(event=event))

    def _join(self, spec: WorkerSpec, rank: int, worker_epoch: int, kv_seq: int = 0) -> EngineRank:
        key = (spec.worker_id, rank)
        number = self.numbers.setdefault(key, len(self.numbers))
        hops = Hops(self._delays, 0, f"{spec.worker_id}/{rank}")
        config = _config(spec, self._hardware.timing)
        chosen = self._hardware.tiers
        block_bytes = spec.block_size * self._hardware.transfer.kv_bytes_per_token
        if spec.kv_layout is not None:
            block_bytes = spec.kv_layout.block_bytes
        on_changed = partial(self._rank_tiers_changed, key)
        with prefixed(f"tiers of worker {spec.worker_id}"):
            tiers = self._tier_fleet.build(chosen, spec.model, config, block_bytes, on_changed)
        if not spec.kv_store:
            spec = msgspec.structs.replace(spec, kv_store=store_name(chosen, spec.model))
        engine = EngineModel(config) if tiers is None else tiers.engine
        taking = EngineRank(number, spec, rank, worker_epoch, engine, tiers=tiers, kv_seq=kv_seq, hops=hops)
        self._members.setdefault(spec.worker_id, []).append(taking)
        self.add(taking)
        return taking

    def _rank_tiers_changed(self, key: HolderKey, is_loaded: bool) -> None:
        self.tiers_changed(self._rank_of[key], is_loaded=is_loaded)


def _config(spec: WorkerSpec, timing: EngineTiming) -> EngineConfig:
    with prefixed(f"worker {spec.worker_id} cannot be modelled"):
        return EngineConfig(
            vocabulary=None,  # a simulation needs no output text
            block_size=spec.block_size,
            kv_blocks_total=spec.kv_blocks_total,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            timing=timing,
        )
