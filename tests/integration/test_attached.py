"""Servers that already run, attached by `forebay worker --upstream`, behind router and ingress on real Kafka and Redis.

The servers are stand-ins for vLLM and for a server that returns text only. Their tokens are those of a mock engine.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.fleet import WorkerLost
from forebay.events.topics import FLEET
from forebay.transport.kafka.topics import TopicPlan
from tests.harness import fork_server
from tests.harness.cluster import GROUP, Cluster
from tests.harness.openai_server.server import OpenAiServer
from tests.harness.openai_server.settings import ServerSettings
from tests.integration.conftest import RUN
from tests.integration.stream_clients import BLOCK, prompt

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
        cluster: the processes.
        servers: the vLLM stand-ins, by worker id.
        plain: the server that returns text only; it serves the model `PLAIN`.
        client: client of the ingress.
    """

    cluster: Cluster
    servers: dict[str, OpenAiServer]
    plain: OpenAiServer
    client: httpx.AsyncClient

    async def complete(self, token_ids: Sequence[int] | str, model: str = GROUP, **fields: Any) -> httpx.Response:
        """Complete a prompt with `TOKENS` tokens and a fixed seed."""
        body = {"model": model, "prompt": token_ids, "max_tokens": TOKENS, "seed": SEED, "ignore_eos": True} | fields
        return await self.client.post("/v1/completions", json=body)

    async def until_joined(self, *workers: str) -> None:
        """Wait until the group has exactly these workers."""

        async def joined() -> bool:
            return set(await self.cluster.members()) == set(workers)

        await self.cluster.processes.until(f"the workers are {', '.join(workers)}", joined)


def on(worker: str) -> dict[str, Any]:
    return {"nvext": {"decode_worker_id": worker}}


def worker_of(response: httpx.Response) -> str:
    return str(response.raise_for_status().json()["forebay"]["worker"])


def text_of(response: httpx.Response) -> str:
    return str(response.raise_for_status().json()["choices"][0]["text"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(kafka: str, redis_url: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[System]:
    folder, plan = tmp_path_factory.mktemp("attached"), TopicPlan(groups=2, slots=8, replies=1, kafka_api=1)
    vllm = ServerSettings(block_size=BLOCK, kv_events=True)
    async with (
        OpenAiServer(vllm) as first,
        OpenAiServer(vllm) as second,
        OpenAiServer(flavor="plain", model_name=PLAIN) as plain,
        Cluster(kafka, redis_url, f"{RUN}-attached", folder, plan, spawn=fork_server.spawn) as cluster,
    ):
        servers = {f"127.0.0.1-{one.port}": one for one in (first, second)}
        cluster.router("r1")
        url = cluster.ingress("i1", "--routing-hints")
        upstreams = [option for one in servers.values() for option in ("--upstream", one.url)]
        events = [
            option
            for one in servers.values()
            for option in ("--upstream-kv-events", f"{one.kv_events},{one.kv_replay}")
        ]
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
            await system.cluster.processes.until("the owner knows the prefix", is_preferred)
            response = await system.complete([*shared, at], max_tokens=1)
            assert worker_of(response) == name
            assert response.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 6 * BLOCK
        assert server.counters.cached_tokens - cached == 3 * 6 * BLOCK


async def test_a_cut_stream_continues_on_its_server(system: System) -> None:
    expected = text_of(await system.complete(prompt(1), **on(MOCK)))
    name, server = next(iter(system.servers.items()))
    server.faults.cut_after_tokens = TOKENS // 2
    try:
        response = await system.complete(prompt(1), **on(name))
    finally:
        server.faults.cut_after_tokens = None
    assert (worker_of(response), text_of(response)) == (name, expected)
    assert response.json()["usage"]["completion_tokens"] == TOKENS
    assert "was cut after" in system.cluster.processes["w1"].output()


async def test_streams_with_penalties_end_with_an_error_if_they_are_cut(system: System) -> None:
    name, server = next(iter(system.servers.items()))
    server.faults.cut_after_tokens = TOKENS // 2
    try:
        response = await system.complete(prompt(2), frequency_penalty=0.5, **on(name))
    finally:
        server.faults.cut_after_tokens = None
    assert (response.status_code, response.json()["error"]["code"]) == (502, "response_interrupted")


async def test_the_requests_of_a_lost_server_continue_elsewhere_and_it_may_return(system: System) -> None:
    prompts = [prompt(200 + number) for number in range(8)]
    expected = [text_of(await system.complete(one, **on(MOCK))) for one in prompts]
    name, server = next(iter(system.servers.items()))
    others = [other for other in (*system.servers, MOCK) if other != name]
    for one in system.servers.values():
        one.faults.token_s = 0.2
    pinned = {"nvext": {"routing_constraints": {"allowed_worker_ids": [name, MOCK]}}}
    before = server.counters.generated_tokens
    tasks = [asyncio.create_task(system.complete(one, **pinned)) for one in prompts]

    async def is_streaming() -> bool:
        return server.counters.generated_tokens >= before + 8

    await system.cluster.processes.until("the server streams", is_streaming)
    await server.stop()
    assert [text_of(response) for response in await asyncio.gather(*tasks)] == expected
    await system.until_joined(*others)
    lost = [event for event in await system.cluster.events(FLEET) if isinstance(event, WorkerLost)]
    assert [event.worker_id for event in lost] == [name]
    await server.start()
    for one in system.servers.values():
        one.faults.token_s = None
    await system.until_joined(name, *others)
    assert text_of(await system.complete(prompts[0], **on(name))) == expected[0]


async def test_a_server_that_serves_another_model_is_refused(system: System) -> None:
    name, server = next(iter(system.servers.items()))
    others = [other for other in (*system.servers, MOCK) if other != name]
    server.faults.model_name = "another"
    await system.until_joined(*others)
    assert worker_of(await system.complete(prompt(3))) in others

    async def is_reported() -> bool:
        return "serves another, not forebay-default" in system.cluster.processes["w1"].output()

    await system.cluster.processes.until("the other model is reported", is_reported)
    server.faults.model_name = None
    await system.until_joined(name, *others)


async def test_a_server_that_returns_text_only_serves_text(system: System) -> None:
    question = "what is on the log?"
    direct = httpx.AsyncClient(base_url=system.plain.url, timeout=PATIENCE_S)
    async with direct:
        body = {"model": PLAIN, "prompt": question, "max_tokens": TOKENS, "seed": SEED}
        expected = text_of(await direct.post("/v1/completions", json=body))
    response = await system.complete(question, PLAIN, ignore_eos=False)
    assert text_of(response) == expected
    assert worker_of(response) == "p1"


async def test_a_server_that_cannot_separate_its_cache_gets_no_salted_request(system: System) -> None:
    response = await system.complete("hello", PLAIN, cache_salt="tenant-1")
    assert response.status_code in (400, 404, 503), response.text
    assert "separates the cache" in response.text


async def test_a_cut_stream_of_text_ends_with_an_error(system: System) -> None:
    system.plain.faults.cut_after_tokens = 5
    try:
        body = {"model": PLAIN, "prompt": "hello", "max_tokens": TOKENS, "stream": True}
        async with system.client.stream("POST", "/v1/completions", json=body) as response:
            lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
    finally:
        system.plain.faults.cut_after_tokens = None
    error = json.loads(next(line for line in reversed(lines) if "error" in line))["error"]
    assert error["code"] == "response_interrupted"
    assert "text only" in error["message"]


async def test_every_decision_can_be_derived_again(system: System) -> None:
    for group in (GROUP, PLAIN):
        report = await system.cluster.verify(group)
        assert (report["divergence"], report["verified"]) == (None, report["decisions"])
    system.cluster.processes.check()
