"""A catalog that does not fit its log is built anew, has one writer, and is bounded."""

import logging
from pathlib import Path

import pytest

from forebay.events.topics import DECISIONS
from forebay.replay.catalog import checkpoints
from forebay.replay.catalog import store as store_module
from forebay.replay.catalog.seek import catalog_position
from forebay.replay.catalog.store import CatalogError, CatalogInUse, Store, path_beside, path_of_brokers
from forebay.transport.base import Log
from tests.core.worlds import request
from tests.replay.catalog.following import Noted, busy, index, noted, offsets, open_store, run, timed


async def index_once(log: Log, path: Path) -> list[tuple[str, int]]:
    follower = await index(log, path)
    assert follower.error == ""
    rows = noted(follower.store)
    follower.store.close()
    return rows


def test_a_catalog_of_another_log_is_built_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def check() -> None:
        path = tmp_path / "catalog"
        rows = await index_once(await busy(30).log(), path)
        for other in (busy(29), busy(31)):
            other("requests", request("another", [1, 2]))
            other.seal()
            found = await index_once(await other.log(), path)
            assert found != rows
            assert [one for one in found if one[0] == "record"] == [("record", at) for at in range(len(other.journal))]
        assert [record.getMessage() for record in caplog.records] == [
            f"{path}: it is the catalog of another log; it is deleted and built anew"
        ] * 2

    with caplog.at_level(logging.WARNING):
        run(check())


@pytest.mark.parametrize("harm", ["garbage", "version", "tables", "pages"])
@timed
async def test_a_catalog_that_cannot_be_used_is_built_anew(
    harm: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, log = tmp_path / "catalog", await busy(30).log()
    rows = await index_once(log, path)
    if harm == "garbage":
        path.write_bytes(b"no database" * 1_000)
    elif harm == "version":
        monkeypatch.setattr(store_module, "VERSION", "0.0")
    elif harm == "tables":
        monkeypatch.setattr(Noted, "schema", Noted.schema + "CREATE TABLE more (one);")
    else:
        content = bytearray(path.read_bytes())
        content[200:] = bytes(len(content) - 200)
        path.write_bytes(content)
    assert await index_once(log, path) == rows


@timed
async def test_a_catalog_that_is_damaged_later_is_built_anew(tmp_path: Path) -> None:
    path, log = tmp_path / "catalog", await busy(30).log()
    rows = await index_once(log, path)
    store = await open_store(path, log)
    (root,) = store.connection.execute("SELECT rootpage FROM sqlite_master WHERE name = 'checkpoints'").fetchone()
    store.close()
    content = bytearray(path.read_bytes())
    at = (root - 1) * store_module.PAGE_BYTES
    content[at : at + store_module.PAGE_BYTES] = bytes(store_module.PAGE_BYTES)
    path.write_bytes(content)
    follower = await index(log, path)
    await follower.catch_up()
    assert noted(follower.store) == rows


@timed
async def test_a_catalog_has_one_writer_and_any_number_of_readers(tmp_path: Path) -> None:
    log = await busy(60).log()
    path = tmp_path / "catalog"
    with pytest.raises(CatalogError, match="cannot be read"):
        Store.read(path)
    follower = await index(log, path)
    with pytest.raises(CatalogInUse, match="another console writes this catalog"):
        await open_store(path, log)
    reader = Store.read(path)
    position = await catalog_position(log, 0, reader, offset=follower.state.end_offset - 1)
    assert position.start == offsets(follower.store)[-1]
    reader.close()
    follower.store.close()
    (await open_store(path, log)).close()


@timed
async def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    with pytest.raises(CatalogError, match=r"cannot be written \(.*\); name another folder with --cache-dir"):
        await open_store(tmp_path / "file" / "catalog", await busy(1).log())


@timed
async def test_a_catalog_above_its_maximum_size_loses_every_second_checkpoint(tmp_path: Path) -> None:
    log = await busy(200).log()
    whole = await index(log, tmp_path / "whole")
    small = await index(log, tmp_path / "small", size_max=1)
    assert 1 <= len(offsets(small.store)) < len(offsets(whole.store)) / 2
    assert int(small.store.meta("spacing") or 1) > 1
    end = await log.end(DECISIONS.name, 0)
    one = await catalog_position(log, 0, small.store, offset=end // 2)
    other = await catalog_position(log, 0, whole.store, offset=end // 2)
    assert (await one.moment()).digest == (await other.moment()).digest


@timed
async def test_a_catalog_with_few_checkpoints_loses_its_oldest_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "total_bytes", lambda connection: 0)
    log = await busy(200).log()
    follower = await index(log, tmp_path / "catalog", size_max=1)
    observer = follower.observers[0]
    assert isinstance(observer, Noted)
    removed = observer.removed_before
    assert removed == sorted(removed)
    assert 0 < removed[0] < removed[-1] < follower.state.end_offset


def test_paths_differ_by_log_and_group() -> None:
    log = Path("/logs/events.db")
    assert path_beside(log, 0) == Path("/logs/events.db.console")
    assert path_beside(log, 3) == Path("/logs/events.db.3.console")
    folder = Path("/cache")
    paths = [path_beside(Path(f"/{name}/events.db"), at, folder) for name in "ab" for at in range(2)]
    paths += [path_of_brokers(brokers, "one", at, folder) for brokers in ("a:1", "b:1") for at in range(2)]
    assert len(set(paths)) == len(paths)
    assert path_of_brokers("b:1,a:1", "one", 0, folder) == path_of_brokers("a:1,b:1", "one", 0, folder)
