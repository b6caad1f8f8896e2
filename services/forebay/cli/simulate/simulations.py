"""Parallel simulations, one process per simulation, with progress on stderr."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import msgspec
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from forebay.cli.common.tables import bar
from forebay.cli.common.terminal import own_stdout
from forebay.cli.planner.planner_file import PlannerFile
from forebay.cli.simulate.planned import planned_metrics, planning_of
from forebay.events.control import RouterConfig
from forebay.replay.policies import load_policies
from forebay.simulate.outcome import SimulationOutcome, summary
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import Settings
from forebay.simulate.simulation import Simulation
from forebay.simulate.slo import Slo, goodput
from forebay.simulate.workload import WorkloadOptions

LOOK_EVERY_S = 0.2
S_PER_HOUR = 3600
US_PER_S = 1e6

T = TypeVar("T")
OnDone = Callable[[int], object]
_process: dict[str, Any] = {}  # arguments of a worker process; an executor's initializer can only set globals


class Job(msgspec.Struct, frozen=True):
    """One simulation to run, by the process that opens its workload. `requests` are expected, for the progress."""

    name: str
    settings: Settings
    router: RouterConfig
    workload: str
    options: WorkloadOptions = WorkloadOptions()
    requests: int = 0
    planner: PlannerFile | None = None


@dataclass(frozen=True, slots=True)
class SimulationRun:
    name: str
    settings: Settings
    router: RouterConfig
    outcome: SimulationOutcome  # outcome of every request; empty if `simulate_run` was called without `whole`
    summary: dict[str, Any]  # metrics of the run, as `--json` prints them


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """Task for a worker process."""

    total: int  # amount of work, in units of `do`
    # Picklable function that does the work. It calls its argument with the amount of work done so far.
    do: Callable[[OnDone], T]


def play(job: Job, on_done: OnDone) -> SimulationOutcome:
    """Run a simulation in this process. `on_done` is called with the number of requests that have arrived."""
    routers = [job.router, *(pool.router for pool in job.settings.pools if pool.router is not None)]
    custom = load_policies(router.mode for router in routers)
    simulation = Simulation(job.settings, job.router, custom, planning_of(job.planner))
    return simulation.run(open_workload(job.workload, job.options), on_done)


def run_metrics(job: Job, outcome: SimulationOutcome, slo: Slo | None) -> dict[str, Any]:
    """Return the metrics of a simulation as printed in JSON."""
    statistics = summary(outcome, len(outcome.workers))
    statistics["retried"] = sum(attempts > 1 for attempts in outcome.requests.column("attempts"))
    statistics["lasted_s"] = outcome.lasted_us / US_PER_S
    statistics["gpu_hours"] = outcome.gpu_s / S_PER_HOUR
    if slo is not None and outcome.planned:
        statistics["planner"] = planned_metrics(outcome, slo)
    return statistics if slo is None else {**statistics, **goodput(outcome, slo)}


def simulate_metrics(job: Job, slo: Slo | None, on_done: OnDone) -> dict[str, Any]:
    return run_metrics(job, play(job, on_done), slo)


def simulate_run(job: Job, slo: Slo | None, whole: bool, on_done: OnDone) -> SimulationRun:
    """Run a simulation in this process. The outcomes of single requests are kept only if `whole` is true."""
    outcome = play(job, on_done)
    return SimulationRun(
        job.name, job.settings, job.router, outcome if whole else SimulationOutcome(), run_metrics(job, outcome, slo)
    )


def reason(error: Exception) -> str:
    """Return the reason why a simulation failed, as text for the user."""
    if isinstance(error, BrokenProcessPool):
        return "a simulation process was killed, possibly because it ran out of memory"
    return str(error) or repr(error)


def run_all(todo: Sequence[Work[T]]) -> list[T | Exception]:
    """Run all tasks in parallel, one process per CPU. Terminates the processes if interrupted.

    Returns the result or the exception of each task, in order. A failing task does not stop the others.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
    with bar(*columns, TimeRemainingColumn()) as progress:
        task = progress.add_task("simulating", total=sum(work.total for work in todo))
        if len(todo) == 1:
            with own_stdout():
                return [_result(partial(todo[0].do, lambda done: progress.update(task, completed=done)))]
        # Spawn, because a forked child would inherit threads and the hash seed.
        context = multiprocessing.get_context("spawn")
        arrived = context.Array("q", len(todo), lock=False)
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(min(len(todo), os.cpu_count() or 1), context, _start_process, (arrived,))
        try:
            with _interrupts_later():
                running = [pool.submit(_do_in_process, at, work) for at, work in enumerate(todo)]
            left: set[Future[T]] = set(running)
            while left:
                left = wait(left, LOOK_EVERY_S).not_done
                description = f"{len(todo) - len(left)} of {len(todo)} runs"
                progress.update(task, completed=sum(arrived), description=description)
            return [_result(one.result) for one in running]
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _result(run: Callable[[], T]) -> T | Exception:
    try:
        return run()
    except Exception as error:  # noqa: BLE001 - a user-defined policy may raise anything
        return error


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Block SIGINT in processes started within the body, because Ctrl-C reaches every process of a terminal."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _start_process(arrived: Any) -> None:
    _process["arrived"] = arrived
    sys.stdout = sys.stderr  # keep output of user-defined policies off stdout
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """Exit when the parent dies. A killed parent cannot stop its children itself."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do_in_process(at: int, work: Work[T]) -> T:
    arrived = _process["arrived"]
    result = work.do(partial(arrived.__setitem__, at))
    arrived[at] = work.total
    return result
