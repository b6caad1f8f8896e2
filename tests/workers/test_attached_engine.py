"""Attached servers as engines: the stand-in, and servers that send what they should not."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.control import Command
from forebay.events.requests import StructuredOutput
from forebay.events.transfer import Prefilled
from forebay.ingress.model import DEFAULT_MODEL
from forebay.workers.engine import EngineError, EngineRefused
from forebay.workers.engines import model_engine
from forebay.workers.engines.attached import engine as engine_module
from forebay.workers.engines.attached.completions import HALF_LEASE_S
from forebay.workers.engines.settings import EngineSettings
from tests.harness.openai_server import OpenAiServer
from tests.workers.attached import HANG, MODEL, OddServer, attached, chunk, described
from tests.workers.conftest import until
from tests.workers.engine_setup import lora_directory, reported

BLOCK = 4
PROMPT = list(range(300, 312))  # three blocks
LOADS = b"vllm:num_requests_running{} %d\nvllm:num_requests_waiting{} 1\nvllm:kv_cache_usage_perc{} 0.5\n"


def server_of(**settings: Any) -> OpenAiServer:
    return OpenAiServer(block_size=BLOCK, **settings)


# The stand-in


async def test_a_server_of_text_returns_the_same_text() -> None:
    prompt = MODEL.encode("what is on the log?")
    async with server_of(flavor="plain") as plain, server_of() as vllm, attached(plain) as one, attached(vllm) as other:
        assert (one.spec.salts_cache, one.spec.kv_events) == (False, False)
        text, expected = await one.ask(prompt, 12), await other.ask(prompt, 12)
        assert MODEL.decode(text.tokens) == MODEL.decode(expected.tokens)
        assert all(chunk.text_only for batch in one.batches for chunk in batch.emitted)
        assert not any(chunk.text_only for batch in other.batches for chunk in batch.emitted)


async def test_a_server_that_ignores_token_ids_is_a_server_of_text() -> None:
    async with server_of() as server:
        server.faults.without_token_ids = True
        async with attached(server) as one:
            assert (await one.ask(PROMPT, 6)).finished is not None
            assert all(chunk.text_only for batch in one.batches for chunk in batch.emitted)
            answer = await one.ask(PROMPT, 6, logprobs=1)  # tokens computed from text have no log probabilities
            assert answer.error is not None and answer.error.code == "not_supported"


async def test_a_request_fits_into_the_context_of_the_server() -> None:
    async with server_of(max_model_len=20) as server, attached(server) as one:
        answer = await one.ask(PROMPT, 500, min_tokens=9)
        assert answer.finished is not None and (answer.finished.reason, len(answer.tokens)) == ("length", 8)
        beyond = await one.ask(list(range(300, 320)), 1)
        assert beyond.error is not None and beyond.error.code == "context_length_exceeded"


async def test_a_salted_request_needs_a_server_that_salts_or_a_permission() -> None:
    async with server_of(flavor="plain") as server:
        async with attached(server) as one:
            answer = await one.ask(PROMPT, 2, cache_namespace="tenant")
            assert answer.error is not None and "--allow-shared-cache" in answer.error.message
        async with attached(server, allow_shared_cache=True) as one:
            assert one.spec.salts_cache
            assert (await one.ask(PROMPT, 2, cache_namespace="tenant")).error is None


async def test_structured_output_needs_a_server_that_enforces_it() -> None:
    structured = StructuredOutput(kind="json_object")
    async with server_of(flavor="plain") as server, attached(server) as one:
        answer = await one.ask(PROMPT, 20, structured=structured)
        assert answer.error is not None and (answer.error.status, answer.error.code) == (501, "not_supported")
        assert (await one.ask(PROMPT, 2)).error is None
    async with server_of() as server, attached(server) as one:
        answer = await one.ask(PROMPT, 40, structured=structured, ignore_eos=False)
        assert answer.error is None
        json.loads(MODEL.decode(answer.tokens))


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        ({"seed": 7, "temperature": 1.0}, "enable_deterministic_inference"),
        ({"stop_token_ids": (5,), "ignore_eos": True}, "stop_token_ids"),
    ],
)
async def test_a_parameter_that_sglang_ignores_is_rejected(sampling: dict[str, Any], reason: str) -> None:
    async with server_of(flavor="sglang") as server, attached(server) as one:
        answer = await one.ask(PROMPT, 2, **sampling)
        assert answer.error is not None and (answer.error.status, answer.error.code) == (400, "unsupported_parameter")
        assert reason in answer.error.message
        assert (await one.ask(PROMPT, 2, seed=7, temperature=0.0)).error is None
    async with server_of(flavor="vllm") as server, attached(server) as one:
        assert (await one.ask(PROMPT, 2, **sampling)).error is None


async def test_a_deterministic_sglang_gets_the_seed() -> None:
    async with server_of(flavor="sglang", is_deterministic=True) as server, attached(server) as one:
        assert (await one.ask(PROMPT, 2, seed=7, temperature=1.0)).error is None


async def test_a_cut_stream_continues_and_keeps_its_cached_tokens() -> None:
    async with server_of() as server, attached(server) as one:
        expected = await one.ask(PROMPT, 20)
        other = list(range(400, 412))
        server.faults.cut_after_tokens = 8
        answer = await one.ask(PROMPT, 20)
        assert answer.finished is not None and expected.finished is not None
        assert answer.tokens == expected.tokens
        assert (answer.finished.output_tokens, one.metric("forebay_upstream_events_total") > 0) == (20, True)
        fresh = await one.ask(other, 20)
        assert fresh.finished is not None and fresh.finished.cached_tokens == 0  # not those of the continuation


@pytest.mark.parametrize(
    ("flavor", "sampling", "reason"),
    [
        ("vllm", {"frequency_penalty": 0.5}, "penalties"),
        ("vllm", {"presence_penalty": 0.5}, "penalties"),
        ("vllm", {"structured": StructuredOutput(kind="json_object")}, "structured"),
        ("plain", {}, "text only"),
    ],
)
async def test_a_cut_stream_that_cannot_continue_is_an_error(
    flavor: Any, sampling: dict[str, Any], reason: str
) -> None:
    async with server_of(flavor=flavor) as server, attached(server) as one:
        server.faults.cut_after_tokens = 5
        answer = await one.ask(PROMPT, 20, **sampling)
        assert answer.error is not None and (answer.error.status, answer.error.code) == (502, "response_interrupted")
        assert reason in answer.error.message
        server.faults.cut_after_tokens = None
        assert (await one.ask(PROMPT, 2, **sampling)).error is None  # the worker continues


@pytest.mark.parametrize(("flavor", "sampling"), [("vllm", {"frequency_penalty": 0.5}), ("plain", {})])
async def test_the_response_of_another_worker_is_not_continued_wrongly(flavor: Any, sampling: dict[str, Any]) -> None:
    async with server_of(flavor=flavor) as server, attached(server) as one:
        item = one.item(PROMPT, 4, **sampling)
        answer = one.submit(msgspec.structs.replace(item, output_tokens=3))
        await one.until(lambda: answer.over)
        assert answer.error is not None and answer.error.code == "response_interrupted"


async def test_a_stream_that_is_cut_again_and_again_is_an_error() -> None:
    async with server_of() as server, attached(server) as one:
        server.faults.cut_after_tokens = 1
        answer = await one.ask(PROMPT, 20)
        assert answer.error is not None and "cut its stream again" in answer.error.message
        assert len(answer.tokens) == 4


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_only_vllm_transfers_kv(role: Any) -> None:
    settings = EngineSettings(model=DEFAULT_MODEL, model_name="m", role=role)
    async with server_of(flavor="sglang") as server:
        with pytest.raises(EngineError, match="only vLLM transfers KV"):
            async with attached(server, settings):
                pass


async def test_one_server_computes_a_prompt_for_another() -> None:
    async with (
        server_of(kv_transfer=True) as first,
        server_of(kv_transfer=True) as second,
        attached(first, EngineSettings(model=DEFAULT_MODEL, model_name="m", role="prefill")) as prefill,
        attached(second, EngineSettings(model=DEFAULT_MODEL, model_name="m", role="decode")) as decode,
    ):
        expected = await prefill.ask(PROMPT, 10)
        kept = (await prefill.ask(PROMPT, 10, stage="prefill")).prefilled
        assert isinstance(kept, Prefilled)
        assert (kept.tokens, kept.lease_us) == (12, int(HALF_LEASE_S * 1e6))
        answer = await decode.ask(PROMPT, 10, stage="decode", prefilled=kept)
        assert (answer.tokens, second.counters.fetched_tokens) == (expected.tokens, 12)
        lost = await decode.ask(PROMPT[:8], 10, stage="decode", prefilled=kept)
        assert lost.not_fetched is not None and "covers 12 tokens" in lost.not_fetched
        first.faults.lose_kv = True
        other = list(range(400, 412))
        kept = (await prefill.ask(other, 10, stage="prefill")).prefilled
        gone = await decode.ask(other, 10, stage="decode", prefilled=kept)
        assert gone.not_fetched is not None
        assert (await decode.ask(other, 10)).error is None


async def test_a_new_prompt_has_no_cached_tokens_for_the_prefill_stage() -> None:
    settings = EngineSettings(model=DEFAULT_MODEL, model_name="m", role="prefill")
    async with (
        server_of(kv_transfer=True, kv_events=True, prompt_tokens_details=False) as server,
        attached(server, settings) as one,
    ):
        for first in range(100, 400, 50):
            await one.ask(list(range(first, first + 12)), 1, stage="prefill")
        assert [done.cached_tokens for batch in one.batches for done in batch.prefilled] == [0] * 6


async def test_a_server_without_kv_transfer_cannot_prefill() -> None:
    async with server_of() as server, attached(server) as one:
        answer = await one.ask(PROMPT, 10, stage="prefill")
        assert answer.error is not None and "--kv-transfer-config" in answer.error.message


@pytest.mark.parametrize("flavor", ["vllm", "sglang"])
async def test_adapters_are_loaded_at_the_server(flavor: Any, tmp_path: Path) -> None:
    first, second = (lora_directory(tmp_path / name) for name in ("one", "two"))
    async with server_of(flavor=flavor, enable_lora=True, kv_events=True) as server, attached(server) as one:
        load = Command(action="load_lora", lora_name="a", lora_path=str(first))
        assert await one.engine.command(load) == await one.engine.command(load) == ("a",)
        for name, path in (("a", str(second)), ("b", ""), ("b", str(tmp_path / "nowhere")), ("", str(first))):
            with pytest.raises(EngineRefused):
                await one.engine.command(Command(action="load_lora", lora_name=name, lora_path=path))
        await one.ask(PROMPT, 2)
        answer = await one.ask(PROMPT, 2, lora_name="a")
        assert answer.finished is not None and answer.finished.cached_tokens == 0  # the adapter's, not the base model's
        assert (await described(server.url)).loras.keys() <= {"a"}
        assert await one.engine.command(Command(action="unload_lora", lora_name="a")) == ()
        with pytest.raises(EngineRefused, match="was used for"):
            await one.engine.command(Command(action="load_lora", lora_name="a", lora_path=str(second)))
        assert await one.engine.command(load) == ("a",)


async def test_a_cache_in_use_is_not_reported_as_cleared() -> None:
    async with server_of(kv_events=True) as server, attached(server) as one:
        await one.ask(PROMPT, 2)
        await reported(one, one.blocks(PROMPT))
        server.faults.token_s = 60.0
        long = one.submit(one.item(PROMPT, 20))
        await one.until(lambda: long.tokens)
        with pytest.raises(EngineRefused, match="reset_prefix_cache"):
            await one.engine.command(Command(action="clear_kv_blocks"))
        assert one.blocks(PROMPT) <= set(one.engine.held(0))
        one.engine.cancel(long.item.request_id)
        await until(lambda: server.counters.aborted == 1)  # closing the connection aborts the request
        await one.engine.command(Command(action="clear_kv_blocks"))
        await one.until(lambda: not one.held[0])


@pytest.mark.parametrize("action", ["sleep", "wake_up", "pause", "resume"])
async def test_commands_that_a_server_does_not_have_are_refused(action: Any) -> None:
    async with server_of(flavor="plain") as server, attached(server) as one:
        for command in (Command(action=action), Command(action="clear_kv_blocks")):
            with pytest.raises(EngineRefused):
                await one.engine.command(command)


async def test_a_reset_keeps_the_cache_of_the_server() -> None:
    async with server_of(kv_events=True) as server, attached(server) as one:
        await one.ask(PROMPT, 2)
        await reported(one, one.blocks(PROMPT))
        server.faults.token_s = 60.0
        long = one.submit(one.item(PROMPT, 20))
        await one.until(lambda: long.tokens)
        one.engine.reset()
        assert one.blocks(PROMPT) <= set(one.engine.held(0))
        await until(lambda: server.counters.aborted == 1)
        assert not long.over


# A server that is lost


async def test_a_server_that_disappears_ends_the_engine() -> None:
    async with server_of(token_s=60.0) as server, attached(server) as one:
        answer = one.submit(one.item(PROMPT, 20))
        await one.until(lambda: answer.tokens)
        await server.stop()
        await until(lambda: one.ended)
        assert isinstance(one.ended, EngineError) and not answer.over  # it continues on another worker
        with pytest.raises(EngineError):
            await one.engine.check()


async def test_a_response_of_text_ends_with_an_error_if_its_server_disappears() -> None:
    async with server_of(flavor="plain", token_s=0.01) as server, attached(server) as one:
        answer = one.submit(one.item(PROMPT, 200))
        await one.until(lambda: answer.tokens)
        await server.stop()
        await one.until(lambda: answer.over)
        assert answer.error is not None and "text only" in answer.error.message


async def test_a_server_that_serves_another_model_by_now_ends_the_engine() -> None:
    async with server_of() as server, attached(server) as one:
        server.faults.model_name = "another"
        with pytest.raises(EngineError, match="serves another, not"):
            await one.engine.check()
        answer = one.submit(one.item(PROMPT, 20))  # before the next check
        await until(lambda: one.ended)
        assert not answer.over


async def test_a_server_that_serves_other_weights_by_now_ends_the_engine() -> None:
    async with server_of() as server, attached(server) as one:
        server.settings = msgspec.structs.replace(server.settings, model=Path("/other"))
        with pytest.raises(EngineError, match=r"serves \S+ from /other, not /.*default_model"):
            await one.engine.check()


async def test_a_dying_server_fails_no_request() -> None:
    async with server_of() as server, attached(server) as one:
        server.faults.status = 500
        answer = await one.ask(PROMPT, 2)
        assert answer.error is not None and answer.error.code == "engine_error"  # it is healthy
        server.faults.health_status = 503
        answer = one.submit(one.item(PROMPT, 2))
        await until(lambda: one.ended)
        assert not answer.over


@pytest.mark.parametrize("status", [429, 503])
async def test_an_overloaded_server_rejects_requests_and_stays(status: int) -> None:
    async with server_of() as server, attached(server) as one:
        server.faults.status = status
        answer = await one.ask(PROMPT, 2)
        assert answer.error is not None and (answer.error.status, answer.error.code) == (status, "engine_overloaded")
        await one.engine.check()


async def test_a_server_that_hangs_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server_of() as server, attached(server) as one:
        monkeypatch.setattr("forebay.workers.engines.attached.server.REPLY_S", 0.0)
        server.faults.hang_all = True
        with pytest.raises(EngineError, match="did not reply to /health"):
            await one.engine.check()


async def test_an_idle_server_that_accepts_and_never_answers_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server_of() as server, attached(server) as one:
        monkeypatch.setattr(model_engine, "CANARY_EVERY_S", -1.0)
        await one.engine.check()
        await until(lambda: server.counters.finished == 2)  # the probe and a health request
        monkeypatch.setattr(model_engine, "CANARY_TIMEOUT_S", -1.0)
        server.faults.hang = True

        async def check_again_and_again() -> None:
            while True:
                await one.engine.check()

        with pytest.raises(EngineError, match="health request"):
            await check_again_and_again()


async def test_a_server_that_rejects_the_health_request_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    async with server_of() as server, attached(server) as one:
        monkeypatch.setattr(model_engine, "CANARY_EVERY_S", -1.0)
        server.faults.status = 503
        await one.engine.check()
        await until(lambda: server.counters.refused == 1)
        await one.engine.check()
        await one.engine.check()


# Load


async def test_the_load_is_that_of_the_server_also_if_it_arrives_in_parts() -> None:
    async with OddServer() as server:
        server.replies["/metrics"] = (200, [b"x 1\n" * 50_000, LOADS[:40] % 3, LOADS[40:]])
        async with attached(server) as one:
            await one.until(lambda: one.batches and one.batches[-1].load.running == 3)
            load = one.batches[-1].load
            assert (load.waiting, load.kv_blocks_used) == (1, load.kv_blocks_total // 2)


@pytest.mark.parametrize(("status", "body"), [(404, b""), (200, b"vllm:num_requests_running{ 1\n")])
async def test_unreadable_metrics_leave_the_load_of_the_own_requests(
    status: int, body: bytes, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "LOAD_S", 0.0)
    async with OddServer() as server:
        server.replies["/metrics"] = (status, [body])
        server.streams = [[chunk([7]), HANG]]
        async with attached(server) as one:
            answer = one.submit(one.item(PROMPT, 4))
            await one.until(lambda: answer.tokens and one.batches[-1].load.running == 1)
            counted = engine_module.AttachedEngine
            assert isinstance(one.engine, counted)
            counts = one.engine.counts
            await until(lambda: counts["metrics_unreadable"] > 2)
    assert [record.levelname for record in caplog.records if "the load of" in record.message] == ["WARNING"]
