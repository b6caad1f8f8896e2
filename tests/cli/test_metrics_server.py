"""Metrics and probes over HTTP."""

import contextlib
import platform
import socket
from importlib.metadata import version

import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from forebay.cli.common.metrics_server import metrics_served, process_registry
from forebay.ingress.errors import Unusable
from tests.harness.local import free_ports


def registry() -> CollectorRegistry:
    made = CollectorRegistry()
    Gauge("answer", "of everything", registry=made).set(42)
    return made


def test_probes_are_served_with_the_metrics(capfd: pytest.CaptureFixture[str]) -> None:
    port, is_ready = free_ports(1), [False]
    probes = {"/ready": lambda: (is_ready[0], "created"), "/live": lambda: (True, "running")}
    with (
        metrics_served("127.0.0.1", port, registry(), probes),
        httpx.Client(base_url=f"http://127.0.0.1:{port}") as http,
    ):
        assert "answer 42.0" in http.get("/metrics").text
        answer = http.get("/ready")
        assert (answer.status_code, answer.text) == (503, "created\n")
        is_ready[0] = True
        assert http.get("/ready").status_code == 200
        assert (http.get("/live").status_code, http.get("/live").text) == (200, "running\n")
    assert capfd.readouterr() == ("", "")
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/live")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_connection_has_one_request(version: str) -> None:
    """A body is never parsed as the next request."""
    inner = f"GET /live HTTP/{version}\r\nHost: x\r\n\r\n"
    head = "Connection: Upgrade, keep-alive\r\nUpgrade: h2c\r\nTransfer-Encoding: identity, chunked\r\n"
    raw = f"GET /live HTTP/{version}\r\nHost: x\r\n{head}Content-Length: {len(inner)}\r\n\r\n{inner}{inner}".encode()
    port = free_ports(1)
    with (
        metrics_served("127.0.0.1", port, registry(), {"/live": lambda: (True, "running")}),
        socket.create_connection(("127.0.0.1", port)) as client,
    ):
        client.sendall(raw)
        client.shutdown(socket.SHUT_WR)
        found = b""
        with contextlib.suppress(ConnectionError):  # the rest of the bytes was not read
            while part := client.recv(1 << 16):
                found += part
    assert found.startswith(b"HTTP/1.0 200 OK\r\n")
    assert found.count(b"running\n") == 1


def test_without_probes_and_without_a_port() -> None:
    port = free_ports(1)
    with metrics_served("localhost", port, registry()):
        assert "answer 42.0" in httpx.get(f"http://localhost:{port}/metrics").text
    with metrics_served("localhost", None, registry()):
        pass


def test_a_port_in_use_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serving = metrics_served("127.0.0.1", port, registry())
        with (
            pytest.raises(Unusable, match=f"cannot serve metrics on 127.0.0.1:{port}: .*choose another --metrics-port"),
            serving,
        ):
            pass


def test_every_process_exports_its_resources_and_its_version() -> None:
    port = free_ports(1)
    with metrics_served("127.0.0.1", port, process_registry()):
        shown = httpx.get(f"http://127.0.0.1:{port}/metrics").text
    found = {line.split(" ")[0] for line in shown.splitlines() if not line.startswith("#")}
    build = f'forebay_build_info{{python_version="{platform.python_version()}",version="{version("forebay")}"}}'
    assert {build, "process_cpu_seconds_total", "process_resident_memory_bytes", "process_open_fds"} <= found
