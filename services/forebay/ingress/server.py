"""uvicorn as an ingress runs it: on the caller's event loop, without its signal handlers or access log."""

import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from fastapi import FastAPI

from forebay.ingress.errors import Unusable

BACKLOG = 2048
# Longer than clients keep an idle connection (httpx and with it openai: 5 s): who closes first must not be us, or a
# request that is on its way is lost.
KEEP_ALIVE_S = 75
SHUTDOWN_S = 10  # streams that are still under way when the server is told to stop


class PortTaken(Unusable):
    """The address cannot be listened on."""


class Server(uvicorn.Server):
    """Signals belong to the process, not to one of its parts."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the handlers as they are."""
        yield


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises PortTaken with what to do."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise PortTaken(f"cannot listen on {host}:{port} ({error.strerror}); choose another --port") from error
    return listener


def build_server(app: FastAPI) -> Server:
    """A server for `app`; run it with `serve(sockets=[listener])`."""
    config = uvicorn.Config(
        app,
        http="httptools",
        loop="none",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        date_header=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    return Server(config)
