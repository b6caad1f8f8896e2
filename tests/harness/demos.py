"""Shared parts of the demos: the command line, Kafka, Redis, a log folder, played traces, signals and the exit code."""

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from forebay.runtime.errors import ConfigError
from forebay.transport.base import LogError
from forebay.transport.kafka.topics import TopicPlan
from infra.kafka.kafka import tail
from tests.harness.cluster import PLAN, Cluster, remove_topics
from tests.harness.local import Missing, local_kafka, local_redis
from tests.harness.processes import ProcessError

ANSWERED_WITHIN_S = 900.0


class Verdict(Protocol):
    """The result of a demo: its problems and its last line."""

    problems: list[str]

    def line(self) -> str: ...


@dataclass(slots=True, kw_only=True)
class Result:
    """Outcome of a demo that verifies every decision."""

    verified: int = 0
    decisions: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return f"FAILED ({'; '.join(self.problems)})" if self.problems else "ok"

    def judge_decisions(self, least: int = 1) -> None:
        """Add a problem unless at least this number of decisions was recorded, and all of them were derived equal."""
        if self.verified != self.decisions or self.decisions < least:
            self.problems.append(f"{self.decisions} decisions were recorded and {self.verified} of them derived equal")

    async def verify(self, cluster: Cluster) -> dict[str, Any]:
        """Derive every decision again in a separate process, and return the report."""
        report = await cluster.verify()
        self.verified, self.decisions = report["verified"], report["decisions"]
        if report["divergence"] is not None:
            self.problems.append(f"a divergence: {report['divergence']}")
        return report


@dataclass(slots=True, kw_only=True)
class TraceResult(Result):
    """Outcome of a demo that plays a trace of `requests` requests."""

    requests: int
    answered_once: int = 0

    def judge_requests(self) -> None:
        """Add a problem for requests and for decisions that are missing."""
        if self.answered_once != self.requests:
            self.problems.append(f"{self.requests - self.answered_once} requests were not answered once")
        self.judge_decisions(self.requests)

    async def finish_trace(self, cluster: Cluster) -> dict[str, Any]:
        """Wait for all responses of the trace, and return its summary. Raises ProcessError."""
        code, out = await cluster.finish("trace", within_s=ANSWERED_WITHIN_S)
        if not out:
            raise ProcessError(f"the trace ended with code {code}: {tail(cluster.processes.folder / 'trace.log')}")
        summary: dict[str, Any] = json.loads(out)
        self.answered_once = summary["answered_once"]
        self.problems += [f"{count} times {problem}" for problem, count in summary["failures"].items()]
        return summary


def begin_trace(cluster: Cluster, trace: Path, *options: str) -> None:
    urls = [part for url in cluster.urls.values() for part in ("--url", url)]
    cluster.begin("trace", "trace", str(trace), "--json", *options, *urls)


async def until_routed(cluster: Cluster, requests: float) -> int:
    """Wait until this number of requests was routed, and return the number so far. Raises ProcessError."""
    what = f"{requests:.0f} requests are routed"
    count: int = await cluster.until(
        what, cluster.routed, lambda routed: routed >= requests, within_s=ANSWERED_WITHIN_S
    )
    return count


@dataclass(frozen=True, slots=True)
class Place:
    """Kafka, Redis and the log folder of a demo. `is_kept` is whether topics of the demo must be removed."""

    kafka: str
    redis_url: str
    folder: Path
    is_kept: bool

    @asynccontextmanager
    async def cluster(self, plan: TopicPlan = PLAN) -> AsyncIterator[Cluster]:
        namespace = f"demo-{uuid.uuid4().hex[:8]}"
        try:
            async with Cluster(self.kafka, self.redis_url, namespace, self.folder, plan) as cluster:
                yield cluster
        finally:
            if self.is_kept:
                await remove_topics(self.kafka, namespace)


Run = Callable[[Place, argparse.Namespace], Coroutine[Any, Any, Verdict]]


class Demo:
    """Command line of a demo.

    Args:
        text: documentation of the demo, whose first line is its help.

    Attributes:
        add: adds an option.
    """

    def __init__(self, name: str, text: str | None) -> None:
        self.name = name
        self._parser = argparse.ArgumentParser(prog=name, description=(text or "").splitlines()[0])
        self.add = self._parser.add_argument

    def report(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)

    def add_trace_options(self, speed: float) -> None:
        self.add("--trace", type=Path, help="Mooncake-format trace; default: a generated one")
        text = "playback speed relative to the recording (default %(default)s)"
        self.add("--speed", type=positive, default=speed, help=text)
        self.add_speedup(10.0)

    def add_speedup(self, default: float) -> None:
        text = "speed of the mock engines relative to the GPU (default %(default)s)"
        self.add("--speedup", type=positive, default=default, help=text)

    def run(self, run: Run) -> int:
        """Run the demo until it ends or a signal stops it; return its exit code.

        The exit code is 0 on success, 1 if the demo failed, 2 if it could not run, and 130 if it was interrupted.
        FOREBAY_KAFKA and FOREBAY_REDIS name a running Kafka and Redis; otherwise the demo starts its own.
        """
        options = self._parser.parse_args()
        folder = Path(tempfile.mkdtemp(prefix="forebay-demo-"))

        async def with_services() -> Verdict:
            with contextlib.ExitStack() as stack:
                given = os.environ.get("FOREBAY_KAFKA")
                if given is None:
                    self.report("Kafka starts")
                kafka = given or stack.enter_context(local_kafka(folder / "kafka")).address
                redis_url = os.environ.get("FOREBAY_REDIS") or stack.enter_context(local_redis(folder))
                self.report(f"Kafka at {kafka}, Redis at {redis_url}")
                return await run(Place(kafka, redis_url, folder, given is not None), options)

        try:
            result = asyncio.run(_until_ended(with_services()))
        except (Missing, ConfigError) as error:
            shutil.rmtree(folder)
            self.report(f"cannot run: {error}")
            return 2
        except (ProcessError, LogError) as error:
            self.report(f"FAILED: {error}; logs are in {folder}")
            return 1
        except asyncio.CancelledError:
            shutil.rmtree(folder)
            self.report("interrupted; everything is stopped")
            return 130
        if result.problems:
            self.report(f"logs are in {folder}")
        else:
            shutil.rmtree(folder)
        self.report(result.line())
        return 1 if result.problems else 0


async def _until_ended(running: Coroutine[Any, Any, Verdict]) -> Verdict:
    this = asyncio.current_task()
    assert this is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, this.cancel)
    return await running


def positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a positive number")
    return number
