"""`forebay up --engine vllm` as in the README, with a tiny model: roles, killed engines, and `forebay profile run`."""

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.events.scaling import DecodePoint, PrefillPoint
from forebay.ingress.model import Model
from tests.cli.in_process import forebay
from tests.cli.up import FOREBAY, Up, children_of
from tests.engines.oracle import Transformers
from tests.engines.vllm_settings import ARGUMENTS, BLOCK, KV_BLOCKS
from tests.harness.otlp_receiver import OtlpReceiver, attributes_of
from tests.harness.processes import still_running

STARTED_WITHIN_S = 240.0  # two vLLM side by side on two cores
TOKENS = 900  # takes seconds, so that an engine can be killed meanwhile
GRID = ("--isl", "64,128,2048", "--context", "320", "--concurrency", "1,2", "--output-tokens", "200", "--repeats", "1")
PROMPT = [100 + number * 7 % 200 for number in range(2 * BLOCK + 9)]

pytestmark = pytest.mark.timeout(600)


class System(Up):
    """A running `forebay up` with real engines."""

    def __init__(self, model: Path, *options: str, kv_blocks: int = KV_BLOCKS, **arguments: str) -> None:
        sizes = ["--block-size", str(BLOCK), "--kv-blocks", str(kv_blocks), "--max-num-seqs", "8"]
        engine = ["--engine", "vllm", "--model", str(model), "--model-name", "tiny", *sizes]
        super().__init__(*engine, "--engine-args", json.dumps(ARGUMENTS | arguments), *options, program=[FOREBAY])

    def until(self, reached: Callable[[], object]) -> None:
        ends_s = time.monotonic() + STARTED_WITHIN_S
        while not reached():
            assert self.process.poll() is None
            assert time.monotonic() < ends_s
            time.sleep(0.2)

    def metric_by_worker(self, name: str) -> dict[str, float]:
        text = httpx.get(f"{self.url}/metrics", timeout=60).text
        families = text_string_to_metric_families(text)
        samples = (sample for family in families for sample in family.samples)
        return {sample.labels["worker_id"]: sample.value for sample in samples if sample.name == name}

    def generated(self, *, kill: bool = False) -> tuple[str, dict[str, Any]]:
        """Return the text of a greedy response, and how it was served. Optionally kill the engine core meanwhile."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True}
        body["stream"] = True
        pieces: list[str] = []
        served: dict[str, Any] = {}
        with httpx.stream("POST", f"{self.url}/v1/completions", json=body, timeout=120) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    assert "error" not in chunk, chunk
                    pieces += [choice["text"] for choice in chunk["choices"]]
                    served = chunk.get("forebay") or served
                    if kill and pieces:
                        kill = False
                        number = int(response.headers["x-forebay-worker"].rpartition("-")[2])
                        host = self.children()[number]
                        os.kill(children_of(host)[-1], signal.SIGKILL)
        return "".join(pieces), served

    def end(self, number: signal.Signals) -> int:
        """End the system, and check that no process of an engine is left."""
        pids = [*self.children(), *(pid for host in self.children() for pid in children_of(host))]
        code = super().end(number)
        ends_s = time.monotonic() + 60
        while still_running(pids):
            assert time.monotonic() < ends_s
            time.sleep(0.1)
        return code


def expected(model: Path, oracle: Transformers) -> str:
    """Return the text of the greedy response in transformers."""
    decoder = Model(model).decoder()
    return "".join(decoder.push([token]) for token in oracle.greedy(PROMPT, TOKENS))


Start = Callable[..., System]


@pytest.fixture
def start(model: Path) -> Iterator[Start]:
    """Yield a function that starts a system of the model with options. Systems are killed after the test."""
    started: list[System] = []

    def start(*options: str, **settings: Any) -> System:
        started.append(System(model, *options, **settings))
        started[-1].wait_ready(STARTED_WITHIN_S)
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait()


def test_prefill_and_decode_on_two_engines(model: Path, oracle: Transformers, start: Start) -> None:
    system = start("--prefill-workers", "1", "--decode-workers", "1")
    text, served = system.generated()
    assert text == expected(model, oracle)
    assert (served["worker"], served["prefill"]["worker"]) == ("decode-0", "prefill-0")
    assert system.end(signal.SIGTERM) == 0


def test_a_killed_engine_core_is_replaced_while_its_response_continues(
    model: Path, oracle: Transformers, start: Start
) -> None:
    system = start("--workers", "2")
    text, served = system.generated(kill=True)
    assert text == expected(model, oracle)
    assert served["attempts"] == 2
    system.until(lambda: system.metric_by_worker("forebay_worker_member") == {"vllm-0": 1.0, "vllm-1": 1.0})
    assert sum(system.metric_by_worker("forebay_worker_engine_failures_total").values()) == 1
    assert system.generated()[0] == text
    assert system.end(signal.SIGKILL) == -signal.SIGKILL


def test_the_profiler_measures_vllm(start: Start, tmp_path: Path) -> None:
    system, out = start(kv_blocks=128), tmp_path / "profile.json"
    run = forebay("profile", "run", "--url", system.url, "--out", str(out), *GRID)
    assert run.returncode == 0, run.stderr
    assert system.end(signal.SIGTERM) == 0
    found = json.loads(out.read_text())
    assert [one.isl for one in msgspec.convert(found["prefill"], list[PrefillPoint])] == [64, 128]
    assert [one.concurrency for one in msgspec.convert(found["decode"], list[DecodePoint])] == [1, 2]
    assert [one["point"]["tokens"] for one in found["left_out"]] == [2048], "the context has 1,024 tokens"


async def test_spans_of_vllm_are_children_of_their_attempt(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "http/protobuf")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "100")
    async with OtlpReceiver() as receiver:

        def joined() -> list[dict[str, Any]]:
            """Return the spans by name of each trace to which both contributed. The canaries of vLLM have others."""
            traces = [{span.name: span for span in spans.values()} for spans in receiver.traces.values()]
            return [spans for spans in traces if {"attempt", "llm_request"} <= set(spans)]

        system = await asyncio.to_thread(
            start, "--otlp", receiver.url, otlp_traces_endpoint=f"{receiver.url}/v1/traces"
        )
        await asyncio.to_thread(system.generated)
        await asyncio.to_thread(system.until, joined)
        assert await asyncio.to_thread(system.end, signal.SIGTERM) == 0
    (spans,) = joined()
    attempt, of_engine = spans["attempt"], spans["llm_request"]
    assert of_engine.parent_span_id == attempt.span_id
    assert attributes_of(attempt)["forebay.worker.id"] == "vllm-0"
    assert attempt.start_time_unix_nano <= of_engine.start_time_unix_nano
    assert of_engine.end_time_unix_nano <= attempt.end_time_unix_nano
