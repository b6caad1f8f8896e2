"""Everything that the owner of a group knows: its machines, pools, clock, and its place in every topic.

A world changes only through `forebay.core.step`. Its digest names the whole state; a world restored from a
snapshot has the same digest and decides the same from there on.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import assert_never

from xxhash import xxh3_64_intdigest

from forebay.core.fleet import Fleet, Worker
from forebay.core.lifecycle import Requests
from forebay.core.load import Load
from forebay.core.prefix_index import PrefixIndex
from forebay.events.control import PoolConfigured
from forebay.events.decisions import Run
from forebay.events.snapshots import (
    Booking,
    Chunk,
    IndexBlocks,
    IndexCursor,
    PoolTurns,
    Remembered,
    Reported,
    RequestState,
    WorkerState,
    WorldState,
)

CORE_VERSION = 1  # raised when the same events lead to other decisions


class World:
    """The state of one group.

    Attributes:
        view: the next offset of every topic, as applied.
        consumed: the runs applied since the last decision; they travel with the next one.
        counts: diagnostics, no part of the state.
    """

    def __init__(self) -> None:
        self.fleet = Fleet()
        self.index = PrefixIndex()
        self.load = Load()
        self.requests = Requests()
        self.pools: dict[str, PoolConfigured] = {}
        self.view: dict[str, int] = {}
        self.consumed: list[Run] = []
        self.now_us = 0
        self.turns: dict[str, int] = {}
        self.owner_epoch = -1
        self.seq = 0
        self.counts: Counter[str] = Counter()

    def note(self, topic: str, count: int, now_us: int) -> None:
        """`count` records of `topic` are applied at `now_us`, a clock that never runs backwards."""
        assert now_us >= self.now_us, "time never runs backwards"
        self.now_us = now_us
        self.view[topic] = self.view.get(topic, 0) + count
        if self.consumed:
            last = self.consumed[-1]
            if last.topic == topic and last.now_us == now_us:
                self.consumed[-1] = Run(topic=topic, count=last.count + count, now_us=now_us)
                return
        self.consumed.append(Run(topic=topic, count=count, now_us=now_us))

    def take_consumed(self) -> tuple[Run, ...]:
        """The runs since the last decision, which are that decision's from now on."""
        runs = tuple(self.consumed)
        self.consumed.clear()
        return runs

    def take_seq(self) -> int:
        """The number of the next journal record."""
        self.seq += 1
        return self.seq - 1

    def pool_of(self, model: str) -> PoolConfigured | None:
        """The first pool, by name, that serves `model`."""
        return next((self.pools[name] for name in sorted(self.pools) if self.pools[name].model == model), None)

    def admit(self, worker: Worker) -> None:
        """A worker joined the fleet: its ranks are empty and idle."""
        for rank in range(worker.spec.dp_size):
            self.index.add_holder(worker.spec.worker_id, rank, worker.worker_epoch)
            self.load.add_rank(worker.spec.worker_id, rank)

    def dismiss(self, worker: Worker) -> None:
        """A worker is lost; its requests were freed before."""
        for rank in range(worker.spec.dp_size):
            self.index.drop_holder(worker.spec.worker_id, rank)
            self.load.drop_rank(worker.spec.worker_id, rank)

    def digest(self) -> int:
        """64 bits over the machines, the pools, the clock and the view."""
        text = "\n".join(
            (
                str([machine.digest() for machine in (self.fleet, self.index, self.load, self.requests)]),
                str([self.pools[name] for name in sorted(self.pools)]),
                str(sorted(self.view.items())),
                str((self.now_us, sorted(self.turns.items()))),
            )
        )
        return xxh3_64_intdigest(text.encode())

    def snapshot(self) -> Iterator[Chunk]:
        """The state as facts, in the order in which `restore` takes them. `consumed` must be empty."""
        assert not self.consumed, "a snapshot stands between journal records"
        yield WorldState(
            now_us=self.now_us,
            view=tuple(Run(topic=topic, count=count, now_us=0) for topic, count in sorted(self.view.items())),
            pools=tuple(self.pools[name] for name in sorted(self.pools)),
            turns=tuple(PoolTurns(pool=pool, turns=turns) for pool, turns in sorted(self.turns.items())),
            owner_epoch=self.owner_epoch,
            fleet_epoch=self.fleet.owner_epoch,
            seq=self.seq,
        )
        yield from self.fleet.snapshot()
        yield from self.index.snapshot()
        yield from self.requests.snapshot()
        yield from self.load.snapshot()


def restore(chunks: Iterable[Chunk]) -> World:
    """The world of a snapshot; its digest is the one that was sealed."""
    world = World()
    for chunk in chunks:
        match chunk:
            case WorldState():
                world.now_us, world.seq = chunk.now_us, chunk.seq
                world.turns = {pool.pool: pool.turns for pool in chunk.turns}
                world.view = {run.topic: run.count for run in chunk.view}
                world.pools = {pool.pool: pool for pool in chunk.pools}
                world.owner_epoch = chunk.owner_epoch
                world.fleet.restore_owner(chunk.fleet_epoch)
            case WorkerState():
                worker = world.fleet.restore(chunk)
                for rank in range(worker.spec.dp_size):
                    world.load.add_rank(worker.spec.worker_id, rank)
            case IndexCursor() | IndexBlocks():
                world.index.restore(chunk)
            case RequestState() | Remembered():
                world.requests.restore(chunk)
            case Booking() | Reported():
                world.load.restore(chunk)
            case _:
                assert_never(chunk)
    return world
