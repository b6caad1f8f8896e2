"""Shared parts of the demos: Kafka, Redis, a log folder, signals and the exit code."""

import argparse
import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Protocol

from forebay.simulate.workload import WorkloadUnusable
from forebay.transport.base import LogError
from tests.harness.cluster import ProcessError
from tests.harness.local import Missing, local_kafka, local_redis


class Verdict(Protocol):
    """The result of a demo: its problems and its last line."""

    problems: list[str]

    def line(self) -> str: ...


Report = Callable[[str], None]
Run = Callable[[str, str, Path, bool], Coroutine[Any, Any, Verdict]]  # Kafka, Redis, folder, whether topics may stay


def demo(report: Report, run: Run) -> int:
    """Run a demo until it ends or a signal stops it; return its exit code.

    FOREBAY_KAFKA and FOREBAY_REDIS name a running Kafka and Redis; otherwise the demo starts its own.
    """
    return judged(report, lambda folder: _with_services(report, run, folder))


def judged(report: Report, run: Callable[[Path], Coroutine[Any, Any, Verdict]]) -> int:
    """Run a demo with a folder for its logs until it ends or a signal stops it; return its exit code.

    The exit code is 0 on success, 1 if the demo failed, 2 if it could not run, and 130 if it was interrupted.
    """
    folder = Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    try:
        result = asyncio.run(_until_ended(run(folder)))
    except (Missing, WorkloadUnusable) as error:
        shutil.rmtree(folder)
        report(f"cannot run: {error}")
        return 2
    except (ProcessError, LogError) as error:
        report(f"FAILED: {error}; logs are in {folder}")
        return 1
    except asyncio.CancelledError:
        shutil.rmtree(folder)
        report("interrupted; everything is stopped")
        return 130
    if result.problems:
        report(f"logs are in {folder}")
    else:
        shutil.rmtree(folder)
    report(result.line())
    return 1 if result.problems else 0


async def _until_ended(running: Coroutine[Any, Any, Verdict]) -> Verdict:
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    return await running


async def _with_services(report: Report, run: Run, folder: Path) -> Verdict:
    with contextlib.ExitStack() as stack:
        given = os.environ.get("FOREBAY_KAFKA")
        if given is None:
            report("Kafka starts")
        kafka = given or stack.enter_context(local_kafka(folder / "kafka")).address
        redis_url = os.environ.get("FOREBAY_REDIS") or stack.enter_context(local_redis(folder))
        report(f"Kafka at {kafka}, Redis at {redis_url}")
        return await run(kafka, redis_url, folder, given is None)


def positive(text: str) -> float:
    """Parse a positive number of the command line."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
