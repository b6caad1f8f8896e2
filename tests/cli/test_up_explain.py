"""Explanations by a running `forebay up`, including the life cycle of the explaining process."""

import signal
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from tests.cli.up import LONG_PREFIX, PATIENCE_S, forebay, running

pytestmark = pytest.mark.timeout(180)


def until_ended(pid: int) -> None:
    """Wait until a process has ended, whether or not its parent has reaped it."""
    ends_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < ends_s:
        state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
        if not state.stdout.strip() or state.stdout.startswith("Z"):
            return
        time.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_response_id_is_explained_and_no_process_is_left(tmp_path: Path, number: signal.Signals) -> None:
    log = tmp_path / "log.db"
    with running("--log", str(log)) as up, up.client() as client:
        answers = [
            client.chat.completions.create(
                model="forebay-default", max_tokens=4, messages=[{"role": "user", "content": LONG_PREFIX + text}]
            )
            for text in ("one", "two")
        ]
        assert up.children() == []
        report = (
            httpx.get(f"{up.url}/v1/requests/{answers[1].id}/explain", timeout=PATIENCE_S).raise_for_status().json()
        )
        assert (report["request_id"], report["state"], report["ending"]["output_tokens"]) == (
            answers[1].id,
            "finished",
            4,
        )
        (routing,) = report["routings"]
        winner = routing["candidates"][routing["winner"]]
        assert answers[1].model_extra is not None
        assert winner["seen"]["worker_id"] == answers[1].model_extra["forebay"]["worker"]
        assert routing["reason"] == "lowest_cost"
        usage = answers[1].usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        assert report["first_token"]["cached_tokens"] == usage.prompt_tokens_details.cached_tokens
        for path in ("/v1/completions", "/v1/completions", "/v1/route"):
            named = httpx.post(
                f"{up.url}{path}",
                json={"model": "forebay-default", "prompt": "where"},
                headers={"x-request-id": "mine"},
                timeout=PATIENCE_S,
            )
            assert (named.status_code, named.headers["x-request-id"]) == (200, "mine")
        query = httpx.get(f"{up.url}/v1/requests/mine/explain", timeout=PATIENCE_S).json()
        assert (query["kind"], query["state"]) == ("query", "answered")
        assert httpx.get(f"{up.url}/v1/requests/nobody/explain", timeout=PATIENCE_S).status_code == 404
        (worker,) = up.children()
        assert up.end(number) == (0 if number == signal.SIGINT else -number)
        until_ended(worker)
    shown = forebay("explain", str(log), answers[1].id)
    assert (shown.returncode, f"request {answers[1].id}: finished" in shown.stdout) == (0, True)
    assert "2 other requests have this ID too: mine~" in forebay("explain", str(log), "mine").stdout


def test_explanations_need_a_log_file() -> None:
    with running("--workers", "1") as up:
        refused = httpx.get(f"{up.url}/v1/requests/r/explain", timeout=PATIENCE_S)
        assert (refused.status_code, refused.json()["error"]["code"]) == (501, "not_recorded")
