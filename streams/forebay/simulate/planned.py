"""Planner in a simulation: it observes the simulated pools, decides their sizes, and starts and drains their workers.

Theory of operation. At the end of each interval, the planner gets the same observation that a planner on the log would
get: it is folded from the events of the simulated group, with a load report of each worker at this time. A decision is
executed at once. Workers that the planner starts are ready after `startup_s` of their pool. Workers that it removes get
no new requests and stop once they have finished their own.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from forebay.core.scaling.observation import GroupObservation
from forebay.core.scaling.virtual_planner import Forecast, SimulateSizes, VirtualPlanner
from forebay.core.step import AnyDecision, InputEvent
from forebay.events.decisions import JournalRecord
from forebay.events.fleet import WorkerSpec
from forebay.events.scaling import PlannerSettings, PoolScaling
from forebay.events.topics import KV_EVENTS, Topic
from forebay.simulate.cluster import SimulatedCluster
from forebay.simulate.outcome import PlannedInterval
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import WORKERS_MAX, PoolSettings, Settings, SettingsUnusable, WorkerGroup
from forebay.simulate.worker_processes import US_PER_S, WorkerProcesses

NewWorker = Callable[[PoolSettings], tuple[WorkerSpec, WorkerGroup]]


@dataclass(frozen=True, slots=True)
class Planning:
    """Planner of a simulation. Picklable if the functions are."""

    settings: PlannerSettings  # settings of the planner. Its pools have the names of pools of the fleet.
    forecast: Forecast
    # Simulates a forecast with different sizes, in no virtual time. Method `simulate` needs it.
    simulate: SimulateSizes | None = None


class PlannedCluster(SimulatedCluster):
    """Cluster whose events a planner observes. Set `observation` before the first event."""

    observation: GroupObservation

    def derive(self, topic: Topic, event: InputEvent) -> list[AnyDecision]:
        """Apply one record to the world and to the observation, and return the decisions."""
        if topic is not KV_EVENTS:
            self.observation.apply(event, self.world.view.get(topic.name, 0), self.now_us)
        return super().derive(topic, event)

    def journal(self, record: JournalRecord) -> None:
        """Add a record of the owner's journal to the digest and to the observation."""
        super().journal(record)
        self.observation.apply(record, 0, self.now_us)

    def is_idle(self, rank: EngineRank) -> bool:
        """Return whether a rank has no request, and retains no KV for another rank."""
        load = rank.engine.load()
        busy = load.running or load.waiting or rank.retained or rank.step is not None
        return not busy and all(request.rank is not rank for request in self._active.values())


class PlannedFleet:
    """Runs the planner in the virtual time of a cluster. `intervals` has what happened in each interval so far."""

    def __init__(
        self, planning: Planning, cluster: PlannedCluster, processes: WorkerProcesses,
        pools: Mapping[str, PoolSettings], new: NewWorker,
    ) -> None:  # fmt: skip
        """Create a planner before any worker joins. `new` returns the WorkerSpec and WorkerGroup of a new worker."""
        self.intervals: list[PlannedInterval] = []
        self._settings = planning.settings
        self._planner = VirtualPlanner(planning.settings, planning.forecast, simulate=planning.simulate)
        self._cluster = cluster
        self._processes = processes
        self._pools = pools
        self._new = new
        self._interval_us = max(1, round(planning.settings.interval_s * US_PER_S))
        cluster.observation = GroupObservation(planning.settings.pools)

    def begin(self) -> None:
        """Begin the first interval. Call when the workers of the initial fleet have joined."""
        self._cluster.observation.begin(self._cluster.now_us)
        self._cluster.at(self._cluster.now_us + self._interval_us, self._plan)

    def _plan(self) -> None:
        """Observe, decide and execute the decision, and schedule the next interval."""
        cluster, now_us = self._cluster, self._cluster.now_us
        for number in sorted(cluster.ranks):
            if not cluster.ranks[number].dead:
                cluster.observation.apply(cluster.ranks[number].report(), 0, now_us)
        observed = cluster.observation.observe(now_us)
        decisions = self._planner.plan(observed, now_us)
        sizes = {}
        for pool in self._settings.pools:
            if not self._settings.advisory:
                self._resize(pool, self._planner.state.size(pool))
            sizes[pool.pool] = len(self._processes.active(pool.pool))
        gpu_s = self._processes.gpu_s(now_us)
        self.intervals.append(PlannedInterval(now_us, observed, tuple(decisions), sizes, gpu_s))
        cluster.at(now_us + self._interval_us, self._plan)

    def _resize(self, pool: PoolScaling, size: int | None) -> None:
        active = self._processes.active(pool.pool)
        for worker in active[len(active) if size is None else size :]:
            self._processes.remove(worker, self._cluster.is_idle)
        for _ in range(len(active), len(active) if size is None else size):
            self._processes.add(pool.pool, partial(self._new, self._pools[pool.pool]), pool.startup_s)


def require_plannable(planner: PlannerSettings, settings: Settings) -> None:
    """Check that a planner can scale the pools of a fleet."""
    pools = {pool.name: pool for pool in settings.pools}
    groups = {pool.group for pool in planner.pools}
    if settings.models > 1 or len(groups) > 1:
        raise SettingsUnusable("pools", "a planner can be simulated only for the pools of one model")
    if settings.life.starts:
        raise SettingsUnusable("starts", "scheduled starts cannot be combined with a planner; remove one of them")
    for at, one in enumerate(planner.pools):
        pool = pools.get(one.pool)
        if pool is None:
            raise SettingsUnusable(f"pools[{at}].pool", f"unknown pool {one.pool!r}; pools are: {', '.join(pools)}")
        if pool.role != one.role:
            raise SettingsUnusable(f"pools[{at}].role", f"got {one.role!r}, but the pool has the role {pool.role!r}")
        if len(pool.groups) > 1:
            raise SettingsUnusable(f"pools[{at}].pool", f"pool {one.pool!r} has several kinds of workers; use one")
    most = sum(one.max_size for one in planner.pools)
    if most > WORKERS_MAX:
        raise SettingsUnusable("pools", f"the largest sizes sum up to {most} workers; the maximum is {WORKERS_MAX}")
