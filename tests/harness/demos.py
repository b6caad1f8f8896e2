"""What demos share: Kafka and Redis to run on, a folder for logs, signals, and an exit code."""

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
    """What a demo found: what fell short, and its last line."""

    problems: list[str]

    def line(self) -> str:
        """The last line."""


Say = Callable[[str], None]
Run = Callable[[str, str, Path, bool], Coroutine[Any, Any, Verdict]]  # Kafka, Redis, folder, whether topics may stay


def demo(say: Say, run: Run) -> int:
    """Run a demo until it ends or a signal ends it; its exit code.

    Kafka and Redis are those of FOREBAY_KAFKA and FOREBAY_REDIS, else some of its own. 0, 1 for a demo that failed, 2
    for what it could not be run with, 130 for one that was interrupted.
    """
    folder = Path(tempfile.mkdtemp(prefix="forebay-demo-"))
    try:
        result = asyncio.run(_until_ended(say, run, folder))
    except (Missing, WorkloadUnusable) as error:
        shutil.rmtree(folder)
        say(f"cannot run: {error}")
        return 2
    except (ProcessError, LogError) as error:
        say(f"FAILED: {error}; logs are in {folder}")
        return 1
    except asyncio.CancelledError:
        shutil.rmtree(folder)
        say("interrupted; everything is stopped")
        return 130
    if result.problems:
        say(f"logs are in {folder}")
    else:
        shutil.rmtree(folder)
    say(result.line())
    return 1 if result.problems else 0


async def _until_ended(say: Say, run: Run, folder: Path) -> Verdict:
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    with contextlib.ExitStack() as stack:
        given = os.environ.get("FOREBAY_KAFKA")
        if given is None:
            say("Kafka starts")
        kafka = given or stack.enter_context(local_kafka(folder / "kafka")).address
        redis_url = os.environ.get("FOREBAY_REDIS") or stack.enter_context(local_redis(folder))
        say(f"Kafka at {kafka}, Redis at {redis_url}")
        return await run(kafka, redis_url, folder, given is None)


def positive(text: str) -> float:
    """A positive number of the command line."""
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
