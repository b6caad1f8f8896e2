"""Admission of requests: limits, absent owners, late and full logs; and the access log."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
import uvloop
from prometheus_client import CollectorRegistry

from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.ingress import group
from forebay.ingress.access_log import LOGGER
from forebay.ingress.admission import (
    BURST_S,
    FULL_S,
    POOL_FULL,
    RETRY_AFTER_S_MAX,
    STARTED_BYTES,
    STARTED_BYTES_MIN,
    IngressAdmission,
)
from forebay.ingress.errors import ApiError
from forebay.ingress.http.server import build_server, listen
from forebay.ingress.metrics import IngressMetrics
from forebay.transport.base import Draft, LogFull
from tests.harness.local import free_ports
from tests.ingress.conftest import CHAT, EMBED, HEADERS, NAME, ROUTE, TEXT, Scene, chat, error, make_scene, text
from tests.system import PATIENCE_S, until

CONNECTIONS = 96


def start_request(scene: Scene) -> "asyncio.Task[httpx.Response]":
    return scene.start(CHAT, chat())


async def test_after_a_full_pool_requests_are_rejected_unread_until_one_ends(scene: Scene) -> None:
    served, refused = start_request(scene), start_request(scene)
    first, second = await scene.next_request(), await scene.next_request()
    scene.refuse(second.request_id, 429, POOL_FULL)
    assert (await refused).status_code == 429 or (await served).status_code == 429
    left = await scene.client.post(CHAT, content=b"no JSON, and nobody looks")
    assert error(left) == (429, POOL_FULL)
    assert 1 <= int(left.headers["retry-after"]) <= RETRY_AFTER_S_MAX
    assert len(scene.requests(RequestSubmitted)) == 2, "it is not on the log"
    assert scene.metric(f'forebay_ingress_refused_total{{code="{POOL_FULL}"}} 2.0')
    scene.reply(first.request_id, " well")
    assert {(await served).status_code, (await refused).status_code} == {200, 429}
    again = start_request(scene)
    third = await scene.next_request()
    scene.reply(third.request_id, " well")
    assert (await again).status_code == 200
    assert scene.front.admission.in_flight == 0
    assert scene.metric("forebay_ingress_requests_in_flight 0.0")


async def test_a_burst_is_prepared_gradually_without_rejections(scene: Scene) -> None:
    pending = [start_request(scene) for _ in range(40)]
    for _ in pending:
        request = await scene.next_request()
        scene.reply(request.request_id, " well")
    assert {(await one).status_code for one in pending} == {200}
    assert scene.front.admission.in_flight == 0


async def test_other_routes_are_served_while_requests_are_rejected(scene: Scene) -> None:
    scene.front.admission.enter()
    scene.group.full.mark("")
    assert (await scene.client.post("/v1/completions", json={})).status_code == 429
    assert (await scene.client.get("/v1/models")).status_code == 200
    assert (await scene.client.get("/live")).status_code == 200


def test_a_full_pool_rejects_only_the_tenant_whose_request_was_rejected() -> None:
    now_s = 0.0
    admission = IngressAdmission(IngressMetrics(CollectorRegistry(), NAME), lambda: now_s)
    admission.enter(tenant="flood")
    admission.full.mark("flood")
    with pytest.raises(ApiError, match="are full"):
        admission.enter(tenant="flood")
    admission.enter(tenant="other")
    now_s = 2 * FULL_S
    admission.enter(tenant="flood")


async def test_requests_that_would_wait_too_long_are_rejected() -> None:
    now_s = 0.0
    admission = IngressAdmission(IngressMetrics(CollectorRegistry(), NAME), lambda: now_s)
    turns = []
    for _ in range(50):
        admission.enter()
        turns.append(asyncio.ensure_future(admission.turn(STARTED_BYTES // 2)))
    now_s = BURST_S / 2
    admission.enter()
    await asyncio.sleep(0)  # all ask for their turn, and some begin
    now_s = 100 * BURST_S
    with pytest.raises(ApiError) as caught:
        admission.enter()
    assert (caught.value.status, caught.value.code, caught.value.headers()["retry-after"]) == (503, "overloaded", "1")
    turns[-1].cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    admission.enter()
    assert admission.in_flight == 52


@pytest.mark.parametrize(
    ("size", "count"), [(1, STARTED_BYTES // STARTED_BYTES_MIN), (STARTED_BYTES // 2, 2), (10 * STARTED_BYTES, 1)]
)
async def test_few_bytes_are_prepared_per_iteration(size: int, count: int) -> None:
    admission = IngressAdmission(IngressMetrics(CollectorRegistry(), NAME))
    turns = [asyncio.ensure_future(admission.turn(size)) for _ in range(3 * count)]
    await asyncio.sleep(0)
    assert [turn.done() for turn in turns] == [number < count for number in range(3 * count)]
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*turns)


async def test_a_cancelled_turn_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    admission = IngressAdmission(IngressMetrics(CollectorRegistry(), NAME))
    turns = [asyncio.ensure_future(admission.turn(STARTED_BYTES // 2)) for _ in range(16)]
    await asyncio.sleep(0)  # some begin at once, the others wait
    left = turns[8]
    assert not left.done()
    left.cancel()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*turns, return_exceptions=True)
    assert [turn for turn in turns if turn.cancelled()] == [left]
    assert caplog.text == "", "the event loop logs what a callback raises"


async def test_retry_after_follows_the_completion_rate() -> None:
    now_s = 0.0
    admission = IngressAdmission(IngressMetrics(CollectorRegistry(), NAME), lambda: now_s)
    for _ in range(40):
        admission.enter()
    assert admission.retry_after_s == 1, "nobody knows yet"
    for _ in range(10):
        now_s += 1.0
        admission.leave()
    assert 25 <= admission.retry_after_s <= RETRY_AFTER_S_MAX, "30 are left, and one ends in a second"


def test_many_connections_are_accepted_in_one_iteration_of_the_loop() -> None:
    """With one socket uvloop accepts one connection per iteration, and others wait until they are reset."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(_iterations()) < CONNECTIONS / 4


async def _iterations() -> int:
    listener = listen("127.0.0.1", free_ports(1))
    server = build_server(_nothing)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    async with asyncio.timeout(PATIENCE_S):
        while not server.started:  # noqa: ASYNC110 - uvicorn sets no event
            await asyncio.sleep(0)
        address = listener.getsockname()
        clients = [socket.create_connection(address) for _ in range(CONNECTIONS)]  # the backlog takes them all
        count = 0
        while len(server.server_state.connections) < CONNECTIONS:
            await asyncio.sleep(0)
            count += 1
    for client in clients:
        client.close()
    server.should_exit = True
    await serving
    return count


async def _nothing(_: object, __: object, ___: object) -> None:
    """Fail if a request reaches the application."""


REQUESTS: list[tuple[str, dict[str, Any]]] = [
    (CHAT, chat()),
    (TEXT, text()),
    (EMBED, {"model": NAME, "input": "Hello"}),
    (ROUTE, text()),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS[:3])
async def test_a_request_names_its_ingress(path: str, body: dict[str, Any]) -> None:
    """So it can be aborted when the ingress is lost."""
    async with make_scene(incarnation="incarnation-1") as scene:
        response = scene.start(path, body)
        request = await scene.next_request()
        assert request.ingress_incarnation == "incarnation-1"
        scene.refuse(request.request_id, 503, "no_workers")
        assert (await response).status_code == 503


@pytest.mark.parametrize(("path", "body"), REQUESTS)
async def test_without_an_owner_a_request_is_rejected_at_once(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    def tokenized(*_: object, **__: object) -> list[int]:
        raise AssertionError("the text was tokenized before the request was refused")

    monkeypatch.setattr(scene.model, "encode", tokenized)
    scene.only.silent_s = 3.0
    response = await scene.client.post(path, json=body)
    assert error(response) == (503, "no_owner")
    assert int(response.headers["retry-after"]) >= 1
    assert scene.requests() == []


async def test_a_submitted_request_continues_without_an_owner(scene: Scene) -> None:
    pending = scene.start(*REQUESTS[1])
    request = await scene.next_request()
    scene.only.silent_s = 3.0
    scene.reply(request.request_id, "Hi")
    assert (await pending).status_code == 200


def acknowledge_late(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> tuple[asyncio.Event, list[Any]]:
    """Let the log append at once but acknowledge only after the event; also return the appends."""
    is_back, late, append_now = asyncio.Event(), list[Any](), scene.log.append

    async def append(drafts: Sequence[Draft]) -> list[int]:
        appending = asyncio.create_task(append_now(drafts))
        late.append(appending)
        await is_back.wait()
        return await appending

    monkeypatch.setattr(scene.log, "append", append)
    return is_back, late


@pytest.mark.parametrize("is_silent", [False, True])
async def test_an_unacknowledged_request_fails_and_is_cancelled(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, *, is_silent: bool
) -> None:
    monkeypatch.setattr(group, "ACKNOWLEDGED_S", 3_600 if is_silent else 0.05)
    monkeypatch.setattr(group, "CHECKED_S", 0.01)
    scene.only.silent_s = 0.8 if is_silent else 0.1
    _, late = acknowledge_late(scene, monkeypatch)
    response = await scene.start(*REQUESTS[1])
    assert error(response) == (503, "log_unavailable")
    assert "retry-after" in response.headers
    await until(lambda: scene.requests(RequestCancelled))
    (request,), (cancelled,) = scene.requests(RequestSubmitted), scene.requests(RequestCancelled)
    assert cancelled.request_id == request.request_id
    await asyncio.gather(*late)


async def test_a_request_waits_for_a_late_acknowledgement_while_the_owner_beats(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group, "CHECKED_S", 0.01)
    checked = asyncio.Event()

    def silent_s(_: object) -> float:
        checked.set()
        return 0.1

    monkeypatch.setattr(type(scene.only), "silent_s", property(silent_s))
    is_back, _ = acknowledge_late(scene, monkeypatch)
    pending = scene.start(*REQUESTS[1])
    request = await scene.next_request()
    await checked.wait()
    is_back.set()
    scene.reply(request.request_id, "Hi")
    assert (await pending).status_code == 200


async def test_a_full_log_rejects_one_request_and_keeps_the_others(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    pending = scene.start(*REQUESTS[1])
    request = await scene.next_request()

    async def full(_: Sequence[Draft]) -> list[int]:
        raise LogFull("256 MiB wait")

    monkeypatch.setattr(scene.log, "append", full)
    response = await scene.start(*REQUESTS[1])
    assert error(response) == (503, "log_unavailable")
    scene.reply(request.request_id, "Hi")
    assert (await pending).status_code == 200


BODY = {"model": NAME, "prompt": "hi", "max_tokens": 9}


def fields(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [record.__dict__["fields"] for record in caplog.records if record.name == LOGGER]


async def test_a_stream_that_fails_is_logged_with_its_error(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with scene.http_client(**HEADERS) as (client, _):
        pending = asyncio.create_task(client.post(TEXT, json={**BODY, "stream": True}))
        request = await scene.next_request()
        scene.emit_text(request.request_id, " good")
        scene.group.replies.interrupt_all("the log is gone")
        await pending
        await until(lambda: len(fields(caplog)) == 1)
    (found,) = fields(caplog)
    assert (found["error"], found["request_id"], found["model"]) == ("log_unavailable", request.request_id, NAME)
    assert found["prompt_tokens"] > 0


@pytest.mark.parametrize("started", [False, True])
async def test_a_client_that_disconnects_is_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture, *, started: bool
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with scene.http_client(**HEADERS) as (client, _):
        stream = client.stream("POST", TEXT, json={**BODY, "stream": True})
        opening = asyncio.create_task(stream.__aenter__())
        request = await scene.next_request()
        if started:
            scene.emit_text(request.request_id, " good")
            await (await opening).aclose()
        else:
            opening.cancel()
        await until(lambda: len(fields(caplog)) == 1)
    (found,) = fields(caplog)
    assert (found["status"], found["error"]) == (499, "client_disconnected")
    assert found.get("worker") == ("w1" if started else None)


async def test_control_characters_of_a_path_are_escaped_and_probes_are_not_logged(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    async with scene.http_client(**HEADERS) as (client, _):
        for path in ("/ready", "/live", "/metrics", "/v1/a%0Ab"):
            await client.get(path)
        await until(lambda: len(fields(caplog)) == 1)
    assert fields(caplog)[0]["path"] == "/v1/a\\nb"
