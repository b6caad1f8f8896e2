"""`forebay trace`, `forebay profile run` and `forebay produce`."""

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
import httpx
import msgspec
import pytest

from forebay.cli import produce
from forebay.cli.common.failures import status_failure
from forebay.cli.planner.planner_file import read_planner_file
from forebay.cli.produce import ProduceRun
from forebay.cli.trace.client import SAMPLE_S, Pace
from forebay.cli.trace.stream import transport_failure
from forebay.events.scaling import DecodePoint, PrefillPoint
from forebay.events.topics import OPENAI_REQUESTS, OPENAI_RESPONSES
from forebay.ingress.openai.requests import CHAT_PATH, TEXT_PATH
from forebay.transport.base import Draft, LogError, Record
from forebay.transport.kafka.settings import KafkaSettings
from tests.cli.in_process import error_of, forebay
from tests.cli.up import PATIENCE_S, Up, running
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
    assert "failed 3x: no connection: ConnectError" in run.stdout
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
    assert f"{server.url}{reason}" in error_of("trace", workload(tmp_path, OK), "--url", server.url)


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
        run = forebay("trace", trace, "--url", one.url, "--url", f"{two.url}/", "--json")
        assert run.returncode == 0, run.stderr
        assert [answered(one), answered(two)] == [REQUESTS // 2] * 2
    summary = json.loads(run.stdout)
    counted = {name: summary[name] for name in ("requests", "failed", "answered_once", "answered_again")}
    assert counted == {"requests": REQUESTS, "failed": 0, "answered_once": REQUESTS, "answered_again": 0}


def test_error_names_an_unreachable_system(trace: Path) -> None:
    url = f"http://127.0.0.1:{free_ports(1)}"
    assert f"no response from {url}" in error_of("trace", trace, "--url", url)
    assert "no response from http://[:: (InvalidURL" in error_of("trace", trace, "--url", "http://[::")


def test_disagg_workers_are_listed_with_their_roles(trace: Path) -> None:
    with running("--prefill-workers", "1", "--decode-workers", "2") as up:
        run = forebay("trace", trace, "--url", up.url, "--json")
        assert run.returncode == 0, run.stderr
        shown = forebay("trace", trace, "--url", up.url).stdout
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
    run = forebay("trace", path, "--url", server.url, "--json")
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["requests"] == 5
    came_s = server.came_s
    assert came_s[22] >= max(came_s[20], came_s[21]) + 0.4
    assert came_s[23] >= max(came_s[22], server.looked_s + 0.7), "not before its own time either"
    assert came_s[24] < came_s[22], "who waits for nobody is not held up"


SMALL = ("--isl", "64,256,128", "--context", "256,128", "--concurrency", "1,2", "--repeats", "1")
PLANNER = """
[[pools]]
group = "forebay-default"
pool = "default"
profile = "p.json"
"""
OUTPUT = ("--output-tokens", "16")


@pytest.fixture(scope="module")
def up() -> Iterator[Up]:
    with running("--workers", "1", "--speedup", "1") as up:
        yield up


def profile(up: Up, out: Path, *options: str) -> Any:
    """Measure with success, and return the file."""
    run = forebay("profile", "run", "--url", up.url, "--out", out, *options)
    assert run.returncode == 0, run.stderr
    return json.loads(out.read_text())


def test_a_profile_has_every_point(up: Up, tmp_path: Path) -> None:
    found = profile(up, tmp_path / "p.json", *SMALL, *OUTPUT)
    prefill = msgspec.convert(found["prefill"], list[PrefillPoint])
    decode = msgspec.convert(found["decode"], list[DecodePoint])
    assert [one.isl for one in prefill] == [64, 128, 256]
    assert [(one.context, one.concurrency) for one in decode] == [(128, 1), (128, 2), (256, 1), (256, 2)]
    for one in decode:
        assert one.tokens_per_s == pytest.approx(one.concurrency * 1e3 / one.itl_ms)
    assert all(one.ttft_ms > 0 for one in prefill)
    assert found["left_out"] == []
    (planner := tmp_path / "planner.toml").write_text(PLANNER)
    assert read_planner_file(planner).settings.pools[0].prefill == tuple(prefill)


@pytest.mark.parametrize(("role", "stages"), [("prefill", (1, 0)), ("decode", (0, 1))])
def test_a_role_has_the_points_of_its_stage(up: Up, tmp_path: Path, role: str, stages: tuple[int, int]) -> None:
    grid = ("--isl", "64", "--context", "64", "--concurrency", "1", "--repeats", "1")
    found = profile(up, tmp_path / "p.json", *grid, *OUTPUT, "--role", role)
    assert (len(found["prefill"]), len(found["decode"])) == stages


@pytest.mark.slow
def test_a_second_run_measures_only_what_is_missing(up: Up, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    first = profile(up, out, *SMALL, *OUTPUT)
    out.write_text(json.dumps(first | {"decode": first["decode"][:1]}))
    second = profile(up, out, *SMALL, *OUTPUT)
    assert second["prefill"] == first["prefill"]
    assert second["decode"][:1] == first["decode"][:1]
    assert len(second["decode"]) == len(first["decode"])


def test_other_settings_do_not_continue_a_file(up: Up, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    profile(up, out, *SMALL, *OUTPUT, "--role", "prefill")
    before = out.read_bytes()
    assert "role was prefill, now decode" in error_of(
        "profile", "run", "--url", up.url, "--out", str(out), *SMALL, *OUTPUT, "--role", "decode"
    )
    assert out.read_bytes() == before


@pytest.mark.parametrize("content", ["", '{"settings": 1}'])
def test_another_file_is_not_overwritten(up: Up, tmp_path: Path, content: str) -> None:
    out = tmp_path / "p.json"
    out.write_text(content)
    assert "not a file of this command" in error_of("profile", "run", "--url", up.url, "--out", out)
    assert out.read_text() == content


def test_prompts_longer_than_the_context_are_left_out(up: Up, tmp_path: Path) -> None:
    grid = ("--isl", "64,200000,300000", "--role", "prefill", "--repeats", "1")
    found = profile(up, tmp_path / "p.json", *grid)
    assert [one["isl"] for one in found["prefill"]] == [64]
    assert [one["point"]["tokens"] for one in found["left_out"]] == [200_000, 300_000]
    assert all("the context of 131072 has no room" in one["reason"] for one in found["left_out"])


def test_an_interrupted_run_keeps_its_points(up: Up, tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    run = fork_server.start("profile", "run", "--url", up.url, "--out", str(out), stderr=subprocess.PIPE)
    ends_s = time.monotonic() + PATIENCE_S
    while not out.exists() and time.monotonic() < ends_s:
        time.sleep(0.01)
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=PATIENCE_S)
    assert (run.returncode, "interrupted; run the same command again" in errors) == (130, True), errors
    assert json.loads(out.read_text())["prefill"]


def test_one_of_several_workers_has_to_be_named(tmp_path: Path) -> None:
    out = tmp_path / "p.json"
    grid = ("--isl", "64", "--role", "prefill", "--repeats", "1")
    with running("--workers", "2", "--routing-hints") as up:
        assert "2 ready workers (mock-0, mock-1)" in error_of(
            "profile", "run", "--url", up.url, "--out", str(out), *grid
        )
        assert "mock-1" in error_of("profile", "run", "--url", up.url, "--out", out, *grid, "--worker", "mock-2")
        assert profile(up, out, *grid, "--worker", "mock-1")["settings"]["worker"] == "mock-1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--isl", "0"), "--isl 0: '0' is not a number"),
        (("--isl", "64,x"), "'x' is not a number"),
        (("--concurrency", "5000"), "from 1 to 4,096"),
        (("--context", ",".join(map(str, range(100, 200)))), "100 numbers; give at most 64"),
        (("--context", "64", "--output-tokens", "64"), "must exceed --output-tokens 64"),
        (("--out", "missing/p.json"), "no such directory missing"),
        (("--model", "forebay-other"), "forebay-default"),
    ],
)
def test_invalid_options_are_rejected(up: Up, tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    out = () if "--out" in options else ("--out", str(tmp_path / "p.json"))
    assert message in error_of("profile", "run", "--url", up.url, *out, *options)


CHAT = b'{"model":"m","messages":[]}'


def piece(index: int, *, request_id: str = "run-1", last: bool = False, status: int = 200) -> dict[str, str]:
    return {"request-id": request_id, "index": str(index), "last": "1" if last else "0", "status": str(status)}


@pytest.mark.parametrize(
    ("line", "request_id", "path", "body"),
    [
        (CHAT, "run-7", CHAT_PATH, CHAT),
        (b'{"prompt":"once"}', "run-7", TEXT_PATH, b'{"prompt":"once"}'),
        (b'{"request_id":"mine","prompt":"once"}', "mine", TEXT_PATH, b'{"prompt":"once"}'),
        *((line, "run-7", CHAT_PATH, line) for line in (b"{no json", b"[1]", b'"request_id"', b"\xff", b"[" * 100_000)),
    ],
)
def test_a_line_becomes_a_request_that_the_ingress_validates(
    line: bytes, request_id: str, path: str, body: bytes
) -> None:
    assert ProduceRun("run").encode_request(7, line) == (request_id, path, body)


@pytest.mark.parametrize("wrong", ["a b/!", "", None, 7, "x" * 129])
def test_an_invalid_id_is_rejected(wrong: object, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(click.exceptions.Exit):
        ProduceRun().encode_request(3, msgspec.json.encode({"request_id": wrong}))
    assert capsys.readouterr().err.startswith(f"forebay: line 3: invalid request_id {wrong!r}; use 1 to 128 letters")


def test_a_response_is_complete_with_its_last_record_and_repeated_records_are_dropped() -> None:
    run = ProduceRun("run")
    run.encode_request(1, CHAT)
    run.encode_request(2, CHAT)
    assert run.add_record(piece(0), b"0") is None
    assert run.add_record(piece(1), b"1") is None
    for again in (0, 1):
        assert run.add_record(piece(again), b"again") is None
    answer = run.add_record(piece(2, last=True), b"2")
    assert msgspec.json.encode(answer) == b'{"request_id":"run-1","status":200,"chunks":[0,1,2]}'
    assert run.add_record(piece(2, last=True), b"2") is None
    assert run.add_record(piece(0, request_id="theirs", last=True), b"{}") is None
    answer = run.add_record(piece(0, request_id="run-2", last=True, status=503), b'{"a":1}')
    assert msgspec.json.encode(answer) == b'{"request_id":"run-2","status":503,"body":{"a":1}}'
    assert (run.errors, run.waiting) == (1, set())


def test_an_unreachable_kafka_is_reported(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(CHAT)
    with socket.socket() as taken:  # bound but not listening
        taken.bind(("127.0.0.1", 0))
        run = forebay("produce", lines, "--kafka", f"127.0.0.1:{taken.getsockname()[1]}")
    assert run.returncode == 2
    assert "cannot be used" in run.stderr
    assert run.stderr.count("\n") == 1


@pytest.mark.parametrize("text", [None, "", "fb-an-api-key"])
def test_a_file_without_a_key_that_signs_is_rejected(text: str | None, tmp_path: Path) -> None:
    lines, file = tmp_path / "lines.jsonl", tmp_path / "key"
    lines.write_bytes(CHAT)
    if text is not None:
        file.write_text(text)
    run = forebay("produce", lines, "--kafka", "127.0.0.1:1", "--signing-key", file)
    problem = "cannot read" if text is None else "expected the output of `forebay keys create --signing`"
    assert (run.returncode, run.stderr.count("\n")) == (2, 1)
    assert f"--signing-key {file}" in run.stderr
    assert problem in run.stderr


class FailingLog:
    """Log on Kafka that fails when it is flushed, or when a response is read."""

    def __init__(self, fails_at: str) -> None:
        self._fails_at = fails_at

    def append_soon(self, drafts: Sequence[Draft]) -> None:
        pass

    async def flush(self) -> None:
        self._fail("flush")

    async def end(self, *_: Any) -> int:
        return 0

    def tail(self, topic: str, partition: int, offset: int, wake: asyncio.Event) -> "FailingLog":
        wake.set()
        return self

    def take(self, limit: int) -> list[Record]:
        self._fail("take")
        return []

    def _fail(self, at: str) -> None:
        if at == self._fails_at:
            raise LogError("the broker is gone")


@pytest.mark.parametrize("fails_at", ["flush", "take"])
def test_a_kafka_that_fails_is_reported_with_what_was_sent(
    fails_at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def counted(_: KafkaSettings) -> dict[str, int]:
        return {OPENAI_REQUESTS.name: 2, OPENAI_RESPONSES.name: 1}

    for name in ("count_topics", "partitions_of"):
        monkeypatch.setattr(produce, name, counted)
    monkeypatch.setattr(produce, "kafka_log", lambda _: contextlib.nullcontext(FailingLog(fails_at)))
    lines = tmp_path / "lines.jsonl"
    lines.write_bytes(CHAT)
    run = forebay("produce", lines, "--kafka", "127.0.0.1:1", "--wait", "--timeout-s", "60")
    assert run.returncode == 2
    assert "the broker is gone" in run.stderr
    assert "1 requests sent, 0 answered, 0 of them with an error, 1 missing" in run.stderr
