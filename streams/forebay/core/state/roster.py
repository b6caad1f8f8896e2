"""Worker ranks of a pool that may get requests, in the order that every decision uses.

A roster is derived from the fleet and the load, and is built again when the fleet changes. It has no state of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import ceil
from struct import pack

import numpy as np
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from forebay.core.state.fleet import Fleet, FleetWorker, WorkerPhase
from forebay.core.state.holder_bits import HolderBits, HolderKey
from forebay.core.state.load import FleetLoad
from forebay.core.state.rank_load import TIGHT_SHARE, LoadColumns, RankLoad
from forebay.core.state.sessions import Binding
from forebay.events.requests import Task


@dataclass(frozen=True, slots=True, eq=False)
class CandidateRank:
    """Worker rank that may get requests. `load` is shared with `FleetLoad`, and changes as requests start and end."""

    worker: FleetWorker
    rank: int
    load: RankLoad
    key: HolderKey
    packed_name: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "packed_name", self.worker.spec.worker_id.encode() + pack("<xI", self.rank))


@dataclass(frozen=True, eq=False)
class Roster:
    """Candidate ranks in order of (worker id, rank), with data that is derived from them once.

    `of` is the roster from which these ranks were chosen, and their positions there; None for all ranks of a pool.
    """

    ranks: Sequence[CandidateRank]
    of: "tuple[Roster, NDArray[np.intp]] | None" = None
    _limits: tuple[float, NDArray[np.int64]] = field(init=False, default=(-1.0, np.zeros((2, 0), np.int64)))
    _by_bit: tuple[int, NDArray[np.intp]] = field(init=False, default=(-1, np.zeros(0, np.intp)))

    @cached_property
    def loads(self) -> list[RankLoad]:
        return [candidate.load for candidate in self.ranks]

    @cached_property
    def columns(self) -> LoadColumns:
        """Loads of these and other ranks; `slots` has the positions of these."""
        return self.ranks[0].load.columns if self.ranks else LoadColumns()

    @cached_property
    def slots(self) -> NDArray[np.intp]:
        if self.of is not None:
            return self.of[0].slots[self.of[1]]
        return np.array([candidate.load.slot for candidate in self.ranks], np.intp)

    def positions_by_bit(self, holders: HolderBits) -> NDArray[np.intp]:
        """Return the position of the holder of each bit of a mask, or the number of ranks if it is not in `ranks`."""
        count = len(self.ranks)
        if self.of is not None:
            whole, positions = self.of
            mine = np.full(len(whole.ranks) + 1, count)
            mine[positions] = np.arange(count)
            return mine[whole.positions_by_bit(holders)]
        taken, found = self._by_bit
        if taken != holders.taken:
            find = self.positions.get
            found = np.array([find(key, count) for key in holders.keys], np.intp)
            object.__setattr__(self, "_by_bit", (holders.taken, found))
        return found

    @cached_property
    def positions(self) -> dict[HolderKey, int]:
        """Position of each rank in `ranks`, by worker id and rank."""
        return {candidate.key: at for at, candidate in enumerate(self.ranks)}

    @cached_property
    def step_tokens(self) -> NDArray[np.float64]:
        """Token budget of one engine step (`max_num_batched_tokens`), for each rank in order."""
        return np.array([candidate.worker.spec.max_num_batched_tokens for candidate in self.ranks], np.float64)

    @cached_property
    def loose_blocks(self) -> int:
        """Number of blocks that every rank has free unless it is one of `FleetLoad.tight`."""
        return min((load.kv_blocks // TIGHT_SHARE for load in self.loads), default=0)

    @cached_property
    def tasks(self) -> frozenset[Task]:
        first = self.ranks[0].worker.spec.tasks if self.ranks else ()
        return frozenset(first).intersection(*(candidate.worker.spec.tasks for candidate in self.ranks))

    @cached_property
    def salts_cache(self) -> bool:
        """Whether no rank shares cached blocks between cache namespaces."""
        return all(candidate.worker.spec.salts_cache for candidate in self.ranks)

    @cached_property
    def names_hash(self) -> int:
        """64-bit hash over worker id and number of all ranks, in order."""
        return xxh3_64_intdigest(b"".join([candidate.packed_name for candidate in self.ranks]))

    def limits(self, run_ahead: float) -> NDArray[np.int64]:
        """Return two rows with limits of each rank, in order, for a run-ahead as in `QueueConfig.run_ahead`.

        They are the maximum number of requests in flight, and how many may wait in its engine when it gets another one.
        """
        key, found = self._limits
        if key != run_ahead:
            seqs = np.array([candidate.worker.spec.max_num_seqs for candidate in self.ranks], np.int64)
            more = np.array([ceil(run_ahead * one) for one in seqs.tolist()], np.int64)
            found = np.array([seqs + more, more])
            object.__setattr__(self, "_limits", (run_ahead, found))
        return found

    def only(self, positions: Sequence[int] | NDArray[np.intp]) -> "Roster":
        """Return a roster of the ranks at `positions`, which must be ascending."""
        if len(positions) == len(self.ranks):
            return self
        chosen, ranks = np.asarray(positions, np.intp), self.ranks
        return Roster([ranks[at] for at in chosen.tolist()], (self, chosen))


def roster_of(pool: str, fleet: Fleet, load: FleetLoad) -> Roster:
    """Return a roster of all ranks of the ready workers of a pool."""
    return _roster_of(pool, fleet, load, WorkerPhase.READY)


def suspect_roster_of(pool: str, fleet: Fleet, load: FleetLoad) -> Roster:
    """Return a roster of the suspect workers of a pool, which get requests again if they renew their leases."""
    return _roster_of(pool, fleet, load, WorkerPhase.SUSPECT)


def _roster_of(pool: str, fleet: Fleet, load: FleetLoad, phase: WorkerPhase) -> Roster:
    return Roster(
        [
            CandidateRank(worker, rank, load.rank_load(worker.spec.worker_id, rank), (worker.spec.worker_id, rank))
            for worker in fleet.workers()
            if worker.phase is phase and worker.spec.pool == pool
            for rank in worker.spec.ranks
        ]
    )


def session_roster(roster: Roster, bound: Binding) -> Roster | None:
    """Return a roster with only the rank that serves a session, or None if `roster` does not have it in that epoch."""
    at = roster.positions.get((bound.worker_id, bound.rank))
    if at is None or roster.ranks[at].worker.worker_epoch != bound.worker_epoch:
        return None
    return roster.only([at])
