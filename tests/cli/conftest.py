"""Fixtures for commands run in the test process: fast simulation processes and restored imports."""

import os
from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.cli.in_process import fork_from_a_server, imports_undone
from tests.harness.browser import chromium, launched
from tests.harness.local import Missing


@pytest.fixture(autouse=True)
def _warm_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    fork_from_a_server(monkeypatch)


@pytest.fixture(autouse=True)
def _imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore imports. Requires `monkeypatch`, so that the current directory is still that of the test."""
    with imports_undone():
        yield


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Run one browser for the tests of a module. Skip them without Chromium."""
    try:
        chromium()
    except Missing as missing:
        if os.environ.get("FOREBAY_REQUIRE_BROWSER") == "1":
            pytest.fail(str(missing), pytrace=False)
        pytest.skip(str(missing))
    with launched() as running:
        yield running
