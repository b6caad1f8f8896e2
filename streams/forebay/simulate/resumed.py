"""Simulation that starts with the fleet, the caches and the configuration of a snapshot, and plays later arrivals.

The cache of each rank starts with its blocks of the prefix index, in the order of the index, because the index does not
record when a block was used. Blocks in host memory and on disk are ignored, because the engine model has no such tiers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

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
from forebay.events.snapshots import Chunk, IndexBlocks, IndexCursor, WorkerState
from forebay.events.topics import FLEET
from forebay.events.versions import EVENTS_VERSION
from forebay.simulate.arrivals import Arrival, ListedArrivals
from forebay.simulate.cluster import NO_TRANSFER, OnArrived, SimulatedCluster
from forebay.simulate.delays import ROUTER, Hops
from forebay.simulate.outcome import RequestOutcome
from forebay.simulate.rank import EngineRank, needs_reports
from forebay.simulate.settings import Delays, Transfer

NO_DELAYS = Delays()
MOCKER = MockerTiming()


class NotSimulable(Exception):
    """A state cannot be simulated. The message says why."""


@dataclass(frozen=True, slots=True)
class ResumedOutcome:
    """Outcome of a simulation that started from a snapshot.

    Attributes:
        served: outcome of each request by id. `RequestOutcome.worker` and `RequestOutcome.prefiller` are indexes into
            `ranks`.
        digest: hash of all decisions, in hexadecimal.
        ranks: all worker ranks that ever joined.
    """

    served: dict[str, RequestOutcome]
    digest: str
    ranks: list[HolderKey]


def resume(
    state: Sequence[Chunk],
    arrivals: Sequence[Arrival],
    on_arrived: OnArrived,
    *,
    speedup: float = 1.0,
    delays: Delays = NO_DELAYS,
    timing: EngineTiming = MOCKER,
    transfer: Transfer = NO_TRANSFER,
    custom: CustomPolicies = ONLY_BUILT_IN,
) -> ResumedOutcome:
    """Simulate all arrivals, starting from a state, until every request has ended.

    Args:
        state: chunks of a snapshot without requests.
        arrivals: records in the order of time, none before the time of the state. Request ids must be unique, and
            `sampling.max_tokens` is the length of the response. Events of `fleet` must refer to current members. A
            worker that joins starts with an empty cache, and a worker that is lost dies at that moment.
        on_arrived: called with the number of requests that have arrived so far.
        speedup: how much faster than their model the engines run.
        delays: latencies between clients, router and engines.
        timing: step timing of the engines.
        transfer: time that KV transfers take; used only if there are prefill workers.
        custom: custom policies that the simulation may run.

    Raises:
        NotSimulable: there is no worker, or the sizes of a worker contradict each other.
    """
    fitting = list(_fitting(state))
    world = restore(fitting, custom)
    claim(world, max(world.owner_epoch, 0), tuple(sorted(custom)), EVENTS_VERSION)
    configured = [arrival.event for arrival in arrivals if isinstance(arrival.event, PoolConfigured)]
    reports = any(needs_reports(pool.router) for pool in (*world.pools.values(), *configured))
    joining = [arrival.event.spec for arrival in arrivals if isinstance(arrival.event, WorkerJoined)]
    for spec in joining:
        _config(spec, timing)  # reject an unusable worker before the run
    cluster = _ResumedCluster(world, delays, timing, transfer, reports=reports, speedup=speedup)
    cluster.begin(fitting)
    if not cluster.numbers and not joining:
        raise NotSimulable("the state has no worker at the start of the simulation, and none joins later")
    cluster.play(ListedArrivals(arrivals), on_arrived)
    ids = [arrival.event.request_id for arrival in arrivals if isinstance(arrival.event, RequestSubmitted)]
    return ResumedOutcome(dict(zip(ids, cluster.requests, strict=True)), cluster.digest(), list(cluster.numbers))


class _ResumedCluster(SimulatedCluster):
    """Cluster whose workers join and leave according to the fleet facts among the arrivals.

    Attributes:
        numbers: number of each rank that ever joined. A rank that rejoins keeps its number.
    """

    def __init__(
        self,
        world: World,
        delays: Delays,
        timing: EngineTiming,
        transfer: Transfer,
        *,
        reports: bool,
        speedup: float,
    ) -> None:
        hops = Hops(delays, 0, ROUTER)
        super().__init__(world, reports=reports, speedup=speedup, hops=hops, transfer=transfer)
        self.numbers: dict[HolderKey, int] = {}
        self._delays = delays
        self._timing = timing
        self._members: dict[str, list[EngineRank]] = {}

    def begin(self, state: Sequence[Chunk]) -> None:
        """Add the ranks of all current members, with warm caches."""
        cached: dict[HolderKey, list[int]] = {}
        kv_seqs: dict[HolderKey, int] = {}
        for chunk in state:
            if isinstance(chunk, IndexBlocks):
                cached.setdefault((chunk.worker_id, chunk.rank), []).extend(unpack_u64(chunk.sequence_hashes))
            elif isinstance(chunk, IndexCursor):
                kv_seqs[chunk.worker_id, chunk.rank] = chunk.last_seq
        for key in rank_keys(state):
            worker = self.world.fleet.get(key[0])
            assert worker is not None, "the ranks are those of the state"
            rank = self._join(worker.spec, key[1], worker.worker_epoch, kv_seqs.get(key, 0))
            rank.engine.warm(cached.get(key, []))

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
        taking = EngineRank(
            number, spec, rank, worker_epoch, EngineModel(_config(spec, self._timing)), kv_seq=kv_seq, hops=hops
        )
        self._members.setdefault(spec.worker_id, []).append(taking)
        self.add(taking)
        return taking


def rank_keys(state: Sequence[Chunk]) -> list[HolderKey]:
    """Return every prefill, decode or aggregated rank of a state, sorted. `ResumedOutcome.ranks` begins with them."""
    specs = [chunk.spec for chunk in state if isinstance(chunk, WorkerState) and chunk.spec.role != "encode"]
    return sorted((spec.worker_id, rank) for spec in specs for rank in spec.ranks)


def _fitting(state: Sequence[Chunk]) -> Iterator[Chunk]:
    """Yield the chunks of the state, with the device blocks of each rank cut to the size of its cache."""
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


def _config(spec: WorkerSpec, timing: EngineTiming) -> EngineConfig:
    try:
        return EngineConfig(
            vocabulary=None,  # a simulation needs no output text
            block_size=spec.block_size,
            kv_blocks_total=spec.kv_blocks_total,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            timing=timing,
        )
    except ValueError as error:
        raise NotSimulable(f"worker {spec.worker_id} cannot be modelled: {error}") from None
