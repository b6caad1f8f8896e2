"""Directories with KV blocks: concurrent users, crashes, full disks, permissions, and file systems that hang."""

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

import pytest

from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.block_format import file_bytes
from forebay.workers.kv_tiers.block_store import TEMPORARY_AGE_S
from forebay.workers.kv_tiers.disk import HANGING_MAX, NetworkDirectoryStore, may_hang
from forebay.workers.kv_tiers.offload_manager import open_store
from forebay.workers.kv_tiers.settings import TierSettings
from tests.workers.kv_tiers.cases import (
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


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.kv"))


def temporaries(root: Path) -> list[Path]:
    return sorted(root.rglob("*.tmp"))


def test_large_calls_are_moved_by_two_threads(tmp_path: Path) -> None:
    who = identity(block_bytes=LARGE)
    store = open_directory(tmp_path, who=who)
    assert write(store, range(30), LARGE) == [""] * 30
    path_of(tmp_path, 7, who).unlink()
    results, found = read(store, range(30), LARGE)
    assert [place for place, reason in enumerate(results) if reason] == [7]
    assert all(found[place] == content(place, LARGE) for place in range(30) if place != 7)
    path_of(tmp_path, 40, who).mkdir(parents=True)  # no file can be renamed to it
    assert write(store, [40] * 100, LARGE) == ["failed"] * 100, "no write of a block counts on another one"


def test_no_block_is_moved_after_the_deadline(tmp_path: Path) -> None:
    store = open_directory(tmp_path)
    write(store, [1])
    memory = [memoryview(bytearray(BLOCK_BYTES))]
    assert store.read([name_of(1)], memory, 0.0) == ["deadline"]
    assert store.write([(name_of(2), memory[0])], 0.0) == ["deadline"]


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


def test_several_workers_write_and_read_the_same_blocks(tmp_path: Path) -> None:
    stores = [open_directory(tmp_path, shared=True) for _ in range(4)]
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


# --- Crashes and broken disks

CRASH = """
import os, sys
from pathlib import Path
from forebay.workers.kv_tiers.disk import DirectoryStore
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
who = KvIdentity(
    weights="0" * 64, layout="l", dtype="d", tp_rank=0, tp_size=1, block_size=16, block_bytes=5_000, model="m"
)
store = DirectoryStore(
    Path(sys.argv[1]), who, quota_bytes=1 << 30, shared=sys.argv[2] == "shared", owner="crashed"
)
os.rename = lambda *_: os._exit(9)  # between the write and the rename
store.write([(BlockName(bytes(32), 1), memoryview(bytearray(5_000)))], 50.0)
"""


@pytest.mark.parametrize("kind", ["shared", pytest.param("own", marks=pytest.mark.slow)])
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


def test_a_limit_of_file_sizes_fails_writes(tmp_path: Path) -> None:
    store = open_directory(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE - 1000, hard))  # the write ends in the middle of the block
    try:
        results = write(store, [1, 2])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert results == ["full", "full"]
    assert files(tmp_path) == temporaries(tmp_path) == []
    assert write(store, [1]) == [""]


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


def test_missing_permissions_are_reported(tmp_path: Path) -> None:
    store = open_directory(tmp_path / "store")
    write(store, [1])
    with forbidden(tmp_path / "store"):
        assert read(store, [1])[0] == ["denied"]
        assert write(store, [2]) == ["denied"]
        store.enforce_quota()
        assert inventory(store) == set()
        with pytest.raises(EngineError, match="Permission denied"):
            open_directory(tmp_path / "store" / "deeper")
    check_read(store, [1])


def test_a_removed_store_is_not_created_again(tmp_path: Path) -> None:
    store = open_directory(tmp_path / "store")
    write(store, [1])
    shutil.rmtree(tmp_path / "store")
    assert read(store, [1])[0] == ["missing"]
    assert write(store, [2]) == ["failed"]
    assert inventory(store) == set()
    store.enforce_quota()
    store.remove([name_of(1)])
    assert not (tmp_path / "store").exists()


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
    assert store.take_evicted() == []


# --- Opening


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(EngineError, match=r"cannot use .*file for KV blocks"):
        open_store("disk", TierSettings(disk=tmp_path / "file"), identity())


# --- File systems that hang. A FIFO stands for such a file: to open it blocks until somebody writes to it.


MOUNTS = """\
/dev/vda / ext4 rw,relatime 0 0
server:/export /mnt/my\\040share nfs4 rw 0 0
tmpfs /mnt/my\\040share/local tmpfs rw 0 0
s3fs /mnt/fuse fuse.s3fs rw 0 0
"""


def open_guarded(root: Path) -> NetworkDirectoryStore:
    return NetworkDirectoryStore(root, identity(), quota_bytes=QUOTA, shared=True, owner="")


@pytest.fixture
def store(tmp_path: Path) -> NetworkDirectoryStore:
    return open_guarded(tmp_path)


@pytest.fixture
def hanging(tmp_path: Path, store: NetworkDirectoryStore) -> Iterator[Path]:
    """Return the file of block 1, which hangs during the test."""
    write(store, range(3))
    path = path_of(tmp_path, 1)
    path.unlink()
    os.mkfifo(path)
    yield path
    while True:  # release the threads
        try:
            os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK))
        except OSError:  # nobody waits any more
            return


def test_large_guarded_calls_are_moved_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.workers.kv_tiers.disk.GUARDED_BYTES", 3 * BLOCK_BYTES)
    store = open_guarded(tmp_path)
    assert write(store, range(10)) == [""] * 10
    check_read(store, range(10))
    store.remove([name_of(1)])
    assert inventory(store) == set(names(10)) - {name_of(1)}
    assert store.read([name_of(2)], [memoryview(bytearray(BLOCK_BYTES))], 0.0) == ["deadline"]
    store.close()


def test_a_call_that_hangs_ends_at_its_deadline(store: NetworkDirectoryStore, hanging: Path) -> None:
    memory = [bytearray(BLOCK_BYTES) for _ in range(2)]
    assert hanging.is_fifo()
    assert store.read([name_of(0), name_of(1)], [memoryview(one) for one in memory], 0.1) == ["deadline"] * 2
    assert memory == [bytes(BLOCK_BYTES)] * 2
    check_read(store, [0, 2])


@pytest.mark.slow
def test_threads_that_hang_are_bounded(store: NetworkDirectoryStore, hanging: Path) -> None:
    memory = [memoryview(bytearray(BLOCK_BYTES))]
    assert hanging.is_fifo()
    for _ in range(HANGING_MAX):
        assert store.read([name_of(1)], memory, 0.05) == ["deadline"]
    assert store.read([name_of(0)], memory, 0.05) == ["deadline"], "no thread is left for it"


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("/", False),
        ("/srv/x", False),
        ("/mnt/my share", True),
        ("/mnt/my share/kv", True),
        ("/mnt/my share/local/kv", False),
        ("/mnt/my", False),
        ("/mnt/fuse/bucket", True),
    ],
)
def test_network_file_systems_are_recognized(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, found: bool
) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    monkeypatch.setattr("forebay.workers.kv_tiers.disk.MOUNTS", tmp_path / "mounts")
    assert may_hang(Path(path)) is found


def test_a_shared_directory_on_the_network_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = TierSettings(store=str(tmp_path / "store"))
    assert not isinstance(open_store("store", given, identity()), NetworkDirectoryStore)
    (tmp_path / "mounts").write_text(f"server:/export {tmp_path} nfs4 rw 0 0\n")
    monkeypatch.setattr("forebay.workers.kv_tiers.disk.MOUNTS", tmp_path / "mounts")
    assert isinstance(open_store("store", given, identity()), NetworkDirectoryStore)
