"""Routes that tokenize and detokenize, the version, and unknown fields of bodies."""

import asyncio
from typing import Any

import msgspec
import pytest

from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api.request import body_of
from forebay.transport.base import Record
from tests.ingress.conftest import NAME, Scene, make_scene

HELLO = {"role": "user", "content": "Hello there"}
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_a_text_is_tokenized(scene: Scene) -> None:
    given = (await scene.client.post("/tokenize", json={"model": NAME, "prompt": "Hello there"})).json()
    tokens = scene.model.encode("Hello there")
    assert given == {"count": len(tokens), "max_model_len": 131_072, "tokens": tokens, "token_strs": None}
    given = (await scene.client.post("/tokenize", json={"prompt": "Hello there", "return_token_strs": True})).json()
    assert given["token_strs"] == [scene.model.tokenizer.id_to_token(token) for token in tokens]


async def test_a_chat_is_tokenized_with_its_template_and_tools(scene: Scene) -> None:
    for body in ({"messages": [HELLO]}, {"messages": [HELLO], "tools": [TOOL], "max_tokens": 5, "model": NAME}):
        given = (await scene.client.post("/tokenize", json=body)).json()
        tools: Any = body.get("tools", ())
        tokens = scene.model.encode(scene.model.render([HELLO], tools))
        assert (given["tokens"], given["count"]) == (tokens, len(tokens))
    assert scene.requests() == []


async def test_tokens_are_turned_into_text(scene: Scene) -> None:
    prompt = scene.model.render([HELLO])
    body = {"model": NAME, "tokens": scene.model.encode(prompt)}
    assert (await scene.client.post("/detokenize", json=body)).json() == {"prompt": prompt}
    assert (await scene.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "says"),
    [
        ("/tokenize", {}, 400, "neither messages nor a prompt"),
        ("/tokenize", {"prompt": ["a", "b"]}, 400, "one request per prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "unknown model"),
        ("/tokenize", {"prompt": "a", "color": 1}, 400, "unknown parameter 'color'"),
        ("/tokenize", {"messages": [HELLO], "documents": [{}]}, 400, "documents"),
        ("/tokenize", {"messages": []}, 400, "messages"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": [10**6]}, 400, "token id 1000000"),
        ("/detokenize", {"tokens": [1], "model": "other"}, 404, "unknown model"),
    ],
)
async def test_invalid_bodies_are_rejected(
    scene: Scene, path: str, body: dict[str, Any], status: int, says: str
) -> None:
    response = await scene.client.post(path, json=body)
    assert (response.status_code, says in response.json()["error"]["message"]) == (status, True), response.text


async def test_the_version_is_that_of_the_page(scene: Scene) -> None:
    version = (await scene.client.get("/version")).json()["version"]
    assert version in (await scene.client.get("/", headers={"accept": "text/html"})).text


UNKNOWN: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [HELLO], "color": 1}),
    ("/v1/chat/completions", {"messages": [{**HELLO, "color": 1}]}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", "color": 1}]}]}),
    ("/v1/chat/completions", {"messages": [HELLO], "tools": [{**TOOL, "color": 1}]}),
    ("/v1/chat/completions", {"messages": [HELLO], "tools": [{**TOOL, "function": {"name": "f", "color": 1}}]}),
    ("/v1/chat/completions", {"messages": [HELLO], "response_format": {"type": "text", "color": 1}}),
    ("/v1/chat/completions", {"messages": [HELLO], "stream": True, "stream_options": {"color": 1}}),
    ("/v1/completions", {"prompt": "a", "color": 1}),
    ("/v1/completions", {"prompt": "a", "max_tokens": 2.0, "color": 1}),
    ("/v1/embeddings", {"input": "a", "color": 1}),
]


@pytest.mark.parametrize(("path", "body"), UNKNOWN)
async def test_unknown_fields_are_rejected_by_name_unless_ignored(path: str, body: dict[str, Any]) -> None:
    raw = msgspec.json.encode({"model": NAME, **body})
    async with make_scene() as strict:
        response = await strict.client.post(path, content=raw)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "unknown_parameter")
        assert response.json()["error"]["param"].endswith("color")
    async with make_scene(ignore_unknown_fields=True) as lenient:
        pending = asyncio.create_task(lenient.client.post(path, content=raw))
        lenient.refuse((await lenient.next_request()).request_id, 503, "queue_timeout")
        assert (await pending).json()["error"]["code"] == "queue_timeout"


async def test_unsupported_values_are_rejected_even_if_unknown_fields_are_ignored() -> None:
    async with make_scene(ignore_unknown_fields=True) as lenient:
        for body in ({"prompt": "a", "best_of": 2}, {"prompt": "a", "n": 0}):
            response = await lenient.client.post("/v1/completions", json={"model": NAME, **body})
            assert response.status_code == 400


async def test_the_kafka_api_ignores_unknown_fields_too(scene: Scene) -> None:
    value = msgspec.json.encode({"model": NAME, "messages": [HELLO], "color": 1})
    record = Record("openai-requests", 0, 0, 0, value)
    with pytest.raises(ApiError, match="unknown parameter 'color'"):
        body_of(record, scene.ingress.front.bodies.limits)
    assert body_of(record, scene.ingress.front.bodies.limits, ignores_unknown=True).model == NAME
