"""Sampling parameters and structures on the log, and log probabilities in responses."""

import asyncio
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.events.tokens import TokenLogprob, TopLogprob
from forebay.ingress.model import DEFAULT_MODEL, Model
from forebay.ingress.token_bytes import TokenBytes
from tests.ingress.conftest import MODULE_LOOP, NAME, Scene

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


def chat(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 50, **changes}


def text(**changes: Any) -> dict[str, Any]:
    return {"model": NAME, "prompt": "Hello", "max_tokens": 50, **changes}


def start_request(scene: Scene, path: str, body: dict[str, Any]) -> "asyncio.Task[Any]":
    return asyncio.create_task(scene.client.post(path, json=body))


async def sampled(scene: Scene, **changes: Any) -> Sampling:
    pending = start_request(scene, CHAT, chat(**changes))
    request = await scene.next_request()
    scene.refuse(request.request_id, 418, "teapot")
    assert (await pending).status_code == 418
    return request.sampling


async def test_every_parameter_reaches_the_engine(scene: Scene) -> None:
    sampling = await sampled(
        scene,
        presence_penalty=-0.5,
        frequency_penalty=1,
        repetition_penalty=1.1,
        logit_bias={"9": -100, "3": 0.5},
        top_k=7,
        min_p=0.25,
        min_tokens=4,
        stop_token_ids=[5, 6],
        ignore_eos=True,
        logprobs=True,
        top_logprobs=3,
    )
    assert sampling == Sampling(
        max_tokens=50,
        presence_penalty=-0.5,
        frequency_penalty=1.0,
        repetition_penalty=1.1,
        logit_bias=(TokenBias(token_id=3, bias=0.5), TokenBias(token_id=9, bias=-100.0)),
        top_k=7,
        min_p=0.25,
        min_tokens=4,
        stop_token_ids=(5, 6),
        ignore_eos=True,
        logprobs=3,
    )


async def test_defaults_are_not_encoded(scene: Scene) -> None:
    assert await sampled(scene) == Sampling(max_tokens=50)
    assert await sampled(scene, top_k=-1, logprobs=False, logit_bias={}, top_logprobs=0) == Sampling(max_tokens=50)
    assert (await sampled(scene, logprobs=True)).logprobs == 0


NAMED = {"name": "x", "strict": True}
JSON_SCHEMA = StructuredOutput(kind="json_schema", text=json.dumps(SCHEMA, separators=(",", ":")))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, StructuredOutput(kind="json_object")),
        ({"response_format": {"type": "json_schema", "json_schema": {**NAMED, "schema": SCHEMA}}}, JSON_SCHEMA),
        ({"structured_outputs": {"json": SCHEMA}}, JSON_SCHEMA),
        ({"structured_outputs": {"json": JSON_SCHEMA.text, "disable_fallback": False}}, JSON_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, StructuredOutput(kind="json_object")),
        ({"structured_outputs": {"regex": "a+"}}, StructuredOutput(kind="regex", text="a+")),
        ({"structured_outputs": {"choice": ["ja", "no"]}}, StructuredOutput(kind="choice", text='["ja","no"]')),
        ({"structured_outputs": {"grammar": "root ::= x"}}, StructuredOutput(kind="grammar", text="root ::= x")),
        ({"guided_json": SCHEMA}, JSON_SCHEMA),
        ({"guided_json": JSON_SCHEMA.text}, JSON_SCHEMA),
        ({"guided_regex": "a+"}, StructuredOutput(kind="regex", text="a+")),
        ({"guided_choice": ["ja", "no"]}, StructuredOutput(kind="choice", text='["ja","no"]')),
        ({"guided_grammar": "root ::= x"}, StructuredOutput(kind="grammar", text="root ::= x")),
    ],
)
async def test_a_structure_reaches_the_engine(
    scene: Scene, changes: dict[str, Any], expected: StructuredOutput | None
) -> None:
    assert (await sampled(scene, **changes)).structured == expected


@MODULE_LOOP
@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": "1"}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": 1.5}, "min_p"),
        ({"min_tokens": 51}, "min_tokens is 51, which exceeds"),
        ({"logit_bias": {"x": 1}}, "keys of logit_bias must be token ids"),
        ({"logit_bias": {"99999999999999": 1}}, "keys of logit_bias"),
        ({"logit_bias": {"9": 101}}, "logit_bias"),
        ({"logit_bias": {"4000000": 1}}, "logit_bias: token id 4000000 is not in"),
        ({"logit_bias": {str(at): 1 for at in range(1025)}}, "logit_bias"),
        ({"stop_token_ids": [4000000]}, "stop_token_ids: token id 4000000 is not in"),
        ({"stop_token_ids": list(range(65))}, "stop_token_ids"),
        ({"top_logprobs": 2}, "only allowed when logprobs is true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"response_format": {"type": "xml"}}, "type is 'xml'"),
        ({"response_format": {"type": "json_schema"}}, "json_schema.schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "schema is missing"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": []}}}, "schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "x"}}}, "is not allowed with"),
        ({"structured_outputs": {}}, "set one of json"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "mutually exclusive"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs.regex is empty"),
        ({"guided_json": SCHEMA, "response_format": {"type": "json_object"}}, "mutually exclusive"),
        ({"guided_json": "{"}, "guided_json is not valid JSON"),
        ({"guided_json": "[]"}, "guided_json must be a JSON object"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_decoding_backend": "x"}, "guided_decoding_backend is not supported"),
        ({"echo": True}, "echo is not supported"),
        ({"n": 129}, "n: Input should be less than or equal to 128"),
        ({"best_of": 2}, "best_of must be 1"),
    ],
)
async def test_invalid_parameters_are_rejected_by_name(shared_scene: Scene, changes: dict[str, Any], says: str) -> None:
    response = await shared_scene.client.post(CHAT, json=chat(**changes))
    assert response.status_code == 400
    assert says in response.json()["error"]["message"]
    assert shared_scene.requests() == []


async def test_a_structure_above_the_limit_is_rejected(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.openai.sampling.STRUCTURE_BYTES_MAX", 100)
    response = await scene.client.post(CHAT, json=chat(guided_regex="a" * 101))
    assert response.json()["error"]["code"] == "structure_too_large"


def with_alternatives(scene: Scene, words: str) -> tuple[list[int], tuple[TokenLogprob, ...]]:
    """Return the tokens of a text, each with an alternative."""
    token_ids = scene.model.encode(words)
    return token_ids, tuple(
        TokenLogprob(
            logprob=-0.5 - at,
            top=(TopLogprob(token_id=token, logprob=-0.5 - at), TopLogprob(token_id=token + 1, logprob=-9.0)),
        )
        for at, token in enumerate(token_ids)
    )


@pytest.mark.parametrize("stream", [True, False])
async def test_chat_log_probabilities(scene: Scene, stream: bool) -> None:
    words = " the café 😀"
    pending = start_request(scene, CHAT, chat(logprobs=True, top_logprobs=1, stream=stream))
    request = await scene.next_request()
    token_ids, logprobs = with_alternatives(scene, words)
    for at, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        scene.emit(request.request_id, [token], first=at, logprobs=(logprob,))
    scene.end(request.request_id)
    response = await pending
    if stream:
        lines = [line for line in response.text.split("\n\n") if line and not line.endswith("[DONE]")]
        choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
        content = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == words
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == words
    assert [one["logprob"] for one in content] == [-0.5 - at for at in range(len(token_ids))]
    assert all(one["top_logprobs"] == [{k: v for k, v in one.items() if k != "top_logprobs"}] for one in content)
    assert content[0]["token"] == " the"


async def test_completion_log_probabilities(scene: Scene) -> None:
    pending = start_request(scene, TEXT, text(logprobs=2))
    request = await scene.next_request()
    token_ids, logprobs = with_alternatives(scene, " the river")
    scene.emit(request.request_id, token_ids, logprobs=logprobs)
    scene.end(request.request_id)
    given = (await pending).json()["choices"][0]["logprobs"]
    assert "".join(given["tokens"]) == " the river"
    assert given["token_logprobs"] == [one.logprob for one in logprobs]
    assert given["text_offset"] == [len("".join(given["tokens"][:at])) for at in range(len(token_ids))]
    assert [len(one) for one in given["top_logprobs"]] == [2] * len(token_ids)


async def test_tokens_after_a_stop_string_have_no_log_probabilities(scene: Scene) -> None:
    pending = start_request(scene, CHAT, chat(logprobs=True, stop="river"))
    request = await scene.next_request()
    token_ids, logprobs = with_alternatives(scene, " the river ran")
    scene.emit(request.request_id, token_ids, logprobs=logprobs)
    choice = (await pending).json()["choices"][0]
    assert choice["message"]["content"] == " the "
    assert len(choice["logprobs"]["content"]) < len(token_ids)


async def test_log_probabilities_are_null_if_the_engine_reports_none(scene: Scene) -> None:
    pending = start_request(scene, CHAT, chat(logprobs=True))
    request = await scene.next_request()
    scene.reply(request.request_id, " the river")
    choice = (await pending).json()["choices"][0]
    assert (choice["message"]["content"], choice["logprobs"]) == (" the river", None)


@pytest.mark.parametrize("special", [True, False])
async def test_special_tokens_become_text_on_request(scene: Scene, special: bool) -> None:
    pending = start_request(scene, TEXT, text(skip_special_tokens=not special))
    request = await scene.next_request()
    scene.reply(request.request_id, "a<|im_start|>b<|im_end|>")
    output = (await pending).json()["choices"][0]["text"]
    assert output == ("a<|im_start|>b" if special else "ab")


def test_bytes_of_byte_level_tokens() -> None:
    model = Model(DEFAULT_MODEL)
    names = TokenBytes(model.tokenizer)
    for words in (" the café 😀\n", "a<|im_end|>"):
        assert b"".join(names[token] for token in model.encode(words)).decode() == words
    assert names[10**6] == b""


def test_bytes_of_byte_fallback_tokens() -> None:
    vocabulary = {"<unk>": 0, "▁the": 1, "<0x0A>": 2, "<0xC3>": 3, "é": 4}
    tokenizer = Tokenizer(BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    names = TokenBytes(tokenizer)
    assert [names[token] for token in range(1, 5)] == [b" the", b"\n", b"\xc3", "é".encode()]


async def test_minus_infinity_becomes_the_minimum(scene: Scene) -> None:
    pending = start_request(scene, CHAT, chat(logprobs=True, top_logprobs=1))
    request = await scene.next_request()
    (token,) = scene.model.encode("a")
    never = TopLogprob(token_id=token, logprob=float("-inf"))
    scene.emit(request.request_id, [token], logprobs=(TokenLogprob(logprob=float("-inf"), top=(never,)),))
    scene.end(request.request_id)
    (told_of,) = (await pending).json()["choices"][0]["logprobs"]["content"]
    assert (told_of["logprob"], told_of["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)
