"""Many simulations at once, each in a process of its own, with progress on stderr."""

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
from typing import Any, Generic, TypeVar

import msgspec
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from forebay.cli.common.terminal import bar, in_markup, own_stdout
from forebay.events.control import RouterConfig
from forebay.simulate.outcome import Outcome, summary
from forebay.simulate.reading import open_workload
from forebay.simulate.settings import Settings
from forebay.simulate.simulation import Simulation
from forebay.simulate.slo import Slo, goodput
from forebay.simulate.workload import WorkloadOptions

LOOK_EVERY_S = 0.2
S_PER_HOUR = 3600
US_PER_S = 1e6
BARS_MAX = 8  # of one more than these only those that run have a bar

T = TypeVar("T")
OnDone = Callable[[int], object]
_process: dict[str, Any] = {}  # what a process was started with: an executor hands it over by a global only


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """One simulation: `router` decides, `workload` is opened, by its names, where it is played.

    `name` is for people.
    """

    name: str
    settings: Settings
    router: RouterConfig
    workload: tuple[str, ...]
    options: WorkloadOptions = WorkloadOptions()
    requests: int = 0  # how many there will be, for progress


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation that is over. `name` is the policy's, as the user gave it; `summary` is what JSON prints of it."""

    name: str
    settings: Settings
    router: RouterConfig
    outcome: Outcome
    summary: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    """Something that takes a while. `do`, which can be pickled, says how much of `total` is done, now and then."""

    name: str
    total: int
    do: Callable[[OnDone], T]


def play(job: Job, on_done: OnDone) -> Outcome:
    """The simulation, here; `on_done` gets how many requests did arrive."""
    return Simulation(job.settings, job.router).run(open_workload(job.workload, job.options), on_done)


def figures(job: Job, outcome: Outcome, slo: Slo | None) -> dict[str, Any]:
    """What JSON prints of a simulation."""
    told = summary(outcome, len(outcome.workers))
    told["retried"] = sum(attempts > 1 for attempts in outcome.requests.column("attempts"))
    told["lasted_s"] = outcome.lasted_us / US_PER_S
    told["gpu_hours"] = outcome.gpu_s / S_PER_HOUR
    return told if slo is None else {**told, **goodput(outcome, slo)}


def figures_of(job: Job, slo: Slo | None, on_done: OnDone) -> dict[str, Any]:
    """The figures of a simulation that is run here."""
    return figures(job, play(job, on_done), slo)


def run_of(job: Job, slo: Slo | None, whole: bool, on_done: OnDone) -> Run:
    """A simulation that is run here; what came of single requests only if the `whole` is asked for."""
    outcome = play(job, on_done)
    return Run(job.name, job.settings, job.router, outcome if whole else Outcome(), figures(job, outcome, slo))


def reason(error: Exception) -> str:
    """Why a simulation died, for people."""
    if isinstance(error, BrokenProcessPool):
        return "a process of the simulations was killed, perhaps for want of memory"
    return str(error) or repr(error)


def run_all(todo: Sequence[Work[T]]) -> list[T | Exception]:
    """What comes of each, in their order, or what it died of: one that fails does not end the others.

    As many run at once as there are processors. Whatever ends this ends their processes.
    """
    with _Progress.shown(todo) as shown:
        if len(todo) == 1:
            with own_stdout():
                return [_done_here(todo[0], shown)]
        # Spawned, not forked: a child must not inherit threads or a random hash seed by accident.
        context = multiprocessing.get_context("spawn")
        arrived = context.Array("q", len(todo), lock=False)
        others = set(multiprocessing.active_children())
        pool = ProcessPoolExecutor(min(len(todo), os.cpu_count() or 1), context, _start_process, (arrived,))
        try:
            with _interrupts_later():
                running = [pool.submit(_do_in_process, at, work.do) for at, work in enumerate(todo)]
            left: set[Future[T]] = set(running)
            while left:
                left = wait(left, LOOK_EVERY_S).not_done
                shown.update(arrived, running)
            ended: list[T | Exception] = list(map(_result, running))
            return ended
        except BaseException:
            for child in set(multiprocessing.active_children()) - others:
                child.terminate()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _done_here(work: Work[T], shown: "_Progress") -> T | Exception:
    try:
        return work.do(lambda done: shown.update([done], [Future()]))
    except Exception as error:  # noqa: BLE001 - the same as from another process
        return error


def _result(ended: Future[T]) -> T | Exception:
    try:
        return ended.result()
    except Exception as error:  # noqa: BLE001 - a policy of the user's may fail in any way
        return error


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Processes that are started in the body never get a Ctrl-C, which goes to all that a terminal runs."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _start_process(arrived: Any) -> None:
    _process["arrived"] = arrived
    sys.stdout = sys.stderr  # what a policy of the user's prints is no result
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A parent that is killed cannot end its children."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _do_in_process(at: int, do: Callable[[OnDone], T]) -> T:
    arrived = _process["arrived"]

    def on_done(done: int) -> None:
        arrived[at] = done

    return do(on_done)


class _Progress:
    """A bar for each of a few, or for all of many together and for those of them that run."""

    def __init__(self, progress: Progress, todo: Sequence[Work[Any]]) -> None:
        self._progress = progress
        self._todo = todo
        self._few = len(todo) <= BARS_MAX
        self._total = sum(work.total for work in todo)
        self._all = progress.add_task("", total=self._total, visible=not self._few)
        self._each: list[TaskID] = [
            progress.add_task(in_markup(work.name), total=work.total, visible=self._few) for work in todo
        ]

    @staticmethod
    @contextmanager
    def shown(todo: Sequence[Work[Any]]) -> Iterator["_Progress"]:
        """While the body lasts."""
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"))
        with bar(*columns, TimeRemainingColumn()) as progress:
            yield _Progress(progress, todo)

    def update(self, done: Sequence[int], running: Sequence[Future[Any]]) -> None:
        """How far each is, and whether it has ended."""
        ended = sum(one.done() for one in running)
        so_far = 0
        for task, work, count, one in zip(self._each, self._todo, done, running, strict=True):
            count = work.total if one.done() else min(count, work.total)  # noqa: PLW2901
            so_far += count
            self._progress.update(task, completed=count, visible=self._few or (count > 0 and not one.done()))
        self._progress.update(self._all, completed=so_far, description=f"{ended} of {len(self._todo)} runs")
