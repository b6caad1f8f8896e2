"""`make demo-answers`: streams survive the death of their ingress, of the owner and of two workers.

Starts Kafka, Redis, an ingress for the streams and one to resume at, two routers and mock workers. All streams begin at
the first ingress, which is killed with SIGKILL once every stream has begun, then the owner and two workers, one after
the other. Each client resumes after its last event at the second ingress. A third ingress, which starts at the end,
renders every stream once more, undisturbed. Exits 1 unless all streams are equal to it byte for byte, have the tokens
of an undisturbed worker and no event twice, the first event after a reconnection came within 0.5 s (p95), and every
decision was derived equal.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.harness.cluster import GROUP, Cluster
from tests.harness.demos import Demo, Place, Result
from tests.harness.failover import lost
from tests.harness.mock_words import Words
from tests.harness.processes import ProcessError
from tests.integration.stream_clients import prompt

WORKERS = ("w1", "w2", "w3", "w4")
TOKENS = 400
SPEEDUP = 0.1  # of the mock engines: a stream takes about half a minute
KILLS_AT = (0.1, 0.25, 0.4, 0.55)  # share of all tokens after which ingress, owner and two workers are killed
FIRST_EVENT_S = 0.5
TIMEOUT_S = 300.0
RETRY_S = 0.05
DONE = b"data: [DONE]"
DEMO = Demo("demo-answers", __doc__)


@dataclass(slots=True)
class Stream:
    """One stream as its client received it: server-sent events without comments, and times until resumed events."""

    number: int
    events: list[bytes] = field(default_factory=list)
    resumed_s: list[float] = field(default_factory=list)
    problem: str = ""

    @property
    def is_done(self) -> bool:
        return bool(self.events) and self.events[-1] == DONE

    @property
    def ids(self) -> list[str]:
        lines = (line for event in self.events for line in event.decode().splitlines())
        return [line.removeprefix("id: ") for line in lines if line.startswith("id: ")]

    @property
    def request_id(self) -> str:
        return str(chunk_of(self.events[0])["id"])

    @property
    def text(self) -> str:
        chunks = [chunk_of(event) for event in self.events if event != DONE]
        return "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])


def chunk_of(event: bytes) -> dict[str, Any]:
    chunk: dict[str, Any] = json.loads(event[event.index(b"data: ") + len(b"data: ") :])
    return chunk


@dataclass(slots=True, kw_only=True)
class Answers(Result):
    """The result of the demo."""

    streams: list[Stream]
    equal: int = 0

    @property
    def p95_s(self) -> float:
        times = sorted(itertools.chain.from_iterable(one.resumed_s for one in self.streams))
        return times[int(0.95 * (len(times) - 1))] if times else 0.0

    @property
    def resumed(self) -> int:
        return sum(bool(one.resumed_s) for one in self.streams)

    def judge(self) -> None:
        """Add every unmet requirement to `problems`."""
        words = Words()
        for one in self.streams:
            if one.problem:
                self.problems.append(f"stream {one.number}: {one.problem}")
            elif len(set(one.ids)) < len(one.ids):
                self.problems.append(f"stream {one.number} has an event twice")
            elif one.text != words.text(prompt(one.number), TOKENS):
                self.problems.append(f"stream {one.number} has other tokens than without a failure")
        if self.equal < len(self.streams):
            self.problems.append(f"{len(self.streams) - self.equal} streams differ from the undisturbed rendering")
        if self.resumed < len(self.streams):
            self.problems.append(f"{len(self.streams) - self.resumed} streams were not resumed")
        if self.p95_s > FIRST_EVENT_S:
            self.problems.append(f"the first event after a reconnection was to come within {FIRST_EVENT_S} s")
        self.judge_decisions(len(self.streams))

    def line(self) -> str:
        return (
            f"{self.resumed} of {len(self.streams)} streams resumed, {self.equal} equal byte for byte, first event "
            f"{self.p95_s * 1000:.0f} ms after the reconnection (p95), verified {self.verified} of {self.decisions}: "
            f"{self.verdict}"
        )


class Clients:
    """Clients of the streams. `url` is where they resume."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self.url = url
        self._client = client

    async def receive(self, stream: Stream, url: str, tokens: int = TOKENS) -> None:
        """Request a stream at `url`, and resume it at `self.url` until it is complete."""
        body = {
            "model": GROUP,
            "prompt": prompt(stream.number),
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        give_up_s = time.monotonic() + TIMEOUT_S
        await self._read(stream, "POST", f"{url}/v1/completions", json=body)
        while not stream.is_done and not stream.problem:
            if time.monotonic() > give_up_s or not stream.events:
                stream.problem = f"incomplete after {len(stream.events)} events"
                return
            last = {"last-event-id": stream.ids[-1]}
            path = f"{self.url}/v1/requests/{stream.request_id}/stream"
            began_s, events = time.monotonic(), len(stream.events)
            await self._read(stream, "GET", path, resumed_at=began_s, headers=last)
            if len(stream.events) == events:
                await asyncio.sleep(RETRY_S)

    async def replay(self, stream: Stream) -> Stream:
        """Return the whole stream as `self.url` renders it."""
        whole = Stream(stream.number)
        await self._read(whole, "GET", f"{self.url}/v1/requests/{stream.request_id}/stream")
        return whole

    async def _read(self, stream: Stream, method: str, url: str, resumed_at: float = 0.0, **content: Any) -> None:
        rest = b""
        try:
            async with self._client.stream(method, url, **content) as response:
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode()
                    if response.status_code != httpx.codes.SERVICE_UNAVAILABLE:
                        stream.problem = f"{response.status_code} {text}"
                    return
                async for part in response.aiter_bytes():
                    *events, rest = (rest + part).split(b"\n\n")
                    for event in events:
                        if event.startswith(b":"):
                            continue
                        if resumed_at and event != DONE:
                            stream.resumed_s.append(time.monotonic() - resumed_at)
                            resumed_at = 0.0
                        stream.events.append(event)
                        if b'"error"' in event:
                            stream.problem = event.decode()
        except httpx.TransportError:
            return


async def play(cluster: Cluster, streams: list[Stream], clients: Clients, url: str) -> None:
    """Begin all streams at `url`, kill four processes in turn, and wait for all streams."""
    receiving = asyncio.gather(*(clients.receive(one, url) for one in streams))

    async def after(share: float, kill: Callable[[], Awaitable[str]]) -> None:
        def has_passed() -> bool:
            if any(one.problem for one in streams):
                raise ProcessError("; ".join(f"stream {one.number}: {one.problem}" for one in streams if one.problem))
            begun = all(one.events for one in streams)
            return begun and sum(len(one.events) for one in streams) >= share * TOKENS * len(streams)

        await cluster.until(f"{share:.0%} of the tokens arrived", has_passed, within_s=TIMEOUT_S)
        DEMO.report(f"kill -9 of {await kill()} after {sum(len(one.events) for one in streams)} events")

    async def kill_ingress() -> str:
        cluster.kill("i1")
        return "ingress i1"

    async def kill_owner() -> str:
        owner = await cluster.owner()
        cluster.kill(owner)
        await cluster.until("the standby owns the group", cluster.owner, lambda name: name != owner)
        return f"owner {owner}"

    async def kill_worker(name: str) -> str:
        cluster.kill(name)
        await lost(cluster, name)
        return f"worker {name}"

    await after(KILLS_AT[0], kill_ingress)
    await after(KILLS_AT[1], kill_owner)
    await after(KILLS_AT[2], lambda: kill_worker("w1"))
    await after(KILLS_AT[3], lambda: kill_worker("w2"))
    await receiving


async def run(place: Place, options: argparse.Namespace) -> Answers:
    result = Answers(streams=[Stream(number) for number in range(options.streams)])
    async with place.cluster() as cluster:
        DEMO.report(f"2 routers, {len(WORKERS)} mock workers and 2 ingresses start; logs in {place.folder}")
        await cluster.serve(("r1", "r2"), WORKERS, ("i1", "i2"), worker=("--speedup", str(options.speedup)))
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=limits) as client:
            clients = Clients(client, cluster.urls["i2"])
            await clients.receive(Stream(0), clients.url, tokens=1)  # an ingress loads a model with its first request
            await play(cluster, result.streams, clients, cluster.urls["i1"])
            clients.url = cluster.ingress("i3")
            await cluster.until_serving(len(WORKERS) - 2)
            DEMO.report("all streams ended; ingress i3 renders each of them again")
            for one in result.streams:
                result.equal += not one.problem and (await clients.replay(one)).events == one.events
        await result.verify(cluster)
        result.judge()
    return result


def main() -> int:
    DEMO.add("--streams", type=int, default=100, choices=range(1, 501), metavar="1-500", help="(default %(default)s)")
    DEMO.add_speedup(SPEEDUP)
    return DEMO.run(run)


if __name__ == "__main__":
    sys.exit(main())
