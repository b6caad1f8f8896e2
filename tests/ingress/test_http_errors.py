"""Every error of an ingress has OpenAI's format and the right status, also outside of routes."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import httpx
import pytest

from forebay.events.control import PoolConfigured, RouterConfig
from forebay.ingress.parsers.composer import Composer
from forebay.transport.base import LogError
from forebay.transport.sqlite.log import SqliteLog
from tests.ingress.conftest import ADMIN_TOKEN, HEADERS, NAME, Scene, make_scene
from tests.system import until

TEXT = "/v1/completions"
TTFT = f'dynamo_frontend_time_to_first_token_seconds_count{{model="{NAME}"}}'
BODY = {"model": NAME, "prompt": "hello", "max_tokens": 8}
NESTED = b'{"model": "test-model", "prompt": "x", "metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
ROUTES = [
    ("POST", "/v1/chat/completions", {"model": NAME, "messages": [{"role": "user", "content": "hi"}]}),
    ("POST", "/v1/completions", BODY),
    ("POST", "/v1/completions", {**BODY, "stream": True}),
    ("POST", "/v1/embeddings", {"model": NAME, "input": ["a", "b"]}),
    ("POST", "/v1/route", BODY),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/other", None),
    ("POST", "/v1/completions", {**BODY, "model": "other"}),
    ("POST", "/v1/commands", {"action": "pause"}),
    ("GET", "/v1/loras", None),
    ("DELETE", "/v1/loras/one", None),
    ("POST", "/busy_threshold", {"model": NAME, "active_prefill_tokens_threshold": 5}),
    ("GET", "/busy_threshold", None),
    ("POST", "/disaggregation", {"model": NAME, "enforce": True}),
    ("GET", "/disaggregation", None),
    ("POST", "/v1/pools/drain", {"model": NAME, "pool": "default"}),
    ("GET", "/v1/pools", None),
]


@pytest.fixture(scope="module")
def admin_token() -> str:
    return ADMIN_TOKEN


class FailingLog:
    """A log whose operations raise once `failed` is set."""

    OPERATIONS = frozenset({"append", "append_soon", "read", "begin", "end"})

    def __init__(self, log: SqliteLog) -> None:
        self._log = log
        self.failed = False

    def __getattr__(self, name: str) -> Any:
        return self._fail if self.failed and name in self.OPERATIONS else getattr(self._log, name)

    def _fail(self, *_: Any, **__: Any) -> NoReturn:
        raise LogError("the broker is gone")


@asynccontextmanager
async def client_of(scene: Scene) -> AsyncIterator[tuple[httpx.AsyncClient, Any]]:
    async with (
        scene.served() as (port, server),
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", headers=HEADERS) as client,
    ):
        yield client, server


def error_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error of a response in OpenAI's format."""
    assert response.headers["content-type"] == "application/json", response.text
    error: dict[str, Any] = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == ("server_error" if response.status_code >= 500 else "invalid_request_error")
    assert ("retry-after" in response.headers) == (response.status_code == 503)
    return error


def last_error(text: str) -> dict[str, Any]:
    """Return the error at the end of a stream."""
    event = text.rstrip("\n").split("\n\n")[-1]
    error: dict[str, Any] = json.loads(event.removeprefix("data: "))["error"]
    return error


@pytest.mark.parametrize(("method", "path", "body"), ROUTES)
async def test_a_failed_log_is_503_on_every_route(method: str, path: str, body: Any) -> None:
    logs: list[FailingLog] = []

    def wrap(log: SqliteLog) -> FailingLog:
        logs.append(FailingLog(log))
        return logs[0]

    async with (
        make_scene(admin_token=ADMIN_TOKEN, wrap=wrap, block_size=None) as scene,
        client_of(scene) as (client, _),
    ):
        scene.control(PoolConfigured(pool="default", model=NAME, block_size=4, router=RouterConfig(), role="decode"))
        logs[0].failed = True
        response = await client.request(method, path, json=body)
        assert response.status_code == 503, response.text
        assert error_of(response)["code"] == "log_unavailable"
        assert "the broker is gone" in error_of(response)["message"]


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_cancelled_by_the_shutdown_get_503(scene: Scene, *, stream: bool) -> None:
    """Uvicorn cancels requests at the end of its grace period, and so does a closing event loop."""
    async with client_of(scene) as (client, server):
        pending = asyncio.create_task(client.post(TEXT, json={**BODY, "stream": stream}))
        await scene.next_request()
        for task in server.server_state.tasks:
            task.cancel()
        response = await pending
        assert response.status_code == 503
        assert error_of(response)["code"] == "server_stopping"
    assert scene.metric('forebay_ingress_refused_total{code="server_stopping"} 1.0')
    await scene.cancelled()


async def test_a_cancelled_stream_ends_with_an_error_event(scene: Scene) -> None:
    async with client_of(scene) as (client, server):
        pending = asyncio.create_task(client.post(TEXT, json={**BODY, "stream": True}))
        request = await scene.next_request()
        scene.emit_text(request.request_id, " one")
        await until(lambda: scene.metric(f"{TTFT} 1.0"))
        for task in server.server_state.tasks:
            task.cancel()
        response = await pending
        assert response.status_code == 200
        assert last_error(response.text)["code"] == "server_stopping"


@pytest.mark.parametrize("stream", [False, True])
async def test_an_exception_within_a_response_is_an_error_event(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, stream: bool
) -> None:
    def broken(*_: Any) -> NoReturn:
        raise ZeroDivisionError

    async with client_of(scene) as (client, _):
        pending = asyncio.create_task(client.post(TEXT, json={**BODY, "stream": stream}))
        request = await scene.next_request()
        first = scene.emit_text(request.request_id, " one")
        if stream:
            await until(lambda: scene.metric(f"{TTFT} 1.0"))
        monkeypatch.setattr(Composer, "finish", broken)
        scene.end(request.request_id, output=first)
        response = await pending
        if stream:
            assert response.status_code == 200
            assert last_error(response.text)["code"] == "internal_error"
        else:
            assert response.status_code == 500
            assert error_of(response)["code"] == "internal_error"


@pytest.mark.parametrize(
    ("method", "path", "content", "status", "code"),
    [
        ("GET", "/nothing", b"", 404, "not_found"),
        ("GET", "/%ff%00", b"", 404, "not_found"),
        ("PUT", TEXT, b"{}", 405, "method_not_allowed"),
        ("OPTIONS", TEXT, b"", 405, "method_not_allowed"),
        ("POST", "/live", b"", 405, "method_not_allowed"),
        ("POST", TEXT, b"{", 400, "invalid_json"),
        ("POST", TEXT, b"\xff\xfe", 400, "invalid_json"),
        ("POST", TEXT, b'{"model": "\\ud800", "prompt": "x"}', 400, "invalid_json"),
        ("POST", TEXT, NESTED, 400, "invalid_json"),
        ("POST", "/v1/route", NESTED, 400, "invalid_json"),
        ("POST", "/v1/route", b"[" * 100_000, 400, "invalid_json"),
        ("POST", "/v1/commands", b"[" * 100_000, 400, "invalid_json"),
        ("POST", "/v1/embeddings", b"[" * 100_000, 400, "invalid_json"),
    ],
)
async def test_every_error_has_the_same_format(
    scene: Scene, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    async with client_of(scene) as (client, _):
        response = await client.request(method, path, content=content)
        assert response.status_code == status
        assert error_of(response)["code"] == code


async def test_a_failed_head_request_has_no_body(scene: Scene) -> None:
    async with client_of(scene) as (client, _):
        response = await client.head(TEXT)
        assert (response.status_code, response.content) == (405, b"")
        assert response.headers["content-type"] == "application/json"
        assert (await client.get("/live")).status_code == 200  # the connection is in order


async def test_a_disconnect_within_the_body_is_counted(scene: Scene) -> None:
    async with scene.served() as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
        writer.write(head + b"\r\n{")
        await writer.drain()
        writer.close()
        await until(lambda: scene.metric('forebay_ingress_refused_total{code="client_disconnected"} 1.0'))
