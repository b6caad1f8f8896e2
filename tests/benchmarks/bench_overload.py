"""Benchmark of overload: client latencies when requests arrive at five times the capacity of the mock engines.

The load client makes two runs on one system: a tenth of the capacity, for the latency without load, then the overload.
The capacity follows from the step times of the mock engines. The system needs spare CPU: check the load averages that
are printed. With `--cpu-bound` the engines have spare capacity, and the CPU is the bottleneck.

The system is `forebay up`, or with `--kafka` and `--redis` two routers, four workers and an ingress as processes.
"""

import argparse
import asyncio
import json
import tempfile
import uuid
from pathlib import Path

from tests.benchmarks.bench_http import URL, WORKERS, load, up
from tests.harness.cluster import GROUP, Cluster, remove_topics

ENGINE = ("--max-num-seqs", "2")
MAX_TOKENS = 100
CAPACITY_PER_S = 12.5  # four workers, two sequences each, 0.64 s per request of 100 tokens
TIMES = 5.0
UNLOADED_S = 20.0
MODEL = "forebay-default"


def measure(url: str, pids: str, model: str, args: argparse.Namespace) -> None:
    """Apply a light load and then the overload, and print the results."""
    tokens, rate, seconds = MAX_TOKENS, CAPACITY_PER_S * TIMES, args.seconds
    if args.cpu_bound:
        tokens, rate, seconds = 16, 500.0, 20.0
    for name, (per_s, for_s) in (("unloaded", (CAPACITY_PER_S / 10, UNLOADED_S)), ("overload", (rate, seconds))):
        options = {"rate": per_s, "requests": round(per_s * for_s), "max-tokens": tokens, "words": 50, "model": model}
        words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
        print(f"{name}: {per_s:g} requests/s for {for_s:g} s")
        print(json.dumps(load(url, pids, [*words, "--warmup", "0"]), indent=2), flush=True)


def embedded(args: argparse.Namespace) -> None:
    """Measure `forebay up`."""
    engine = () if args.cpu_bound else ("--workers", str(WORKERS), *ENGINE)
    with tempfile.TemporaryDirectory() as folder, up(f"{folder}/log.db", *engine, *args.router) as pids:
        measure(URL, pids, MODEL, args)


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
                pids = ",".join(f"forebay={one.process.pid}" for one in cluster.processes.running())
                await asyncio.to_thread(measure, url, pids, GROUP, args)
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
