"""`forebay status`: of a running system, of a log, and errors."""

import asyncio
import json
import re
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import msgspec
import pytest

from forebay.replay import status as form
from forebay.replay.status import GroupStatus
from forebay.transport.sqlite.log import SqliteLog
from tests.cli.in_process import forebay
from tests.cli.up import LONG_PREFIX, PATIENCE_S, running
from tests.harness.local import free_ports
from tests.replay import incident

KEY = "key-of-tests"
PAGE = Path(__file__).parents[2] / "docs" / "status.md"


def status(*arguments: str, code: int = 0) -> dict[str, Any]:
    run = forebay("status", *arguments, "--json")
    assert run.returncode == code, run.stdout + run.stderr
    found: dict[str, Any] = json.loads(run.stdout)
    msgspec.convert(found, GroupStatus)
    return found


@pytest.mark.timeout(180)
def test_a_running_system_is_shown(tmp_path: Path) -> None:
    log = str(tmp_path / "log.db")
    with (
        running("--workers", "2", "--log", log, "--api-key", KEY) as up,
        up.client().with_options(api_key=KEY) as client,
    ):
        client.completions.create(model="forebay-default", prompt=LONG_PREFIX, max_tokens=4)
        of_this = ("--url", up.url, "--api-key", KEY)
        found = status(*of_this)
        assert found["source"] == "owner"
        assert (found["group"], found["ready"], found["problems"]) == ("forebay-default", True, [])
        assert [(worker["worker_id"], worker["state"]) for worker in found["workers"]] == [
            ("mock-0", "ready"),
            ("mock-1", "ready"),
        ]
        assert [pool["routed"] for pool in found["pools"]] == [1]
        assert found["owner"]["alive"] is True
        assert {topic["topic"] for topic in found["topics"]} >= {"requests", "fleet", "progress"}
        served = (
            httpx.get(f"{up.url}/v1/status", headers={"authorization": f"Bearer {KEY}"}, timeout=PATIENCE_S)
            .raise_for_status()
            .json()
        )
        assert served.keys() == found.keys()
        refused = forebay("status", "--url", up.url)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert "; set FOREBAY_API_KEY or --api-key" in refused.stderr
        shown = forebay("status", *of_this)
        assert shown.returncode == 0, shown.stderr
        for text in ("forebay-default, ready", "1 routed", "mock-1/0", "requests/0"):
            assert text in shown.stdout
        derived = status(log)
        assert (derived["source"], derived["owner"]["alive"]) == ("log", None)
        assert derived["workers"] == found["workers"]
        with client.completions.create(model="forebay-default", prompt="a", max_tokens=3_000, stream=True):
            running_requests = status(*of_this)["requests"]
        assert running_requests["in_flight"] == sum(running_requests["by_phase"].values()) == 1


def test_a_recording_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "incident.db"
    asyncio.run(incident.record(path))
    found = status(str(path))
    assert (found["group"], found["ready"], found["owner"]["owner_id"]) == ("model", True, "second")
    assert {worker["worker_id"] for worker in found["workers"]} == {"w0", "w1", "w2"}
    shown = forebay("status", str(path)).stdout
    assert "a log does not show whether it runs" in shown
    assert "0 in flight" in shown


def test_watch_reads_the_status_again_until_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "incident.db"
    asyncio.run(incident.record(path))
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            path.unlink()  # a failed reading is reported, and does not end the command
        if len(pauses) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr("forebay.cli.status.time.sleep", pause)
    run = forebay("status", str(path), "--watch", "--json")
    assert [json.loads(line)["ready"] for line in run.stdout.splitlines()] == [True, True]
    assert (len(pauses), run.stderr.count("\n")) == (3, 1), run.stderr
    assert run.returncode == 130


def test_a_log_without_an_owner_is_not_ready(tmp_path: Path) -> None:
    path = tmp_path / "empty.db"
    SqliteLog.open(path).close()
    assert status(str(path), code=1)["problems"] == ["no router has owned the group yet", "no worker is ready"]
    shown = forebay("status", str(path))
    assert shown.returncode == 1
    assert "problem    no worker is ready" in shown.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere.db"], "nowhere.db: no such log file; check the path"),
        (["a.db", "--kafka", "127.0.0.1:1"], "expected either a log file or --kafka"),
        (["{recording}", "--group", "other"], "unknown group 'other'; groups are: model"),
        (["--url", "http://127.0.0.1:{port}"], "does not respond .*; start a system with `forebay up`"),
        (["--url", "nothing"], "nothing does not respond"),
    ],
)
def test_bad_input_ends_with_code_2(arguments: list[str], message: str) -> None:
    recording = Path(__file__).parents[1] / "logs" / "kv.rec"
    run = forebay("status", *(one.format(recording=recording, port=free_ports(1)) for one in arguments))
    assert (run.returncode, run.stdout) == (2, "")
    assert re.search(message, run.stderr), run.stderr


@pytest.mark.parametrize(
    ("code", "body", "exit_code", "message"),
    [
        (200, "<html>", 2, "is not an ingress"),
        (200, '{"version": 9}', 2, "another version of the status"),
        (
            401,
            '{"error": {"message": "no key", "code": "invalid_api_key"}}',
            2,
            "no key; set FOREBAY_API_KEY or --api-key",
        ),
        (503, '{"error": {"message": "no router serves x"}}', 1, "no router serves x"),
    ],
)
def test_responses_other_than_a_status(code: int, body: str, exit_code: int, message: str) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(code)
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, *_: object) -> None:
            """Print nothing."""

    with HTTPServer(("127.0.0.1", free_ports(1)), Handler) as server:
        thread = Thread(target=server.handle_request)
        thread.start()
        run = forebay("status", "--url", f"http://127.0.0.1:{server.server_port}")
        thread.join()
    assert (run.returncode, run.stdout) == (exit_code, "")
    assert message in run.stderr


def test_the_page_describes_every_field() -> None:
    text = PAGE.read_text()
    for kind in vars(form).values():
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == form.__name__:
            missing = [name for name in kind.__struct_fields__ if f"`{name}`" not in text]
            assert missing == [], kind.__name__
