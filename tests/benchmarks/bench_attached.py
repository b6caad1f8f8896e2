"""Benchmark of `forebay worker --upstream`: a server called directly, and through forebay on Kafka.

The server is the stand-in of tests/harness/openai_server, a process of its own. Broker, Redis, router, ingress and
worker are started here. The rounds alternate between both sides. CPU time is that of broker, router, ingress and
worker, without server and client, and includes what they use when idle, which is printed, too.
"""

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from infra.kafka.kafka import HOST, pid_of
from tests.harness.cluster import GROUP, PLAN, Cluster
from tests.harness.local import free_ports, local_kafka, local_redis

SERVER, WORKER = "server", "worker"
PARTS = ("broker", "ingress", "router", WORKER)
BLOCK = 32
PROMPT_BLOCKS = 8
TOKENS = 128
CONNECTIONS = (1, 16)
STREAMS = {1: 8, 16: 64}  # per round, by connections
WARM_UP = 4  # streams per connection that are not measured
IDLE_S = 10.0
NUMBERS = itertools.count()


@dataclass(slots=True)
class Side:
    """Medians of the rounds of one side and one number of connections.

    Attributes:
        ttft_ms: median time to first token of each round.
        tokens_per_s: output tokens per second of each round.
        cpu_us: CPU time per output token of each round, by part.
    """

    ttft_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_us: list[dict[str, float]] = field(default_factory=list)

    def cpu(self, part: str) -> float:
        """Return the median CPU time of a part per token, in microseconds."""
        return statistics.median(one[part] for one in self.cpu_us)


@dataclass(frozen=True, slots=True)
class System:
    """A running forebay with an attached server, and the process id of each measured part."""

    server_url: str
    ingress_url: str
    pids: dict[str, int]

    def cpu_s(self) -> dict[str, float]:
        """Return the CPU time of each part so far."""
        found = {}
        for part, pid in self.pids.items():
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            found[part] = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return found


@asynccontextmanager
async def running(token_ms: float) -> AsyncIterator[System]:
    """Start everything. `token_ms` is the server's time per output token."""
    with (
        tempfile.TemporaryDirectory() as folder,
        local_kafka(Path(folder) / "kafka") as broker,
        local_redis(Path(folder)) as redis,
    ):
        async with Cluster(broker.address, redis, f"bench-{uuid.uuid4().hex[:8]}", Path(folder), PLAN) as cluster:
            port = free_ports(3)
            url, events = f"http://{HOST}:{port}", f"tcp://{HOST}:{port + 1},tcp://{HOST}:{port + 2}"
            options = {"port": port, "block-size": BLOCK, "token-s": token_ms / 1000, "kv-events-port": port + 1}
            command = [text for name, value in options.items() for text in (f"--{name}", str(value))]
            cluster.processes.start(SERVER, [sys.executable, "-m", "tests.harness.openai_server", *command])
            cluster.router("router")
            cluster.worker(WORKER, "--upstream", url, "--upstream-kv-events", events)
            ingress = cluster.ingress("ingress")
            await cluster.until_serving(1)
            pids = {part: cluster.processes[part].process.pid for part in PARTS[1:]}
            kafka = pid_of(broker.data)
            assert kafka is not None
            yield System(url, ingress, {"broker": kafka, **pids})
            cluster.processes.check()


async def stream(client: aiohttp.ClientSession, url: str) -> float:
    """Stream a response of `TOKENS` tokens to a new prompt, and return the time to its first token in ms."""
    number, first_s = next(NUMBERS), 0.0
    body: dict[str, Any] = {
        "model": GROUP,
        "prompt": [1 + (number * 7_919 + place * (number % 13 + 1)) % 997 for place in range(PROMPT_BLOCKS * BLOCK)],
        "max_tokens": TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began_s, last = time.perf_counter(), b""
    async with client.post(f"{url}/v1/completions", json=body) as response:
        async for received in response.content:
            if received.startswith(b"data:"):
                first_s = first_s or time.perf_counter() - began_s
                last = received if b"usage" in received else last
    if f'"completion_tokens":{TOKENS}'.encode() not in last.replace(b" ", b""):
        raise SystemExit(f"{url} sent no response of {TOKENS} tokens: {last!r}")
    return first_s * 1000


async def measure(system: System, url: str, connections: int, side: Side | None) -> None:
    """Run one round; without `side` it is a warm-up."""
    streams = connections * WARM_UP if side is None else STREAMS[connections]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=connections)) as client:
        numbers, ttft_ms = iter(range(streams)), []

        async def connection() -> None:
            ttft_ms.extend([await stream(client, url) for _ in numbers])

        before, began_s = system.cpu_s(), time.perf_counter()
        await asyncio.gather(*(connection() for _ in range(connections)))
        took_s, after = time.perf_counter() - began_s, system.cpu_s()
    if side is not None:
        side.ttft_ms.append(statistics.median(ttft_ms))
        side.tokens_per_s.append(streams * TOKENS / took_s)
        side.cpu_us.append({part: (after[part] - before[part]) * 1e6 / (streams * TOKENS) for part in PARTS})


async def run(args: argparse.Namespace) -> None:
    """Measure both sides in turn, and print a table."""
    sides = {(name, count): Side() for count in CONNECTIONS for name in ("direct", "forebay")}
    async with running(args.token_ms) as system:
        urls = {"direct": system.server_url, "forebay": system.ingress_url}
        for name, count in sides:
            await measure(system, urls[name], count, None)
        before = system.cpu_s()
        await asyncio.sleep(IDLE_S)
        idle = {part: (value - before[part]) / IDLE_S * 100 for part, value in system.cpu_s().items()}
        for number in range(args.rounds):
            sys.stderr.write(f"round {number + 1} of {args.rounds}, load averages {os.getloadavg()}\n")
            for (name, count), side in sides.items():
                await measure(system, urls[name], count, side)
    print(f"{TOKENS} tokens per stream, {args.token_ms:g} ms per token, medians of {args.rounds} rounds\n")
    print(f"| connections | side | TTFT p50 ms | tokens/s | CPU us/token | {' | '.join(PARTS)} |")
    print("|---|---|---|---|---|" + "---|" * len(PARTS))
    for (name, count), side in sides.items():
        ttft_ms, tokens_per_s = statistics.median(side.ttft_ms), statistics.median(side.tokens_per_s)
        cpu = [side.cpu(part) if name == "forebay" else 0.0 for part in PARTS]
        columns = " | ".join(f"{value:.0f}" for value in (sum(cpu), *cpu))
        print(f"| {count} | {name} | {ttft_ms:.2f} | {tokens_per_s:.0f} | {columns} |")
    parts = ", ".join(f"{part} {share:.1f}" for part, share in idle.items())
    print(f"\nidle: {sum(idle.values()):.1f} % of a core ({parts})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds (default %(default)s)")
    parser.add_argument(
        "--token-ms", type=float, default=20.0, help="the server's milliseconds per output token (default %(default)s)"
    )
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
