"""`make demo-kafka`: a distributed forebay under load loses its owner, and clients see only a delay.

Starts Kafka, Redis, two ingresses, two routers and mock workers, plays a trace, kills the router that owns the
group with SIGKILL half-way, and verifies every decision in a separate process. Exits 1 unless each request was
answered once, routing resumed within 10 s, and every decision was derived equal. Kafka and Redis of your own:
FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL); topics of this run are removed from them afterwards.
"""

import argparse
import asyncio
import json
import random
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.simulate.reading import open_workload
from forebay.simulate.workload import WorkloadOptions
from forebay.simulate.workloads.rows import BLOCK_TOKENS
from infra.kafka.kafka import tail
from tests.harness.cluster import Cluster, Ownership, ProcessError, remove_topics
from tests.harness.demos import demo, positive

ROUTERS = 2  # one owns, one stands by
INGRESSES = 2
RESUMED_WITHIN_S = 10.0  # the session timeout of Kafka's consumer group is 6 s
REPORT_EVERY_S = 5.0
ANSWERED_WITHIN_S = 900.0
SEED = 2026
SESSIONS, TURNS, SECONDS = 60, 10, 30  # of the generated trace: concurrent conversations, turns each, duration
FIRST_BLOCKS, TURN_TOKENS, ANSWER_TOKENS = (1, 4), (100, 700), (10, 60)


@dataclass(slots=True)
class Result:
    """The result of the demo; times are in seconds."""

    requests: int
    answered_once: int = 0
    killed_at: int = 0
    resumed_s: float | None = None
    verified: int = 0
    decisions: int = 0
    owners: int = 0
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        if self.answered_once != self.requests:
            self.problems.append(f"{self.requests - self.answered_once} requests were not answered once")
        if self.resumed_s is None or self.resumed_s > RESUMED_WITHIN_S:
            self.problems.append(f"routing was to resume within {RESUMED_WITHIN_S:g} s")
        if self.verified != self.decisions or self.decisions < self.requests:
            self.problems.append(f"{self.decisions} decisions were recorded and {self.verified} of them derived equal")

    def line(self) -> str:
        resumed = "not resumed" if self.resumed_s is None else f"resumed after {self.resumed_s:.1f} s"
        verdict = f"FAILED ({'; '.join(self.problems)})" if self.problems else "ok"
        return (
            f"{self.requests} requests, {self.answered_once} answered once, owner killed at {self.killed_at}, "
            f"routing {resumed}, verified {self.verified} of {self.decisions} across {self.owners} owners: {verdict}"
        )


def report(text: str) -> None:
    """Print a line of progress."""
    print(f"demo-kafka: {text}", flush=True)


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
            row = {"timestamp": at_ms, "input_length": tokens, "output_length": answer, "hash_ids": list(blocks)}
            made.append((at_ms, row))
            tokens += answer
    made.sort(key=lambda one: one[0])
    path.write_text("".join(json.dumps(row) + "\n" for _, row in made))


async def play(cluster: Cluster, trace: Path, options: argparse.Namespace, result: Result) -> None:
    """Play the trace, kill the owner half-way, and wait for every response."""
    arguments = ["trace", str(trace), "--speed", str(options.speed), "--json"]
    if options.duration_s is not None:
        arguments += ["--duration-s", str(options.duration_s)]
    for url in cluster.urls.values():
        arguments += ["--url", url]
    began_s = time.monotonic()
    cluster.begin("trace", *arguments)
    reporting = asyncio.create_task(report_progress(cluster, result.requests, began_s))
    try:
        half = result.requests // 2

        async def half_way() -> int | None:
            routed = await cluster.routed()
            return routed if routed >= half else None

        result.killed_at = await cluster.processes.until(
            "half of the requests are routed", half_way, within_s=ANSWERED_WITHIN_S
        )
        owner = await cluster.owner()
        assert owner is not None, "requests were routed"
        killed_us = cluster.kill(owner)
        report(f"kill -9 of {owner}, which owns the group, after {result.killed_at} routed requests")
        try:
            newest = await cluster.taken_over(owner, within_s=6 * RESUMED_WITHIN_S)
        except ProcessError as error:
            result.problems.append(str(error))
        else:
            result.resumed_s = report_takeover(newest, killed_us)
        code, out = await cluster.finish("trace", within_s=ANSWERED_WITHIN_S)
    finally:
        reporting.cancel()
    if not out:
        raise ProcessError(f"the trace ended with code {code}: {tail(cluster.processes.folder / 'trace.log')}")
    report_responses(json.loads(out), result)


def report_takeover(newest: Ownership, killed_us: int) -> float:
    """Report the takeover; return the seconds without routing."""
    assert newest.first_routed_us is not None
    claimed_s, resumed_s = (newest.claimed_us - killed_us) / 1e6, (newest.first_routed_us - killed_us) / 1e6
    report(
        f"{newest.router} claimed the group {claimed_s:.1f} s later, "
        f"and routed its first request {resumed_s:.1f} s after the kill"
    )
    return resumed_s


def report_responses(summary: dict[str, Any], result: Result) -> None:
    result.answered_once = summary["answered_once"]
    result.problems += [f"{count} times {problem}" for problem, count in summary["failures"].items()]
    if summary["answered_again"]:
        result.problems.append(f"{summary['answered_again']} requests were answered more than once")
    ttft, e2e = summary["ttft_ms"], summary["e2e_ms"]
    if ttft:
        report(
            f"answers: {summary['output_tokens']} tokens, prefix reuse {summary['prefix_reuse']:.2f}; p50 and p99: "
            f"first token after {ttft['p50']:.0f} and {ttft['p99']:.0f} ms, "
            f"end after {e2e['p50']:.0f} and {e2e['p99']:.0f} ms"
        )


async def report_progress(cluster: Cluster, requests: int, began_s: float) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        owner, routed = await cluster.owner(), await cluster.routed()
        report(f"{time.monotonic() - began_s:3.0f} s: {routed} of {requests} requests routed, {owner} owns")


async def run(kafka: str, redis_url: str, folder: Path, options: argparse.Namespace, *, keep: bool) -> Result:
    trace: Path = options.trace or folder / "trace.jsonl"
    if options.trace is None:
        write_trace(trace, SEED)
    result = Result(open_workload(str(trace), WorkloadOptions(duration_s=options.duration_s)).survey().requests)
    began_s = time.monotonic()
    namespace = f"demo-{uuid.uuid4().hex[:8]}"
    try:
        async with Cluster(kafka, redis_url, namespace, folder) as cluster:
            for number in range(ROUTERS):
                cluster.router(f"r{number + 1}")
            for number in range(options.workers):
                cluster.worker(f"w{number + 1}", "--speedup", str(options.speedup))
            for number in range(INGRESSES):
                cluster.ingress(f"i{number + 1}")
            report(
                f"{ROUTERS} routers, {options.workers} mock workers and {INGRESSES} ingresses start; logs in {folder}"
            )
            await cluster.until_serving(options.workers)
            report(f"all serve after {time.monotonic() - began_s:.1f} s, and {await cluster.owner()} owns")
            await play(cluster, trace, options, result)
            verified = await cluster.verify()
    finally:
        if not keep:
            await remove_topics(kafka, namespace)
    result.verified, result.decisions, result.owners = verified["verified"], verified["decisions"], verified["claims"]
    if verified["divergence"] is not None:
        result.problems.append(f"a divergence: {verified['divergence']}")
    result.judge()
    return result


def main() -> int:
    """Run the demo of the command line.

    Returns:
        Exit code: 0 on success, 1 if the demo failed, 2 if it could not run.
    """
    parser = argparse.ArgumentParser(prog="demo-kafka", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, help="Mooncake-format trace; default: a generated one")
    parser.add_argument("--duration-s", type=positive, help="only the first seconds of the trace")
    parser.add_argument(
        "--speed", type=positive, default=1.0, help="playback speed relative to the recording (default %(default)s)"
    )
    parser.add_argument("--workers", type=int, default=8, choices=range(1, 17), metavar="1-16", help="(%(default)s)")
    parser.add_argument(
        "--speedup",
        type=positive,
        default=10.0,
        help="speed of the mock engines relative to the GPU (default %(default)s)",
    )
    options = parser.parse_args()
    return demo(report, lambda kafka, redis_url, folder, keep: run(kafka, redis_url, folder, options, keep=keep))


if __name__ == "__main__":
    sys.exit(main())
