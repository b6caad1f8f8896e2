"""A console whose catalog was deleted, and its limits for pages."""

import shutil
from pathlib import Path

import pytest

from forebay.console import feed
from forebay.console.feed import StateFeed
from forebay.console.paths import catalog_path
from forebay.ingress.errors import ApiError
from forebay.replay.catalog.facts import CatalogState
from tests.console.serving import body, console_client, console_settings, until

LOGS = Path(__file__).parents[1] / "logs"


@pytest.mark.asyncio
async def test_a_catalog_that_was_deleted_is_built_anew(tmp_path: Path) -> None:
    settings = console_settings(Path(shutil.copy(LOGS / "lost-workers.rec", tmp_path)))
    async with console_client(settings) as client:
        before = await body(client, "/v1/console/requests")
        catalog_path(settings).unlink()
        state = await until(client, lambda state: state["error"])
        assert "deleted" in state["error"]
        state = await until(client, lambda state: state["is_complete"])
        assert not state["error"], "the error ends when the log is followed again"
        assert await body(client, "/v1/console/requests") == before


@pytest.mark.asyncio
async def test_too_many_pages_are_rejected_before_their_streams_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    state = CatalogState(
        begin_us=0, end_us=0, begin_offset=0, end_offset=0, log_end_offset=0, behind_s=0.0, is_complete=True
    )

    async def read() -> CatalogState:
        return state

    monkeypatch.setattr(feed, "CLIENTS_MAX", 1)
    pages = StateFeed(read)
    first = pages.stream()
    assert (await anext(first)).startswith(b"event: state\n")
    with pytest.raises(ApiError) as caught:
        pages.stream()
    assert (caught.value.status, caught.value.code) == (503, "too_many_clients")
    await first.aclose()
    assert (await anext(pages.stream())).startswith(b"event: state\n"), "a page that was closed does not count"
