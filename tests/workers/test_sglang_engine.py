"""The SGLang engine with a stand-in: behaviour beyond the contract of all engines."""

import asyncio
import contextlib
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY, Counter

from forebay.events.control import Command
from forebay.events.requests import Sampling, StructuredOutput, TokenBias
from forebay.events.tokens import TopLogprob
from forebay.workers.engine import Cleared, EngineError, EngineRefused
from forebay.workers.engines import model_engine
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang.core import engine_arguments, kv_sources
from forebay.workers.engines.sglang.engine import SglangEngine
from forebay.workers.engines.sglang.requests import sampling_arguments
from tests.workers.conftest import until
from tests.workers.engine_setup import PROMPT, SPEC, Start, lora_directory, reported, standin_settings, starter
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


async def test_tokens_are_streamed_with_log_probabilities(started: Start) -> None:
    async with started() as one:
        answer = await one.ask(PROMPT, 5, logprobs=2)
        assert answer.tokens == answer_of(PROMPT, 5)
        assert [place.logprob for place in answer.logprobs] == [-0.5] * 5
        assert answer.logprobs[0].top == (
            TopLogprob(token_id=answer.tokens[0], logprob=-0.5),
            TopLogprob(token_id=7, logprob=-9999.0),  # JSON has no infinity
        )
        (alone,) = (await one.ask(PROMPT, 1, logprobs=0)).logprobs
        assert alone.top == ()


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


async def test_embeddings(started: Start) -> None:
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


def test_sampling_arguments() -> None:
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


def test_arguments(settings: EngineSettings) -> None:
    arguments = engine_arguments(settings, None)
    assert (arguments["page_size"], arguments["max_total_tokens"]) == (4, 128)
    assert "kv_events_config" not in arguments and "dp_size" not in arguments
    with pytest.raises(EngineError, match="--block-size"):
        engine_arguments(replace(settings, block_size=None), None)
    with pytest.raises(EngineError, match="encode"):
        engine_arguments(replace(settings, role="encode"), None)


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
