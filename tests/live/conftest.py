"""Give each test a log of its own, and verify the journals of the group afterwards."""

from collections.abc import AsyncIterator

import pytest

from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import proven


@pytest.fixture
async def unproven_log() -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(None)
    yield opened
    opened.close()


@pytest.fixture
async def log(unproven_log: SqliteLog) -> AsyncIterator[SqliteLog]:
    """Yield a log of whose journal every decision must be derivable at the end of the test."""
    yield unproven_log
    await proven(unproven_log)
