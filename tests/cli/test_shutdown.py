"""A hanging service ends in bounded time after a signal, and sooner after a second signal."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Iterator

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


Case = tuple[str, int]
CASES: list[Case] = [(hang, signals) for hang in HANGS for signals in (1, 2)]


@pytest.fixture(scope="module")
def services() -> Iterator[dict[Case, "subprocess.Popen[str]"]]:
    """Start a service for each case and send its signals. The services then take their seconds at the same time."""
    with contextlib.ExitStack() as stack:
        started = {}
        for hang, signals in CASES:
            # Without a second signal, the service ends when its own time is over.
            code = SERVICE.format(hang=HANGS[hang], stop_s=0.0 if signals == 1 else 3600.0)
            command = [sys.executable, "-c", code]
            run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            started[hang, signals] = stack.enter_context(run)
            stack.callback(run.kill)
        for (_, signals), run in started.items():
            assert run.stdout is not None
            assert run.stdout.readline() == "ready\n"
            run.send_signal(signal.SIGTERM)
            assert run.stdout.readline() == "stopping\n"
            if signals == 2:
                run.send_signal(signal.SIGTERM)
        yield started


@pytest.mark.slow
@pytest.mark.parametrize(("hang", "signals"), CASES)
def test_a_hanging_service_is_ended(services: dict[Case, "subprocess.Popen[str]"], hang: str, signals: int) -> None:
    run = services[hang, signals]
    _, errors = run.communicate(timeout=PATIENCE_S)
    assert run.returncode == 1
    assert "killed: the process did not stop" in errors
    assert ("after a signal" if signals == 1 else "after a second") in errors


EARLY = """
import os, signal
from forebay.cli.common import cluster

end_within = cluster.end_within

def signalled_again(*arguments):
    os.kill(os.getpid(), signal.SIGTERM)
    end_within(*arguments)

cluster.end_within = signalled_again
"""


@pytest.mark.slow
def test_a_second_signal_right_after_the_first_ends_a_service_in_order() -> None:
    code = EARLY + SERVICE.format(hang=HANGS["a part that does not end"], stop_s=3600.0)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        assert run.stdout.readline() == "ready\n"
        run.send_signal(signal.SIGTERM)
        run.communicate(timeout=PATIENCE_S)
    assert run.returncode >= 0, "the signal found no handler"
