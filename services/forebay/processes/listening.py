"""Serve the HTTP API of an ingress at its address, if the options permit its clients."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI

from forebay.ingress.front import Front
from forebay.ingress.http.endpoint import Endpoint
from forebay.ingress.http.guards import allowed_hosts
from forebay.ingress.http.protocol import ConnectionLimits, connections_allowed
from forebay.ingress.http.server import build_server, listen, serve_until_drained
from forebay.ingress.settings import IngressSettings
from forebay.processes.notices import complain

Hosts = frozenset[str] | None  # as `allowed_hosts` returns them


@contextmanager
def listening(endpoint: Endpoint, settings: IngressSettings) -> Iterator[tuple[socket.socket, Hosts]]:
    """Yield a listening socket and the accepted values of the header `Host`.

    Raises ConfigError if the address cannot be used, or other machines need an API key and there is none.
    """
    with listen(endpoint.host, endpoint.port) as listener:
        address = listener.getsockname()[0]
        if endpoint.is_open(address, has_key=settings.requires_key):
            complain("WARNING: no API key: every client that reaches this address can send requests")
        yield listener, allowed_hosts(endpoint.host, address, endpoint.allow_hosts)


async def serve_http(
    app: FastAPI,
    front: Front,
    listener: socket.socket,
    endpoint: Endpoint,
    drain_s: float,
    on_started: Callable[[], None],
) -> None:
    """Serve until the drain of the ingress has ended."""
    limits = ConnectionLimits(front.metrics.reject, connections_allowed())
    server = build_server(app, on_started, limits, endpoint.tls)
    await serve_until_drained(server, listener, front.drain, front.slots.interrupt_all, drain_s)
