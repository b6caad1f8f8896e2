"""Simulated worker processes: their start, their first lease, their crash and their restart."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from forebay.core.state.fleet import WorkerPhase
from forebay.engine_model.model import EngineModel
from forebay.events.fleet import WorkerDraining, WorkerJoined, WorkerLost, WorkerSpec, WorkerSuspect
from forebay.events.topics import FLEET
from forebay.simulate.cluster import SimulatedCluster
from forebay.simulate.delays import Draws, Hops
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import Settings, WorkerGroup, tiers_of
from forebay.simulate.tiers.fleet import TierFleet
from forebay.simulate.tiers.rank_tiers import SimulatedTiers

US_PER_S = 1e6
SUSPECT_AFTER = 0.5  # share of the lease, as on a live owner
DRAIN_CHECK_US = 1_000_000  # time between two checks whether a draining worker has finished its requests


@dataclass(slots=True, eq=False)
class WorkerProcess:
    """One simulated process of a worker, from its start to its death. Times are virtual."""

    begun_us: int
    died_us: int | None = None
    rank: EngineRank | None = None  # None before its first lease


@dataclass(slots=True, eq=False)
class SimulatedWorker:
    """Worker of the fleet. After a crash another process runs it, with the same `spec`."""

    number: int  # index among all workers
    spec: WorkerSpec
    group: WorkerGroup
    failures: Draws  # times between random failures
    processes: list[WorkerProcess] = field(default_factory=list)  # at most the last one runs
    removed: bool = False  # by a planner; its process may still drain
    restarting: bool = False  # whether a replacement process of a crashed one is scheduled


class WorkerProcesses:
    """Starts, crashes and restarts the processes of all workers of a run."""

    def __init__(self, settings: Settings, cluster: SimulatedCluster, owner_epoch: int, *, reports_costs: bool) -> None:
        self._settings = settings
        self._life = settings.life
        self._cluster = cluster
        self._owner_epoch = owner_epoch
        self._tiers = TierFleet(cluster, reports_costs=reports_costs)
        self.workers: list[SimulatedWorker] = []

    def begin(self, spec: WorkerSpec, group: WorkerGroup) -> None:
        """Add a worker that is warm and ready from the start."""
        self._join(*self._start(self._place(spec, group)))

    def start_at(self, at_us: int, spec: WorkerSpec, group: WorkerGroup) -> None:
        """Schedule the start of a worker at `at_us`. It joins after its cold start."""
        worker = self._place(spec, group)
        self._cluster.at(at_us, partial(self._start_cold, worker))

    def active(self, pool: str) -> list[SimulatedWorker]:
        """Return the workers of a pool that run, start or will be restarted, the newest process last."""
        found = [
            worker
            for worker in self.workers
            if worker.spec.pool == pool
            and not worker.removed
            and worker.processes
            and (worker.restarting or worker.processes[-1].died_us is None)
        ]
        return sorted(found, key=lambda worker: (worker.processes[-1].begun_us, worker.number))

    def add(self, pool: str, new: Callable[[], tuple[WorkerSpec, WorkerGroup]], cold_start_s: float) -> None:
        """Start a worker of a pool: one that was removed and has stopped, or else a new one."""
        stopped = (
            worker
            for worker in self.workers
            if worker.spec.pool == pool and worker.removed and worker.processes[-1].died_us is not None
        )
        worker = next(stopped, None) or self._place(*new())
        worker.removed = False
        self._start_cold(worker, cold_start_s)

    def remove(self, worker: SimulatedWorker, is_idle: Callable[[EngineRank], bool]) -> None:
        """Stop a worker that starts, or drain one that runs: it gets no new requests and finishes its own."""
        worker.removed, worker.restarting = True, False
        process = worker.processes[-1]
        if process.died_us is not None:
            return
        if process.rank is None:
            process.died_us = self._cluster.now_us
            return
        draining = WorkerDraining(
            owner_epoch=self._owner_epoch, worker_id=worker.spec.worker_id, worker_epoch=process.rank.worker_epoch
        )
        self._cluster.apply(FLEET, draining)
        self._cluster.at(self._cluster.now_us + DRAIN_CHECK_US, partial(self._stop_if_idle, worker, process, is_idle))

    def _stop_if_idle(
        self, worker: SimulatedWorker, process: WorkerProcess, is_idle: Callable[[EngineRank], bool]
    ) -> None:
        cluster, rank = self._cluster, process.rank
        if process.died_us is not None or rank is None:
            return
        if not is_idle(rank):
            cluster.at(cluster.now_us + DRAIN_CHECK_US, partial(self._stop_if_idle, worker, process, is_idle))
            return
        process.died_us = cluster.now_us
        cluster.die(rank)
        self._lose(worker, "its lease was released")

    def tiers(self) -> list[SimulatedTiers]:
        """Return the tiers of all ranks that ever joined."""
        ranks = (one.rank for worker in self.workers for one in worker.processes)
        return [rank.tiers for rank in ranks if rank is not None and rank.tiers is not None]

    def plan_faults(self) -> None:
        """Schedule the configured faults. Call this after all workers were added."""
        by_id = {worker.spec.worker_id: worker for worker in self.workers}
        for fault in self._life.faults:
            back_us = None if fault.back_s is None else round(fault.back_s * US_PER_S)
            self._cluster.at(round(fault.at_s * US_PER_S), partial(self._die, by_id[fault.worker], back_us))

    def gpu_s(self, until_us: int) -> float:
        """Return the GPU seconds used by all processes until `until_us`, including cold starts."""
        used = 0.0
        for worker in self.workers:
            ends_us = [until_us if one.died_us is None else min(one.died_us, until_us) for one in worker.processes]
            begun_us = [min(one.begun_us, until_us) for one in worker.processes]
            used += (sum(ends_us) - sum(begun_us)) / US_PER_S * worker.group.gpus
        return used

    def _place(self, spec: WorkerSpec, group: WorkerGroup) -> SimulatedWorker:
        worker = SimulatedWorker(
            len(self.workers), spec, group, Draws(self._settings.seed, f"failures {spec.worker_id}")
        )
        self.workers.append(worker)
        return worker

    def _start(self, worker: SimulatedWorker) -> tuple[SimulatedWorker, WorkerProcess]:
        process = WorkerProcess(self._cluster.now_us)
        worker.processes.append(process)
        return worker, process

    def _start_cold(self, worker: SimulatedWorker, cold_start_s: float | None = None) -> None:
        worker.restarting = False
        cold_us = round((self._life.cold_start_s if cold_start_s is None else cold_start_s) * US_PER_S)
        self._cluster.at(self._cluster.now_us + cold_us, partial(self._join, *self._start(worker)))

    def _restart(self, worker: SimulatedWorker) -> None:
        if worker.restarting:
            self._start_cold(worker)

    def _join(self, worker: SimulatedWorker, process: WorkerProcess) -> None:
        """Grant the first lease to a process, which adds its worker to the fleet."""
        if process.died_us is not None:
            return
        cluster, spec = self._cluster, worker.spec
        self._lose(worker, "a new incarnation took over its name")
        worker_epoch = cluster.world.view.get(FLEET.name, 0)
        hops = Hops(self._settings.delays, self._settings.seed, f"{spec.worker_id} {worker_epoch}")
        config = worker.group.engine
        chosen = tiers_of(self._settings, worker.group)
        block_bytes = config.block_size * self._settings.transfer.kv_bytes_per_token
        on_changed = partial(self._tiers_changed, process)
        tiers = self._tiers.build(chosen, spec.model, config, block_bytes, on_changed)
        engine = EngineModel(config) if tiers is None else tiers.engine
        process.rank = EngineRank(worker.number, spec, 0, worker_epoch, engine, tiers=tiers, hops=hops)
        cluster.add(process.rank)
        joined = WorkerJoined(
            owner_epoch=self._owner_epoch, spec=spec, lease=spec.worker_id, slot=worker.number, from_offset=0
        )
        cluster.apply(FLEET, joined)
        before = [one.rank.tiers for one in worker.processes[:-1] if one.rank is not None]
        if tiers is not None and before and before[-1] is not None:
            tiers.restore("disk", before[-1].stored_on_disk())
            cluster.tiers_changed(process.rank, is_loaded=False)
        if self._life.mtbf_s:
            after_us = worker.failures.next(round(self._life.mtbf_s * US_PER_S))
            repair_us = round(self._life.repair_s * US_PER_S)
            cluster.at(cluster.now_us + after_us, partial(self._fail_randomly, worker, process, repair_us))

    def _tiers_changed(self, process: WorkerProcess, is_loaded: bool) -> None:
        assert process.rank is not None, "transfers begin after the first lease"
        self._cluster.tiers_changed(process.rank, is_loaded=is_loaded)

    def _fail_randomly(self, worker: SimulatedWorker, process: WorkerProcess, repair_us: int) -> None:
        if process.died_us is None:
            self._die(worker, repair_us)

    def _die(self, worker: SimulatedWorker, back_us: int | None) -> None:
        """Kill the current process. The router notices when its lease expires."""
        if not worker.processes or worker.processes[-1].died_us is not None:
            return
        cluster, process = self._cluster, worker.processes[-1]
        process.died_us = cluster.now_us
        if process.rank is not None:
            cluster.die(process.rank)
            lease_us = round(self._life.lease_ttl_s * US_PER_S)
            cluster.at(cluster.now_us + round(lease_us * SUSPECT_AFTER), partial(self._suspect, worker, process.rank))
            epoch = process.rank.worker_epoch
            cluster.at(cluster.now_us + lease_us, partial(self._lose, worker, "its lease expired", epoch))
        if back_us is not None and not worker.removed:
            worker.restarting = True
            cluster.at(cluster.now_us + back_us, partial(self._restart, worker))

    def _suspect(self, worker: SimulatedWorker, rank: EngineRank) -> None:
        member = self._cluster.world.fleet.get(worker.spec.worker_id)
        if member is not None and member.worker_epoch == rank.worker_epoch and member.phase is WorkerPhase.READY:
            suspect = WorkerSuspect(
                owner_epoch=self._owner_epoch, worker_id=worker.spec.worker_id, worker_epoch=rank.worker_epoch
            )
            self._cluster.apply(FLEET, suspect)

    def _lose(self, worker: SimulatedWorker, reason: str, epoch: int | None = None) -> None:
        member = self._cluster.world.fleet.get(worker.spec.worker_id)
        if member is not None and epoch in (None, member.worker_epoch):
            lost = WorkerLost(
                owner_epoch=self._owner_epoch,
                worker_id=worker.spec.worker_id,
                worker_epoch=member.worker_epoch,
                reason=reason,
            )
            self._cluster.apply(FLEET, lost)
