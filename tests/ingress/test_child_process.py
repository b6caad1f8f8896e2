"""Child processes end in every case, even if their start or their end is interrupted."""

import asyncio
import contextlib
import signal
from asyncio.subprocess import Process
from typing import Any

import pytest

from forebay.ingress.child_process import ChildProcess
from tests.system import until

SLEEPER = "tests.ingress.sleeping_child"


@pytest.fixture
def child() -> ChildProcess:
    return ChildProcess(SLEEPER, b"{}")


async def test_a_process_that_starts_during_close_is_killed(
    child: ChildProcess, processes: list[Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    start = asyncio.create_subprocess_exec

    async def start_during_close(*arguments: str, **options: Any) -> Process:
        process = await start(*arguments, **options)
        await child.close()
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", start_during_close)
    with pytest.raises(EOFError):
        await child.exchange(b"{}")
    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    with pytest.raises(EOFError):
        await child.send(b"{}")
    assert len(processes) == 1


async def test_repeated_cancellation_does_not_leave_a_process(child: ChildProcess, processes: list[Process]) -> None:
    exchange = asyncio.create_task(child.exchange(b"{}"))
    await until(lambda: processes)
    while not exchange.done():
        exchange.cancel()
        await asyncio.sleep(0)
    assert [process.returncode for process in processes] == [-signal.SIGKILL]
    with contextlib.suppress(asyncio.CancelledError):
        await exchange
    assert exchange.cancelled()
