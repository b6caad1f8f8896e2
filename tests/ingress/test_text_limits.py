"""Requests beyond the limits are rejected before they are stored, decoded or tokenized completely."""

import asyncio
import base64
import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from forebay.events.base import unpack_u32
from forebay.ingress.errors import ApiError
from forebay.ingress.http.body import SMALL_BYTES, BodyLimits, BodyMemory
from forebay.ingress.kafka_api.request import body_of
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.token_bytes import BYTE_OF, text_chars_max
from forebay.ingress.tokenizer import CHARS_PER_TOKEN, INLINE_CHARS_MAX, PIECE_CHARS, QUEUE_CHARS_MAX, encode_prompt
from forebay.transport.base import Record
from tests.depth import examples
from tests.ingress import media_model
from tests.ingress.conftest import BODY_MAX, NAME, Scene, make_scene
from tests.system import until

CHAT, TEXT, EMBED, ROUTE = "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/route"
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


@pytest.mark.parametrize("bounded", [True, False])
@pytest.mark.parametrize(("path", "body"), bodies(words(BODY_MAX - 1_000)))
async def test_a_text_beyond_the_context_is_not_tokenized_whole(path: str, body: Any, *, bounded: bool) -> None:
    model = copy.copy(COUNTED)
    model.context_tokens, model.whole = CONTEXT, []
    model.text_chars_max = CONTEXT * 12 if bounded else None  # else the pieces are counted
    async with make_scene(model) as scene:
        response = await scene.client.post(path, json={"model": NAME, **body})
        assert response.status_code == 400
        error = response.json()["error"]
        assert error["code"] == "context_length_exceeded"
        assert f"{CONTEXT}" in error["message"]
        assert max(model.whole, default=0) <= CONTEXT * CHARS_PER_TOKEN


@examples(0.6)
@given(
    parts=st.lists(st.tuples(st.text(min_size=1, max_size=30), st.integers(1, 3_000)), min_size=1, max_size=6),
    context=st.integers(200, 4_000),
)
def test_only_texts_beyond_the_context_are_rejected(parts: list[tuple[str, int]], context: int) -> None:
    """Rejected texts have more tokens than the context; accepted texts get the tokens of the model."""
    text = "".join(part * often for part, often in parts)
    COUNTED.context_tokens, COUNTED.text_chars_max = context, None
    whole = COUNTED.encode(text)
    try:
        assert encode_prompt(COUNTED, text, "prompt", "prompt") == whole
    except ApiError as error:
        assert error.code == "context_length_exceeded"
        assert len(whole) > context


async def test_a_long_prompt_that_fits_has_the_tokens_of_the_whole_text() -> None:
    model = CountingModel(DEFAULT_MODEL, 35_000)
    model.text_chars_max = None
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
        held = [
            asyncio.create_task(scene.ingress.tokenizer_pool.run(free.wait, QUEUE_CHARS_MAX // 2)) for _ in range(2)
        ]
        await until(lambda: scene.ingress.tokenizer_pool.chars_queued == QUEUE_CHARS_MAX)
        for path, body in bodies(words(INLINE_CHARS_MAX * 2)):
            response = await scene.client.post(path, json={"model": NAME, **body})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded"), path
            assert response.headers["retry-after"]
        pending = scene.start(TEXT, {"model": NAME, "prompt": "short"})
        scene.end((await scene.next_request()).request_id)
        assert (await pending).status_code == 200
    finally:
        free.set()
    await asyncio.gather(*held)
    await until(lambda: scene.ingress.tokenizer_pool.chars_queued == 0)
    pending = scene.start(TEXT, {"model": NAME, "prompt": words(INLINE_CHARS_MAX * 2)})
    scene.end((await scene.next_request()).request_id)
    assert (await pending).status_code == 200


async def test_rendering_stops_at_the_limit(tmp_path: Path) -> None:
    template = "{% for i in range(100000) %}{{ messages[0]['content'] }}{% endfor %}"
    async with make_scene(Model(media_model.make(tmp_path / "m", template))) as scene:
        body = {"model": NAME, "messages": [{"role": "user", "content": words(100_000)}]}
        response = await scene.client.post(CHAT, json=body)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "rendered prompt exceeds" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (TEXT, {"prompt": [1] * 400_000}, 413, "too_many_values"),
        (TEXT, {"prompt": [1] * 150_000}, 400, "context_length_exceeded"),
        (EMBED, {"input": [[1]] * 200_000}, 413, "too_many_values"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}], "metadata": [[]] * 400_000}, 413, "too_many_values"),
        (CHAT, {"messages": [{}] * 400_000}, 413, "too_many_values"),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "text", "text": ""}] * 20_000}]},
            400,
            "invalid_value",
        ),
    ],
)
async def test_bodies_with_too_many_values_are_rejected(path: str, body: Any, status: int, code: str) -> None:
    async with make_scene(body_bytes_max=4 << 20) as scene:
        response = await scene.client.post(path, content=json.dumps({"model": NAME, **body}))
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


def test_separators_within_strings_do_not_count() -> None:
    limits = BodyLimits(values_max=10)
    limits.require(json.dumps({"a": 'quoted \\" [' + ",{[" * SMALL_BYTES + "\\", "b": [1, 2]}).encode())
    with pytest.raises(ApiError, match="14 JSON values; the limit is 10"):
        limits.require(json.dumps({"a": "x" * SMALL_BYTES, "b": [1] * 11}).encode())
    limits.require(b'{"' + b'\\"' * (1 << 20))  # linear, also for a string without an end


async def test_the_memory_of_all_bodies_is_bounded(scene: Scene) -> None:
    """A second large body is rejected while the first is read. Small bodies are accepted."""
    scene.ingress.front.bodies = BodyMemory(BodyLimits(text_bytes_max=BODY_MAX), BODY_MAX)
    large = {"model": NAME, "prompt": "x", "metadata": {"a": "x" * (BODY_MAX // 2)}}
    more = asyncio.Event()

    async def slowly() -> Any:
        raw = json.dumps(large).encode()
        yield raw[:-1]
        await more.wait()
        yield raw[-1:]

    first = asyncio.create_task(scene.client.post(TEXT, content=slowly()))
    await until(lambda: scene.ingress.front.bodies.held)
    response = await scene.client.post(TEXT, json=large)
    assert (response.status_code, response.json()["error"]["code"]) == (503, "overloaded")
    assert response.headers["retry-after"]
    small = scene.start(TEXT, {"model": NAME, "prompt": "x"})
    scene.end((await scene.next_request()).request_id)
    assert (await small).status_code == 200
    more.set()
    scene.end((await scene.next_request()).request_id)
    assert (await first).status_code == 200
    assert scene.ingress.front.bodies.held == 0


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
        for body, option in (
            (image_body(200_000, 100_000), "--body-bytes-max"),
            (image_body(400_000, 100), "--media-body-bytes-max"),
            ({"model": NAME, "messages": [{"role": "user", "content": "x" * 100_001}]}, "--body-bytes-max"),
        ):
            response = await scene.client.post(CHAT, json=body)
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")
            assert option in response.json()["error"]["message"]
    async with make_scene(**limits) as scene:  # of a model without images
        response = await scene.client.post(CHAT, json=image_body(100_000, 100))
        assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


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


def byte_level(**changes: Any) -> Tokenizer:
    vocabulary = {char: at for at, char in enumerate(BYTE_OF)} | {"Ġthe": 256}
    made = Tokenizer(models.BPE(vocabulary, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_the_maximum_text_length_per_kind_of_tokenizer() -> None:
    assert text_chars_max(byte_level(), 10) == 10 * len("Ġthe".encode())
    assert text_chars_max(byte_level(normalizer=normalizers.NFC()), 10) == 4 * 10 * len("Ġthe".encode())
    fallback = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁word": 256}
    sentencepiece = Tokenizer(models.BPE(fallback, [], byte_fallback=True))
    sentencepiece.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert text_chars_max(sentencepiece, 10) == 10 * len("▁word".encode())


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(byte_level(normalizer=normalizers.NFKC()), id="may shorten a text by any factor"),
        pytest.param(byte_level(normalizer=normalizers.Strip()), id="strips"),
        pytest.param(byte_level(normalizer=normalizers.Replace("aa", "a")), id="replaces by less"),
        pytest.param(
            byte_level(
                pre_tokenizer=pre_tokenizers.Sequence(
                    [pre_tokenizers.Split(" ", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
                )
            ),
            id="removes",
        ),
        pytest.param(byte_level(pre_tokenizer=pre_tokenizers.WhitespaceSplit()), id="drops white space"),
        pytest.param(Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?")), id="unknown words"),
        pytest.param(Tokenizer(models.BPE({"a": 0}, [])), id="unknown characters"),
    ],
)
def test_a_tokenizer_that_may_drop_text_has_no_maximum_length(made: Tokenizer) -> None:
    assert text_chars_max(made, 10) is None
    swallows = byte_level()
    swallows.add_special_tokens([AddedToken("<end>", rstrip=True)])
    assert text_chars_max(swallows, 10) is None
    truncates = byte_level()
    truncates.enable_truncation(5)
    assert text_chars_max(truncates, 10) is None


@given(text=st.text(max_size=400), normalizer=st.sampled_from([None, normalizers.NFC()]))
def test_no_text_exceeds_the_maximum_length_of_its_tokens(text: str, normalizer: Any) -> None:
    made = byte_level(normalizer=normalizer)
    bound = text_chars_max(made, len(made.encode(text).ids))
    assert bound is not None
    assert len(text) <= bound
