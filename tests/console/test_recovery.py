"""Consoles of logs that are damaged, growing, replaced or read by another console, and of an indexer that ends."""

import fcntl
import os
import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from forebay.console.console import StateFeed
from forebay.events.topics import DECISIONS as JOURNAL
from forebay.ingress.errors import ApiError
from forebay.replay.at import seek_record
from forebay.replay.catalog.facts import CatalogState
from forebay.replay.catalog.store import Store
from forebay.replay.states import States
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.benchmarks.recordings import MODEL, Shape, write_recording
from tests.cli.logs import invoke
from tests.console.serving import body, comparable, console_client, console_settings, error, until

LOGS = Path(__file__).parents[1] / "logs"
DECISIONS = 60


@pytest.fixture
async def log(tmp_path: Path) -> Path:
    path = tmp_path / "log.db"
    await write_recording(path, Shape(2, DECISIONS, tokens=False))
    return path


def indexers() -> list[int]:
    """Return the process ids of indexers that this process started."""
    listed = ["pgrep", "-P", str(os.getpid()), "-f", "indexer_process"]
    return [int(line) for line in subprocess.run(listed, capture_output=True, check=False).stdout.split()]


async def routed(client: httpx.AsyncClient) -> int:
    pools = (await body(client, "/v1/status"))["pools"]
    return sum(pool["routed"] for pool in pools)


async def test_a_damaged_record_is_named_and_everything_before_it_is_shown(log: Path) -> None:
    with sqlite3.connect(log) as connection:
        connection.execute("UPDATE decisions SET value = zeroblob(length(value)) WHERE id = 30")
    async with console_client(console_settings(log, kind="file", group=MODEL)) as client:
        state = await until(client, lambda found: found["error"] and found["end_offset"])
        assert "decisions/0" in state["error"]
        assert "30" in state["error"]
        assert state["end_offset"] == 30
        moment = await body(client, "/v1/console/moment", offset=28)
        assert moment["offset"] == 28
        assert (await error(client, "/v1/console/moment", offset=40))[0] in {404, 503}


@pytest.mark.slow
async def test_a_growing_log_is_followed(log: Path, tmp_path: Path) -> None:
    path = tmp_path / "growing.db"
    with closing(SqliteLog.open(log, readonly=True)) as whole, closing(SqliteLog.open(path)) as growing:
        end = whole.next_offset(JOURNAL.name, 0)
        half = end // 2
        for topic, partition, past in whole.topics():
            await copy(whole, growing, topic, partition, 0, half if topic == JOURNAL.name else past)
        async with console_client(console_settings(path, kind="file", group=MODEL)) as client:
            assert 0 < await routed(client) < DECISIONS
            await copy(whole, growing, JOURNAL.name, 0, half, end)
            await until(client, lambda state: state["end_offset"] == end)
            assert await routed(client) == DECISIONS


async def copy(source: SqliteLog, target: SqliteLog, topic: str, partition: int, start: int, end: int) -> None:
    """Append records of one log to another one."""
    records = source.records(topic, partition, start, end - start)
    await target.append([Draft(topic, partition, one.value, one.key, one.headers) for one in records])


@pytest.mark.slow
async def test_a_killed_indexer_and_a_deleted_catalog_are_replaced(log: Path) -> None:
    settings = console_settings(log, kind="file", group=MODEL)
    async with console_client(settings) as client:
        before = await body(client, "/v1/console/requests")
        (first,) = indexers()
        os.kill(first, signal.SIGKILL)
        await until(client, lambda state: "ended" in state["error"])
        await until(client, lambda state: not state["error"] and state["is_complete"])
        (second,) = indexers()
        assert second != first
        settings.catalog_path.unlink()
        await until(client, lambda state: "deleted" in state["error"])
        await until(client, lambda state: not state["error"] and state["is_complete"])
        assert await body(client, "/v1/console/requests") == before
    assert indexers() == []


@pytest.mark.slow
async def test_a_second_console_of_a_log_names_the_first_one(log: Path) -> None:
    settings = console_settings(log, kind="file", group=MODEL)
    async with console_client(settings), console_client(settings) as second:
        state = await until(second, lambda found: found["error"])
        assert "another console writes this catalog" in state["error"]
        assert "--cache-dir" in state["error"]


def test_the_command_rejects_logs_that_it_cannot_show(tmp_path: Path) -> None:
    several = shutil.copy(LOGS / "kv.rec", tmp_path)
    for arguments, message in (
        ([tmp_path / "none.db"], "none.db"),
        ([], "expected either a log file or --kafka"),
        ([several, "--group", "other"], "unknown group 'other'; groups are: model"),
        ([several, "--url", "127.0.0.1:8000"], "expected an address such as http://127.0.0.1:8000"),
        ([several, "--token-file", tmp_path / "none"], "cannot read --token-file"),
        ([several, "--ssl-certfile", tmp_path / "none.pem"], "cannot read"),
    ):
        result = invoke("console", *arguments)
        assert (result.exit_code, message in result.stderr) == (2, True), result.output


def replace(log: Path, name: str) -> None:
    """Replace a log file by a recording, as `mv` does."""
    other = log.with_name(name)
    shutil.copy(LOGS / name, other)
    other.replace(log)


async def newest(log: Path) -> Any:
    """Return the state at the last journal record, derived from the log alone."""
    with closing(SqliteLog.open(log, readonly=True)) as opened:
        end = await opened.end(JOURNAL.name, 0)
        return comparable(await (await seek_record(States(opened, 0), end - 1)).moment())


@pytest.mark.slow
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


async def test_too_many_pages_are_rejected_before_their_streams_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    state = CatalogState(
        begin_us=0, end_us=0, begin_offset=0, end_offset=0, log_end_offset=0, behind_s=0.0, is_complete=True
    )

    async def read() -> CatalogState:
        return state

    monkeypatch.setattr("forebay.console.console.CLIENTS_MAX", 1)
    pages = StateFeed(read)
    first = pages.stream()
    assert (await anext(first)).startswith(b"event: state\n")
    with pytest.raises(ApiError) as caught:
        pages.stream()
    assert (caught.value.status, caught.value.code) == (503, "too_many_clients")
    await first.aclose()
    assert (await anext(pages.stream())).startswith(b"event: state\n"), "a page that was closed does not count"
