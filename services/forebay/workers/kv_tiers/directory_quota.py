"""Keep a directory with KV blocks below its maximum size, by removing the blocks that were used least recently.

Theory of operation. The modification time of a block's file is the time of its last use: reads update it, at most once
per minute. Several processes may share a directory, and each may remove blocks. Counting all files takes seconds for a
million blocks, so a process counts only at the start and after it has written a part of the quota. Between counts,
the directory may exceed the quota by that part per process. A lock lets one process count at a time. Where a file
system has no locks, two processes may remove more blocks than needed, which loses nothing else.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from forebay import runtime
from forebay.workers.kv_tiers.block_file import SUFFIX
from forebay.workers.kv_tiers.directory_layout import (
    QUARANTINE,
    TEMPORARY,
    TEMPORARY_AGE_S,
    block_folders,
    identities_in,
)

QUOTA_LOCK = "quota.lock"
COUNT_SHARE = 16  # a process counts again after it has written 1/16 of the quota
KEEP_SHARE = 0.95  # if the quota is exceeded, blocks are removed down to this share, so that counts are rare


class BlockFileEntry(NamedTuple):
    """A file of a store.

    Attributes:
        used_s: time of its last use, seconds since 1970.
        path: its path.
    """

    used_s: float
    bytes: int
    path: str


class DirectoryQuota:
    """Maximum size of a directory.

    Args:
        limit: maximum size of its blocks and quarantined files in bytes.
        exclusive: whether only this process writes to the directory. Files of crashed writers are then removed at once.
    """

    def __init__(self, root: Path, limit: int, *, exclusive: bool) -> None:
        self._root = root
        self._limit = limit
        self._bytes = 0  # according to the last count, and the writes of this process since
        self._written = limit  # since the last count; at the start, a count is due
        self._lock = threading.Lock()  # of the two numbers
        self._counting = threading.Lock()
        if exclusive:
            # Nobody writes yet, so the writer of every temporary file has crashed.
            for _ in stored_files(root, abandoned_s=float("inf")):
                pass

    def wrote(self, size: int) -> None:
        with self._lock:
            self._bytes += size
            self._written += size

    def removed(self, size: int) -> None:
        with self._lock:
            self._bytes -= size

    def due(self) -> bool:
        """Return whether `enforce` should be called, because the directory may exceed its quota."""
        return self._bytes > self._limit or self._written >= self._limit / COUNT_SHARE

    def enforce(self) -> list[str]:
        """Count the files of the directory, and remove old ones if the quota is exceeded. Return removed paths."""
        if not self._counting.acquire(blocking=False):
            return []
        try:
            with self._lock:
                self._written = 0
                before = self._bytes
            with _exclusively(self._root / QUOTA_LOCK) as alone:
                # Otherwise another process counts, and removes what is necessary.
                total, removed = self._reduce() if alone else (min(before, self._limit), [])
            with self._lock:
                self._bytes = (
                    total + self._written
                )  # files written meanwhile may be counted twice, until the next count
        finally:
            self._counting.release()
        return removed

    def _reduce(self) -> tuple[int, list[str]]:
        """Remove files until the quota is kept. Return the bytes of the remaining files, and the removed paths."""
        files = list(stored_files(self._root))
        total = sum(file.bytes for file in files)
        removed: list[str] = []
        if total > self._limit:
            for file in sorted(files):
                if total <= self._limit * KEEP_SHARE:
                    break
                total -= file.bytes
                if _unlink(file.path):
                    removed.append(file.path)
        return total, removed


def stored_files(root: Path, abandoned_s: float = 0.0) -> Iterator[BlockFileEntry]:
    """Yield all blocks and quarantined files of a directory, in any order, and remove abandoned temporary files.

    Quarantined files count as never used, so they are removed first.

    Args:
        abandoned_s: temporary files from before this time, in seconds since 1970, are abandoned, as are those that are
            older than `TEMPORARY_AGE_S`.
    """
    for identity in identities_in(root):
        for folder in block_folders(identity):
            yield from _files(folder, SUFFIX, abandoned_s)
        if (folder := identity / QUARANTINE).is_dir():
            yield from (file._replace(used_s=0.0) for file in _files(folder, "", abandoned_s))


def _files(folder: Path, suffix: str, abandoned_s: float) -> Iterator[BlockFileEntry]:
    abandoned_s = max(abandoned_s, runtime.wall_s() - TEMPORARY_AGE_S)
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
            except FileNotFoundError:
                continue  # another process has removed it
            if entry.name.endswith(TEMPORARY):
                if found.st_mtime < abandoned_s:
                    _unlink(entry.path)
            elif entry.name.endswith(suffix):
                yield BlockFileEntry(found.st_mtime, found.st_size, entry.path)


def _unlink(path: str) -> bool:
    try:
        Path(path).unlink()
    except OSError:  # another process has removed it, or it cannot be removed
        return False
    return True


@contextmanager
def _exclusively(path: Path) -> Iterator[bool]:
    """Yield whether this process is the only one that has locked a file. Without a usable lock, yield True."""
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        yield True
        return
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone = True
        except BlockingIOError:
            alone = False
        except OSError:  # a file system without locks
            alone = True
        yield alone
    finally:
        os.close(fd)
