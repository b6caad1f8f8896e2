"""Contract of every engine: one suite over vLLM, SGLang and TensorRT-LLM with stand-ins, a server, and the mock.

The mock runs in this process, and in a process of its own. Other tests cover what is special about such a process, and
the KV descriptors of every engine.
"""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.engine_model.model import EngineConfig
from forebay.events.control import Command
from forebay.events.tokens import TopLogprob
from forebay.events.transfer import Prefilled
from forebay.workers.engine import Engine, EngineError, EngineRefused
from forebay.workers.engines import tokenizer_check
from forebay.workers.engines.attached import completions as attached
from forebay.workers.engines.attached.server import UpstreamServer
from forebay.workers.engines.kv_descriptor import Unfetchable, decoded
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.sglang import engine as sglang
from forebay.workers.engines.sglang.engine import SglangEngine
from forebay.workers.engines.tensorrt_llm import engine as tensorrt_llm
from forebay.workers.engines.tensorrt_llm.engine import TensorRtLlmEngine
from forebay.workers.engines.vllm import transfer as vllm
from forebay.workers.engines.vllm.engine import VllmEngine
from tests.engines.driven import Driven, driven
from tests.harness.openai_server import OpenAiServer
from tests.harness.processes import still_running
from tests.workers.attached import attached_to
from tests.workers.engine_contract import (  # noqa: F401 - collected here
    test_cached_blocks_are_reported_once_and_held,
    test_cancelled_request_stops_and_others_continue,
    test_concurrent_requests,
    test_engine_reports_its_sizes,
    test_evictions_are_reported,
    test_request_restarts_after_a_reset,
    test_response_is_streamed_and_ends,
    test_tenants_share_no_blocks,
    test_unsupported_requests_fail_and_others_continue,
)
from tests.workers.engine_setup import (
    BLOCK_SIZE,
    KV_BLOCKS,
    PROMPT,
    SPEC,
    lora_directory,
    model_directory,
    reported,
)
from tests.workers.hosted import HOSTED_SPEC, INSPECT, LINE, PATIENCE_S, VARIABLE, hosted, settings
from tests.workers.standins import sglang_standin, tensorrt_llm_standin, vllm_standin
from tests.workers.standins.little import answer_of
from tests.workers.standins.tensorrt_llm_standin import Logprob

Start = Callable[..., AbstractAsyncContextManager[Driven]]


def mock_engine(settings: EngineSettings) -> Engine:
    config = EngineConfig(
        vocabulary=tuple(range(1000, 1100)), block_size=BLOCK_SIZE, kv_blocks_total=KV_BLOCKS, max_num_seqs=8
    )
    return MockEngine(config, dp_size=settings.dp_size, dp_start_rank=settings.dp_start_rank, speedup=1000.0)


ENGINES: dict[str, tuple[Callable[[EngineSettings], Engine], dict[str, Any]]] = {
    "vllm": (VllmEngine, {"enable_lora": True}),
    "sglang": (SglangEngine, {"enable_lora": True}),
    "tensorrt-llm": (TensorRtLlmEngine, {"lora_config": {"max_lora_rank": 8}}),
    "mock": (mock_engine, {}),
    "process": (hosted, {"speedup": 20.0}),  # slower, because messages take time
}
ATTACHED = "attached"


@asynccontextmanager
async def attached_engine(settings: EngineSettings) -> AsyncIterator[Engine]:
    """Return the engine of a server that has loaded the adapters of the settings."""
    sizes: dict[str, Any] = {"block_size": BLOCK_SIZE, "kv_blocks": KV_BLOCKS + 1, "max_num_seqs": 8}
    async with OpenAiServer(**sizes, kv_events=True, enable_lora=True) as server:
        client = UpstreamServer(server.url)
        for name, directory in settings.loras.items():
            await client.post("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str(directory)})
        await client.close()
        yield await attached_to(server, settings)


# Each test of "process" starts processes; tests of the engine process cover what differs.
@pytest.fixture(
    params=[pytest.param(one, marks=[pytest.mark.slow] * (one == "process")) for one in [*ENGINES, ATTACHED]]
)
def started(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Starts the engine; keyword arguments are settings."""
    sglang_standin.install(monkeypatch)
    tensorrt_llm_standin.install(monkeypatch)
    vllm_standin.install(monkeypatch, tmp_path / "sockets")
    make, arguments = ENGINES.get(request.param, (None, {}))
    model = model_directory(tmp_path / "model")

    @asynccontextmanager
    async def start(**changes: Any) -> AsyncIterator[Driven]:
        fields: dict[str, Any] = {
            "model": model,
            "model_name": "m",
            "block_size": BLOCK_SIZE,
            "kv_blocks": KV_BLOCKS,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "arguments": arguments,
        } | changes
        settings = EngineSettings(**fields)
        spec = msgspec.structs.replace(
            SPEC,
            block_size=BLOCK_SIZE,
            dp_size=settings.dp_size,
            dp_start_rank=settings.dp_start_rank,
            loras=tuple(settings.loras),
        )
        async with AsyncExitStack() as stack:
            if make is None:
                if settings.dp_size > 1:
                    pytest.skip("a server has one rank")
                engine = await stack.enter_async_context(attached_engine(settings))
            else:
                engine = make(settings)
            yield await stack.enter_async_context(driven(engine, spec))

    return start


class EngineTokenizer:
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        if text == "broken":
            raise TypeError("no such text")
        return [7] * add_special_tokens + [ord(one) for one in text]


class MistralTokenizer(EngineTokenizer):
    """Tokenizer of mistral-common, which has other tokens for the text of a special token."""


@pytest.mark.parametrize("started", ["vllm", "sglang", "tensorrt-llm"], indirect=True)
async def test_an_engine_with_another_tokenizer_does_not_start(
    started: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def has(tokenizer: EngineTokenizer | None) -> None:
        for one in (vllm_standin.AsyncLLM, sglang_standin.TokenizerManager, tensorrt_llm_standin.LLM):
            monkeypatch.setattr(one, "tokenizer", tokenizer)

    caplog.set_level(logging.INFO, tokenizer_check.__name__)
    has(EngineTokenizer())
    equal = (("ab", False, (97, 98)), ("ab", True, (7, 97, 98)))
    async with started(tokenizer_probes=equal):
        assert "tokenizer" not in caplog.text
    text = "x" * 99
    for own, message in (
        (
            (120,) * 50 + (5,) * 49,
            r" differs from .*tokenizer.json: 'x{80}' has 99 tokens \(… 120 120 120 5 5 .* …\) by",
        ),
        (
            (120,) * 98,
            r"has 98 tokens \(… 120 120 120\) by that file, but 99 tokens \(… 120 120 120 120\) by the engine; ",
        ),
    ):
        probes = (*equal, (text, False, own))
        with pytest.raises(EngineError, match=message):
            async with started(tokenizer_probes=probes):
                pass
    async with started(tokenizer_probes=probes, allow_tokenizer_mismatch=True):
        assert "--allow-tokenizer-mismatch permits it" in caplog.text
    for tokenizer in (None, MistralTokenizer(), EngineTokenizer()):
        has(tokenizer)
        caplog.clear()
        async with started(tokenizer_probes=(("broken", False, (1,)),)):
            assert "does not offer its tokenizer" in caplog.text
    assert "cannot tokenize 'broken': no such text" in caplog.text


@pytest.mark.parametrize("started", ["sglang", "tensorrt-llm"], indirect=True)
async def test_tokens_have_log_probabilities(started: Start) -> None:
    async with started() as one:
        answer = await one.ask(PROMPT, 5, logprobs=2)
        assert answer.tokens == answer_of(PROMPT, 5)
        assert [place.logprob for place in answer.logprobs] == [-0.5] * 5
        assert answer.logprobs[0].top == (
            TopLogprob(token_id=answer.tokens[0], logprob=-0.5),
            TopLogprob(token_id=7, logprob=-9999.0),  # JSON has no infinity
        )
        (alone,) = (await one.ask(PROMPT, 1, logprobs=0)).logprobs
        assert (alone.logprob, alone.top) == (-0.5, ())


async def test_adapters_are_loaded_and_unloaded(started: Start, tmp_path: Path) -> None:
    first, second = (lora_directory(tmp_path / name) for name in ("one", "two"))
    async with started(loras={"one": first}) as one:
        command = one.engine.command
        assert one.spec.loras == await command(Command(action="list_loras")) == ("one",)
        load = Command(action="load_lora", lora_name="two", lora_path=str(second))
        assert await command(load) == await command(load) == ("one", "two")
        with pytest.raises(EngineRefused, match="two"):
            await command(Command(action="load_lora", lora_name="two", lora_path=str(first)))
        for path in ("", str(tmp_path / "nowhere")):
            with pytest.raises(EngineRefused):
                await command(Command(action="load_lora", lora_name="three", lora_path=path))
        answer = await one.ask(PROMPT, 3, lora_name="two")
        assert answer.error is None and len(answer.tokens) == 3
        await reported(one, one.blocks(PROMPT, lora_name="two"))
        assert await command(Command(action="unload_lora", lora_name="two")) == ("one",)
        with pytest.raises(EngineRefused, match="two"):
            await command(Command(action="unload_lora", lora_name="two"))
        assert (await one.ask(PROMPT, 3, lora_name="two")).error is not None


async def test_ranks_have_caches_of_their_own(started: Start) -> None:
    async with started(dp_size=2, dp_start_rank=4) as one:
        await one.ask(PROMPT, 2, rank=5)
        await reported(one, one.blocks(PROMPT), rank=5)
        assert not one.blocks(PROMPT) & (one.held[4] | set(one.engine.held(4)))
        assert (await one.ask(PROMPT, 2, rank=4)).cached == 0
        assert (await one.ask(PROMPT, 2, rank=5)).cached


async def test_a_stopped_engine_leaves_nothing_running(started: Start) -> None:
    before = asyncio.all_tasks()
    async with started() as one:
        hanging = one.submit(one.item(PROMPT, 100))
        await one.until(lambda: hanging.tokens)
    await asyncio.sleep(0)
    left = {task for task in asyncio.all_tasks() - before if not task.done()}
    assert not {task for task in left if "standins" not in str(task.get_coro())}


Fetch = Callable[[Prefilled | None], Any]
RENDEZVOUS = msgspec.json.Decoder(sglang.Rendezvous).decode
TOKENS = 3
DESCRIPTORS: dict[str, Fetch] = {
    attached.CONNECTOR: lambda prefilled: attached.fetch_params(prefilled, "m", TOKENS),
    sglang.CONNECTOR: lambda prefilled: decoded(prefilled, sglang.CONNECTOR, "m", TOKENS, RENDEZVOUS),
    tensorrt_llm.CONNECTOR: lambda prefilled: tensorrt_llm.transfer_fields(prefilled, "m", TOKENS, Logprob),
    vllm.CONNECTOR: lambda prefilled: vllm.transfer_params(prefilled, "m", TOKENS, 1),
}


def prefilled(own: str, /, **changes: Any) -> Prefilled:
    made = Prefilled(worker_id="p", worker_epoch=1, model="m", connector=own, descriptor=b"", tokens=TOKENS, lease_us=1)
    return msgspec.structs.replace(made, **changes)


@pytest.mark.parametrize("connector", DESCRIPTORS)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"connector": "nixl"}, "its KV is transferred by nixl, this worker uses "),
        ({"model": "other"}, "its KV is of model other, this worker runs m"),
        ({"tokens": 5}, "its KV covers 5 tokens, the prompt has 3"),
        ({"descriptor": b"\xc1"}, "cannot decode the KV descriptor"),
        ({"descriptor": b"[" * 100_000}, "cannot decode the KV descriptor"),
    ],
)
def test_kv_of_another_kind_is_unfetchable(connector: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(Unfetchable, match=message):
        DESCRIPTORS[connector](prefilled(connector, **changes))
    with pytest.raises(Unfetchable, match="the request has no KV descriptor"):
        DESCRIPTORS[connector](None)


@pytest.mark.parametrize("connector", DESCRIPTORS)
@given(
    st.binary() | st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=9).map(msgspec.json.encode)
)
def test_any_bytes_are_decoded_or_unfetchable(connector: str, packed: bytes) -> None:
    try:
        fields = DESCRIPTORS[connector](prefilled(connector, descriptor=packed))
    except Unfetchable:
        return
    assert connector == tensorrt_llm.CONNECTOR, "the other descriptors have required fields"
    assert fields["request_type"] == "generation_only"


ROOT = Path(__file__).parents[2]


def await_end(pids: Sequence[int]) -> None:
    """Wait until processes have ended. A killed process is still there for a moment."""
    ends_s = time.monotonic() + PATIENCE_S
    while still_running(pids):
        assert time.monotonic() < ends_s
        time.sleep(0.01)


async def test_engines_share_nothing_of_their_processes() -> None:
    """The process that an engine has started dies with it, and the other engine lives on."""
    async with driven(hosted(settings()), HOSTED_SPEC) as one, driven(hosted(settings()), HOSTED_SPEC) as other:
        first, second = await asyncio.gather(one.engine.command(INSPECT), other.engine.command(INSPECT))
        assert len({str(os.getpid()), *first[1:], *second[1:]}) == 5
        assert VARIABLE not in os.environ
        for engine, pid in ((one.engine, first[1]), (other.engine, second[1])):
            await engine.check()
            (metric,) = [metric for collector in engine.collectors() for metric in collector.collect()]
            assert metric.samples[0].value == int(pid)
        os.kill(int(first[1]), signal.SIGKILL)
        with pytest.raises(EngineError, match=f"was killed by signal 9; the last line of its log: {LINE}"):
            await one.until(lambda: False)
        await other.engine.check()
    await_end([int(pid) for pid in (*first[1:], *second[1:])])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "fail"}, "the weights are broken"),
        ({"start": "exit"}, f"the process of the engine ended with code 3; the last line of its log: {LINE}"),
        pytest.param(
            {"start": "bug"}, "the engine failed unexpectedly: ZeroDivisionError: 1 / 0", marks=pytest.mark.slow
        ),
    ],
)
async def test_a_failed_start_has_its_cause(arguments: dict[str, Any], message: str) -> None:
    engine = hosted(settings(**arguments))
    with pytest.raises(EngineError) as raised:
        await engine.start(HOSTED_SPEC)
    await engine.stop()
    assert str(raised.value) == message


@pytest.mark.parametrize("way", ["hang", pytest.param("wait", marks=pytest.mark.slow)])
async def test_a_start_that_hangs_ends_with_the_last_line_of_its_log(
    way: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """On a busy machine the process may need seconds until it writes the line."""
    for start_s in (2.0, 8.0, 32.0):
        engine = hosted(settings(start=way, start_s=start_s))
        with pytest.raises(EngineError) as raised:
            await engine.start(HOSTED_SPEC)
        await engine.stop()
        assert f"the engine did not start within {start_s:g} s" in str(raised.value)
        if LINE in str(raised.value):
            break
    assert str(raised.value).endswith(f"; the last line of its log: {LINE}")
    assert LINE in capfd.readouterr().err


@pytest.mark.slow
async def test_an_engine_outlives_the_processes_that_it_has_started() -> None:
    async with driven(hosted(settings()), HOSTED_SPEC) as one:
        pids = [int(pid) for pid in (await one.engine.command(INSPECT))[1:]]
        os.kill(pids[1], signal.SIGKILL)
        await one.engine.check()
    await_end(pids)


@pytest.mark.slow
async def test_calls_end_when_the_engine_dies() -> None:
    async with driven(hosted(settings(command="exit")), HOSTED_SPEC) as one:
        waiting = asyncio.create_task(one.engine.command(Command(action="pause")))
        with pytest.raises(EngineError, match="ended with code 3"):
            await one.until(lambda: False)
        with pytest.raises(EngineRefused, match="the engine died"):
            await waiting
        with pytest.raises(EngineRefused, match="the engine died"):
            await one.engine.command(Command(action="pause"))


@pytest.mark.slow
async def test_an_engine_starts_again_after_its_death() -> None:
    engine = hosted(settings())
    for _ in range(2):
        async with driven(engine, HOSTED_SPEC) as one:
            assert len((await one.ask([1, 2, 3], 4)).tokens) == 4
            os.kill(int((await one.engine.command(INSPECT))[1]), signal.SIGKILL)
            with pytest.raises(EngineError):
                await one.until(lambda: False)


@pytest.mark.slow
async def test_log_records_have_the_level_of_the_worker(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.CRITICAL, "forebay.workers"):
        async with driven(hosted(settings(check="bug")), HOSTED_SPEC) as one:
            with pytest.raises(EngineError):
                await one.engine.check()
    assert not caplog.records
    async with driven(hosted(settings(check="bug")), HOSTED_SPEC) as one:
        with pytest.raises(EngineError, match="the engine failed unexpectedly: ZeroDivisionError: 1 / 0"):
            await one.engine.check()
    (record,) = caplog.records
    assert record.name == "forebay.workers.engines.engine_host"
    assert "ZeroDivisionError" in caplog.text


WORKER = """
import asyncio, sys
from pathlib import Path
from tests.engines.driven import driven
from tests.workers.hosted import HOSTED_SPEC, INSPECT, hosted, settings

async def main():
    engine = hosted(settings(**eval(sys.argv[1])))
    starting = asyncio.create_task(engine.start(HOSTED_SPEC))
    if sys.argv[1] == "{}":
        await starting
        serving = asyncio.create_task(engine.run(lambda batch: None))
        print(*(await engine.command(INSPECT))[1:], flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


@pytest.mark.parametrize("arguments", [{}, pytest.param({"start": "hang"}, marks=pytest.mark.slow)])
def test_no_process_is_left_when_the_worker_is_killed(arguments: dict[str, str], tmp_path: Path) -> None:
    """Also while the engine hangs in its start, which it reports in its log."""
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, str(script), repr(arguments)]
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as worker:
        assert worker.stdout is not None
        lines = iter(worker.stdout.readline, "")
        started: list[int] = []
        for line in lines:
            if arguments and LINE in line:
                listed = subprocess.run(["pgrep", "-P", str(worker.pid)], capture_output=True, text=True, check=True)
                started = [int(pid) for pid in listed.stdout.split()]
            elif not arguments and line[0].isdecimal():
                started = [int(pid) for pid in line.split()]
            if started:
                break
        assert still_running(started) == started
        worker.kill()
    await_end(started)
