"""Actions of a console, executed by a real system with the operator's name on the log, and their errors."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import Response

from forebay.console import actions
from forebay.console.actions import add_actions
from forebay.ingress.errors import ApiError
from tests.cli.in_process import forebay
from tests.cli.up import ADMIN_TOKEN, Up, running, verified
from tests.harness.local import free_ports

pytestmark = [pytest.mark.asyncio, pytest.mark.timeout(180)]

MODEL = "forebay-default"
HUGE = int("9" * 400)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Up, Path]]:
    log = tmp_path_factory.mktemp("actions") / "log.db"
    with running("--log", str(log), "--workers", "3", "--admin-api") as up:
        yield up, log


def console(url: str) -> httpx.AsyncClient:
    """Return a client of a console that has only actions."""
    app = FastAPI()

    @app.exception_handler(ApiError)
    async def respond(_: Request, error: ApiError) -> Response:
        return Response(error.encoded(), error.status, error.headers(), "application/json")

    add_actions(app, url, MODEL)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://console", timeout=60)


async def act(
    client: httpx.AsyncClient, action: str, token: str | None = ADMIN_TOKEN, operator: str | None = "alice", **body: Any
) -> httpx.Response:
    headers = {} if token is None else {"x-forebay-admin-token": token}
    fields = body if operator is None else {"operator": operator, **body}
    return await client.post(f"/v1/console/actions/{action}", json=fields, headers=headers)


def refused(response: httpx.Response) -> tuple[int, str]:
    return response.status_code, response.json()["error"]["code"]


def on_control(log: Path) -> list[dict[str, Any]]:
    run = forebay("topics", "tail", str(log), "control", "-n", "1000")
    events = [json.loads(line)["event"] for line in run.stdout.splitlines()]
    return [event for event in events if event["type"] != "control.pool_configured"]


async def test_actions_change_a_running_system_and_leave_the_operators_name(system: tuple[Up, Path]) -> None:
    up, log = system
    async with console(f"{up.url}/") as client:
        response = await act(client, "policy", pool="default", mode="round-robin")
        assert (response.status_code, response.json()["pools"][0]["policy"]) == (200, "round-robin")
        response = await act(client, "busy-threshold", active_decode_blocks_threshold=0.9)
        assert response.json()["active_decode_blocks_threshold"] == 0.9
        response = await act(client, "drain-pool", "bob", pool="default")
        assert refused(response) == (403, "admin_token_wrong")
        for drained in (True, False):
            response = await act(client, "drain-pool", operator="bob", pool="default", drained=drained, model=MODEL)
            assert (response.status_code, response.json()["pools"][0]["drained"]) == (200, drained)
        response = await act(client, "drain-worker", worker_ids=["mock-0"], timeout_s=30)
        (outcome,) = response.json()["outcomes"]
        assert (response.status_code, outcome["worker_id"], outcome["status"]) == (200, "mock-0", "done")
    found = [
        (event["type"].removeprefix("control."), event["operator"])
        for event in await asyncio.to_thread(on_control, log)
    ]
    assert found == [
        ("policy_set", "alice"),
        ("busy_thresholds_set", "alice"),
        ("pool_drain_set", "bob"),
        ("pool_drain_set", "bob"),
        ("worker_commanded", "alice"),
    ]
    assert await asyncio.to_thread(verified, log)


@pytest.mark.parametrize(
    ("action", "body", "status", "code"),
    [
        ("drain-worker", {"worker_ids": ["nobody"]}, 404, "unknown_worker"),
        ("drain-worker", {}, 400, "invalid_value"),
        ("drain-worker", {"worker_ids": ["mock-1"], "timeout_s": "long"}, 400, "invalid_value"),
        ("drain-worker", {"worker_ids": ["mock-1"], "timeout_s": HUGE}, 400, "invalid_value"),
        ("policy", {"pool": "default", "mode": "mine.Policy"}, 404, "unknown_policy"),
        ("policy", {"pool": "default"}, 400, "invalid_value"),
        ("policy", {"pool": "default", "mode": "kv", "model": "gpt"}, 404, "model_not_found"),
        ("busy-threshold", {"active_decode_blocks_threshold": 2}, 400, "invalid_value"),
        ("drain-pool", {"pool": "default", "drain": True}, 400, "unknown_parameter"),
    ],
    ids=str,
)
async def test_errors_of_the_ingress_are_passed_on(
    system: tuple[Up, Path], action: str, body: dict[str, Any], status: int, code: str
) -> None:
    async with console(system[0].url) as client:
        assert refused(await act(client, action, **body)) == (status, code)


@pytest.mark.parametrize(
    ("action", "changes", "status", "code"),
    [
        ("restart", {}, 404, "unknown_action"),
        ("policy", {"token": None}, 401, "admin_token_missing"),
        ("policy", {"token": "two words"}, 403, "admin_token_wrong"),
        ("policy", {"token": "x" * 4_097}, 403, "admin_token_wrong"),
        ("policy", {"operator": None}, 400, "invalid_value"),
        ("policy", {"operator": " "}, 400, "invalid_value"),
        ("policy", {"operator": "x" * 257}, 400, "invalid_value"),
        ("policy", {"operator": "a\nb"}, 400, "invalid_value"),
        ("policy", {}, 502, "ingress_unreachable"),
    ],
    ids=str,
)
async def test_an_action_that_cannot_be_sent_says_why(
    action: str, changes: dict[str, Any], status: int, code: str
) -> None:
    async with console(f"http://127.0.0.1:{free_ports(1)}") as client:
        assert refused(await act(client, action, **changes)) == (status, code)


async def test_a_body_that_is_no_object_is_rejected() -> None:
    async with console("http://127.0.0.1:1") as client:
        for content in ("[]", "{", "[" * 10_000):
            headers = {"x-forebay-admin-token": ADMIN_TOKEN}
            response = await client.post("/v1/console/actions/policy", content=content, headers=headers)
            assert refused(response) == (400, "invalid_json")


async def test_without_an_ingress_no_action_is_possible() -> None:
    async with console("") as client:
        response = await act(client, "policy")
        assert refused(response) == (501, "no_ingress")
        assert "--url" in response.json()["error"]["message"]


async def test_actions_in_flight_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    async with console("http://127.0.0.1:1") as client:
        for _ in range(actions.ACTIONS_MAX + 1):  # an action that has ended does not count
            assert (await act(client, "policy")).status_code == 502
        monkeypatch.setattr(actions, "ACTIONS_MAX", 0)
        assert refused(await act(client, "policy")) == (429, "too_many_actions")


class OtherServer(BaseHTTPRequestHandler):
    """HTTP server whose response depends on the path before that of the route."""

    def do_POST(self) -> None:
        disabled = self.path.startswith("/disabled")
        self.send_response(404 if disabled else 500)
        self.end_headers()
        self.wfile.write(b'{"error": {"code": "not_found", "message": "m"}}' if disabled else b"hello")

    def log_message(self, *_: object) -> None:
        pass


@asynccontextmanager
async def other_server() -> AsyncIterator[str]:
    """Run an `OtherServer`, and yield its address."""
    server = HTTPServer(("127.0.0.1", free_ports(1)), OtherServer)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        await asyncio.to_thread(server.shutdown)
        server.server_close()


@pytest.mark.parametrize(
    ("path", "status", "code"), [("/disabled", 501, "admin_api_disabled"), ("/other", 502, "no_ingress")]
)
async def test_another_server_is_not_taken_for_an_ingress(path: str, status: int, code: str) -> None:
    async with other_server() as url, console(f"{url}{path}") as client:
        assert refused(await act(client, "policy")) == (status, code)


async def test_a_proxy_is_used_except_for_loopback_addresses(
    system: tuple[Up, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    async with other_server() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
        async with console("http://ingress.example") as client:
            assert refused(await act(client, "busy-threshold")) == (502, "no_ingress"), "the proxy responds"
        for url in (system[0].url, system[0].url.replace("127.0.0.1", "localhost")):
            async with console(url) as client:
                response = await act(client, "busy-threshold")
                assert response.status_code == 200, response.text


async def test_the_token_is_not_logged(system: tuple[Up, Path], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with console(system[0].url) as client:
        await act(client, "busy-threshold")
        await act(client, "busy-threshold", "wrong-token")
    assert caplog.records, "httpx logs requests"
    assert ADMIN_TOKEN not in caplog.text
    assert "wrong-token" not in caplog.text
