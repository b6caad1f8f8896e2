"""Disaggregated real vLLM workers behind router and ingress on real Kafka and Redis.

The tests share one cluster and run in order; the last one takes its prefill worker away.
"""

import asyncio
import importlib.util
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.progress import FirstTokenEmitted, PrefillFinished, ProgressEvent
from forebay.events.request_ids import client_id_of
from forebay.events.topics import DECISIONS, FLEET, PROGRESS
from forebay.ingress.model import Model
from tests.engines.oracle import GREEDY, Transformers
from tests.engines.serving import BLOCK, MODEL, Answer, Serving, prompt_of, vllm_cluster
from tests.harness.processes import still_running
from tests.integration.conftest import RUN

ROLES = {"p1": "prefill", "d1": "decode"}
NAMESPACE = f"{RUN}-vllm-disagg"
TOKENS = 24
LONG = 300  # tokens of an answer that comes in pieces however busy the machine is
UNDER_WAY = 6  # requests when the prefill worker is killed; all of them fit into the other

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="vLLM's NixlConnector needs the package nixl"),
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def serving(
    kafka: str, redis_url: str, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Serving]:
    workers = {name: ("--role", role) for name, role in ROLES.items()}
    folder = tmp_path_factory.mktemp("vllm-disagg")
    async with vllm_cluster(kafka, redis_url, NAMESPACE, folder, model, workers) as serving:
        yield serving


async def reported(serving: Serving, kind: type[ProgressEvent], answer: Answer) -> Any:
    """Return the only progress event of a type for a response."""
    events = await serving.cluster.events(PROGRESS, kind, MODEL)
    (event,) = [one for one in events if client_id_of(one.request_id) == answer.request_id]
    return event


def is_core(pid: int) -> bool:
    """Whether a process is vLLM's engine core: it is spawned by the worker, and may have a title of its own."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"spawn_main" in command or b"EngineCore" in command


async def disaggregate(serving: Serving, policy: str) -> None:
    answer = await serving.request("POST", "/disaggregation", model=MODEL, policy=policy)
    assert answer.status_code == httpx.codes.OK, answer.text


async def test_disagg_processes_prefill_and_decode(serving: Serving, oracle: Transformers) -> None:
    moved = 0
    prompts = [*(one for one, _ in GREEDY), prompt_of(0)]
    for prompt in prompts:
        observed = await serving.complete(prompt, TOKENS)
        assert (observed.status, observed.problem, observed.worker) == (200, "", "d1")
        assert await serving.tokens(observed) == oracle.greedy(prompt, TOKENS)
        assert await serving.stages(observed) == [("prefill", "p1"), ("decode", "d1")]
        computed = await reported(serving, PrefillFinished, observed)
        assert (computed.worker_id, computed.prefilled.tokens) == ("p1", len(prompt))
        assert computed.prefilled.bytes > 0
        first = await reported(serving, FirstTokenEmitted, observed)
        assert (first.worker_id, first.cached_tokens) == ("d1", len(prompt)), "it was computed once more"
        moved += computed.prefilled.bytes
    # A block that the decode worker had from an earlier prompt did not move again.
    shared = 1
    block_bytes = computed.prefilled.bytes // -(-computed.prefilled.tokens // BLOCK)

    counted = lambda: serving.metric("d1", "vllm:nixl_bytes_transferred_sum")  # noqa: E731
    await serving.cluster.until("vLLM counts them", counted, lambda found: found == moved - shared * block_bytes)
    generated = lambda: serving.metric("p1", "vllm:generation_tokens_total")  # noqa: E731
    await serving.cluster.until("vLLM counts its tokens", generated, lambda found: found >= len(prompts))


async def test_disagg_response_equals_the_aggregated_one(serving: Serving, oracle: Transformers, model: Path) -> None:
    messages = [{"role": "user", "content": "hello world"}]
    prompt = oracle.prompt(messages)
    expected = oracle.greedy(prompt, TOKENS)
    decoder = Model(model).decoder()
    text = "".join(decoder.push([token]) for token in expected)
    requested = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    whole = (await serving.request("POST", "/v1/chat/completions", **requested)).raise_for_status().json()
    streamed = await serving.chat(messages, TOKENS)
    await disaggregate(serving, "never")
    cleared = await serving.request("POST", "/clear_kv_blocks")
    assert cleared.status_code == httpx.codes.OK, cleared.text
    together = await serving.chat(messages, TOKENS)
    assert whole["choices"][0]["message"]["content"] == streamed.text == together.text == text
    assert await serving.tokens(together) == await serving.tokens(streamed) == expected
    assert await serving.stages(streamed) == [("prefill", "p1"), ("decode", "d1")]
    assert await serving.stages(together) == [("aggregated", "d1")]
    await disaggregate(serving, "always")
    long = await serving.complete(prompt_of(1), LONG)
    assert len(long.pieces) > 1, "it came in one piece: that is no stream"
    assert await serving.tokens(long) == oracle.greedy(prompt_of(1), LONG)


async def test_disagg_prefill_worker_killed_during_prefill(serving: Serving, oracle: Transformers) -> None:
    cluster = serving.cluster
    family = cluster.processes["p1"].family()
    assert len(family) > 1, "vLLM's core is a process of its own"
    (core,) = [pid for pid in family if is_core(pid)]
    prompts = [prompt_of(10 + number) for number in range(UNDER_WAY)]
    answers = [Answer() for _ in prompts]

    async def computed() -> int:
        return len(await cluster.events(PROGRESS, PrefillFinished, MODEL))

    done = await computed()
    listening = [asyncio.create_task(serving.observe(answers[0], prompts[0], TOKENS))]
    # Its core stops where it is: prompts are not computed, and what is computed is not read.
    await cluster.until("a prompt is computed", computed, lambda count: count > done)
    os.kill(core, signal.SIGSTOP)
    for answer, prompt in zip(answers[1:], prompts[1:], strict=True):
        listening.append(asyncio.create_task(serving.observe(answer, prompt, TOKENS)))

    def are_routed(decided: list[RequestRouted]) -> bool:
        return {one.request_id for one in answers} <= {client_id_of(one.request_id) for one in decided}

    routed = lambda: cluster.events(DECISIONS, RequestRouted, MODEL)  # noqa: E731
    await cluster.until("all of them are on their way", routed, are_routed)
    cluster.kill("p1")
    await asyncio.gather(*listening)
    for observed, prompt in zip(answers, prompts, strict=True):
        assert (observed.status, observed.problem) == (200, "")
        assert await serving.tokens(observed) == oracle.greedy(prompt, TOKENS)
        assert observed.served["worker"] == "d1"
    assert [one.worker_id for one in await cluster.events(FLEET, WorkerLost, MODEL)] == ["p1"]
    for one in answers[1:]:
        assert await serving.stages(one) == [("prefill", "p1"), ("aggregated", "d1")]
    assert still_running(family) == []
    after = await serving.complete(prompt_of(30), TOKENS)
    assert (after.status, after.problem) == (200, "")
    assert await serving.tokens(after) == oracle.greedy(prompt_of(30), TOKENS)
    assert await serving.stages(after) == [("aggregated", "d1")]
    assert (await cluster.require_verified(MODEL))["verified"] == await cluster.decided(MODEL)
