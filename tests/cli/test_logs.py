"""Logs of the services: access lines, formats and levels."""

import contextlib
import io
import json
import logging
import os
import select
import signal
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.cli.common.logs import START_S, BackgroundHandler, JsonFormatter, StartFilter
from tests.cli.up import PATIENCE_S, Up, running

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


def test_access_lines_are_text_by_default_and_appear_once() -> None:
    lines = [line for line in output_of().splitlines() if ACCESS in line]
    assert len(lines) == 6
    assert f"INFO {ACCESS}: POST /v1/chat/completions 200 request_id=mine" in lines[2]
    assert " output_tokens=3 ttft_s=" in lines[2]


@pytest.mark.parametrize("option", [("--log-level", "warning"), ("--no-access-log",)], ids=" ".join)
def test_access_lines_can_be_turned_off(option: tuple[str, ...]) -> None:
    assert ACCESS not in output_of(*option)


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
