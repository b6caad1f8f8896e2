"""`make demo-gateway`: a real Envoy sends requests to the servers that forebay selects, as well as its own ingress.

Starts Kafka, Redis, a router and two mock OpenAI servers with KV events, and plays a trace twice: through an ingress,
and through Envoy with a picker. Then it kills the picker under eight streams, and the router. Exits 1 unless both runs
reuse the same share of the prompts within 0.02, Envoy's clients get every answer, each one has its end in the books,
requests can be explained, and all decisions are derived equal. `make setup-gateway` installs Envoy. Kafka and Redis of
your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL).
"""

import argparse
import asyncio
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from forebay.events.decisions import RequestAborted, RequestRouted
from forebay.events.progress import AttemptMoved, RequestFinished
from forebay.events.topics import DECISIONS, PROGRESS
from tests.harness.cluster import GROUP, Cluster
from tests.harness.demo_kafka import trace_of
from tests.harness.demos import ANSWERED_WITHIN_S, Demo, Place, TraceResult
from tests.harness.envoy import PICKER, envoy_binary, start_gateway, start_picker
from tests.harness.openai_server import OpenAiServer, ServerSettings

REQUESTS, BLOCKS_MAX, OUTPUT_MAX = 500, 6, 40  # of the trace: rows, blocks of a prompt, output tokens
REUSE_DIFFERENCE = 0.02
STREAMS = 8
DEMO = Demo("demo-gateway", __doc__)


@dataclass(slots=True, kw_only=True)
class Result(TraceResult):
    """The result of the demo: shares of reused prompt tokens, ends in the books, and explained requests."""

    own_reuse: float = 0.0
    gateway_reuse: float = 0.0
    finished: int = 0
    explained: int = 0
    asked: int = 0
    aborted: int = 0
    at_random: int = 0

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        self.judge_requests()
        if abs(self.own_reuse - self.gateway_reuse) > REUSE_DIFFERENCE:
            self.problems.append(f"the reuse differs by more than {REUSE_DIFFERENCE}")
        if self.finished != self.requests:
            self.problems.append(f"{self.requests - self.finished} answers have no end in the books")
        if self.explained != self.asked:
            self.problems.append(f"{self.asked - self.explained} requests could not be explained")
        if self.aborted != STREAMS:
            self.problems.append(f"{self.aborted} of {STREAMS} requests of the lost picker were aborted in the books")
        if self.at_random != STREAMS:
            self.problems.append(f"{self.at_random} of {STREAMS} requests were answered without a router")

    def line(self) -> str:
        return (
            f"{self.requests} requests through Envoy, {self.answered_once} answered once, {self.finished} ended in the "
            f"books; reuse {self.gateway_reuse:.3f}, through the ingress {self.own_reuse:.3f}; {self.aborted} aborted "
            f"with their picker, {self.at_random} served without a router; explained {self.explained} of {self.asked}, "
            f"verified {self.verified} of {self.decisions}: {self.verdict}"
        )


def shortened(given: Path, folder: Path) -> Path:
    """Write the first rows of a trace in Mooncake's format, with short prompts that share the same prefixes."""
    rows = []
    with given.open() as lines:
        for _, line in zip(range(REQUESTS), lines, strict=False):
            row = json.loads(line)
            blocks = row["hash_ids"][:BLOCKS_MAX]
            length = min(row["input_length"], 512 * len(blocks))
            output = min(row["output_length"], OUTPUT_MAX)
            rows.append({**row, "hash_ids": blocks, "input_length": length, "output_length": output})
    written = folder / "shortened.jsonl"
    written.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return written


@asynccontextmanager
async def system(place: Place) -> AsyncIterator[tuple[Cluster, tuple[OpenAiServer, OpenAiServer]]]:
    """Run a router, and a worker process for two servers with empty caches."""
    settings = ServerSettings(block_size=16, kv_blocks=4_096, kv_events=True, token_s=0.002)
    async with OpenAiServer(settings) as first, OpenAiServer(settings) as second, place.cluster() as cluster:
        servers = first, second
        cluster.router("r1")
        upstreams = [f"--upstream={one.url}" for one in servers]
        events = [f"--upstream-kv-events={one.kv_events},{one.kv_replay}" for one in servers]
        cluster.processes.start("servers", [*cluster.command_of("worker"), *upstreams, *events])
        await cluster.until_members(count=2)
        yield cluster, servers


async def play(cluster: Cluster, trace: Path, url: str, speed: float) -> dict[str, Any]:
    options = ("--json", "--speed", str(speed), "--url", url)
    _, out = await cluster.command("trace", "trace", str(trace), *options, within_s=ANSWERED_WITHIN_S)
    summary: dict[str, Any] = json.loads(out)
    DEMO.report(
        f"{summary['answered_once']} answered once, reuse {summary['prefix_reuse']:.3f}, first token p50"
        f" {summary['ttft_ms']['p50']:.1f} ms"
    )
    return summary


async def complete(client: httpx.AsyncClient, number: int, tokens: int) -> bool:
    """Send a request; return whether its answer is complete."""
    body = {"model": GROUP, "prompt": [100 + number] * 40, "max_tokens": tokens, "ignore_eos": True, "stream": True}
    try:
        response = await client.post("/v1/completions", json=body)
    except httpx.TransportError:
        return False
    return response.status_code == httpx.codes.OK and "[DONE]" in response.text


async def lose_picker(cluster: Cluster, servers: tuple[OpenAiServer, ...], url: str, port: int) -> int:
    """Kill the picker under streams, start it again, and return how many requests the owner aborted."""
    for server in servers:
        server.faults.token_s = 0.2
    routed = await cluster.routed()
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        streams = [asyncio.create_task(complete(client, number, 200)) for number in range(STREAMS)]
        await cluster.until("the streams are routed", cluster.routed, lambda count: count >= routed + STREAMS)
        cluster.kill(PICKER)
        whole = sum(await asyncio.gather(*streams))
        for server in servers:
            server.faults.token_s = None

        async def aborted() -> list[Any]:
            return [one for one in await cluster.events(DECISIONS, RequestAborted) if one.reason == "ingress_lost"]

        lost = await cluster.until(
            "the requests of the picker are aborted", aborted, lambda found: len(found) >= STREAMS
        )
        await start_picker(cluster, port)
        again = sum(await asyncio.gather(*(complete(client, number, 3) for number in range(STREAMS))))
    DEMO.report(f"kill -9 of the picker: {whole} of {STREAMS} streams ended, {len(lost)} aborted in the books;")
    DEMO.report(f"after its restart, {again} of {STREAMS} are answered")
    return len(lost)


async def lose_router(cluster: Cluster, url: str) -> int:
    """Kill the only router, and return how many requests are answered without it."""
    cluster.kill("r1")
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answered = sum([await complete(client, number, 3) for number in range(STREAMS)])
    DEMO.report(f"kill -9 of the router: {answered} of {STREAMS} requests are answered by random servers")
    return answered


async def explain(cluster: Cluster, result: Result, count: int) -> None:
    """Explain requests, evenly spread over the trace."""
    routed = list(dict.fromkeys(one.request_id for one in await cluster.events(DECISIONS, RequestRouted)))
    for name in routed[: result.requests : max(1, result.requests // count)]:
        report = await cluster.explain(name)
        result.asked += 1
        result.explained += report["state"] == "finished" and len(report["routings"]) > 0


async def run(place: Place, options: argparse.Namespace) -> Result:
    envoy_binary()
    given, _ = trace_of(place.folder, options.trace)
    trace = shortened(given, place.folder)
    result = Result(requests=len(trace.read_text().splitlines()))
    async with system(place) as (cluster, _):
        url = cluster.ingress("i1")
        await cluster.until_serving(2)
        DEMO.report(f"{result.requests} requests through forebay's ingress; logs in {place.folder}")
        result.own_reuse = (await play(cluster, trace, url, options.speed))["prefix_reuse"]
    async with system(place) as (cluster, servers):
        url, port = await start_gateway(cluster, [one.port for one in servers])
        DEMO.report(f"the same requests through Envoy at {url}")
        summary = await play(cluster, trace, url, options.speed)
        result.gateway_reuse, result.answered_once = summary["prefix_reuse"], summary["answered_once"]
        result.problems += [f"{count} times {problem}" for problem, count in summary["failures"].items()]
        result.finished = len(await cluster.events(PROGRESS, RequestFinished))
        DEMO.report(f"{len(await cluster.events(PROGRESS, AttemptMoved))} requests moved to another server")
        await explain(cluster, result, options.explain)
        result.aborted = await lose_picker(cluster, servers, url, port)
        result.at_random = await lose_router(cluster, url)
        await result.verify(cluster)
    result.judge()
    return result


def main() -> int:
    DEMO.add_trace_options(speed=1.0)
    DEMO.add("--explain", type=int, default=10, help="number of requests to explain (%(default)s)")
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
