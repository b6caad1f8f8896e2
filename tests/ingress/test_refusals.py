"""Invalid requests get a 4xx in OpenAI's format."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from forebay.events.base import unpack_u32
from forebay.ingress.errors import ApiError
from forebay.ingress.model import Model
from forebay.ingress.openai.embeddings import EmbeddingBody
from forebay.ingress.openai.fields import Body
from forebay.ingress.openai.requests import ChatBody, TextBody
from forebay.ingress.prepare import PreparedRequest
from forebay.ingress.streams import Stream
from tests.depth import examples
from tests.ingress import media_model
from tests.ingress.conftest import BODY_MAX, MODULE_LOOP, NAME, Scene, make_scene

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Hello"}]


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HELLO, **changes}


def message(**fields: Any) -> dict[str, Any]:
    return chat(messages=[{"role": "user", "content": "x", **fields}])


@MODULE_LOOP
@pytest.mark.parametrize(
    ("path", "body", "status", "code", "says"),
    [
        (CHAT, b"{", 400, "invalid_json", "not valid JSON"),
        (CHAT, b"", 400, "invalid_json", "not valid JSON"),
        (CHAT, b'{"model": "\xff"}', 400, "invalid_json", "not valid JSON"),
        (CHAT, b"[]", 400, "invalid_value", "the body"),
        (CHAT, {"messages": HELLO}, 400, "invalid_value", "model"),
        (CHAT, chat(model=5), 400, "invalid_value", "model"),
        (CHAT, chat(model="gpt"), 404, "model_not_found", "'gpt'"),
        (CHAT, chat(messages=[]), 400, "invalid_value", "messages"),
        (CHAT, chat(messages="hi"), 400, "invalid_value", "messages"),
        (CHAT, message(role="boss"), 400, "invalid_value", "messages[0].role"),
        (CHAT, message(content=None), 400, "invalid_value", "messages[0].content is missing"),
        (CHAT, message(content=5), 400, "invalid_value", "messages[0].content"),
        (CHAT, message(content=[{"type": "text"}]), 400, "invalid_value", "messages[0].content[0].text is missing"),
        (CHAT, message(tool_calls=[1]), 400, "invalid_value", "messages[0].tool_calls"),
        (CHAT, message(tool_call_id="1"), 400, "invalid_value", "messages[0].tool_call_id requires the role tool"),
        (CHAT, chat(max_tokens=0), 400, "invalid_value", "max_tokens"),
        (CHAT, chat(max_tokens=-1), 400, "invalid_value", "max_tokens"),
        (CHAT, chat(max_tokens=10**9), 400, "context_length_exceeded", "131072"),
        (CHAT, chat(max_tokens=10**30), 400, "context_length_exceeded", "131072"),
        (CHAT, chat(max_tokens="5"), 400, "invalid_value", "max_tokens"),
        (CHAT, chat(max_tokens=1.5), 400, "invalid_value", "max_tokens"),
        (CHAT, b'{"model": "test-model", "messages": [], "temperature": NaN}', 400, "invalid_value", ""),
        (CHAT, chat(temperature=3), 400, "invalid_value", "temperature"),
        (CHAT, chat(top_p=0), 400, "invalid_value", "top_p"),
        (CHAT, chat(n=True), 400, "invalid_value", "n"),
        (CHAT, chat(logprobs=0), 400, "invalid_value", "logprobs"),
        (CHAT, chat(stop=["a"] * 5), 400, "invalid_value", "stop"),
        (CHAT, chat(stop=""), 400, "invalid_value", "stop"),
        (CHAT, chat(stop=["a" * 1_025]), 400, "invalid_value", "a stop string is too long"),
        (CHAT, chat(stream_options={"include_usage": True}), 400, "invalid_value", "stream_options"),
        (TEXT, {"model": NAME, "prompt": ""}, 400, "empty_prompt", "empty"),
        (TEXT, {"model": NAME, "prompt": []}, 400, "empty_prompt", "empty"),
        (TEXT, {"model": NAME, "prompt": [10**6]}, 400, "invalid_value", "token id"),
        (TEXT, {"model": NAME, "prompt": [-1]}, 400, "invalid_value", "prompt"),
        (CHAT, b"x" * (BODY_MAX + 1), 413, "body_too_large", f"{BODY_MAX:,}"),
        ("/v1/nothing", {}, 404, "not_found", "/v1/nothing"),
        ("/v1/models", {}, 405, "method_not_allowed", "POST"),
    ],
)
async def test_invalid_bodies_are_rejected_by_field_name(
    shared_scene: Scene, path: str, body: Any, status: int, code: str, says: str
) -> None:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    before = shared_scene.refusals()
    response = await shared_scene.client.post(path, content=content)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error["code"] == code
    assert says in error["message"]
    assert set(error) == {"message", "type", "param", "code"}
    assert shared_scene.refusals() - before == {code: 1}
    assert shared_scene.requests() == []


async def test_a_response_may_be_sent_back_as_a_message(scene: Scene) -> None:
    pending = scene.start(CHAT, chat())
    request = await scene.next_request()
    scene.reply(request.request_id, " good day")
    message = (await pending).json()["choices"][0]["message"]
    again = scene.start(CHAT, chat(messages=[*HELLO, message, *HELLO]))
    request = await scene.next_request()
    turns = [*HELLO, {"role": "assistant", "content": " good day"}, *HELLO]
    assert unpack_u32(request.token_ids) == scene.model.encode(scene.model.render(turns))
    scene.end(request.request_id)
    assert (await again).status_code == 200


async def test_a_declared_length_beyond_64_bits_is_too_large(scene: Scene) -> None:
    response = await scene.client.post(CHAT, content=b"{}", headers={"content-length": "9" * 5_000})
    assert response.status_code == 413


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.sampled_from(
    [
        *("model", "messages", "prompt", "max_tokens", "temperature", "stop", "stream", "seed", "n"),
        *("stream_options", "nvext", "cache_salt", "odd"),
    ]
)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def refusing_scene() -> AsyncIterator[Scene]:
    """Yield a scene that rejects valid bodies, too."""
    async with make_scene(timeout_s=0.000_001) as made:
        made.ingress.submit = _refuse_all  # type: ignore[method-assign]
        yield made


@MODULE_LOOP
@examples(1.5)
@given(body=st.dictionaries(FIELDS, JSON, max_size=6), path=st.sampled_from([CHAT, TEXT]))
async def test_random_bodies_get_a_4xx(refusing_scene: Scene, body: dict[str, Any], path: str) -> None:
    body.setdefault("model", NAME)
    response = await refusing_scene.client.post(path, content=json.dumps(body).encode())
    assert 400 <= response.status_code < 500, response.text
    assert response.json()["error"]["code"]


@MODULE_LOOP
@given(raw=st.binary(max_size=64))
async def test_random_bytes_get_a_4xx(refusing_scene: Scene, raw: bytes) -> None:
    response = await refusing_scene.client.post(CHAT, content=raw)
    assert 400 <= response.status_code < 500, response.text


async def _refuse_all(request_id: str, prepared: PreparedRequest) -> Stream:
    raise ApiError(418, "valid", "the body was valid")


async def test_health_and_models(scene: Scene) -> None:
    assert (await scene.client.get("/live")).status_code == 200
    assert (await scene.client.get("/ready")).status_code == 200
    scene.is_ready = False
    for path in ("/ready", "/health"):
        response = await scene.client.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert (await scene.client.get("/live")).status_code == 200
    models = (await scene.client.get("/v1/models")).json()
    assert [card["id"] for card in models["data"]] == [NAME]
    assert (await scene.client.get(f"/v1/models/{NAME}")).json()["object"] == "model"
    assert (await scene.client.get("/v1/models/gpt")).status_code == 404
    assert "dynamo_frontend_inflight_requests" in (await scene.client.get("/metrics")).text
    assert CHAT in (await scene.client.get("/openapi.json")).json()["paths"]


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [
        (ChatBody, "stop", [0.5] * 5_000),
        (ChatBody, "messages", [{"role": "user", "content": [0.5] * 5_000}]),
        (ChatBody, "logit_bias", {str(at): "x" for at in range(5_000)}),
        (ChatBody, "nvext", {"routing_constraints": {"preferred_taints": {str(at): "x" for at in range(5_000)}}}),
        (TextBody, "prompt", [0.5] * 5_000),
        (EmbeddingBody, "input", [0.5] * 5_000),
        (EmbeddingBody, "input", ["a"] * 2_000 + [1]),
        (EmbeddingBody, "input", [[0.5] * 5_000]),
        (EmbeddingBody, "input", [[0.5]] * 2_000),
    ],
)
def test_validation_stops_at_the_first_of_many_errors(kind: type[Body], field: str, value: Any) -> None:
    """Each error takes a kilobyte, so a large hostile body would exhaust the memory."""
    whole = {"model": NAME, "messages": HELLO, "prompt": "x", "input": "x", field: value}
    fields = {name: given for name, given in whole.items() if name in kind.model_fields}
    with pytest.raises(ValidationError) as refused:
        kind.model_validate_json(json.dumps(fields))
    assert refused.value.error_count() < 10


@pytest.mark.parametrize("template", ["{{ 1 // n }}", "{{ [1][n + 1] + 1 }}", "{{ range(9 ** 9 + n) }}"])
async def test_arguments_that_break_a_template_are_rejected(template: str, tmp_path: Path) -> None:
    """Otherwise the Kafka API would read such a record again and again."""
    model = Model(media_model.make(tmp_path, template))
    async with make_scene(model) as scene:
        reply = await scene.client.post(CHAT, json=chat(chat_template_kwargs={"n": 0}))
    assert reply.status_code == 400
    assert "chat template rejects" in reply.json()["error"]["message"]


@pytest.mark.parametrize(("path", "field"), [(TEXT, "prompt"), ("/v1/embeddings", "input")])
async def test_a_prompt_beyond_the_context_is_rejected_before_it_is_hashed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, path: str, field: str
) -> None:
    """Hashing millions of tokens would block the event loop."""
    monkeypatch.setattr("forebay.ingress.prepare.sequence_hashes", lambda *_: 1 // 0)
    scene.model.context_tokens = 8
    reply = await scene.client.post(path, json={"model": NAME, field: [1] * 9})
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("body", [chat(model="x" * 100_000), chat(**{"x" * 100_000: 1})])
async def test_long_values_are_truncated_in_errors(scene: Scene, body: dict[str, Any]) -> None:
    reply = await scene.client.post(CHAT, json=body)
    assert reply.status_code in (400, 404)
    assert len(reply.content) < 5_000
