"""Directories with KV blocks: concurrent users, crashes, full disks, missing permissions, and quotas."""

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.block_file import file_bytes
from forebay.workers.kv_tiers.block_stores import IoKind
from forebay.workers.kv_tiers.directory_layout import TEMPORARY_AGE_S
from forebay.workers.kv_tiers.stores import open_store
from tests.workers.kv_tiers.store_cases import (
    BLOCK_BYTES,
    QUOTA,
    check_read,
    content,
    identity,
    inventory,
    name_of,
    names,
    open_directory,
    path_of,
    read,
    write,
)

FILE = file_bytes(BLOCK_BYTES)
NOBODY = 65534
MIB = 1 << 20
LARGE = 300_000  # bytes of a block; 30 of them are moved by two threads


@pytest.fixture(params=["plain", "nixl"])
def io(request: pytest.FixtureRequest) -> IoKind:
    if request.param == "nixl":
        pytest.importorskip("nixl_cu12")
    kind: IoKind = request.param
    return kind


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def temporaries(root: Path) -> list[Path]:
    return sorted(root.rglob("*.tmp"))


def test_blocks_survive_a_restart(tmp_path: Path, io: IoKind) -> None:
    store = open_directory(tmp_path, io=io)
    assert write(store, range(200)) == [""] * 200
    assert store.stats.write_bytes == 200 * BLOCK_BYTES
    name = store.name
    store.close()
    store = open_directory(tmp_path, io=io)
    assert store.name == name
    assert inventory(store) == set(names(200))
    assert (store.stats.blocks, store.stats.bytes) == (200, 200 * BLOCK_BYTES)
    check_read(store, range(200))
    assert store.stats.read_blocks == 200
    assert read(store, [200])[0] == ["missing"]
    assert store.stats.read_misses == {"missing": 1}


def test_large_calls_are_moved_by_two_threads(tmp_path: Path, io: IoKind) -> None:
    who = identity(block_bytes=LARGE)
    store = open_directory(tmp_path, io=io, who=who)
    assert write(store, range(30), LARGE) == [""] * 30
    path_of(tmp_path, 7, who).unlink()
    results, found = read(store, range(30), LARGE)
    assert [place for place, reason in enumerate(results) if reason] == [7]
    assert all(found[place] == content(place, LARGE) for place in range(30) if place != 7)


def test_a_block_is_written_once(tmp_path: Path) -> None:
    store = open_directory(tmp_path)
    assert write(store, [1, 1, 2]) == [""] * 3
    assert write(store, [1, 2, 3]) == [""] * 3
    assert store.stats.write_blocks == 3
    assert store.stats.write_skipped == 3
    check_read(store, [1, 2, 3])


def test_removed_blocks_are_missing(tmp_path: Path) -> None:
    store = open_directory(tmp_path)
    write(store, range(4))
    store.remove([name_of(1), name_of(9)])
    assert read(store, [0, 1])[0] == ["", "missing"]
    assert (store.stats.removed, store.stats.blocks, store.take_evicted()) == (1, 3, [])


def test_identities_share_a_directory_without_sharing_blocks(tmp_path: Path) -> None:
    other = identity("another model")
    one, two = open_directory(tmp_path, shared=True), open_directory(tmp_path, shared=True, who=other)
    write(one, [1])
    assert read(two, [1])[0] == ["missing"]
    assert one.name != two.name
    assert one.name.split("-")[0] == two.name.split("-")[0]
    described = (tmp_path / other.short_digest / "identity.json").read_bytes()
    assert msgspec.json.decode(described, type=type(other)) == other


def test_no_block_is_moved_after_the_deadline(tmp_path: Path) -> None:
    store = open_directory(tmp_path)
    write(store, [1])
    memory = [memoryview(bytearray(BLOCK_BYTES))]
    assert store.read([name_of(1)], memory, 0.0) == ["deadline"]
    assert store.write([(name_of(2), memory[0])], 0.0) == ["deadline"]
    assert store.stats.write_failures == {"deadline": 1}


# --- Users of one directory


def test_a_second_worker_is_refused_by_name(tmp_path: Path) -> None:
    store = open_directory(tmp_path, owner="worker-a rank 0")
    with pytest.raises(EngineError, match="is the disk tier of worker-a rank 0"):
        open_directory(tmp_path, owner="worker-b rank 0")
    with pytest.raises(EngineError, match="worker-a rank 0"):
        open_directory(tmp_path, shared=True)
    store.close()
    open_directory(tmp_path, owner="worker-b rank 0").close()


def test_a_shared_store_cannot_become_a_disk_tier(tmp_path: Path) -> None:
    first, second = open_directory(tmp_path, shared=True), open_directory(tmp_path, shared=True)
    with pytest.raises(EngineError, match="is the shared store of other workers"):
        open_directory(tmp_path)
    first.close()
    second.close()
    open_directory(tmp_path).close()


def test_several_workers_write_and_read_the_same_blocks(tmp_path: Path, io: IoKind) -> None:
    stores = [open_directory(tmp_path, io=io, shared=True) for _ in range(4)]
    start = threading.Barrier(len(stores))

    def use(number: int) -> None:
        start.wait()
        order = [*range(number * 10, 40), *range(number * 10)]
        for place in order:
            assert write(stores[number], [place]) == [""]
            results, found = read(stores[number], [place, 39 - place])
            assert results[0] == ""
            assert results[1] in ("", "missing")
            assert found[0] == content(place)
            assert results[1] or found[1] == content(39 - place)

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(use, range(4)))
    assert len(files(tmp_path)) == 40
    assert temporaries(tmp_path) == []
    assert all(inventory(store) == set(names(40)) for store in stores)


def test_an_inventory_during_writes_has_only_whole_blocks(tmp_path: Path) -> None:
    writer, reader = open_directory(tmp_path, shared=True), open_directory(tmp_path, shared=True)
    done = threading.Event()

    def keep_writing() -> None:
        for number in range(150):
            write(writer, [number])
        done.set()

    with ThreadPoolExecutor(1) as threads:
        threads.submit(keep_writing)
        while not done.is_set():
            for page in reader.inventory():
                memory = [memoryview(bytearray(BLOCK_BYTES)) for _ in page]
                assert reader.read(page, memory, 50.0) == [""] * len(page)
    assert inventory(reader) == set(names(150))


# --- Crashes and broken disks

CRASH = """
import os, sys
from pathlib import Path
from tests.workers.kv_tiers.store_cases import open_directory, write
os.rename = lambda *_: os._exit(9)  # between the write and the rename
write(open_directory(Path(sys.argv[1]), shared=sys.argv[2] == "shared"), [1])
"""


@pytest.mark.parametrize("kind", ["shared", "own"])
def test_files_of_a_crashed_writer_are_removed(tmp_path: Path, kind: str) -> None:
    command = [sys.executable, "-c", CRASH, str(tmp_path), kind]
    assert subprocess.run(command, check=False, cwd=Path(__file__).parents[3]).returncode == 9
    (left,) = temporaries(tmp_path)
    assert left.stat().st_size == FILE
    os.utime(left, (0, left.stat().st_mtime - 10))
    store = open_directory(tmp_path, shared=kind == "shared")
    assert inventory(store) == set()
    store.enforce_quota()
    if kind == "shared":  # it may be from a writer that still runs
        assert temporaries(tmp_path) == [left]
        os.utime(left, (0, left.stat().st_mtime - TEMPORARY_AGE_S))
        store.enforce_quota()
    assert temporaries(tmp_path) == []
    assert write(store, [1]) == [""]
    check_read(store, [1])


@contextlib.contextmanager
def small_disk(path: Path) -> Iterator[Path]:
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(path)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"cannot mount a small file system: {mounted.stderr.decode().strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


def test_a_full_disk_fails_writes_and_keeps_what_it_has(tmp_path: Path, io: IoKind) -> None:
    who = identity(block_bytes=LARGE)
    with small_disk(tmp_path / "disk") as disk:
        store = open_directory(disk, io=io, who=who)
        results = write(store, range(6), LARGE)
        assert set(results) == {"", "full"}
        assert store.stats.write_failures == {"full": results.count("full")}
        assert temporaries(disk) == []
        kept = [number for number, result in enumerate(results) if not result]
        check_read(store, kept, LARGE)
        store.remove([name_of(number) for number in kept])
        assert write(store, [7, 8], LARGE) == ["", ""]
        check_read(store, [7, 8], LARGE)
        store.close()


def test_a_limit_of_file_sizes_fails_writes(tmp_path: Path, io: IoKind) -> None:
    store = open_directory(tmp_path, io=io)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE - 1000, hard))  # the write ends in the middle of the block
    try:
        results = write(store, [1, 2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert results == ["full", "full"]
    assert files(tmp_path) == temporaries(tmp_path) == []
    assert write(store, [1]) == [""]


def test_many_failures_of_nixl_do_not_fail_a_store(tmp_path: Path) -> None:
    pytest.importorskip("nixl_cu12")
    store = open_directory(tmp_path, io="nixl")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        assert {write(store, [number])[0] for number in range(12)} == {"full"}
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert write(store, range(12)) == [""] * 12
    check_read(store, range(12))


@contextlib.contextmanager
def forbidden(path: Path) -> Iterator[None]:
    """Deny this process access to a directory."""
    user = os.geteuid()
    path.chmod(0)
    try:
        if user == 0:
            os.seteuid(NOBODY)
        yield
    finally:
        if user == 0:
            os.seteuid(user)
        path.chmod(0o755)


def test_missing_permissions_are_reported(tmp_path: Path, io: IoKind) -> None:
    store = open_directory(tmp_path / "store", io=io)
    write(store, [1])
    with forbidden(tmp_path / "store"):
        assert read(store, [1])[0] == ["denied"]
        assert write(store, [2]) == ["denied"]
        store.enforce_quota()
        assert inventory(store) == set()
        with pytest.raises(EngineError, match="Permission denied"):
            open_directory(tmp_path / "store" / "deeper")
    check_read(store, [1])


def test_a_removed_store_is_not_created_again(tmp_path: Path, io: IoKind) -> None:
    store = open_directory(tmp_path / "store", io=io)
    write(store, [1])
    shutil.rmtree(tmp_path / "store")
    assert read(store, [1])[0] == ["missing"]
    assert write(store, [2]) == ["failed"]
    assert inventory(store) == set()
    store.enforce_quota()
    store.remove([name_of(1)])
    assert not (tmp_path / "store").exists()


# --- Quotas


def test_the_least_recently_used_blocks_leave_first(tmp_path: Path) -> None:
    store = open_directory(tmp_path, quota=10 * FILE, shared=True)
    write(store, range(10))
    for number in range(10):
        os.utime(path_of(tmp_path, number), (number, number))
    store.close()
    store = open_directory(tmp_path, quota=10 * FILE, shared=True)
    check_read(store, [0, 1])  # now the most recent ones
    write(store, [10])
    evicted = set(store.take_evicted())
    assert name_of(2) in evicted
    assert evicted.isdisjoint({name_of(0), name_of(1), name_of(10)})
    assert inventory(store) == set(names(11)) - evicted
    assert store.stats.evicted == len(evicted)
    assert store.take_evicted() == []


def test_other_identities_and_bad_files_count(tmp_path: Path) -> None:
    old = identity("old model")
    store = open_directory(tmp_path, who=old)
    write(store, range(8))
    for number in range(8):
        os.utime(path_of(tmp_path, number, old), (number, number))
    path_of(tmp_path, 0, old).write_bytes(b"x" * FILE)
    assert read(store, [0])[0] == ["corrupt"]
    store.close()
    store = open_directory(tmp_path, quota=10 * FILE)
    write(store, range(100, 105))
    assert inventory(store) == {name_of(number) for number in range(100, 105)}
    assert store.take_evicted() == []  # they are of another identity
    assert not list(tmp_path.glob("*/quarantine/*"))  # it went first
    assert sum(path.stat().st_size for path in files(tmp_path)) <= 10 * FILE


def test_several_writers_keep_one_quota(tmp_path: Path) -> None:
    limit = 40 * FILE
    stores = [open_directory(tmp_path, quota=limit, shared=True) for _ in range(3)]

    def fill(number: int) -> None:
        for place in range(100):
            assert write(stores[number], [1000 * number + place]) == [""]

    with ThreadPoolExecutor(len(stores)) as threads:
        list(threads.map(fill, range(3)))
    left = inventory(stores[0])
    # Each writer counts again after a sixteenth of the quota, and all may have skipped a count of another one.
    assert 30 <= len(left) <= 40 + len(stores) * (40 // 16 + 1)
    evicted = {name for store in stores for name in store.take_evicted()}
    written = {name_of(1000 * number + place) for number in range(3) for place in range(100)}
    assert evicted == written - left
    check_read(stores[1], [number for number in range(3000) if name_of(number) in left])


# --- Opening


def test_a_store_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_bytes(b'{"format_version":99,"store_id":"x"}')
    with pytest.raises(EngineError, match="format 99, and this version of forebay reads formats up to 1"):
        open_directory(tmp_path)


def test_another_directory_with_a_store_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store.json").write_bytes(b"[]")
    with pytest.raises(EngineError, match=r"is not a store of KV blocks: store\.json does not decode"):
        open_directory(tmp_path)


def test_a_colliding_identity_is_refused(tmp_path: Path) -> None:
    open_directory(tmp_path).close()
    path = tmp_path / identity().short_digest / "identity.json"
    path.write_bytes(msgspec.json.encode(identity("other")))
    with pytest.raises(EngineError, match="has KV of another identity"):
        open_directory(tmp_path)
    path.write_bytes(b"{")
    with pytest.raises(EngineError, match="does not decode"):
        open_directory(tmp_path)
    path.write_bytes(msgspec.json.encode(identity()))
    open_directory(tmp_path).close()  # the lock was released


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EngineError, match=r"cannot use .*file for KV blocks"):
        open_store(tmp_path / "file", identity(), quota_bytes=QUOTA, shared=False)


def test_the_default_io_moves_blocks(tmp_path: Path) -> None:
    store = open_store(tmp_path, identity(), quota_bytes=QUOTA, shared=False)
    assert write(store, [1]) == [""]
    check_read(store, [1])
    with pytest.raises(EngineError, match=f"process {os.getpid()} on "):
        open_store(tmp_path, identity(), quota_bytes=QUOTA, shared=False)
    store.close()
