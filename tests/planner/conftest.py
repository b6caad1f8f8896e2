"""Fixtures of the supervisor's tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from forebay.transport.sqlite.log import SqliteLog
from tests.planner.supervised import Supervised


@pytest.fixture
def supervised(tmp_path: Path) -> Iterator[Supervised]:
    """Yield a state directory for stub workers, which are killed at the end."""
    made = Supervised(tmp_path)
    yield made
    made.kill_all()


@pytest.fixture
async def log() -> AsyncIterator[SqliteLog]:
    opened = SqliteLog.open(None)
    yield opened
    opened.close()
