"""Drain and shutdown of an ingress."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from forebay.events.requests import RequestCancelled
from forebay.ingress.http.server import build_server, serve_until_drained
from tests.ingress.conftest import NAME, Scene
from tests.system import until

LONG_S = 3600.0
STREAM = {"model": NAME, "prompt": "hi", "max_tokens": 9, "stream": True}
SHUTTING_DOWN = {
    "message": "the server is shutting down",
    "type": "server_error",
    "param": None,
    "code": "shutting_down",
}


class Served:
    """Serve an ingress on a socket; yield a client and the task that serves."""

    def __init__(self, scene: Scene, client: httpx.AsyncClient, serving: "asyncio.Task[None]") -> None:
        self.scene = scene
        self.client = client
        self.serving = serving

    def start_request(self, **changes: Any) -> "asyncio.Task[httpx.Response]":
        return asyncio.create_task(self.client.post("/v1/completions", json={**STREAM, **changes}))


@asynccontextmanager
async def served(scene: Scene, drain_s: float) -> AsyncIterator[Served]:
    listener, port = scene.listen()
    server, ingress = build_server(scene.app), scene.ingress

    def interrupt(reason: str) -> None:
        ingress.replies.interrupt_all(reason)

    serving = asyncio.create_task(serve_until_drained(server, listener, ingress.drain, interrupt, drain_s))
    await until(lambda: server.started)
    # A client that gives up would end a request that the server failed to end.
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=None) as client:
        try:
            yield Served(scene, client, serving)
        finally:
            serving.cancel()
            await asyncio.gather(serving, return_exceptions=True)


def data_of(response: httpx.Response) -> list[str]:
    return [line.removeprefix("data: ") for line in response.text.splitlines() if line]


async def test_streams_in_flight_complete_and_new_requests_are_rejected(scene: Scene) -> None:
    async with served(scene, LONG_S) as one:
        streaming, whole = one.start_request(), one.start_request(stream=False)
        requests = [await scene.next_request() for _ in range(2)]
        scene.ingress.drain.begin()
        for path in ("/ready", "/health", "/v1/models"):
            refused = await one.client.get(path)
            assert (refused.status_code, refused.json()["error"]) == (503, SHUTTING_DOWN)
            assert refused.headers["connection"] == "close"
            assert int(refused.headers["retry-after"]) >= 1
        refused = await one.start_request()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert (await one.client.get("/live")).status_code == 200
        for request in requests:
            scene.emit_text(request.request_id, " good")
            scene.end(request.request_id)
        assert data_of(await streaming)[-1] == "[DONE]"
        assert (await whole).json()["choices"][0]["text"] == " good"
        await one.serving
    assert scene.requests(RequestCancelled) == []


async def test_requests_in_flight_at_the_end_of_the_drain_fail_and_are_cancelled(scene: Scene) -> None:
    async with served(scene, 0.0) as one:
        streaming, whole = one.start_request(), one.start_request(stream=False)
        embedding = asyncio.create_task(one.client.post("/v1/embeddings", json={"model": NAME, "input": "hi"}))
        requests = [await scene.next_request() for _ in range(3)]
        first = next(request for request in requests if request.sampling.max_tokens == 9)
        scene.emit_text(first.request_id, " good")
        scene.ingress.drain.begin()
        responses = [await streaming, await whole, await embedding]
        await one.serving
    cut = [response for response in responses if response.status_code == 200]
    assert {json.loads(data_of(response)[-1])["error"]["code"] for response in cut} <= {"shutting_down"}
    others = [response for response in responses if response.status_code != 200]
    assert {(response.status_code, response.json()["error"]["code"]) for response in others} == {(503, "shutting_down")}
    cancelled = {event.request_id: event.reason for event in scene.requests(RequestCancelled)}
    assert cancelled == {request.request_id: "the server is shutting down" for request in requests}


async def test_an_interrupted_stream_ends_with_an_error_event(scene: Scene) -> None:
    async def begin() -> str:
        request = await scene.next_request()
        scene.emit_text(request.request_id, " good")
        return request.request_id

    async with served(scene, LONG_S) as one:
        beginning = asyncio.create_task(begin())
        async with one.client.stream("POST", "/v1/completions", json=STREAM) as response:
            request_id = await beginning
            lines = response.aiter_lines()
            assert json.loads((await anext(lines)).removeprefix("data: "))["choices"][0]["text"] == " good"
            scene.ingress.drain.begin()
            scene.ingress.drain.hurry()
            rest = [line.removeprefix("data: ") async for line in lines if line]
        assert [json.loads(line) for line in rest] == [{"error": SHUTTING_DOWN}]
        await one.serving
    assert [event.request_id for event in scene.requests(RequestCancelled)] == [request_id]


async def test_a_second_signal_ends_streams_at_once_with_an_error(scene: Scene) -> None:
    async with served(scene, LONG_S) as one:
        streaming = one.start_request()
        await scene.next_request()
        scene.ingress.drain.begin()
        one.serving.cancel()
        assert (await streaming).json()["error"] == SHUTTING_DOWN
        with pytest.raises(asyncio.CancelledError):
            await one.serving


@pytest.mark.timeout(25)  # less than the 30 s after which an ingress ends a request by itself
async def test_a_stalled_client_does_not_delay_the_shutdown(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("forebay.ingress.http.drain.CLOSE_S", 0.01)
    async with served(scene, 0.0) as one:
        streaming = one.start_request()
        request = await scene.next_request()
        monkeypatch.setattr(scene.ingress.replies, "interrupt_all", lambda _: None)
        scene.ingress.drain.begin()
        await one.serving
        with contextlib.suppress(httpx.TransportError):
            await streaming
    assert "Traceback" not in caplog.text
    assert [event.request_id for event in scene.requests(RequestCancelled)] == [request.request_id]


async def test_an_idle_ingress_ends_at_once(scene: Scene) -> None:
    async with served(scene, LONG_S) as one:
        assert (await one.client.get("/ready")).status_code == 200  # and keeps its connection
        scene.ingress.drain.begin()
        await one.serving


async def test_a_request_that_is_still_arriving_at_the_end_of_the_drain_gets_503(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing interrupts a request without a response on the log, so uvicorn cancels it."""
    monkeypatch.setattr("forebay.ingress.http.drain.CLOSE_S", 0.01)

    async with served(scene, 0.0) as one:
        reader, writer = await asyncio.open_connection(one.client.base_url.host, one.client.base_url.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        writer.write(b"content-type: application/json\r\ncontent-length: 9\r\n\r\n{")
        await until(lambda: scene.ingress.drain.in_flight == 1)
        scene.ingress.drain.begin()
        await one.serving
        head, body = (await reader.read()).split(b"\r\n\r\n")
        writer.close()
    assert head.startswith(b"HTTP/1.1 503")
    assert json.loads(body)["error"]["type"] == "server_error"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
