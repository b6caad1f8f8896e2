"""`vllm serve` attached by `forebay worker --upstream`, behind one router and one ingress on real Kafka and Redis.

The ingress serves three models. `tiny` has an attached server and a vLLM that forebay hosts. `split` has an attached
server that computes prompts, and one that generates responses: the server of `tiny`, which serves both names, because a
third server would take half a minute to start. `forebay-default` has a mock worker, which suffices as a different
model. The tests share one cluster and run in order; the last ones kill the server of `tiny`.
"""

import asyncio
import importlib.util
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from operator import eq
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio

from forebay.events.fleet import WorkerLost
from forebay.events.topics import FLEET
from forebay.ingress.model import Model
from forebay.processes.engines import tokenizer_probes
from forebay.processes.worker import Upstream, UpstreamSettings, described
from forebay.runtime.errors import ConfigError
from forebay.transport.kafka.topics import TopicPlan
from forebay.workers.engines.attached.engine import AttachedEngine, AttachedSettings
from forebay.workers.engines.settings import EngineSettings
from tests.engines.oracle import GREEDY, Transformers
from tests.engines.serving import (
    BLOCK,
    LORA_RANK_MAX,
    MODEL,
    SERVER_PORTS,
    STARTED_WITHIN_S,
    TIMEOUT_S,
    Answer,
    Serving,
    VllmServer,
    ports_of,
    prompt_of,
    served,
    vllm_options,
)
from tests.harness.cluster import GROUP, PLAN, Cluster
from tests.harness.local import free_ports
from tests.integration import kafka_api
from tests.integration.conftest import RUN
from tests.workers.attached import prefix_space

SERVER = "server"  # process of the server that is attached as ATTACHED and as DECODE
ATTACHED, HOSTED = "a1", "v1"
PREFILL, DECODE = "p1", "d1"
SPLIT = "split"
MOCK = "m1"
LORA = "tiny-lora"
NAMESPACE = f"{RUN}-vllm-attached"
TOKENS = 24
LONG = 400  # tokens of a response that outlasts what is done to its server
STREAMS = 64  # of one client; the server runs eight at once
HITS = "vllm:prefix_cache_hits_total"
GENERATED = "vllm:generation_tokens_total"

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(2 * TIMEOUT_S + STARTED_WITHIN_S),  # three vLLM start in the first test
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="vLLM's NixlConnector needs the package nixl"),
]


@dataclass(frozen=True, slots=True)
class System:
    serving: Serving
    client: openai.AsyncOpenAI
    server: VllmServer
    command: list[str]

    async def complete(self, prompt: list[int], worker: str = "", tokens: int = TOKENS, **body: Any) -> Answer:
        """Return a response, whose worker is that which ended it."""
        answer = await self.serving.complete(prompt, tokens, worker, **body)
        answer.worker = answer.served.get("worker", "")
        return answer

    async def until_known(self, prompt: list[int], blocks: int) -> None:
        """Wait until the router knows that the attached server has these leading blocks of a prompt, and it alone."""
        known = {ATTACHED: blocks, HOSTED: 0}
        overlaps = partial(self.serving.overlaps, prompt)
        await self.serving.cluster.until(f"the router knows {blocks} blocks", overlaps, partial(eq, known))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def system(
    kafka: str, redis_url: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[System]:
    """A router, an ingress, and the workers of three models, all serving."""
    folder = tmp_path_factory.mktemp("vllm-attached")
    server, prefill = (
        VllmServer((MODEL, SPLIT), free_ports(SERVER_PORTS)),
        VllmServer((SPLIT,), free_ports(SERVER_PORTS)),
    )
    ports = {**ports_of([HOSTED]), ATTACHED: server.ports, PREFILL: prefill.ports}
    plan = TopicPlan(groups=3, slots=PLAN.slots, replies=PLAN.replies, kafka_api=1)
    async with Cluster(kafka, redis_url, NAMESPACE, folder, plan) as cluster:
        options = ("--enable-prompt-tokens-details", "--enable-lora", "--max-lora-rank", str(LORA_RANK_MAX))
        command = server.command(model, *transfers("kv_consumer"), *options)
        cluster.processes.start(SERVER, command)
        cluster.processes.start("prefill", prefill.command(model, *transfers("kv_producer")))
        cluster.router("r1")
        cluster.ingress("i1", "--routing-hints")
        cluster.worker(MOCK)
        # Each worker waits for its server.
        cluster.worker(ATTACHED, *server.upstream())
        cluster.worker(PREFILL, *prefill.upstream(), "--role", "prefill")
        cluster.worker(DECODE, *server.upstream(), "--role", "decode", "--model-name", SPLIT)
        cluster.worker(HOSTED, *vllm_options(model, ports[HOSTED], folder / f"{HOSTED}.ipc"))
        for group, count in ((MODEL, 2), (SPLIT, 2), (GROUP, 1)):
            await cluster.until_members(count=count, group=group, within_s=STARTED_WITHIN_S)
        await cluster.until_serving(2, MODEL)
        async with (
            kafka_api.opened(cluster.settings) as log,
            served(cluster, log, ports) as serving,
            client_of(serving.url) as client,
        ):
            yield System(serving, client, server, command)


def transfers(role: str) -> tuple[str, str]:
    """Return the options of a server that transfers KV over NIXL."""
    return "--kv-transfer-config", json.dumps(
        {"kv_connector": "NixlConnector", "kv_buffer_device": "cpu", "kv_role": role}
    )


@asynccontextmanager
async def client_of(url: str) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


async def test_one_ingress_serves_all_models(system: System, oracle: Transformers) -> None:
    assert {one.id async for one in system.client.models.list()} == {MODEL, SPLIT, GROUP}
    members = await system.serving.cluster.members(MODEL)
    attached, hosted = members[ATTACHED].spec, members[HOSTED].spec
    assert attached.card is not None
    assert attached.card == hosted.card
    assert (attached.engine, attached.block_size, attached.kv_events) == ("vllm", hosted.block_size, True)
    assert attached.salts_cache
    for worker in (ATTACHED, HOSTED):
        for prompt, _ in GREEDY:
            response = await system.complete(prompt, worker)
            assert (response.worker, response.usage["completion_tokens"]) == (worker, TOKENS)
            assert await system.serving.tokens(response) == oracle.greedy(prompt, TOKENS)
    other = await system.client.chat.completions.create(
        model=GROUP, messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    assert (other.model_extra or {})["forebay"]["worker"] == MOCK
    chat = await system.client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hello"}], max_tokens=4
    )
    assert chat.choices[0].finish_reason in ("length", "stop")


async def test_another_tokenizer_than_that_of_the_attached_server_is_refused(
    system: System, model: Path, tmp_path: Path
) -> None:
    directory = Path(shutil.copytree(model, tmp_path / "changed"))
    prefix_space(directory / "tokenizer.json")
    info = await described(Upstream(system.server.url), UpstreamSettings(servers=()))
    probes = tokenizer_probes(Model(directory))
    attached = AttachedSettings(
        url=system.server.url, info=info, encode=lambda _: [], decode=lambda _: "", context_tokens=1
    )
    engine = AttachedEngine(EngineSettings(model=directory, model_name=MODEL, tokenizer_probes=probes), attached)
    with pytest.raises(
        ConfigError, match=r"the tokenizer of the server .* differs from .*changed/tokenizer\.json: '10 "
    ):
        await engine.check_tokenizer()


async def test_a_shared_prefix_goes_to_the_attached_server_and_vllm_counts_the_hits(
    system: System, oracle: Transformers
) -> None:
    shared = prompt_of(1)[: 6 * BLOCK]
    cold = await system.complete([*shared, 5], ATTACHED, tokens=1)
    assert (cold.worker, cold.cached_tokens) == (ATTACHED, 0)
    hits = {name: await system.serving.metric(name, HITS) for name in (ATTACHED, HOSTED)}
    for last in range(20, 23):
        prompt = [*shared, last]
        await system.until_known(prompt, 6)
        warm = await system.complete(prompt)
        assert (warm.worker, warm.cached_tokens) == (ATTACHED, 6 * BLOCK)
        assert await system.serving.tokens(warm) == oracle.greedy(prompt, TOKENS)
        hits[ATTACHED] += warm.cached_tokens

    async def counted() -> dict[str, float]:
        return {name: await system.serving.metric(name, HITS) for name in hits}

    await system.serving.cluster.until("vLLM counts the hits, at the attached server alone", counted, partial(eq, hits))


async def test_a_salt_separates_the_cache_of_the_attached_server(system: System) -> None:
    prompt = prompt_of(2)
    await system.complete(prompt, ATTACHED, tokens=1)
    await system.until_known(prompt, 6)
    salted = [await system.complete(prompt, ATTACHED, tokens=1, cache_salt="tenant-1") for _ in range(2)]
    unsalted = await system.complete(prompt, ATTACHED, tokens=1)
    assert [one.cached_tokens for one in (*salted, unsalted)] == [0, 6 * BLOCK, 6 * BLOCK]


async def test_log_probabilities_of_both_vllm_are_equal(system: System) -> None:
    async def of(worker: str) -> list[list[tuple[str, float]]]:
        response = await system.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "tell me a story"}],
            max_tokens=8,
            temperature=0,
            logprobs=True,
            top_logprobs=3,
            extra_body={"ignore_eos": True, "nvext": {"decode_worker_id": worker}},
        )
        assert (response.model_extra or {})["forebay"]["worker"] == worker
        logprobs = response.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        for one in logprobs.content:
            assert one.logprob == one.top_logprobs[0].logprob, "a greedy token is the most likely one"
        return [[(top.token, round(top.logprob, 3)) for top in one.top_logprobs] for one in logprobs.content]

    attached = await of(ATTACHED)
    assert [len(one) for one in attached] == [3] * 8
    assert attached == await of(HOSTED)


async def test_sampling_parameters_have_the_same_effect_on_both_vllm(system: System, oracle: Transformers) -> None:
    prompt = prompt_of(7)
    greedy = oracle.greedy(prompt, TOKENS)
    parameters: list[dict[str, Any]] = [
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.5, "seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.001},
        {"frequency_penalty": 1.5, "presence_penalty": 1.0},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"300": 10.0}},
        {"stop_token_ids": [greedy[9]], "min_tokens": 4},
    ]
    for one in parameters:
        attached, hosted = [await system.complete(prompt, worker, **one) for worker in (ATTACHED, HOSTED)]
        tokens = await system.serving.tokens(attached)
        assert (attached.worker, hosted.worker) == (ATTACHED, HOSTED)
        assert tokens == await system.serving.tokens(hosted), one
        assert tokens != greedy, one


async def test_a_client_that_disconnects_frees_the_attached_server(system: System) -> None:
    """The requests would take longer than the time in which the client may resume them."""
    serving, answers = system.serving, [Answer() for _ in range(STREAMS)]
    before = await serving.metric(ATTACHED, GENERATED)
    receiving = [asyncio.create_task(serving.observe(one, prompt_of(8), LONG, ATTACHED)) for one in answers]
    await serving.cluster.until("a response has begun", lambda: any(one.pieces for one in answers))
    for task in receiving:
        task.cancel()
    await asyncio.gather(*receiving, return_exceptions=True)
    running = partial(serving.metric, ATTACHED, "vllm:num_requests_running")
    await serving.cluster.until("vLLM runs no request", running, partial(eq, 0))
    assert await serving.metric(ATTACHED, GENERATED) < before + STREAMS * LONG


async def test_structured_responses_of_the_attached_server(system: System) -> None:
    async def of(**body: Any) -> str:
        response = await system.client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": "tell me a story"}],
            max_tokens=40,
            extra_body={"nvext": {"decode_worker_id": ATTACHED}, **body},
        )
        assert (response.model_extra or {})["forebay"]["worker"] == ATTACHED
        return response.choices[0].message.content or ""

    assert await of(structured_outputs={"choice": ["alpha", "beta"]}) in ("alpha", "beta")
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"enum": ["only"]}}}
    assert json.loads(await of(response_format=schema)) == "only"


async def test_an_invalid_request_gets_the_error_of_the_attached_server(system: System) -> None:
    response = await system.complete(prompt_of(3), ATTACHED, structured_outputs={"regex": "("})
    assert response.status == httpx.codes.BAD_REQUEST
    assert "regex" in response.problem.lower()


async def test_an_adapter_is_loaded_used_and_unloaded(
    system: System, oracle: Transformers, model: Path, lora: Path
) -> None:
    prompt, serving = prompt_of(4), system.serving
    loaded = await serving.request("POST", f"/v1/loras?model={MODEL}", lora_name=LORA, lora_path=str(lora))
    assert loaded.status_code == httpx.codes.OK, loaded.text
    assert {one["worker_id"]: one["loras"] for one in loaded.json()["outcomes"]} == {ATTACHED: [LORA], HOSTED: [LORA]}

    async def listed() -> set[str]:
        return {one.id async for one in system.client.models.list()}

    await serving.cluster.until("the adapter is a model", listed, lambda names: LORA in names)
    expected = Transformers(model, lora).greedy(prompt, TOKENS)
    assert expected != oracle.greedy(prompt, TOKENS)
    for worker in (ATTACHED, HOSTED):
        adapted = await system.complete(prompt, worker, model=LORA)
        assert (adapted.worker, await system.serving.tokens(adapted)) == (worker, expected)
    base = await system.complete(prompt, ATTACHED)
    assert (base.cached_tokens, await system.serving.tokens(base)) == (0, oracle.greedy(prompt, TOKENS))
    unloaded = await serving.request("DELETE", f"/v1/loras/{LORA}?model={MODEL}")
    assert unloaded.status_code == httpx.codes.OK, unloaded.text
    async with client_of(system.server.url) as direct:
        assert [one.id async for one in direct.models.list()] == [MODEL, SPLIT]


async def test_attached_servers_compute_and_decode_a_prompt_over_nixl(system: System, oracle: Transformers) -> None:
    prompts = [prompt_of(100 + number, blocks=2 + number) for number in range(4)]
    names = ("vllm:external_prefix_cache_hits_total", "vllm:nixl_bytes_transferred_count")

    async def counted() -> list[float]:
        return [await system.serving.metric(ATTACHED, name) for name in names]

    before = await counted()
    for prompt in prompts:
        split, together = await system.complete(prompt, model=SPLIT), await system.complete(prompt, HOSTED)
        assert split.worker == DECODE
        assert (split.served["prefill"]["worker"], split.cached_tokens) == (PREFILL, 0)
        tokens = [await system.serving.tokens(split, SPLIT), await system.serving.tokens(together)]
        assert tokens == [oracle.greedy(prompt, TOKENS)] * 2
        assert await system.serving.stages(split, SPLIT) == [("prefill", PREFILL), ("decode", DECODE)]
    expected = [before[0] + sum(map(len, prompts)), before[1] + len(prompts)]
    await system.serving.cluster.until("vLLM counts the KV that it fetched", counted, partial(eq, expected))
    assert await system.serving.metric(ATTACHED, "vllm:nixl_num_failed_transfers_total") == 0


async def test_a_stream_of_a_killed_server_continues_on_the_hosted_one(system: System, oracle: Transformers) -> None:
    cluster, prompt, response = system.serving.cluster, prompt_of(6), Answer()
    await system.complete(prompt, ATTACHED, tokens=1)
    await system.until_known(prompt, 6)
    receiving = asyncio.create_task(system.serving.observe(response, prompt, LONG))
    await system.serving.until_begun(response)
    cluster.processes.kill(SERVER)
    assert not receiving.done()
    await receiving
    assert await system.serving.tokens(response) == oracle.greedy(prompt, LONG), (
        "the rest does not follow the earlier output"
    )
    assert (response.served["worker"], response.served["attempts"]) == (HOSTED, 2)
    assert response.usage["completion_tokens"] == LONG
    assert [event.worker_id for event in await cluster.events(FLEET, WorkerLost, MODEL)] == [ATTACHED]


async def test_a_server_that_returns_is_attached_again(system: System, oracle: Transformers) -> None:
    cluster, prompt = system.serving.cluster, prompt_of(6)
    cluster.processes.start(SERVER, system.command)
    for group in (MODEL, SPLIT):
        await cluster.until_members(count=2, group=group, within_s=STARTED_WITHIN_S)
    assert (await system.serving.overlaps(prompt))[ATTACHED] == 0, "the cache of the killed server is still indexed"
    response = await system.complete(prompt, ATTACHED)
    assert (response.worker, response.cached_tokens) == (ATTACHED, 0)
    assert await system.serving.tokens(response) == oracle.greedy(prompt, TOKENS)
    await cluster.until(
        "the router knows the blocks of the new server",
        partial(system.serving.overlaps, prompt),
        lambda overlaps: overlaps[ATTACHED] == len(prompt) // BLOCK,
    )
    split = await system.complete(prompt_of(9), model=SPLIT)
    assert await system.serving.stages(split, SPLIT) == [("prefill", PREFILL), ("decode", DECODE)]
    assert await system.serving.tokens(split, SPLIT) == oracle.greedy(prompt_of(9), TOKENS)


async def test_every_decision_verifies(system: System) -> None:
    for group in (MODEL, SPLIT, GROUP):
        await system.serving.cluster.require_verified(group)
    system.serving.cluster.processes.check()
