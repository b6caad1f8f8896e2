"""Framing of requests: the server finds the same requests in the bytes of a connection as RFC 9112 does."""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send

from forebay.ingress.http.server import build_server, listen
from tests.depth import sampled
from tests.system import PATIENCE_S, until

pytestmark = pytest.mark.asyncio(loop_scope="module")

POST = b"POST /p HTTP/1.1\r\nHost: x\r\n"
POST_10 = b"POST /p HTTP/1.0\r\nHost: x\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
LAST = b"GET /last HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
INNER = b"GET /inner HTTP/1.1\r\nHost: x\r\n\r\n"  # a request, if it is not part of a body
UPGRADE = b"Connection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAMAAABkAAQCAAAAAAIAAAAA\r\nUpgrade: "
UPGRADES = [
    UPGRADE + b"h2c\r\n",
    UPGRADE + b"websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n",
    UPGRADE + b"TLS/1.0, HTTP/2.0\r\n",
    UPGRADE + b"\r\n",
    b"upgrade:h2c\r\nCONNECTION:upgrade\r\n",
    b"Upgrade: h2c\r\nProxy-Connection: upgrade\r\n",
    b"Connection: keep-alive\r\nConnection: upgrade \r\nUpgrade: a\r\nUpgrade: b\r\n",
    b"Upgrade: h2c\r\n",
    b"Connection: upgrade\r\n",
]
Served = tuple[str, str, bytes]  # method, path and body of a request, as the application receives them
LAST_SERVED: Served = ("GET", "/last", b"")


async def respond(scope: Scope, receive: Receive, send: Send) -> None:
    """Send method, path, headers and body of the request. The body of the path /stream has no Content-Length."""
    body, has_more = b"", True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        body += message["body"]
        has_more = message["more_body"]
    path = (scope["raw_path"] + b"?" * bool(scope["query_string"]) + scope["query_string"]).decode()
    headers = [(name.decode(), value.decode()) for name, value in scope["headers"]]
    found = json.dumps([scope["method"], path, body.decode("latin-1"), headers]).encode()
    is_stream = scope["path"] == "/stream"
    length = [] if is_stream else [(b"content-length", b"%d" % len(found))]
    await send({"type": "http.response.start", "status": 200, "headers": length})
    parts = [found[:9], found[9:], b""] if is_stream else [found]
    for number, part in enumerate(parts, 1):
        await send({"type": "http.response.body", "body": part, "more_body": number < len(parts)})


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def port() -> AsyncIterator[int]:
    with listen("127.0.0.1", 0) as listener:
        server = build_server(respond)
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started)
        yield listener.getsockname()[1]
        server.should_exit = True
        await serving


async def exchange(port: int, segments: Iterable[bytes]) -> bytes:
    """Send these segments on a new connection, and return all bytes that the server sends until it closes it."""
    async with asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        reading = asyncio.create_task(read_all(reader))
        for segment in segments:
            writer.write(segment)
            for _ in range(2):  # the server runs in the same loop, so it can read each segment alone
                await asyncio.sleep(0)
        try:
            return await reading
        finally:
            writer.close()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Return all bytes until the server closes the connection, also if it has not read everything before."""
    found = b""
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(1 << 16):
            found += part
    return found


def responses(raw: bytes) -> list[tuple[int, Any]]:
    """Return status and decoded JSON of each response."""
    found = []
    while raw:
        head, raw = raw.split(b"\r\n\r\n", 1)
        status, *headers = head.split(b"\r\n")
        length = int(dict(line.split(b": ") for line in headers)[b"content-length"])
        found.append((int(status.split()[1]), json.loads(raw[:length])))
        raw = raw[length:]
    return found


def served(raw: bytes) -> list[Served | int]:
    """Return each request that was served, or the status of an error."""
    return [
        (body[0], body[1], body[2].encode("latin-1")) if status == 200 else status for status, body in responses(raw)
    ]


def chunks(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"


def sized(body: bytes, head: bytes = POST) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


VALID: dict[str, tuple[bytes, list[Served]]] = {
    "no body": (POST + b"\r\n", [("POST", "/p", b"")]),
    "Content-Length": (sized(INNER), [("POST", "/p", INNER)]),
    "zero": (sized(b""), [("POST", "/p", b"")]),
    "leading zeros": (POST + b"Content-Length: 0003\r\n\r\nabc", [("POST", "/p", b"abc")]),
    "optional white space": (POST + b"Content-Length:\t 3 \t\r\n\r\nabc", [("POST", "/p", b"abc")]),
    "no white space": (POST + b"Content-Length:3\r\n\r\nabc", [("POST", "/p", b"abc")]),
    "empty values": (POST + b"A:\r\nB: \r\nContent-Length: 3\r\nC:\r\n\r\nabc", [("POST", "/p", b"abc")]),
    "body of GET": (b"GET /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", [("GET", "/p", b"abc")]),
    "empty lines before": (b"\r\n\r\n" + sized(b"abc"), [("POST", "/p", b"abc")]),
    "chunked": (CHUNKED + chunks(b"a", INNER), [("POST", "/p", b"a" + INNER)]),
    "Chunked": (POST + b"TRANSFER-ENCODING: Chunked\r\n\r\n" + chunks(b"abc"), [("POST", "/p", b"abc")]),
    "no chunk": (CHUNKED + chunks(), [("POST", "/p", b"")]),
    "chunk size with zeros": (CHUNKED + b"003\r\nabc\r\n000\r\n\r\n", [("POST", "/p", b"abc")]),
    "chunk extension": (CHUNKED + b'3;a=b;c;d="e;f"\r\nabc\r\n0;g\r\n\r\n', [("POST", "/p", b"abc")]),
    "trailer": (CHUNKED + b"3\r\nabc\r\n0\r\nA: b\r\n\r\n", [("POST", "/p", b"abc")]),
    "trailer that offers an upgrade": (
        CHUNKED + b"3\r\nabc\r\n0\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
        [("POST", "/p", b"abc")],
    ),
    "pipelined": (
        sized(b"a") + INNER + CHUNKED + chunks(b"b"),
        [("POST", "/p", b"a"), ("GET", "/inner", b""), ("POST", "/p", b"b")],
    ),
    "absolute URL": (b"GET http://a:1/p?q=1 HTTP/1.1\r\nHost: x\r\n\r\n", [("GET", "/p?q=1", b"")]),
    "absolute URL without a path": (b"GET http://a HTTP/1.1\r\nHost: x\r\n\r\n", [("GET", "/", b"")]),
    "asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n", [("OPTIONS", "*", b"")]),
}  # fmt: skip
for number, offer in enumerate(UPGRADES):
    VALID[f"upgrade {number}"] = (POST + offer + b"\r\n" + INNER, [("POST", "/p", b""), ("GET", "/inner", b"")])
    VALID[f"upgrade {number}, Content-Length"] = (sized(INNER, POST + offer), [("POST", "/p", INNER)])
    VALID[f"upgrade {number}, chunked"] = (
        POST + offer + b"Transfer-Encoding: chunked\r\nA:\r\n\r\n" + chunks(INNER, b"a"),
        [("POST", "/p", INNER + b"a")],
    )
    VALID[f"upgrade {number}, pipelined"] = (sized(b"a", POST + offer) * 3, [("POST", "/p", b"a")] * 3)

CLOSING: dict[str, tuple[bytes, list[Served]]] = {
    "Content-Length": (sized(b"abc", POST_10), [("POST", "/p", b"abc")]),
    "no Host": (b"GET /p HTTP/1.0\r\n\r\n", [("GET", "/p", b"")]),
    "keep-alive": (sized(b"abc", POST_10 + b"Connection: keep-alive\r\n"), [("POST", "/p", b"abc")]),
    "upgrade": (sized(b"abc", POST_10 + UPGRADES[0]), [("POST", "/p", b"abc")]),
    "upgrade before close": (
        sized(b"abc", POST + b"Connection: close, upgrade\r\nUpgrade: h2c\r\n"),
        [("POST", "/p", b"abc")],
    ),
    "close": (sized(b"abc", POST + b"Connection: close\r\n"), [("POST", "/p", b"abc")]),
    "Expect": (sized(b"abc", POST_10 + b"Expect: 100-continue\r\n"), [("POST", "/p", b"abc")]),
}

INVALID: dict[str, tuple[bytes, int]] = {
    **{
        f"Content-Length {value!r}": (POST + b"Content-Length: " + value + b"\r\n\r\nabc", 400)
        for value in (
            b"3\r\nContent-Length: 3", b"3\r\nContent-Length: 4", b"3, 3", b"3,4", b"+3", b"-3", b"0x3", b"1_0", b"1 2",
            b"", b"3;", b"3.0", b"18446744073709551619", b"\xb3", b"\x0b3", b"a",
        )
    },
    **{
        f"Transfer-Encoding {value!r}": (POST + b"Transfer-Encoding: " + value + b"\r\n\r\n" + chunks(b"abc"), status)
        for value, status in (
            (b"identity", 400), (b"gzip", 400), (b"xchunked", 400), (b"chunked, gzip", 400), (b"chunked,", 400),
            (b"chunked, chunked", 400), (b"chunked, identity", 400), (b"chunked\r\nTransfer-Encoding: chunked", 400),
            (b"chunked\r\nTransfer-Encoding: gzip", 400), (b"chunked;a=b", 400), (b'"chunked"', 400), (b"", 400),
            (b"\x0bchunked", 400), (b"chunked\x00", 400), (b"chun\r\n ked", 400), (b"\r\n chunked", 400),
            (b"identity, chunked", 501), (b"gzip, chunked", 501), (b", chunked", 501), (b"gzip,chunked", 501),
            (b"gzip\r\nTransfer-Encoding: chunked", 501), (b"a;b=c, chunked", 501),
        )
    },
    **{
        f"HTTP/1.0, Transfer-Encoding {value!r}": (POST_10 + b"Transfer-Encoding: " + value + b"\r\n\r\n" + body, 400)
        for value, body in (
            (b"chunked", chunks(b"abc")), (b"identity", b"abc"), (b"gzip, chunked", chunks(b"abc")),
            (b"chunked\r\nContent-Length: 3", chunks(b"abc")), (b"identity\r\nContent-Length: 3", b"abc"),
        )
    },
    **{
        f"chunk {body!r}": (CHUNKED + body, 400)
        for body in (
            b"3 \r\nabc\r\n0\r\n\r\n", b"3\nabc\r\n0\r\n\r\n", b"3\r\nabc\n0\r\n\r\n", b"3\r\nabc\r\n0\n\r\n",
            b"3\r\nabc\r\n0\r\n\n", b"3\r\nabcd\r\n0\r\n\r\n", b"3\r\nabc0\r\n\r\n", b"0x3\r\nabc\r\n0\r\n\r\n",
            b"+3\r\nabc\r\n0\r\n\r\n", b"-3\r\nabc\r\n0\r\n\r\n", b"\r\n3\r\nabc\r\n0\r\n\r\n", b"g\r\n",
            b"3;a\nabc\r\n0\r\n\r\n", b'3;a="\r\n"\r\nabc\r\n0\r\n\r\n', b"FFFFFFFFFFFFFFFFF\r\nabc", b"\r\n\r\n",
            b"3\r\nabc\r\n0\r\nA : b\r\n\r\n", b"3\r\nabc\r\n0\r\nContent-Length: 3\r\n\r\n",
            b"3\r\nabc\r\n0\r\nTransfer-Encoding: chunked\r\n\r\n", b"3\r\nabc\r\n0\r\nA: b\r\n c\r\n\r\n",
        )
    },
    "Content-Length before Transfer-Encoding": (
        POST + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"abc"), 400
    ),
    "Content-Length after Transfer-Encoding": (
        POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n" + chunks(b"abc"), 400
    ),
    "both and an upgrade": (
        POST + UPGRADES[0] + b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n" + chunks(b"abc"), 400
    ),
    "unknown coding and an upgrade": (
        POST + UPGRADES[0] + b"Transfer-Encoding: gzip, chunked\r\n\r\n" + chunks(b"abc"), 501
    ),
    **{
        f"header {line!r}": (POST + line + b"\r\n\r\nabc", 400)
        for line in (
            b"Content-Length : 3", b"Content-Length\t: 3", b" Content-Length: 3", b"A: b\r\n c", b"A: b\r\n\tc",
            b"A: b\x00", b"A: b\rContent-Length: 3", b"A: b\nContent-Length: 3", b"A\x01: b", b": b", b"A", b"A B: c",
            b"\xc3\xa4: b",
        )
    },
    "bare line feeds": (b"POST /p HTTP/1.1\nHost: x\nContent-Length: 3\n\nabc", 400),
    "bare line feed at the end": (POST + b"Content-Length: 3\r\n\nabc", 400),
    "white space before the first header": (b"POST /p HTTP/1.1\r\n Host: x\r\n\r\n", 400),
    "no Host": (b"GET /p HTTP/1.1\r\n\r\n", 400),
    "two Hosts": (b"GET /p HTTP/1.1\r\nHost: x\r\nHost: x\r\n\r\n", 400),
    "CONNECT": (b"CONNECT x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n", 501),
    "CONNECT with a path": (b"CONNECT /p HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 501),
    "authority": (b"GET x:443 HTTP/1.1\r\nHost: x:443\r\n\r\n", 400),
    "HTTP/0.9": (b"GET /p\r\n\r\n", 505),
    "HTTP/0.9 with headers": (b"POST /p HTTP/0.9\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 505),
    "HTTP/1.2": (b"GET /p HTTP/1.2\r\nHost: x\r\n\r\n", 400),
    "HTTP/2.0": (b"POST /p HTTP/2.0\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc", 505),
    "preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
    "TLS": (bytes.fromhex("16030100c8010000c40303"), 400),
    "space in the path": (b"GET /p q HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    "unknown method": (b"get /p HTTP/1.1\r\nHost: x\r\n\r\n", 400),
}  # fmt: skip


@pytest.mark.parametrize(("raw", "expected"), VALID.values(), ids=VALID)
async def test_requests_are_found_with_their_bodies(port: int, raw: bytes, expected: list[Served]) -> None:
    whole = raw + LAST
    for segments in ([whole], [raw, LAST], [whole[at : at + 1] for at in range(len(whole))]):
        assert served(await exchange(port, segments)) == [*expected, LAST_SERVED]


@pytest.mark.parametrize("name", ["upgrade 0, Content-Length", "upgrade 1, chunked", "pipelined"])
async def test_a_request_may_be_split_anywhere(port: int, name: str) -> None:
    raw, expected = VALID[name]
    for at in sampled(range(1, len(raw)), 50):
        assert served(await exchange(port, [raw[:at], raw[at:], LAST])) == [*expected, LAST_SERVED]


@pytest.mark.parametrize(("raw", "expected"), CLOSING.values(), ids=CLOSING)
async def test_nothing_is_served_after_the_last_request_of_a_connection(
    port: int, raw: bytes, expected: list[Served]
) -> None:
    for segments in ([raw + LAST], [raw, LAST], [raw[at : at + 1] for at in range(len(raw))]):
        assert served(await exchange(port, segments)) == expected


@pytest.mark.parametrize(("raw", "status"), INVALID.values(), ids=INVALID)
async def test_nothing_is_served_after_ambiguous_framing(port: int, raw: bytes, status: int) -> None:
    for segments in ([raw + LAST], [raw, LAST], [bytes([byte]) for byte in raw + LAST]):
        assert served(await exchange(port, segments)) == [status]
        after_another = served(await exchange(port, [sized(b"a"), *segments]))
        assert set(after_another) <= {("POST", "/p", b"a"), status}


async def test_a_response_to_http_1_0_has_no_chunks(port: int) -> None:
    head, body = (await exchange(port, [b"GET /stream HTTP/1.0\r\n\r\n"])).split(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    assert json.loads(body)[:2] == ["GET", "/stream"]
    assert await exchange(port, [b"HEAD /stream HTTP/1.0\r\n\r\n"]) == head + b"\r\n\r\n"


@pytest.mark.parametrize("expect", [b"Expect: 100-continue\r\n", b"Expect: 100-Continue \r\n"])
async def test_a_client_may_wait_before_it_sends_the_body(port: int, expect: bytes) -> None:
    for offer in (b"", *UPGRADES):
        head, body = sized(INNER, POST + offer + expect).split(b"\r\n\r\n", 1)
        async with asyncio.timeout(PATIENCE_S):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + b"\r\n\r\n")
            assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            writer.write(body + LAST)
            assert served(await reader.read()) == [("POST", "/p", INNER), LAST_SERVED]
            writer.close()


async def test_trailers_are_no_headers(port: int) -> None:
    raw = CHUNKED + b"3\r\nabc\r\n0\r\nAuthorization: Bearer x\r\nX-Request-Id: y\r\n\r\n" + LAST
    (_, first), _ = responses(await exchange(port, [raw]))
    assert first[3] == [["host", "x"], ["transfer-encoding", "chunked"]]


@pytest.mark.parametrize(
    ("url", "host"),
    [
        (b"http://A:1/p", "A:1"),
        (b"http://a/p", "a"),
        (b"http://[::1]:8/p", "[::1]:8"),
        (b"http://u@a/p", "a"),
        (b"/p", "x"),
    ],
)
async def test_the_host_of_an_absolute_url_replaces_the_header(port: int, url: bytes, host: str) -> None:
    (_, first), _ = responses(await exchange(port, [b"GET " + url + b" HTTP/1.1\r\nHost: x\r\n\r\n" + LAST]))
    assert [value for name, value in first[3] if name == "host"] == [host]


async def test_header_values_have_no_white_space_around(port: int) -> None:
    (_, first), _ = responses(await exchange(port, [POST + b"A: \t b c\t \r\n\r\n" + LAST]))
    assert first[3] == [["host", "x"], ["a", "b c"]]


BODIES = st.one_of(st.binary(max_size=40), st.sampled_from([INNER, LAST, b"0\r\n\r\n", b"\r\n\r\n" + INNER]))


@st.composite
def requests(draw: st.DrawFn) -> tuple[bytes, Served]:
    """Draw a valid request, and what the application must receive."""
    method = draw(st.sampled_from(["GET", "POST", "PUT", "DELETE", "PATCH", "OPTIONS"]))
    path = "/" + draw(st.text("abc/", max_size=5))
    body, framing = draw(BODIES), draw(st.sampled_from(["none", "length", "chunked"]))
    lines = [b"Host: x", *draw(st.lists(st.sampled_from([b"A: b", b"B:", b"Connection: keep-alive", b"Te: trailers"])))]
    offer = draw(st.sampled_from([b"", *UPGRADES]))
    lines += [line for line in offer.split(b"\r\n") if line]
    if framing == "none":
        body, sent = b"", b""
    elif framing == "length":
        lines.append(b"Content-Length: %d" % len(body))
        sent = body
    else:
        lines.append(b"Transfer-Encoding: chunked")
        at = draw(st.integers(0, len(body)))
        sent = chunks(*(part for part in (body[:at], body[at:]) if part))
        if draw(st.booleans()):
            sent = sent.removesuffix(b"\r\n") + b"Upgrade: h2c\r\nConnection: upgrade\r\n\r\n"
    lines = draw(st.permutations(lines))
    raw = b"\r\n".join([f"{method} {path} HTTP/1.1".encode(), *lines, b"", sent])
    return raw, (method, path, body)


def segments_of(raw: bytes, cuts: Sequence[int]) -> list[bytes]:
    places = sorted({cut % len(raw) for cut in cuts} | {0})
    return [raw[begin:end] for begin, end in zip(places, [*places[1:], len(raw)], strict=True)]


@given(st.lists(requests(), max_size=5), st.lists(st.integers(0, 1 << 16), max_size=8))
async def test_any_valid_requests_in_any_segments(
    port: int, drawn: list[tuple[bytes, Served]], cuts: list[int]
) -> None:
    raw = b"".join(request for request, _ in drawn) + LAST
    assert served(await exchange(port, segments_of(raw, cuts))) == [*(found for _, found in drawn), LAST_SERVED]
