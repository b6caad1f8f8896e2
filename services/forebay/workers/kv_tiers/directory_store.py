"""Store of KV blocks in a directory: the disk tier of one worker rank, or a store that workers share.

Theory of operation. A call moves its blocks in batches, by two threads: the caller and a helper. So the checksums of
one batch overlap with the transfer of another one. Bad files are moved to the quarantine of the identity, for an
operator.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from forebay import runtime
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers import block_file
from forebay.workers.kv_tiers.block_file import Checksum, file_bytes, file_name, parse_file_name
from forebay.workers.kv_tiers.block_files import BlockFiles
from forebay.workers.kv_tiers.block_stores import BAD_REASONS, IoKind, StoreStats
from forebay.workers.kv_tiers.daemon_calls import start_call
from forebay.workers.kv_tiers.directory_layout import (
    QUARANTINE,
    block_folders,
    describe,
    describe_identity,
    lock_directory,
)
from forebay.workers.kv_tiers.directory_quota import DirectoryQuota
from forebay.workers.kv_tiers.file_io import open_file_io
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity

THREADS = 2  # per call: one transfers while the other opens files or computes checksums
BATCH_BLOCKS = 128  # files that a thread has open at a time; a process may open 1,024 by default
BATCH_BYTES = 32 << 20  # a deadline is checked between batches, and a slow disk moves this in a quarter of a second
SPLIT_BYTES = 4 << 20  # less is moved by the caller alone, because starting a thread takes longer than it saves
QUARANTINE_MAX = 32  # files per identity, enough to find the cause


class DirectoryStore:
    """Store of KV blocks of one identity in a directory.

    Args:
        quota_bytes: maximum size of the directory in bytes, over all identities.
        io: how bytes are moved.
        shared: whether other workers may use the directory, too.
        owner: name of this worker, for the error of another worker that uses the same directory.
        checksum: checksum of blocks; only benchmarks replace it.

    Raises:
        EngineError: the directory cannot be used, or belongs to another worker.
        PackageMissing: NIXL is not installed.
    """

    def __init__(
        self,
        root: Path,
        identity: KvIdentity,
        *,
        quota_bytes: int,
        io: IoKind,
        shared: bool,
        owner: str,
        checksum: Checksum = block_file.checksum,
    ) -> None:
        self._io = open_file_io(io)
        store_id = describe(root).store_id
        self._lock_fd = lock_directory(root, owner, shared=shared)
        try:
            self._folder = describe_identity(root, identity)
        except EngineError:
            os.close(self._lock_fd)
            raise
        self._identity = identity
        self._files = BlockFiles(str(self._folder), identity, self._io, checksum)
        self._quota = DirectoryQuota(root, quota_bytes, exclusive=not shared)
        self._name = f"{store_id}-{identity.short_digest}"
        self._stats = StoreStats()
        self._evicted: list[BlockName] = []
        self._lock = threading.Lock()  # of statistics and evicted blocks
        self._file_bytes = file_bytes(identity.block_bytes)

    @property
    def name(self) -> str:
        return self._name

    @property
    def stats(self) -> StoreStats:
        return self._stats

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        """Read and verify blocks. See `BlockStore.read`."""
        start_s = runtime.monotonic_s()
        results = self._move(len(names), deadline_s, lambda at: self._files.read(names[at], into[at]))
        for name, reason in zip(names, results, strict=True):
            if reason in BAD_REASONS:
                self._quarantine(name, reason)
        count = results.count("")
        with self._lock:
            self._stats.read_blocks += count
            self._stats.read_bytes += count * self._identity.block_bytes
            self._stats.read_us += round((runtime.monotonic_s() - start_s) * 1e6)
            self._stats.read_misses.update(filter(None, results))
        return results

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]], deadline_s: float) -> list[str]:
        """Write blocks. See `BlockStore.write`."""
        start_s = runtime.monotonic_s()
        results = self._move(len(blocks), deadline_s, lambda at: self._write_batch(blocks[at]))
        with self._lock:
            self._stats.write_us += round((runtime.monotonic_s() - start_s) * 1e6)
            self._stats.write_failures.update(filter(None, results))
        if self._quota.due():
            self.enforce_quota()
        return results

    def remove(self, names: Sequence[BlockName]) -> None:
        """Remove blocks. See `BlockStore.remove`."""
        for name in names:
            with contextlib.suppress(OSError):
                os.unlink(self._files.path(name))
                self._forget(name, counter="removed")

    def inventory(self) -> Iterator[list[BlockName]]:
        """Yield the names of all blocks, one page per folder. See `BlockStore.inventory`."""
        blocks = 0
        for page in self._pages():
            blocks += len(page)
            yield page
        with self._lock:
            self._stats.blocks = blocks
            self._stats.bytes = blocks * self._identity.block_bytes

    def _pages(self) -> Iterator[list[BlockName]]:
        try:
            for folder in block_folders(self._folder):
                found = [name for text in os.listdir(folder) if (name := parse_file_name(text)) is not None]
                if found:
                    yield found
        except OSError as error:
            self._files.warn("cannot list %s: %s", self._folder, error.strerror)

    def take_evicted(self) -> list[BlockName]:
        """Return the blocks that left the store since the last call. See `BlockStore.take_evicted`."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def enforce_quota(self) -> None:
        """Count the files of the directory, and remove the least recently used ones if it exceeds its quota."""
        try:
            removed = self._quota.enforce()
        except OSError as error:
            self._files.warn("cannot enforce the quota of %s: %s", self._folder.parent, error.strerror)
            return
        for path in removed:
            if path.startswith(f"{self._folder}/") and (name := parse_file_name(Path(path).name)) is not None:
                self._forget(name, counter="evicted", is_counted=True)

    def close(self) -> None:
        """Release the lock of the directory and the resources of NIXL."""
        self._io.close()
        os.close(self._lock_fd)

    def _move(self, count: int, deadline_s: float, act: Callable[[slice], list[str]]) -> list[str]:
        """Move blocks in batches, by the calling thread and a helper.

        Args:
            deadline_s: seconds after which no further batch is begun.
            act: moves the batch in a slice of the blocks, and returns its results.
        """
        end_s = runtime.monotonic_s() + deadline_s
        results = ["deadline"] * count
        split = count * self._identity.block_bytes >= SPLIT_BYTES
        fair = -(-count // THREADS) if split else count
        size = max(1, min(fair, BATCH_BLOCKS, BATCH_BYTES // self._identity.block_bytes))
        batches = iter([slice(at, at + size) for at in range(0, count, size)])
        lock = threading.Lock()

        def work() -> None:
            while runtime.monotonic_s() < end_s:
                with lock:
                    batch = next(batches, None)
                if batch is None:
                    return
                results[batch] = act(batch)

        helper = start_call(work, "kv-store") if split and size < count else None
        try:
            work()
        finally:
            if helper is not None:
                helper.result()  # until then, it uses the caller's memory
        return results

    def _write_batch(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[str]:
        results, written = self._files.write(blocks)
        with self._lock:
            self._stats.write_skipped += results.count("") - written
            self._stats.write_blocks += written
            self._stats.write_bytes += written * self._identity.block_bytes
            self._stats.blocks += written
            self._stats.bytes += written * self._identity.block_bytes
        self._quota.wrote(written * self._file_bytes)
        return results

    def _quarantine(self, name: BlockName, reason: str) -> None:
        path = self._files.path(name)
        folder = self._folder / QUARANTINE
        try:
            if len(os.listdir(folder)) < QUARANTINE_MAX:
                os.rename(path, folder / f"{reason}-{file_name(name)}")
            else:
                os.unlink(path)
        except FileNotFoundError:
            return  # another reader was faster
        except OSError as error:
            self._files.warn("cannot move the %s file %s to the quarantine: %s", reason, path, error.strerror)
            return
        self._files.warn("the block %s is %s; it counts as a miss and was moved to the quarantine", path, reason)
        self._forget(name, counter="quarantined")

    def _forget(self, name: BlockName, *, counter: str, is_counted: bool = False) -> None:
        with self._lock:
            setattr(self._stats, counter, getattr(self._stats, counter) + 1)
            self._stats.blocks = max(0, self._stats.blocks - 1)
            self._stats.bytes = max(0, self._stats.bytes - self._identity.block_bytes)
            if counter == "evicted":
                self._evicted.append(name)
        if not is_counted:
            self._quota.removed(self._file_bytes)
