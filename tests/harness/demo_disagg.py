"""`make demo-disagg`: prefill and decode workers under load, scaled from 4 + 4 to 2 + 6, with one of each killed.

Starts Kafka, Redis, an ingress, a router and mock workers that move real KV bytes by NIXL, and plays a trace. After a
quarter of the trace, drains two prefill workers and starts two decode workers; after half, kills one of each with
SIGKILL. Exits 1 unless each request was answered once, with the expected tokens, and every decision was verified.
Kafka and Redis of your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL), as for `make demo-kafka`.
"""

import argparse
import json
import statistics
import sys
import time
import uuid
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from forebay.events.decisions import RequestRouted
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, TransferFailed
from forebay.events.topics import DECISIONS, PROGRESS, REQUESTS
from forebay.simulate.reading import open_workload
from forebay.simulate.workload import WorkloadOptions
from infra.kafka.kafka import tail
from tests.harness.cluster import Cluster, ProcessError, remove_topics
from tests.harness.demo_kafka import SEED, write_trace
from tests.harness.demos import demo, positive
from tests.harness.mock_words import Words

PREFILL, DECODE = ("p1", "p2", "p3", "p4"), ("d1", "d2", "d3", "d4")
LEAVING, COMING = ("p3", "p4"), ("d5", "d6")
KILLED = ("p1", "d1")
LEASE_S = 5.0  # time until a killed worker is declared lost
ENDED_WITHIN_S = 120.0
ANSWERED_WITHIN_S = 900.0


def report(text: str) -> None:
    """Print a line of progress."""
    print(f"demo-disagg: {text}", flush=True)


@dataclass(slots=True)
class Result:
    """The result of the demo.

    Attributes:
        stages: number of routings by stage; later attempts are counted separately.
        moved_bytes: bytes of KV that decode workers fetched.
    """

    requests: int
    answered_once: int = 0
    wrong: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    moved_bytes: int = 0
    not_moved: int = 0
    verified: int = 0
    decisions: int = 0
    problems: list[str] = field(default_factory=list)

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        if self.answered_once != self.requests:
            self.problems.append(f"{self.requests - self.answered_once} requests were not answered once")
        if self.wrong:
            self.problems.append(f"{self.wrong} responses have wrong tokens")
        if not self.moved_bytes:
            self.problems.append("no KV was moved")
        if self.verified != self.decisions or self.decisions < self.requests:
            self.problems.append(f"{self.decisions} decisions were recorded and {self.verified} of them derived equal")

    def line(self) -> str:
        verdict = f"FAILED ({'; '.join(self.problems)})" if self.problems else "ok"
        stages = ", ".join(f"{count} {stage}" for stage, count in sorted(self.stages.items()))
        return (
            f"{self.requests} requests, {self.answered_once} answered once, {self.wrong} with wrong tokens; routed: "
            f"{stages}; {self.moved_bytes / 1e6:.1f} MB of KV moved, {self.not_moved} transfers failed; "
            f"verified {self.verified} of {self.decisions}: {verdict}"
        )


async def play(cluster: Cluster, trace: Path, options: argparse.Namespace, result: Result) -> None:
    """Play the trace, scale, kill, and wait for every response."""
    urls = [part for url in cluster.urls.values() for part in ("--url", url)]
    cluster.begin("trace", "trace", str(trace), "--speed", str(options.speed), "--json", *urls)
    await routed(cluster, result.requests // 4)
    for name in COMING:
        start(cluster, name, options)
    for name in LEAVING:
        cluster.processes.ask_to_end(name)
    for name in LEAVING:
        await cluster.processes.ended(name, within_s=ENDED_WITHIN_S)
    report(f"{', '.join(LEAVING)} finished what they had and left, {', '.join(COMING)} start")
    await routed(cluster, result.requests // 2)
    for name in KILLED:
        cluster.kill(name)
    report(f"kill -9 of {' and '.join(KILLED)}, whose leases run out after {LEASE_S:g} s")
    code, out = await cluster.finish("trace", within_s=ANSWERED_WITHIN_S)
    if not out:
        raise ProcessError(f"the trace ended with code {code}: {tail(cluster.processes.folder / 'trace.log')}")
    summary = json.loads(out)
    result.answered_once = summary["answered_once"]
    result.problems += [f"{count} times {problem}" for problem, count in summary["failures"].items()]
    ttft, itl = summary["ttft_ms"], summary["itl_ms"]
    report(
        f"{summary['output_tokens']} tokens; p50 and p99: first token after {ttft['p50']:.0f} and "
        f"{ttft['p99']:.0f} ms, between tokens {itl['p50']:.1f} and {itl['p99']:.1f} ms"
    )


async def routed(cluster: Cluster, requests: int) -> None:
    """Wait until the first stage of `requests` requests was routed."""

    async def are() -> bool:
        decided = await cluster.events(DECISIONS)
        return len({one.request_id for one in decided if isinstance(one, RequestRouted)}) >= requests

    await cluster.processes.until(f"{requests} requests are routed", are, within_s=ANSWERED_WITHIN_S)
    report(f"{requests} requests are routed")


def start(cluster: Cluster, name: str, options: argparse.Namespace) -> None:
    """Start a worker with the role that begins its name."""
    role = "prefill" if name.startswith("p") else "decode"
    speed = ("--speedup", str(options.speedup), "--engine-args", '{"kv_checksum": true}')
    cluster.worker(name, "--role", role, *speed, "--lease-ttl-s", str(LEASE_S))


async def run(kafka: str, redis_url: str, folder: Path, options: argparse.Namespace, *, keep: bool) -> Result:
    trace: Path = options.trace or folder / "trace.jsonl"
    if options.trace is None:
        write_trace(trace, SEED)
    result = Result(open_workload(str(trace), WorkloadOptions()).survey().requests)
    began_s, namespace = time.monotonic(), f"demo-{uuid.uuid4().hex[:8]}"
    try:
        async with Cluster(kafka, redis_url, namespace, folder) as cluster:
            cluster.router("r1")
            for name in (*PREFILL, *DECODE):
                start(cluster, name, options)
            cluster.ingress("i1")
            report(f"{len(PREFILL)} prefill and {len(DECODE)} decode workers start; logs in {folder}")
            await cluster.until_serving(len(PREFILL) + len(DECODE))
            report(f"all serve after {time.monotonic() - began_s:.1f} s")
            await play(cluster, trace, options, result)
            await inspect_log(cluster, result)
    finally:
        if not keep:
            await remove_topics(kafka, namespace)
    result.judge()
    return result


async def inspect_log(cluster: Cluster, result: Result) -> None:
    for decided in await cluster.events(DECISIONS):
        if isinstance(decided, RequestRouted):
            result.stages[decided.stage] += 1
            result.stages[f"{decided.stage} again"] += decided.attempt > 1
    computed_us: dict[str, int] = {}
    waited_ms, moved_ms = [], []
    for event in await cluster.events(PROGRESS):
        match event:
            case PrefillFinished():
                computed_us[event.request_id] = event.at_us
            case FirstTokenEmitted() if event.transferred_bytes:
                result.moved_bytes += event.transferred_bytes
                waited_ms.append((event.at_us - computed_us[event.request_id]) / 1e3)
                moved_ms.append(event.transfer_us / 1e3)
            case TransferFailed():
                result.not_moved += 1
    if moved_ms:
        median, share = statistics.median(waited_ms), statistics.median(moved_ms)
        report(f"from the end of prefill to the first token: p50 {median:.1f} ms, {share:.1f} ms for the transfer")
    result.wrong = len(Words().wrong(await cluster.events(REQUESTS), await cluster.replies()))
    verified = await cluster.verify()
    result.verified, result.decisions = verified["verified"], verified["decisions"]
    if verified["divergence"] is not None:
        result.problems.append(f"a divergence: {verified['divergence']}")


def main() -> int:
    """Run the demo of the command line.

    Returns:
        Exit code: 0 on success, 1 if the demo failed, 2 if it could not run.
    """
    parser = argparse.ArgumentParser(prog="demo-disagg", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--trace", type=Path, help="Mooncake-format trace; default: a generated one")
    parser.add_argument(
        "--speed", type=positive, default=0.5, help="playback speed relative to the recording (default %(default)s)"
    )
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
