"""Compare forebay on Kafka with Dynamo under the same load, in turn, on one machine; and time each hop of a request.

forebay is two routers, an ingress and four mock workers, each a process, on a running Kafka and Redis. Dynamo, load and
cases are those of `http`. Each round uses its own topics. They are removed after every decision on them has been
verified; the exit code is 1 if one could not be.
"""

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.events.topics import TOKENS
from forebay.transport.base import LogError
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.topics import TopicPlan
from tests.benchmarks import bench_http, hops
from tests.benchmarks.bench_http import (
    FAST,
    PEER_PORT,
    STEADY_CASES,
    STEADY_SPEED,
    WORKERS,
    Verified,
    dynamo,
    load,
    print_cases,
)
from tests.benchmarks.http_load import cpu_s, named_pids
from tests.harness.brokers import create_topics_on
from tests.harness.cluster import POOL, Cluster, remove_topics
from tests.harness.processes import ProcessError

MODEL = "tiny"
ONE, MANY, LONG_ANSWERS = "short, 1 connection", "short, 64 connections", "short, 128 tokens out, 16 connections"
CASES = {name: bench_http.CASES[name] for name in (ONE, MANY, LONG_ANSWERS)}
ALL_CASES = {**CASES, **STEADY_CASES}
HOP_CASES = (ONE, MANY)
IDLE_S = 20.0
WARM_UP = 50  # unmeasured requests, as in the load client
PLAN = TopicPlan(groups=1, slots=16, replies=1, kafka_api=1)
KINDS = {"r": "router", "w": "worker", "i": "ingress"}  # by the first letter of a name


@dataclass(slots=True)
class System:
    """A running forebay.

    Attributes:
        also: NAME=PID of further processes that belong to it, such as the broker.
    """

    cluster: Cluster
    url: str
    also: list[str]

    @property
    def pids(self) -> str:
        """Return NAME=PID of its running processes, separated by commas."""
        running = [f"{KINDS[one.name[0]]}={one.process.pid}" for one in self.cluster.processes.running()]
        return ",".join([*running, *self.also])

    @property
    def ingress_port(self) -> int:
        """Return the port of the ingress, which also serves its metrics."""
        return int(self.url.rpartition(":")[2])


@dataclass(slots=True)
class Run:
    """The measurements of a case, by round.

    Attributes:
        results: output of the load client.
        hops: p50 and p99 of each hop, in ms.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    hops: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@asynccontextmanager
async def forebay(
    args: argparse.Namespace,
    verified: Verified,
    *,
    speedup: str = FAST,
    plan: TopicPlan = PLAN,
    leader: int = 0,
    kv_blocks: int = 65_536,
) -> AsyncIterator[System]:
    """Run forebay on fresh topics, and verify its decisions afterwards.

    If `leader` is the number of a broker, it leads all partitions of a cluster of three.
    """
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    model = _model_options(args)
    sizes = ("--kv-blocks", str(kv_blocks), "--max-num-seqs", "512", "--max-num-batched-tokens", "65536")
    engine = ("--speedup", speedup, *sizes)
    names = [f"w{number}" for number in range(WORKERS)]
    with tempfile.TemporaryDirectory() as folder:
        try:
            cluster = Cluster(args.kafka, args.redis, namespace, Path(folder), plan)
            if leader:
                await create_topics_on(cluster.settings, plan, [POOL], [leader, leader % 3 + 1, (leader + 1) % 3 + 1])
            async with cluster:
                for name in ("r1", "r2"):
                    cluster.router(name)
                for name in names:
                    cluster.worker(name, *model, *engine)
                url = cluster.ingress("i1", *model)
                await cluster.until_serving(WORKERS, MODEL)
                yield System(cluster, url, args.also)
                cluster.processes.check()
                verified.add(await cluster.verify(MODEL))
        finally:
            await remove_topics(args.kafka, namespace)


def _model_options(args: argparse.Namespace) -> tuple[str, ...]:
    return "--model", str(args.home / "tiny-model"), "--model-name", MODEL


async def run_case(system: System, case: str, run: Run, *, requests: int | None = None) -> None:
    """Run one case on forebay, with its own number of requests by default, and measure its hops if requested."""
    fewer = [] if requests is None else ["--requests", str(requests)]
    log = await KafkaLog.open(system.cluster.settings)
    try:
        before = await hops.place(log, PLAN.slots)
        counted = hops.hop_counts(system.ingress_port, TOKENS.name)
        # The event loop is blocked meanwhile, so this process sends no requests to the broker.
        run.results.append(load(system.url, system.pids, [*ALL_CASES[case], *fewer]))
        if case in HOP_CASES:
            found = {hop: _p50_p99(values) for hop, values in (await hops.hops(log, before, WARM_UP)).items() if values}
            later = hops.hop_counts(system.ingress_port, TOKENS.name)
            found[hops.TOKENS_HOP] = hops.quantile_ms(counted, later, 0.5), hops.quantile_ms(counted, later, 0.99)
            for hop, value in found.items():
                run.hops.setdefault(hop, []).append(value)
    finally:
        await log.close()


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


@dataclass(slots=True)
class Measured:
    """The measurements of all rounds.

    Attributes:
        ours: forebay's runs, by case.
        theirs: Dynamo's runs, by case.
        idle: CPU time without requests, in percent of a core.
        idle_processes: number of processes in `idle`, by kind.
    """

    ours: dict[str, Run] = field(default_factory=lambda: {case: Run() for case in ALL_CASES})
    theirs: dict[str, Run] = field(default_factory=lambda: {case: Run() for case in ALL_CASES})
    verified: Verified = field(default_factory=Verified)
    idle: list[float] = field(default_factory=list)
    idle_processes: dict[str, int] = field(default_factory=dict)

    @property
    def sides(self) -> tuple[dict[str, Run], dict[str, Run]]:
        """Return forebay's runs and Dynamo's."""
        return self.ours, self.theirs


async def compare(args: argparse.Namespace) -> None:
    """Measure both sides in turn, then print the tables."""
    found = Measured()
    for number in range(args.rounds):
        sys.stderr.write(f"round {number + 1} of {args.rounds}\n")
        for speedup, cases in ((FAST, CASES), (STEADY_SPEED, STEADY_CASES)):
            async with forebay(args, found.verified, speedup=speedup) as system:
                if speedup == FAST:
                    await measure_idle(args, system, found)
                for case in cases:
                    await run_case(system, case, found.ours[case])
            with dynamo(args.peers, speedup) as pids:
                for case in cases:
                    found.theirs[case].results.append(load(f"http://127.0.0.1:{PEER_PORT}", pids, ALL_CASES[case]))
    print_cases("forebay on Kafka", *({case: run.results for case, run in runs.items()} for runs in found.sides))
    counts = ", ".join(f"{name} x {count}" for name, count in found.idle_processes.items())
    print(f"\nidle: {statistics.median(found.idle):.1f} % of a core ({counts})")
    print_cpu(found.ours)
    print_hops(found.ours)
    print(f"\n{found.verified}")
    found.verified.check()


async def measure_idle(args: argparse.Namespace, system: System, found: Measured) -> None:
    """Measure the CPU time without requests, with a second ingress that runs only meanwhile."""
    system.cluster.ingress("i2", *_model_options(args))
    await system.cluster.until_serving(WORKERS, MODEL)
    pids = system.pids
    found.idle_processes = dict(Counter(pair.partition("=")[0] for pair in pids.split(",")))
    found.idle.append(await idle_share(pids))
    await system.cluster.stop("i2")


async def idle_share(pids: str) -> float:
    """Return the CPU time of these processes without requests, in percent of a core."""
    await asyncio.sleep(IDLE_S / 4)  # after the start
    found = [pid for group in named_pids(pids).values() for pid in group]
    began_s, before = time.monotonic(), cpu_s(found)
    await asyncio.sleep(IDLE_S)
    return (cpu_s(found) - before) / (time.monotonic() - began_s) * 100


def print_cpu(runs: dict[str, Run]) -> None:
    """Print forebay's CPU time by process."""
    names = list(next(iter(runs.values())).results[0]["cpu_us_per_request"])
    print(f"\n| CPU us/request | {' | '.join(names)} | load client |")
    print(f"|---{'|---' * len(names)}|---|")
    for case, run in runs.items():
        used = [statistics.median(result["cpu_us_per_request"][name] for result in run.results) for name in names]
        client = statistics.median(result["client_cpu_us_per_request"] for result in run.results)
        print(f"| {case} | {' | '.join(f'{us:.0f}' for us in used)} | {client:.0f} |")


def print_hops(runs: dict[str, Run]) -> None:
    runs = {name: run for name, run in runs.items() if run.hops}
    print(f"\n| hop, p50 / p99 ms | {' | '.join(runs)} |")
    print(f"|---{'|---' * len(runs)}|")
    for hop in hops.HOPS:
        cells = [
            " / ".join(f"{statistics.median(part):.2f}" for part in zip(*run.hops[hop], strict=True))
            for run in runs.values()
        ]
        print(f"| {hop} | {' | '.join(cells)} |")
    whole = [" / ".join(f"{_ttft(run.results, part):.2f}" for part in ("p50", "p99")) for run in runs.values()]
    print(f"| the client: request sent -> first event | {' | '.join(whole)} |")
    print("\nNo record has the time at which an ingress took tokens; the ingress counts that hop.")


def _ttft(results: list[dict[str, Any]], part: str) -> float:
    return float(statistics.median(result["ttft_ms"][part] for result in results))


def main() -> None:
    """Measure, and print tables with medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", required=True, help="host:port; topics of its own are created and removed")
    parser.add_argument("--redis", required=True, help="redis://host:port")
    parser.add_argument(
        "--also", action="append", default=[], help="NAME=PID of further processes to measure, such as the broker"
    )
    parser.add_argument("--peers", type=Path, default=os.environ.get("FOREBAY_PEERS"))
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "forebay-peers")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.peers is None:
        raise SystemExit("set FOREBAY_PEERS to the folder with dynamo.sh")
    try:
        asyncio.run(compare(args))
    except (LogError, ProcessError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
