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

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from forebay.analysis.runs import OnDone
from forebay.cli.common.tables import bar
from forebay.cli.common.terminal import own_stdout

LOOK_EVERY_S = 0.2

T = TypeVar("T")
_process: dict[str, Any] = {}  # arguments of a worker process; an executor's initializer can only set globals


@dataclass(frozen=True, slots=True)
class Work(Generic[T]):
    total: int  # amount of work, in units of `do`
    # Picklable function that does the work. It calls its argument with the amount of work done so far.
    do: Callable[[OnDone], T]


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
