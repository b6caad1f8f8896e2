"""Embeddings over HTTP and the Kafka API: one request per input, vectors in order."""

import asyncio
import base64
from array import array
from typing import Any, cast

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.state.reply_slot import apply
from forebay.events.base import unpack_u32
from forebay.events.request_ids import client_id_of
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.events.tokens import Embedded, ResponseEnded, ResponseError, TokenEvent, Usage
from forebay.ingress.kafka_api.request import ReplyAddress
from forebay.ingress.kafka_api.response import PendingRequest, RecordResponse, ResponseRecord, WindowEntry
from forebay.ingress.openai.embeddings import EmbeddingBody
from tests.ingress.conftest import EMBED, MODULE_LOOP, NAME, Scene, begun_fold, default_model, error, make_scene
from tests.system import until


def start_request(scene: Scene, given: Any, **fields: Any) -> "asyncio.Task[httpx.Response]":
    return scene.start(EMBED, {"model": NAME, "input": given, **fields}, **{"x-request-id": "e"})


async def submitted(scene: Scene, count: int) -> list[RequestSubmitted]:
    return [await scene.next_request() for _ in range(count)]


def reply(scene: Scene, request_id: str, vector: list[float]) -> None:
    packed = array("f", vector).tobytes()
    scene.send(Embedded(request_id=request_id, attempt=1, owner_epoch=1, worker_id="w1", vector=packed))
    scene.end(request_id, reason="stop", output=0)


async def test_each_input_becomes_a_request_and_vectors_keep_the_order(scene: Scene) -> None:
    pending = start_request(scene, ["one", "two words", "three"])
    requests = await submitted(scene, 3)
    (group,) = {request.request_id.rpartition("-")[0] for request in requests}
    assert [request.request_id for request in requests] == [f"{group}-{at}" for at in range(3)]
    assert client_id_of(group) == "e"
    assert {(request.task, request.sampling.max_tokens) for request in requests} == {("embed", 1)}
    assert [unpack_u32(request.token_ids) for request in requests] == [
        scene.model.encode(text) for text in ("one", "two words", "three")
    ]
    for at in (2, 0, 1):
        reply(scene, f"{group}-{at}", [float(at), 0.5])
    response = await pending
    assert response.status_code == 200
    body = response.json()
    assert [(one["index"], one["embedding"]) for one in body["data"]] == [(at, [float(at), 0.5]) for at in range(3)]
    tokens = sum(request.prompt_tokens for request in requests)
    assert body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    assert (body["object"], body["model"], response.headers["x-request-id"]) == ("list", NAME, "e")
    labels = f'{{endpoint="embeddings",model="{NAME}",request_type="unary",status="success"}}'
    assert scene.metric(f"dynamo_frontend_requests_total{labels} 1.0")
    assert not len(scene.group.replies)


@pytest.mark.parametrize(
    ("given", "prompts"), [("one", 1), ([5, 6], 1), ([[5], [6, 7]], 2), (["a"], 1), (["a", "b"], 2)]
)
@MODULE_LOOP
async def test_input_may_be_text_or_token_ids_or_a_list(shared_scene: Scene, given: Any, prompts: int) -> None:
    pending = start_request(shared_scene, given)
    for request in await submitted(shared_scene, prompts):
        reply(shared_scene, request.request_id, [1.0])
    assert len((await pending).json()["data"]) == prompts


async def test_more_inputs_than_the_limit_in_flight_all_complete(scene: Scene) -> None:
    count = 100
    pending = start_request(scene, [f"text {at}" for at in range(count)])
    for at in range(count):
        request = await scene.next_request()
        reply(scene, request.request_id, [float(request.request_id.rpartition("-")[2])])
        assert len(scene.group.replies) <= 64, at
    assert [one["embedding"] for one in (await pending).json()["data"]] == [[float(at)] for at in range(count)]


async def test_base64_is_the_packed_vector(scene: Scene) -> None:
    pending = start_request(scene, "one", encoding_format="base64")
    reply(scene, (await scene.next_request()).request_id, [0.25, -1.0])
    packed = base64.b64decode((await pending).json()["data"][0]["embedding"])
    assert array("f", packed).tolist() == [0.25, -1.0]


async def test_dimensions_truncate_and_normalise_vectors(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scene.model, "dimensions", (2, 4))
    assert (await start_request(scene, "a", dimensions=3)).json()["error"]["param"] == "dimensions"
    pending = start_request(scene, "a", dimensions=2)
    reply(scene, (await scene.next_request()).request_id, [3.0, 4.0, 12.0])
    cut = (await pending).json()["data"][0]["embedding"]
    assert cut == pytest.approx([0.6, 0.8])
    pending = start_request(scene, "a", dimensions=4)
    reply(scene, (await scene.next_request()).request_id, [3.0, 4.0, 12.0])
    assert "dimensions is 4" in (await pending).json()["error"]["message"]


async def test_one_failed_input_fails_the_request_and_cancels_the_others(scene: Scene) -> None:
    pending = start_request(scene, ["a", "b", "c"])
    served, cancelled, refused = [request.request_id for request in await submitted(scene, 3)]
    reply(scene, served, [1.0])
    scene.refuse(refused, 503, "no_eligible_worker")
    response = await pending
    assert error(response) == (503, "no_eligible_worker")
    assert response.headers["retry-after"] == "1"
    await until(lambda: scene.requests(RequestCancelled))
    assert [event.request_id for event in scene.requests(RequestCancelled)] == [cancelled]
    assert not len(scene.group.replies)


async def test_an_engine_that_returns_tokens_instead_is_an_error(scene: Scene) -> None:
    pending = start_request(scene, "a")
    request = await scene.next_request()
    scene.reply(request.request_id, " one")
    response = await pending
    assert error(response) == (502, "embedding_missing")


async def test_openai_client_gets_vectors_and_a_disconnect_cancels(scene: Scene) -> None:
    async with scene.openai_client() as client:
        pending = asyncio.create_task(client.embeddings.create(model=NAME, input=["one", "two"]))
        for request in await submitted(scene, 2):
            reply(scene, request.request_id, [0.5, 0.25])
        given = await pending
        assert [one.embedding for one in given.data] == [[0.5, 0.25]] * 2
        leaving = asyncio.create_task(client.embeddings.create(model=NAME, input="three"))
        request = await scene.next_request()
        leaving.cancel()
        assert (await scene.cancelled()).request_id == request.request_id
        await until(lambda: not len(scene.group.replies))


def folded(records: list[TokenEvent], inputs: int) -> list[ResponseRecord]:
    """Return the Kafka API response to these records, for a request with this many inputs."""
    fold = begun_fold(default_model(), "e", api="embeddings", parts=inputs, prompt_tokens=2 * inputs)
    response = RecordResponse(WindowEntry(0, 0), ReplyAddress("e", ""), fold, cast(Any, None))  # not needed for folding
    parts = {f"e-{at}": PendingRequest(f"e-{at}", response, at) for at in range(inputs)}
    return [piece for event in records for part in apply(parts, event, NAME) for piece in response.step(part)]


@given(order=st.permutations(range(5)), failing=st.sets(st.integers(0, 4), max_size=2), often=st.integers(1, 3))
def test_kafka_api_sends_one_response_for_any_order_of_events(order: list[int], failing: set[int], often: int) -> None:
    records: list[TokenEvent] = []
    for at in order:
        end: dict[str, Any] = {"request_id": f"e-{at}", "attempt": 1, "owner_epoch": 1, "group": NAME}
        if at in failing:
            error = ResponseError(status=503, code="busy", message=str(at))
            records += [ResponseEnded(**end, finish_reason="error", error=error)] * often
            continue
        vector = array("f", [float(at)]).tobytes()
        records += [Embedded(**end, worker_id="w", vector=vector)] * often
        usage = Usage(prompt_tokens=2, output_tokens=0)
        records += [ResponseEnded(**end, finish_reason="stop", usage=usage)] * often
    (piece,) = folded(records, 5)
    assert (piece.index, piece.last) == (0, True)
    output = msgspec.json.decode(piece.value)
    if failing:
        first = next(at for at in order if at in failing)
        assert (piece.status, output["error"]["message"]) == (503, str(first))
    else:
        assert [one["embedding"] for one in output["data"]] == [[float(at)] for at in range(5)]
        assert output["usage"]["prompt_tokens"] == 10


async def test_adapters_are_served_and_unknown_models_rejected() -> None:
    async with make_scene(loras=("sql",)) as scene:
        pending = start_request(scene, "a", model="sql", cache_salt="mine")
        request = await scene.next_request()
        assert (request.lora_name, request.cache_namespace) == ("sql", "mine")
        reply(scene, request.request_id, [1.0])
        assert (await pending).json()["model"] == "sql"
        refused = await start_request(scene, "a", model="other")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")


async def test_many_inputs_do_not_block_the_event_loop(scene: Scene) -> None:
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    parts = await scene.loaded.prepare(EmbeddingBody(model=NAME, input=["some words"] * 100), ())
    beside.cancel()
    assert len(parts) == 100
    assert turns >= 100
