"""Limits of connections, headers and bodies over TCP."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from forebay.ingress.http.protocol import HEAD_BYTES_MAX, HEADERS_MAX, PIPELINED_MAX
from tests.ingress.conftest import BODY_MAX, NAME, Scene, make_scene
from tests.system import PATIENCE_S

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
LIVE = b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n"
BEGUN = (
    b"GET /live HTTP/1.1\r\nHost: x\r\nA: ",
    b"\r\n",
    HEAD + b"Content-Length: 1000\r\n\r\n{",
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n",
)
SLOW = 15  # connections of each of them
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
async def test_headers_above_a_limit_get_431(scene: Scene, head: bytes) -> None:
    async with scene.served() as (port, _):
        assert code_of(await send(port, head)) == (431, "headers_too_large")
    assert scene.metric('forebay_ingress_refused_total{code="headers_too_large"}')


async def test_headers_up_to_the_limits_are_served(scene: Scene) -> None:
    half = b"A: " + b"a" * (HEAD_BYTES_MAX // 2) + b"\r\n"
    async with scene.served() as (port, _):
        many = b"GET /live HTTP/1.1\r\nHost: x\r\n" + b"A: b\r\n" * (HEADERS_MAX - 1) + b"\r\n"
        large = b"GET /live HTTP/1.1\r\nHost: x\r\n" + half + b"\r\n"
        async with connected(port) as (reader, writer):
            for _ in range(3):  # counted anew for each request of a connection
                for head in (many, large):
                    writer.write(head)
                    assert (await reply_of(reader))[0] == 200


async def test_headers_sent_in_small_pieces_are_counted_together(scene: Scene) -> None:
    async with scene.served() as (port, _), connected(port) as (reader, writer):
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
        await until_open(server, 2)
        assert code_of(await send(port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n")) == (
            503,
            "connections_exhausted",
        )
        for path in (b"live", b"ready", b"metrics"):
            assert (await send(port, b"GET /" + path + b" HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"))[0] == 200
    async with scene.served(connections_max=2) as (port, _):
        assert (await send(port, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"))[0] == 200


async def until_open(server: object, count: int) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while len(server.server_state.connections) < count:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0.001)


async def test_requests_sent_ahead_of_their_responses_are_bounded(scene: Scene) -> None:
    raw = json.dumps({"model": NAME, "prompt": "x"}).encode()
    request = HEAD + f"Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    async with scene.served() as (port, _), connected(port) as (reader, writer):
        writer.write(request + LIVE * (PIPELINED_MAX + 1))
        assert await reader.read() == b""  # the first is not answered yet, so nothing else may be said
    assert scene.metric('forebay_ingress_refused_total{code="too_many_pipelined"}')


async def test_a_declared_length_above_the_limit_is_rejected_before_the_body(scene: Scene) -> None:
    async with scene.served() as (port, _):
        for path in (b"/v1/completions", b"/v1/chat/completions", b"/v1/embeddings", b"/v1/route"):
            head = HEAD.replace(b"/v1/completions", path) + b"Content-Length: 40000000\r\n\r\n"
            reply = await send(port, head)
            assert code_of(reply) == (413, "body_too_large"), path
            assert "--body-bytes-max" in json.loads(reply[2])["error"]["message"]


async def test_a_chunked_body_is_rejected_at_the_limit(scene: Scene) -> None:
    async with scene.served() as (port, _), connected(port) as (reader, writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(BODY_MAX // 10_000 + 1):
            writer.write(b"2710\r\n" + b"x" * 10_000 + b"\r\n")
        assert code_of(await reply_of(reader)) == (413, "body_too_large")


@pytest.mark.parametrize(
    "raw", [b"GARBAGE\r\n\r\n", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/9.9\r\n\r\n", b"{}\r\n\r\n"]
)
async def test_invalid_http_gets_400_in_the_error_format(scene: Scene, raw: bytes) -> None:
    async with scene.served() as (port, _):
        assert code_of(await send(port, raw)) == (400, "invalid_http")
    assert scene.metric('forebay_ingress_refused_total{code="invalid_http"} 1.0')
