"""Servers that already run, attached by `forebay worker --upstream`, behind router and ingress on real Kafka and Redis.

The servers are stand-ins for vLLM and for a server that returns text only. Their tokens are those of a mock engine.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from forebay.events.fleet import WorkerLost
from forebay.events.progress import RequestFinished
from forebay.events.requests import RequestSubmitted
from forebay.events.topics import FLEET, PROGRESS, REQUESTS
from forebay.transport.kafka.topics import TopicPlan
from tests.harness.cluster import GROUP, Cluster
from tests.harness.local import free_ports
from tests.harness.openai_server.server import OpenAiServer
from tests.harness.openai_server.settings import ServerSettings
from tests.integration.conftest import MakeCluster
from tests.integration.stream_clients import BLOCK, prompt
from tests.picker.conftest import Call, open_call

PLAIN = "plain-model"
MOCK = "m1"
TOKENS = 40
SEED = 11
PATIENCE_S = 60.0

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@dataclass(frozen=True)
class System:
    """A cluster whose workers are two attached servers, a mock worker, and an attached server that returns text only.

    Attributes:
        servers: the vLLM stand-ins, by worker id.
        plain: the server that returns text only; it serves the model `PLAIN`.
    """

    cluster: Cluster
    servers: dict[str, OpenAiServer]
    plain: OpenAiServer
    client: httpx.AsyncClient

    async def complete(self, token_ids: Sequence[int] | str, model: str = GROUP, **fields: Any) -> httpx.Response:
        """Complete a prompt with `TOKENS` tokens and a fixed seed."""
        body = {"model": model, "prompt": token_ids, "max_tokens": TOKENS, "seed": SEED, "ignore_eos": True} | fields
        return await self.client.post("/v1/completions", json=body)


def on(worker: str) -> dict[str, Any]:
    return {"nvext": {"decode_worker_id": worker}}


def worker_of(response: httpx.Response) -> str:
    return str(response.raise_for_status().json()["forebay"]["worker"])


def text_of(response: httpx.Response) -> str:
    return str(response.raise_for_status().json()["choices"][0]["text"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(make_cluster: MakeCluster) -> AsyncIterator[System]:
    vllm = ServerSettings(block_size=BLOCK, kv_events=True)
    async with (
        OpenAiServer(vllm) as first,
        OpenAiServer(vllm) as second,
        OpenAiServer(flavor="plain", model_name=PLAIN) as plain,
        make_cluster("attached", TopicPlan(groups=2, slots=12, replies=1, kafka_api=1)) as cluster,
    ):
        servers = {f"127.0.0.1-{one.port}": one for one in (first, second)}
        cluster.router("r1")
        url = cluster.ingress("i1", "--routing-hints")
        upstreams = [f"--upstream={one.url}" for one in servers.values()]
        events = [f"--upstream-kv-events={one.kv_events},{one.kv_replay}" for one in servers.values()]
        cluster.processes.start("w1", [*cluster.command_of("worker"), *upstreams, *events])
        cluster.worker(MOCK, "--speedup", "1000")
        model = str(plain.settings.model)
        cluster.worker("p1", "--upstream", plain.url, "--model", model, "--model-name", PLAIN)
        await cluster.until_serving(3)
        await cluster.until_serving(1, PLAIN)
        async with httpx.AsyncClient(base_url=url, timeout=PATIENCE_S) as client:
            yield System(cluster, servers, plain, client)


async def test_attached_servers_join_with_what_they_publish(system: System) -> None:
    members = await system.cluster.members()
    assert members.keys() == {*system.servers, MOCK}
    for name in system.servers:
        spec = members[name].spec
        assert (spec.engine, spec.block_size, spec.kv_events, spec.salts_cache) == ("vllm", BLOCK, True, True)
        assert spec.card == members[MOCK].spec.card
    (plain,) = (await system.cluster.members(PLAIN)).values()
    assert (plain.spec.kv_events, plain.spec.salts_cache) == (False, False)
    models = (await system.client.get("/v1/models")).json()["data"]
    assert {one["id"] for one in models} == {GROUP, PLAIN}


async def test_a_shared_prefix_goes_to_the_server_that_has_it(system: System) -> None:
    for number, (name, server) in enumerate(system.servers.items()):
        shared = prompt(100 + number, blocks=6)
        assert worker_of(await system.complete(shared, max_tokens=1, **on(name))) == name

        async def is_preferred(name: str = name, shared: list[int] = shared) -> bool:
            route = (await system.client.post("/v1/route", json={"model": GROUP, "prompt": shared})).json()
            overlaps = {one["worker_id"]: one["device_overlap"] for one in route["candidates"]}
            return (route["worker_id"], overlaps[name]) == (name, 6)

        cached = server.counters.cached_tokens
        for at in range(3):
            # Until the owner has read the end of the previous request, it counts as load of the server.
            await system.cluster.until("the owner knows the prefix", is_preferred)
            response = await system.complete([*shared, at], max_tokens=1)
            assert worker_of(response) == name
            assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK
        assert server.counters.cached_tokens - cached == 3 * 6 * BLOCK


async def test_a_gateway_gets_the_server_that_has_the_prefix(system: System) -> None:
    cluster, port = system.cluster, free_ports(1)
    picker = cluster.processes.start("picker", [*cluster.command_of("picker"), "--id", "e1", "--port", str(port)])
    await cluster.until("the picker serves", picker.output, lambda output: "serves Envoy" in output)
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        for number, (name, server) in enumerate(system.servers.items()):
            shared = prompt(300 + number, blocks=6)
            assert worker_of(await system.complete(shared, max_tokens=1, **on(name))) == name
            endpoint = f"127.0.0.1:{server.port}"

            async def is_selected(shared: list[int] = shared, endpoint: str = endpoint) -> bool:
                call = Call(open_call(channel))
                await call.headers("/v1/completions")
                await call.body(json.dumps({"model": GROUP, "prompt": [*shared, 1], "stream": True}).encode())
                await call.read_request()
                await call.begin()
                await call.pass_on(b'data: {"choices": [{"text": "a"}]}\n\n', b"data: [DONE]\n\n")
                return call.destination.startswith(endpoint)

            # Until the owner has read the end of the previous request, it counts as load of the server.
            await cluster.until("the owner knows the prefix", is_selected)
    routed = await cluster.events(REQUESTS, RequestSubmitted)
    external = {one.request_id for one in routed if one.delivery == "external"}
    assert external

    async def finished() -> set[str]:
        return {one.request_id for one in await cluster.events(PROGRESS, RequestFinished)}

    await cluster.until("the requests of the picker have ended in the books", finished, external.issubset)
    await cluster.stop("picker")


async def test_a_cut_stream_continues_on_its_server_unless_it_has_penalties(system: System) -> None:
    expected = text_of(await system.complete(prompt(1), **on(MOCK)))
    name, server = next(iter(system.servers.items()))
    server.faults.cut_after_tokens = TOKENS // 2
    try:
        response = await system.complete(prompt(1), **on(name))
        penalized = await system.complete(prompt(2), frequency_penalty=0.5, **on(name))
    finally:
        server.faults.cut_after_tokens = None
    assert (worker_of(response), text_of(response)) == (name, expected)
    assert response.json()["usage"]["completion_tokens"] == TOKENS
    assert "was cut after" in system.cluster.processes["w1"].output()
    assert (penalized.status_code, penalized.json()["error"]["code"]) == (502, "response_interrupted")


async def test_the_requests_of_a_lost_server_continue_elsewhere_and_it_may_return(system: System) -> None:
    prompts = [prompt(200 + number) for number in range(8)]
    # The other server may still be avoided after its cut streams. Then the mock engine would get all requests.
    name, server = next(reversed(system.servers.items()))
    others = [other for other in (*system.servers, MOCK) if other != name]
    for one in system.servers.values():
        one.faults.token_s = 0.2
    pinned: dict[str, Any] = {"nvext": {"routing_constraints": {"allowed_worker_ids": [name, MOCK]}}}
    before = server.counters.generated_tokens
    tasks = [asyncio.create_task(system.complete(one, **pinned)) for one in prompts]
    await system.cluster.until("the server streams", lambda: server.counters.generated_tokens >= before + 8)
    await server.stop()
    texts = [text_of(response) for response in await asyncio.gather(*tasks)]
    # Only now, because a prompt that the mock engine has cached goes there.
    expected = [text_of(await system.complete(one, **on(MOCK))) for one in prompts]
    assert texts == expected
    await system.cluster.until_members(*others)
    assert [event.worker_id for event in await system.cluster.events(FLEET, WorkerLost)] == [name]
    await server.start()
    for one in system.servers.values():
        one.faults.token_s = None
    await system.cluster.until_members(name, *others)
    assert text_of(await system.complete(prompts[0], **on(name))) == expected[0]


async def test_a_server_that_returns_text_only_serves_text(system: System) -> None:
    question = "what is on the log?"
    async with httpx.AsyncClient(base_url=system.plain.url, timeout=PATIENCE_S) as direct:
        body = {"model": PLAIN, "prompt": question, "max_tokens": TOKENS, "seed": SEED}
        expected = text_of(await direct.post("/v1/completions", json=body))
    response = await system.complete(question, PLAIN, ignore_eos=False)
    assert text_of(response) == expected
    assert worker_of(response) == "p1"
    # A server that cannot separate its cache gets no salted request.
    response = await system.complete("hello", PLAIN, cache_salt="tenant-1")
    assert response.status_code in (400, 404, 503), response.text
    assert "separates the cache" in response.text


async def test_every_decision_can_be_derived_again(system: System) -> None:
    for group in (GROUP, PLAIN):
        await system.cluster.require_verified(group)
    system.cluster.processes.check()
