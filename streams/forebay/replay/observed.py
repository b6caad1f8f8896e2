"""Read the observed history of a recording as input for the simulator.

The input consists of the initial state, and the requests and external events after it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from forebay.core.rederive import Divergence
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.step import AnyDecision, InputEvent
from forebay.events.control import BusyThresholdsSet, DisaggregationSet, PolicySet, PoolConfigured, WorkerCommanded
from forebay.events.fleet import WorkerDraining, WorkerJoined, WorkerLost, WorkerRecovered, WorkerSuspect
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRoutingConfigured
from forebay.events.snapshots import Chunk
from forebay.replay.diff.handover import OperatorEvent, RecordedRequest, RequestCollector, state_of
from forebay.replay.verify.verify import PROGRESS_EVERY, OnProgress
from forebay.replay.walk import Walk, walk_all
from forebay.transport.base import Log

FleetFact = WorkerSuspect | WorkerRecovered | WorkerDraining | WorkerLost
ExternalEvent = OperatorEvent | WorkerJoined | FleetFact


@dataclass(slots=True)
class ObservedHistory:
    """Observed history of one group.

    Attributes:
        state: snapshot chunks of the group's world at the beginning, without requests.
        requests: requests in order of arrival. The first ones are the requests that are active at the beginning.
        external_events: configuration changes, and fleet events that had an effect. Each comes with the owner's clock
            when it was applied, in microseconds.
        begin_us: the owner's clock at the first event, in microseconds.
        end_us: the owner's clock at the last event, in microseconds.
        commands: number of worker commands. Simulated engines ignore them.
        divergence: the first journal record that does not follow from the events; None if there is none.
        unverified: number of skipped records and events, by the kind of problem.
    """

    state: list[Chunk]
    requests: list[RecordedRequest]
    external_events: list[tuple[int, ExternalEvent]] = field(default_factory=list)
    begin_us: int = 0
    end_us: int = 0
    commands: int = 0
    divergence: Divergence | None = None
    unverified: dict[str, int] = field(default_factory=dict)


class _HistoryCollector:
    """Collects a history while a walk derives, and thereby verifies, its decisions."""

    def __init__(self, walk: Walk) -> None:
        """Register with `walk`, which must not have begun."""
        world = walk.world
        self._world = world
        self._requests = RequestCollector()
        self._void = self._voids()
        self.found = ObservedHistory(
            state_of(world), self._requests.requests, begin_us=world.now_us, end_us=world.now_us
        )
        self._requests.begin(world, None, world.now_us)
        walk.followed.on_applied = self._on_applied

    def _on_applied(self, _: str, event: InputEvent | None, now_us: int, decided: Sequence[AnyDecision]) -> None:
        found = self.found
        void = self._voids()
        accepted, self._void = void == self._void, void
        found.begin_us = found.begin_us or now_us
        found.end_us = now_us
        self._requests.observe(event, now_us, decided, accepted=accepted)
        match event:
            case PoolConfigured() | PoolRoutingConfigured() | PoolCanarySet() | PoolDrainSet():
                found.external_events.append((now_us, event))
            case BusyThresholdsSet() | DisaggregationSet() | PolicySet():
                found.external_events.append((now_us, event))
            case WorkerJoined() | WorkerSuspect() | WorkerRecovered() | WorkerDraining() | WorkerLost() if accepted:
                found.external_events.append((now_us, event))
            case WorkerCommanded():
                found.commands += 1
            case _:
                pass

    def _voids(self) -> tuple[int, int]:
        """Return how many progress events and fleet events were ignored because they were stale."""
        counts = self._world.counts
        return counts["stale_progress"], counts["stale_fleet_event"]


async def observe_history(
    log: Log, partition: int, progress: OnProgress | None = None, custom: CustomPolicies = ONLY_BUILT_IN
) -> ObservedHistory:
    """Derive the recorded history of a group from its oldest usable state, and collect the input for the simulator.

    Args:
        progress: called regularly with the number of journal records done, their total, and the decisions verified.

    Raises:
        OtherRules: a program with other decision rules wrote the journal.
        LogError: the log is damaged, or lacks events that the journal consumed.
    """
    walk = await walk_all(log, partition, custom)
    found = _HistoryCollector(walk).found
    verified = 0
    async for step in walk:
        found.divergence = step.divergence
        verified += isinstance(step.record, AnyDecision)
        if progress is not None and (step.offset + 1 - walk.start) % PROGRESS_EVERY == 0:
            progress(step.offset + 1, walk.end, verified)
    found.unverified = walk.unverified
    return found
