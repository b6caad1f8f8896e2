"""The TensorRT-LLM engine with a stand-in: behaviour beyond the contract of all engines.

The prefill and decode roles of the real engine were never run.
"""

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.events.control import Action, Command
from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.workers.engine import Cleared, EngineError, EngineRefused, KvEngine
from forebay.workers.engines.kv_descriptor import Unfetchable
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.tensorrt_llm import engine as tensorrt_llm_engine
from forebay.workers.engines.tensorrt_llm.engine import CONNECTOR, TensorRtLlmEngine, descriptor
from forebay.workers.engines.tensorrt_llm.requests import (
    engine_arguments,
    engine_priority,
    sampling_arguments,
    step_stats,
)
from tests.workers.conftest import until
from tests.workers.engine_setup import (
    PROMPT,
    SPEC,
    StandinPair,
    Start,
    lora_directory,
    reported,
    standin_pair,
    standin_settings,
    starter,
)
from tests.workers.standins import tensorrt_llm_standin
from tests.workers.standins.little import answer_of
from tests.workers.standins.tensorrt_llm_standin import (
    LLM,
    DisaggregatedParams,
    Logprob,
    MetricsCollector,
    RequestError,
)


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    tensorrt_llm_standin.install(monkeypatch)
    return standin_settings(tmp_path)


@pytest.fixture
def started(settings: EngineSettings) -> Start:
    return starter(TensorRtLlmEngine, settings)


def llm() -> LLM:
    assert LLM.made is not None
    return LLM.made


async def test_tokens_between_two_polls_are_emitted_once(started: Start) -> None:
    async with started() as one:
        llm().step.clear()
        answers = [one.submit(one.item([*PROMPT, number], 9)) for number in range(3)]
        llm().step.set()
        await one.until(lambda: all(answer.over for answer in answers))
        assert [answer.tokens for answer in answers] == [answer_of([*PROMPT, number], 9) for number in range(3)]


@pytest.mark.parametrize(
    ("failure", "status"), [(RequestError("too long for the batch"), 400), (RuntimeError("CUDA broke"), 500)]
)
async def test_response_that_fails_after_its_first_token(started: Start, failure: Exception, status: int) -> None:
    async with started() as one:
        llm().fail_after[77] = failure
        answer = await one.ask([77, *PROMPT], 9)
        assert answer.error is not None and answer.error.status == status and str(failure) in answer.error.message
        assert len(answer.tokens) == 1 and llm().aborted
        assert (await one.ask(PROMPT, 3)).error is None


@pytest.mark.parametrize("why", ["stop", "timeout", "cancelled"])
async def test_the_finish_reason_of_the_engine_ends_the_response(started: Start, why: str) -> None:
    async with started() as one:
        llm().end_after[77] = why
        answer = await one.ask([77, *PROMPT], 9)
        if why == "stop":
            assert answer.finished is not None and answer.finished.reason == "stop"
        else:
            assert answer.error is not None and why in answer.error.message


async def test_rejections_have_the_message_of_the_engine(started: Start) -> None:
    async with started() as one:
        bias = (TokenBias(token_id=1, bias=1.0),)
        wrong: list[dict[str, Any]] = [{"top_p": 7.0, "temperature": 1.0}, {"logit_bias": bias}]
        for sampling in [*wrong, {"structured": StructuredOutput(kind="choice", text="{}")}]:
            answer = await one.ask(PROMPT, 2, **sampling)
            assert answer.error is not None and answer.error.status == 400
        answer = await one.ask(PROMPT, 2, task="embed")
        assert answer.error is not None and "generate" in answer.error.message
    async with started(max_num_tokens=8) as one:
        answer = await one.ask(PROMPT, 2)
        assert answer.error is not None and answer.error.status == 400


async def test_request_arguments_contain_only_deviations(started: Start) -> None:
    async with started() as one:
        await one.ask(PROMPT, 1)
        plain = llm().requested_with[-1]
        assert (plain["priority"], plain["cache_salt"], plain["scheduling_params"]) == (0.5, None, None)
        await one.ask(PROMPT, 1, priority=1, cache_namespace="tenant")
        assert llm().requested_with[-1]["priority"] > 0.5 and llm().requested_with[-1]["cache_salt"] == "tenant"


@given(st.lists(st.integers(-1_000, 1_000) | st.sampled_from([-(1 << 31), (1 << 31) - 1]), min_size=2))
def test_higher_priority_runs_sooner_and_is_in_range(priorities: list[int]) -> None:
    ordered = sorted(set(priorities))
    requested = [engine_priority(priority) for priority in ordered]
    assert requested == sorted(set(requested)) and all(0.0 <= one <= 1.0 for one in requested)
    assert engine_priority(0) == 0.5


async def test_lost_events_empty_the_rank_and_later_ones_count(started: Start) -> None:
    async with started() as one:
        await one.ask(PROMPT, 2)
        await reported(one, one.blocks(PROMPT))
        llm().next_ids[0] += 5
        other = list(range(200, 212))
        await one.ask(other, 2)
        await reported(one, one.blocks(other))
        assert one.held[0] == one.blocks(other) == set(one.engine.held(0))
        # Their parents are unknown and cannot be replayed, so they are skipped.
        await one.ask([*PROMPT, *PROMPT], 2)
        third = list(range(300, 312))
        await one.ask(third, 2)
        await reported(one, one.blocks(third))
        assert one.held[0] == one.blocks(other) | one.blocks(third)
        told_empty = [change for batch in one.batches for change in batch.cache_changes if isinstance(change, Cleared)]
        assert len(told_empty) == 1


async def test_undecodable_event_is_counted(started: Start) -> None:
    async with started() as one:
        llm().events.append({"event_id": "nonsense"})
        await one.ask(PROMPT, 2)
        await reported(one, one.blocks(PROMPT))
        found = {
            sample.labels.get("kind"): sample.value
            for collector in one.engine.collectors()
            for metric in collector.collect()
            for sample in metric.samples
        }
        assert found["undecodable"] == 1 and found["live"] >= 2


async def test_no_cache_changes_without_kv_events(started: Start) -> None:
    async with started(msgspec.structs.replace(SPEC, kv_events=False)) as one:
        assert not one.spec.kv_events
        await one.ask(PROMPT, 2)
        assert not llm().events and one.engine.held(0) == ()
    async with started(kv_cache_config={"enable_block_reuse": False}) as one:
        assert not one.spec.kv_events


@pytest.mark.parametrize("action", ["clear_kv_blocks", "sleep", "wake_up", "pause", "resume"])
async def test_unsupported_commands_are_refused(started: Start, action: Action) -> None:
    async with started() as one:
        with pytest.raises(EngineRefused, match="does not support"):
            await one.engine.command(Command(action=action))
        assert (await one.ask(PROMPT, 2)).error is None


async def test_an_adapters_name_keeps_its_number(started: Start, tmp_path: Path) -> None:
    first, second = (str(lora_directory(tmp_path / name)) for name in ("first", "second"))
    load = Command(action="load_lora", lora_name="x", lora_path=first)
    async with started(lora_config={"max_lora_rank": 8}) as one:
        numbers = []
        for _ in range(2):
            await one.engine.command(load)
            await one.ask(PROMPT, 1, lora_name="x")
            numbers.append(llm().requested_with[-1]["lora_request"].lora_int_id)
            await one.engine.command(Command(action="unload_lora", lora_name="x"))
        assert numbers[0] == numbers[1]
        with pytest.raises(EngineRefused, match="another name"):
            await one.engine.command(Command(action="load_lora", lora_name="x", lora_path=second))
        await one.engine.command(Command(action="load_lora", lora_name="y", lora_path=second))
        await one.ask(PROMPT, 1, lora_name="y")
        assert llm().requested_with[-1]["lora_request"].lora_int_id != numbers[0]
    async with started() as one:
        with pytest.raises(EngineRefused, match="lora_config"):
            await one.engine.command(load)


async def test_dead_engine_ends_run(started: Start) -> None:
    async with started() as one:
        llm().deaf = True
        answer = one.submit(one.item(PROMPT, 2))
        await until(lambda: llm().running)
        llm().healthy = False
        with pytest.raises(EngineError, match="TensorRT-LLM died"):
            await one.until(lambda: answer.over)
        with pytest.raises(EngineError, match="died"):
            await one.engine.check()


async def test_request_on_a_dead_engine_does_not_fail(started: Start) -> None:
    async with started() as one:
        llm().fail_after[77] = RuntimeError("LLM is shutting down")
        llm().step.clear()
        answer = one.submit(one.item([77, *PROMPT], 9))
        await until(lambda: llm().running)
        llm().healthy = False
        llm().step.set()
        with pytest.raises(EngineError, match="died"):
            await one.until(lambda: answer.over)
        assert not answer.over


async def test_failed_start_has_a_reason(
    settings: EngineSettings, started: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "fails", RuntimeError("Only 0 GPUs are available"))
    with pytest.raises(EngineError, match="Only 0 GPUs"):
        async with started():
            pass
    monkeypatch.setattr(LLM, "fails", None)
    for wrong in ({"unknown_option": 1}, {"kv_cache_config": {"unknown_option": 1}}):
        with pytest.raises(EngineError, match="unknown_option"):
            async with started(**wrong):
                pass
    engine = TensorRtLlmEngine(replace(settings, role="encode"))
    with pytest.raises(EngineError, match="encode"):
        await engine.start(SPEC)
    await engine.stop()


async def test_context_is_that_of_the_model(settings: EngineSettings, started: Start) -> None:
    config = {"max_position_embeddings": 6, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    for content, allows in (
        (config, 11),
        ({"text_config": config, "rope_scaling": {"type": "yarn", "factor": 2.0}}, 5),
        ({}, 200),
    ):
        (settings.model / "config.json").write_text(json.dumps(content))
        async with started() as one:
            assert (await one.ask([1] * allows, 2)).error is None
            if content:
                error = (await one.ask([1] * (allows + 1), 2)).error
                assert error is not None and error.code == "context_length_exceeded"
    async with started(max_seq_len=4) as one:
        assert (await one.ask([1] * 4, 2)).error is not None


async def test_sizes_of_caches_without_capacity(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "get_kv_cache_capacity", lambda _: {})
    async with started() as one:
        assert (one.spec.block_size, one.spec.kv_blocks_total) == (4, 32)


async def test_sizes_of_older_releases(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(LLM, "get_kv_cache_capacity")
    async with started() as one:
        assert (one.spec.block_size, one.spec.kv_blocks_total) == (4, 32)


async def test_engine_collector_counts_responses(started: Start) -> None:
    async with started() as one:
        await one.ask(PROMPT, 2)
        assert len(MetricsCollector.reported) == 1


@pytest.mark.parametrize("wrong", [None, 3, [], {}, {"kvCacheStats": {}}, {"kvCacheStats": {"usedNumBlocks": "x"}}])
def test_invalid_statistics_are_ignored(wrong: object) -> None:
    assert step_stats(wrong) is None


def test_statistics_of_the_engine_become_the_load() -> None:
    stats = step_stats(
        {
            "kvCacheStats": {"usedNumBlocks": 3, "maxNumBlocks": 12},
            "attentionDpRank": 2,
            "inflightBatchingStats": {"numContextRequests": 1, "numGenRequests": 4, "numQueuedContextRequests": 7},
        }
    )
    assert stats is not None
    assert (stats.rank, stats.running, stats.waiting, stats.usage) == (2, 5, 7, 0.25)


def test_sampling_parameters_become_arguments_of_tensorrt_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = sampling_arguments(Sampling(max_tokens=9, temperature=0.0, top_k=50))
    assert greedy["top_k"] == 1 and "temperature" not in greedy
    drawn = sampling_arguments(Sampling(max_tokens=9, temperature=0.7, top_k=50, seed=3, min_tokens=2))
    assert (drawn["temperature"], drawn["top_k"], drawn["seed"], drawn["min_tokens"]) == (0.7, 50, 3, 2)
    for arguments in (greedy, drawn):
        assert tensorrt_llm_standin.SamplingParams(**arguments).max_tokens == 9


async def test_structured_output_is_guided_decoding(started: Start) -> None:
    async with started() as one:
        assert (await one.ask(PROMPT, 1, structured=StructuredOutput(kind="regex", text="a+"))).error is None
        assert llm().requested_with[-1]["sampling_params"].guided_decoding.regex == "a+"
    async with started(guided_decoding_backend=None) as one:
        answer = await one.ask(PROMPT, 1, structured=StructuredOutput(kind="regex", text="a+"))
        assert answer.error is not None and (answer.error.status, "not enabled" in answer.error.message) == (400, True)


def test_settings_become_arguments_of_tensorrt_llm(settings: EngineSettings) -> None:
    arguments = engine_arguments(settings, kv_events=True)
    assert arguments["kv_cache_config"] == {
        "enable_block_reuse": True,
        "tokens_per_block": 4,
        "max_tokens": 128,
        "event_buffer_max_size": 100_000,
    }
    own = replace(settings, dp_size=2, arguments={"kv_cache_config": {"max_tokens": 7}})
    arguments = engine_arguments(own, kv_events=False)
    assert arguments["kv_cache_config"]["max_tokens"] == 7 and arguments["tensor_parallel_size"] == 2
    assert "event_buffer_max_size" not in arguments["kv_cache_config"]


Pair = StandinPair[LLM]


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    tensorrt_llm_standin.install(monkeypatch)
    async with standin_pair(tmp_path, TensorRtLlmEngine, lambda: LLM.made) as both:
        yield both


async def test_prefill_worker_generates_the_first_token(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT, logprobs=2, min_tokens=3)
    assert (prefilled.connector, prefilled.tokens, prefilled.model) == (CONNECTOR, len(PROMPT), "m")
    assert pair.prefill_backend.requested_with[-1]["sampling_params"].max_tokens == 1
    assert pair.prefill_backend.requested_with[-1]["sampling_params"].min_tokens == 3
    assert pair.prefill_backend.args.disable_overlap_scheduler
    answer = await pair.decoded(PROMPT, prefilled, logprobs=2, min_tokens=3)
    assert answer.tokens == answer_of(PROMPT, 6)
    requested = pair.decode_backend.requested_with[-1]["disaggregated_params"]
    assert (requested.request_type, requested.first_gen_tokens) == ("generation_only", answer.tokens[:1])
    assert requested.opaque_state == b"state \xff of " + bytes(PROMPT[:1]), "it passes through as it is"
    assert requested.ctx_request_id == 1 << 62
    ((first),) = requested.first_gen_log_probs
    assert first[answer.tokens[0]] == Logprob(-0.5, 1)


async def test_descriptor_has_the_fields_that_constructors_take(pair: Pair) -> None:
    first, second = await pair.prefilled(PROMPT), await pair.prefilled(PROMPT)
    one, other = (msgspec.msgpack.decode(prefilled.descriptor) for prefilled in (first, second))
    assert one["ctx_usage"] == {"prompt_tokens": len(PROMPT)}, "without the field that its constructor does not take"
    assert one["disagg_request_id"] != other["disagg_request_id"]
    assert (await pair.decoded(PROMPT, first)).tokens == answer_of(PROMPT, 6)
    requested = pair.decode_backend.requested_with[-1]["disaggregated_params"]
    assert requested.disagg_request_id == one["disagg_request_id"]


async def test_simple_log_probabilities_of_the_first_token(pair: Pair) -> None:
    pair.prefill_backend.simple_logprobs = True
    prefilled = await pair.prefilled(PROMPT, logprobs=0)
    answer = await pair.decoded(PROMPT, prefilled, logprobs=0)
    assert answer.tokens == answer_of(PROMPT, 6)
    requested = pair.decode_backend.requested_with[-1]["disaggregated_params"]
    assert requested.first_gen_log_probs == [{answer.tokens[0]: Logprob(-0.5, None)}]


async def test_decode_is_aborted_after_its_kv_has_arrived(pair: Pair) -> None:
    backend = pair.decode_backend
    prefilled = await pair.prefilled(PROMPT)
    backend.step.clear()
    item = pair.decode.item(PROMPT, 6, stage="decode", prefilled=prefilled)
    pair.decode.submit(item)
    await until(lambda: backend.running)
    pair.decode.engine.cancel(item.request_id)
    for _ in range(5):
        await asyncio.sleep(0)
    assert not backend.aborted
    backend.step.set()
    await until(lambda: backend.aborted)
    assert backend.healthy and not pair.decode.answers[item.request_id].over
    backend.deaf = True  # the engine stops although this transfer never ends
    hung = pair.decode.item(PROMPT, 6, stage="decode", prefilled=prefilled)
    pair.decode.submit(hung)
    await until(lambda: backend.running)
    pair.decode.engine.cancel(hung.request_id)


async def test_decode_worker_computes_aggregated_prompts(pair: Pair) -> None:
    assert (await pair.decode.ask(PROMPT, 6)).tokens == answer_of(PROMPT, 6)
    assert pair.decode_backend.requested_with[-1]["disaggregated_params"] is None


async def test_unfetchable_kv_is_reported(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT)
    for changes, fragment in (
        ({"model": "other"}, "of model other"),
        ({"descriptor": msgspec.msgpack.encode({"unknown": 1})}, "unknown"),
        ({"descriptor": msgspec.msgpack.encode({"first_gen_tokens": [1], "opaque_state": b"x"})}, "transfer failed"),
    ):
        answer = await pair.decoded(PROMPT, msgspec.structs.replace(prefilled, **changes))
        assert fragment in (answer.not_fetched or ""), answer
    refused = await pair.decoded(PROMPT, prefilled, top_p=1.5)
    assert refused.error is not None and refused.error.status == 400
    assert (await pair.decoded(PROMPT, prefilled)).tokens == answer_of(PROMPT, 6)


async def test_hung_transfer_ends_with_its_lease(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = await pair.prefilled(PROMPT)
    monkeypatch.setattr(tensorrt_llm_engine, "LEASE_S", 0.01)
    pair.decode_backend.deaf = True
    assert "could not continue" in ((await pair.decoded(PROMPT, prefilled)).not_fetched or "")
    assert pair.decode_backend.aborted


async def test_prefill_needs_the_prefill_role_and_a_second_token(pair: Pair) -> None:
    answer = await pair.decode.ask(PROMPT, stage="prefill")
    assert answer.error is not None and answer.error.status == 501
    pair.prefill_backend.end_after[PROMPT[0]] = "stop"
    answer = await pair.prefill.ask(PROMPT, stage="prefill")
    assert answer.error is not None and (answer.error.status, "ends with its first token" in answer.error.message) == (
        500,
        True,
    )


async def test_kv_counts_as_kept_until_no_block_is_in_use(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair.prefill.engine
    assert isinstance(engine, TensorRtLlmEngine)
    assert isinstance(engine, KvEngine)
    for prompt in (PROMPT, [9, *PROMPT]):
        await pair.prefilled(prompt)
    last = list(pair.prefill.answers)[-1]
    pair.prefill_backend.step.clear()
    running = pair.prefill.item([8, *PROMPT], stage="prefill")
    pair.prefill.submit(running)
    assert engine.kept() == 2
    engine.release(last)
    assert engine.kept() == 1
    engine.cancel(running.request_id)
    assert engine.kept() == 0


def test_unencodable_parameters_are_unfetchable() -> None:
    strange: Any = object()
    unknown: list[Any] = [
        None,
        {},
        DisaggregatedParams(opaque_state=strange),
        DisaggregatedParams(first_gen_log_probs=[3]),
    ]
    for params in unknown:
        with pytest.raises(Unfetchable):
            descriptor(params)
