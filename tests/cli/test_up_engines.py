"""Engines of `forebay up` that fail: requests continue on other workers, and the engines are started again."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.cli.processes.embedded_group import FAILURES_MAX, HEALTHY_S, PAUSE_S, PAUSE_S_MAX, EngineRestarts
from forebay.workers.engine import EngineError
from tests.cli.up import PATIENCE_S, Up, children_of, fake_up
from tests.harness.processes import still_running

TOKENS = 300
PROMPT = list(range(100, 140))

pytestmark = pytest.mark.timeout(240)


@contextmanager
def running(folder: Path, arguments: dict[str, Any], *options: str) -> Iterator[Up]:
    up = fake_up(folder, arguments, *options)
    try:
        up.wait_ready()
        yield up
    finally:
        up.process.kill()
        up.process.communicate(timeout=PATIENCE_S)


def metric(up: Up, name: str) -> dict[str, float]:
    text = httpx.get(f"{up.url}/metrics", timeout=PATIENCE_S).text
    return {
        sample.labels["worker_id"]: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    }


def until(reached: Callable[[], bool]) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not reached():
        assert time.monotonic() < ends_s
        time.sleep(0.05)


def streamed(up: Up, on_piece: Callable[[str, int], None] = lambda *_: None) -> tuple[str, int]:
    """Return the text and the number of attempts of a streamed response.

    `on_piece` gets the worker that began the response, and the number of pieces so far.
    """
    body = {"model": "default_model", "prompt": PROMPT, "max_tokens": TOKENS, "stream": True, "temperature": 0}
    pieces: list[str] = []
    attempts = 0
    with httpx.stream("POST", f"{up.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            pieces += [choice["text"] for choice in chunk["choices"]]
            attempts = chunk.get("forebay", {}).get("attempts", attempts)
            on_piece(response.headers["x-forebay-worker"], len(pieces))
    return "".join(pieces), attempts


def test_a_killed_engine_is_replaced_while_its_response_continues(tmp_path: Path) -> None:
    """No process is left when the system is killed."""
    with running(tmp_path, {"speedup": 4.0}, "--workers", "2") as up:
        expected, _ = streamed(up)
        engines = children_of(up.process.pid)  # in the order of the workers
        killed: list[int] = []

        def kill(worker: str, pieces: int) -> None:
            if pieces > 3 and not killed:
                killed.append(engines[int(worker.removeprefix("vllm-"))])
                os.kill(killed[0], signal.SIGKILL)

        assert streamed(up, kill) == (expected, 2)
        until(lambda: metric(up, "forebay_worker_member") == {"vllm-0": 1.0, "vllm-1": 1.0})
        assert sorted(metric(up, "forebay_worker_engine_failures_total").values()) == [0.0, 1.0]
        replaced = children_of(up.process.pid)
        assert len(replaced) == 2
        assert killed[0] not in replaced
        up.process.send_signal(signal.SIGKILL)
        until(lambda: not still_running(replaced))


@pytest.mark.slow
def test_the_only_engine_comes_back(tmp_path: Path) -> None:
    """Meanwhile its start fails once."""
    broken = tmp_path / "broken"
    with running(tmp_path, {"speedup": 4.0, "fails_if": str(broken)}) as up:
        broken.touch()
        os.kill(children_of(up.process.pid)[0], signal.SIGKILL)
        until(lambda: metric(up, "forebay_worker_engine_failures_total")["vllm-0"] >= 2)
        assert httpx.get(f"{up.url}/ready", timeout=PATIENCE_S).status_code == httpx.codes.SERVICE_UNAVAILABLE
        broken.unlink()
        until(lambda: httpx.get(f"{up.url}/ready", timeout=PATIENCE_S).status_code == httpx.codes.OK)
        assert len(streamed(up)[0]) > 0


ERROR = EngineError("the engine died")


def restarts(*names: str) -> EngineRestarts:
    made = EngineRestarts()
    for name in names:
        made.add(name)
    made.is_serving = True
    return made


def test_pauses_double_up_to_a_maximum_until_an_engine_was_healthy() -> None:
    made = restarts("a", "b")
    pauses = [made.pause_s("a", HEALTHY_S / 2, 1, ERROR) for _ in range(2_000)]
    assert pauses[:7] == [PAUSE_S * 2**at for at in range(6)] + [PAUSE_S_MAX]
    assert set(pauses[7:]) == {PAUSE_S_MAX}
    assert [made.pause_s("a", healthy_s, 1, ERROR) for healthy_s in (HEALTHY_S, 0.0)] == [PAUSE_S, 2 * PAUSE_S]
    assert made.failures == {"a": 2_002, "b": 0}


def test_the_system_ends_once_every_engine_has_failed_in_a_row() -> None:
    made = restarts("a", "b", "drained")
    for _ in range(FAILURES_MAX + 1):
        made.pause_s("a", 0.0, 0, ERROR)
    for _ in range(FAILURES_MAX):
        made.pause_s("b", 0.0, 0, ERROR)
    made.remove("drained")
    made.pause_s("a", 0.0, 1, ERROR)  # the other engine serves just now
    with pytest.raises(EngineError, match=f"every engine has failed {FAILURES_MAX} times in a row: the engine died"):
        made.pause_s("a", 0.0, 0, ERROR)


def test_an_engine_that_fails_before_the_system_serves_ends_it() -> None:
    made = restarts("a", "b")
    made.is_serving = False
    with pytest.raises(EngineError, match=r"^the engine died$"):
        made.pause_s("a", 0.0, 1, ERROR)
