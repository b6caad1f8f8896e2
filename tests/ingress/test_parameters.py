"""Parameters from bodies and headers: sampling, structures and routing hints on the log; log probabilities."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders
from tokenizers.models import BPE

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.events.codec import decode, encode
from forebay.events.requests import (
    RequestSubmitted,
    RouterOverride,
    RoutingHints,
    Sampling,
    StructuredOutput,
    TaintWeight,
    TokenBias,
)
from forebay.events.tokens import TokenLogprob, TopLogprob
from forebay.events.topics import REQUESTS
from forebay.ingress.errors import ApiError
from forebay.ingress.model import DEFAULT_MODEL, InvalidModel, Model
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.nvext import ROUTING_HEADERS, Nvext, routing_headers, routing_of
from forebay.ingress.openai.requests import TextBody
from forebay.ingress.settings import IngressSettings
from forebay.ingress.token_bytes import TokenBytes
from forebay.runtime.errors import ConfigError
from tests.depth import examples
from tests.ingress.conftest import CHAT, MODULE_LOOP, NAME, TEXT, Scene, chat, error, events, make_scene, text
from tests.system import submitted

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


async def sampled(scene: Scene, **changes: Any) -> Sampling:
    pending = scene.start(CHAT, chat(**changes))
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


def model_with(folder: Path, **generation: Any) -> Model:
    shutil.copytree(DEFAULT_MODEL, folder / "m")
    (folder / "m/generation_config.json").write_text(json.dumps(generation))
    return Model(folder / "m")


async def test_missing_parameters_have_the_defaults_of_the_model(tmp_path: Path) -> None:
    defaults: dict[str, Any] = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.1}
    defaults["repetition_penalty"] = 1.05
    model = model_with(tmp_path, **defaults, max_new_tokens=300, do_sample=True, eos_token_id=None)
    async with make_scene(model) as scene:
        unset = {"temperature": None, "max_tokens": None}
        assert await sampled(scene, **unset) == Sampling(max_tokens=300, **defaults)
        own = {"temperature": 0, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1, "max_tokens": 400}
        assert await sampled(scene, **own) == Sampling(max_tokens=400, temperature=0.0)


@pytest.mark.parametrize("max_tokens", [None, 9, 40])
async def test_a_response_has_at_most_what_the_prompt_leaves_of_the_context(
    tmp_path: Path, max_tokens: int | None
) -> None:
    async with make_scene(model_with(tmp_path, max_new_tokens=None)) as scene:
        scene.model.context_tokens = 40
        pending = scene.start(TEXT, {"model": NAME, "prompt": [1] * 32, "max_tokens": max_tokens})
        request = await scene.next_request()
        assert request.sampling.max_tokens == 8
        scene.refuse(request.request_id, 418, "teapot")
        await pending
        response = await scene.client.post(TEXT, json={"model": NAME, "prompt": [1] * 40, "max_tokens": max_tokens})
        assert error(response) == (400, "context_length_exceeded")


async def test_a_text_completion_has_sixteen_tokens_by_default(scene: Scene) -> None:
    pending = scene.start(TEXT, {"model": NAME, "prompt": "Hello"})
    request = await scene.next_request()
    assert request.sampling.max_tokens == 16
    scene.refuse(request.request_id, 418, "teapot")
    await pending


@pytest.mark.parametrize("given", [{"temperature": -1}, {"top_p": "high"}, {"max_new_tokens": 0}])
def test_invalid_defaults_of_a_model_are_rejected_by_name(tmp_path: Path, given: dict[str, Any]) -> None:
    with pytest.raises(InvalidModel, match=rf"generation_config.json: .*{next(iter(given))}"):
        model_with(tmp_path, **given)


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
@MODULE_LOOP
async def test_a_structure_reaches_the_engine(
    shared_scene: Scene, changes: dict[str, Any], expected: StructuredOutput | None
) -> None:
    assert (await sampled(shared_scene, **changes)).structured == expected


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
    pending = scene.start(CHAT, chat(logprobs=True, top_logprobs=1, stream=stream))
    request = await scene.next_request()
    token_ids, logprobs = with_alternatives(scene, words)
    for at, (token, logprob) in enumerate(zip(token_ids, logprobs, strict=True)):
        scene.emit(request.request_id, [token], first=at, logprobs=(logprob,))
    scene.end(request.request_id)
    response = await pending
    if stream:
        choices = [event["choices"][0] for event in events(response)[:-1]]
        content = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == words
    else:
        content = response.json()["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(one["bytes"]) for one in content).decode() == words
    assert [one["logprob"] for one in content] == [-0.5 - at for at in range(len(token_ids))]
    assert all(one["top_logprobs"] == [{k: v for k, v in one.items() if k != "top_logprobs"}] for one in content)
    assert content[0]["token"] == " the"


async def test_completion_log_probabilities(scene: Scene) -> None:
    pending = scene.start(TEXT, text(logprobs=2))
    request = await scene.next_request()
    token_ids, logprobs = with_alternatives(scene, " the river")
    scene.emit(request.request_id, token_ids, logprobs=logprobs)
    scene.end(request.request_id)
    given = (await pending).json()["choices"][0]["logprobs"]
    assert "".join(given["tokens"]) == " the river"
    assert given["token_logprobs"] == [one.logprob for one in logprobs]
    assert given["text_offset"] == [len("".join(given["tokens"][:at])) for at in range(len(token_ids))]
    assert [len(one) for one in given["top_logprobs"]] == [2] * len(token_ids)


async def test_alternatives_with_the_same_text_are_all_reported(scene: Scene) -> None:
    """Parts of characters have the same replacement text. Of tokens with the same bytes, the most likely one counts."""
    ids = {scene.model.token_bytes[at]: at for at in range(scene.model.vocabulary_size)}
    names = [b"\xe2", b"\xe3", b"\xf0", b" a"]
    top = tuple(TopLogprob(token_id=ids[name], logprob=-1.0 - at) for at, name in enumerate([*names, b"\xe2"]))
    pending = scene.start(TEXT, text(logprobs=5))
    request = await scene.next_request()
    scene.emit(request.request_id, [ids[b"\xe2"]], logprobs=(TokenLogprob(logprob=-1.0, top=top),))
    scene.end(request.request_id)
    given = (await pending).json()["choices"][0]["logprobs"]
    assert given["tokens"] == ["bytes:\\xe2"]
    assert given["top_logprobs"] == [{"bytes:\\xe2": -1, "bytes:\\xe3": -2, "bytes:\\xf0": -3, " a": -4}]


async def test_tokens_after_a_stop_string_have_no_log_probabilities(scene: Scene) -> None:
    pending = scene.start(CHAT, chat(logprobs=True, stop="river"))
    request = await scene.next_request()
    token_ids, logprobs = with_alternatives(scene, " the river ran")
    scene.emit(request.request_id, token_ids, logprobs=logprobs)
    choice = (await pending).json()["choices"][0]
    assert choice["message"]["content"] == " the "
    assert len(choice["logprobs"]["content"]) < len(token_ids)


async def test_log_probabilities_are_null_if_the_engine_reports_none(scene: Scene) -> None:
    pending = scene.start(CHAT, chat(logprobs=True))
    request = await scene.next_request()
    scene.reply(request.request_id, " the river")
    choice = (await pending).json()["choices"][0]
    assert (choice["message"]["content"], choice["logprobs"]) == (" the river", None)


@pytest.mark.parametrize("special", [True, False])
async def test_special_tokens_become_text_on_request(scene: Scene, special: bool) -> None:
    pending = scene.start(TEXT, text(skip_special_tokens=not special))
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
    pending = scene.start(CHAT, chat(logprobs=True, top_logprobs=1))
    request = await scene.next_request()
    (token,) = scene.model.encode("a")
    never = TopLogprob(token_id=token, logprob=float("-inf"))
    scene.emit(request.request_id, [token], logprobs=(TokenLogprob(logprob=float("-inf"), top=(never,)),))
    scene.end(request.request_id)
    (told_of,) = (await pending).json()["choices"][0]["logprobs"]["content"]
    assert (told_of["logprob"], told_of["top_logprobs"][0]["logprob"]) == (-9999.0, -9999.0)


WORKER, RANK = "x-dynamo-worker-instance-id", "x-dynamo-dp-rank"


async def taken(scene: Scene, body: dict[str, Any], headers: Any = None) -> RequestSubmitted:
    pending = asyncio.create_task(scene.client.post(CHAT, json=body, headers=headers))
    request = await scene.next_request()
    scene.end(request.request_id)
    assert (await pending).status_code == 200
    return request


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hinting() -> AsyncIterator[Scene]:
    async with make_scene(routing_hints=True) as made:
        yield made


async def hinted(scene: Scene, nvext: Any, headers: dict[str, str] | None = None) -> RoutingHints:
    return (await taken(scene, chat(nvext=nvext), headers)).routing


@MODULE_LOOP
async def test_every_hint_of_a_body_reaches_the_router(hinting: Scene) -> None:
    routing = await hinted(
        hinting,
        {
            "agent_hints": {"priority": -3, "strict_priority": 2, "osl": 100, "speculative_prefill": False},
            "backend_instance_id": 42,
            "decode_worker_id": "42",
            "dp_rank": 1,
            "policy_class": "batch",
            "session_control": {"session_id": "s1", "action": "open", "timeout": 300},
            "agent_context": {"session_id": "other", "session_type_id": "research", "trajectory_id": "t"},
            "routing_constraints": {
                "allowed_worker_ids": [42, "w2", "42"],
                "required_taints": ["gpu=h100", "gpu=h100"],
                "preferred_taints": {"zone=b": 2, "zone=a": -0.5},
            },
            "router": {
                "mode": "direct",
                "overlap_score_credit": 0.5,
                "prefill_load_scale": 2,
                "router_temperature": 0,
                "assume_kv_reuse": False,
                "track_prefill_tokens": True,
                "ttft_target": 250,
                "itl_target": 12.5,
                "shared_cache_multiplier": 0,
            },
            "request_timestamp_ms": 12.5,
            "greed_sampling": False,
        },
    )
    assert routing == RoutingHints(
        worker_id="42",
        rank=1,
        allowed_workers=("42", "w2"),
        required_taints=("gpu=h100",),
        preferred_taints=(TaintWeight(taint="zone=b", weight=2), TaintWeight(taint="zone=a", weight=-0.5)),
        session_id="s1",
        priority=-3,
        strict_priority=2,
        policy_class="batch",
        expected_output_tokens=100,
        override=RouterOverride(
            mode="direct",
            overlap_score_credit=0.5,
            prefill_load_scale=2,
            temperature=0,
            assume_kv_reuse=False,
            track_prefill_tokens=True,
        ),
        ttft_target_ms=250.0,
        itl_target_ms=12.5,
    )


@MODULE_LOOP
async def test_a_header_overrides_the_body(hinting: Scene) -> None:
    nvext = {
        "backend_instance_id": 1,
        "decode_worker_id": 1,
        "dp_rank": 7,
        "policy_class": "body",
        "agent_hints": {"priority": 1, "strict_priority": 1},
        "session_control": {"session_id": "body"},
    }
    headers = {
        "X-Dynamo-Worker-Instance-Id": "w9",
        RANK: "0",
        "x-dynamo-request-priority": "-5",
        "x-dynamo-request-strict-priority": "4294967295",
        "x-dynamo-meta-policy-class": " latency ",
        "X-Dynamo-Session-ID": "head",
    }
    assert await hinted(hinting, nvext, headers) == RoutingHints(
        worker_id="w9", rank=0, session_id="head", priority=-5, strict_priority=4294967295, policy_class="latency"
    )


@pytest.mark.parametrize(
    ("pin", "seconds"),
    [
        ({}, 300),
        ({"ttl": None}, 300),
        ({"ttl": "5m"}, 300),
        ({"ttl": "1h"}, 3600),
        ({"ttl": "3600s"}, 3600),
        ({"ttl": "1s"}, 1),
    ],
)
@MODULE_LOOP
async def test_a_prompt_is_pinned_for_the_time_in_the_body(hinting: Scene, pin: dict[str, Any], seconds: int) -> None:
    request = await taken(hinting, chat(nvext={"cache_control": {"type": "ephemeral", **pin}}))
    assert (request.kv_pin_s, request.routing) == (seconds, RoutingHints())


@pytest.mark.parametrize(
    ("nvext", "expected"),
    [
        (None, RoutingHints()),
        ({}, RoutingHints()),
        ({"router": {}}, RoutingHints()),
        ({"agent_context": {"session_id": "c"}}, RoutingHints(session_id="c")),
        ({"decode_worker_id": 0}, RoutingHints(worker_id="0")),
    ],
)
@MODULE_LOOP
async def test_missing_hints_are_defaults(hinting: Scene, nvext: Any, expected: RoutingHints) -> None:
    assert await hinted(hinting, nvext, {RANK: "  "} if not expected.worker_id else None) == expected


@pytest.mark.parametrize(
    ("headers", "param", "code"),
    [
        ({RANK: "1"}, "nvext.dp_rank", "contradictory_routing"),
        ({WORKER: "w1", RANK: "one"}, RANK, "invalid_value"),
        ({WORKER: "w1", RANK: "1.0"}, RANK, "invalid_value"),
        ({WORKER: "w1", RANK: "-1"}, RANK, "invalid_value"),
        ({WORKER: "w1", RANK: "9" * 5_000}, RANK, "invalid_value"),
        ({WORKER: "w" * 257}, WORKER, "invalid_value"),
        ({"x-dynamo-request-priority": "2147483648"}, "x-dynamo-request-priority", "invalid_value"),
        ({"x-dynamo-prefill-instance-id": "3"}, "x-dynamo-prefill-instance-id", "unsupported_parameter"),
    ],
)
@MODULE_LOOP
async def test_invalid_headers_are_rejected_by_name(
    hinting: Scene, headers: dict[str, str], param: str, code: str
) -> None:
    refused = await hinting.client.post(CHAT, json=chat(), headers=headers)
    assert error(refused) == (400, code)
    assert refused.json()["error"]["param"] == param


@MODULE_LOOP
async def test_repeated_headers_must_have_the_same_value(hinting: Scene) -> None:
    headers = httpx.Headers([(WORKER, "w1"), (WORKER, "w2")])
    assert error(await hinting.client.post(CHAT, json=chat(), headers=headers)) == (400, "contradictory_routing")
    same = httpx.Headers([(WORKER, "w1"), (WORKER, "w1")])
    assert (await taken(hinting, chat(), same)).routing.worker_id == "w1"


@pytest.mark.parametrize(
    ("nvext", "param"),
    [
        ({"backend_instance_id": 1}, "nvext.backend_instance_id"),
        ({"agent_hints": {"osl": 5}}, "nvext.agent_hints.osl"),
        ({"session_control": {"session_id": "s"}}, "nvext.session_control.session_id"),
        ({"router": {"assume_kv_reuse": False}}, "nvext.router.assume_kv_reuse"),
        ({"policy_class": "vip"}, "nvext.policy_class"),
        ({"cache_control": {"type": "ephemeral"}}, "nvext.cache_control.type"),
    ],
)
@MODULE_LOOP
async def test_hints_in_the_body_are_rejected_without_the_option(shared_scene: Scene, nvext: Any, param: str) -> None:
    refused = await shared_scene.client.post(CHAT, json=chat(nvext=nvext))
    assert error(refused) == (400, "routing_hints_disabled")
    assert refused.json()["error"]["param"] == param


async def test_hints_in_headers_are_ignored_and_counted_without_the_option(scene: Scene) -> None:
    headers = {WORKER: "w1", RANK: "nonsense", "x-dynamo-session-id": "s"}
    hints = {"agent_hints": {}, "agent_context": {"trajectory_id": "t"}}
    assert await hinted(scene, hints, headers) == RoutingHints()
    for name in headers:
        assert scene.metric(f'forebay_ingress_routing_headers_ignored_total{{header="{name}"}} 1.0')


async def test_a_cache_salt_is_always_allowed_and_salts_the_hashes(scene: Scene) -> None:
    plain = await taken(scene, chat(cache_salt=""))
    assert (plain.cache_namespace, plain.sequence_hashes) == ("", sequence_hashes(plain.token_ids, 4))
    for fields in ({}, {"nvext": {"cache_salt": "t1"}, "cache_salt": "t2"}, {"nvext": {"cache_salt": ""}}):
        body = chat(**{"cache_salt": "t1", **fields})
        salted = await taken(scene, body)
        assert salted.cache_namespace == "t1"
        assert salted.token_ids == plain.token_ids
        assert salted.sequence_hashes == sequence_hashes(plain.token_ids, 4, hash_seed("", "t1"))


@pytest.mark.parametrize("loras", [("a", "a"), (NAME,), ("",), ("a" * 257,)])
def test_adapter_names_must_be_unique(loras: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError):
        IngressSettings(model_name=NAME, block_size=4, ingress_id="i", loras=loras)


NAMES = ["session_id", "priority", "osl", "mode", "prefill_load_scale", "allowed_worker_ids", "preferred_taints", "x"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3),
    max_leaves=6,
)
HEADERS = st.dictionaries(st.sampled_from(sorted(ROUTING_HEADERS)), st.text(max_size=12), max_size=3)


@examples(3)
@given(nvext=st.dictionaries(st.sampled_from([*Nvext.model_fields, "odd"]), VALUES, max_size=4), headers=HEADERS)
def test_random_hints_are_rejected_or_become_an_event(nvext: dict[str, Any], headers: dict[str, str]) -> None:
    raw = json.dumps({"model": NAME, "prompt": [1, 2], "nvext": nvext}).encode()
    try:
        routing = routing_of(parse(TextBody, raw).nvext, routing_headers(headers.items()))
    except ApiError as error:
        assert error.status == 400
        assert error.param
        return
    event = submitted("a", [1, 2], routing=routing)
    assert decode(REQUESTS, encode(REQUESTS, event)) == event
