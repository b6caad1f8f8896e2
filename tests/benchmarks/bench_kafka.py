"""Compare forebay on Kafka with Dynamo under the same load, in turn, on one machine; and time each hop of a request.

forebay is a router, an ingress and four mock workers, each a process, on a running Kafka and Redis. Dynamo, load and
cases are those of `http`. Each round uses its own topics, which are removed afterwards. With --flood only forebay is
measured: time to first token with and without eight busy engines' events in the same control partition.
"""

import argparse
import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay.events.topics import KV_EVENTS, METRICS, TOKENS
from forebay.transport.base import LogError
from forebay.transport.kafka.log import KafkaLog
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.kafka.topics import TopicPlan, create_topics
from tests.benchmarks import bench_http, hops
from tests.benchmarks.bench_http import (
    FAST,
    PEER_PORT,
    STEADY,
    STEADY_CASES,
    STEADY_SPEED,
    STEADY_TOKENS,
    WORKERS,
    dynamo,
    load,
    medians,
)
from tests.benchmarks.flood import POOL as FLOOD_POOL
from tests.benchmarks.flood import WORKERS as FLOOD_WORKERS
from tests.benchmarks.flood import flood, leases_held
from tests.harness.cluster import Cluster, remove_topics
from tests.harness.processes import ProcessError

MODEL = "tiny"
METRICS_PORT = 18_120  # the first of one port per worker
ONE, MANY, LONG_ANSWERS = "short, 1 connection", "short, 64 connections", "short, 128 tokens out, 16 connections"
CASES = {name: bench_http.CASES[name] for name in (ONE, MANY, LONG_ANSWERS)}
ALL_CASES = {**CASES, **STEADY_CASES}
HOP_CASES = (ONE, MANY)
IDLE_S = 20.0
WARM_UP = 50  # unmeasured requests, as in the load client
PLAN = TopicPlan(groups=1, slots=16, replies=1, kafka_api=1)


@dataclass(slots=True)
class System:
    """A running forebay."""

    settings: KafkaSettings
    url: str
    pids: str
    worker_ports: list[int]
    epochs: dict[str, int]

    @property
    def ingress_port(self) -> int:
        """Return the port of the ingress, which also serves its metrics."""
        return int(self.url.rpartition(":")[2])


@dataclass(slots=True)
class Run:
    """The measurements of a case, by round.

    Attributes:
        results: output of the load client.
        states_per_s: records per second of `kv-events` and `metrics` that the owner applied.
        hops: p50 and p99 of each hop, in ms.
    """

    results: list[dict[str, Any]] = field(default_factory=list)
    states_per_s: list[float] = field(default_factory=list)
    hops: dict[str, list[tuple[float, float]]] = field(default_factory=dict)


@asynccontextmanager
async def forebay(args: argparse.Namespace, *, flooded: bool, speedup: str = FAST) -> AsyncIterator[System]:
    """Run forebay on fresh topics; `flooded` adds the members whose events the flood writes."""
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    settings = KafkaSettings(args.kafka, namespace)
    model = ("--model", str(args.home / "tiny-model"), "--model-name", MODEL)
    sizes = ("--kv-blocks", "65536", "--max-num-seqs", "512", "--max-num-batched-tokens", "65536")
    engine = ("--speedup", speedup, *sizes)
    names = [f"w{number}" for number in range(WORKERS)]
    with tempfile.TemporaryDirectory() as folder, ExitStack() as members:
        try:
            async with Cluster(args.kafka, args.redis, namespace, Path(folder), PLAN) as cluster:
                if flooded:
                    await create_topics(settings, PLAN, [FLOOD_POOL])
                    members.enter_context(leases_held(args.redis, namespace, MODEL))
                for name in ("r1", "r2") if args.standby else ("r1",):
                    cluster.router(name)
                ports = list(range(METRICS_PORT, METRICS_PORT + WORKERS))
                for name, port in zip(names, ports, strict=True):
                    cluster.worker(name, *model, *engine, "--metrics-port", str(port))
                url = cluster.ingress("i1", *model)
                await cluster.until_serving(WORKERS + len(FLOOD_WORKERS) * flooded, MODEL)
                epochs = {name: worker.worker_epoch for name, worker in (await cluster.members(MODEL)).items()}
                kinds = {"r": "router", "w": "worker", "i": "ingress"}
                running = [f"{kinds[one.name[0]]}={one.process.pid}" for one in cluster.processes.running()]
                yield System(settings, url, ",".join([*running, *args.also]), ports, epochs)
                cluster.processes.check()
        finally:
            await remove_topics(args.kafka, namespace)


async def run_case(args: argparse.Namespace, system: System, case: str, run: Run) -> None:
    """Run one case on forebay, and measure its hops if requested."""
    log = await KafkaLog.open(system.settings)
    try:
        before = await hops.place(log, PLAN.slots)
        counted = _counted(system)
        # The event loop is blocked meanwhile, so this process sends no requests to the broker.
        began_s = time.monotonic()
        run.results.append(load(args.peers, args.python, system.url, system.pids, ALL_CASES[case]))
        took_s = time.monotonic() - began_s
        after = await hops.place(log, PLAN.slots)
        applied = sum(after.view.get(topic.name, 0) - before.view.get(topic.name, 0) for topic in (KV_EVENTS, METRICS))
        run.states_per_s.append(applied / took_s)
        if case in HOP_CASES:
            found = {hop: _p50_p99(values) for hop, values in (await hops.hops(log, before, WARM_UP)).items() if values}
            for hop, (earlier, later) in zip(
                (hops.WORK_HOP, hops.TOKENS_HOP), zip(counted, _counted(system), strict=True), strict=True
            ):
                found[hop] = hops.quantile_ms(earlier, later, 0.5), hops.quantile_ms(earlier, later, 0.99)
            for hop, value in found.items():
                run.hops.setdefault(hop, []).append(value)
    finally:
        await log.close()


def _counted(system: System) -> tuple[Counter[float], Counter[float]]:
    """Return the hop counts of the workers and of the ingress so far."""
    return hops.hop_counts(system.worker_ports, hops.WORK.name), hops.hop_counts([system.ingress_port], TOKENS.name)


def _p50_p99(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)]


async def compare(args: argparse.Namespace) -> None:
    """Measure both sides in turn, then print the tables."""
    ours, theirs = {case: Run() for case in ALL_CASES}, {case: Run() for case in ALL_CASES}
    idle: list[float] = []
    for number in range(args.rounds):
        sys.stderr.write(f"round {number + 1} of {args.rounds}\n")
        for speedup, cases in ((FAST, CASES), (STEADY_SPEED, STEADY_CASES)):
            async with forebay(args, flooded=False, speedup=speedup) as system:
                if speedup == FAST:
                    idle.append(await idle_share(system.pids))
                for case in cases:
                    await run_case(args, system, case, ours[case])
            with dynamo(args.peers, speedup) as pids:
                for case in cases:
                    url = f"http://127.0.0.1:{PEER_PORT}"
                    theirs[case].results.append(load(args.peers, args.python, url, pids, ALL_CASES[case]))
    if args.json:
        print(json.dumps(bars(ours, theirs, idle), indent=1))
        return
    print("| case | | requests/s | TTFT p50 ms | CPU us/request | events/request |")
    print("|---|---|---|---|---|---|")
    for case in ALL_CASES:
        mine, peer = medians(ours[case].results), medians(theirs[case].results)
        print(f"| {case} | forebay on Kafka | {mine[0]:.0f} | {mine[1]:.2f} | {mine[2]:.0f} | {mine[3]:.1f} |")
        print(f"| | Dynamo | {peer[0]:.0f} | {peer[1]:.2f} | {peer[2]:.0f} | {peer[3]:.1f} |")
        print(f"| | ratio | {mine[0] / peer[0]:.2f} | {mine[1] / peer[1]:.2f} | {mine[2] / peer[2]:.2f} | |")
    print(f"\nidle: {statistics.median(idle):.1f} % of a core")
    print_cpu(ours)
    print_hops(ours)


async def idle_share(pids: str) -> float:
    """Return the CPU time of these processes without requests, in percent of a core."""
    await asyncio.sleep(IDLE_S / 4)  # after the start
    began_s, before = time.monotonic(), _cpu_s(pids)
    await asyncio.sleep(IDLE_S)
    return (_cpu_s(pids) - before) / (time.monotonic() - began_s) * 100


def _cpu_s(pids: str) -> float:
    ticks = 0
    for pair in pids.split(","):
        fields = Path(f"/proc/{pair.partition('=')[2]}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def bars(ours: dict[str, Run], theirs: dict[str, Run], idle: list[float]) -> dict[str, Any]:
    """Return forebay's medians divided by Dynamo's by case, and what has a limit of its own."""
    names = ("requests_per_s", "ttft_p50", "cpu_per_request")
    found: dict[str, Any] = {"idle_percent_of_a_core": round(statistics.median(idle), 1)}
    for case in ALL_CASES:
        mine, peer = medians(ours[case].results), medians(theirs[case].results)
        ratios = {name: round(a / b, 2) for name, a, b in zip(names, mine, peer, strict=False)}
        found[case] = {**ratios, "ttft_p50_ms": [round(mine[1], 2), round(peer[1], 2)]}
    found[STEADY]["events_per_request"] = [medians(runs[STEADY].results)[3] for runs in (ours, theirs)]
    found[STEADY]["mean_itl_ms"] = [round(_itl_ms(runs[STEADY].results), 2) for runs in (ours, theirs)]
    return found


def _itl_ms(results: list[dict[str, Any]]) -> float:
    spans = [result["e2e_ms"]["p50"] - result["ttft_ms"]["p50"] for result in results]
    return float(statistics.median(spans)) / (STEADY_TOKENS - 1)


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
    """Print the time of each hop, for the runs that measured hops."""
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
    rest = [
        f"{_ttft(run.results, 'p50') - statistics.median(p50 for p50, _ in run.hops[hops.TO_TOKENS]):.2f}"
        for run in runs.values()
    ]
    print(
        f"| of that, before and after the exact rows: HTTP, tokenizing, tokens -> ingress, SSE | {' | '.join(rest)} |"
    )
    print("\nNo record has the time at which a worker took work or an ingress took tokens; receivers count those hops.")


def _ttft(results: list[dict[str, Any]], part: str) -> float:
    return float(statistics.median(result["ttft_ms"][part] for result in results))


async def flooding(args: argparse.Namespace) -> None:
    """Measure time to first token at one connection, without and with the flood."""
    calm, flooded = Run(), Run()
    for number in range(args.rounds):
        sys.stderr.write(f"round {number + 1} of {args.rounds}\n")
        async with forebay(args, flooded=True) as system:
            epochs = {name: epoch for name, epoch in system.epochs.items() if name in FLOOD_WORKERS}
            await run_case(args, system, ONE, Run())  # discarded, because the first run of fresh processes is slower
            if number % 2:
                await run_case(args, system, ONE, calm)
            with flood(system.settings, epochs):
                await run_case(args, system, ONE, flooded)
            if not number % 2:
                await run_case(args, system, ONE, calm)
    print("| TTFT at 1 connection | p50 ms | p99 ms |")
    print("|---|---|---|")
    rows = {part: (_ttft(calm.results, part), _ttft(flooded.results, part)) for part in ("p50", "p99")}
    for name, at in (("without the flood", 0), ("with it", 1)):
        print(f"| {name} | {rows['p50'][at]:.2f} | {rows['p99'][at]:.2f} |")
    applied = [f"{statistics.median(run.states_per_s):.0f}" for run in (calm, flooded)]
    print(f"| difference | {rows['p50'][1] - rows['p50'][0]:+.2f} | {rows['p99'][1] - rows['p99'][0]:+.2f} |")
    print(f"\nKV events and load reports applied by the owner per second: {applied[0]} without, {applied[1]} with it")
    runs = {"without the flood": calm, "with it": flooded}
    print_cpu(runs)
    print_hops(runs)


def main() -> None:
    """Measure, and print tables with medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kafka", required=True, help="host:port; topics of its own are created and removed")
    parser.add_argument("--redis", required=True, help="redis://host:port")
    parser.add_argument("--standby", action="store_true", help="run a second router as a standby")
    parser.add_argument(
        "--flood", action="store_true", help="measure the effect of busy engines on time to first token"
    )
    parser.add_argument(
        "--also", action="append", default=[], help="NAME=PID of further processes to measure, such as the broker"
    )
    parser.add_argument("--json", action="store_true", help="print the ratios as one object")
    parser.add_argument("--peers", type=Path, default=os.environ.get("FOREBAY_PEERS"))
    parser.add_argument("--home", type=Path, default=Path.home() / ".cache" / "forebay-peers")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    if args.peers is None:
        raise SystemExit("set FOREBAY_PEERS to the folder with load.py and dynamo.sh")
    args.python = str(args.home / "venv" / "bin" / "python")
    try:
        asyncio.run(flooding(args) if args.flood else compare(args))
    except (LogError, ProcessError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
