"""Calls of endpoints over HTTP: the request on the log, the stream of values, and errors."""

import asyncio
import json
from typing import Any

import httpx
import msgspec
import pytest
from xxhash import xxh3_64_intdigest

from forebay.events.base import pack_u32, unpack_u32, unpack_u64
from forebay.events.requests import NO_HINTS, RouterOverride
from forebay.events.tokens import TokenChunk, TokensEmitted
from forebay.ingress.prepare import PAYLOAD_BYTES_MAX
from forebay.workers.client import CallFailed, call
from tests.ingress.conftest import BODY_MAX, NAME, Scene, chat, error, event_ids, make_scene

RANK, PATH = "demo.scores.rank", "/v1/endpoints/demo.scores.rank"


def announce(scene: Scene, *names: str) -> None:
    assert scene.only.owner.owner is not None
    scene.only.owner.owner = msgspec.structs.replace(scene.only.owner.owner, endpoints=names)


def start(scene: Scene, payload: Any = None, **headers: str) -> "asyncio.Task[httpx.Response]":
    announce(scene, "demo.scores.close", RANK)
    return scene.start(PATH, payload, **headers)


def yield_values(scene: Scene, name: str, *values: Any, first: int = 0) -> None:
    packed = pack_u32([0] * len(values))
    objects = tuple(json.dumps(value) for value in values)
    chunk = TokenChunk(request_id=name, attempt=1, first_index=first, token_ids=packed, objects=objects)
    scene.send(TokensEmitted(worker_id="w1", worker_epoch=1, owner_epoch=1, chunks=(chunk,)))


def parsed(text: str) -> list[tuple[str, Any]]:
    """Return the names and values of the events of a stream."""
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        head, _, data = event.partition("data: ")
        found.append(("end" if "event: end" in head else "error" if "event: error" in head else "", json.loads(data)))
    return found


async def test_a_call_is_a_request_on_the_log_and_its_values_are_events(scene: Scene) -> None:
    pending = start(scene, {"query": "dam"}, **{"x-request-id": "mine"})
    request = await scene.next_request()
    assert (request.task, request.model, json.loads(request.payload)) == ("call", NAME, {"query": "dam"})
    assert request.routing == msgspec.structs.replace(
        NO_HINTS, endpoint=RANK, override=RouterOverride(mode="round-robin")
    )
    yield_values(scene, request.request_id, {"at": 0}, "text\u2028\n\ndata: y")
    yield_values(scene, request.request_id, "again", 3, first=1)  # the first one is redelivered
    scene.end(request.request_id, reason="stop", output=3)
    response = await pending
    *values, (name, end) = parsed(response.text)
    assert values == [("", {"at": 0}), ("", "text\u2028\n\ndata: y"), ("", 3)]
    assert (name, end["worker"], end["attempts"]) == ("end", "w1", 1)
    assert end["request_id"].startswith(request.request_id)
    assert event_ids(response) == ["0-1-0", "0-2-0", "0-3-0", "0-3-1"]
    assert response.headers["x-request-id"] == "mine"
    labels = f'{{endpoint="endpoints",model="{NAME}",request_type="stream",status="success"}}'
    assert scene.metric(f"dynamo_frontend_requests_total{labels} 1.0")


async def test_tokens_of_the_payload_decide_the_worker_by_the_policy(scene: Scene) -> None:
    pending = start(scene, {"token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]})
    request = await scene.next_request()
    assert unpack_u32(request.token_ids) == [*range(1, 10)]
    assert request.routing.override is None
    assert unpack_u64(request.sequence_hashes)[:1] == [xxh3_64_intdigest(pack_u32([1, 2, 3, 4]), 1337)]
    scene.end(request.request_id, reason="stop", output=0)
    assert [name for name, _ in parsed((await pending).text)] == ["end"]


@pytest.mark.parametrize(
    ("payload", "problem"),
    [
        (b'{"a": ', (400, "invalid_json")),
        (b'{"token_ids": ["a"]}', (400, "invalid_value")),
        (b'{"token_ids": [-1]}', (400, "invalid_value")),
        (b'{"token_ids": [4294967296]}', (400, "invalid_value")),
        (b'{"token_ids": 7}', (400, "invalid_value")),
        (b"[" * 100_000, (400, "invalid_json")),
        (b'"' + b"a" * BODY_MAX + b'"', (413, "body_too_large")),
    ],
)
async def test_an_invalid_payload_is_rejected(scene: Scene, payload: bytes, problem: tuple[int, str]) -> None:
    announce(scene, RANK)
    assert error(await scene.client.post(PATH, content=payload)) == problem
    assert scene.requests() == []


async def test_a_payload_fits_into_a_record() -> None:
    async with make_scene(body_bytes_max=4 * PAYLOAD_BYTES_MAX) as scene:
        announce(scene, RANK)
        response = await scene.client.post(PATH, content=b'"' + b"a" * PAYLOAD_BYTES_MAX + b'"')
        assert error(response) == (413, "body_too_large")


async def test_an_unknown_endpoint_is_404_with_the_known_ones(scene: Scene) -> None:
    announce(scene, "demo.scores.close", RANK)
    response = await scene.client.post("/v1/endpoints/other", json=1)
    assert error(response) == (404, "endpoint_not_found")
    message = response.json()["error"]["message"]
    assert message == f"unknown endpoint 'other'; endpoints are: demo.scores.close, {RANK}"
    assert (await scene.client.get(PATH)).headers["allow"] == "POST"


async def test_errors_before_and_after_the_first_value(scene: Scene) -> None:
    pending = start(scene)
    request = await scene.next_request()
    assert request.payload == "null"
    scene.refuse(request.request_id, 503, "no_eligible_worker")
    assert error(await pending) == (503, "no_eligible_worker")
    pending = start(scene)
    request = await scene.next_request()
    yield_values(scene, request.request_id, 1)
    scene.refuse(request.request_id, 502, "response_interrupted", attempt=2)
    (value, (name, body)) = parsed((await pending).text)
    assert (value, name, body["error"]["code"]) == (("", 1), "error", "response_interrupted")


async def test_a_repeated_call_gets_the_same_values(scene: Scene) -> None:
    """Also in a kept answer, which joins chunks."""
    key = {"idempotency-key": "k"}
    pending = start(scene, {"n": 1}, **key)
    request = await scene.next_request()
    yield_values(scene, request.request_id, 1, 2)
    yield_values(scene, request.request_id, 2, 3, first=1)
    scene.end(request.request_id, reason="stop", output=3)
    first = await pending
    pending = start(scene, {"n": 1}, **key)
    again = await scene.next_request()
    scene.locate(again, 0)
    repeated = await pending
    assert repeated.text == first.text
    assert repeated.headers["idempotency-replayed"] == "true"
    location = parsed(first.text)[-1][1]["request_id"]
    resumed = await scene.client.get(f"/v1/requests/{location}/stream", headers={"last-event-id": "0-2-0"})
    assert [value for name, value in parsed(resumed.text) if not name] == [3]


async def test_the_client_yields_values_and_raises_errors(scene: Scene) -> None:
    announce(scene, RANK)
    async with scene.served() as (port, _):
        url = f"http://127.0.0.1:{port}"
        values = call(RANK, {"n": 1}, url=url)
        pending = asyncio.create_task(anext(values))
        request = await scene.next_request()
        yield_values(scene, request.request_id, {"text": "\u2028 data: x\n\n"})
        assert await pending == {"text": "\u2028 data: x\n\n"}
        scene.refuse(request.request_id, 502, "engine_error", attempt=1)
        with pytest.raises(CallFailed, match="because of engine_error"):
            await anext(values)
        with pytest.raises(CallFailed, match="unknown endpoint 'x'") as failed:
            await anext(call("x", url=url))
        assert (failed.value.status, failed.value.code) == (404, "endpoint_not_found")


async def test_calls_and_completions_share_an_ingress(scene: Scene) -> None:
    announce(scene, RANK)
    pending = scene.start("/v1/chat/completions", chat())
    request = await scene.next_request()
    assert (request.task, request.payload, request.routing.endpoint) == ("generate", "", "")
    scene.reply(request.request_id, "hello")
    assert (await pending).status_code == 200
