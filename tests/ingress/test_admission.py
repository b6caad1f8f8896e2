"""Admission: requests rejected before their body is read, and connections accepted per iteration."""

import asyncio
import contextlib
import socket

import httpx
import pytest
import uvloop
from prometheus_client import CollectorRegistry

from forebay.events.requests import RequestSubmitted
from forebay.ingress.admission import BURST_S, POOL_FULL, RETRY_AFTER_S_MAX, STARTED_PER_ITERATION, IngressAdmission
from forebay.ingress.errors import ApiError, Unusable
from forebay.ingress.http.server import build_server, listen
from forebay.ingress.metrics import IngressMetrics
from tests.ingress.conftest import NAME, Scene
from tests.system import PATIENCE_S

CHAT = {"model": NAME, "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CONNECTIONS = 96


def start_request(scene: Scene, body: object = CHAT) -> "asyncio.Task[httpx.Response]":
    return scene.start("/v1/chat/completions", body)


async def test_after_a_full_pool_requests_are_rejected_unread_until_one_ends(scene: Scene) -> None:
    served, refused = start_request(scene), start_request(scene)
    first, second = await scene.next_request(), await scene.next_request()
    scene.refuse(second.request_id, 429, POOL_FULL)
    assert (await refused).status_code == 429 or (await served).status_code == 429
    left = await scene.client.post("/v1/chat/completions", content=b"no JSON, and nobody looks")
    assert (left.status_code, left.json()["error"]["code"]) == (429, POOL_FULL)
    assert 1 <= int(left.headers["retry-after"]) <= RETRY_AFTER_S_MAX
    assert len(scene.requests(RequestSubmitted)) == 2, "it is not on the log"
    assert scene.metric(f'forebay_ingress_refused_total{{code="{POOL_FULL}"}} 2.0')
    scene.reply(first.request_id, " well")
    assert {(await served).status_code, (await refused).status_code} == {200, 429}
    again = start_request(scene)
    third = await scene.next_request()
    scene.reply(third.request_id, " well")
    assert (await again).status_code == 200
    assert scene.ingress.admission.in_flight == 0
    assert scene.metric("forebay_ingress_requests_in_flight 0.0")


async def test_a_burst_is_prepared_gradually_without_rejections(scene: Scene) -> None:
    pending = [start_request(scene) for _ in range(40)]
    for _ in pending:
        request = await scene.next_request()
        scene.reply(request.request_id, " well")
    assert {(await one).status_code for one in pending} == {200}
    assert scene.ingress.admission.in_flight == 0


async def test_other_routes_are_served_while_requests_are_rejected(scene: Scene) -> None:
    scene.ingress.admission.enter()
    scene.ingress.full.mark()
    assert (await scene.client.post("/v1/completions", json={})).status_code == 429
    assert (await scene.client.get("/v1/models")).status_code == 200
    assert (await scene.client.get("/live")).status_code == 200


async def test_requests_that_would_wait_too_long_are_rejected() -> None:
    now_s = 0.0
    admission = IngressAdmission(IngressMetrics(CollectorRegistry(), NAME), lambda: now_s)
    turns = []
    for _ in range(50):
        admission.enter()
        turns.append(asyncio.ensure_future(admission.turn()))
    now_s = BURST_S / 2
    admission.enter()
    await asyncio.sleep(0)  # all ask for their turn, and some begin
    now_s = 100 * BURST_S
    try:
        admission.enter()
        raise AssertionError("admitted")
    except ApiError as error:
        assert (error.status, error.code, error.headers()["retry-after"]) == (503, "overloaded", "1")
    turns[-1].cancel()
    await asyncio.gather(*turns, return_exceptions=True)
    admission.enter()
    assert admission.in_flight == 52


async def test_a_cancelled_turn_is_skipped(caplog: pytest.LogCaptureFixture) -> None:
    admission = IngressAdmission(IngressMetrics(CollectorRegistry(), NAME))
    turns = [asyncio.ensure_future(admission.turn()) for _ in range(8 * STARTED_PER_ITERATION)]
    await asyncio.sleep(0)  # some begin at once, the others wait
    left = turns[4 * STARTED_PER_ITERATION]
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
    listener = _free()
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


def _free() -> socket.socket:
    for port in range(19_400, 19_900):
        with contextlib.suppress(Unusable):
            return listen("127.0.0.1", port)
    raise AssertionError("no port is free")


async def _nothing(_: object, __: object, ___: object) -> None:
    """Fail if a request reaches the application."""
