"""Real vLLM: one engine for all tests of this file, so each test uses different prompts."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client import CollectorRegistry, generate_latest

from forebay.engine_model.model import EngineLoad
from forebay.events.control import Command
from forebay.events.requests import StructuredOutput, TokenBias
from forebay.ingress.model import Model
from forebay.processes.engines import tokenizer_probes
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines import model_engine
from forebay.workers.engines.vllm.engine import VllmEngine
from tests.engines.driven import Driven, driven
from tests.engines.oracle import GREEDY
from tests.engines.vllm_settings import ARGUMENTS, BLOCK, KV_BLOCKS, SPEC, settings

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's and torch's own; those of forebay are errors in every other test
]


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def vllm(model: Path) -> AsyncIterator[Driven]:
    arguments = ARGUMENTS | {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    probes = tokenizer_probes(Model(model))
    async with driven(VllmEngine(settings(model, arguments=arguments, tokenizer_probes=probes)), SPEC) as one:
        yield one


async def test_engine_reports_its_sizes(vllm: Driven) -> None:
    spec = vllm.spec
    assert (spec.block_size, spec.kv_blocks_total, spec.max_num_seqs) == (BLOCK, KV_BLOCKS, 8)
    assert spec.max_num_batched_tokens > 1
    assert spec.tasks == ("generate",)
    assert spec.kv_events


async def test_greedy_tokens_equal_the_oracle(vllm: Driven) -> None:
    answers = [await vllm.ask(prompt, len(generated)) for prompt, generated in GREEDY]
    assert [one.tokens for one in answers] == [generated for _, generated in GREEDY]
    assert {one.finished and one.finished.reason for one in answers} == {"length"}
    assert max(one.chunks for one in answers) > 1


async def test_concurrent_requests_are_independent(vllm: Driven) -> None:
    answers = [vllm.submit(vllm.item(prompt, len(generated))) for prompt, generated in GREEDY * 3]
    await vllm.until(lambda: all(one.over for one in answers))
    assert [one.tokens for one in answers] == [generated for _, generated in GREEDY * 3]
    assert any(len(batch.emitted) > 1 for batch in vllm.batches)


async def test_cached_prefix_is_found_and_reported(vllm: Driven) -> None:
    prompt = [7, *range(100, 194)]
    first = await vllm.ask(prompt, 2)
    again = await vllm.ask(prompt, 2)
    assert (first.cached, again.cached) == (0, 2 * BLOCK)
    assert again.finished is not None
    assert (again.finished.prompt_tokens, again.finished.output_tokens, again.finished.cached_tokens) == (95, 2, 64)
    await vllm.until(lambda: vllm.blocks(prompt) <= vllm.held[0])
    # The last block of an earlier request may be on its way.
    await vllm.until(lambda: set(vllm.engine.held(0)) == vllm.held[0])


async def test_generated_blocks_are_reported(vllm: Driven) -> None:
    prompt = [8, *range(100, 131)]
    answer = await vllm.ask(prompt, BLOCK + 1)
    await vllm.until(lambda: vllm.blocks(prompt + answer.tokens[:BLOCK]) <= vllm.held[0])


async def test_a_tenant_has_a_cache_of_its_own(vllm: Driven) -> None:
    prompt = [9, *range(100, 195)]
    await vllm.ask(prompt, 1)
    other = await vllm.ask(prompt, 1, cache_namespace="tenant-1")
    own = await vllm.ask(prompt, 1, cache_namespace="tenant-1")
    assert (other.cached, own.cached) == (0, 2 * BLOCK)
    await vllm.until(lambda: vllm.blocks(prompt, cache_namespace="tenant-1") <= vllm.held[0])


async def test_evicted_blocks_are_reported(vllm: Driven) -> None:
    first = [10, *range(100, 227)]
    await vllm.ask(first, 1)
    await vllm.until(lambda: vllm.blocks(first) <= vllm.held[0])
    for start in range(11, 16):
        await vllm.ask([start, *(100 + (start * i) % 251 for i in range(300))], 1)
    await vllm.until(lambda: not vllm.blocks(first) & vllm.held[0])
    assert 0 < len(vllm.held[0]) <= KV_BLOCKS


async def test_tokens_have_log_probabilities(vllm: Driven) -> None:
    answer = await vllm.ask([16, 17, 18], 4, logprobs=3)
    assert len(answer.logprobs) == len(answer.tokens) == 4
    for token, one in zip(answer.tokens, answer.logprobs, strict=True):
        assert len(one.top) == 3
        assert (one.top[0].token_id, one.top[0].logprob) == (token, one.logprob)  # greedy
        assert one.top[0].logprob >= one.top[1].logprob >= one.top[2].logprob
    bare = await vllm.ask([16, 17, 18], 4, logprobs=0)
    assert [(one.logprob, one.top) for one in bare.logprobs] == [(one.logprob, ()) for one in answer.logprobs]
    assert not (await vllm.ask([16, 17, 18], 4)).logprobs


async def test_sampling_is_passed_on(vllm: Driven) -> None:
    prompt = [19, 20, 21]
    greedy = await vllm.ask(prompt, 6)
    stop = max(greedy.tokens, key=greedy.tokens.index)
    stopped = await vllm.ask(prompt, 6, stop_token_ids=(stop,))
    assert stopped.tokens == greedy.tokens[: greedy.tokens.index(stop) + 1]
    assert stopped.finished is not None
    assert stopped.finished.reason == "stop"
    forced = await vllm.ask(prompt, 3, logit_bias=(TokenBias(token_id=77, bias=100.0),))
    assert forced.tokens == [77, 77, 77]
    seeded = [await vllm.ask(prompt, 12, temperature=1.0, seed=seed) for seed in (5, 5, 6)]
    assert seeded[0].tokens == seeded[1].tokens != seeded[2].tokens


async def test_output_matches_the_requested_structure(vllm: Driven, model: Path) -> None:
    from transformers import AutoTokenizer  # noqa: PLC0415

    tokenizer = AutoTokenizer.from_pretrained(model)
    kinds = {"choice": '["alpha", "beta"]', "regex": "[xy]{3}z", "json_schema": '{"enum": ["only"]}'}
    texts = {}
    for kind, text in kinds.items():
        structured = StructuredOutput(kind=kind, text=text)  # type: ignore[arg-type]
        answer = await vllm.ask([22, 23], 40, structured=structured, ignore_eos=False)
        assert answer.finished is not None, answer.error
        texts[kind] = tokenizer.decode(answer.tokens, skip_special_tokens=True)
    assert texts["choice"] in ("alpha", "beta")
    assert texts["regex"][:3].strip("xy") == "" and texts["regex"][3:] == "z"
    assert texts["json_schema"] == '"only"'


@pytest.mark.parametrize(
    ("options", "status", "code", "fragment"),
    [
        ({"prompt": [5] * 1024}, 400, "context_length_exceeded", "1024 tokens"),
        ({"prompt": []}, 400, "invalid_request", ""),
        ({"prompt": [100_000]}, 400, "invalid_request", "100000"),
        ({"top_p": 3.0}, 400, "invalid_request", "top_p"),
        ({"logprobs": 100_000}, 400, "invalid_request", "logprobs"),
        ({"structured": StructuredOutput(kind="choice", text="{}")}, 400, "invalid_request", "choices"),
        ({"structured": StructuredOutput(kind="json_schema", text="{")}, 400, "invalid_request", ""),
        ({"task": "embed"}, 400, "invalid_request", "embed"),
        ({"lora_name": "nobody"}, 404, "model_not_found", "nobody"),
    ],
)
async def test_unsupported_requests_are_refused(
    vllm: Driven, options: dict[str, Any], status: int, code: str, fragment: str
) -> None:
    answer = await vllm.ask(**({"prompt": [24]} | options))
    assert answer.error is not None
    assert (answer.error.status, answer.error.code) == (status, code)
    assert fragment in answer.error.message
    assert "\n" not in answer.error.message
    assert (await vllm.ask([24], 1)).finished is not None


async def test_cancelled_request_ends(vllm: Driven) -> None:
    long = vllm.submit(vllm.item([25, 26], 900))
    await vllm.until(lambda: long.tokens)
    assert vllm.batches[-1].load.running == 1
    vllm.engine.cancel(long.item.request_id)
    await vllm.until(lambda: vllm.batches[-1].load.running == 0)
    generated = len(long.tokens)
    assert (await vllm.ask([25, 27], 8)).finished is not None
    assert len(long.tokens) == generated < 900
    assert not long.over


async def test_load_is_reported(vllm: Driven) -> None:
    assert vllm.batches[0].load == EngineLoad(0, 0, 0, KV_BLOCKS)
    before = len(vllm.batches)
    answers = [vllm.submit(vllm.item([28, start] * 50, 20)) for start in range(10)]
    await vllm.until(lambda: all(one.over for one in answers))
    await vllm.until(lambda: vllm.batches[-1].load == EngineLoad(0, 0, 0, KV_BLOCKS))
    loads = [batch.load for batch in vllm.batches[before:]]
    assert max(load.running for load in loads) == 8  # max_num_seqs
    assert max(load.waiting for load in loads) >= 1
    assert max(load.kv_blocks_used for load in loads) in range(25, KV_BLOCKS + 1)


async def test_clear_is_reported_at_once(vllm: Driven) -> None:
    prompt = [29, *range(100, 195)]
    await vllm.ask(prompt, 1)
    await vllm.until(lambda: vllm.blocks(prompt) <= vllm.held[0])
    await vllm.engine.command(Command(action="clear_kv_blocks"))
    await vllm.until(lambda: not vllm.held[0])
    assert not vllm.engine.held(0)
    again = await vllm.ask(prompt, 1)
    assert again.cached == 0
    await vllm.until(lambda: vllm.held[0] == vllm.blocks(prompt))
    assert set(vllm.engine.held(0)) == vllm.held[0]


async def test_clear_during_a_response_loses_no_token(vllm: Driven) -> None:
    prompt = [30, *range(100, 195)]
    alone = await vllm.ask(prompt, 120)
    answer = vllm.submit(vllm.item(prompt, 120))
    await vllm.until(lambda: answer.tokens)
    await vllm.engine.command(Command(action="clear_kv_blocks"))
    await vllm.until(lambda: answer.over)
    assert answer.tokens == alone.tokens
    await vllm.until(lambda: vllm.blocks(prompt) <= vllm.held[0])


async def test_an_adapter_is_loaded_used_and_unloaded(vllm: Driven, lora: Path, tmp_path: Path) -> None:
    engine, prompt = vllm.engine, [31, *range(100, 195)]
    base = await vllm.ask(prompt)
    assert await engine.command(Command(action="list_loras")) == ()
    load = Command(action="load_lora", lora_name="tiny-lora", lora_path=str(lora))
    assert await engine.command(load) == ("tiny-lora",)
    assert await engine.command(load) == ("tiny-lora",)  # again: nothing to do
    other = await vllm.ask(prompt, lora_name="tiny-lora")
    assert other.tokens != base.tokens
    assert other.cached == 0
    assert (await vllm.ask(prompt, lora_name="tiny-lora")).cached == 2 * BLOCK
    await vllm.until(lambda: vllm.blocks(prompt, lora_name="tiny-lora") <= vllm.held[0])
    with pytest.raises(EngineRefused, match="unload it first"):
        await engine.command(Command(action="load_lora", lora_name="tiny-lora", lora_path=str(tmp_path)))
    assert await engine.command(Command(action="unload_lora", lora_name="tiny-lora")) == ()
    refused = await vllm.ask(prompt, lora_name="tiny-lora")
    assert refused.error is not None and refused.error.status == 404
    # Under a name that another adapter had, its blocks must not be found.
    await engine.command(load)
    assert (await vllm.ask(prompt, lora_name="tiny-lora")).cached == 0
    assert await engine.command(Command(action="unload_lora", lora_name="tiny-lora")) == ()
    with pytest.raises(EngineRefused, match="the adapter 'tiny-lora' is not loaded"):
        await engine.command(Command(action="unload_lora", lora_name="tiny-lora"))


async def test_incompatible_adapters_are_refused(vllm: Driven, tmp_path: Path) -> None:
    from tests.harness.models import make_tiny_model  # noqa: PLC0415 - imports torch

    make_tiny_model.write_lora(tmp_path / "big", rank=16)
    reasons = {str(tmp_path / "none"): "no adapter_config.json", str(tmp_path / "big"): "max_lora_rank"}
    for path, reason in reasons.items():
        with pytest.raises(EngineRefused, match=reason):
            await vllm.engine.command(Command(action="load_lora", lora_name="other", lora_path=path))
    assert await vllm.engine.command(Command(action="list_loras")) == ()
    assert (await vllm.ask([32], 1)).finished is not None


@pytest.mark.parametrize("level", [1, 2])
async def test_a_sleeping_engine_wakes_up(vllm: Driven, level: int) -> None:
    prompt, generated = GREEDY[2]
    await vllm.ask(prompt, 1)
    await vllm.until(lambda: vllm.blocks(prompt) <= vllm.held[0])
    await vllm.engine.command(Command(action="sleep", level=level))
    await vllm.until(lambda: not vllm.held[0])
    waits = vllm.submit(vllm.item(prompt, len(generated)))
    await vllm.engine.check()
    assert not waits.tokens
    await vllm.engine.command(Command(action="wake_up"))
    await vllm.until(lambda: waits.over)
    assert (waits.tokens, waits.cached) == (generated, 0)
    await vllm.until(lambda: vllm.blocks(prompt) <= vllm.held[0])


async def test_a_paused_engine_resumes(vllm: Driven) -> None:
    prompt = [33, *range(100, 150)]
    alone = await vllm.ask(prompt, 200)
    answer = vllm.submit(vllm.item(prompt, 200))
    await vllm.until(lambda: answer.tokens)
    await vllm.engine.command(Command(action="pause"))
    assert not answer.over
    generated = len(answer.tokens)
    await vllm.engine.check()
    await vllm.engine.command(Command(action="resume"))
    await vllm.until(lambda: answer.over)
    assert generated <= len(answer.tokens)
    assert answer.tokens == alone.tokens
    assert set(vllm.engine.held(0)) >= vllm.blocks(prompt)


async def test_reset_drops_requests_and_cache(vllm: Driven) -> None:
    prompt = [34, *range(100, 195)]
    under_way = vllm.submit(vllm.item(prompt, 900))
    await vllm.until(lambda: under_way.tokens)
    vllm.engine.reset()
    vllm.held[0].clear()  # as the owner does
    before, generated = len(vllm.batches), len(under_way.tokens)
    assert not vllm.engine.held(0)
    new = await vllm.ask(prompt, 4)
    assert new.cached == 0
    assert len(under_way.tokens) == generated and not under_way.over
    assert all(batch.load.running <= 1 for batch in vllm.batches[before:])
    await vllm.until(lambda: vllm.held[0] == vllm.blocks(prompt))
    assert set(vllm.engine.held(0)) == vllm.held[0]


async def test_idle_engine_runs_health_requests(vllm: Driven, monkeypatch: pytest.MonkeyPatch) -> None:
    answered = vllm.metric("vllm:request_success_total")
    await vllm.engine.check()
    monkeypatch.setattr(model_engine, "CANARY_EVERY_S", 0.0)
    async with asyncio.timeout(60):
        while vllm.metric("vllm:request_success_total") == answered:
            await vllm.engine.check()
            await asyncio.sleep(0)
    monkeypatch.setattr(model_engine, "CANARY_TIMEOUT_S", 0.0)
    # It hangs without a command.
    await vllm.engine.llm.pause_generation(mode="keep", clear_cache=False)  # type: ignore[attr-defined]
    with pytest.raises(EngineError, match="did not respond to a health request"):
        async with asyncio.timeout(60):
            while True:
                await vllm.engine.check()
                await asyncio.sleep(0)
    await vllm.engine.llm.resume_generation()  # type: ignore[attr-defined]


async def test_engine_metrics_are_exported(vllm: Driven) -> None:
    registry = CollectorRegistry()
    for collector in vllm.engine.collectors():
        registry.register(collector)
    shown = generate_latest(registry).decode()
    names = {line.split("{")[0] for line in shown.splitlines() if not line.startswith("#")}
    assert {"vllm:prefix_cache_hits_total", "vllm:num_requests_running", "vllm:generation_tokens_total"} <= names
    assert all(name.startswith(("vllm:", "forebay_worker_kv_events")) for name in names)
    hits = re.search(r'vllm:prefix_cache_hits_total\{.*model_name="tiny".*\} (.*)', shown)
    assert hits is not None and float(hits[1]) > 0
