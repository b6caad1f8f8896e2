"""`make demo-gateway`: a real Envoy sends requests to the servers that forebay selects, as well as its own ingress.

Starts Kafka, Redis, a router and two mock OpenAI servers with KV events, and plays a trace twice: through an ingress,
and through Envoy with a picker. Then it kills a server and the picker under eight streams each, and the router. Exits 1
unless both runs reuse the same share of the prompts within 0.02, Envoy's clients get every answer that a living server
can give, every request has its end in the books and can be explained, and all decisions are derived equal. The caches
hold the whole trace, so that the reuse depends on the routing only. `make setup-gateway` installs Envoy. Kafka and
Redis of your own: FOREBAY_KAFKA (host:port) and FOREBAY_REDIS (URL).
"""

import argparse
import asyncio
import json
import logging
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from forebay.core.routing.plan import Plan
from forebay.events.decisions import RequestAborted, RequestRouted
from forebay.events.progress import AttemptMoved, FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import DECISIONS, PROGRESS, REQUESTS
from forebay.journal.reader import JournalReader, Past
from forebay.journal.start import oldest
from forebay.replay.explain.explain import explain
from forebay.replay.explain.timeline import Timeline
from forebay.replay.states import States
from infra.kafka.kafka import HOST
from tests.harness.cluster import GROUP, Cluster
from tests.harness.demo_kafka import trace_of
from tests.harness.demos import ANSWERED_WITHIN_S, Demo, Place, TraceResult
from tests.harness.envoy import PICKER, envoy_binary, start_gateway, start_picker
from tests.harness.openai_server import OpenAiServer, ServerSettings

ROWS_MAX, BLOCKS_MAX, OUTPUT_MAX = 500, 6, 8  # of the trace: rows, blocks of a prompt, output tokens
REUSE_DIFFERENCE = 0.02
STREAMS = 8
BURST = 32  # requests at once after a server is lost, more than the retries that Envoy allows by default
KV_BLOCKS = 65_536  # more than the trace has, so that no server evicts
DEMO = Demo("demo-gateway", __doc__)


@dataclass(slots=True, kw_only=True)
class Result(TraceResult):
    """The result of the demo: shares of reused prompt tokens, ends in the books, and explained requests."""

    own_reuse: float = 0.0
    gateway_reuse: float = 0.0
    finished: int = 0
    explained: int = 0
    asked: int = 0
    in_flight: int = 0
    cut: int = 0
    after_server: int = 0
    after_picker: int = 0
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
        if self.in_flight:
            self.problems.append(f"{self.in_flight} requests have no end in the books")
        if self.after_server != 2 * BURST:
            self.problems.append(f"{self.after_server} of {2 * BURST} requests were answered after a server was lost")
        if self.after_picker != STREAMS:
            self.problems.append(f"{self.after_picker} of {STREAMS} requests were answered by the new picker")
        if self.aborted != STREAMS:
            self.problems.append(f"{self.aborted} of {STREAMS} requests of the lost picker were aborted in the books")
        if self.at_random != STREAMS:
            self.problems.append(f"{self.at_random} of {STREAMS} requests were answered without a router")

    def line(self) -> str:
        return (
            f"{self.requests} requests through Envoy, {self.answered_once} answered once, {self.finished} ended in the "
            f"books; reuse {self.gateway_reuse:.3f}, through the ingress {self.own_reuse:.3f}; {self.cut} cut "
            f"with their server and {self.after_server} answered after, {self.aborted} aborted with their picker and "
            f"{self.after_picker} answered after, {self.at_random} served without a router; explained {self.explained} "
            f"of {self.asked}, verified {self.verified} of {self.decisions}: {self.verdict}"
        )


def shortened(given: Path, folder: Path) -> Path:
    """Write the first rows of a trace in Mooncake's format, with short prompts that share the same prefixes."""
    rows = []
    with given.open() as lines:
        for _, line in zip(range(ROWS_MAX), lines, strict=False):
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
    settings = ServerSettings(block_size=16, kv_blocks=KV_BLOCKS, kv_events=True, token_s=0.002)
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


async def lose_picker(cluster: Cluster, servers: tuple[OpenAiServer, ...], url: str, port: int, result: Result) -> None:
    """Kill the picker under streams, start it again, and count the requests."""
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
        result.after_picker = sum(await asyncio.gather(*(complete(client, number, 3) for number in range(STREAMS))))
    result.aborted = len(lost)
    DEMO.report(f"kill -9 of the picker: {whole} of {STREAMS} streams ended, {len(lost)} aborted in the books;")
    DEMO.report(f"after its restart, {result.after_picker} of {STREAMS} are answered")


async def lose_server(cluster: Cluster, servers: tuple[OpenAiServer, ...], url: str, result: Result) -> None:
    """Cut the connections of a server with streams, start it again, and count the requests."""
    for server in servers:
        server.faults.token_s = 0.2
    before = len(await routed_workers(cluster))
    begun = len(await cluster.events(PROGRESS, FirstTokenEmitted))
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        streams = [asyncio.create_task(complete(client, number, 200)) for number in range(STREAMS)]
        await cluster.until(
            "the streams have begun",
            lambda: cluster.events(PROGRESS, FirstTokenEmitted),
            lambda found: len(found) >= begun + STREAMS,
        )
        places = list((await routed_workers(cluster)).values())[before:]
        lost, kept = sorted(servers, key=lambda one: -places.count(worker_of(one)))
        await lost.stop()
        kept.faults.token_s = None
        whole = sum(await asyncio.gather(*streams))
        result.cut = STREAMS - whole
        if whole != places.count(worker_of(kept)):
            result.problems.append(f"{whole} streams ended, but {places.count(worker_of(kept))} had a living server")
        at_once = sum(await asyncio.gather(*(complete(client, number, 3) for number in range(BURST))))
        await cluster.until_members(count=1)
        later = sum(await asyncio.gather(*(complete(client, number, 3) for number in range(BURST))))
        result.after_server = at_once + later
        last = list((await routed_workers(cluster)).values())[-BURST:]
        if set(last) != {worker_of(kept)}:
            result.problems.append("requests were sent to the lost server")
    DEMO.report(f"a server is killed: {result.cut} of {STREAMS} streams are cut, {whole} of the other server end;")
    DEMO.report(f"{at_once} of {BURST} requests are answered at once, {later} of {BURST} after its loss is recorded")
    lost.faults.token_s = None
    await lost.start()
    await cluster.until_members(count=2)


def worker_of(server: OpenAiServer) -> str:
    return f"{HOST}-{server.port}"


async def routed_workers(cluster: Cluster) -> dict[str, str]:
    """Return the last selected worker of each routed request, in order of the first routing."""
    return {one.request_id: one.worker_id for one in await cluster.events(DECISIONS, RequestRouted)}


async def lose_router(cluster: Cluster, url: str) -> int:
    """Kill the only router, and return how many requests are answered without it."""
    cluster.kill("r1")
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        answered = sum([await complete(client, number, 3) for number in range(STREAMS)])
    DEMO.report(f"kill -9 of the router: {answered} of {STREAMS} requests are answered by random servers")
    return answered


async def explain_all(cluster: Cluster, result: Result) -> None:
    """Explain every routed request like `forebay explain`, but derive the journal only once for all of them."""
    log, partition = cluster.log, cluster.partition()
    start = await oldest(log, partition)
    reader = JournalReader(log, partition, start, await log.end(DECISIONS.name, partition), Past.ABANDONED_HISTORY)
    timelines = {name: Timeline(name, start.world) for name in await routed_workers(cluster)}

    def on_plan(plan: Plan) -> None:
        if plan.request.request_id in timelines:
            timelines[plan.request.request_id].on_plan(plan, with_changes=False)

    reader.world.on_plan = on_plan
    active: list[Timeline] = []
    async for step in reader:
        if step.divergence is not None:
            result.problems.append(f"no request is explained after journal offset {step.offset}")
            break
        submitted = (one for one in step.events.get(REQUESTS.name, ()) if isinstance(one, RequestSubmitted))
        active += [timelines[one.request_id] for one in submitted if one.request_id in timelines]
        for one in active:
            one.apply(step)
        active = [one for one in active if not one.over]
    result.asked = len(timelines)
    for name, timeline in timelines.items():
        found = timeline.explanation(diverged=False)
        if found.ending is None:  # its end may be on the log, but not in the journal
            found = await explain(States(log, partition), name, thorough=False)
        result.explained += found.divergence is None and len(found.routings) > 0
        result.in_flight += found.ending is None


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
        await lose_server(cluster, servers, url, result)
        await lose_picker(cluster, servers, url, port, result)
        result.at_random = await lose_router(cluster, url)
        await explain_all(cluster, result)
        await result.verify(cluster)
    result.judge()
    return result


def main() -> int:
    logging.getLogger("uvicorn.error").disabled = True  # a killed server logs each stream that it cuts
    DEMO.add_trace_options(speed=0.25)
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
