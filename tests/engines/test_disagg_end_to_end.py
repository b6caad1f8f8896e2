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
from tests.engines.serving import BLOCK, MODEL, Serving, prompt_of, vllm_cluster
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


async def reported(serving: Serving, kind: type[ProgressEvent], request_id: str | None = None) -> list[Any]:
    """Return the progress events of the workers."""
    events = await serving.cluster.events(PROGRESS, MODEL)
    return [one for one in events if isinstance(one, kind) and request_id in (None, client_id_of(one.request_id))]


def is_core(pid: int) -> bool:
    """Whether a process is vLLM's engine core: it is spawned by the worker, and may have a title of its own."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes()
    return b"spawn_main" in command or b"EngineCore" in command


async def disaggregate(serving: Serving, policy: str) -> None:
    answer = await serving.request("POST", "/disaggregation", model=MODEL, policy=policy)
    assert answer.status_code == httpx.codes.OK, answer.text


async def test_disagg_processes_prefill_and_decode(serving: Serving, oracle: Transformers) -> None:
    moved = 0
    prompts = {f"apart-{at}": prompt for at, prompt in enumerate([*(one for one, _ in GREEDY), prompt_of(0)])}
    for request_id, prompt in prompts.items():
        observed = await serving.complete(request_id, prompt, TOKENS)
        assert (observed.status, observed.problem, observed.worker) == (200, "", "d1")
        assert (await serving.generated(request_id)).tokens == oracle.greedy(prompt, TOKENS)
        assert await serving.stages(request_id) == [("prefill", "p1"), ("decode", "d1")]
        (computed,) = await reported(serving, PrefillFinished, request_id)
        assert (computed.worker_id, computed.prefilled.tokens) == ("p1", len(prompt))
        assert computed.prefilled.bytes > 0
        (first,) = await reported(serving, FirstTokenEmitted, request_id)
        assert (first.worker_id, first.cached_tokens) == ("d1", len(prompt)), "it was computed once more"
        moved += computed.prefilled.bytes
    # A block that the decode worker had from an earlier prompt did not move again.
    shared = 1
    block_bytes = computed.prefilled.bytes // -(-computed.prefilled.tokens // BLOCK)

    expected: int = moved - shared * block_bytes

    async def counted() -> bool:
        return await serving.metric("d1", "vllm:nixl_bytes_transferred_sum") == expected

    await serving.cluster.processes.until("vLLM counts the bytes that it moved", counted)
    assert await serving.metric("p1", "vllm:generation_tokens_total") >= len(prompts)


async def test_disagg_response_equals_the_aggregated_one(serving: Serving, oracle: Transformers, model: Path) -> None:
    messages = [{"role": "user", "content": "hello world"}]
    prompt = oracle.prompt(messages)
    expected = oracle.greedy(prompt, TOKENS)
    decoder = Model(model).decoder()
    text = "".join(decoder.push([token]) for token in expected)
    requested = {"model": MODEL, "messages": messages, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
    whole = (await serving.request("POST", "/v1/chat/completions", **requested)).raise_for_status().json()
    streamed = await serving.chat("streamed", messages, TOKENS)
    await disaggregate(serving, "never")
    cleared = await serving.request("POST", "/clear_kv_blocks")
    assert cleared.status_code == httpx.codes.OK, cleared.text
    together = await serving.chat("together", messages, TOKENS)
    assert whole["choices"][0]["message"]["content"] == streamed.text == together.text == text
    assert (await serving.generated("together")).tokens == (await serving.generated("streamed")).tokens == expected
    assert await serving.stages("streamed") == [("prefill", "p1"), ("decode", "d1")]
    assert await serving.stages("together") == [("aggregated", "d1")]
    await disaggregate(serving, "always")
    long = await serving.complete("long", prompt_of(1), LONG)
    assert len(long.pieces) > 1, "it came in one piece: that is no stream"
    assert (await serving.generated("long")).tokens == oracle.greedy(prompt_of(1), LONG)


async def test_disagg_prefill_worker_killed_during_prefill(serving: Serving, oracle: Transformers) -> None:
    cluster = serving.cluster
    family = cluster.processes["p1"].family()
    assert len(family) > 1, "vLLM's core is a process of its own"
    (core,) = [pid for pid in family if is_core(pid)]
    prompts = {f"killed-{number}": prompt_of(10 + number) for number in range(UNDER_WAY)}
    done = len(await reported(serving, PrefillFinished))
    first, *others = prompts
    answers = [asyncio.create_task(serving.complete(first, prompts[first], TOKENS))]

    async def computed() -> bool:
        return len(await reported(serving, PrefillFinished)) > done

    # Its core stops where it is: prompts are not computed, and what is computed is not read.
    await cluster.processes.until("a prompt is computed", computed)
    os.kill(core, signal.SIGSTOP)
    answers += [asyncio.create_task(serving.complete(name, prompts[name], TOKENS)) for name in others]

    async def routed() -> bool:
        decided = await cluster.events(DECISIONS, MODEL)
        return set(prompts) <= {client_id_of(one.request_id) for one in decided if isinstance(one, RequestRouted)}

    await cluster.processes.until("all of them are on their way", routed)
    cluster.kill("p1")
    for name, observed in zip(prompts, await asyncio.gather(*answers), strict=True):
        assert (observed.status, observed.problem) == (200, "")
        assert (await serving.generated(name)).tokens == oracle.greedy(prompts[name], TOKENS)
        assert observed.served["worker"] == "d1"
    lost = [one for one in await cluster.events(FLEET, MODEL) if isinstance(one, WorkerLost)]
    assert [one.worker_id for one in lost] == ["p1"]
    assert [await serving.stages(name) for name in others] == [[("prefill", "p1"), ("aggregated", "d1")]] * len(others)
    assert still_running(family) == []
    after = await serving.complete("after", prompt_of(30), TOKENS)
    assert (after.status, after.problem) == (200, "")
    assert (await serving.generated("after")).tokens == oracle.greedy(prompt_of(30), TOKENS)
    assert await serving.stages("after") == [("aggregated", "d1")]


async def test_the_recording_is_derived_again(serving: Serving) -> None:
    report = await serving.cluster.verify(MODEL)
    assert (report["divergence"], report["verified"]) == (None, await serving.cluster.decided(MODEL))
