"""Benchmark of overload: client latencies when requests arrive at five times the capacity of the mock engines.

A load generator in its own process makes two runs on one system: a tenth of the capacity, for the latency without load,
then the overload. The capacity follows from the step times of the mock engines. The system needs spare CPU: check the
load averages that are printed. With `--cpu-bound` the engines have spare capacity, and the CPU is the bottleneck.

The system is `forebay up`, or with `--kafka` and `--redis` two routers, four workers and an ingress as processes.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path
from typing import Any

from tests.benchmarks.bench_http import wait_ready
from tests.harness.cluster import GROUP, Cluster, remove_topics

PORT = 18_130
WORKERS = 4
ENGINE = ("--max-num-seqs", "2")
MAX_TOKENS = 100
CAPACITY_PER_S = 12.5  # four workers, two sequences each, 0.64 s per request of 100 tokens
TIMES = 5.0
UNLOADED_S = 20.0


def measure(to: str, pids: list[int], args: argparse.Namespace) -> None:
    """Apply a light load and then the overload, and print the results."""
    tokens, rate, seconds = MAX_TOKENS, CAPACITY_PER_S * TIMES, args.seconds
    if args.cpu_bound:
        tokens, rate, seconds = 16, 500.0, 20.0
    for name, (per_s, for_s) in (("unloaded", (CAPACITY_PER_S / 10, UNLOADED_S)), ("overload", (rate, seconds))):
        print(f"{name}: {per_s:g} requests/s for {for_s:g} s, load averages {os.getloadavg()}")
        command = [
            *(sys.executable, "-m", "tests.benchmarks.overload_load", "--to", to),
            *("--pids", ",".join(map(str, pids)), "--rate", str(per_s), "--seconds", str(for_s)),
            *("--max-tokens", str(tokens)),
        ]
        result: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        print(json.dumps(result, indent=2), flush=True)


def embedded(args: argparse.Namespace) -> None:
    """Measure `forebay up`."""
    program = str(Path(sys.executable).with_name("forebay"))
    engine = () if args.cpu_bound else ("--workers", str(WORKERS), *ENGINE)
    with tempfile.TemporaryDirectory() as folder:
        command = [program, "up", "--port", str(PORT), "--log", f"{folder}/log.db", *engine, *args.router]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        try:
            wait_ready(f"http://127.0.0.1:{PORT}/ready", process)
            measure(f"127.0.0.1:{PORT}", [process.pid], args)
        finally:
            process.send_signal(signal.SIGINT)
            process.wait()


async def on_kafka(args: argparse.Namespace) -> None:
    """Measure a cluster on fresh topics."""
    namespace = f"bench-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory() as folder:
        try:
            async with Cluster(args.kafka, args.redis, namespace, Path(folder)) as cluster:
                for name in ("r1", "r2"):
                    cluster.router(name, *args.router)
                for number in range(WORKERS):
                    cluster.worker(f"w{number}", *(() if args.cpu_bound else ENGINE))
                url = cluster.ingress("i1")
                await cluster.until_serving(WORKERS, GROUP)
                pids = [one.process.pid for one in cluster.processes.running()]
                await asyncio.to_thread(measure, url.removeprefix("http://"), pids, args)
                cluster.processes.check()
        finally:
            await remove_topics(args.kafka, namespace)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="duration of the overload (default %(default)s)")
    parser.add_argument("--cpu-bound", action="store_true", help="10,000 requests at 500/s, engines as by default")
    parser.add_argument("--kafka", help="HOST:PORT of a broker: measure a cluster")
    parser.add_argument("--redis", help="URL of its Redis")
    parser.add_argument("router", nargs="*", help="options of the router, after --")
    args = parser.parse_args()
    if args.kafka:
        asyncio.run(on_kafka(args))
    else:
        embedded(args)


if __name__ == "__main__":
    main()
