"""Responses survive the death of their ingress: resumed, repeated, kept and deleted at another one."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from forebay.events.answers import AnswerStored
from forebay.events.topics import ANSWERS
from tests.harness.cluster import GROUP, Cluster
from tests.integration.conftest import cluster_fixture
from tests.integration.stream_clients import TIMEOUT_S, prompt

WORKERS = ("w1", "w2")
STREAMS, TOKENS, READ = 20, 120, 10  # streams, tokens of each, and events that each client has before a failure
FIRST_EVENT_S = 3.0  # generous, because other tests share the machine
DELETED_S = 2.0
DONE = "data: [DONE]"

pytestmark = pytest.mark.asyncio(loop_scope="module")
cluster = cluster_fixture("answers", ("r1", "r2"), WORKERS, ("i1", "i2"), worker=("--speedup", "0.1"))


def body(number: int, **changes: Any) -> dict[str, Any]:
    sampling = {"max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    return {"model": GROUP, "prompt": prompt(number), **sampling, **changes}


@dataclass(slots=True)
class Stream:
    """A stream as its client received it over several connections.

    `headers` are those of the last connection, and `resumed_s` the seconds until its first event.
    """

    events: list[str] = field(default_factory=list)
    headers: httpx.Headers = field(default_factory=httpx.Headers)
    resumed_s: float = 0.0

    @property
    def id(self) -> str:
        data = next(line for line in self.events[0].splitlines() if line.startswith("data: "))
        return str(json.loads(data.removeprefix("data: "))["id"])

    @property
    def position(self) -> str:
        """Id of the last event that has one."""
        lines = [line for event in self.events for line in event.splitlines() if line.startswith("id: ")]
        return lines[-1].removeprefix("id: ")

    async def read(self, client: httpx.AsyncClient, method: str, url: str, **content: Any) -> None:
        """Add the events of a response, until it is complete or the connection is lost."""
        began_s, self.resumed_s, rest = time.monotonic(), 0.0, ""
        try:
            async with client.stream(method, url, **content) as response:
                assert response.status_code == httpx.codes.OK, (await response.aread()).decode()
                self.headers = response.headers
                async for text in response.aiter_text():
                    *whole, rest = (rest + text).split("\n\n")
                    self.events += [event for event in whole if not event.startswith(":")]
                    self.resumed_s = self.resumed_s or time.monotonic() - began_s
        except httpx.TransportError:
            return

    async def resume(self, client: httpx.AsyncClient, url: str) -> None:
        headers = {"last-event-id": self.position}
        await self.read(client, "GET", f"{url}/v1/requests/{self.id}/stream", headers=headers)


async def begun(cluster: Cluster, *streams: Stream, events: int = READ) -> None:
    await cluster.until("all clients have some events", lambda: all(len(one.events) >= events for one in streams))


async def test_streams_continue_at_another_ingress_byte_for_byte(
    cluster: Cluster, report: Callable[[str], None]
) -> None:
    """Their ingress and then the owner are killed."""
    serving = cluster.ingress("i3")
    await cluster.until_serving(len(WORKERS))
    streams = [Stream() for _ in range(STREAMS)]
    async with httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None)) as client:
        url = f"{serving}/v1/completions"
        reading = asyncio.gather(
            *(one.read(client, "POST", url, json=body(number)) for number, one in enumerate(streams))
        )
        await begun(cluster, *streams)
        cluster.kill("i3")
        await reading
        resuming = asyncio.gather(*(one.resume(client, cluster.urls["i2"]) for one in streams))
        await begun(cluster, *streams, events=3 * READ)
        owner = await cluster.owner()
        cluster.kill(owner)
        await resuming
        took_s = sorted(one.resumed_s for one in streams)
        for one in streams:
            whole = Stream()
            await whole.read(client, "GET", f"{cluster.urls['i1']}/v1/requests/{one.id}/stream")
            assert one.events == whole.events
            assert (one.events[-1], len(one.events)) == (DONE, TOKENS + 2)
    cluster.router(owner)
    report(f"first event {took_s[int(0.95 * STREAMS)] * 1000:.0f} ms after the reconnection (p95)")
    assert took_s[-1] < FIRST_EVENT_S
    await cluster.require_verified()


async def test_a_detached_request_survives_its_ingress_and_is_deleted_everywhere(cluster: Cluster) -> None:
    serving = cluster.ingress("i4")
    await cluster.until_serving(len(WORKERS))
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        stream, detached = Stream(), body(500, forebay={"detach": True})
        reading = asyncio.create_task(stream.read(client, "POST", f"{serving}/v1/completions", json=detached))
        await begun(cluster, stream)
        cluster.kill("i4")
        await reading
        urls = [f"{cluster.urls[name]}/v1/requests/{stream.id}" for name in ("i1", "i2")]
        whole = (await client.get(urls[0])).raise_for_status().json()
        assert whole["usage"]["completion_tokens"] == TOKENS

        async def kept() -> bool:
            answers = await cluster.events(ANSWERS, AnswerStored)
            return any(stream.id.startswith(answer.request_id) for answer in answers)

        await cluster.until("the answer is kept", kept)
        assert (await client.get(urls[1])).json() == whole
        (await client.delete(urls[0])).raise_for_status()
        began_s = time.monotonic()
        while (await client.get(urls[1])).status_code != httpx.codes.NOT_FOUND:
            assert time.monotonic() - began_s < DELETED_S
        assert (await client.get(urls[0])).status_code == httpx.codes.NOT_FOUND


async def test_a_repeated_request_joins_the_first_one_after_a_takeover(cluster: Cluster) -> None:
    serving = cluster.ingress("i5")
    await cluster.until_serving(len(WORKERS))
    content: dict[str, Any] = {"json": body(600), "headers": {"idempotency-key": "order-1"}}
    first, again, later = Stream(), Stream(), Stream()
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        reading = asyncio.create_task(first.read(client, "POST", f"{serving}/v1/completions", **content))
        await begun(cluster, first)
        cluster.kill("i5")
        await reading
        await again.read(client, "POST", f"{cluster.urls['i1']}/v1/completions", **content)
        assert again.events[: len(first.events)] == first.events
        assert (again.events[-1], again.headers["idempotency-replayed"]) == (DONE, "true")
        owner = await cluster.owner()
        await cluster.stop(owner)
        cluster.router(owner)
        await cluster.until_owned()
        url = f"{cluster.urls['i2']}/v1/completions"
        await later.read(client, "POST", url, **content)
        assert later.events == again.events
        other = await client.post(url, json=body(601), headers=content["headers"])
        assert (other.status_code, other.json()["error"]["code"]) == (409, "idempotency_key_reused")
    await cluster.require_verified()
