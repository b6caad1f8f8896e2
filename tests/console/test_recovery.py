"""A console whose catalog was deleted or whose log was replaced, and its limits for pages."""

import fcntl
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from forebay.console import feed
from forebay.console.feed import StateFeed
from forebay.events.topics import DECISIONS
from forebay.ingress.errors import ApiError
from forebay.replay.at_time import seek_record
from forebay.replay.catalog.facts import CatalogState
from forebay.replay.catalog.store import Store
from forebay.transport.sqlite.log import SqliteLog
from tests.console.serving import body, comparable, console_client, console_settings, error, until

LOGS = Path(__file__).parents[1] / "logs"


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_catalog_that_was_deleted_is_built_anew(tmp_path: Path) -> None:
    settings = console_settings(Path(shutil.copy(LOGS / "lost-workers.rec", tmp_path)))
    async with console_client(settings) as client:
        before = await body(client, "/v1/console/requests")
        settings.catalog_path.unlink()
        state = await until(client, lambda state: state["error"])
        assert "deleted" in state["error"]
        state = await until(client, lambda state: state["is_complete"])
        assert not state["error"], "the error ends when the log is followed again"
        assert await body(client, "/v1/console/requests") == before


def replace(log: Path, name: str) -> None:
    """Replace a log file by a recording, as `mv` does."""
    other = log.with_name(name)
    shutil.copy(LOGS / name, other)
    other.replace(log)


async def newest(log: Path) -> Any:
    """Return the state at the last journal record, derived from the log alone."""
    with closing(SqliteLog.open(log, readonly=True)) as opened:
        end = await opened.end(DECISIONS.name, 0)
        return comparable(await (await seek_record(opened, 0, end - 1)).moment())


@pytest.mark.slow
@pytest.mark.asyncio
async def test_a_log_that_was_replaced_is_read_from_the_beginning(tmp_path: Path) -> None:
    log = Path(shutil.copy(LOGS / "lost-workers.rec", tmp_path))
    async with console_client(console_settings(log)) as client:
        before = await body(client, "/v1/console/moment")
        replace(log, "overload.rec")
        expected = await newest(log)
        end = expected["offset"] + 1
        await until(client, lambda state: state["end_offset"] == end and not state["error"])
        assert comparable(await body(client, "/v1/console/moment", offset=end - 1)) == expected != comparable(before)
        with (
            closing(Store.read(console_settings(log).catalog_path)) as store,
            closing(SqliteLog.open(log, readonly=True)) as opened,
        ):
            await store.require_log(opened, 0)


@pytest.mark.asyncio
async def test_a_catalog_of_the_previous_log_is_not_used(tmp_path: Path) -> None:
    log = Path(shutil.copy(LOGS / "lost-workers.rec", tmp_path))
    settings = console_settings(log)
    async with console_client(settings) as client:
        offset = (await body(client, "/v1/console"))["state"]["end_offset"] - 1
    path = settings.catalog_path
    with path.with_name(path.name + ".lock").open("rb") as lock:  # so that the console cannot build it anew
        fcntl.flock(lock, fcntl.LOCK_EX)
        async with console_client(settings) as client:
            await body(client, "/v1/console/moment", offset=offset)
            replace(log, "overload.rec")
            status, message = await error(client, "/v1/console/moment", offset=offset)
            assert (status, "the log was replaced" in message) == (503, True), message


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
