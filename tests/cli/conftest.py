"""Commands that run in this process start the processes of their simulations quickly, and leave no imports behind."""

from collections.abc import Iterator

import pytest

from tests.cli.in_process import imports_undone
from tests.cli.warm_pools import fork_from_a_server


@pytest.fixture(autouse=True)
def _warm_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_from_a_server(monkeypatch)


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Depends on `monkeypatch` so that the current directory of the test is still the current one."""
    with imports_undone():
        yield
