"""Logs, metrics, probes and the end of services."""

import contextlib
import io
import json
import logging
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
import httpx
import pytest
from prometheus_client import CollectorRegistry, Gauge

from forebay.cli.common.errors import run_service
from forebay.cli.common.logs import (
    KINDS_MAX,
    START_S,
    SUMMARY_S,
    BackgroundHandler,
    CountingHandler,
    JsonFormatter,
    StartFilter,
)
from forebay.processes.metrics_server import metrics_served, process_registry
from forebay.processes.service import until_signal
from forebay.runtime.errors import ConfigError
from forebay.transport.base import LogError, NotDerivable
from forebay.workers.engine import EngineError
from tests.cli.in_process import error_of
from tests.cli.up import PATIENCE_S, Up, running
from tests.harness.local import free_ports

pytestmark = pytest.mark.timeout(180)
MODEL = "forebay-default"
PROMPT, KEY = "a secret prompt", "sk-secret-key"
ACCESS = "forebay.access"
FIELDS = {"request_id", "model", "worker", "prompt_tokens", "cached_tokens", "output_tokens", "ttft_s", "duration_s"}


def request_all(up: Up) -> None:
    """Send one request of each kind, and requests that are rejected."""
    messages = [{"role": "user", "content": PROMPT}]
    with httpx.Client(base_url=up.url, timeout=PATIENCE_S, headers={"authorization": f"Bearer {KEY}"}) as client:
        for path, body in (
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3}),
            ("/v1/completions", {"prompt": PROMPT, "max_tokens": 3, "n": 2}),
            ("/v1/chat/completions", {"messages": messages, "max_tokens": 3, "stream": True}),
            ("/v1/embeddings", {"input": PROMPT}),
            ("/v1/completions", {"model": "unknown", "prompt": PROMPT}),
        ):
            client.post(path, json={"model": MODEL, **body}, headers={"x-request-id": "mine"})
        client.get("/v1/unknown", params={"api_key": KEY})
        client.get("/ready")
        client.get("/metrics")


def output_of(*options: str) -> str:
    """Return the output of `forebay up` that served `request_all`."""
    with running("--api-key", KEY, *options) as up:
        request_all(up)
        up.process.send_signal(signal.SIGTERM)
        output = up.process.communicate(timeout=PATIENCE_S)[0]
    assert up.process.returncode == 0
    assert PROMPT not in output
    assert KEY not in output
    return output


def test_json_lines_have_the_fields_of_each_request_and_no_prompt_or_key() -> None:
    lines = [json.loads(line) for line in output_of("--log-format", "json").splitlines()]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert any("stop with Ctrl-C" in line["message"] for line in lines)
    # A response of several parts is logged when its parts have ended, perhaps after the next request.
    access = sorted((line for line in lines if line["logger"] == ACCESS), key=lambda line: line["status"])
    generated = [line for line in access if line["path"].endswith("completions") and line["status"] == httpx.codes.OK]
    places = [("POST", "/v1/completions", 200)] * 2 + [("POST", "/v1/chat/completions", 200)]
    places += [("POST", "/v1/embeddings", 200), ("POST", "/v1/completions", 404), ("GET", "/v1/unknown", 404)]
    assert Counter((line["method"], line["path"], line["status"]) for line in access) == Counter(places)
    assert [line.get("error") for line in access] == [None] * 4 + ["model_not_found", "not_found"]
    for line, tokens in zip(generated, (3, 6, 3), strict=True):
        assert line.keys() >= FIELDS
        assert (line["model"], line["output_tokens"]) == (MODEL, tokens)
        assert line["request_id"].startswith("mine")
        assert 0 < line["ttft_s"] <= line["duration_s"]


def test_access_lines_can_be_turned_off() -> None:
    assert ACCESS not in output_of("--no-access-log")


def test_a_failed_start_is_a_json_line(tmp_path: Path) -> None:
    damaged = tmp_path / "log.db"
    damaged.write_text("not a log" * 1_000)
    up = Up("--log-format", "json", "--log", str(damaged))
    line = json.loads(up.process.communicate(timeout=PATIENCE_S)[0])
    assert (up.process.returncode, line["level"]) == (2, "error")
    assert str(damaged) in line["message"]


class BlockedStream(io.StringIO):
    """File that blocks every write until it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.released = threading.Event()

    def write(self, text: str) -> int:
        assert self.released.wait(PATIENCE_S)
        return super().write(text)


def test_log_lines_never_wait_for_a_slow_reader() -> None:
    stream = BlockedStream()
    handler = BackgroundHandler(stream, queue_max=10)
    handler.setFormatter(JsonFormatter())
    for number in range(100):
        handler.handle(record_of("%d", number))
    stream.released.set()
    handler.close()
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    written = [text for text in messages if text.isdecimal()]
    # Two lines, if the thread takes its first record only after others were dropped.
    dropped = [text.partition(" ") for text in messages if not text.isdecimal()]
    assert 10 <= len(written) <= 11
    assert sum(int(count) for count, _, _ in dropped) == 100 - len(written)
    assert {rest for _, _, rest in dropped} == {"log lines were dropped, because stderr is read too slowly"}


class _Writes(io.StringIO):
    """Stream that records the text of each write."""

    def __init__(self) -> None:
        super().__init__()
        self.writes: list[str] = []

    def write(self, text: str, /) -> int:
        self.writes.append(text)
        return super().write(text)


def test_lines_of_several_processes_in_one_pipe_are_not_mixed() -> None:
    stream = _Writes()
    handler = BackgroundHandler(stream)
    lengths = [*[99] * 500, 2 * select.PIPE_BUF, *[99] * 500]
    for number, length in enumerate(lengths):
        handler.handle(record_of(f"{number:09}" + "\N{LATIN SMALL LETTER E WITH ACUTE}" * (length // 2)))
    handler.close()
    assert len(stream.getvalue().splitlines()) == len(lengths)
    assert all(write.endswith("\n") for write in stream.writes)
    assert len(stream.writes) < len(lengths)
    long = [write for write in stream.writes if len(write.encode()) > select.PIPE_BUF]
    assert [write.count("\n") for write in long] == [1]


@pytest.mark.slow
def test_a_service_runs_and_stops_while_its_stderr_is_a_full_pipe() -> None:
    unread, full = os.pipe()
    with contextlib.suppress(BlockingIOError):
        os.set_blocking(full, False)
        while True:
            os.write(full, b"-" * 512)
    os.set_blocking(full, True)
    try:
        with running("--log-format", "json", stderr=full) as up:
            request_all(up)
            up.process.send_signal(signal.SIGTERM)
            up.process.communicate(timeout=PATIENCE_S)
        assert up.process.returncode == 0
    finally:
        os.close(full)
        os.close(unread)


def test_json_lines_contain_exceptions_and_text_that_is_not_unicode() -> None:
    try:
        raise ValueError("\ud800")
    except ValueError as error:
        record = record_of("broken %s", "\ud800")
        record.exc_info = (type(error), error, error.__traceback__)
    line = json.loads(JsonFormatter().format(record))
    assert line["message"] == "broken ?"
    assert "ValueError: ?" in line["exception"]


def test_a_missing_coordinator_is_an_error_only_after_the_start() -> None:
    now_s = 100.0
    healthy = StartFilter(lambda: now_s)
    starting = record_of("Group Coordinator Request failed: %s", "[Error 15] GroupCoordinatorNotAvailableError")
    denied = record_of("Group Coordinator Request failed: %s", "[Error 30] GroupAuthorizationFailedError")
    assert (bool(healthy.filter(starting)), bool(healthy.filter(denied))) == (False, True)
    now_s += START_S + 1
    assert healthy.filter(starting)


def record_of(text: str, *args: Any) -> logging.LogRecord:
    return logging.LogRecord("forebay.test", logging.ERROR, "", 0, text, args, None)


class HandlerOnFakeClock:
    """Handler with a clock set by the test. `lines` returns its output."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.stream = io.StringIO()
        self.handler = CountingHandler(self.stream, lambda: self.now_s)

    def log(self, text: str, name: str = "aiokafka", level: int = logging.ERROR) -> None:
        self.handler.handle(logging.LogRecord(name, level, "", 0, "%s", (text,), None))

    @property
    def lines(self) -> list[str]:
        """Return the lines written so far."""
        return self.stream.getvalue().splitlines()


def test_a_five_minute_outage_is_logged_in_a_few_lines() -> None:
    scene = HandlerOnFakeClock()
    for number in range(68_000):
        scene.now_s = number * 300 / 68_000
        scene.log(f"Unable connect to node with id {number % 3}: [Errno 111]")
    scene.handler.close()
    assert scene.lines[0] == "Unable connect to node with id 0: [Errno 111]"
    assert len(scene.lines) <= 2 + 300 / SUMMARY_S
    assert sum(int(line.split("repeated ")[1].split()[0]) for line in scene.lines[1:]) == 68_000 - 1


def test_forebay_records_are_repeats_only_if_equal() -> None:
    scene = HandlerOnFakeClock()
    for worker in (1, 2, 2):
        scene.log(f"worker w{worker} is lost", "forebay.live.owner.admission", logging.WARNING)
    assert scene.lines == ["worker w1 is lost", "worker w2 is lost"]


def test_info_records_are_never_suppressed() -> None:
    scene = HandlerOnFakeClock()
    for _ in range(3):
        scene.log("assigned the control partitions [0]", "forebay.live.router.router", logging.INFO)
    assert len(scene.lines) == 3


def test_an_ended_problem_is_summarised_with_the_next_record_and_shown_again_on_recurrence() -> None:
    scene = HandlerOnFakeClock()
    scene.log("no answer")
    scene.log("no answer")
    scene.now_s = SUMMARY_S
    scene.log("all is well", level=logging.INFO)
    assert scene.lines == ["no answer", "no answer (repeated 1 times in 30 s)", "all is well"]
    scene.now_s = 2 * SUMMARY_S
    scene.log("all is well", level=logging.INFO)
    scene.log("no answer")
    assert scene.lines[3:] == ["all is well", "no answer"]


def test_many_different_problems_are_counted_in_bounded_memory() -> None:
    scene = HandlerOnFakeClock()
    for number in range(3 * KINDS_MAX):
        for _ in range(2):
            scene.log(f"record {number} is damaged", "forebay.live.owner.owner")
    scene.handler.close()
    assert len(scene.lines) == 6 * KINDS_MAX


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
        for path in ("/metrics", "/ready"):
            got, head = http.get(path), http.head(path)
            assert head.headers["content-length"] == got.headers["content-length"]
            assert head.status_code == got.status_code
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


def test_a_port_in_use_is_rejected() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        serving = metrics_served("127.0.0.1", port, registry())
        with (
            pytest.raises(
                ConfigError,
                match=f"cannot serve metrics on .*:{port}: .* by process {os.getpid()}, .*; choose another --metrics",
            ),
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


HANGS = {
    "a client library that blocks the event loop": "threading.Event().wait()",
    "a part that does not end": "await asyncio.Event().wait()",
}
SERVICE = """
import asyncio, threading
from forebay.cli.common.errors import run_service
from forebay.processes.service import until_signal

async def main():
    async def stop():
        print("stopping", flush=True)
        {hang}
    async def part():
        print("ready", flush=True)
        await asyncio.Event().wait()
    await until_signal(part(), stop=stop, stop_s={stop_s})

run_service(main())
"""
Case = tuple[str, int]
CASES: list[Case] = [(hang, signals) for hang in HANGS for signals in (1, 2)]


@pytest.fixture(scope="module")
def services() -> Iterator[dict[Case, "subprocess.Popen[str]"]]:
    """Start a service for each case and send its signals. The services then take their seconds at the same time."""
    with contextlib.ExitStack() as stack:
        started = {}
        for hang, signals in CASES:
            # Without a second signal, the service ends when its own time is over.
            code = SERVICE.format(hang=HANGS[hang], stop_s=0.0 if signals == 1 else 3600.0)
            command = [sys.executable, "-c", code]
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            started[hang, signals] = stack.enter_context(run)
            stack.callback(run.kill)
        for (_, signals), run in started.items():
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
            run.send_signal(signal.SIGTERM)
            assert run.stdout.readline() == "stopping\n"
            if signals == 2:
                run.send_signal(signal.SIGTERM)
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(("hang", "signals"), CASES)
def test_a_hanging_service_is_ended(services: dict[Case, "subprocess.Popen[str]"], hang: str, signals: int) -> None:
    run = services[hang, signals]
    _, errors = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1
    assert "killed: the process did not stop" in errors
    assert ("after a signal" if signals == 1 else "after a second") in errors


EARLY = """
import os, signal
from forebay.processes import service

end_within = service.end_within

def signalled_again(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    end_within(*arguments)

service.end_within = signalled_again
"""


@pytest.mark.parametrize(("error", "code"), [(LogError, 2), (NotDerivable, 3), (EngineError, 1)])
def test_an_error_within_task_groups_ends_a_process_with_its_own_code(error: type[Exception], code: int) -> None:
    async def part() -> None:
        raise ExceptionGroup("outer", [ExceptionGroup("inner", [error("why")])])

    with pytest.raises(click.exceptions.Exit) as ended:
        run_service(until_signal(part()))
    assert ended.value.exit_code == code


@pytest.mark.slow
def test_a_second_signal_right_after_the_first_ends_a_service_in_order() -> None:
    code = EARLY + SERVICE.format(hang=HANGS["a part that does not end"], stop_s=3600.0)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=PATIENCE_S)
    assert run.returncode >= 0, "the signal found no handler"


def test_a_broker_that_cannot_be_reached_is_one_line() -> None:
    address = f"127.0.0.1:{free_ports(1)}"
    text = error_of("topics", "list", "--kafka", address)
    assert text.startswith(f"Kafka at {address} cannot be used ([Errno 111] Connect call failed "), text
