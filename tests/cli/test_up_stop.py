"""Ctrl-C of `forebay up` with requests in flight, and a restart after it."""

import json
import signal
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.up import PATIENCE_S, Up, running

SLOW = ("--speedup", "0.02")  # a response of 2,000 tokens takes minutes
BODY = {"model": "forebay-default", "prompt": "hi", "max_tokens": 2_000}
IN_FLIGHT = "forebay: shutting down: waiting up to {:g} s for 2 requests in flight; press Ctrl-C again"

pytestmark = pytest.mark.timeout(180)


def stream_of(up: Up, started: threading.Event) -> list[str]:
    """Return the data of a stream until its end."""
    body = {**BODY, "stream": True}
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        found = []
        for line in response.iter_lines():
            if line:
                found.append(line.removeprefix("data: "))
                started.set()
    return found


def in_flight(up: Up, clients: ThreadPoolExecutor) -> tuple["Future[list[str]]", "Future[httpx.Response]"]:
    """Start a stream and a whole response, and wait until both have their first token."""
    started = threading.Event()
    streamed = clients.submit(stream_of, up, started)
    assert started.wait(PATIENCE_S)
    whole = clients.submit(httpx.post, f"{up.url}/v1/completions", json=BODY, timeout=PATIENCE_S)
    metric = 'dynamo_frontend_time_to_first_token_seconds_count{model="forebay-default"} 2.0'
    while metric not in httpx.get(f"{up.url}/metrics").text:
        assert not whole.done()
    return streamed, whole


def error_of(body: str) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(body)["error"]
    return error


def stopped(up: Up, signals: int) -> str:
    """Send SIGINT as often as given, and return the output until the end of the process."""
    assert up.process.stdout is not None
    output = ""
    for number in range(signals):
        up.process.send_signal(signal.SIGINT)
        while not number and "shutting down" not in output:
            line = up.process.stdout.readline()
            assert line, output
            output += line
    output += up.process.communicate(timeout=PATIENCE_S)[0]
    assert up.process.returncode == 0, output
    return output


@pytest.mark.parametrize(
    ("drain_s", "signals"),
    [pytest.param(0.5, 1, id="drained"), pytest.param(3_600.0, 2, id="second-signal", marks=pytest.mark.slow)],
)
def test_ctrl_c_with_requests_in_flight_and_a_restart(tmp_path: Path, drain_s: float, signals: int) -> None:
    options = ("--log", str(tmp_path / "log.db"), "--drain-s", str(drain_s), *SLOW)
    with running(*options) as up, ThreadPoolExecutor(2) as clients:
        streamed, whole = in_flight(up, clients)
        output = stopped(up, signals)
        assert error_of(streamed.result()[-1])["code"] == "shutting_down"
        assert whole.result().status_code == 503
        assert error_of(whole.result().text)["code"] == "shutting_down"
    assert IN_FLIGHT.format(drain_s) in output
    assert ("Traceback" in output, " ERROR " in output) == (False, False)
    access = [line for line in output.splitlines() if "error=shutting_down request_id=" in line]
    assert [" worker=mock-" in line for line in access] == [True, True], output
    with running(*options) as up:
        up.process.send_signal(signal.SIGTERM)
        output = up.process.communicate(timeout=PATIENCE_S)[0]
    assert up.process.returncode == 0
    assert [line for line in output.splitlines() if "WARNING" in line or "is lost" in line] == []
