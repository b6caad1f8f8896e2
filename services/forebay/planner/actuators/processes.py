"""Actuator that starts and drains workers as processes of this machine.

Theory of operation. The supervisor records what it wants before it acts: the record of a worker is written before its
process is started, and changed before it is drained. Processes survive their supervisor. The next one reads the
records, finds the processes again, starts workers that have ended meanwhile and continues drains.

SIGTERM drains a worker, and the worker ends itself. Only a worker that still runs after `kill_after_s` is killed. A
worker that ends without a drain is started again, with exponential backoff.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Literal, get_args

import msgspec
from prometheus_client.core import Metric

from forebay import runtime
from forebay.core.scaling.state import PoolKey
from forebay.live.planner.actuator import ActuatorService, Reached
from forebay.planner.actuators.os_processes import (
    ProcessIdentity,
    exit_code,
    is_running,
    kill_session,
    recorded_identity,
    start_process,
    terminate,
)
from forebay.planner.actuators.worker_directory import Drain, SupervisedWorker, WorkerDirectory
from forebay.runtime.errors import ConfigError
from forebay.runtime.metrics import collector, counter, gauge

logger = logging.getLogger(__name__)

WorkerStatus = Literal["running", "restarting", "draining"]

WORKERS_MAX = 256  # processes of one supervisor, as many as `forebay serve` starts
KILL_AFTER_S = 600.0  # a worker with default options ends within 64 s of SIGTERM
KILL_AGAIN_S = 10.0  # a process that waits for a device ends some time after SIGKILL
DOUBLINGS_MAX = 32  # of the backoff, far above its maximum, so that it stays a number
MESSAGE_CHARS_MAX = 1_000  # of a reply on the log


@dataclass(frozen=True, slots=True)
class ProcessPool:
    group: str
    pool: str
    command: tuple[str, ...]  # program and arguments of a worker, without its id
    kill_after_s: float = KILL_AFTER_S  # seconds after SIGTERM after which a worker that still runs is killed


@dataclass(frozen=True, slots=True)
class RestartSettings:
    poll_s: float = 0.25  # seconds between checks of the processes
    started_s: float = 2.0  # seconds after its start after which a new worker counts as started
    wait_s: float = 30.0  # maximum seconds for which `scale` waits until new workers have started or failed
    failures_max: int = 3  # consecutive ends after which a worker counts as failed
    stable_s: float = 60.0  # seconds of a run after which earlier ends are forgotten
    backoff_s: float = 1.0  # seconds until the first restart; doubled for each further one
    backoff_s_max: float = 60.0  # maximum seconds until a restart


@dataclass(slots=True)
class _Worker:
    """State of a worker; times are of the monotonic clock."""

    record: SupervisedWorker
    process: ProcessIdentity | None = None  # its process; None if it has ended
    started_s: float = 0.0  # when the process was started or found
    failures: int = 0  # consecutive ends without a stable run
    retry_s: float = 0.0  # when it is started again
    kill_s: float = inf
    problem: str = ""  # why its process ended or could not be started


class ProcessActuator:
    def __init__(
        self,
        pools: Sequence[ProcessPool],
        directory: WorkerDirectory,
        environment: Mapping[str, str],
        restarts: RestartSettings | None = None,
    ) -> None:
        """Find the workers of an earlier supervisor again.

        Raises ConfigError if a record is unreadable, or a worker of another pool runs.
        """
        self.name = "processes"
        self._pools = {(one.group, one.pool): one for one in pools}
        self.pools = frozenset(self._pools)
        self._directory = directory
        self._environment = environment
        self._restarts = restarts or RestartSettings()
        self._workers: dict[tuple[str, str], _Worker] = {}
        for record in directory.records():
            self._find(record)

    @property
    def running(self) -> int:
        """Number of workers whose processes run, draining ones included."""
        return sum(worker.process is not None for worker in self._workers.values())

    def counts(self) -> Counter[tuple[PoolKey, WorkerStatus]]:
        """Return the number of workers by pool and status. The status `restarting` means that no process runs."""
        found: Counter[tuple[PoolKey, WorkerStatus]] = Counter()
        for worker in self._workers.values():
            drains = worker.record.drain != "none"
            status: WorkerStatus = "draining" if drains else "restarting" if worker.process is None else "running"
            found[_key(worker.record), status] += 1
        return found

    async def run(self) -> None:
        """Start workers that have ended again, and end drains that take too long, until cancelled."""
        while True:
            self.check()
            for record in [worker.record for worker in self._workers.values()]:
                if self._directory.has_long_output(record):
                    try:
                        await runtime.offload(self._directory.rotate, record)
                    except OSError as error:
                        logger.warning("output of worker %s was dropped: %s", record.worker_id, error)
            await asyncio.sleep(self._restarts.poll_s)

    async def scale(self, sizes: Mapping[PoolKey, int]) -> Reached:
        """Start missing workers, or drain the newest ones, and wait until the new ones have started or failed.

        Workers that fail are given up, so the reached sizes are the sizes that this supervisor keeps.
        """
        problems = [problem for pool, size in sizes.items() for problem in self._resize(pool, size)]
        ends_s = runtime.monotonic_s() + self._restarts.wait_s
        while runtime.monotonic_s() < ends_s and any(self._is_starting(worker) for worker in self._wanted(sizes)):
            await asyncio.sleep(self._restarts.poll_s)
            self.check()
        for worker in self._wanted(sizes):
            if self._has_failed(worker):
                problems.append(
                    f"worker {worker.record.worker_id} failed {worker.failures} times: {worker.problem};"
                    f" its output is in {self._directory.output(worker.record)}"
                )
                problems += self._attempt(worker, self._drain)
        reached = {pool: len(self._wanted([pool])) for pool in sizes}
        return Reached(reached, "; ".join(problems)[:MESSAGE_CHARS_MAX])

    def check(self) -> None:
        """Look at each process once, and start, forget or kill its worker if that is due."""
        now_s = runtime.monotonic_s()
        for worker in list(self._workers.values()):
            if worker.process is None:
                if worker.record.drain != "none":
                    self._attempt(worker, self._forget)
                elif now_s >= worker.retry_s:
                    self._start(worker)
            elif not is_running(worker.process):
                self._on_end(worker, worker.process)
            elif now_s >= worker.kill_s:
                self._attempt(worker, self._kill)
            elif worker.failures and now_s - worker.started_s >= self._restarts.stable_s:
                worker.failures = 0

    def _find(self, record: SupervisedWorker) -> None:
        file = self._directory.process(record)
        try:
            process = recorded_identity(file)
        except OSError as error:
            raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
        if process is not None and not is_running(process):
            process = None
        name = f"{record.group}/{record.pool}"
        if _key(record) not in self._pools:
            if process is not None:
                raise ConfigError(
                    f"worker {record.worker_id} (pid {process.pid}) of an earlier run belongs to the pool {name}, which"
                    " the file does not contain; add the pool, or end the worker with SIGTERM"
                )
            return
        worker = _Worker(record, process, started_s=runtime.monotonic_s())
        self._workers[record.group, record.worker_id] = worker
        if process is None:
            return
        logger.info("found worker %s of %s with pid %d", record.worker_id, name, process.pid)
        if record.drain == "requested":
            self._attempt(worker, self._drain)
        elif record.drain == "signalled":
            # The whole time again, because nothing on disk says reliably how much has passed.
            worker.kill_s = runtime.monotonic_s() + self._pools[_key(record)].kill_after_s

    def _resize(self, pool: PoolKey, size: int) -> list[str]:
        """Start or drain workers of a pool. Return why the size is not reached."""
        wanted = self._wanted([pool])
        if size < len(wanted):
            leaving = sorted(wanted, key=_drain_order)[: len(wanted) - size]
            return [problem for worker in leaving for problem in self._attempt(worker, self._drain)]
        missing = size - len(wanted)
        room = WORKERS_MAX - len(self._workers)
        for _ in range(min(missing, room)):
            record = SupervisedWorker(group=pool[0], pool=pool[1], number=self._free_number(pool))
            worker = self._workers[record.group, record.worker_id] = _Worker(record)
            self._start(worker)
        if missing > room:
            return [f"a supervisor runs at most {WORKERS_MAX} workers, draining ones included"]
        return []

    def _free_number(self, pool: PoolKey) -> int:
        used = {worker.record.number for worker in self._workers.values() if _key(worker.record) == pool}
        return next(number for number in range(len(used) + 1) if number not in used)

    def _wanted(self, pools: Iterable[PoolKey]) -> list[_Worker]:
        names = set(pools)
        return [one for one in self._workers.values() if one.record.drain == "none" and _key(one.record) in names]

    def _is_starting(self, worker: _Worker) -> bool:
        """Return whether it is not yet known whether a worker starts or fails."""
        return not self._has_started(worker) and not self._has_failed(worker)

    def _has_started(self, worker: _Worker) -> bool:
        return worker.process is not None and runtime.monotonic_s() - worker.started_s >= self._restarts.started_s

    def _has_failed(self, worker: _Worker) -> bool:
        return worker.failures >= self._restarts.failures_max and not self._has_started(worker)

    def _attempt(self, worker: _Worker, action: Callable[[_Worker], None]) -> list[str]:
        """Do something with a worker. Return what failed, which is logged once."""
        try:
            action(worker)
        except OSError as error:
            problem = f"worker {worker.record.worker_id}: {error}"
            if problem != worker.problem:
                logger.error("%s", problem)  # noqa: TRY400 - the message is enough
            worker.problem = problem
            return [problem]
        return []

    def _start(self, worker: _Worker) -> None:
        record = worker.record
        worker.started_s = runtime.monotonic_s()
        try:
            self._directory.write(record)
            worker.process = start_process(
                [*self._pools[_key(record)].command, "--id", record.worker_id],
                record=self._directory.process(record),
                output=self._directory.output(record),
                lock=self._directory.lock,
                environment=self._environment,
            )
        except OSError as error:
            self._fail(worker, f"it cannot be started: {error}")
            return
        logger.info("started worker %s with pid %d", record.worker_id, worker.process.pid)

    def _drain(self, worker: _Worker) -> None:
        """Send SIGTERM to a worker, and let it go. A worker without a process is forgotten."""
        if worker.process is None:
            self._forget(worker)
            return
        self._mark(worker, "requested")
        worker.kill_s = runtime.monotonic_s() + self._pools[_key(worker.record)].kill_after_s
        terminate(worker.process)
        self._mark(worker, "signalled")
        logger.info("worker %s drains", worker.record.worker_id)

    def _kill(self, worker: _Worker) -> None:
        assert worker.process is not None
        worker.kill_s = runtime.monotonic_s() + KILL_AGAIN_S
        kill_session(worker.process)
        after_s = self._pools[_key(worker.record)].kill_after_s
        logger.warning("killed worker %s: it did not end within %g s of SIGTERM", worker.record.worker_id, after_s)

    def _on_end(self, worker: _Worker, process: ProcessIdentity) -> None:
        code = exit_code(process)
        worker.process = None
        if worker.record.drain != "none":
            logger.info("worker %s ended", worker.record.worker_id)
            self._attempt(worker, self._forget)
        else:
            self._fail(worker, "it ended" if code is None else f"it ended with code {code}")

    def _fail(self, worker: _Worker, problem: str) -> None:
        doublings = min(worker.failures, DOUBLINGS_MAX)
        backoff_s = min(self._restarts.backoff_s * 2.0**doublings, self._restarts.backoff_s_max)
        worker.failures += 1
        worker.problem = problem
        worker.retry_s = runtime.monotonic_s() + backoff_s
        logger.warning("worker %s: %s; starting it again in %g s", worker.record.worker_id, problem, backoff_s)

    def _forget(self, worker: _Worker) -> None:
        self._directory.remove(worker.record)
        del self._workers[worker.record.group, worker.record.worker_id]

    def _mark(self, worker: _Worker, drain: Drain) -> None:
        record = msgspec.structs.replace(worker.record, drain=drain)
        self._directory.write(record)
        worker.record = record


def _key(record: SupervisedWorker) -> PoolKey:
    return record.group, record.pool


def _drain_order(worker: _Worker) -> tuple[bool, int, int]:
    """Sort workers without a process first, then the newest."""
    started = worker.process.start_ticks if worker.process else 0
    return worker.process is not None, -started, -worker.record.number


@collector
def supervisor_metrics(service: ActuatorService, processes: ProcessActuator | None) -> Iterator[Metric]:
    """Prometheus collector for the replies of a supervisor, and for the workers that it runs as processes."""
    results, text = dict(sorted(service.results.items())), "decisions that this process executed or refused"
    yield counter("forebay_supervisor_decisions", text, results, "result")
    if processes is None:
        return
    counts = processes.counts()
    pools = sorted(processes.pools)
    workers = {(*pool, status): counts[pool, status] for pool in pools for status in get_args(WorkerStatus)}
    yield gauge("forebay_supervisor_workers", "workers of this supervisor", workers, "group", "pool", "status")
