"""The processes of workers: who is started, joins, dies without a word and is started again."""

from functools import partial

from forebay.core.state.fleet import WorkerPhase
from forebay.engine_model.model import EngineModel
from forebay.events.fleet import WorkerJoined, WorkerLost, WorkerSpec, WorkerSuspect
from forebay.events.topics import FLEET
from forebay.simulate.cluster import Cluster
from forebay.simulate.delays import Draws, Hops
from forebay.simulate.rank import EngineRank
from forebay.simulate.settings import Settings, WorkerGroup

US_PER_S = 1e6
SUSPECT_AFTER = 0.5  # of a lease, as the live owner has it


class Process:
    """One life of a worker: from its start to its death, if it dies."""

    def __init__(self, begun_us: int) -> None:
        self.begun_us = begun_us
        self.died_us: int | None = None
        self.rank: EngineRank | None = None  # None before its first lease


class Worker:
    """A place in the fleet that one process after another takes. `spec` is what each offers."""

    def __init__(self, number: int, spec: WorkerSpec, group: WorkerGroup, seed: int) -> None:
        self.number = number
        self.spec = spec
        self.group = group
        self.processes: list[Process] = []
        self.failures = Draws(seed, f"failures {spec.worker_id}")


class Lives:
    """All workers of a run, by number."""

    def __init__(self, settings: Settings, cluster: Cluster, owner_epoch: int) -> None:
        self._settings = settings
        self._life = settings.life
        self._cluster = cluster
        self._owner_epoch = owner_epoch
        self.workers: list[Worker] = []

    def begin(self, spec: WorkerSpec, group: WorkerGroup) -> None:
        """A worker that is there from the start, warm."""
        self._join(*self._start(self._place(spec, group)))

    def start_at(self, at_us: int, spec: WorkerSpec, group: WorkerGroup) -> None:
        """A worker that is started later, and joins when it is warm."""
        worker = self._place(spec, group)
        self._cluster.at(at_us, partial(self._start_cold, worker))

    def plan_faults(self) -> None:
        """Those that are given. Call when all workers have their places."""
        by_id = {worker.spec.worker_id: worker for worker in self.workers}
        for fault in self._life.faults:
            self._cluster.at(fault.at_us, partial(self._die, by_id[fault.worker], fault.back_us))

    def gpu_s(self, until_us: int) -> float:
        """GPU seconds for which processes were there, cold starts included."""
        used = 0.0
        for worker in self.workers:
            ends_us = [until_us if one.died_us is None else min(one.died_us, until_us) for one in worker.processes]
            begun_us = [min(one.begun_us, until_us) for one in worker.processes]
            used += (sum(ends_us) - sum(begun_us)) / US_PER_S * worker.group.gpus
        return used

    def _place(self, spec: WorkerSpec, group: WorkerGroup) -> Worker:
        worker = Worker(len(self.workers), spec, group, self._settings.seed)
        self.workers.append(worker)
        return worker

    def _start(self, worker: Worker) -> tuple[Worker, Process]:
        process = Process(self._cluster.now_us)
        worker.processes.append(process)
        return worker, process

    def _start_cold(self, worker: Worker) -> None:
        cold_us = round(self._life.cold_start_s * US_PER_S)
        self._cluster.at(self._cluster.now_us + cold_us, partial(self._join, *self._start(worker)))

    def _join(self, worker: Worker, process: Process) -> None:
        """The first lease of a process."""
        if process.died_us is not None:
            return
        cluster, spec = self._cluster, worker.spec
        self._lose(worker, "another incarnation took its name")
        worker_epoch = cluster.world.view.get(FLEET.name, 0)
        hops = Hops(self._settings.delays, self._settings.seed, f"{spec.worker_id} {worker_epoch}")
        engine = EngineModel(worker.group.engine)
        process.rank = EngineRank(worker.number, spec, 0, worker_epoch, engine, hops=hops)
        cluster.add(process.rank)
        joined = WorkerJoined(
            owner_epoch=self._owner_epoch, spec=spec, lease=spec.worker_id, slot=worker.number, from_offset=0
        )
        cluster.apply(FLEET, joined)
        if self._life.mtbf_s:
            after_us = worker.failures.next(round(self._life.mtbf_s * US_PER_S))
            repair_us = round(self._life.repair_s * US_PER_S)
            cluster.at(cluster.now_us + after_us, partial(self._die_of_chance, worker, process, repair_us))

    def _die_of_chance(self, worker: Worker, process: Process, repair_us: int) -> None:
        if process.died_us is None:
            self._die(worker, repair_us)

    def _die(self, worker: Worker, back_us: int | None) -> None:
        """Whoever is there now dies; it is missed when its lease runs out."""
        if not worker.processes or worker.processes[-1].died_us is not None:
            return
        cluster, process = self._cluster, worker.processes[-1]
        process.died_us = cluster.now_us
        if process.rank is not None:
            cluster.die(process.rank)
            lease_us = round(self._life.lease_ttl_s * US_PER_S)
            cluster.at(cluster.now_us + round(lease_us * SUSPECT_AFTER), partial(self._suspect, worker, process.rank))
            cluster.at(cluster.now_us + lease_us, partial(self._lose_rank, worker, process.rank))
        if back_us is not None:
            cluster.at(cluster.now_us + back_us, partial(self._start_cold, worker))

    def _suspect(self, worker: Worker, rank: EngineRank) -> None:
        member = self._cluster.world.fleet.get(worker.spec.worker_id)
        if member is not None and member.worker_epoch == rank.worker_epoch and member.phase is WorkerPhase.READY:
            suspect = WorkerSuspect(
                owner_epoch=self._owner_epoch, worker_id=worker.spec.worker_id, worker_epoch=rank.worker_epoch
            )
            self._cluster.apply(FLEET, suspect)

    def _lose_rank(self, worker: Worker, rank: EngineRank) -> None:
        member = self._cluster.world.fleet.get(worker.spec.worker_id)
        if member is not None and member.worker_epoch == rank.worker_epoch:
            self._lose(worker, "its lease ran out")

    def _lose(self, worker: Worker, reason: str) -> None:
        member = self._cluster.world.fleet.get(worker.spec.worker_id)
        if member is not None:
            lost = WorkerLost(
                owner_epoch=self._owner_epoch,
                worker_id=worker.spec.worker_id,
                worker_epoch=member.worker_epoch,
                reason=reason,
            )
            self._cluster.apply(FLEET, lost)
