"""Every query of docs/replay-sql.md runs on a log and on a recording of it."""

import asyncio
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.logs import invoke
from tests.harness.schemas import META_DESCRIPTIONS
from tests.replay import incident

PAGE = Path(__file__).resolve().parents[2] / "docs/replay-sql.md"
BLOCK = re.compile(r"```sql\n(.*?)```", re.DOTALL)
JOURNAL, *QUERIES = BLOCK.findall(PAGE.read_text())
KINDS = ["log", "recording"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("cookbook")
    log, recording = folder / "run.db", folder / "incident.rec"
    asyncio.run(incident.record(log))
    assert invoke("record", log, recording).exit_code == 0
    return {"log": log, "recording": recording}


@pytest.fixture
def tables(request: pytest.FixtureRequest, files: dict[str, Path]) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(f"{files[request.param].as_uri()}?mode=ro", uri=True)) as db:
        db.execute(JOURNAL)
        yield db


@pytest.mark.parametrize("tables", KINDS, indirect=True)
@pytest.mark.parametrize("query", QUERIES)
def test_every_query_returns_rows(tables: sqlite3.Connection, query: str) -> None:
    assert tables.execute(query).fetchall()


@pytest.mark.parametrize("tables", KINDS, indirect=True)
def test_metadata_of_the_files_is_documented(tables: sqlite3.Connection) -> None:
    keys = {key for (key,) in tables.execute("SELECT key FROM forebay_meta")}
    assert keys <= set(META_DESCRIPTIONS)
    assert len(keys) >= 4


def test_every_documented_key_occurs_in_a_file(files: dict[str, Path]) -> None:
    keys = set()
    for path in files.values():
        with closing(sqlite3.connect(path)) as db:
            keys |= {key for (key,) in db.execute("SELECT key FROM forebay_meta")}
    assert keys == set(META_DESCRIPTIONS)
