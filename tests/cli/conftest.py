"""Commands that run in this process start the processes of their simulations quickly."""

import pytest

from tests.cli.warm_pools import fork_from_a_server


@pytest.fixture(autouse=True)
def _warm_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_from_a_server(monkeypatch)
