"""One `forebay up` with mock engines, for official clients of its APIs.

`make test-clients` runs these tests in `.venv-clients`, which has the clients and not forebay.
"""

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOREBAY = ROOT / ".venv" / "bin" / "forebay"
PORTS = range(19_400, 19_900)
POLL_S = 0.05
KEY = "key-of-tests"
GRPC: list[int] = []  # the port of the KServe API


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yield the URL of a system, which requires the API key that clients find in the environment."""
    folder = tmp_path_factory.mktemp("up")
    port = _free_port()
    GRPC.append(_free_port(port + 1))
    command = [str(FOREBAY), "up", "--workers", "2", "--speedup", "50"]
    command += ["--port", str(port), "--grpc-port", str(GRPC[0])]
    with (folder / "up.log").open("wb") as log:
        environment = {**os.environ, "FOREBAY_API_KEY": KEY}
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
    url = f"http://127.0.0.1:{port}"
    try:
        while not _is_ready(url):
            assert process.poll() is None, (folder / "up.log").read_text()
            time.sleep(POLL_S)
        os.environ |= {
            "ANTHROPIC_API_KEY": KEY,
            "ANTHROPIC_BASE_URL": url,
            "OPENAI_API_KEY": KEY,
            "OPENAI_BASE_URL": f"{url}/v1",
        }
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="session")
def grpc_address(url: str) -> str:
    del url
    return f"127.0.0.1:{GRPC[0]}"


def _free_port(first: int = PORTS.start) -> int:
    for port in range(first, PORTS.stop):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError(f"no port is free from {PORTS.start} to {PORTS.stop}")


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=5):
            return True
    except (urllib.error.URLError, ConnectionError):
        return False
