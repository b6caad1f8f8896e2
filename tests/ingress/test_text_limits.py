"""Requests beyond the limits are rejected before they are stored, decoded or tokenized completely."""

import asyncio
import base64
import json
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.base import unpack_u32
from forebay.ingress.body_limits import SMALL_BYTES, BodyLimits, BodyMemory
from forebay.ingress.errors import ApiError
from forebay.ingress.kafka_api.request import body_of
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.tokenizer import CHARS_PER_TOKEN, INLINE_CHARS_MAX, PIECE_CHARS, QUEUE_CHARS_MAX, encode_prompt
from forebay.transport.base import Record
from tests.depth import examples
from tests.ingress import media_model
from tests.ingress.conftest import (
    BODY_MAX,
    CHAT,
    EMBED,
    MODULE_LOOP,
    NAME,
    RESPONSES,
    ROUTE,
    TEXT,
    Scene,
    error,
    make_scene,
)
from tests.system import until

CONTEXT = 2_000
WORDS = "The log is the truth, and every decision on it can be derived again. "
PIXEL = base64.b64decode("iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg==")


class CountingModel(Model):
    """A model with a small context that records the lengths of tokenized texts."""

    def __init__(self, directory: Path, context: int = CONTEXT) -> None:
        super().__init__(directory)
        self.context_tokens = context
        self.whole: list[int] = []

    def encode(self, text: str, *, special: bool = False) -> list[int]:
        self.whole.append(len(text))
        return super().encode(text, special=special)


COUNTED = CountingModel(DEFAULT_MODEL)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def short() -> AsyncIterator[Scene]:
    """Yield a scene whose model has a small context."""
    async with make_scene(CountingModel(DEFAULT_MODEL)) as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def large() -> AsyncIterator[Scene]:
    async with make_scene(body_bytes_max=4 << 20) as made:
        yield made


def words(chars: int) -> str:
    return (WORDS * (chars // len(WORDS) + 1))[:chars]


def bodies(text: str) -> list[tuple[str, dict[str, Any]]]:
    messages = [{"role": "user", "content": text}]
    parts = [{"role": "user", "content": [{"type": "text", "text": text}]}]
    return [
        (TEXT, {"prompt": text}),
        (CHAT, {"messages": messages}),
        (CHAT, {"messages": parts}),
        (EMBED, {"input": text}),
        (EMBED, {"input": ["short", text]}),
        (ROUTE, {"prompt": text}),
        (ROUTE, {"messages": messages}),
    ]


@MODULE_LOOP
@pytest.mark.parametrize(("path", "body"), bodies(words(BODY_MAX - 1_000)))
async def test_a_text_beyond_the_context_is_not_tokenized_whole(short: Scene, path: str, body: Any) -> None:
    response = await short.client.post(path, json={"model": NAME, **body})
    assert error(response) == (400, "context_length_exceeded")
    assert f"{CONTEXT}" in response.json()["error"]["message"]
    assert isinstance(short.model, CountingModel)
    assert max(short.model.whole, default=0) <= CONTEXT * CHARS_PER_TOKEN


@examples(0.6)
@given(
    parts=st.lists(st.tuples(st.text(min_size=1, max_size=30), st.integers(1, 3_000)), min_size=1, max_size=6),
    context=st.integers(200, 4_000),
)
def test_only_texts_beyond_the_context_are_rejected(parts: list[tuple[str, int]], context: int) -> None:
    """Rejected texts have more tokens than the context; accepted texts get the tokens of the model."""
    text = "".join(part * often for part, often in parts)
    COUNTED.context_tokens = context
    whole = COUNTED.encode(text)
    try:
        assert encode_prompt(COUNTED, text, "prompt", "prompt") == whole
    except ApiError as error:
        assert error.code == "context_length_exceeded"
        assert len(whole) > context


async def test_a_long_prompt_that_fits_has_the_tokens_of_the_whole_text() -> None:
    model = CountingModel(DEFAULT_MODEL, 35_000)
    long = max((token for token in model.tokenizer.get_vocab() if token[0] == "Ġ"), key=len).replace("Ġ", " ")
    text = words(PIECE_CHARS) + long * 12_000 + words(PIECE_CHARS)  # few tokens for its length: it is counted first
    assert len(text) > model.context_tokens * CHARS_PER_TOKEN
    async with make_scene(model) as scene:
        pending = scene.start(TEXT, {"model": NAME, "prompt": text, "max_tokens": 1})
        request = await scene.next_request()
        assert unpack_u32(request.token_ids) == Model(DEFAULT_MODEL).encode(text)
        scene.end(request.request_id)
        assert (await pending).status_code == 200


async def test_a_full_tokenizer_queue_is_503_but_short_prompts_are_served(scene: Scene) -> None:
    free = threading.Event()
    try:
        held = [asyncio.create_task(scene.front.tokenizer_pool.run(free.wait, QUEUE_CHARS_MAX // 2)) for _ in range(2)]
        await until(lambda: scene.front.tokenizer_pool.chars_queued == QUEUE_CHARS_MAX)
        for path, body in bodies(words(INLINE_CHARS_MAX * 2)):
            response = await scene.client.post(path, json={"model": NAME, **body})
            assert error(response) == (503, "overloaded"), path
            assert response.headers["retry-after"]
        pending = scene.start(TEXT, {"model": NAME, "prompt": "short"})
        scene.end((await scene.next_request()).request_id)
        assert (await pending).status_code == 200
    finally:
        free.set()
    await asyncio.gather(*held)
    await until(lambda: scene.front.tokenizer_pool.chars_queued == 0)
    pending = scene.start(TEXT, {"model": NAME, "prompt": words(INLINE_CHARS_MAX * 2)})
    scene.end((await scene.next_request()).request_id)
    assert (await pending).status_code == 200


async def test_rendering_stops_at_the_limit(tmp_path: Path) -> None:
    template = "{% for i in range(100000) %}{{ messages[0]['content'] }}{% endfor %}"
    async with make_scene(Model(media_model.make(tmp_path / "m", template))) as scene:
        body = {"model": NAME, "messages": [{"role": "user", "content": words(100_000)}]}
        response = await scene.client.post(CHAT, json=body)
        assert error(response) == (400, "context_length_exceeded")
        assert "rendered prompt exceeds" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (TEXT, {"prompt": [1] * 400_000}, 413, "too_many_values"),
        (TEXT, {"prompt": [1] * 150_000}, 400, "context_length_exceeded"),
        (EMBED, {"input": [[1]] * 200_000}, 413, "too_many_values"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "metadata": [[]] * 400_000}, 413, "too_many_values"),
        (CHAT, {"messages": [{}] * 400_000}, 413, "too_many_values"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 20_000}, 400, "invalid_value"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 20_000}]},
            400,
            "invalid_value",
        ),
    ],
)
@MODULE_LOOP
async def test_bodies_with_too_many_values_are_rejected(
    large: Scene, path: str, body: Any, status: int, code: str
) -> None:
    response = await large.client.post(path, content=json.dumps({"model": NAME, **body}))
    assert error(response) == (status, code)


@pytest.mark.parametrize("name", ["messages", "tools"])
def test_long_lists_are_rejected_without_validation(name: str) -> None:
    """Validating 60,000 messages takes 0.1 s, in which an event loop does nothing else."""
    with pytest.raises(ApiError, match=f"{name} has 30,000 elements; the limit is "):
        BodyLimits().require(json.dumps({name: [{}] * 30_000}).encode())
    BodyLimits().require(json.dumps({name: 5, "a": "x" * SMALL_BYTES}).encode())


def test_separators_within_strings_do_not_count() -> None:
    limits = BodyLimits(values_max=10)
    limits.require(json.dumps({"a": 'quoted \\" [' + ",{[" * SMALL_BYTES + "\\", "b": [1, 2]}).encode())
    with pytest.raises(ApiError, match="14 JSON values; the limit is 10"):
        limits.require(json.dumps({"a": "x" * SMALL_BYTES, "b": [1] * 11}).encode())
    limits.require(b'{"' + b'\\"' * (1 << 20))  # linear, also for a string without an end


async def test_the_memory_of_all_bodies_is_bounded(scene: Scene) -> None:
    """A second large body is rejected while the first is read. Small bodies are accepted."""
    scene.front.bodies = BodyMemory(BodyLimits(text_bytes_max=BODY_MAX), BODY_MAX)
    large = {"model": NAME, "prompt": "x", "metadata": {"a": "x" * (BODY_MAX // 2)}}
    more = asyncio.Event()

    async def slowly() -> Any:
        raw = json.dumps(large).encode()
        yield raw[:-1]
        await more.wait()
        yield raw[-1:]

    first = asyncio.create_task(scene.client.post(TEXT, content=slowly()))
    await until(lambda: scene.front.bodies.held)
    response = await scene.client.post(TEXT, json=large)
    assert error(response) == (503, "overloaded")
    assert response.headers["retry-after"]
    small = scene.start(TEXT, {"model": NAME, "prompt": "x"})
    scene.end((await scene.next_request()).request_id)
    assert (await small).status_code == 200
    more.set()
    scene.end((await scene.next_request()).request_id)
    assert (await first).status_code == 200
    assert scene.front.bodies.held == 0


def image_body(image_bytes: int, text_bytes: int) -> dict[str, Any]:
    url = "data:image/png;base64," + base64.b64encode(PIXEL + bytes(image_bytes)).decode()
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": words(text_bytes)}]
    return {"model": NAME, "messages": [{"role": "user", "content": parts}]}


async def test_images_have_a_higher_limit_than_text(tmp_path: Path) -> None:
    model = Model(media_model.make(tmp_path / "m"))
    limits: dict[str, Any] = {"body_bytes_max": 100_000, "media_body_bytes_max": 400_000}
    async with make_scene(model, **limits) as scene:
        pending = scene.start(CHAT, image_body(200_000, 100))
        scene.end((await scene.next_request()).request_id)
        assert (await pending).status_code == 200
        (image, _) = image_body(200_000, 100)["messages"][0]["content"]
        part = {"type": "input_image", "image_url": image["image_url"]["url"]}
        pending = scene.start(RESPONSES, {"model": NAME, "input": [{"role": "user", "content": [part]}]})
        scene.end((await scene.next_request()).request_id)
        assert (await pending).status_code == 200
        for body, option in (
            (image_body(200_000, 100_000), "--body-bytes-max"),
            (image_body(400_000, 100), "--media-body-bytes-max"),
            ({"model": NAME, "messages": [{"role": "user", "content": "x" * 100_001}]}, "--body-bytes-max"),
        ):
            response = await scene.client.post(CHAT, json=body)
            assert error(response) == (413, "body_too_large")
            assert option in response.json()["error"]["message"]
    async with make_scene(**limits) as scene:  # of a model without images
        response = await scene.client.post(CHAT, json=image_body(100_000, 100))
        assert error(response) == (413, "body_too_large")


def test_the_kafka_api_has_the_same_limits() -> None:
    def record(value: bytes) -> Record:
        return Record(
            topic="openai-requests", offset=0, value=value, at_us=0, key=b"", headers={"path": TEXT}, partition=0
        )

    limits = BodyLimits(text_bytes_max=200_000, values_max=10)
    for value, code in ((b"x" * 200_001, "body_too_large"), (b"[" + b"1," * 50_000, "too_many_values")):
        with pytest.raises(ApiError) as raised:
            body_of(record(value), limits)
        assert raised.value.code == code
