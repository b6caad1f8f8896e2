"""The test system ends a test with the error of a worker that dies."""

import asyncio

import pytest

from forebay.transport.sqlite.log import SqliteLog
from tests.harness.faulty_log import Crashed, FaultyLog
from tests.system import System


async def test_a_worker_that_dies_ends_the_test_with_its_error() -> None:
    log = SqliteLog.open(None)
    faulty = FaultyLog(log, 0)
    faulty.crashed = True
    system = System(faulty)  # type: ignore[arg-type]  # what is used of it takes any log
    with pytest.raises(ExceptionGroup) as caught:
        async with system.started(2):
            await asyncio.Event().wait()
    assert caught.group_contains(Crashed)
    log.close()
