"""`forebay trace` against several systems, and against a server that fails in every way."""

import json
import signal
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.cli.common.failures import status_failure
from forebay.cli.trace.pace import SAMPLE_S, Pace
from forebay.cli.trace.stream import transport_failure
from tests.cli.in_process import forebay
from tests.cli.up import Up, running
from tests.harness import fork_server
from tests.harness.local import free_ports

pytestmark = pytest.mark.timeout(180)
REQUESTS = 20
OK, REFUSED, ERROR_EVENT, CUT, SHORT, NO_JSON, DIES, HANGS = range(10, 18)  # what the server does with a prompt length


class ScriptedServer(ThreadingHTTPServer):
    """Server whose response depends on the length of the prompt.

    Attributes:
        came_s: arrival of the request with each length of a prompt.
        looked_s: arrival of the first query of models or metrics.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models = (200, b'{"data": [{"id": "m"}]}')
        self.hanging = threading.Event()
        self.ended = threading.Event()
        self.cpu_s: Iterator[float] = iter(())
        self.came_s: dict[int, float] = {}
        self.looked_s = 0.0


class Handler(BaseHTTPRequestHandler):
    server: ScriptedServer

    def do_GET(self) -> None:
        self.server.looked_s = self.server.looked_s or time.monotonic()
        if self.path == "/v1/models":
            self.answer(*self.server.models)
        else:
            cpu_s = next(self.server.cpu_s, None)
            self.answer(200, b"" if cpu_s is None else b"process_cpu_seconds_total %g\n" % cpu_s)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        length = len(body["prompt"])
        self.server.came_s[length] = time.monotonic()
        tokens = 2 if length == SHORT else body["max_tokens"]
        usage = {"prompt_tokens": length, "completion_tokens": tokens, "prompt_tokens_details": {"cached_tokens": 0}}
        chunk = json.dumps({"id": self.headers["x-request-id"], "choices": [], "usage": usage})
        error = {"error": {"message": "no worker is left", "code": "no_worker"}}
        match length:
            case value if value == REFUSED:
                self.answer(503, json.dumps(error).encode())
            case value if value == ERROR_EVENT:
                self.answer(200, f"data: {json.dumps(error)}\n\n".encode())
            case value if value == CUT:
                self.answer(200, f"data: {chunk}\n\n".encode(), cut=9)
            case value if value == NO_JSON:
                self.answer(200, b'data: {"usage": nonsense\n\ndata: [DONE]\n\n')
            case value if value == DIES:
                self.server.shutdown()
                self.server.server_close()
            case value if value == HANGS:
                self.server.hanging.set()
                self.server.ended.wait()
            case _:
                self.answer(200, f"data: {chunk}\n\ndata: [DONE]\n\n".encode())

    def answer(self, status: int, body: bytes, cut: int = 0) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) + cut))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    with ScriptedServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.ended.set()
            server.shutdown()
            thread.join()


def workload(folder: Path, *lengths: int, chained: bool = False) -> str:
    """Return the path of a workload with one request per prompt length, each after the previous one if `chained`."""
    rows: list[dict[str, Any]] = [{"format": "forebay.workload", "version": 1, "block_tokens": 64}]
    for number, length in enumerate(lengths):
        after = {"after": [number - 1]} if chained and number else {"timestamp": 0}
        rows.append({"input_length": length, "output_length": 3, **after})
    path = folder / "workload.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_results_are_printed_if_the_server_dies(tmp_path: Path, server: ScriptedServer) -> None:
    todo = workload(tmp_path, OK, OK, DIES, OK, OK, OK, chained=True)
    run = forebay("trace", todo, "--url", server.url)
    assert run.returncode == 1, run.stderr
    assert "2 requests completed, 4 failed" in run.stdout
    assert "e2e_ms" in run.stdout
    assert "failed 3x: connection refused: ConnectError" in run.stdout
    assert "failed 1x: connection lost before the response: RemoteProtocolError" in run.stdout
    assert f"forebay: warning: {server.url} did not respond to GET /metrics after the last request" in run.stderr


def test_failures_are_counted_by_kind(tmp_path: Path, server: ScriptedServer) -> None:
    todo = workload(tmp_path, OK, REFUSED, REFUSED, ERROR_EVENT, CUT, CUT, CUT, SHORT, NO_JSON)
    run = forebay("trace", todo, "--url", server.url, "--json")
    assert run.returncode == 1, run.stderr
    summary = json.loads(run.stdout)
    assert summary["failures"] == {
        "HTTP 503 no_worker": 2,
        "error in the stream no_worker": 1,
        "broken stream": 3,
        "wrong length of the response": 1,
        "malformed response": 1,
    }
    assert (summary["requests"], summary["failed"], summary["unfinished"], summary["unsent"]) == (1, 8, 0, 0)
    assert summary["failure_examples"]["HTTP 503 no_worker"] == "no worker is left"
    assert summary["failure_examples"]["wrong length of the response"] == "got 2 output tokens, expected 3"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_trace_prints_its_results(tmp_path: Path, server: ScriptedServer, number: signal.Signals) -> None:
    todo = workload(tmp_path, OK, HANGS, OK, chained=True)
    process = fork_server.start("trace", todo, "--url", server.url)
    assert server.hanging.wait(60)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert "1 requests completed, 0 failed; interrupted with 1 in flight and 1 not sent" in output
    assert "Traceback" not in output


@pytest.mark.parametrize(
    ("models", "reason"),
    [
        ((401, b"{}"), ": the API key is missing or wrong; set FOREBAY_API_KEY or --api-key"),
        ((503, b'{"error": {"message": "wait", "code": "no"}}'), "/v1/models: got HTTP 503 no: wait"),
        ((200, b"<html>"), "/v1/models: lists no model"),
        ((200, b'{"data": []}'), "/v1/models: lists no model"),
    ],
)
def test_system_without_models_is_an_error(
    tmp_path: Path, server: ScriptedServer, models: tuple[int, bytes], reason: str
) -> None:
    server.models = models
    run = forebay("trace", workload(tmp_path, OK), "--url", server.url)
    assert (run.returncode, run.stdout) == (2, "")
    assert f"forebay: {server.url}{reason}" in run.stderr


def test_pace_is_reported_and_a_full_server_is_named(tmp_path: Path, server: ScriptedServer) -> None:
    server.cpu_s = iter([1.0, 1e6])
    todo = workload(tmp_path, OK, OK, OK)
    run = forebay("trace", todo, "--url", server.url, "--max-concurrency", "1", "--json")
    assert run.returncode == 0, run.stderr
    pace = json.loads(run.stdout)["pace"]
    assert (pace["requested_s"], pace["requested_per_s"]) == (0.0, None)
    assert 0 < pace["achieved_s"] <= pace["lasted_s"]
    assert pace["late_ms"]["max"] == pytest.approx(pace["achieved_s"] * 1e3)
    assert "2 requests were sent late because 1 requests were in flight (--max-concurrency)" in run.stderr
    assert f"the process at {server.url} used " in run.stderr
    shown = forebay("trace", todo, "--url", server.url).stdout
    assert "requested pace      all requests at one time in 0.0 s" in shown
    assert "achieved pace       " in shown
    assert "sent late by        " in shown


def test_invalid_rows_are_skipped_on_request(tmp_path: Path, server: ScriptedServer) -> None:
    todo = workload(tmp_path, OK, 0, OK)
    run = forebay("trace", todo, "--url", server.url)
    assert (run.returncode, run.stdout) == (2, "")
    assert "skip such rows with --skip-bad-rows" in run.stderr
    run = forebay("trace", todo, "--url", server.url, "--skip-bad-rows", "--json")
    assert (run.returncode, json.loads(run.stdout)["requests"]) == (0, 2)
    assert "skipped: " in run.stderr


def test_saturated_client_is_named() -> None:
    pace = Pace(lasted_s=4.0)
    for _ in range(8):
        pace.add_sample(SAMPLE_S, SAMPLE_S / 2)
    assert list(pace.warnings(1)) == []
    pace.add_sample(SAMPLE_S + 0.75, 0.1)
    pace.late_ms.append(700.0)
    (warning,) = pace.warnings(1)
    assert warning.startswith("the client was saturated for 1.0 of 4.0 s (event loop delayed by up to 750 ms)")
    assert "requests were sent up to 700 ms late" in warning


def test_late_requests_are_named_without_a_known_cause() -> None:
    pace = Pace(lasted_s=4.0)
    pace.late_ms.append(3_000.0)
    assert list(pace.warnings(1)) == ["the client fell behind the workload; requests were sent up to 3000 ms late"]


def test_growing_time_to_first_token_is_a_saturated_server() -> None:
    growing = Pace(first_token_ms=[100.0 + 50.0 * number for number in range(40)])
    (warning,) = growing.warnings(1)
    assert "rose from 325 ms in the first quarter of the requests to 1825 ms in the last quarter" in warning
    assert list(Pace(first_token_ms=[100.0, None] * 20).warnings(1)) == []
    assert list(Pace(first_token_ms=[*[100.0] * 20, *[None] * 20]).warnings(1)) == []
    assert list(Pace(first_token_ms=[0.0, 9e9]).warnings(1)) == [], "two requests are no trend"


def test_kinds_of_transport_failures() -> None:
    assert transport_failure(httpx.ReadTimeout("slow"), streaming=True).kind == "timeout"
    assert transport_failure(httpx.ConnectError("unknown host"), streaming=False).kind == "no connection"
    assert transport_failure(httpx.ReadError("reset"), streaming=True).kind == "broken stream"
    assert status_failure(502, b"<html>").kind == "HTTP 502"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    row = {"input_length": 600, "output_length": 3, "hash_ids": [1, 2]}
    path.write_text("".join(json.dumps({"timestamp": 10 * at, **row}) + "\n" for at in range(REQUESTS)))
    return path


def answered(up: Up) -> int:
    """Return the number of requests that this system completed."""
    lines = httpx.get(f"{up.url}/metrics").text.splitlines()
    counts = [line for line in lines if line.startswith("dynamo_frontend_requests_total{") and "success" in line]
    return int(sum(float(line.rpartition(" ")[2]) for line in counts))


def test_requests_alternate_between_several_systems(trace: Path) -> None:
    with running("--workers", "1") as one, running("--workers", "1") as two:
        run = forebay("trace", str(trace), "--url", one.url, "--url", f"{two.url}/", "--json")
        assert run.returncode == 0, run.stderr
        assert [answered(one), answered(two)] == [REQUESTS // 2] * 2
    summary = json.loads(run.stdout)
    counted = {name: summary[name] for name in ("requests", "failed", "answered_once", "answered_again")}
    assert counted == {"requests": REQUESTS, "failed": 0, "answered_once": REQUESTS, "answered_again": 0}


def test_error_names_an_unreachable_system(trace: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)}"
    run = forebay("trace", str(trace), "--url", url)
    assert (run.returncode, f"no response from {url}" in run.stderr) == (2, True)
    run = forebay("trace", str(trace), "--url", "http://[::")
    assert (run.returncode, "no response from http://[:: (InvalidURL" in run.stderr) == (2, True)


def test_a_synthetic_workload_of_sessions_completes() -> None:
    recipe = "synthetic:requests=12,turns=3,rate=50,prompt=200,output=3,groups=2,prefix=128"
    with running("--workers", "1") as up:
        run = forebay("trace", recipe, "--url", up.url, "--json")
        assert run.returncode == 0, run.stderr
    summary = json.loads(run.stdout)
    assert (summary["requests"], summary["answered_once"]) == (12, 12)
    # Cached: the previous prompt of each later turn, and group prefixes used before by other sessions.
    assert summary["prefix_reuse"] > 0.4


def test_disagg_workers_are_listed_with_their_roles(trace: Path) -> None:
    with running("--prefill-workers", "1", "--decode-workers", "2") as up:
        run = forebay("trace", str(trace), "--url", up.url, "--json")
        assert run.returncode == 0, run.stderr
        shown = forebay("trace", str(trace), "--url", up.url).stdout
    summary = json.loads(run.stdout)
    assert summary["roles"] == {"decode-0": "decode", "decode-1": "decode", "prefill-0": "prefill"}
    assert set(summary["workers"]) == {"decode-0", "decode-1", "prefill-0"}
    figures = summary["workers"]
    assert figures["decode-0"]["requests"] + figures["decode-1"]["requests"] == REQUESTS
    assert figures["prefill-0"]["requests"] == REQUESTS
    computed = {name: one["computed_tokens"] for name, one in figures.items()}
    assert (computed["decode-0"], computed["decode-1"]) == (0, 0), "all of it was computed for them"
    assert computed["prefill-0"] == round(summary["prompt_tokens"] * (1 - summary["prefix_reuse"])) > 0
    assert summary["load_max_over_mean"] == 1.0, "there is one that computes prompts"
    assert "decode-0 (decode): " in shown
    assert f"prefill-0 (prefill): {REQUESTS} requests, " in shown


def test_dependent_requests_wait_for_responses_and_think_time(tmp_path: Path, server: ScriptedServer) -> None:
    common = {"output_length": 1, "hash_ids": [1]}
    rows: list[dict[str, Any]] = [
        {"format": "forebay.workload", "version": 1, "block_tokens": 64},
        {"timestamp": 0, "input_length": 20},
        {"timestamp": 0, "input_length": 21},
        {"after": [0, 1], "delay": 400, "input_length": 22},
        {"after": [2], "input_length": 23, "timestamp": 700},
        {"timestamp": 20, "input_length": 24},
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(row if "format" in row else {**common, **row}) + "\n" for row in rows))
    run = forebay("trace", str(path), "--url", server.url, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["requests"] == 5
    came_s = server.came_s
    assert came_s[22] >= max(came_s[20], came_s[21]) + 0.4
    assert came_s[23] >= max(came_s[22], server.looked_s + 0.7), "not before its own time either"
    assert came_s[24] < came_s[22], "who waits for nobody is not held up"
