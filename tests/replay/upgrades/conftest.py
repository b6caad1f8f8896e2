"""Give each test a log of its own."""

from collections.abc import AsyncIterator

import pytest

from forebay.transport.sqlite.log import SqliteLog


@pytest.fixture
async def log() -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(None)
    yield opened
    opened.close()
