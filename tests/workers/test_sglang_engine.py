"""The SGLang engine with a stand-in: behaviour beyond the contract of all engines.

Its prefill and decode roles were never run with a real SGLang.
"""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter

from forebay.events.control import Command
from forebay.events.decisions import Stage
from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.events.transfer import Prefilled
from forebay.workers.engine import Cleared, EngineError, EngineRefused
from forebay.workers.engines import model_engine
from forebay.workers.engines.kv_descriptor import decoded
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang import engine as sglang_engine
from forebay.workers.engines.sglang.core import bootstrap_host, engine_arguments, kv_sources
from forebay.workers.engines.sglang.engine import CONNECTOR, Rendezvous, SglangEngine, new_room
from forebay.workers.engines.sglang.requests import sampling_arguments
from forebay.workers.kv_tiers.settings import TierSettings
from tests.engines.driven import Driven
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
from tests.workers.standins import sglang_standin
from tests.workers.standins.little import answer_of
from tests.workers.standins.sglang_standin import Engine, PauseGenerationReqInput, TokenizerManager


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    sglang_standin.install(monkeypatch)
    return standin_settings(tmp_path)


@pytest.fixture
def started(settings: EngineSettings) -> Start:
    return starter(SglangEngine, settings)


def manager() -> TokenizerManager:
    assert Engine.made is not None and Engine.made.tokenizer_manager is not None
    return Engine.made.tokenizer_manager


async def test_accumulated_chunks_are_emitted_completely(started: Start) -> None:
    async with started() as one:
        engine = manager()
        engine.step.clear()
        answers = [one.submit(one.item([*PROMPT, number], 9)) for number in range(3)]
        engine.step.set()
        await one.until(lambda: all(answer.over for answer in answers))
        assert [answer.tokens for answer in answers] == [answer_of([*PROMPT, number], 9) for number in range(3)]


@pytest.mark.parametrize(
    ("status", "code"),
    [(400, "invalid_request"), (503, "engine_overloaded"), (500, "engine_error"), (None, "engine_overloaded")],
)
async def test_response_that_sglang_aborts(started: Start, status: int | None, code: str) -> None:
    async with started() as one:
        reason = {"type": "abort", "message": "no memory left", "status_code": status, "err_type": None}
        item = one.item(PROMPT, 9)
        manager().abort_after[item.request_id] = reason
        answer = one.submit(item)
        await one.until(lambda: answer.over)
        assert answer.error is not None and answer.error.code == code and "no memory left" in answer.error.message
        # SGLang repeats the last token with the end.
        assert answer.tokens == answer_of(PROMPT, len(answer.tokens)) and len(answer.tokens) == 1
        assert (await one.ask(PROMPT, 3)).error is None


async def test_rejections_have_the_message_of_sglang(started: Start) -> None:
    async with started() as one:
        for wrong in ({"top_p": 7.0}, {"structured": StructuredOutput(kind="choice", text="{}")}):
            answer = await one.ask(PROMPT, 2, **wrong)
            assert answer.error is not None and answer.error.status == 400
            assert "choices" in answer.error.message or "top_p" in answer.error.message
        assert (await one.ask(PROMPT, 2, task="embed")).error is not None


async def test_no_request_id_is_a_prefix_of_another(started: Start) -> None:
    """SGLang aborts whatever begins with an id."""
    async with started() as one:
        manager().step.clear()
        names = ["a", "ab", "a1"]
        items = [msgspec.structs.replace(one.item([*PROMPT, at], 4), request_id=name) for at, name in enumerate(names)]
        answers = [one.submit(item) for item in items]
        await until(lambda: len(manager().rid_to_state) == len(names))
        one.engine.cancel("a")
        manager().step.set()
        await one.until(lambda: all(answer.over for answer in answers[1:]))
        assert [len(answer.tokens) for answer in answers] == [0, 4, 4]
        assert sum(isinstance(call, tuple) for call in manager().calls) == 1


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, None),
        ({"enable_priority_scheduling": True}, 3),
        ({"enable_priority_scheduling": True, "schedule_low_priority_values_first": True}, -3),
    ],
)
async def test_higher_priority_runs_sooner_if_sglang_schedules_by_priority(
    started: Start, arguments: dict[str, bool], wanted: int | None
) -> None:
    async with started(**arguments) as one:
        await one.ask(PROMPT, 1, priority=3)
        assert manager().requested_with[-1].get("priority") == wanted


async def test_sglang_gets_the_trace_context_of_a_request(started: Start) -> None:
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with started() as one:
        await one.ask(PROMPT, 1, traceparent=trace)
        assert manager().requested_with[-1]["external_trace_header"] == {"traceparent": trace}
        await one.ask(PROMPT, 1)
        assert "external_trace_header" not in manager().requested_with[-1]


@pytest.mark.parametrize("enabled", [False, True])
async def test_a_seed_needs_deterministic_inference(started: Start, enabled: bool) -> None:
    async with started(enable_deterministic_inference=enabled) as one:
        answer = await one.ask(PROMPT, 2, temperature=0.5, seed=7)
        if enabled:
            assert manager().requested_with[-1]["sampling_params"]["sampling_seed"] == 7
        else:
            assert answer.error is not None and answer.error.status == 400
            assert "enable_deterministic_inference" in answer.error.message
        assert (await one.ask(PROMPT, 2, seed=7)).error is None  # greedy


async def test_stop_tokens_do_not_apply_if_the_end_is_ignored(started: Start) -> None:
    stop = answer_of(PROMPT, 3)[-1]
    async with started() as one:
        stopped = await one.ask(PROMPT, 9, stop_token_ids=(stop,), ignore_eos=False)
        assert stopped.tokens == answer_of(PROMPT, 3)
        assert stopped.finished is not None and stopped.finished.reason == "stop"
        answer = await one.ask(PROMPT, 9, stop_token_ids=(stop,))
        assert answer.error is not None and answer.error.status == 400
        assert "SGLang ignores stop_token_ids" in answer.error.message


async def test_a_diffusion_model_emits_blocks(started: Start) -> None:
    """Also if `max_tokens` or a stop token ends the response inside of a block."""
    prompt = list(range(1, 11))
    async with started(dllm_algorithm="LowConfidence") as one:
        assert (one.spec.block_size, one.spec.max_num_seqs) == (sglang_standin.DLLM_BLOCK, 1)
        whole = await one.ask(prompt, 9)
        assert (whole.tokens, whole.error) == (answer_of(prompt, 9), None)
        assert whole.finished is not None and (whole.finished.reason, whole.finished.output_tokens) == ("length", 9)
        firsts = [first.request_id for batch in one.batches for first in batch.first_tokens]
        assert firsts == [whole.item.request_id]  # not for the steps without tokens
        stop = answer_of(prompt, 4)[-1]
        stopped = await one.ask(prompt, 9, stop_token_ids=(stop,), ignore_eos=False)
        assert stopped.tokens == answer_of(prompt, answer_of(prompt, 9).index(stop) + 1)
        await reported(one, one.blocks(prompt))
    async with started(dllm_algorithm="LowConfidence", max_running_requests=8) as one:
        assert one.spec.max_num_seqs == 8


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 7),
        ("presence_penalty", 0.5),
        ("frequency_penalty", 0.5),
        ("logit_bias", (TokenBias(token_id=3, bias=1.0),)),
        ("logprobs", 1),
        ("structured", StructuredOutput(kind="json_object")),
        ("min_tokens", 2),
    ],
)
async def test_a_diffusion_model_rejects_what_sglang_ignores(started: Start, name: str, value: Any) -> None:
    async with started(dllm_algorithm="LowConfidence") as one:
        answer = await one.ask(PROMPT, 4, **{name: value})
        assert answer.error is not None and (answer.error.status, answer.error.code) == (400, "unsupported_parameter")
        assert f"SGLang ignores {name} for diffusion models" in answer.error.message
        assert (await one.ask(PROMPT, 4, temperature=0.7, top_p=0.8, top_k=20)).error is None
    async with started() as one:
        assert (await one.ask(PROMPT, 4, **{name: value})).error is None


def test_a_diffusion_model_is_not_started_without_its_options(settings: EngineSettings, tmp_path: Path) -> None:
    diffusion = replace(settings, arguments={"dllm_algorithm": "LowConfidence"})
    assert engine_arguments(diffusion, None)["dllm_algorithm"] == "LowConfidence"
    tiers = TierSettings(host_bytes=8 * 10**9)
    for changes, name in (
        ({"role": "prefill"}, r"disaggregation_mode \(--role\)"),
        ({"loras": {"sql": tmp_path}}, r"enable_lora \(--lora\)"),
        ({"tiers": tiers}, r"enable_hierarchical_cache \(--kv-tier\)"),
    ):
        with pytest.raises(EngineError, match=name):
            engine_arguments(replace(diffusion, **changes), None)


async def test_a_token_id_beyond_the_vocabulary_does_not_reach_the_scheduler(started: Start) -> None:
    async with started() as one:
        answer = await one.ask([5, 512], 2)
        assert answer.error is not None and answer.error.status == 400
        assert answer.error.message == "token id 512 is not in the model's 512 token ids"
        assert (await one.ask([5, 511], 2)).error is None


async def test_a_response_ends_with_the_context(started: Start) -> None:
    async with started() as one:
        answer = await one.ask(list(range(120)), 100)
        assert answer.finished is not None and answer.finished.reason == "length"
        assert len(answer.tokens) == 8  # the context has 128 tokens


async def test_prompts_are_embedded(started: Start) -> None:
    async with started(is_embedding=True) as one:
        assert one.spec.tasks == ("embed",)
        answer = await one.ask(PROMPT, task="embed")
        assert answer.vector == (len(PROMPT), 0.5)
        assert answer.finished is not None and answer.finished.prompt_tokens == len(PROMPT)
        assert (await one.ask(PROMPT, 2)).error is not None


async def test_early_kv_events_are_replayed(started: Start) -> None:
    async with started() as one:
        warm_up = [0] * 16  # was answered before `run`
        await reported(one, one.blocks(warm_up))


async def test_idle_cache_is_cleared_at_once(started: Start) -> None:
    async with started() as one:
        await one.ask(PROMPT, 2)
        await reported(one, one.blocks(PROMPT))
        await one.engine.command(Command(action="clear_kv_blocks"))
        await one.until(lambda: not one.held[0])
        assert not one.engine.held(0)
        await one.ask(PROMPT, 2)
        await reported(one, one.blocks(PROMPT))
        assert one.ended is None


async def test_busy_cache_is_cleared_by_recomputation(started: Start) -> None:
    async with started() as one:
        answer = one.submit(one.item(PROMPT, 60))
        await one.until(lambda: answer.tokens)
        await one.engine.command(Command(action="clear_kv_blocks"))
        modes = [call.mode for call in manager().calls if isinstance(call, PauseGenerationReqInput)]
        assert modes == ["retract"] and not manager().is_pause
        await one.until(lambda: answer.over)
        assert answer.tokens == answer_of(PROMPT, 60)


async def test_reset_flushes_and_publishes_no_earlier_events(started: Start) -> None:
    async with started() as one:
        await one.ask(PROMPT, 2)
        await reported(one, one.blocks(PROMPT))
        one.engine.reset()
        assert not one.engine.held(0)
        one.held[0].clear()
        generated = len(one.batches)
        answer = await one.ask(PROMPT, 2)
        assert answer.cached == 0 and "flush_cache" in manager().calls
        await reported(one, one.blocks(PROMPT))
        assert not any(
            isinstance(change, Cleared) for batch in one.batches[generated:] for change in batch.cache_changes
        )


async def test_pause_keeps_requests_in_flight(started: Start) -> None:
    async with started() as one:
        answer = one.submit(one.item(PROMPT, 50))
        await one.until(lambda: answer.tokens)
        await one.engine.command(Command(action="pause"))
        assert manager().is_pause and not answer.over
        await one.engine.command(Command(action="resume"))
        await one.until(lambda: answer.over)
        assert len(answer.tokens) == 50


@pytest.mark.parametrize(
    ("level", "copies", "tags", "reloads"),
    [(1, False, ["kv_cache"], False), (1, True, None, False), (2, False, None, True), (2, True, None, False)],
)
async def test_sleep_waits_and_frees_restorable_memory(
    started: Start, level: int, copies: bool, tags: list[str] | None, reloads: bool
) -> None:
    async with started(enable_memory_saver=True, enable_weights_cpu_backup=copies) as one:
        under_way = one.submit(one.item(PROMPT, 30))
        await one.until(lambda: under_way.tokens)
        await one.engine.command(Command(action="sleep", level=level))
        assert len(under_way.tokens) <= 30 and manager().asleep == (tags or ["kv_cache", "weights", "cuda_graph"])
        await one.until(lambda: under_way.over and not one.held[0])
        waiting = one.submit(one.item(PROMPT, 3))
        with pytest.raises(EngineRefused, match="already"):
            await one.engine.command(Command(action="sleep", level=level))
        await one.engine.command(Command(action="clear_kv_blocks"))  # there is none
        assert not waiting.over and not manager().rid_to_state
        await one.engine.command(Command(action="wake_up"))
        await one.engine.command(Command(action="wake_up"))
        await one.until(lambda: waiting.over)
        assert waiting.error is None and not manager().weights_lost
        assert any(type(call).__name__ == "UpdateWeightFromDiskReqInput" for call in manager().calls) == reloads


async def test_sleep_needs_the_memory_saver(started: Start) -> None:
    async with started() as one:
        with pytest.raises(EngineRefused, match="enable_memory_saver"):
            await one.engine.command(Command(action="sleep"))
    async with started(enable_memory_saver=True) as one:
        answer = one.submit(one.item(PROMPT, 50))
        await one.until(lambda: answer.tokens)
        await one.engine.command(Command(action="pause"))
        with pytest.raises(EngineRefused, match="resume"):
            await one.engine.command(Command(action="sleep"))


async def test_adapter_that_sglang_rejects(started: Start, tmp_path: Path) -> None:
    broken = str(lora_directory(tmp_path / "broken"))
    load = Command(action="load_lora", lora_name="x", lora_path=broken)
    async with started(enable_lora=True) as one:
        with pytest.raises(EngineRefused, match="no weights in it"):
            await one.engine.command(load)
        assert await one.engine.command(Command(action="list_loras")) == ()
    async with started() as one:
        with pytest.raises(EngineRefused, match="enable_lora"):
            await one.engine.command(load)


async def test_reused_adapter_name_clears_the_cache(started: Start, tmp_path: Path) -> None:
    first, second = (str(lora_directory(tmp_path / name)) for name in ("first", "second"))
    async with started(enable_lora=True) as one:
        for path in (first, second):
            await one.engine.command(Command(action="load_lora", lora_name="x", lora_path=path))
            assert (await one.ask(PROMPT, 2, lora_name="x")).cached == 0
            await one.engine.command(Command(action="unload_lora", lora_name="x"))


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_prefill_or_decode_engine_warms_up_alone(started: Start, role: str) -> None:
    async with started(role=role) as one:
        requested = manager().requested_with[0]
        assert (requested["bootstrap_host"], requested["bootstrap_room"]) == ("2.2.2.2", 0)
        answer = await one.ask(PROMPT, 2)
        assert answer.error is not None and answer.error.status == 501


async def test_dead_scheduler_ends_run(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "child", True)
    async with started() as one:
        assert manager().watchdog.stopped
        manager().deaf = True
        answer = one.submit(one.item(PROMPT, 2))
        assert Engine.made is not None
        (process,) = Engine.made.processes
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="died"):
            await one.until(lambda: answer.over)
        with pytest.raises(EngineError, match="died"):
            await one.engine.check()
        with pytest.raises(EngineRefused, match="died"):
            await one.engine.command(Command(action="clear_kv_blocks"))


async def test_stop_ends_only_its_own_processes(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    other = await asyncio.create_subprocess_exec("sleep", "600")
    monkeypatch.setattr(Engine, "child", True)
    async with started():
        assert Engine.made is not None
        (process,) = Engine.made.processes
        assert process.is_alive()
    assert not process.is_alive() and other.returncode is None
    other.kill()
    await other.wait()


async def test_process_that_reports_a_failure_ends_run(started: Start) -> None:
    """By SIGQUIT, which would end this process as well."""
    async with started() as one:
        os.kill(os.getpid(), signal.SIGQUIT)
        with pytest.raises(EngineError, match="died"):
            await one.until(lambda: False)


async def test_broken_response_loop_ends_run(started: Start) -> None:
    async with started() as one:
        manager().broken = RuntimeError("nonsense from a scheduler")
        with pytest.raises(EngineError, match="nonsense from a scheduler"):
            await one.until(lambda: False)


async def test_failed_start_has_a_reason_and_leaves_no_process(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch, started: Start
) -> None:
    monkeypatch.setattr(Engine, "fails", RuntimeError("Rank 0 scheduler died during initialization"))
    with pytest.raises(EngineError, match="Rank 0 scheduler died"):
        async with started():
            pass
    monkeypatch.setattr(Engine, "fails", None)
    with pytest.raises(EngineError, match="unknown_option"):
        async with started(unknown_option=1):
            pass
    with pytest.raises(EngineError, match="incremental_streaming_output"):
        async with started(incremental_streaming_output=False):
            pass
    async with started() as one:
        assert (await one.ask(PROMPT, 2)).error is None


async def test_incompatible_build_is_reported(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("no kernel image for this machine")

    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.engine", Broken())
    with pytest.raises(EngineError, match=r"cannot import SGLang: no kernel image"):
        async with started():
            pass


async def test_a_node_that_is_not_the_first_never_registers(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "child", True)
    engine = SglangEngine(replace(settings, arguments={"node_rank": 1, "nnodes": 2}))
    starting = asyncio.create_task(engine.start(SPEC))
    try:
        await until(lambda: Engine.made is not None)
        done, _ = await asyncio.wait([starting], timeout=0.01)
        assert not done and engine.collectors()
        assert Engine.made is not None
        os.kill(Engine.made.processes[0].pid, signal.SIGKILL)
        with pytest.raises(EngineError, match="died"):
            await starting
    finally:
        starting.cancel()
        await engine.stop()


async def test_health_request_without_response_fails_the_check(started: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_engine, "CANARY_EVERY_S", -1.0)
    async with started() as one:
        await one.engine.check()  # starts a health request
        await until(lambda: not manager().rid_to_state and len(manager().requested_with) > 1)
        manager().deaf = True
        monkeypatch.setattr(model_engine, "CANARY_TIMEOUT_S", -1.0)
        with pytest.raises(EngineError, match="SGLang did not respond to a health request within -"):
            for _ in range(3):
                await one.engine.check()
                await asyncio.sleep(0)


async def test_loads_are_reported_and_return_to_idle(started: Start) -> None:
    async with started() as one:
        answers = [one.submit(one.item([*PROMPT, number], 90)) for number in range(2)]
        await one.until(lambda: any(batch.load.running == 2 for batch in one.batches))
        assert max(batch.load.kv_blocks_used for batch in one.batches) == 8  # 32 tokens
        assert {batch.load.kv_blocks_total for batch in one.batches} == {32}
        for answer in answers:
            one.engine.cancel(answer.item.request_id)
        await one.until(lambda: one.batches[-1].load.running == 0)


async def test_engine_metrics_are_exported(started: Start) -> None:
    counter = Counter("sglang:little_things", "of a test")
    try:
        async with started() as one:
            counter.inc()
            names = {metric.name for collector in one.engine.collectors() for metric in collector.collect()}
    finally:
        REGISTRY.unregister(counter)
    assert names == {"sglang:little_things", "forebay_worker_kv_events"}


def test_sampling_parameters_become_arguments_of_sglang() -> None:
    sampling = Sampling(
        max_tokens=9,
        temperature=0.5,
        seed=3,
        logit_bias=(TokenBias(token_id=5, bias=-1.5),),
        min_tokens=2,
        stop_token_ids=(1, 2),
        structured=StructuredOutput(kind="regex", text="a+"),
    )
    arguments = sampling_arguments(sampling)
    assert set(arguments) <= sglang_standin.SAMPLING_PARAMS
    assert arguments["top_k"] == -1 and arguments["logit_bias"] == {"5": -1.5}
    assert (arguments["max_new_tokens"], arguments["min_new_tokens"]) == (9, 2)
    assert (arguments["sampling_seed"], arguments["stop_token_ids"]) == (3, [1, 2])
    assert arguments["regex"] == "a+"


def test_settings_become_arguments_of_sglang(settings: EngineSettings) -> None:
    arguments = engine_arguments(settings, None)
    assert (arguments["page_size"], arguments["max_total_tokens"]) == (4, 128)
    assert "kv_events_config" not in arguments and "dp_size" not in arguments
    with pytest.raises(EngineError, match="--block-size"):
        engine_arguments(replace(settings, block_size=None), None)
    with pytest.raises(EngineError, match="encode"):
        engine_arguments(replace(settings, role="encode"), None)


def test_tiers_become_those_of_hicache(settings: EngineSettings) -> None:
    tiers = TierSettings(host_bytes=8 * 10**9, disk=Path("/kv"), disk_bytes=10**12)
    size = {"tp_size": 2, "pp_size": 2}
    arguments = engine_arguments(replace(settings, tiers=tiers, arguments=size), None)
    assert (arguments["enable_hierarchical_cache"], arguments["hicache_size"]) == (True, 2)
    disk = '{"file_storage_path": "/kv", "max_size": 250000000000}'
    found = arguments["hicache_storage_backend"], arguments["hicache_storage_backend_extra_config"]
    assert found == ("file", disk)
    attention = replace(settings, tiers=tiers, dp_size=2, arguments=size | {"enable_dp_attention": True})
    assert engine_arguments(attention, None)["hicache_size"] == 4, "a rank has half of the processes"


@pytest.mark.parametrize(
    ("tiers", "role", "key"),
    [
        (TierSettings(disk=Path("/kv")), "aggregated", "host:size is missing"),
        (TierSettings(host_bytes=1_500_000_000), "aggregated", "host:size: .* a multiple of 1GB, got 1,500,000,000"),
        (TierSettings(host_bytes=10**9, store="/mnt"), "aggregated", "store: "),
        (TierSettings(host_bytes=10**9, filter=True), "aggregated", "filter=on"),
        (TierSettings(host_bytes=10**9), "decode", "requires another role than decode"),
    ],
)
def test_what_hicache_cannot_do_is_an_error_that_names_the_option(
    settings: EngineSettings, tiers: TierSettings, role: Any, key: str
) -> None:
    with pytest.raises(EngineError, match=f"^--kv-tier {key}"):
        engine_arguments(replace(settings, tiers=tiers, role=role), None)


def test_kv_event_sources_come_from_the_arguments_of_sglang() -> None:
    given = '{"publisher": "zmq", "endpoint": "tcp://*:21000", "topic": "t"}'
    sources = kv_sources({"kv_events_config": given}, [4, 5])
    assert [(rank, source.endpoint.rpartition(":")[2], source.topic) for rank, source in sources.items()] == [
        (4, "21000", "t"),
        (5, "21001", "t"),
    ]
    assert kv_sources({}, [0]) == {}
    for wrong in ("{", "[]"):
        with pytest.raises(EngineError, match="kv_events_config"):
            kv_sources({"kv_events_config": wrong}, [0])


async def test_a_start_that_is_cancelled_ends_its_processes(
    settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Engine, "child", True)
    engine = SglangEngine(settings)
    starting = asyncio.create_task(engine.start(SPEC))
    await until(lambda: Engine.made is not None and Engine.made.processes)
    assert Engine.made is not None
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await starting
    await engine.stop()
    assert not any(process.is_alive() for process in Engine.made.processes)


Pair = StandinPair[TokenizerManager]


def started_manager() -> TokenizerManager | None:
    return None if Engine.made is None else Engine.made.tokenizer_manager


@pytest.fixture
async def pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    sglang_standin.install(monkeypatch)
    monkeypatch.setattr(Engine, "rooms", {})
    async with standin_pair(tmp_path, SglangEngine, started_manager) as both:
        yield both


def meeting(prefilled: Prefilled, tokens: int) -> Rendezvous:
    return decoded(prefilled, CONNECTOR, "m", tokens, msgspec.json.Decoder(Rendezvous).decode)


async def test_prefill_and_decode_share_a_unique_room(pair: Pair) -> None:
    prefilled = await pair.prefilled(PROMPT)
    assert (prefilled.connector, prefilled.worker_id, prefilled.tokens) == (CONNECTOR, "prefill", len(PROMPT))
    meet = meeting(prefilled, len(PROMPT))
    assert (meet.host, meet.port) == ("127.0.0.1", pair.prefill_backend.arguments["disaggregation_bootstrap_port"])
    assert meet.port != 8998, "that is every SGLang's"
    assert pair.prefill.engine.kept() == 1  # type: ignore[attr-defined]
    answer = await pair.decoded(PROMPT, prefilled)
    assert answer.tokens == answer_of(PROMPT, 6)
    for manager, tokens in ((pair.prefill_backend, 1), (pair.decode_backend, 6)):
        requested = manager.requested_with[-1]
        assert requested["bootstrap_room"] == meet.room
        assert requested["sampling_params"]["max_new_tokens"] == tokens
    await pair.nothing_kept()
    other = await pair.prefilled([9, *PROMPT])
    assert meeting(other, len(PROMPT) + 1).room != meet.room


async def test_unfetched_prompt_is_cancelled(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = pair.prefill.engine
    assert isinstance(engine, SglangEngine)
    await pair.prefilled(PROMPT)
    engine.release("another")
    engine.drop(
        Prefilled(worker_id="p", worker_epoch=1, model="m", connector="x", descriptor=b"", tokens=1, lease_us=1)
    )
    assert engine.kept() == 1
    engine.release(list(pair.prefill.answers)[-1])
    await pair.nothing_kept()
    monkeypatch.setattr(sglang_engine, "LEASE_S", 0.01)
    await pair.prefilled(PROMPT)
    await pair.nothing_kept()
    await until(lambda: [name for name, *_ in pair.prefill_backend.calls].count("abort") == 2)
    assert not pair.prefill_backend.rid_to_state


async def test_unfetchable_kv_is_reported(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    prefilled = await pair.prefilled(PROMPT)
    invalid = msgspec.structs.replace(prefilled, descriptor=b'{"host":"h","port":0,"room":1}')
    assert "cannot decode" in ((await pair.decoded(PROMPT, invalid)).not_fetched or "")
    monkeypatch.setattr(sglang_engine, "LEASE_S", 0.01)
    pair.prefill_backend.deaf = pair.decode_backend.deaf = True
    assert "no token before the lease" in ((await pair.decoded(PROMPT, prefilled)).not_fetched or "")
    assert not pair.decode_backend.rid_to_state


@pytest.mark.parametrize(("status", "fetched"), [(500, False), (400, True)])
async def test_aborted_decode_request_was_not_fetched_unless_it_is_invalid(
    pair: Pair, status: int, fetched: bool
) -> None:
    prefilled = await pair.prefilled(PROMPT)
    item = pair.decode.item(PROMPT, stage="decode", prefilled=prefilled)
    reason = {"type": "abort", "status_code": status, "message": "KVTransferError: peer is gone"}
    pair.decode_backend.abort_before[item.request_id] = reason
    answer = pair.decode.submit(item)
    await pair.decode.until(lambda: answer.over)
    text = answer.not_fetched if answer.error is None else answer.error.message
    assert "peer is gone" in (text or "")
    assert (answer.error is not None) == fetched
    refused = await pair.decoded(PROMPT, await pair.prefilled(PROMPT), top_p=1.5)
    assert refused.error is not None and refused.error.status == 400


async def test_decode_is_aborted_after_its_kv_has_arrived(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, engine = pair.decode_backend, pair.decode.engine
    for refused in (False, True):
        backend.step.clear()
        item = pair.decode.item(PROMPT, 6, stage="decode", prefilled=await pair.prefilled(PROMPT))
        if refused:
            backend.abort_before[item.request_id] = {"type": "abort", "status_code": 400, "message": "wrong"}
        answer = pair.decode.submit(item)
        await until(lambda: backend.rid_to_state)
        engine.cancel(item.request_id)
        for _ in range(5):
            await asyncio.sleep(0)
        assert backend.rid_to_state
        backend.step.set()
        await until(lambda: not backend.rid_to_state)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not answer.over and not answer.tokens
        assert [name for name, *_ in backend.calls].count("abort") == 1, "the refused one had ended"
    backend.deaf = True
    monkeypatch.setattr(SglangEngine, "ABORT_WITHIN_S", 0.0)
    hung = pair.decode.item(PROMPT, 6, stage="decode", prefilled=await pair.prefilled(PROMPT))
    pair.decode.submit(hung)
    await until(lambda: backend.rid_to_state)
    engine.cancel(hung.request_id)
    await until(lambda: not backend.rid_to_state)


async def test_other_stages_are_refused(pair: Pair) -> None:
    others: tuple[tuple[Driven, Stage], ...] = (
        (pair.prefill, "aggregated"),
        (pair.prefill, "decode"),
        (pair.decode, "prefill"),
    )
    for one, stage in others:
        answer = await one.ask(PROMPT, stage=stage)
        assert answer.error is not None and answer.error.status == 501
    alone = await pair.decode.ask(PROMPT)
    assert alone.error is not None and "computes no prompts" in alone.error.message


def test_rooms_encode_the_rank() -> None:
    rooms = [new_room(rank, 3) for rank in (0, 1, 2) * 20]
    assert [room % 3 for room in rooms] == [0, 1, 2] * 20
    assert len(set(rooms)) == len(rooms)


def test_the_bootstrap_host_is_the_configured_or_the_local_address(monkeypatch: pytest.MonkeyPatch) -> None:
    sglang_standin.install(monkeypatch)
    assert bootstrap_host({"dist_init_addr": "10.0.0.1:5000"}) == "10.0.0.1"
    assert bootstrap_host({}) == "127.0.0.1"
    older = ModuleType("sglang.srt.utils")
    setattr(older, "get_local_ip_auto", lambda: "fd00::1")  # noqa: B010
    monkeypatch.setitem(sys.modules, "sglang.srt.utils", older)
    monkeypatch.setitem(sys.modules, "sglang.srt.utils.network", None)
    assert bootstrap_host({}) == "[fd00::1]"
