"""uvicorn's HTTP/1.1 protocol with strict framing, limits on headers, time and connections, and OpenAI's error format.

A peer in front of this server must find the same requests in the bytes of a connection. Otherwise the body of one
request could be executed as another request. llhttp, the parser of httptools, rejects most ambiguous framings. This
module adds the rest of RFC 9112: it ignores offers to upgrade, at which httptools would skip the body. It accepts the
transfer coding `chunked` alone, and none with HTTP/1.0. It discards trailers, and requires one `Host`.

uvicorn has no option for limits when it parses with httptools. Each limit closes a way to hold memory or a connection
without sending a request. Connections above `connections_max` get 503.
"""

import asyncio
import resource
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, NoReturn, cast

import httptools
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from forebay.ingress.access_log import PROBES
from forebay.ingress.errors import ApiError

# Of the request line and headers, also while a header is incomplete.
HEAD_BYTES_MAX = 64 << 10  # Envoy's default is 60 KiB, nginx's 40 KiB; a trace context or token takes under 8 KiB
HEADERS_MAX = 100  # the limit of Apache, Envoy and gunicorn
STEP_BYTES = 16 << 10  # fed to the parser at a time, so that the limits are checked at least this often
PIPELINED_MAX = 16  # requests queued behind the current one; each holds its scope in memory
# Until the headers are complete, on a new connection or from the first byte of each later request. Between two requests
# uvicorn's keep-alive timeout applies.
HEAD_S = 20.0  # Apache's default; longer than an event loop or a network stalls
BODY_S = 20.0  # Apache's default as well; added to the time at the minimum rate
BODY_BYTES_PER_S = 128 << 10  # 1 Mbit/s: 4 MiB take up to 52 s, 48 MiB up to 404 s
LINGER_S = 5.0  # a client that is still sending can read the response; nginx waits as long
CONNECTIONS_MAX = 8_192  # about 20 kB each, and more than the requests that one process has in flight
FILES_RESERVED = 256  # file descriptors for the log, Kafka, Redis, workers and fetched media
REFUSED_MAX = 512  # connections above the limit that get a response; further connections are closed without one
HTTP = b"HTTP/"  # begin of a response
CHUNKED = b"chunked"
VERSIONS = ("1.0", "1.1")  # llhttp parses 0.9 and 2.0, too

OnRejected = Callable[[str], None]  # called with the error code


def _ignore(_: str) -> None: ...


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of the connections of one server.

    Attributes:
        head_s: maximum seconds until the headers of a request are complete.
        body_s: maximum seconds until its body is complete. Each `BODY_BYTES_PER_S` received bytes add 1 s.
        linger_s: maximum seconds to discard the rest of a body after the response was sent.
    """

    on_rejected: OnRejected = _ignore
    connections_max: int = CONNECTIONS_MAX
    head_s: float = HEAD_S
    body_s: float = BODY_S
    linger_s: float = LINGER_S


class _Phase(Enum):
    HEAD = "head"
    BODY = "body"
    IDLE = "idle"  # the request is complete, or none has begun


class _Violation(Exception):
    """The request exceeds a limit. Raised in a callback of the parser, which then raises an exception of its own."""


class BoundedProtocol(HttpToolsProtocol):
    """One HTTP connection with limits. Create a subclass with `bounded`, which sets the limits."""

    limits: ClassVar[ConnectionLimits] = ConnectionLimits()

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = _Phase.HEAD
        self._phase_s = self.loop.time()
        self._timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0
        self._header_count = 0
        self._unparsed = 0  # bytes since the parser last made progress: an incomplete header, or chunk framing
        self._body_bytes = 0
        self._violation: ApiError | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection. Above the limit reject its requests with 503; above it by `REFUSED_MAX` close it."""
        super().connection_made(cast("asyncio.Transport", _JoiningTransport(transport, self.loop)))
        count = len(self.connections)
        limits = self.limits
        if count > limits.connections_max + REFUSED_MAX:
            limits.on_rejected("connections_exhausted")
            transport.abort()
            return
        if count > limits.connections_max:
            self.app = _rejecting_app(self.app, limits)
        self._phase_s = self.loop.time()
        self._timer = self.loop.call_later(limits.head_s, self._on_timer)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.IDLE and (self.cycle is None or self.cycle.response_complete):
            self._phase, self._phase_s = _Phase.HEAD, self.loop.time()
        for at in range(0, len(data), STEP_BYTES):
            step = data if len(data) <= STEP_BYTES else data[at : at + STEP_BYTES]
            self._unparsed += len(step)
            self._parse(step)
            if self.transport.is_closing():
                return
            if self._unparsed > HEAD_BYTES_MAX + STEP_BYTES:
                self._reject(_head_too_large(f"more than {HEAD_BYTES_MAX:,} bytes"))
                return
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Send the error of the exceeded limit, or status 400 if the parser found invalid HTTP."""
        self._reject(self._violation or _invalid_http("the request is not valid HTTP/1.1"))

    def _parse(self, data: bytes) -> None:
        """Pass bytes to the parser. Repeat the headers of a request that offers an upgrade without the offer."""
        self._unset_keepalive_if_required()
        while data:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as offer:  # it would skip the body; it has stopped after the headers
                (read,) = offer.args
                data = self._head_without_upgrade() + data[read:]
                self.parser = httptools.HttpRequestParser(self)  # the other one ignores all data if it will be closed
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
            except httptools.HttpParserError:
                self.send_400_response("")
                return

    def _head_without_upgrade(self) -> bytes:
        line = (self.parser.get_method(), self.url, b"HTTP/" + self.parser.get_http_version().encode())
        headers = [name + b": " + value for name, value in self.headers if name != b"upgrade"]
        return b"\r\n".join((b" ".join(line), *headers, b"", b""))

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._phase, self._phase_s = _Phase.HEAD, self.loop.time()
        self._head_bytes = self._header_count = self._unparsed = self._body_bytes = 0

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header, or a trailer of a chunked body. Too many, or too many bytes, stop the parser."""
        self._header_count += 1
        if self._header_count > HEADERS_MAX:
            self._stop_parser(_head_too_large(f"more than {HEADERS_MAX} headers"))
        self._count_head(len(name) + len(value))
        if self._phase is _Phase.HEAD:
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        version = self.parser.get_http_version()
        if (error := self._head_error(version)) is not None:
            self._stop_parser(error)
        if self.parser.should_upgrade():
            return  # `_parse` repeats the headers
        self._phase, self._phase_s = _Phase.BODY, self.loop.time()
        if len(self.pipeline) >= PIPELINED_MAX:
            text = f"more than {PIPELINED_MAX} requests were sent ahead of their responses; wait for responses"
            self._stop_parser(ApiError(400, "too_many_pipelined", text))
        if not self.url.startswith(b"/"):
            self._resolve_absolute_url()
        if version == "1.0":
            self.expect_100_continue = False  # the client does not know interim responses
        super().on_headers_complete()
        if version == "1.0":
            self.cycle.send = _without_chunks(self.cycle)  # type: ignore[method-assign]

    def _head_error(self, version: str) -> ApiError | None:
        if version not in VERSIONS:
            return ApiError(505, "unsupported_http_version", f"HTTP/{version} is not supported; use HTTP/1.1")
        if self.parser.get_method() == b"CONNECT":
            return ApiError(501, "unsupported_method", "this server is no proxy; CONNECT is not supported")
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            return _invalid_http("HTTP/1.0 has no Transfer-Encoding; use HTTP/1.1 or Content-Length")
        if codings and codings != [CHUNKED]:
            text = f"Transfer-Encoding is {b', '.join(codings).decode('latin-1')!r}; only 'chunked' is supported"
            is_last = codings[-1].rpartition(b",")[2].strip() == CHUNKED  # otherwise the end of the body is unknown
            return ApiError(501, "unsupported_transfer_encoding", text) if is_last else _invalid_http(text)
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and version == "1.1"):
            return _invalid_http(f"the request has {hosts} Host headers; send one")
        return None

    def _resolve_absolute_url(self) -> None:
        """Replace an absolute URL by its path and query, and the header `Host` by its host and port."""
        url = httptools.parse_url(self.url)
        if url.host is None:
            return  # `*`, which no route serves
        host = b"[%b]" % url.host if b":" in url.host else url.host
        if url.port is not None:
            host += b":%d" % url.port
        self.url = (url.path or b"/") + (b"" if url.query is None else b"?" + url.query)
        self.headers[:] = [(b"host", host), *((name, value) for name, value in self.headers if name != b"host")]

    def on_body(self, body: bytes) -> None:
        self._unparsed = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return  # only its headers are; `_parse` repeats them
        self._phase, self._unparsed = _Phase.IDLE, 0
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """If the body is still incomplete after the response, discard the rest of it for at most `linger_s` seconds."""
        super().on_response_complete()
        if self._phase is _Phase.BODY:
            self._arm(self.limits.linger_s)

    def _count_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > HEAD_BYTES_MAX:
            self._stop_parser(_head_too_large(f"more than {HEAD_BYTES_MAX:,} bytes"))

    def _stop_parser(self, error: ApiError) -> NoReturn:
        """Stop the parser, which then calls `send_400_response`."""
        self._violation = error
        raise _Violation

    def _watch(self) -> None:
        if self._phase is _Phase.IDLE:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None:
            self._arm(self.limits.head_s if self._phase is _Phase.HEAD else self.limits.body_s)

    def _arm(self, delay_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(delay_s, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        if self.transport.is_closing() or self._phase is _Phase.IDLE:
            return
        discarding = self._phase is _Phase.BODY and self.cycle.response_complete
        if discarding:
            self.transport.close()
            return
        if self.flow.read_paused:  # the application has not read the received bytes, so the client is not late
            self._phase_s = self.loop.time()
        in_head = self._phase is _Phase.HEAD
        allowed_s = self.limits.head_s if in_head else self.limits.body_s + self._body_bytes / BODY_BYTES_PER_S
        left_s = self._phase_s + allowed_s - self.loop.time()
        if left_s > 0:
            self._arm(left_s)
        elif in_head and not self._unparsed and not self._head_bytes:
            self.transport.close()  # a connection that a browser opened in advance needs no response
        else:
            part = "headers" if in_head else "body"
            text = f"the {part} of the request did not arrive within {allowed_s:.3g} s; send it faster"
            self._reject(ApiError(408, "request_timeout", text))

    def _reject(self, error: ApiError) -> None:
        """Send an error and close the connection. During a response only close: the error would become part of it."""
        self.limits.on_rejected(error.code)
        if not self._is_responding():
            self.transport.write(_encoded(error))
        self.transport.close()

    def _is_responding(self) -> bool:
        """Return whether a response is being sent, or an earlier request still waits for its response."""
        if self.cycle is None or self.cycle.response_complete:
            return False
        return self._phase is not _Phase.BODY or self.cycle.response_started or bool(self.pipeline)


class _JoiningTransport:
    """Transport that writes the head of a response together with the first part of the body.

    Each write is a system call and a packet. If the application does not send both parts at once, the head is written
    in the next iteration of the event loop.
    """

    __slots__ = ("_head", "_loop", "_transport")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        if self._head:
            data, self._head = self._head + data, b""
        elif data.startswith(HTTP):
            self._head = data
            self._loop.call_soon(self._flush)
            return
        self._transport.write(data)

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


def bounded(limits: ConnectionLimits) -> type[BoundedProtocol]:
    return type("BoundedProtocol", (BoundedProtocol,), {"limits": limits})


def connections_allowed() -> int:
    """Raise the limit of open files as far as needed and allowed; return how many connections fit, at least 1."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = CONNECTIONS_MAX + REFUSED_MAX + FILES_RESERVED
    unlimited = resource.RLIM_INFINITY
    if soft != unlimited and soft < wanted:
        soft = wanted if hard == unlimited else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == unlimited:
        return CONNECTIONS_MAX
    return max(1, min(CONNECTIONS_MAX, soft - REFUSED_MAX - FILES_RESERVED))


def _rejecting_app(app: Any, limits: ConnectionLimits) -> Any:
    text = f"this ingress has {limits.connections_max:,} open connections, its limit; close idle connections"
    error = ApiError(503, "connections_exhausted", text)

    async def reject(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["path"] in PROBES:  # served on a connection above the limit, too
            await app(scope, receive, send)
            return
        limits.on_rejected(error.code)
        await error.send(send, closes=True)

    return reject


def _without_chunks(cycle: RequestResponseCycle) -> Any:
    """Return the `send` of a request whose response ends with the connection, unless it has a `Content-Length`."""
    send = cycle.send

    async def send_plain(message: Any) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))  # uvicorn subtracts each part
        await send(message)

    return send_plain


def _invalid_http(text: str) -> ApiError:
    return ApiError(400, "invalid_http", text)


def _head_too_large(limit: str) -> ApiError:
    return ApiError(431, "headers_too_large", f"the request line and headers have {limit}, the limit; send less")


def _encoded(error: ApiError) -> bytes:
    body = error.encoded()
    head = [name + b": " + value + b"\r\n" for name, value in error.raw_headers(body, closes=True)]
    return b"".join([STATUS_LINE[error.status], *head, b"\r\n", body])
