"""HTTP server for Prometheus metrics and the probes `/ready` and `/live`, and the metrics of every process."""

import platform
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from prometheus_client import CollectorRegistry, Gauge, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import ThreadingWSGIServer

from forebay.ingress.http.server import port_holder
from forebay.runtime.errors import ConfigError

Probe = Callable[[], tuple[bool, str]]
App = Callable[[dict[str, Any], Callable[..., Any]], Iterable[bytes]]


@contextmanager
def metrics_served(
    host: str, port: int | None, registry: CollectorRegistry, probes: Mapping[str, Probe] | None = None
) -> Iterator[None]:
    """Serve metrics while the body runs, and per path in `probes` whether the probe succeeds, with its text.

    A port of None starts no server. Raises ConfigError if the port cannot be opened.
    """
    if port is None:
        yield
        return
    try:
        family, *_ = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        kind = type("Server", (ThreadingWSGIServer,), {"address_family": family})
        server: WSGIServer = make_server(host, port, _app(registry, probes or {}), kind, _Handler)
    except OSError as error:
        why = f"{error.strerror}{port_holder(port)}"
        raise ConfigError(f"cannot serve metrics on {host}:{port}: {why}; choose another --metrics-port") from error
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()  # noqa: TID251 - the loop may be blocked
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def _app(registry: CollectorRegistry, probes: Mapping[str, Probe]) -> App:
    metrics = make_wsgi_app(registry)

    def app(environment: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        is_head, head = environment["REQUEST_METHOD"] == "HEAD", list[Any]()
        probe = probes.get(environment["PATH_INFO"])
        if probe is None:
            changes = {"REQUEST_METHOD": "GET"} if is_head else {}
            body = b"".join(metrics({**environment, **changes}, lambda *given: head.extend(given)))
        else:
            well, text = probe()
            head += ["200 OK" if well else "503 Service Unavailable", [("Content-Type", "text/plain; charset=utf-8")]]
            body = f"{text}\n".encode()
        status, headers = head
        start(status, [*headers, ("Content-Length", str(len(body)))])
        return [] if is_head else [body]

    return app


class _Handler(WSGIRequestHandler):
    def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002 - the name of the base class
        """Log nothing, because one line per request of Prometheus would fill the log."""


def process_registry() -> CollectorRegistry:
    """Return a registry with `process_*`, which only Linux has, and `forebay_build_info`."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    text = "Versions of forebay and Python in this process; the value is always 1."
    info = Gauge("forebay_build_info", text, ["version", "python_version"], registry=registry)
    info.labels(version("forebay"), platform.python_version()).set(1)
    return registry
