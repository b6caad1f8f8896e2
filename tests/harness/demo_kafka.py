"""`make demo-kafka`: a distributed forebay under load loses a worker and its owner, and clients see only a delay.

Starts Kafka, Redis, two ingresses, two routers and mock workers, and plays a trace. Kills a worker after a quarter of
the trace, and half-way the router that owns the group, both with SIGKILL. Verifies every decision in a separate
process. Exits 1 unless each request was answered once, routing resumed within 10 s, and every decision was derived
equal. `make demo-console` also runs a console, and leaves it open at the moment before the worker was lost. Kafka and
Redis of your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL); topics of this run are removed from them
afterwards.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from forebay.simulate.reading import open_workload
from forebay.simulate.workload import WorkloadOptions
from forebay.simulate.workloads.rows import BLOCK_TOKENS
from tests.harness.cluster import FOREBAY, Cluster, Ownership
from tests.harness.demos import Demo, Place, TraceResult, begin_trace, positive, until_routed
from tests.harness.failover import lost
from tests.harness.processes import ProcessError

ROUTERS, INGRESSES = ("r1", "r2"), ("i1", "i2")  # of the routers one owns, one stands by
KILLED = "w1"
TOKEN = "demo"  # the console listens on loopback, and ends with the demo
BEFORE_US = 1_000_000  # the page opens this long before the worker was lost
RESUMED_WITHIN_S = 10.0  # the session timeout of Kafka's consumer group is 6 s
REPORT_EVERY_S = 5.0
SEED = 2026
SESSIONS, TURNS, SECONDS = 60, 10, 30  # of the generated trace: concurrent conversations, turns each, duration
FIRST_BLOCKS, TURN_TOKENS, ANSWER_TOKENS = (1, 4), (100, 700), (10, 60)
DEMO = Demo("demo-kafka", __doc__)


@dataclass(slots=True)
class Result(TraceResult):
    """The result of the demo; times are in seconds."""

    killed_at: int = 0
    lost_us: int = 0
    resumed_s: float | None = None
    owners: int = 0

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        self.judge_requests()
        if self.resumed_s is None or self.resumed_s > RESUMED_WITHIN_S:
            self.problems.append(f"routing was to resume within {RESUMED_WITHIN_S:g} s")

    def line(self) -> str:
        resumed = "not resumed" if self.resumed_s is None else f"resumed after {self.resumed_s:.1f} s"
        return (
            f"{self.requests} requests, {self.answered_once} answered once, owner killed at {self.killed_at}, "
            f"routing {resumed}, verified {self.verified} of {self.decisions} across {self.owners} owners: "
            f"{self.verdict}"
        )


def trace_of(folder: Path, given: Path | None = None, duration_s: float | None = None) -> tuple[Path, int]:
    """Return the given trace or a generated one, and the number of its requests."""
    trace = given or folder / "trace.jsonl"
    if given is None:
        write_trace(trace, SEED)
    return trace, open_workload(str(trace), WorkloadOptions(duration_s=duration_s)).survey().requests


def write_trace(path: Path, seed: int) -> None:
    """Write a trace in Mooncake's format: conversations in which each turn repeats the earlier turns."""
    rng = random.Random(seed)
    made: list[tuple[float, dict[str, object]]] = []
    block = 0
    for _ in range(SESSIONS):
        tokens = rng.randint(*FIRST_BLOCKS) * BLOCK_TOKENS
        begin_ms = rng.uniform(0, SECONDS * 500)
        blocks: list[int] = []
        for turn in range(TURNS):
            tokens += rng.randint(*TURN_TOKENS)
            whole = -(-tokens // BLOCK_TOKENS)
            blocks += range(block, block + whole - len(blocks))
            block = blocks[-1] + 1
            at_ms = begin_ms + turn * SECONDS * 500 / TURNS + rng.uniform(0, 500)
            answer = rng.randint(*ANSWER_TOKENS)
            row = {"timestamp": round(at_ms), "input_length": tokens, "output_length": answer, "hash_ids": list(blocks)}
            made.append((at_ms, row))
            tokens += answer
    made.sort(key=lambda one: one[0])
    path.write_text("".join(json.dumps(row) + "\n" for _, row in made))


async def play(cluster: Cluster, trace: Path, options: argparse.Namespace, result: Result) -> None:
    """Play the trace, kill a worker and half-way the owner, and wait for every response."""
    duration = () if options.duration_s is None else ("--duration-s", str(options.duration_s))
    began_s = time.monotonic()
    begin_trace(cluster, trace, "--speed", str(options.speed), *duration)
    reporting = asyncio.create_task(report_progress(cluster, result.requests, began_s))
    try:
        await until_routed(cluster, result.requests // 4)
        killed_us = cluster.kill(KILLED)
        result.lost_us = (await lost(cluster, KILLED)).at_us
        lost_s = (result.lost_us - killed_us) / 1e6
        DEMO.report(f"kill -9 of worker {KILLED}, whose loss was recorded {lost_s:.1f} s later")
        result.killed_at = await until_routed(cluster, result.requests // 2)
        owner = await cluster.owner()
        killed_us = cluster.kill(owner)
        DEMO.report(f"kill -9 of {owner}, which owns the group, after {result.killed_at} routed requests")
        try:
            newest = await cluster.taken_over(owner, within_s=6 * RESUMED_WITHIN_S)
        except ProcessError as error:
            result.problems.append(str(error))
        else:
            result.resumed_s = report_takeover(newest, killed_us)
        summary = await result.finish_trace(cluster)
    finally:
        reporting.cancel()
    if summary["answered_again"]:
        result.problems.append(f"{summary['answered_again']} requests were answered more than once")
    if ttft := summary["ttft_ms"]:
        e2e = summary["e2e_ms"]
        DEMO.report(
            f"answers: {summary['output_tokens']} tokens, prefix reuse {summary['prefix_reuse']:.2f}; p50 and p99: "
            f"first token after {ttft['p50']:.0f} and {ttft['p99']:.0f} ms, "
            f"end after {e2e['p50']:.0f} and {e2e['p99']:.0f} ms"
        )


def report_takeover(newest: Ownership, killed_us: int) -> float:
    assert newest.first_routed_us is not None
    claimed_s, resumed_s = (newest.claimed_us - killed_us) / 1e6, (newest.first_routed_us - killed_us) / 1e6
    DEMO.report(
        f"{newest.router} claimed the group {claimed_s:.1f} s later, "
        f"and routed its first request {resumed_s:.1f} s after the kill"
    )
    return resumed_s


async def report_progress(cluster: Cluster, requests: int, began_s: float) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        owner, routed = await cluster.owner(), await cluster.routed()
        DEMO.report(f"{time.monotonic() - began_s:3.0f} s: {routed} of {requests} requests routed, {owner} owns")


async def run(place: Place, options: argparse.Namespace) -> Result:
    trace, requests = trace_of(place.folder, options.trace, options.duration_s)
    result = Result(requests=requests)
    began_s = time.monotonic()
    async with place.cluster() as cluster:
        DEMO.report(
            f"{len(ROUTERS)} routers, {options.workers} mock workers and {len(INGRESSES)} ingresses start; "
            f"logs in {place.folder}"
        )
        workers = [f"w{number + 1}" for number in range(options.workers)]
        await cluster.serve(ROUTERS, workers, INGRESSES, worker=("--speedup", str(options.speedup)))
        DEMO.report(f"all serve after {time.monotonic() - began_s:.1f} s, and {await cluster.owner()} owns")
        if options.console:
            begin_console(cluster, place.folder, options.console)
        await play(cluster, trace, options, result)
        result.owners = (await result.verify(cluster))["claims"]
        result.judge()
        if options.console and not result.problems:
            url = f"http://127.0.0.1:{options.console}/#/fleet?at={result.lost_us - BEFORE_US}&token={TOKEN}"
            DEMO.report(f"open {url} for the second before worker {KILLED} was lost")
            DEMO.report(f"the admin token for actions is in {place.folder / 'admin-token'}; stop with Ctrl-C")
            await asyncio.Event().wait()
    return result


def begin_console(cluster: Cluster, folder: Path, port: int) -> None:
    token_file = folder / "console-token"
    token_file.write_text(TOKEN)
    files = ("--cache-dir", str(folder), "--token-file", str(token_file))
    where = (*cluster.where, "--port", str(port), "--url", cluster.urls["i1"])
    cluster.processes.start("console", [FOREBAY, "console", *where, *files])


def main() -> int:
    DEMO.add_trace_options(speed=1.0)
    DEMO.add("--duration-s", type=positive, help="only the first seconds of the trace")
    DEMO.add("--workers", type=int, default=8, choices=range(2, 17), metavar="2-16", help="(%(default)s)")
    DEMO.add("--console", type=int, metavar="PORT", help="run a console on this port, and leave it open at the end")
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
