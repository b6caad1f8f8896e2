"""HTTP over TCP: errors in one format, and limits of connections, headers and bodies."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import httpx
import pytest
import pytest_asyncio
from starlette.routing import Route

from forebay.events.control import PoolConfigured, RouterConfig
from forebay.ingress.http.protocol import HEAD_BYTES_MAX, HEADERS_MAX, PIPELINED_MAX
from forebay.ingress.parsers.composer import Composer
from forebay.transport.base import LogError
from tests.ingress.conftest import (
    ADMIN_TOKEN,
    BODY_MAX,
    CHAT,
    EMBED,
    HEADERS,
    MODULE_LOOP,
    NAME,
    ROUTE,
    TEXT,
    Scene,
    chat,
    make_scene,
    text,
)
from tests.system import PATIENCE_S, until

TTFT = f'dynamo_frontend_time_to_first_token_seconds_count{{model="{NAME}"}}'
BODY = text(prompt="hello", max_tokens=8)
NESTED = b'{"model": "test-model", "prompt": "x", "metadata": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
ROUTES = [
    ("POST", CHAT, chat()),
    ("POST", TEXT, BODY),
    ("POST", TEXT, {**BODY, "stream": True}),
    ("POST", EMBED, {"model": NAME, "input": ["a", "b"]}),
    ("POST", ROUTE, BODY),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/other", None),
    ("POST", TEXT, {**BODY, "model": "other"}),
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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def over_tcp(shared_scene: Scene) -> AsyncIterator[httpx.AsyncClient]:
    async with shared_scene.http_client(**HEADERS) as (client, _):
        yield client


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def port(over_tcp: httpx.AsyncClient) -> int:
    assert over_tcp.base_url.port is not None
    return over_tcp.base_url.port


@pytest.fixture(scope="module")
def admin_token() -> str:
    return ADMIN_TOKEN


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
async def test_a_failed_log_is_503_on_every_route(
    monkeypatch: pytest.MonkeyPatch, method: str, path: str, body: Any
) -> None:
    def fail(*_: Any, **__: Any) -> NoReturn:
        raise LogError("the broker is gone")

    async with make_scene(admin_token=ADMIN_TOKEN, block_size=None) as scene:
        scene.control(PoolConfigured(pool="default", model=NAME, block_size=4, router=RouterConfig(), role="decode"))
        for operation in ("append", "append_soon", "read", "begin", "end"):
            monkeypatch.setattr(scene.log, operation, fail)
        response = await scene.client.request(method, path, json=body)
        assert response.status_code == 503, response.text
        assert error_of(response)["code"] == "log_unavailable"
        assert "the broker is gone" in error_of(response)["message"]
        monkeypatch.undo()


@pytest.mark.parametrize("stream", [False, True])
async def test_requests_cancelled_by_the_shutdown_get_503(scene: Scene, *, stream: bool) -> None:
    """Uvicorn cancels requests at the end of its grace period, and so does a closing event loop."""
    async with scene.http_client(**HEADERS) as (client, server):
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
    async with scene.http_client(**HEADERS) as (client, server):
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

    async with scene.http_client(**HEADERS) as (client, _):
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
        ("POST", TEXT, b'{"model": "\\ud800", "prompt": "x"}', 400, "invalid_json"),
        ("POST", TEXT, NESTED, 400, "invalid_json"),
        ("POST", "/v1/route", NESTED, 400, "invalid_json"),
        ("POST", "/v1/commands", b"[" * 100_000, 400, "invalid_json"),
        ("POST", "/v1/embeddings", b"[" * 100_000, 400, "invalid_json"),
    ],
)
@MODULE_LOOP
async def test_every_error_has_the_same_format(
    over_tcp: httpx.AsyncClient, method: str, path: str, content: bytes, status: int, code: str
) -> None:
    response = await over_tcp.request(method, path, content=content)
    assert response.status_code == status
    assert error_of(response)["code"] == code


async def test_every_get_route_serves_head(scene: Scene) -> None:
    paths = {route.path for route in scene.app.routes if isinstance(route, Route) and "GET" in (route.methods or ())}
    assert len(paths) > 12
    async with scene.http_client(**HEADERS) as (client, _):
        for path in sorted(paths - {"/v1/loras"}):
            name = path.replace("{name}", "start.js").replace("{name:path}", NAME).replace("{request_id:path}", "r")
            got, head = await client.get(name), await client.head(name)
            assert (head.status_code, head.content) == (got.status_code, b""), path
            for header in ("content-type", *(() if path == "/metrics" else ("content-length",))):
                assert head.headers[header] == got.headers[header], path
        failed = await client.head(TEXT)
        assert (failed.status_code, failed.content, failed.headers["allow"]) == (405, b"", "POST")
        assert (await client.post("/live", json={})).headers["allow"] == "GET, HEAD"


async def test_a_disconnect_within_the_body_is_counted(scene: Scene) -> None:
    async with scene.served() as (port, _):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 100\r\n"
        writer.write(head + b"\r\n{")
        await writer.drain()
        writer.close()
        await until(lambda: scene.metric('forebay_ingress_refused_total{code="client_disconnected"} 1.0'))


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LIVE, MODELS = (b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n" for path in (b"/live", b"/v1/models"))
BEGUN = (
    b"GET /live HTTP/1.1\r\nHost: x\r\nA: ",
    b"\r\n",
    HEAD + b"Content-Length: 1000\r\n\r\n{",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
)
SLOW = 5  # connections of each of them
SHORT_S = 1.0
Reply = tuple[int, dict[str, str], bytes]


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        try:
            yield reader, writer
        finally:
            writer.close()


async def reply_of(reader: asyncio.StreamReader) -> Reply:
    head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in head[1:] if line)
    body = await reader.readexactly(int(headers["content-length"]))
    return int(head[0].split()[1]), headers, body


async def send(port: int, *pieces: bytes) -> Reply:
    async with connected(port) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
        return await reply_of(reader)


def code_of(reply: Reply) -> tuple[int, str]:
    """Return status and code of an error in OpenAI's format."""
    status, headers, body = reply
    assert headers["content-type"] == "application/json"
    error = json.loads(body)["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert ("retry-after" in headers) == (status == 503)
    return status, error["code"]


@pytest.mark.parametrize(
    "head",
    [
        pytest.param(b"GET /live HTTP/1.1\r\nHost: x\r\nA: " + b"a" * (1 << 20), id="one header without an end"),
        pytest.param(b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"A: " + b"a" * (1 << 20) + b"\r\n\r\n", id="one header"),
        pytest.param(b"GET /live HTTP/1.1\r\n" + b"A: b\r\n" * 100_000 + b"\r\n", id="100,000 headers"),
        pytest.param(b"GET /live HTTP/1.1\r\n" + b"A: b\r\n" * (HEADERS_MAX + 1) + b"\r\n", id="a header too many"),
        pytest.param(b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\nHost: x\r\n\r\n", id="path"),
        pytest.param(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\n" + b"A: b\r\n" * 100_000 + b"\r\n", id="trailers"
        ),
        pytest.param(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n0\r\nA: " + b"a" * (1 << 20), id="an endless trailer"
        ),
        pytest.param(
            HEAD + b"Transfer-Encoding: chunked\r\n\r\n1;" + b"a" * (1 << 20), id="an endless chunk extension"
        ),
    ],
)
@MODULE_LOOP
async def test_headers_above_a_limit_get_431(shared_scene: Scene, port: int, head: bytes) -> None:
    assert code_of(await send(port, head)) == (431, "headers_too_large")
    assert shared_scene.metric('forebay_ingress_refused_total{code="headers_too_large"}')


@MODULE_LOOP
async def test_headers_up_to_the_limits_are_served(port: int) -> None:
    half = b"A: " + b"a" * (HEAD_BYTES_MAX // 2) + b"\r\n"
    many = b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * (HEADERS_MAX - 1) + b"\r\n"
    large = b"GET /live HTTP/1.1\r\nHost: x\r\n" + half + b"\r\n"
    async with connected(port) as (reader, writer):
        for head in (many, large) * 3:  # counted anew for each request of a connection
            writer.write(head)
            assert (await reply_of(reader))[0] == 200


@MODULE_LOOP
async def test_headers_sent_in_small_pieces_are_counted_together(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"A" * 1_000 + b": ")
        for _ in range(HEAD_BYTES_MAX // 1_000 + 20):
            writer.write(b"a" * 1_000)
            await asyncio.sleep(0)
        assert code_of(await reply_of(reader)) == (431, "headers_too_large")


@pytest.mark.parametrize("drips", [False, True])
async def test_slow_requests_time_out_and_idle_connections_stay_open(scene: Scene, *, drips: bool) -> None:
    async def slow(port: int, begun: bytes) -> tuple[int, str]:
        async with connected(port) as (reader, writer):
            writer.write(LIVE)
            assert (await reply_of(reader))[0] == 200
            writer.write(begun)
            response = asyncio.create_task(reply_of(reader))
            while not response.done():
                if drips:
                    writer.write(b"\r\n" if begun == b"\r\n" else b"1")
                await asyncio.wait([response], timeout=SHORT_S / 4)
            return code_of(await response)

    async with scene.served(head_s=SHORT_S, body_s=SHORT_S) as (port, _), connected(port) as (reader, writer):
        writer.write(LIVE)
        assert (await reply_of(reader))[0] == 200
        codes = await asyncio.gather(*(slow(port, begun) for begun in BEGUN for _ in range(SLOW)))
        assert set(codes[:-SLOW]) == {(408, "request_timeout")}
        # A dripped chunk size grows until it is invalid, which may be sooner than the timeout.
        assert set(codes[-SLOW:]) <= {(408, "request_timeout"), *([(400, "invalid_http")] if drips else [])}
        writer.write(LIVE)  # idle for longer than any of them
        assert (await reply_of(reader))[0] == 200


async def test_a_connection_without_a_request_is_closed(scene: Scene) -> None:
    async with scene.served(head_s=SHORT_S) as (port, _), connected(port) as (reader, _):
        assert await reader.read() == b""


async def test_the_rest_of_a_rejected_body_is_discarded_for_a_limited_time(scene: Scene) -> None:
    async with scene.served(linger_s=SHORT_S) as (port, _), connected(port) as (reader, writer):
        writer.write(HEAD + b"Content-Length: 40000000\r\n\r\n{")
        assert code_of(await reply_of(reader)) == (413, "body_too_large")
        assert await reader.read() == b""


@pytest.mark.slow
async def test_the_timeout_of_a_body_grows_with_its_size() -> None:
    raw = json.dumps({"model": NAME, "prompt": "x", "metadata": {"a": "x" * (3 << 20)}}).encode()
    async with (
        make_scene(body_bytes_max=4 << 20) as scene,
        scene.served(body_s=SHORT_S) as (port, _),
        connected(port) as (_, writer),
    ):
        writer.write(HEAD + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw[:-1])
        await writer.drain()
        await asyncio.sleep(SHORT_S * 2)  # longer than an empty body may take; this one has 24 s
        writer.write(raw[-1:])
        await scene.next_request()


async def test_connections_above_the_limit_get_503_and_probes_are_served(scene: Scene) -> None:
    async with scene.served(connections_max=2) as (port, server), connected(port), connected(port):
        await until(lambda: len(server.server_state.connections) == 2)
        assert code_of(await send(port, MODELS)) == (503, "connections_exhausted")
        for path in (b"live", b"ready", b"metrics"):
            assert (await send(port, b"GET /" + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[0] == 200
    async with scene.served(connections_max=2) as (port, _):
        assert (await send(port, MODELS))[0] == 200


async def test_requests_sent_ahead_of_their_responses_are_bounded(scene: Scene) -> None:
    raw = json.dumps({"model": NAME, "prompt": "x"}).encode()
    request = HEAD + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    async with scene.served() as (port, _), connected(port) as (reader, writer):
        writer.write(request + LIVE * (PIPELINED_MAX + 1))
        assert await reader.read() == b""  # the first is not answered yet, so nothing else may be said
    assert scene.metric('forebay_ingress_refused_total{code="too_many_pipelined"}')


@MODULE_LOOP
async def test_a_declared_length_above_the_limit_is_rejected_before_the_body(port: int) -> None:
    for path in (TEXT, CHAT, EMBED, ROUTE):
        reply = await send(port, HEAD.replace(TEXT.encode(), path.encode()) + b"Content-Length: 40000000\r\n\r\n")
        assert code_of(reply) == (413, "body_too_large"), path
        assert "--body-bytes-max" in json.loads(reply[2])["error"]["message"]


@MODULE_LOOP
async def test_a_chunked_body_is_rejected_at_the_limit(port: int) -> None:
    async with connected(port) as (reader, writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(BODY_MAX // 10_000 + 1):
            writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert code_of(await reply_of(reader)) == (413, "body_too_large")


@pytest.mark.parametrize(
    "raw", [b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"{}\r\n\r\n"]
)
@MODULE_LOOP
async def test_invalid_http_gets_400_in_the_error_format(shared_scene: Scene, port: int, raw: bytes) -> None:
    before = shared_scene.refusals()
    assert code_of(await send(port, raw)) == (400, "invalid_http")
    assert shared_scene.refusals() - before == {"invalid_http": 1}
