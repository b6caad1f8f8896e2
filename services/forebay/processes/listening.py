"""Serve the HTTP API of an ingress at its addresses, if the options permit its clients."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial

from forebay.ingress.front import Front
from forebay.ingress.http.app import IngressApp
from forebay.ingress.http.endpoint import Endpoint
from forebay.ingress.http.guards import allowed_hosts
from forebay.ingress.http.protocol import ConnectionLimits, connections_allowed
from forebay.ingress.http.server import build_server, listen, serve_until_drained
from forebay.ingress.settings import IngressSettings
from forebay.processes.notices import announce, complain

ADMIN_HOST = "127.0.0.1"
GRPC_CLOSE_S = 1.0  # time to send the last bytes after a drain
ADMIN_CONNECTIONS_MAX = 64  # of operators, so few that the limit of the other connections need not be lower

Hosts = frozenset[str] | None  # as `allowed_hosts` returns them


@contextmanager
def listening(endpoint: Endpoint, settings: IngressSettings) -> Iterator[tuple[list[socket.socket], Hosts]]:
    """Yield a listening socket, one for the admin API if it has a port, and the accepted values of the header `Host`.

    Raises ConfigError if an address cannot be used, or other machines need an API key and there is none.
    """
    with ExitStack() as stack:
        listeners = [stack.enter_context(listen(endpoint.host, endpoint.port))]
        if settings.admin_port is not None:
            listeners.append(stack.enter_context(listen(ADMIN_HOST, settings.admin_port, "--admin-port")))
        if endpoint.grpc_port is not None:
            listen(endpoint.host, endpoint.grpc_port, "--grpc-port").close()  # gRPC listens after engines have started
        address = listeners[0].getsockname()[0]
        if endpoint.is_open(address, has_key=settings.requires_key):
            complain("WARNING: no API key: every client that reaches this address can send requests")
        yield listeners, allowed_hosts(endpoint.host, address, endpoint.allow_hosts)


async def serve_http(
    app: IngressApp,
    front: Front,
    listeners: list[socket.socket],
    endpoint: Endpoint,
    drain_s: float,
    on_started: Callable[[], None],
) -> None:
    """Serve until the drain of the ingress has ended."""
    metrics = front.metrics
    limits = ConnectionLimits(metrics.reject, connections_allowed())
    server = build_server(app, on_started, limits, endpoint.tls, metrics.certificate_unusable.inc)
    async with _serving_grpc(app, front, endpoint):
        serving = serve_until_drained(server, listeners[0], front.drain, front.slots.interrupt_all, drain_s)
        if app.admin is None:
            await serving
            return
        started = partial(announce, f"admin API on http://{ADMIN_HOST}:{front.settings.admin_port}")
        admin = build_server(app.admin, started, ConnectionLimits(metrics.reject, ADMIN_CONNECTIONS_MAX))
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(admin.serve(listeners[1:]), name="admin")
            await serving
            admin.should_exit = True


@asynccontextmanager
async def _serving_grpc(app: IngressApp, front: Front, endpoint: Endpoint) -> AsyncIterator[None]:
    """Serve the KServe API during the body, if it has a port."""
    if endpoint.grpc_port is None:
        yield
        return
    from forebay.ingress.kserve.server import build_server as build_grpc_server  # noqa: PLC0415 - it needs an extra

    server = build_grpc_server(app, front, endpoint)
    await server.start()
    announce(f"KServe API by gRPC on {endpoint.host}:{endpoint.grpc_port}")
    try:
        yield
    finally:
        await server.stop(GRPC_CLOSE_S)
