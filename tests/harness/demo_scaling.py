"""`make demo-scaling`: a planner scales mock workers from 2 to 6 and back to 2, and is killed half-way.

Starts Kafka, Redis, an ingress, a router, a supervisor and two planners. First it measures the profile of one worker,
and chooses two request rates: for 1.5 and for 5.5 workers of this speed. The planner only knows the profile and what
it observes. Exits 1 unless every bar of the table at the end holds. Kafka and Redis of your own: FOREBAY_KAFKA
(host:port) and FOREBAY_REDIS (URL), as for `make demo-kafka`.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import ceil
from pathlib import Path

import msgspec

from forebay.core.scaling.interpolation import decode_capacity, prefill_speed
from forebay.core.scaling.rederive import RecordedDecision
from forebay.events.scaling import DecodePoint, PrefillPoint
from infra.kafka.kafka import tail
from tests.harness.cluster import Cluster
from tests.harness.demos import Demo, Place, positive
from tests.harness.demos import Result as DemoResult
from tests.harness.processes import ProcessError
from tests.harness.scaling import Scaling, SteppedLoad, scaling_of, start_planner, stepped_load, supervised
from tests.integration.stream_clients import StreamResult

ISL, OSL = 128, 8  # tokens of each prompt and of each response
LOW, HIGH = 1.5, 5.5  # workers that the two rates keep busy, in the middle between two sizes
SMALL, LARGE = ceil(LOW), ceil(HIGH)
TTFT_MS, ITL_MS = 2_200.0, 1_500.0
SILENT_S = 5.0  # a standby waits two intervals and this time
LATE_S = 2.0  # until the claim of a standby is on the topic, on a busy machine
PROFILED_WITHIN_S = 120.0
REPORT_EVERY_S = 5.0
SEED = 2026
DEMO = Demo("demo-scaling", __doc__)


@dataclass(slots=True)
class Bar:
    """A requirement of the demo, with the measured value."""

    text: str
    limit: str
    measured: str
    holds: bool


@dataclass(slots=True)
class Result(DemoResult):
    seconds: float = 0.0
    bars: list[Bar] = field(default_factory=list)

    def add(self, text: str, limit: str, measured: str, *, holds: bool) -> None:
        self.bars.append(Bar(text, limit, measured, holds))
        if not holds:
            self.problems.append(text)

    def show(self) -> None:
        verdicts = {True: "holds", False: "FAILS"}
        rows = [("bar", "limit", "measured", "")]
        rows += [(one.text, one.limit, one.measured, verdicts[one.holds]) for one in self.bars]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            DEMO.report("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

    def line(self) -> str:
        holding = len(self.bars) - len(self.problems)
        return f"{holding} of {len(self.bars)} bars hold after {self.seconds:.0f} s: {self.verdict}"


@dataclass(slots=True)
class Run:
    """A running demo. Times are the wall clock in seconds.

    Attributes:
        stepped_s: when the rate rose.
        decided_s: when the largest size was decided.
        ready_s: when all workers of the largest size were members.
        claims: number of claims when the active planner was killed.
        dropped_s: when the rate fell.
    """

    cluster: Cluster
    scaling: Scaling
    load: SteppedLoad
    interval_s: float
    began_s: float
    loaded_s: float = 0.0
    stepped_s: float = 0.0
    decided_s: float = 0.0
    ready_s: float = 0.0
    claims: int = 0
    killed_s: float = 0.0
    dropped_s: float = 0.0

    def log(self, text: str) -> None:
        DEMO.report(f"{time.time() - self.began_s:4.0f} s: {text}")


async def measured(cluster: Cluster, speed: tuple[str, ...], url: str) -> Path:
    """Measure the profile of one worker, which is stopped then. Return the file."""
    cluster.worker("profiled", *speed)
    await cluster.until_serving(1)
    path = cluster.processes.folder / "profile.json"
    grid = ["--isl", str(ISL), "--context", str(ISL + OSL // 2), "--concurrency", "1,16,64"]
    short = ["--output-tokens", str(OSL)]
    code, _ = await cluster.command(
        "profile", "profile", "run", "-o", str(path), "--url", url, *grid, *short, within_s=PROFILED_WITHIN_S
    )
    if code:
        raise ProcessError(f"the profile was not measured: {tail(cluster.processes.folder / 'profile.log')}")
    await cluster.stop("profiled")
    return path


def worker_seconds(path: Path) -> float:
    """Return the seconds for which a request keeps one worker busy, according to its profile."""
    raw = json.loads(path.read_text())
    prefill = msgspec.convert(raw["prefill"], tuple[PrefillPoint, ...])
    decode = msgspec.convert(raw["decode"], tuple[DecodePoint, ...])
    speed = prefill_speed(prefill, ISL)
    capacity = decode_capacity(decode, ISL + OSL / 2, ITL_MS, None)
    DEMO.report(
        f"profile of a worker: {speed.ttft_ms:.0f} ms to the first token of {ISL} tokens, {speed.tokens_per_s:.0f} "
        f"prompt tokens/s, {capacity.tokens_per_s:.0f} output tokens/s"
    )
    return ISL / speed.tokens_per_s + OSL / capacity.tokens_per_s


@asynccontextmanager
async def reporting(run: Run) -> AsyncIterator[None]:
    """Print the timeline while the body runs: changes as they happen, and rate, sizes and TTFT periodically."""
    task = asyncio.create_task(_report(run))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def _report(run: Run) -> None:
    changes, claims, due_s = 0, 0, 0.0
    while True:
        for claimed_s, planner in run.scaling.claims[claims:]:
            run.log(f"planner {planner} claimed the topic at {claimed_s - run.began_s:.1f} s")
        for change in run.scaling.changes[changes:]:
            run.log(f"decision: from {change.from_size} to {change.to_size} workers ({change.reason})")
        claims, changes = len(run.scaling.claims), len(run.scaling.changes)
        if time.time() >= due_s:
            due_s = time.time() + REPORT_EVERY_S
            run.log(await _status(run))
        await asyncio.sleep(0.2)


async def _status(run: Run) -> str:
    now_s = time.time()
    begun = [one for one in run.load.sent if one.ttft_s is not None and now_s - REPORT_EVERY_S <= one.at_s + one.ttft_s]
    ttft = "TTFT -" if not begun else f"TTFT mean {_mean_ttft_ms(begun):5.0f} ms"
    in_flight = sum(not one.ends and not one.problem for one in run.load.sent)
    settings = run.scaling.state.settings
    size = run.scaling.state.size(settings.pools[0]) if settings else None
    members = len(await run.cluster.members())
    return f"rate {run.load.rate:4.1f}/s, decided {size or 0}, members {members}, {ttft}, {in_flight} in flight"


def _mean_ttft_ms(sent: list[StreamResult]) -> float:
    return 1000 * statistics.fmean(one.ttft_s for one in sent if one.ttft_s is not None)


async def play(run: Run, seconds: float) -> None:
    """Raise and lower the rate, and kill the active planner in between.

    Args:
        seconds: for which a request keeps one worker busy.
    """
    run.load.rate, run.loaded_s = LOW / seconds, time.time()
    run.log(f"the load begins with {LOW / seconds:.1f} requests per second")
    await asyncio.sleep(2.5 * run.interval_s)
    run.load.rate, run.stepped_s = HIGH / seconds, time.time()
    run.log(f"the rate rises from {LOW / seconds:.1f} to {HIGH / seconds:.1f} requests per second")
    await run.scaling.until_decided(LARGE)
    run.decided_s = run.scaling.changes[-1].at_s
    run.ready_s = await run.scaling.until_members(LARGE)
    run.log(f"{LARGE} workers are ready, {run.ready_s - run.decided_s:.1f} s after the decision")
    await asyncio.sleep(max(0.0, deadline_s(run) + run.interval_s - time.time()))
    run.claims, (_, active) = len(run.scaling.claims), run.scaling.claims[-1]
    run.killed_s = run.cluster.kill(active) / 1e6
    run.log(f"kill -9 of the active planner {active}")
    await asyncio.sleep(run.interval_s)
    run.load.rate, run.dropped_s = LOW / seconds, time.time()
    run.log(f"the rate falls to {LOW / seconds:.1f} requests per second")
    await run.scaling.until_claimed(run.claims)
    await run.scaling.until_decided(SMALL)
    await run.scaling.until_members(SMALL)
    run.log(f"{SMALL} workers are left")
    await asyncio.sleep(run.interval_s)


def deadline_s(run: Run) -> float:
    """Return when the TTFT must be within its target: two intervals and the cold start after the step."""
    return run.stepped_s + 2 * run.interval_s + (run.ready_s - run.decided_s)


def judge(run: Run, decisions: list[RecordedDecision], result: Result) -> None:
    sizes = [run.scaling.changes[0].to_size, *(one.to_size for one in run.scaling.changes[1:])]
    peak = sizes.index(LARGE)
    rises = sizes[: peak + 1] == sorted(sizes[: peak + 1])
    falls = sizes[peak:] == sorted(sizes[peak:], reverse=True)
    shape = rises and falls and (sizes[0], max(sizes), sizes[-1]) == (SMALL, LARGE, SMALL)
    path = " -> ".join(map(str, sizes))
    result.add("sizes rise and fall without a reversal", f"{SMALL} -> {LARGE} -> {SMALL}", path, holds=shape)
    decided_s = run.decided_s - run.stepped_s
    limit_s = 2 * run.interval_s + LATE_S
    result.add(
        f"size {LARGE} is decided", f"{limit_s:.0f} s after the step", f"{decided_s:.1f} s", holds=decided_s <= limit_s
    )
    phases = {
        "before the step": (run.loaded_s, run.stepped_s),
        f"from {deadline_s(run) - run.stepped_s:.0f} s after the step (2 intervals, cold start)": (
            deadline_s(run), run.dropped_s,
        ),
    }  # fmt: skip
    for name, (begin_s, end_s) in phases.items():
        phase = [one for one in run.load.sent if begin_s <= one.at_s < end_s and one.ttft_s is not None]
        mean_ms = _mean_ttft_ms(phase) if phase else float("inf")
        p90_ms = 1000 * statistics.quantiles([one.ttft_s or 0.0 for one in phase], n=10)[-1] if len(phase) > 1 else 0.0
        text = f"mean {mean_ms:.0f} ms, p90 {p90_ms:.0f} ms"
        result.add(f"TTFT {name}", f"mean {TTFT_MS:.0f} ms", text, holds=mean_ms <= TTFT_MS)
    rise = [one for one in run.load.sent if run.stepped_s <= one.at_s < deadline_s(run) and one.ttft_s is not None]
    highest_ms = max(1000 * (one.ttft_s or 0.0) for one in rise)
    DEMO.report(f"TTFT in the meantime: mean {_mean_ttft_ms(rise):.0f} ms, highest {highest_ms:.0f} ms")
    failed = run.load.failed()
    of = f"{len(failed)} of {len(run.load.sent)}"
    result.add("requests that failed", "0", of + (f": {failed[0].problem}" if failed else ""), holds=not failed)
    taken_s = run.scaling.claims[run.claims][0] - run.killed_s
    limit_s = 2 * run.interval_s + SILENT_S + LATE_S
    text = f"{taken_s:.1f} s"
    result.add("the standby takes over", f"{limit_s:.0f} s after the kill", text, holds=taken_s <= limit_s)
    effective = [one for one in decisions if one.outcome == "applied"]
    equal = sum(one.is_verified for one in effective)
    text = f"{equal} of {len(effective)}, {len(decisions) - len(effective)} stale"
    result.add("decisions derived again, equal", "all", text, holds=equal == len(effective) > 0)
    replies = [one for one in effective if one.replies]
    text = f"{len(replies)} of {len(run.scaling.changes)}"
    result.add("changes that the supervisor executed", "all", text, holds=len(replies) == len(run.scaling.changes))


async def run_demo(place: Place, options: argparse.Namespace) -> Result:
    result, began_s = Result(), time.monotonic()
    speed = ("--speedup", str(options.speedup))
    pool: dict[str, object] = {"min_size": 1, "max_size": 8, "startup_s": 10, "profile": "profile.json"}
    settings: dict[str, object] = {"interval_s": options.interval_s, "ttft_ms": TTFT_MS, "itl_ms": ITL_MS}
    async with place.cluster() as cluster:
        cluster.router("r1")
        url = cluster.ingress("i1")
        DEMO.report(f"a router and an ingress start; logs in {place.folder}")
        seconds = worker_seconds(await measured(cluster, speed, url))
        async with scaling_of(cluster) as scaling, supervised(cluster, "s", *speed):
            for name in ("p1", "p2"):
                start_planner(cluster, name, settings, pool)
                await scaling.until_claimed()
            await scaling.set_size(SMALL)
            await scaling.until_members(SMALL)
            await scaling.set_size(None)
            async with stepped_load(url, isl=ISL, osl=OSL, seed=SEED) as load:
                run = Run(cluster, scaling, load, options.interval_s, time.time())
                async with reporting(run):
                    await play(run, seconds)
            judge(run, await scaling.decisions(), result)
    result.seconds = time.monotonic() - began_s
    result.show()
    return result


def main() -> int:
    text = "interval of the planner in seconds (default %(default)s)"
    DEMO.add("--interval-s", type=positive, default=8.0, help=text)
    DEMO.add_speedup(0.03)
    return DEMO.run(run_demo)


if __name__ == "__main__":
    sys.exit(main())
