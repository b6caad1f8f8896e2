"""Consoles of logs that are damaged, growing or read by another console, and of an indexer that ends."""

import os
import shutil
import signal
import sqlite3
import subprocess
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from forebay.events.topics import DECISIONS as DECISIONS_TOPIC
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.benchmarks.recordings import MODEL, Shape, write_recording
from tests.cli.logs import invoke
from tests.console.serving import body, console_client, console_settings, error, until

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
        end = whole.next_offset(DECISIONS_TOPIC.name, 0)
        half = end // 2
        for topic, partition, past in whole.topics():
            await copy(whole, growing, topic, partition, 0, half if topic == DECISIONS_TOPIC.name else past)
        async with console_client(console_settings(path, kind="file", group=MODEL)) as client:
            assert 0 < await routed(client) < DECISIONS
            await copy(whole, growing, DECISIONS_TOPIC.name, 0, half, end)
            await until(client, lambda state: state["end_offset"] == end)
            assert await routed(client) == DECISIONS


async def copy(source: SqliteLog, target: SqliteLog, topic: str, partition: int, start: int, end: int) -> None:
    """Append records of one log to another one."""
    records = source.records(topic, partition, start, end - start)
    await target.append([Draft(topic, partition, one.value, one.key, one.headers) for one in records])


@pytest.mark.slow
async def test_a_killed_indexer_and_a_deleted_catalog_are_replaced(log: Path) -> None:
    async with console_client(console_settings(log, kind="file", group=MODEL)) as client:
        (first,) = indexers()
        os.kill(first, signal.SIGKILL)
        await until(client, lambda state: "ended" in state["error"])
        await until(client, lambda state: not state["error"] and state["is_complete"])
        (second,) = indexers()
        assert second != first
        for file in log.parent.glob("*.console*"):
            file.unlink()
        await until(client, lambda _: indexers() not in ([second], []))
        await until(client, lambda state: not state["error"] and state["is_complete"])
        assert await routed(client) == DECISIONS
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
