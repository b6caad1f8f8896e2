"""Run uvicorn on the caller's event loop, without its signal handlers and access log, and respond to exceptions."""

import asyncio
import contextlib
import logging
import socket
import ssl
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.ingress.access_log import AccessEntry, open_entry
from forebay.ingress.drain import AT_ONCE_S, IngressDrain
from forebay.ingress.errors import ApiError, internal_error
from forebay.ingress.http.endpoint import TlsFiles
from forebay.ingress.http.protocol import REFUSED_MAX, ConnectionLimits, bounded
from forebay.runtime.errors import ConfigError
from forebay.transport.certificates import ReloadedTls

logger = logging.getLogger(__name__)

SEND_S = 2.0  # time for a client to read the error, so that it does not delay the end of the process


class ErrorGuard:
    """Turns every exception of the application into an error in OpenAI's format, and logs each request.

    One outermost ASGI layer has both tasks, because each layer costs time for each message of a response. Starlette's
    handlers see subclasses of `Exception` only, and only before a response has started. Cancelled requests and streams
    that fail would otherwise reach uvicorn, which responds with status 500 and plain text.
    """

    def __init__(self, app: ASGIApp, on_rejected: Callable[[str], None]) -> None:
        self._app = app
        self._on_rejected = on_rejected

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Respond to an exception with 500, or with 503 if the request is cancelled. Serve HEAD as GET.

        If the response cannot be completed, the exception propagates, so that uvicorn closes the connection.
        """
        entry = open_entry(scope)
        if scope.get("method") == "HEAD":
            scope = {**scope, "method": "GET"}  # uvicorn leaves out the body
        if entry is None:
            await self._run(scope, receive, _Response(send))
            return
        has_failed = True
        try:
            await self._run(scope, receive, _Response(send, entry))
            has_failed = False
        finally:
            entry.write(has_failed=has_failed)

    async def _run(self, scope: Scope, receive: Receive, response: "_Response") -> None:
        try:
            await self._app(scope, receive, response.send)
        except asyncio.CancelledError:
            text = "the server is stopping; send the request again, to another server if there is one"
            if not await self._send_error(scope["path"], response, ApiError(503, "server_stopping", text)):
                raise
        except Exception:
            logger.exception("%s %s failed", scope["method"], scope["path"])
            if not await self._send_error(scope["path"], response, internal_error()):
                raise

    async def _send_error(self, path: str, response: "_Response", error: ApiError) -> bool:
        """Send an error, unless a response other than an event stream has started. Return whether it is complete."""
        if response.is_complete:
            return True
        if response.is_started and not response.is_event_stream:
            return False
        self._on_rejected(error.code)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(SEND_S):
                await response.fail(error, path)
        return response.is_complete


class _Response:
    __slots__ = ("_entry", "_send", "is_complete", "is_event_stream", "is_started")

    def __init__(self, send: Send, entry: AccessEntry | None = None) -> None:
        self._send = send
        self._entry = entry
        self.is_started = False
        self.is_complete = False
        self.is_event_stream = False

    async def send(self, message: Message) -> None:
        if self._entry is not None:
            self._entry.observe(message)
        if message["type"] == "http.response.start":
            self.is_started = True
            self.is_event_stream = any(
                name == b"content-type" and value.startswith(b"text/event-stream") for name, value in message["headers"]
            )
        await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            self.is_complete = True

    async def fail(self, error: ApiError, path: str) -> None:
        """Send an error as the last event of a stream that has started, otherwise as the response."""
        if self.is_started:
            await self.send({"type": "http.response.body", "body": error.event(path)})
        else:
            await error.send(self.send, body=error.encoded(path))


BACKLOG = 2048
LISTENING = "0A"  # state of a socket in /proc/net/tcp
COMMAND_BYTES = 100  # of a command line in an error
DEFAULT_LIMITS = ConnectionLimits()
# Longer than clients keep an idle connection (httpx and openai: 5 s). If the server closed a connection first, a
# request that the client sends at that moment would be lost.
KEEP_ALIVE_S = 75
CUT_S = 1  # time to send the last bytes after a drain
# Messages of uvicorn about requests that fail or are cut. `ErrorGuard` logs failures with their cause, and the drain
# reports the requests that it waits for, so each of these messages would be a duplicate.
DUPLICATES = ("Exception in ASGI application", "ASGI callable returned without", "Cancel %s running task(s)")
# uvloop accepts one connection per listening socket and iteration of its loop. Under load an iteration takes up to
# 50 ms, so one socket would accept only 20 connections per second. Further connections would wait until a reset.
ACCEPTED_PER_ITERATION = 32  # a rejection takes 0.3 ms, so 32 take as long as the other requests of an iteration


def _is_no_duplicate(record: logging.LogRecord) -> bool:
    return not str(record.msg).startswith(DUPLICATES)


class PortTaken(ConfigError):
    """The process cannot listen on the address of `--host` and `--port`, for example because it is in use."""


class NotListening(ConfigError):
    """The listening socket of a running server was closed, so clients can no longer connect."""


class Server(uvicorn.Server):
    """uvicorn's server with several listeners per socket, and without signal handlers: the process installs its own.

    If a listening socket fails, uvloop only logs the error and closes the socket. So `serve` checks its sockets,
    because a process that accepts no connections must not keep running.
    """

    def __init__(self, config: uvicorn.Config, on_started: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_started = on_started
        self._listeners: tuple[socket.socket, ...] = ()
        self._duplicates: list[socket.socket] = []

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve HTTP on `sockets` until `should_exit` is set.

        Raises PortTaken if the server cannot listen on a socket, NotListening if a listening socket failed later.
        """
        try:
            await super().serve(sockets)
        finally:
            self._close_duplicates()  # `shutdown` does not run if this task is cancelled or fails

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        given = sockets or []
        self._duplicates = [one.dup() for one in given for _ in range(ACCEPTED_PER_ITERATION - 1)]
        self._listeners = (*given, *self._duplicates)
        try:
            await super().startup([*self._listeners])
            await asyncio.sleep(0)  # uvloop closes a socket that cannot listen in its next iteration
        except OSError as error:
            raise PortTaken(f"cannot serve HTTP ({error.strerror or error}); choose another --port") from error
        if self._has_closed_listener():
            raise PortTaken("cannot serve HTTP (the listening socket was closed); choose another --port")
        self._on_started()

    async def on_tick(self, counter: int) -> bool:
        """Return whether the server must stop. uvicorn calls this method ten times per second."""
        if not self.should_exit and self._has_closed_listener():
            raise NotListening("HTTP is no longer served: the listening socket failed; start the process again")
        return await super().on_tick(counter)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown([*(sockets or []), *self._duplicates])

    def _has_closed_listener(self) -> bool:
        return any(listener.fileno() < 0 for listener in self._listeners)

    def _close_duplicates(self) -> None:
        for duplicate in self._duplicates:
            duplicate.close()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Install no signal handlers, because those of the process begin the drain."""
        yield


def listen(host: str, port: int, option: str = "--port") -> socket.socket:
    """Return a listening socket. Raises PortTaken, with the name of the `option` that sets the port.

    It listens at once, so that a second process on the same port fails before it prints that it serves. Clients that
    connect before the server accepts connections wait in the backlog.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given. Without it, a response of two packets can take 40 ms more.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(BACKLOG)  # with SO_REUSEADDR, bind alone succeeds for any number of processes
    except OSError as error:
        listener.close()
        why = f"{error.strerror}{port_holder(port)}"
        raise PortTaken(f"cannot listen on {host}:{port} ({why}); choose another {option}") from error
    return listener


def port_holder(port: int) -> str:
    """Return ` by process PID, COMMAND` for a port on which a process listens; empty if this user cannot know it.

    The command ends before its first long option, because options may have passwords.
    """
    with contextlib.suppress(OSError):
        tables = Path("/proc/net").glob("tcp*")  # there is no tcp6 without IPv6
        rows = [line.split() for table in tables for line in table.read_text().splitlines()]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[3] == LISTENING and row[1].endswith(f":{port:04X}")}
        for link in Path("/proc").glob("[0-9]*/fd/*") if sockets else ():
            with contextlib.suppress(OSError):
                if str(link.readlink()) in sockets:
                    command = (link.parents[1] / "cmdline").read_bytes().partition(b"\0--")[0].replace(b"\0", b" ")
                    return f" by process {link.parts[2]}, {command[:COMMAND_BYTES].decode(errors='replace').strip()}"
    return ""


def build_server(
    app: ASGIApp,
    on_started: Callable[[], None] = lambda: None,
    limits: ConnectionLimits = DEFAULT_LIMITS,
    tls: TlsFiles | None = None,
    on_certificate_unusable: Callable[[], None] = lambda: None,
) -> Server:
    """Return an HTTP server for an application. The caller runs it with `serve(sockets=[listener])`.

    It calls `on_started` once it accepts connections, and `limits.on_rejected` also for errors of `ErrorGuard`. It
    follows changes of the files in `tls`, and calls `on_certificate_unusable` for each change that it cannot use.
    """
    logging.getLogger("uvicorn.error").addFilter(_is_no_duplicate)
    config = uvicorn.Config(
        ErrorGuard(app, limits.on_rejected),
        http=bounded(limits),
        loop="none",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_S,
    )
    config.load()
    config.ssl = None if tls is None else BoundedTls(tls, limits, on_certificate_unusable)
    return Server(config, on_started)


async def serve_until_drained(
    server: Server, listener: socket.socket, drain: IngressDrain, interrupt: Callable[[str], None], drain_s: float
) -> None:
    """Serve HTTP until the drain has ended. If this coroutine is cancelled, interrupt requests in flight at once.

    Args:
        drain_s: maximum seconds to wait for requests in flight once the drain has begun.
    """
    serving = asyncio.create_task(server.serve(sockets=[listener]), name="http")
    draining = asyncio.create_task(drain.run(interrupt, drain_s), name="drain")
    try:
        await asyncio.wait((serving, draining), return_when=asyncio.FIRST_COMPLETED)
        if draining.done():
            draining.result()
        server.should_exit = True
        await serving
    except asyncio.CancelledError:
        await drain.cut(interrupt, AT_ONCE_S)
        raise
    finally:
        for task in (serving, draining):
            task.cancel()
        await asyncio.gather(serving, draining, return_exceptions=True)
        listener.close()


class BoundedTls(ReloadedTls):
    """TLS context of a server. A connection above the limit is closed before its handshake.

    Connections in their handshake count, too. The limit is that at which `BoundedProtocol` closes connections.
    """

    def __init__(self, tls: TlsFiles, limits: ConnectionLimits, on_unusable: Callable[[], None]) -> None:
        super().__init__(tls.load, tls.files, on_unusable)
        self._limits = limits
        self._open = weakref.WeakSet[ssl.SSLObject]()

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection. Raises ConnectionAbortedError above the limit; uvloop then closes the connection."""
        if len(self._open) >= self._limits.connections_max + REFUSED_MAX:
            self._limits.on_rejected("connections_exhausted")
            raise ConnectionAbortedError("too many connections")
        connection = super().wrap_bio(*args, **kwargs)
        self._open.add(connection)
        return connection
