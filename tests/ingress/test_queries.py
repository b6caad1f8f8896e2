"""Queries that generate nothing: routes of requests, explanations, status and tokenization."""

import asyncio
import contextlib
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from jsonschema import Draft202012Validator
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.decisions import CostTerms, PrefillPlace, ScoredCandidate
from forebay.events.progress import FirstTokenEmitted
from forebay.events.request_ids import client_id_of
from forebay.events.requests import RouteQueried
from forebay.events.tokens import ResponseError, RouteResponse
from forebay.ingress.child_process import CALLERS_MAX, ChildProcess
from forebay.ingress.errors import ApiError
from forebay.ingress.explain_worker import LogSource
from forebay.ingress.explainer import Explainer
from forebay.ingress.http.app import build_app
from forebay.ingress.http.queries import SHARED_S, SharedReader, StatusReader
from forebay.replay.explain.explain import explain
from forebay.replay.explain.explanation import Explanation
from forebay.replay.states import States
from forebay.replay.status import GroupStatus, owner_status
from forebay.transport.kafka.settings import KafkaSettings
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, request
from tests.harness.fake_runtime import FakeRuntime
from tests.harness.memory_log import memory_log
from tests.ingress.conftest import CHAT, HELLO, NAME, ROUTE, TEXT, Scene, client_of, error, make_scene
from tests.replay.recorder import Recorder
from tests.system import MODEL, System, until

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
    assert not len(scene.group.replies)


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
        assert (query.model, query.lora_name, query.reply_slot) == (NAME, "sql", 4)
        assert client_id_of(query.request_id) == "q1"
        assert (query.routing.worker_id, query.routing.session_id, query.prompt_tokens) == ("w1", "s", 9)
        hashes = sequence_hashes(pack_u32(range(9)), 4, hash_seed("sql", "t"))
        assert (query.sequence_hashes, len(unpack_u64(hashes))) == (hashes, 2)


async def test_a_rejection_of_the_router_is_an_http_error(scene: Scene) -> None:
    pending = scene.start(ROUTE, {"model": NAME, "prompt": "a"})
    query = await scene.next_query()
    busy = ResponseError(status=503, code="busy", message="all are busy")
    scene.send(RouteResponse(request_id=query.request_id, owner_epoch=1, error=busy))
    response = await pending
    assert error(response) == (503, "busy")
    assert response.headers["retry-after"] == "1"
    assert error(await scene.client.post(ROUTE, json={"model": "no", "prompt": "a"})) == (404, "model_not_found")
    labels = f'endpoint="route",model="{NAME}",request_type="unary",status="error"'
    assert scene.metric(f"dynamo_frontend_requests_total{{{labels}}} 2.0"), "an unknown adapter is counted, too"


async def test_a_query_without_a_response_times_out() -> None:
    async with make_scene(timeout_s=0.01) as scene:
        response = await scene.client.post(ROUTE, json={"model": NAME, "prompt": "a"})
        assert error(response) == (504, "deadline_exceeded")
        query = await scene.next_query()
        scene.send(route_response(query))  # too late, and nobody minds
        await until(lambda: scene.group.replies.position == 1)


async def test_a_failed_log_is_a_503_for_all_queries(scene: Scene) -> None:
    body = {"model": NAME, "prompt": "a"}
    waiting = scene.start(ROUTE, body)
    await scene.next_query()
    scene.fail_commits()
    for pending in (scene.client.post(ROUTE, json=body), waiting):
        response = await pending
        assert error(response) == (503, "log_unavailable")
    assert not len(scene.group.replies)


async def test_disagg_a_query_names_the_prefill_worker(scene: Scene) -> None:
    pending = scene.start(ROUTE, {"model": NAME, "prompt": "a"})
    query = await scene.next_query()
    place = PrefillPlace(remote=True, reason="long_prompt", uncached_tokens=7)
    scene.send(route_response(query, pool="prefill", stage="prefill", prefill=place))
    reply = (await pending).json()
    assert (reply["stage"], reply["pool"]) == ("prefill", "prefill")
    assert reply["prefill"] == {"remote": True, "reason": "long_prompt", "uncached_tokens": 7}


LIMIT_S = 0.5  # for what never ends


@pytest.fixture
async def log(tmp_path: Path) -> Path:
    return await written(tmp_path / "log.db")


async def written(path: Path, custom: CustomPolicies = ONLY_BUILT_IN, **router: Any) -> Path:
    made = Recorder(custom)
    made.fleet("a", "b", **router)
    made("requests", request("r", PROMPTS[0]))
    made.progress("r", FirstTokenEmitted)
    (await made.log(path)).close()
    return path


@pytest.fixture
def silence() -> Iterator[LogSource]:
    """Yield the address of a broker that accepts connections and never responds."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        yield LogSource(kafka=KafkaSettings(f"127.0.0.1:{port}"))


@asynccontextmanager
async def pending(scene: Scene, source: LogSource | None, **options: Any) -> AsyncIterator[tuple[Explainer, Any]]:
    """Yield an explainer, and a function that requests an explanation over HTTP."""
    explainer = Explainer(source, **options)
    app = build_app(scene.models, CollectorRegistry(), explainer)
    try:
        async with client_of(app) as client:

            async def start_request(name: str) -> httpx.Response:
                return await client.get(f"/v1/requests/{name}/explain")

            yield explainer, start_request
    finally:
        await explainer.close()


async def test_one_process_explains_as_this_one_does_until_it_dies(
    scene: Scene, log: Path, processes: list[Process]
) -> None:
    opened = SqliteLog.open(log, readonly=True)
    here = await explain(States(opened, 0), "r", thorough=False)
    opened.close()
    async with pending(scene, LogSource(path=str(log))) as (_, start_request):
        responses = await asyncio.gather(*(start_request("r") for _ in range(3)))
        assert [reply.status_code for reply in responses] == [200] * 3
        again = await start_request("r")
        assert msgspec.json.decode(again.content, type=Explanation) == here
        assert (here.state, here.earlier_uses) == ("decode", None)
        labels = 'endpoint="explain",model="test-model",request_type="unary",status="success"'
        assert scene.metric(f"dynamo_frontend_requests_total{{{labels}}} 4.0")
        for path, name in (("q", "q"), ("q/1%2F2", "q/1/2")):
            missing = await start_request(path)
            assert error(missing) == (404, "request_not_found")
            assert missing.json()["error"]["message"] == f"unknown request '{name}'; check the ID"
        (process,) = processes
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
        assert (await start_request("r")).status_code == 200


async def test_an_overloaded_ingress_explains(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.ingress.admission.IN_FLIGHT_MAX", 0)
    async with pending(scene, None) as (_, start_request):
        assert error(await start_request("r")) == (501, "not_recorded")


async def test_a_log_in_memory_is_rejected_with_the_remedy(scene: Scene) -> None:
    async with pending(scene, None) as (_, start_request):
        refused = await start_request("r")
        assert error(refused) == (501, "not_recorded")
        assert "--log FILE" in refused.json()["error"]["message"]
    assert error(await scene.client.get("/v1/requests/r/explain")) == (501, "not_recorded")


@pytest.mark.slow
async def test_unreadable_logs_and_policies_of_users_are_rejected(scene: Scene, tmp_path: Path) -> None:
    async with pending(scene, LogSource(path=str(tmp_path / "none.db"))) as (_, start_request):
        refused = await start_request("r")
        assert error(refused) == (503, "log_unavailable")
        assert "none.db" in refused.json()["error"]["message"]
    mode = f"{__name__}.Here"
    log = await written(tmp_path / "log.db", {mode: Here}, mode=mode)
    async with pending(scene, LogSource(path=str(log))) as (_, start_request):
        refused = await start_request("r")
        assert error(refused) == (501, "policy_not_here")
        assert f"pass --allow-policy {mode}; restart the ingress" in refused.json()["error"]["message"]
    async with pending(scene, LogSource(path=str(log), policies=(mode,))) as (_, start_request):
        assert (await start_request("r")).json()["routings"][0]["reason"] == "policy"


class Here:
    """A user's policy, whose output must not mix with explanations."""

    def decide(self, world: Any, request: Any) -> int:
        print("deciding")
        return 0


async def test_a_timeout_fails_the_queued_explanations_too(
    scene: Scene, silence: LogSource, processes: list[Process]
) -> None:
    async with pending(scene, silence, limit_s=LIMIT_S) as (_, start_request):
        waiting = [asyncio.create_task(start_request("r")) for _ in range(CALLERS_MAX)]
        await asyncio.sleep(0)  # all of them begin before the next request
        refused = await start_request("r")
        assert error(refused) == (503, "explain_busy")
        assert f"{CALLERS_MAX} requests" in refused.json()["error"]["message"]
        assert refused.headers["retry-after"] == "1"
        responses = [error(reply) for reply in await asyncio.gather(*waiting)]
        assert responses[0] == (504, "explain_timeout")
        assert set(responses[1:]) <= {(503, "explain_busy"), (504, "explain_timeout")}
        assert "forebay explain" in (await waiting[0]).json()["error"]["message"]
        assert {process.returncode for process in processes} == {-signal.SIGKILL}


async def test_a_crash_is_reported_and_no_process_starts_after_close(
    scene: Scene, silence: LogSource, processes: list[Process]
) -> None:
    async with pending(scene, silence) as (explainer, start_request):
        waiting = asyncio.create_task(start_request("r"))
        await until(lambda: processes)
        os.kill(processes[0].pid, signal.SIGKILL)
        assert error(await waiting) == (503, "explain_failed")
        waiting = asyncio.create_task(start_request("r"))
        await until(lambda: len(processes) == 2)
        await explainer.close()
        assert error(await waiting) == (503, "explain_failed")
        assert error(await start_request("r")) == (503, "explain_failed")
    assert [process.returncode is None for process in processes] == [False, False]


SLEEPER = "tests.ingress.sleeping_child"


@pytest.fixture
def child() -> ChildProcess:
    return ChildProcess(SLEEPER, b"{}")


async def test_a_process_that_starts_during_close_is_killed(
    child: ChildProcess, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def start_during_close(*arguments: str, **options: Any) -> Process:
        process = await start(*arguments, **options)
        await child.close()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_during_close)
    with pytest.raises(EOFError):
        await child.exchange(b"{}")
    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    with pytest.raises(EOFError):
        await child.send(b"{}")
    assert len(processes) == 1


async def test_repeated_cancellation_does_not_leave_a_process(child: ChildProcess, processes: list[Process]) -> None:
    exchange = asyncio.create_task(child.exchange(b"{}"))
    await until(lambda: processes)
    while not exchange.done():
        exchange.cancel()
        await asyncio.sleep(0)
    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    with contextlib.suppress(asyncio.CancelledError):
        await exchange
    assert exchange.cancelled()


class Derivations:
    """Derives statuses that differ in their version, when the test lets it.

    Attributes:
        error: error of every derivation; None for a status.
    """

    def __init__(self, status: GroupStatus) -> None:
        self._status = status
        self.begun = 0
        self.may_end = asyncio.Event()
        self.error: ApiError | None = None

    async def derive(self) -> GroupStatus:
        self.begun += 1
        status = msgspec.structs.replace(self._status, version=self.begun)
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return status


async def real_status() -> GroupStatus:
    log, _ = memory_log()
    async with System(log).started(workers=1) as system, system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == 1)
        status = await owner_status(log, 0, MODEL, owner.world)
    log.close()
    return status


@asynccontextmanager
async def status_client(scene: Scene, read: StatusReader) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(scene.models, CollectorRegistry(), status_of=lambda _: read())
    async with client_of(app) as made:
        yield made


async def test_the_status_matches_its_documented_schema(scene: Scene) -> None:
    status = await real_status()

    async def read() -> GroupStatus:
        return status

    async with status_client(scene, read) as made:
        whole = (await made.get("/openapi.json")).json()
        found = (await made.get("/v1/status")).json()
    documented = whole["paths"]["/v1/status"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert documented == {"$ref": "#/components/schemas/GroupStatus"}
    schema = Draft202012Validator({**documented, "components": whole["components"]})
    schema.validate(found)
    assert [rank["rank"] for worker in found["workers"] for rank in worker["ranks"]] == [0]
    for part in (found, found["owner"], found["workers"][0]["ranks"][0]):
        name = next(iter(part))
        value = part.pop(name)
        assert not schema.is_valid(found), name
        part[name] = value


async def test_calls_share_a_derivation_and_its_result_for_a_second(scene: Scene) -> None:
    derivations = Derivations(await real_status())
    shared = SharedReader(derivations.derive)
    clock = FakeRuntime()
    with runtime.use(clock):
        async with status_client(scene, shared.read) as made:

            async def version() -> int:
                found: int = (await made.get("/v1/status")).raise_for_status().json()["version"]
                return found

            first, *others = (asyncio.create_task(version()) for _ in range(20))
            await until(lambda: derivations.begun)
            first.cancel()  # this status_client disconnects
            clock.monotonic_shift_s += 10 * SHARED_S  # a slow derivation is shared, too
            derivations.may_end.set()
            assert await asyncio.gather(*others) == [1] * 19
            clock.monotonic_shift_s -= 10 * SHARED_S  # so that the next call is early enough on a busy machine, too
            assert await version() == 1
            clock.monotonic_shift_s += 12 * SHARED_S
            assert await version() == 2
            assert derivations.begun == 2


async def test_an_error_is_not_shared_with_later_calls(scene: Scene) -> None:
    derivations = Derivations(await real_status())
    shared = SharedReader(derivations.derive)
    derivations.error = ApiError(503, "log_unavailable", "no broker")
    async with status_client(scene, shared.read) as made:
        pending = [asyncio.create_task(made.get("/v1/status")) for _ in range(2)]
        await until(lambda: derivations.begun)
        derivations.may_end.set()
        assert [response.status_code for response in await asyncio.gather(*pending)] == [503, 503]
        derivations.error = None
        assert (await made.get("/v1/status")).json()["version"] == 2


GREETING = {"role": "user", "content": "Hello there"}
TOOL = {"type": "function", "function": {"name": "f"}}


async def test_a_text_is_tokenized(scene: Scene) -> None:
    given = (await scene.client.post("/tokenize", json={"model": NAME, "prompt": "Hello there"})).json()
    tokens = scene.model.encode("Hello there")
    assert given == {"count": len(tokens), "max_model_len": 131_072, "tokens": tokens, "token_strs": None}
    given = (await scene.client.post("/tokenize", json={"prompt": "Hello there", "return_token_strs": True})).json()
    assert given["token_strs"] == [scene.model.tokenizer.id_to_token(token) for token in tokens]


async def test_a_chat_is_tokenized_with_its_template_and_tools(scene: Scene) -> None:
    for body in ({"messages": [GREETING]}, {"messages": [GREETING], "tools": [TOOL], "max_tokens": 5, "model": NAME}):
        given = (await scene.client.post("/tokenize", json=body)).json()
        tools: Any = body.get("tools", ())
        tokens = scene.model.encode(scene.model.render([GREETING], tools))
        assert (given["tokens"], given["count"]) == (tokens, len(tokens))
    assert scene.requests() == []


async def test_tokens_are_turned_into_text(scene: Scene) -> None:
    prompt = scene.model.render([GREETING])
    body = {"model": NAME, "tokens": scene.model.encode(prompt)}
    assert (await scene.client.post("/detokenize", json=body)).json() == {"prompt": prompt}
    assert (await scene.client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}


async def test_the_version_is_that_of_the_page(scene: Scene) -> None:
    version = (await scene.client.get("/version")).json()["version"]
    assert version in (await scene.client.get("/", headers={"accept": "text/html"})).text
