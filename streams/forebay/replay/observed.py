"""What a recording says was lived, for a simulator to do again: a first state, and what came from outside after it."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.core.rederive import Divergence
from forebay.core.step import AnyDecision, InputEvent
from forebay.events.control import BusyThresholdsSet, DisaggregationSet, PoolConfigured, WorkerCommanded
from forebay.events.fleet import WorkerDraining, WorkerJoined, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.snapshots import Chunk
from forebay.replay.diff.handover import Asked, OfOperator, Requests, state_of
from forebay.replay.verify.verify import PROGRESS_EVERY, OnProgress
from forebay.replay.walk import Walk, walk_all
from forebay.transport.base import Log

Fact = WorkerSuspect | WorkerRecovered | WorkerDraining | WorkerLost
External = OfOperator | WorkerJoined | Fact


@dataclass(slots=True)
class Lived:
    """A history.

    Attributes:
        state: the world at the beginning without its requests, as a snapshot tells it.
        asked: the requests in the order in which they came, those first that were under way at the beginning.
        said: what operators said, and the facts of the fleet that counted, with the owner's clock.
        begin_us: the owner's clock at the first event; `end_us` at the last.
        commands: commands to workers, which no simulated engine obeys.
        divergence: where the journal says something else than the events lead to; None for nowhere.
        unverified: what was passed over, counted by name.
    """

    state: list[Chunk]
    asked: list[Asked]
    said: list[tuple[int, External]] = field(default_factory=list)
    begin_us: int = 0
    end_us: int = 0
    commands: int = 0
    divergence: Divergence | None = None
    unverified: dict[str, int] = field(default_factory=dict)


class _Looking:
    """Collects a history while a walk derives, and so proves, what was decided."""

    def __init__(self, walk: Walk) -> None:
        """Begin before the first step of the walk."""
        world = walk.world
        self._world = world
        self._requests = Requests()
        self._void = self._voids()
        self.found = Lived(state_of(world), self._requests.asked, begin_us=world.now_us, end_us=world.now_us)
        self._requests.begin(world, None, world.now_us)
        walk.followed.on_applied = self._on_applied

    def _on_applied(self, _: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        found = self.found
        void = self._voids()
        heard, self._void = void == self._void, void
        found.begin_us = found.begin_us or now_us
        found.end_us = now_us
        self._requests.look(event, now_us, decided, heard=heard)
        match event:
            case PoolConfigured() | BusyThresholdsSet() | DisaggregationSet():
                found.said.append((now_us, event))
            case WorkerJoined() | WorkerSuspect() | WorkerRecovered() | WorkerDraining() | WorkerLost() if heard:
                found.said.append((now_us, event))
            case WorkerCommanded():
                found.commands += 1
            case _:
                pass

    def _voids(self) -> tuple[int, int]:
        """How many events counted for nothing so far, as their request or worker was over."""
        counts = self._world.counts
        return counts["outdated_progress"], counts["void_fleet_fact"]


async def lived(log: Log, partition: int, progress: OnProgress | None = None) -> Lived:
    """Derive the recorded history of a group from its earliest state on, and collect what it was made of.

    `progress` is as for `forebay.replay.verify.verify`.

    Raises:
        OtherRules: the journal was decided by another version of the rules.
        LogError: the log is damaged or misses a part that the journal says was applied.
    """
    walk = await walk_all(log, partition)
    found = _Looking(walk).found
    verified = 0
    async for step in walk:
        found.divergence = step.divergence
        verified += isinstance(step.record, AnyDecision)
        if progress is not None and (step.offset + 1 - walk.start) % PROGRESS_EVERY == 0:
            progress(step.offset + 1, walk.end, verified)
    found.unverified = walk.unverified
    return found
