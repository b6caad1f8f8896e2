"""Fixtures for commands run in the test process: fast simulation processes and restored imports."""

from collections.abc import Iterator

import pytest

from tests.cli.in_process import imports_undone
from tests.cli.warm_pools import fork_from_a_server


@pytest.fixture(autouse=True)
def _warm_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_from_a_server(monkeypatch)


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore imports. Requires `monkeypatch`, so that the current directory is still that of the test."""
    with imports_undone():
        yield
