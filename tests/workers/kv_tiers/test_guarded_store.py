"""Stores on file systems that hang. A FIFO stands for such a file: to open it blocks until somebody writes to it."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forebay import runtime
from forebay.runtime.system import SystemRuntime
from forebay.workers.kv_tiers.guarded_store import THREADS, GuardedStore, is_on_network, may_hang
from forebay.workers.kv_tiers.stores import open_store
from tests.workers.kv_tiers.store_cases import (
    BLOCK_BYTES,
    QUOTA,
    check_read,
    identity,
    inventory,
    name_of,
    names,
    open_directory,
    path_of,
    write,
)

MOUNTS = """\
21 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
30 21 0:28 / /mnt/my\\040share rw,relatime shared:9 - nfs4 server:/export rw
31 30 0:29 / /mnt/my\\040share/local rw,relatime - tmpfs tmpfs rw
32 21 0:30 / /mnt/fuse rw - fuse.s3fs s3fs rw
a line of another format
"""


class Clock(SystemRuntime):
    """Runtime whose monotonic clock can be advanced."""

    ahead_s = 0

    def monotonic_ns(self) -> int:
        return super().monotonic_ns() + self.ahead_s * 10**9


@pytest.fixture
def store(tmp_path: Path) -> GuardedStore:
    return GuardedStore(open_directory(tmp_path, shared=True), BLOCK_BYTES, "the store")


@pytest.fixture
def hanging(tmp_path: Path, store: GuardedStore) -> Iterator[Path]:
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


def test_a_store_that_works_is_unchanged(store: GuardedStore) -> None:
    assert write(store, range(5)) == [""] * 5
    check_read(store, range(5))
    assert inventory(store) == set(names(5))
    store.remove([name_of(1)])
    assert inventory(store) == set(names(5)) - {name_of(1)}
    assert store.take_evicted() == []
    assert store.stats.removed == 1
    store.close()


def test_large_calls_are_moved_in_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.workers.kv_tiers.guarded_store.BATCH_BYTES", 3 * BLOCK_BYTES)
    store = GuardedStore(open_directory(tmp_path, shared=True), BLOCK_BYTES, "the store")
    assert write(store, range(10)) == [""] * 10
    check_read(store, range(10))
    assert store.read([name_of(1)], [memoryview(bytearray(BLOCK_BYTES))], 0.0) == ["deadline"]


def test_a_call_that_hangs_ends_at_its_deadline(store: GuardedStore, hanging: Path) -> None:
    memory = [bytearray(BLOCK_BYTES) for _ in range(2)]
    views = [memoryview(one) for one in memory]
    assert hanging.is_fifo()
    assert store.read([name_of(0), name_of(1)], views, 0.1) == ["deadline"] * 2
    assert memory == [bytes(BLOCK_BYTES)] * 2
    assert store.read([name_of(0)], views[:1], 0.1) == ["failed"]  # it pauses
    clock = Clock()
    clock.ahead_s = 3600
    with runtime.use(clock):
        check_read(store, [0, 2])


@pytest.mark.slow
def test_threads_that_hang_are_bounded(store: GuardedStore, hanging: Path) -> None:
    memory = [memoryview(bytearray(BLOCK_BYTES))]
    assert hanging.is_fifo()
    clock = Clock()
    with runtime.use(clock):
        for _ in range(THREADS):
            assert store.read([name_of(1)], memory, 0.05) == ["deadline"]
            clock.ahead_s += 3600  # the pause is over
        assert store.read([name_of(0)], memory, 0.05) == ["deadline"]  # no thread is left for it


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
def test_network_file_systems_are_recognized(path: str, found: bool) -> None:
    assert is_on_network(Path(path), MOUNTS) is found


def test_a_shared_directory_on_the_network_is_guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(f"30 21 0:28 / {tmp_path} rw shared:9 - nfs4 server:/export rw\n")
    monkeypatch.setattr("forebay.workers.kv_tiers.guarded_store.MOUNTS", mounts)
    store = open_store(tmp_path / "store", identity(), quota_bytes=QUOTA, shared=True)
    assert isinstance(store, GuardedStore)
    assert write(store, [1]) == [""]
    check_read(store, [1])
    store.close()


def test_local_file_systems_do_not_hang(tmp_path: Path) -> None:
    assert not may_hang(tmp_path / "not created yet")
