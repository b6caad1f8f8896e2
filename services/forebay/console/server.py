"""Serve a console over HTTP."""

import asyncio
import socket
from collections.abc import Callable
from pathlib import Path

from forebay.console.app import build_console_app
from forebay.console.console import Console
from forebay.console.settings import ConsoleSettings
from forebay.ingress.http.endpoint import TlsFiles
from forebay.ingress.http.origin_guard import allowed_hosts
from forebay.ingress.http.server import build_server, listen


def tls_of(settings: ConsoleSettings) -> TlsFiles | None:
    """Return the certificate of a console, None for HTTP without TLS. Raises Unusable if it cannot be used."""
    if settings.certfile is None:
        return None
    return TlsFiles(Path(settings.certfile), None if settings.keyfile is None else Path(settings.keyfile))


async def serve_console(console: Console, listener: socket.socket, on_started: Callable[[], None]) -> None:
    """Serve a console on a listening socket until cancelled.

    Args:
        listener: the listening socket, which is closed at the end.
        on_started: called once, when the console accepts connections.
    """
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


def listening_socket(settings: ConsoleSettings, option: str) -> socket.socket:
    """Return a socket that listens at the console's address.

    Raises:
        Unusable: that is impossible. The message names the `option` that sets the port.
    """
    return listen(settings.host, settings.port, option)
