"""`forebay trace` against several servers."""

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.in_process import forebay
from tests.cli.up import Up, running
from tests.harness.local import free_ports

REQUESTS = 20

pytestmark = pytest.mark.timeout(180)


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


class RecordingServer(ThreadingHTTPServer):
    """Server that completes every request and records when each prompt and the first model query arrived."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.came_s: dict[int, float] = {}
        self.looked_s = 0.0


class Handler(BaseHTTPRequestHandler):
    server: RecordingServer

    def do_GET(self) -> None:
        self.server.looked_s = self.server.looked_s or time.monotonic()
        self.answer(b'{"data": [{"id": "m"}]}' if self.path == "/v1/models" else b"")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        prompt_length = len(body["prompt"])
        self.server.came_s[prompt_length] = time.monotonic()
        usage = {"prompt_tokens": prompt_length, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        chunk = {"id": str(prompt_length), "choices": [], "usage": usage}
        self.answer(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Suppress the access log."""


@pytest.fixture
def server() -> Iterator[RecordingServer]:
    with RecordingServer() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def test_dependent_requests_wait_for_responses_and_think_time(tmp_path: Path, server: RecordingServer) -> None:
    common = {"output_length": 1, "hash_ids": [1]}
    rows: list[dict[str, Any]] = [
        {"format": "forebay.workload", "version": 1, "block_tokens": 64},
        {"timestamp": 0, "input_length": 10},
        {"timestamp": 0, "input_length": 11},
        {"after": [0, 1], "delay": 400, "input_length": 12},
        {"after": [2], "input_length": 13, "timestamp": 700},
        {"timestamp": 20, "input_length": 14},
    ]
    path = tmp_path / "sessions.jsonl"
    path.write_text("".join(json.dumps(row if "format" in row else {**common, **row}) + "\n" for row in rows))
    run = forebay("trace", str(path), "--url", f"http://127.0.0.1:{server.server_port}", "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["requests"] == 5
    came_s = server.came_s
    assert came_s[12] >= max(came_s[10], came_s[11]) + 0.4
    assert came_s[13] >= max(came_s[12], server.looked_s + 0.7), "not before its own time either"
    assert came_s[14] < came_s[12], "who waits for nobody is not held up"
