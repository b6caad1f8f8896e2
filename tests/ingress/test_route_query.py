"""Route queries return the selection and the cost of every candidate, and generate nothing."""

import asyncio
from typing import Any

import pytest

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.decisions import CostTerms, PrefillPlace, ScoredCandidate
from forebay.events.request_ids import client_id_of
from forebay.events.requests import RouteQueried
from forebay.events.tokens import ResponseError, RouteResponse
from tests.ingress.conftest import NAME, Scene, make_scene
from tests.system import until

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ROUTE = "/v1/route"
HELLO = [{"role": "user", "content": "Hello there"}]
QUERY = {"annotations": ["query_instance_id"]}


def candidate(worker: str, cost: float, overlap: int) -> ScoredCandidate:
    terms = CostTerms(
        cost=cost, prefill_blocks=9.5, overlap_credit=1.0, decode_blocks=2.0, active_requests=3, device_overlap=overlap
    )
    return ScoredCandidate(worker_id=worker, rank=1, terms=terms)


def route_response(query: RouteQueried, **changes: Any) -> RouteResponse:
    best = candidate("w1", 7.25, 4)
    fields: dict[str, Any] = {"pool": "default", "mode": "kv", "choice": best, **changes}
    return RouteResponse(request_id=query.request_id, owner_epoch=1, candidates=(best, candidate("w2", 9, 0)), **fields)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": HELLO, "nvext": QUERY}),
        (CHAT, {"messages": HELLO, "stream": True, "nvext": {"annotations": ["query_instance_id:"]}}),
        (TEXT, {"prompt": "Hello there", "nvext": QUERY}),
        (ROUTE, {"messages": HELLO}),
        (ROUTE, {"prompt": "Hello there"}),
        (ROUTE, {"prompt": [1, 2, 3, 4, 5], "max_tokens": 3, "nvext": QUERY}),
    ],
)
async def test_a_query_returns_the_selection_and_all_costs(scene: Scene, path: str, body: dict[str, Any]) -> None:
    pending = asyncio.create_task(scene.client.post(path, json={"model": NAME, **body}))
    query = await scene.next_query()
    scene.send(route_response(query))
    response = await pending
    assert response.status_code == 200, response.text
    reply = response.json()
    best, other = reply.pop("candidates")
    assert reply == {
        "object": "forebay.route",
        "id": query.request_id,
        "model": NAME,
        "pool": "default",
        "mode": "kv",
        "worker_id": "w1",
        "dp_rank": 1,
        "overlap_blocks": 4,
        "would_wait": False,
        "prompt_tokens": query.prompt_tokens,
    }
    assert (best["worker_id"], best["dp_rank"], best["cost"], best["device_overlap"]) == ("w1", 1, 7.25, 4)
    assert (other["worker_id"], other["prefill_blocks"], other["taint_factor"]) == ("w2", 9.5, 1.0)
    assert response.headers["x-request-id"] == client_id_of(query.request_id)
    assert scene.requests() == [query]
    assert not len(scene.ingress.replies)


async def test_a_query_has_the_fields_of_the_request() -> None:
    async with make_scene(loras=("sql",), routing_hints=True) as scene:
        body = {
            "model": "sql",
            "prompt": list(range(9)),
            "cache_salt": "t",
            "nvext": {"backend_instance_id": "w1", "session_control": {"session_id": "s"}},
        }
        pending = asyncio.create_task(scene.client.post(ROUTE, json=body, headers={"x-request-id": "q1"}))
        query = await scene.next_query()
        scene.send(route_response(query, choice=None, would_wait=True))
        reply = (await pending).json()
        assert (reply["worker_id"], reply["would_wait"], reply["model"]) == (None, True, "sql")
        assert (client_id_of(query.request_id), query.model, query.lora_name, query.reply_slot) == (
            "q1",
            NAME,
            "sql",
            4,
        )
        assert (query.routing.worker_id, query.routing.session_id, query.prompt_tokens) == ("w1", "s", 9)
        hashes = sequence_hashes(pack_u32(range(9)), 4, hash_seed("sql", "t"))
        assert (query.sequence_hashes, len(unpack_u64(hashes))) == (hashes, 2)


async def test_a_rejection_of_the_router_is_an_http_error(scene: Scene) -> None:
    pending = scene.start(ROUTE, {"model": NAME, "prompt": "a"})
    query = await scene.next_query()
    error = ResponseError(status=503, code="busy", message="all are busy")
    scene.send(RouteResponse(request_id=query.request_id, owner_epoch=1, error=error))
    response = await pending
    assert (response.status_code, response.json()["error"]["code"]) == (503, "busy")
    assert response.headers["retry-after"] == "1"
    labels = f'endpoint="route",model="{NAME}",request_type="unary",status="error"'
    assert scene.metric(f"dynamo_frontend_requests_total{{{labels}}} 1.0")


async def test_a_query_without_a_response_times_out() -> None:
    async with make_scene(timeout_s=0.01) as scene:
        response = await scene.client.post(ROUTE, json={"model": NAME, "prompt": "a"})
        assert (response.status_code, response.json()["error"]["code"]) == (504, "deadline_exceeded")
        query = await scene.next_query()
        scene.send(route_response(query))  # too late, and nobody minds
        await until(lambda: scene.ingress.replies.position == 1)


async def test_a_failed_log_is_a_503_for_all_queries(scene: Scene) -> None:
    body = {"model": NAME, "prompt": "a"}
    waiting = scene.start(ROUTE, body)
    await scene.next_query()
    scene.fail_commits()
    for pending in (scene.client.post(ROUTE, json=body), waiting):
        response = await pending
        assert (response.status_code, response.json()["error"]["code"]) == (503, "log_unavailable")
    assert not len(scene.ingress.replies)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        ({"model": NAME}, 400, "invalid_value"),
        ({"model": "gpt", "prompt": "a"}, 404, "model_not_found"),
        ({"model": NAME, "prompt": ""}, 400, "empty_prompt"),
        ({"model": NAME, "prompt": ["a", "b"]}, 400, "unsupported_parameter"),
        ({"model": NAME, "prompt": "a", "messages": HELLO}, 400, "unknown_parameter"),
        ({"model": NAME, "prompt": "a", "max_tokens": 10**9}, 400, "context_length_exceeded"),
        (b"{", 400, "invalid_json"),
        (b"[" * 5_000, 400, "invalid_json"),
        (b"x" * 300_000, 413, "body_too_large"),
    ],
)
async def test_invalid_requests_are_invalid_queries(scene: Scene, body: Any, status: int, code: str) -> None:
    payload = {"content": body} if isinstance(body, bytes) else {"json": body}
    response = await scene.client.post(ROUTE, **payload)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code), response.text
    assert scene.requests() == []


async def test_disagg_a_query_names_the_prefill_worker(scene: Scene) -> None:
    pending = scene.start(ROUTE, {"model": NAME, "prompt": "a"})
    query = await scene.next_query()
    place = PrefillPlace(remote=True, reason="long_prompt", uncached_tokens=7)
    scene.send(route_response(query, pool="prefill", stage="prefill", prefill=place))
    reply = (await pending).json()
    assert (reply["stage"], reply["pool"]) == ("prefill", "prefill")
    assert reply["prefill"] == {"remote": True, "reason": "long_prompt", "uncached_tokens": 7}
