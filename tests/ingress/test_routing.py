"""Routing hints in bodies and headers: events on the log, and errors."""

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.events.codec import decode, encode
from forebay.events.requests import RequestSubmitted, RouterOverride, RoutingHints, TaintWeight
from forebay.events.topics import REQUESTS
from forebay.ingress.errors import ApiError, Unusable
from forebay.ingress.openai.fields import parse
from forebay.ingress.openai.nvext import ROUTING_HEADERS, Nvext, routing_headers, routing_of
from forebay.ingress.openai.requests import TextBody
from forebay.ingress.settings import IngressSettings
from tests.depth import examples
from tests.ingress.conftest import MODULE_LOOP, NAME, Scene, make_scene
from tests.system import submitted

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "Hello there"}]
INVALID, UNSUPPORTED, CONTRADICTORY = "invalid_value", "unsupported_parameter", "contradictory_routing"
CONSTRAINTS, PINNED = "routing_constraints", {"backend_instance_id": "w1"}
WORKER, RANK = "x-dynamo-worker-instance-id", "x-dynamo-dp-rank"


def chat(nvext: Any = None, **changes: Any) -> dict[str, Any]:
    return {"model": NAME, "messages": HELLO, "nvext": nvext, **changes}


async def taken(scene: Scene, body: dict[str, Any], headers: dict[str, str] | None = None) -> RequestSubmitted:
    pending = asyncio.create_task(scene.client.post(CHAT, json=body, headers=headers))
    request = await scene.next_request()
    scene.end(request.request_id)
    assert (await pending).status_code == 200
    return request


async def hinted(nvext: Any, headers: dict[str, str] | None = None) -> RoutingHints:
    async with make_scene(routing_hints=True) as scene:
        return (await taken(scene, chat(nvext), headers)).routing


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared_scene() -> AsyncIterator[Scene]:
    async with make_scene(routing_hints=True) as made:
        yield made


async def refused(body: dict[str, Any], headers: dict[str, str] | None = None, **settings: Any) -> dict[str, Any]:
    async with make_scene(**{"routing_hints": True, **settings}) as scene:
        return await refused_by(scene, body, headers)


async def refused_by(scene: Scene, body: dict[str, Any], headers: dict[str, str] | None = None) -> dict[str, Any]:
    content = json.dumps(body).encode()  # unlike httpx, Python's json writes NaN
    response = await scene.client.post(CHAT, content=content, headers=headers)
    assert response.status_code == 400, response.text
    assert scene.requests() == []
    error: dict[str, Any] = response.json()["error"]
    return error


async def test_every_hint_of_a_body_reaches_the_router() -> None:
    routing = await hinted(
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
        }
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


async def test_a_header_overrides_the_body() -> None:
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
    assert await hinted(nvext, headers) == RoutingHints(
        worker_id="w9",
        rank=0,
        session_id="head",
        priority=-5,
        strict_priority=4294967295,
        policy_class="latency",
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
async def test_a_prompt_is_pinned_for_the_time_in_the_body(pin: dict[str, Any], seconds: int) -> None:
    async with make_scene(routing_hints=True) as scene:
        request = await taken(scene, chat({"cache_control": {"type": "ephemeral", **pin}}))
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
async def test_missing_hints_are_defaults(nvext: Any, expected: RoutingHints) -> None:
    assert await hinted(nvext, {RANK: "  "} if not expected.worker_id else None) == expected


@MODULE_LOOP
@pytest.mark.parametrize(
    ("nvext", "param", "code"),
    [
        ({"router": {"router_temperature": -0.1}}, "router.router_temperature", INVALID),
        ({"router": {"prefill_load_scale": float("nan")}}, "router.prefill_load_scale", INVALID),
        ({"router": {"overlap_score_credit": float("inf")}}, "router.overlap_score_credit", INVALID),
        ({"router": {"mode": "psychic"}}, "router.mode", INVALID),
        ({"router": {"ttft_target": -1}}, "router.ttft_target", INVALID),
        ({"router": {"itl_target": 1e10}}, "router.itl_target", INVALID),
        ({"router": {"shared_cache_multiplier": 1}}, "router.shared_cache_multiplier", UNSUPPORTED),
        ({"router": {"mode": "direct"}}, "router.mode", CONTRADICTORY),
        ({"dp_rank": 0}, "dp_rank", CONTRADICTORY),
        ({"dp_rank": -1}, "dp_rank", INVALID),
        ({"backend_instance_id": 1, "decode_worker_id": 2}, "decode_worker_id", CONTRADICTORY),
        ({"backend_instance_id": True}, "backend_instance_id", INVALID),
        ({"backend_instance_id": 1 << 64}, "backend_instance_id", INVALID),
        ({"backend_instance_id": ""}, "backend_instance_id", INVALID),
        (
            {"backend_instance_id": "w1", "routing_constraints": {"allowed_worker_ids": ["w2"]}},
            "routing_constraints.allowed_worker_ids",
            CONTRADICTORY,
        ),
        ({"routing_constraints": {"allowed_worker_ids": []}}, "routing_constraints.allowed_worker_ids", INVALID),
        (
            {"routing_constraints": {"preferred_taints": {"a": float("nan")}}},
            "routing_constraints.preferred_taints.a",
            INVALID,
        ),
        ({"routing_constraints": {"required_taints": ["t"] * 65}}, "routing_constraints.required_taints", INVALID),
        ({"routing_constraints": {"forbidden": []}}, "routing_constraints.forbidden", "unknown_parameter"),
        ({"agent_hints": {"priority": 1 << 31}}, "agent_hints.priority", INVALID),
        ({"agent_hints": {"strict_priority": -1}}, "agent_hints.strict_priority", INVALID),
        ({"agent_hints": {"speculative_prefill": True}}, "agent_hints.speculative_prefill", UNSUPPORTED),
        ({"session_control": {}}, "session_control.session_id", INVALID),
        ({"session_control": {"session_id": "s", "action": "close"}}, "session_control.action", UNSUPPORTED),
        ({"agent_context": {"session_final": True}}, "agent_context.session_final", UNSUPPORTED),
        ({"prefill_worker_id": 3}, "prefill_worker_id", UNSUPPORTED),
        ({"token_data": [1]}, "token_data", UNSUPPORTED),
        ({"magic": 1}, "magic", "unknown_parameter"),
        ({"annotations": ["formatted_prompt"]}, "annotations", UNSUPPORTED),
        ({"extra_fields": ["timing"]}, "extra_fields", UNSUPPORTED),
        ({"cache_salt": 5}, "cache_salt", INVALID),
        ({"cache_control": {}}, "cache_control.type", INVALID),
        ({"cache_control": {"type": "eternal"}}, "cache_control.type", INVALID),
        *(
            ({"cache_control": {"type": "ephemeral", "ttl": ttl}}, "cache_control.ttl", INVALID)
            for ttl in ("61m", "2h", "0s", "5", "5d", "-5m", "5m\n", "\u0665m", 300, "99999s")
        ),
        ({"cache_control": {"type": "ephemeral", "scope": "x"}}, "cache_control.scope", "unknown_parameter"),
        ([], "", INVALID),
    ],
)
async def test_invalid_hints_are_rejected_by_name(shared_scene: Scene, nvext: Any, param: str, code: str) -> None:
    error = await refused_by(shared_scene, chat(nvext))
    assert (error["param"], error["code"]) == (f"nvext.{param}".rstrip("."), code), error


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
async def test_invalid_headers_are_rejected_by_name(headers: dict[str, str], param: str, code: str) -> None:
    error = await refused(chat(), headers)
    assert (error["param"], error["code"]) == (param, code), error


async def test_repeated_headers_must_have_the_same_value() -> None:
    async with make_scene(routing_hints=True) as scene:
        headers = httpx.Headers([(WORKER, "w1"), (WORKER, "w2")])
        response = await scene.client.post(CHAT, json=chat(), headers=headers)
        assert (response.status_code, response.json()["error"]["code"]) == (400, "contradictory_routing")
        pending = asyncio.create_task(
            scene.client.post(CHAT, json=chat(), headers=httpx.Headers([(WORKER, "w1"), (WORKER, "w1")]))
        )
        request = await scene.next_request()
        assert request.routing.worker_id == "w1"
        scene.end(request.request_id)
        assert (await pending).status_code == 200


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
async def test_hints_in_the_body_are_rejected_without_the_option(nvext: Any, param: str) -> None:
    error = await refused(chat(nvext), routing_hints=False)
    assert (error["param"], error["code"]) == (param, "routing_hints_disabled")


async def test_hints_in_headers_are_ignored_and_counted_without_the_option(scene: Scene) -> None:
    headers = {WORKER: "w1", RANK: "nonsense", "x-dynamo-session-id": "s"}
    assert (
        await taken(scene, chat({"agent_hints": {}, "agent_context": {"trajectory_id": "t"}}), headers)
    ).routing == (RoutingHints())
    for name in headers:
        assert scene.metric(f'forebay_ingress_routing_headers_ignored_total{{header="{name}"}} 1.0')


async def test_a_cache_salt_is_always_allowed_and_salts_the_hashes(scene: Scene) -> None:
    plain = await taken(scene, chat(cache_salt=""))
    assert (plain.cache_namespace, plain.sequence_hashes) == ("", sequence_hashes(plain.token_ids, 4))
    for body in (
        chat(cache_salt="t1"),
        chat({"cache_salt": "t1"}, cache_salt="t2"),
        chat({"cache_salt": ""}, cache_salt="t1"),
    ):
        salted = await taken(scene, body)
        assert salted.cache_namespace == "t1"
        assert salted.token_ids == plain.token_ids
        assert salted.sequence_hashes == sequence_hashes(plain.token_ids, 4, hash_seed("", "t1"))


async def test_an_adapter_is_served_as_a_model() -> None:
    async with make_scene(loras=("sql", "law")) as scene:
        cards = (await scene.client.get("/v1/models")).json()["data"]
        assert [(card["id"], card.get("parent")) for card in cards] == [(NAME, None), ("sql", NAME), ("law", NAME)]
        assert (await scene.client.get("/v1/models/law")).json()["id"] == "law"
        pending = scene.start(CHAT, chat({"cache_salt": "t"}, model="sql"))
        request = await scene.next_request()
        assert (request.model, request.lora_name, request.cache_namespace) == (NAME, "sql", "t")
        assert request.sequence_hashes == sequence_hashes(request.token_ids, 4, hash_seed("sql", "t"))
        scene.end(request.request_id)
        assert (await pending).json()["model"] == "sql"
        unknown = await scene.client.post(CHAT, json=chat(model="poetry"))
        assert unknown.status_code == 404
        assert "models are: test-model, sql, law" in unknown.json()["error"]["message"]


@pytest.mark.parametrize("loras", [("a", "a"), (NAME,), ("",), ("a" * 257,)])
def test_adapter_names_must_be_unique(loras: tuple[str, ...]) -> None:
    with pytest.raises(Unusable):
        IngressSettings(model_name=NAME, block_size=4, ingress_id="i", loras=loras)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_response_names_the_worker_in_nvext_on_request(scene: Scene, stream: bool) -> None:
    body = chat({"extra_fields": ["worker_id"]}, stream=stream)
    pending = scene.start(CHAT, body)
    request = await scene.next_request()
    scene.emit_text(request.request_id, " hi", worker="w7")
    scene.end(request.request_id)
    lines = (await pending).text.replace("data: ", "").split("\n\n")
    reply = json.loads(lines[-3] if stream else lines[0])
    worker = {"prefill_worker_id": "w7", "prefill_dp_rank": 0, "decode_worker_id": "w7", "decode_dp_rank": 0}
    assert reply["nvext"] == {"worker_id": worker}


NAMES = ["session_id", "priority", "osl", "mode", "prefill_load_scale", "allowed_worker_ids", "preferred_taints", "x"]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "session_id",
                    "priority",
                    "osl",
                    "mode",
                    "prefill_load_scale",
                    "allowed_worker_ids",
                    "preferred_taints",
                    "x",
                ]
            ),
            inner,
            max_size=3,
        )
    ),
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
