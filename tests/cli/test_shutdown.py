"""A hanging service ends in bounded time after a signal, and sooner after a second signal."""

import signal
import subprocess
import sys

import pytest

PATIENCE_S = 50.0
HANGS = {
    "a client library that blocks the event loop": "threading.Event().wait()",
    "a part that does not end": "await asyncio.Event().wait()",
}
SERVICE = """
import asyncio, threading
from forebay.cli.common.cluster import run_service, until_signal

async def main():
    async def stop():
        print("stopping", flush=True)
        {hang}
    async def part():
        print("ready", flush=True)
        await asyncio.Event().wait()
    await until_signal(part(), stop=stop, stop_s={stop_s})

run_service(main())
"""


@pytest.mark.parametrize("hang", HANGS.values(), ids=HANGS)
@pytest.mark.parametrize(("signals", "stop_s", "why"), [(1, 0.0, "after a signal"), (2, 3600.0, "after a second")])
def test_a_hanging_service_is_ended(hang: str, signals: int, stop_s: float, why: str) -> None:
    code = SERVICE.format(hang=hang, stop_s=stop_s)
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as run:
        assert run.stdout is not None
        try:
            assert run.stdout.readline() == "ready\n"
            run.send_signal(signal.SIGTERM)
            assert run.stdout.readline() == "stopping\n"
            for _ in range(signals - 1):
                run.send_signal(signal.SIGTERM)
            _, errors = run.communicate(timeout=PATIENCE_S)
        finally:
            run.kill()
    assert run.returncode == 1
    assert "killed: the process did not stop" in errors
    assert why in errors
