"""The HTTP application of a console: its page, and the endpoints that the page uses.

The files of the page load nothing from the network. They need no token, because they contain nothing about the system.
The page reads the token from the fragment of its address, which browsers do not send.
"""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from forebay.console.actions import add_actions
from forebay.console.console import Console
from forebay.console.routes import add_routes
from forebay.console.settings import ConsoleSettings
from forebay.ingress.api_keys import ApiKeys
from forebay.ingress.http.endpoint import TlsFiles
from forebay.ingress.http.error_handlers import add_errors
from forebay.ingress.http.guards import ApiKeyGuard, OriginGuard, allowed_hosts
from forebay.ingress.http.server import build_server

STATIC = Path(__file__).parent / "static"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx must not buffer the stream of events
)


class PageHeaders:
    """ASGI middleware that adds the content security policy and related headers to every response."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *HEADERS]}
            await send(message)

        await self._app(scope, receive, send_with_headers)


def build_console_app(console: Console, hosts: frozenset[str] | None) -> FastAPI:
    """Return the HTTP application of a console that accepts these values of the header `Host`; None accepts all."""
    app = FastAPI(title="forebay console", summary="The fleet, any request, any moment", docs_url=None, redoc_url=None)
    app.add_middleware(ApiKeyGuard, keys=ApiKeys([console.settings.token]), on_rejected=_ignore)
    app.add_middleware(OriginGuard, hosts=hosts, origins=frozenset(), on_rejected=_ignore)
    app.add_middleware(PageHeaders)
    add_errors(app)
    add_routes(app, console)
    settings = console.settings
    add_actions(app, settings.ingress_url, settings.group)

    @app.get("/", include_in_schema=False)
    async def index() -> Response:
        """Return the page."""
        return FileResponse(STATIC / "index.html", media_type="text/html")

    app.mount("/static", StaticFiles(directory=STATIC))
    return app


def _ignore(_: str) -> None:
    """Count no rejections, because a console has no metrics."""


def tls_of(settings: ConsoleSettings) -> TlsFiles | None:
    """Return the certificate of a console, None for HTTP without TLS. Raises ConfigError if it cannot be used."""
    if settings.certfile is None:
        return None
    return TlsFiles(Path(settings.certfile), None if settings.keyfile is None else Path(settings.keyfile))


async def serve_console(console: Console, listener: socket.socket, on_started: Callable[[], None]) -> None:
    """Serve a console on a listening socket until cancelled. `on_started` is called once it accepts connections."""
    settings = console.settings
    hosts = allowed_hosts(settings.host, listener.getsockname()[0], settings.allow_hosts)
    server = build_server(build_console_app(console, hosts), on_started, tls=tls_of(settings))
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(console.run())
            tasks.create_task(server.serve([listener]))
    finally:
        server.should_exit = True
        await console.close()
        listener.close()
