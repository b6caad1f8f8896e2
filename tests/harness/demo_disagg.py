"""`make demo-disagg`: prefill and decode workers under load, scaled from 4 + 4 to 2 + 6, with one of each killed.

Starts Kafka, Redis, an ingress, a router and mock workers that move real KV bytes by NIXL, and plays a trace. After a
quarter of the trace, drains two prefill workers and starts two decode workers; after half, kills one of each with
SIGKILL. Exits 1 unless each request was answered once, with the expected tokens, and every decision was verified.
Kafka and Redis of your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL), as for `make demo-kafka`.
"""

import argparse
import statistics
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from forebay.events.decisions import RequestRouted
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, TransferFailed
from forebay.events.topics import DECISIONS, PROGRESS, REQUESTS
from tests.harness.cluster import Cluster
from tests.harness.demo_kafka import trace_of
from tests.harness.demos import ANSWERED_WITHIN_S, Demo, Place, TraceResult, begin_trace
from tests.harness.mock_words import Words

PREFILL, DECODE = ("p1", "p2", "p3", "p4"), ("d1", "d2", "d3", "d4")
LEAVING, COMING = ("p3", "p4"), ("d5", "d6")
KILLED = ("p1", "d1")
LEASE_S = 5.0  # time until a killed worker is declared lost
ENDED_WITHIN_S = 120.0
DEMO = Demo("demo-disagg", __doc__)


@dataclass(slots=True)
class Result(TraceResult):
    """The result of the demo.

    Attributes:
        stages: number of routings by stage; later attempts are counted separately.
        moved_bytes: bytes of KV that decode workers fetched.
    """

    wrong: int = 0
    stages: Counter[str] = field(default_factory=Counter)
    moved_bytes: int = 0
    not_moved: int = 0

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        self.judge_requests()
        if self.wrong:
            self.problems.append(f"{self.wrong} responses have wrong tokens")
        if not self.moved_bytes:
            self.problems.append("no KV was moved")

    def line(self) -> str:
        stages = ", ".join(f"{count} {stage}" for stage, count in sorted(self.stages.items()))
        return (
            f"{self.requests} requests, {self.answered_once} answered once, {self.wrong} with wrong tokens; routed: "
            f"{stages}; {self.moved_bytes / 1e6:.1f} MB of KV moved, {self.not_moved} transfers failed; "
            f"verified {self.verified} of {self.decisions}: {self.verdict}"
        )


async def play(cluster: Cluster, trace: Path, options: argparse.Namespace, result: Result) -> None:
    """Play the trace, scale, kill, and wait for every response."""
    begin_trace(cluster, trace, "--speed", str(options.speed))
    await until_first_stages(cluster, result.requests // 4)
    start(cluster, COMING, options)
    for name in LEAVING:
        cluster.processes.ask_to_end(name)
    for name in LEAVING:
        await cluster.processes.ended(name, within_s=ENDED_WITHIN_S)
    DEMO.report(f"{', '.join(LEAVING)} finished what they had and left, {', '.join(COMING)} start")
    await until_first_stages(cluster, result.requests // 2)
    for name in KILLED:
        cluster.kill(name)
    DEMO.report(f"kill -9 of {' and '.join(KILLED)}, whose leases run out after {LEASE_S:g} s")
    summary = await result.finish_trace(cluster)
    ttft, itl = summary["ttft_ms"], summary["itl_ms"]
    DEMO.report(
        f"{summary['output_tokens']} tokens; p50 and p99: first token after {ttft['p50']:.0f} and "
        f"{ttft['p99']:.0f} ms, between tokens {itl['p50']:.1f} and {itl['p99']:.1f} ms"
    )


async def until_first_stages(cluster: Cluster, requests: int) -> None:
    """Wait until the first stage of `requests` requests was routed."""

    def are_routed(decided: list[RequestRouted]) -> bool:
        return len({one.request_id for one in decided}) >= requests

    decided = lambda: cluster.events(DECISIONS, RequestRouted)  # noqa: E731
    await cluster.until(f"{requests} requests are routed", decided, are_routed, within_s=ANSWERED_WITHIN_S)
    DEMO.report(f"{requests} requests are routed")


def start(cluster: Cluster, names: tuple[str, ...], options: argparse.Namespace) -> None:
    """Start workers with the role that begins their name."""
    for name in names:
        role = "prefill" if name.startswith("p") else "decode"
        speed = ("--speedup", str(options.speedup), "--engine-args", '{"kv_checksum": true}')
        cluster.worker(name, "--role", role, *speed, "--lease-ttl-s", str(LEASE_S))


async def run(place: Place, options: argparse.Namespace) -> Result:
    trace, requests = trace_of(place.folder, options.trace)
    result = Result(requests=requests)
    began_s = time.monotonic()
    async with place.cluster() as cluster:
        cluster.router("r1")
        start(cluster, PREFILL + DECODE, options)
        cluster.ingress("i1")
        DEMO.report(f"{len(PREFILL)} prefill and {len(DECODE)} decode workers start; logs in {place.folder}")
        await cluster.until_serving(len(PREFILL) + len(DECODE))
        DEMO.report(f"all serve after {time.monotonic() - began_s:.1f} s")
        await play(cluster, trace, options, result)
        await inspect_log(cluster, result)
    result.judge()
    return result


async def inspect_log(cluster: Cluster, result: Result) -> None:
    for decided in await cluster.events(DECISIONS, RequestRouted):
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
        DEMO.report(f"from the end of prefill to the first token: p50 {median:.1f} ms, {share:.1f} ms for the transfer")
    result.wrong = len(Words().wrong(await cluster.events(REQUESTS), await cluster.replies()))
    await result.verify(cluster)


def main() -> int:
    DEMO.add_trace_options(speed=0.5)
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
