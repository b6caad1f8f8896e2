"""`forebay up --engine vllm` as in the README, with a tiny model: prefill and decode, and engines that are killed."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.ingress.model import Model
from tests.cli.up import children_of
from tests.engines.oracle import Transformers
from tests.engines.vllm_settings import ARGUMENTS, BLOCK, KV_BLOCKS
from tests.harness.local import free_ports
from tests.harness.processes import still_running

FOREBAY = str(Path(sys.executable).with_name("forebay"))
STARTED_WITHIN_S = 240.0  # two vLLM side by side on two cores
TOKENS = 900  # takes seconds, so that an engine can be killed meanwhile
PROMPT = [100 + number * 7 % 200 for number in range(2 * BLOCK + 9)]

pytestmark = pytest.mark.timeout(600)


class System:
    """A running `forebay up` with real engines, which is added to `started`."""

    def __init__(self, started: "list[System]", model: Path, *options: str) -> None:
        port = free_ports(1)
        self.url = f"http://127.0.0.1:{port}"
        sizes = ["--block-size", str(BLOCK), "--kv-blocks", str(KV_BLOCKS), "--max-num-seqs", "8"]
        engine = ["--engine", "vllm", "--model", str(model), "--model-name", "tiny", *sizes]
        command = [FOREBAY, "up", "--port", str(port), *engine, "--engine-args", json.dumps(ARGUMENTS), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        started.append(self)
        self.until(self._is_ready)

    def _is_ready(self) -> bool:
        try:
            return httpx.get(f"{self.url}/ready", timeout=5).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    def until(self, reached: Any) -> None:
        ends_s = time.monotonic() + STARTED_WITHIN_S
        while not reached():
            assert self.process.poll() is None
            assert time.monotonic() < ends_s
            time.sleep(0.2)

    def metric(self, name: str) -> dict[str, float]:
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
                        host = children_of(self.process.pid)[number]
                        os.kill(children_of(host)[-1], signal.SIGKILL)
        return "".join(pieces), served

    def end(self, number: signal.Signals) -> int:
        """End the system, and check that no process of an engine is left."""
        hosts = children_of(self.process.pid)
        pids = [*hosts, *(pid for host in hosts for pid in children_of(host))]
        self.process.send_signal(number)
        code = self.process.wait(60)
        ends_s = time.monotonic() + 60
        while still_running(pids):
            assert time.monotonic() < ends_s
            time.sleep(0.1)
        return code


def expected(model: Path, oracle: Transformers) -> str:
    """Return the text of the greedy response in transformers."""
    decoder = Model(model).decoder()
    return "".join(decoder.push([token]) for token in oracle.greedy(PROMPT, TOKENS))


@pytest.fixture
def systems() -> Iterator[list[System]]:
    """Systems that are killed after the test."""
    started: list[System] = []
    yield started
    for one in started:
        one.process.kill()
        one.process.wait()


def test_prefill_and_decode_on_two_engines(model: Path, oracle: Transformers, systems: list[System]) -> None:
    system = System(systems, model, "--prefill-workers", "1", "--decode-workers", "1")
    text, served = system.generated()
    assert text == expected(model, oracle)
    assert (served["worker"], served["prefill"]["worker"]) == ("decode-0", "prefill-0")
    assert system.end(signal.SIGTERM) == 0


def test_a_killed_engine_core_is_replaced_while_its_response_continues(
    model: Path, oracle: Transformers, systems: list[System]
) -> None:
    system = System(systems, model, "--workers", "2")
    text, served = system.generated(kill=True)
    assert text == expected(model, oracle)
    assert served["attempts"] == 2
    system.until(lambda: system.metric("forebay_worker_member") == {"vllm-0": 1.0, "vllm-1": 1.0})
    assert sum(system.metric("forebay_worker_engine_failures_total").values()) == 1
    assert system.generated()[0] == text
    assert system.end(signal.SIGKILL) == -signal.SIGKILL
