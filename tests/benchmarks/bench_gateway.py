"""Measure what a picker adds to Envoy with round robin: latency until the first event, and CPU time.

A router, a worker process for two mock servers, a picker and two Envoys run on a private Kafka and Redis. The second
Envoy sends requests to the same servers without the picker. The load client sends the same requests to both, in turn,
and to forebay's own ingress. A picker adds three hops of the log at best: the request to the owner, its journal, and
the decision to the picker. `make setup-gateway` installs Envoy.
"""

import argparse
import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from forebay.events.topics import work_topic
from forebay.transport.base import Draft, LogError
from forebay.transport.kafka.log import KafkaLog
from infra.kafka.kafka import HOST
from tests.benchmarks.bench_http import load
from tests.benchmarks.http_load import cpu_s
from tests.harness.cluster import GROUP, PLAN, POOL, Cluster
from tests.harness.demo_gateway import system
from tests.harness.demos import Place
from tests.harness.envoy import PICKER, config_of, envoy_binary, start_gateway
from tests.harness.local import Missing, free_ports, local_kafka, local_redis
from tests.harness.processes import ProcessError

PICKED, ROUND_ROBIN, INGRESS = "Envoy, picker", "Envoy, round robin", "ingress"
HOPS = 200
IDLE_S = 10.0
PROCESSES = {"picker": PICKER, "router": "r1", "worker": "servers"}


async def hop_ms(cluster: Cluster) -> float:
    """Return the median time from an append to its arrival in another client of Kafka, one record at a time."""
    sender, receiver = await KafkaLog.open(cluster.settings), await KafkaLog.open(cluster.settings)
    topic, slot, wake, found = work_topic(POOL).name, PLAN.slots - 1, asyncio.Event(), []  # no worker has this slot
    try:
        tail = receiver.tail(topic, slot, await receiver.end(topic, slot), wake)
        for _ in range(HOPS):
            began_s = time.perf_counter()
            sender.append_soon([Draft(topic, slot, bytes(300))])
            while not tail.take(1):
                wake.clear()
                await wake.wait()
            found.append(time.perf_counter() - began_s)
    finally:
        await sender.close()
        await receiver.close()
    return statistics.median(found) * 1000


def without_picker(cluster: Cluster, servers: Sequence[int]) -> str:
    """Start an Envoy for the servers at these ports whose route skips the picker, and return its URL."""
    port = free_ports(1)
    text = config_of(port, port, servers)
    config = cluster.processes.folder / "round-robin.yaml"
    config.write_text(
        text.replace("path: /v1/completions", "path: /unused").replace("path: /v1/models", "prefix: /v1/")
    )
    command = [str(envoy_binary()), "-c", str(config), "--disable-hot-restart", "--concurrency", "1", "-l", "warning"]
    cluster.processes.start("round-robin", command)
    return f"http://{HOST}:{port}"


async def measure(place: Place, options: argparse.Namespace) -> None:
    found: dict[tuple[int, str], list[dict[str, Any]]] = {}
    hops, idle = [], dict[str, float]()
    async with system(place) as (cluster, servers):
        ports = [one.port for one in servers]
        picked, _ = await start_gateway(cluster, ports)
        urls = {PICKED: picked, ROUND_ROBIN: without_picker(cluster, ports)}
        urls[INGRESS] = cluster.ingress("i1")
        await cluster.until_serving(2)
        pids = {kind: cluster.processes[name].process.pid for kind, name in PROCESSES.items()}
        before = {kind: cpu_s([pid]) for kind, pid in pids.items()}
        await asyncio.sleep(IDLE_S)
        idle = {kind: (cpu_s([pid]) - before[kind]) / IDLE_S for kind, pid in pids.items()}
        named = ",".join(f"{kind}={pid}" for kind, pid in pids.items())
        for _ in range(options.rounds):
            hops.append(await hop_ms(cluster))
            for connections in options.connections:
                for name, url in urls.items():
                    sizes = ["--conc", str(connections), "--requests", str(options.requests), "--words", "40"]
                    case = ["--text", "--model", GROUP, "--max-tokens", str(options.tokens), *sizes]
                    found.setdefault((connections, name), []).append(await asyncio.to_thread(load, url, named, case))
        assert (await cluster.require_verified())["verified"]
    print_table(found, hops, idle)


def print_table(found: dict[tuple[int, str], list[dict[str, Any]]], hops: list[float], idle: dict[str, float]) -> None:
    """Print the medians of the rounds. CPU times are those of requests: the CPU time of an idle process is deducted."""
    shares = ", ".join(f"{kind} {share * 100:.1f} %" for kind, share in idle.items())
    print(f"\na hop: {statistics.median(hops):.2f} ms; load average {os.getloadavg()[0]:.1f}; CPU when idle: {shares}")
    print(f"\n| connections | | first event p50 / p99 ms | added p50 ms | {' | '.join(PROCESSES)}: CPU us/request |")
    print(f"|---|---|---|---|{'---|' * len(PROCESSES)}")
    for (connections, name), results in found.items():
        p50, p99 = (statistics.median(one["ttft_ms"][part] for one in results) for part in ("p50", "p99"))
        pairs = zip(results, found[connections, ROUND_ROBIN], strict=True)
        added = statistics.median(one["ttft_ms"]["p50"] - other["ttft_ms"]["p50"] for one, other in pairs)
        used = [
            statistics.median(one["cpu_us_per_request"][kind] - share * 1e6 / one["requests_per_s"] for one in results)
            for kind, share in idle.items()
        ]
        cells = " | ".join(f"{us:.0f}" for us in used)
        print(f"| {connections} | {name} | {p50:.2f} / {p99:.2f} | {added:+.2f} | {cells} |")


def main() -> None:
    """Measure, and print a table with medians of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=300, help="requests of a case in each round")
    parser.add_argument("--tokens", type=int, default=4, help="output tokens of a request, each an event")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 8])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            envoy_binary()
            with local_kafka(folder / "kafka") as kafka, local_redis(folder) as redis_url:
                asyncio.run(measure(Place(kafka.address, redis_url, folder, is_kept=False), options))
        except (LogError, Missing, ProcessError) as error:
            raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
