"""A simulation that goes on from a state: its fleet, its caches and its configuration, and what comes later.

Caches begin with what the index says of them, in the index's order: how recently a block was used is not known. What
lies on hosts and disks is left out, as the engine model has no such tiers.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec

from forebay.core.state.holder_bits import HolderKey
from forebay.core.step import claim
from forebay.core.world import World, restore
from forebay.engine_model.model import EngineConfig, EngineModel
from forebay.engine_model.timing import EngineTiming, MockerTiming
from forebay.events.base import U64_BYTES, unpack_u64
from forebay.events.control import PoolConfigured
from forebay.events.fleet import WorkerFact, WorkerJoined, WorkerLost, WorkerSpec
from forebay.events.requests import RequestSubmitted
from forebay.events.snapshots import Chunk, IndexBlocks, IndexCursor, WorkerState
from forebay.events.topics import FLEET
from forebay.simulate.arrivals import Arrival, Listed
from forebay.simulate.cluster import NO_TRANSFER, Cluster, OnArrived
from forebay.simulate.delays import ROUTER, Hops
from forebay.simulate.outcome import Served
from forebay.simulate.rank import EngineRank, needs_reports
from forebay.simulate.settings import Delays, Transfer

NO_DELAYS = Delays()
MOCKER = MockerTiming()


class NotSimulable(Exception):
    """A state that cannot be simulated; the text says why."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """What came of it.

    Attributes:
        served: each request by its id; `Served.worker` and `Served.prefiller` are places in `ranks`.
        digest: of all decisions, in hexadecimal.
        ranks: all worker ranks that ever took part.
    """

    served: dict[str, Served]
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
) -> Resumed:
    """Play what arrives until all have an answer.

    Args:
        state: a snapshot without requests.
        arrivals: in the order of their times, none before the state's. Ids of requests come once, and their
            `sampling.max_tokens` is how long their answers are. Facts of the fleet are about its members then: workers
            that join begin empty, and those that are lost die at that moment.
        on_arrived: gets how many requests did arrive.
        speedup: how much faster than their model the engines are.
        delays: how long what is said takes to arrive.
        timing: how long an engine's steps take.
        transfer: how KV moves, where there are prefill workers.

    Raises:
        NotSimulable: there is no worker, or its sizes do not go together.
    """
    fitting = list(_fitting(state))
    world = restore(fitting)
    if world.owner_epoch < 0:
        claim(world, 0)
    configured = [arrival.event for arrival in arrivals if isinstance(arrival.event, PoolConfigured)]
    reports = any(needs_reports(pool.router) for pool in (*world.pools.values(), *configured))
    joining = [arrival.event.spec for arrival in arrivals if isinstance(arrival.event, WorkerJoined)]
    for spec in joining:
        _config(spec, timing)  # better refused now than in the middle
    cluster = _Resumed(world, delays, timing, transfer, reports=reports, speedup=speedup)
    cluster.begin(fitting)
    if not cluster.numbers and not joining:
        raise NotSimulable("no worker is there where the simulation would begin")
    cluster.play(Listed(arrivals), on_arrived)
    ids = [arrival.event.request_id for arrival in arrivals if isinstance(arrival.event, RequestSubmitted)]
    return Resumed(dict(zip(ids, cluster.requests, strict=True)), cluster.digest(), list(cluster.numbers))


class _Resumed(Cluster):
    """A cluster whose workers come and go as the facts say that arrive.

    Attributes:
        numbers: of all ranks that took part so far; one that comes again has the same.
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
        self._there: dict[str, list[EngineRank]] = {}

    def begin(self, state: Sequence[Chunk]) -> None:
        """Who is a member already takes part, with what it has cached."""
        cached: dict[HolderKey, list[int]] = {}
        said: dict[HolderKey, int] = {}
        for chunk in state:
            if isinstance(chunk, IndexBlocks):
                cached.setdefault((chunk.worker_id, chunk.rank), []).extend(unpack_u64(chunk.sequence_hashes))
            elif isinstance(chunk, IndexCursor):
                said[chunk.worker_id, chunk.rank] = chunk.last_seq
        for key in rank_keys(state):
            worker = self.world.fleet.get(key[0])
            assert worker is not None, "it is in the state"
            rank = self._take_part(worker.spec, key[1], worker.worker_epoch, said.get(key, 0))
            rank.engine.warm(cached.get(key, []))

    def _arrive(self, arrival: Arrival) -> None:
        event = arrival.event
        if isinstance(event, WorkerJoined):
            event = msgspec.structs.replace(event, owner_epoch=self.world.owner_epoch)
            epoch = self.world.view.get(FLEET.name, 0)
            for number in event.spec.ranks if event.spec.role != "encode" else ():
                self._take_part(event.spec, number, epoch)
        elif isinstance(event, WorkerFact):
            worker = self.world.fleet.get(event.worker_id)
            assert worker is not None, "facts are about members"
            event = msgspec.structs.replace(event, owner_epoch=self.world.owner_epoch, worker_epoch=worker.worker_epoch)
            if isinstance(event, WorkerLost):
                for rank in self._there.pop(event.worker_id, ()):
                    self.die(rank)
        super()._arrive(arrival._replace(event=event))

    def _take_part(self, spec: WorkerSpec, rank: int, worker_epoch: int, kv_seq: int = 0) -> EngineRank:
        key = (spec.worker_id, rank)
        number = self.numbers.setdefault(key, len(self.numbers))
        hops = Hops(self._delays, 0, f"{spec.worker_id}/{rank}")
        taking = EngineRank(
            number, spec, rank, worker_epoch, EngineModel(_config(spec, self._timing)), kv_seq=kv_seq, hops=hops
        )
        self._there.setdefault(spec.worker_id, []).append(taking)
        self.add(taking)
        return taking


def rank_keys(state: Sequence[Chunk]) -> list[HolderKey]:
    """Every worker rank of a state that computes prompts or answers; the first of `Resumed.ranks`."""
    specs = [chunk.spec for chunk in state if isinstance(chunk, WorkerState) and chunk.spec.role != "encode"]
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


def _config(spec: WorkerSpec, timing: EngineTiming) -> EngineConfig:
    try:
        return EngineConfig(
            vocabulary=None,  # the answers' lengths are known, nobody needs to speak
            block_size=spec.block_size,
            kv_blocks_total=spec.kv_blocks_total,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
            timing=timing,
        )
    except ValueError as error:
        raise NotSimulable(f"the worker {spec.worker_id} cannot be modelled: {error}") from None
