"""Engines in processes of their own: what they share, how their failures are reported, and that no process is left."""

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay.events.control import Command
from forebay.workers.engine import EngineError, EngineRefused
from tests.engines.driven import driven
from tests.harness.processes import still_running
from tests.workers.hosted import HOSTED_SPEC, INSPECT, LINE, PATIENCE_S, VARIABLE, hosted, settings

ROOT = Path(__file__).parents[2]


def await_end(pids: Sequence[int]) -> None:
    """Wait until processes have ended. A killed process is still there for a moment."""
    ends_s = time.monotonic() + PATIENCE_S
    while still_running(pids):
        assert time.monotonic() < ends_s
        time.sleep(0.01)


async def test_engines_share_nothing_of_their_processes() -> None:
    async with driven(hosted(settings()), HOSTED_SPEC) as one, driven(hosted(settings()), HOSTED_SPEC) as other:
        first, second = await asyncio.gather(one.engine.command(INSPECT), other.engine.command(INSPECT))
        assert len({str(os.getpid()), *first[1:], *second[1:]}) == 5
        assert VARIABLE not in os.environ
        for engine, pid in ((one.engine, first[1]), (other.engine, second[1])):
            await engine.check()
            (metric,) = [metric for collector in engine.collectors() for metric in collector.collect()]
            assert metric.samples[0].value == int(pid)
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
    for start_s in (1.0, 2.0, 4.0, 8.0, 16.0, 32.0):
        engine = hosted(settings(start=way, start_s=start_s))
        with pytest.raises(EngineError) as raised:
            await engine.start(HOSTED_SPEC)
        await engine.stop()
        assert f"the engine did not start within {start_s:g} s" in str(raised.value)
        if LINE in str(raised.value):
            break
    assert str(raised.value).endswith(f"; the last line of its log: {LINE}")
    assert LINE in capfd.readouterr().err


@pytest.mark.parametrize("victim", [1, pytest.param(2, marks=pytest.mark.slow)])
async def test_a_killed_engine_is_reported_and_leaves_nothing(victim: int) -> None:
    """The process of the engine dies. A process that it has started dies with it, but not the other way round."""
    async with driven(hosted(settings()), HOSTED_SPEC) as one:
        pids = [int(pid) for pid in (await one.engine.command(INSPECT))[1:]]
        os.kill(pids[victim - 1], signal.SIGKILL)
        if victim == 1:
            with pytest.raises(EngineError, match=f"was killed by signal 9; the last line of its log: {LINE}"):
                await one.until(lambda: False)
        else:
            await one.engine.check()
    await_end(pids)


async def test_calls_end_when_the_engine_dies() -> None:
    async with driven(hosted(settings(command="exit")), HOSTED_SPEC) as one:
        waiting = asyncio.create_task(one.engine.command(Command(action="pause")))
        with pytest.raises(EngineError, match="ended with code 3"):
            await one.until(lambda: False)
        with pytest.raises(EngineRefused, match="the engine died"):
            await waiting


async def test_a_failed_check_has_its_cause() -> None:
    async with driven(hosted(settings(check="fail")), HOSTED_SPEC) as one:
        with pytest.raises(EngineError, match="the weights are broken"):
            await one.engine.check()


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


@pytest.mark.parametrize("arguments", [{}, {"start": "hang"}])
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
