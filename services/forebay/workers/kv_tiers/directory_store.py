"""Store of KV blocks in a directory: the disk tier of one worker rank, or a store that workers share.

Theory of operation. Blocks are moved in batches: files are opened, moved by one transfer, and closed. A block is
written to a temporary file, which is then renamed, so readers never see a part of a block from a writer that runs.
Files are not synchronized to the disk, so after a power loss a file may have any content. Readers therefore trust
nothing: they check the size, the header and the checksum of every block, and move bad files to the quarantine.
"""

import contextlib
import errno
import logging
import os
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from forebay import runtime
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers import block_file
from forebay.workers.kv_tiers.block_file import (
    HEAD_BYTES,
    PAYLOAD_OFFSET,
    Checksum,
    decode_head,
    encode_head,
    file_name,
    head_problem,
    parse_file_name,
)
from forebay.workers.kv_tiers.block_stores import BAD_REASONS, IoKind, StoreStats
from forebay.workers.kv_tiers.directory_layout import (
    QUARANTINE,
    TEMPORARY,
    block_folders,
    describe,
    describe_identity,
    lock_directory,
)
from forebay.workers.kv_tiers.directory_quota import DirectoryQuota
from forebay.workers.kv_tiers.file_io import Segment, open_file_io, transfer_plainly
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity

LOG = logging.getLogger(__name__)

BATCH_BLOCKS = 64  # files that one call has open at a time; processes may open 1,024 by default
BATCH_BYTES = 64 << 20  # a deadline is checked between batches, and a slow disk moves this much in half a second
QUARANTINE_MAX = 32  # files per identity, enough to find the cause
WARN_S = 10.0  # between two warnings, because a broken disk fails for every block
TOUCH_S = 60.0  # a read updates the time of last use if it is older, so that most reads write nothing
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC

Opened = tuple[int, int, BlockName]  # index in the call, file descriptor, name


class DirectoryStore:
    """Store of KV blocks of one identity in a directory.

    Args:
        root: the directory, created if necessary.
        identity: identity of the blocks.
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
        self._prefix = f"{self._folder}/"
        self._identity = identity
        self._checksum = checksum
        self._quota = DirectoryQuota(root, quota_bytes, exclusive=not shared)
        self._name = f"{store_id}-{identity.short_digest}"
        self._stats = StoreStats()
        self._evicted: list[BlockName] = []
        self._lock = threading.Lock()  # of statistics and evicted blocks
        self._warned_s = -WARN_S
        self._file_bytes = block_file.file_bytes(identity.block_bytes)
        self._batch = max(1, min(BATCH_BLOCKS, BATCH_BYTES // identity.block_bytes))

    @property
    def name(self) -> str:
        """Return the name of the store for the router."""
        return self._name

    @property
    def stats(self) -> StoreStats:
        """Return the statistics of this process."""
        return self._stats

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        """Read and verify blocks. See `BlockStore.read`."""
        start_s = runtime.monotonic_s()
        results: list[str] = []
        for begin in range(0, len(names), self._batch):
            if runtime.monotonic_s() - start_s > deadline_s:
                results += ["deadline"] * (len(names) - begin)
                break
            end = begin + self._batch
            results += self._read_batch(names[begin:end], into[begin:end])
        self._count_read(results, start_s)
        return results

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]], deadline_s: float) -> list[str]:
        """Write blocks. See `BlockStore.write`."""
        start_s = runtime.monotonic_s()
        results: list[str] = []
        for begin in range(0, len(blocks), self._batch):
            if runtime.monotonic_s() - start_s > deadline_s:
                results += ["deadline"] * (len(blocks) - begin)
                break
            results += self._write_batch(blocks[begin : begin + self._batch])
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
                os.unlink(self._path(name))
                self._forget(name, counter="removed")

    def inventory(self) -> Iterator[list[BlockName]]:
        """Yield the names of all blocks, one page per folder. See `BlockStore.inventory`."""
        blocks = 0
        for folder in block_folders(self._folder):
            try:
                found = [name for text in os.listdir(folder) if (name := parse_file_name(text)) is not None]
            except OSError as error:
                self._warn("cannot list %s: %s", folder, error.strerror)
                continue
            blocks += len(found)
            if found:
                yield found
        with self._lock:
            self._stats.blocks = blocks
            self._stats.bytes = blocks * self._identity.block_bytes

    def take_evicted(self) -> list[BlockName]:
        """Return the blocks that left the store since the last call. See `BlockStore.take_evicted`."""
        with self._lock:
            evicted, self._evicted = self._evicted, []
        return evicted

    def enforce_quota(self) -> None:
        """Count the files of the directory, and remove the least recently used ones if it exceeds its quota."""
        for path in self._quota.enforce():
            if path.startswith(self._prefix) and (name := parse_file_name(Path(path).name)) is not None:
                self._forget(name, counter="evicted", is_counted=True)

    def close(self) -> None:
        """Release the lock of the directory and the resources of NIXL."""
        self._io.close()
        os.close(self._lock_fd)

    def _path(self, name: BlockName) -> str:
        file = file_name(name)
        return f"{self._prefix}{file[:2]}/{file}"

    def _read_batch(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[str]:
        results = [""] * len(names)
        opened: list[Opened] = []
        touch_s = runtime.wall_s() - TOUCH_S
        try:
            for index, name in enumerate(names):
                try:
                    fd = os.open(self._path(name), READ_FLAGS)
                except OSError as error:
                    results[index] = self._read_reason(error)
                    continue
                opened.append((index, fd, name))
                results[index] = self._check_size(fd, touch_s)
            good = [one for one in opened if not results[one[0]]]
            heads = self._transfer_in(good, into, results)
            for (index, _, name), head in zip(good, heads, strict=True):
                results[index] = results[index] or self._verify(name, head, into[index])
        finally:
            for _, fd, _ in opened:
                os.close(fd)
        for name, reason in zip(names, results, strict=True):
            if reason in BAD_REASONS:
                self._quarantine(name, reason)
        return results

    def _check_size(self, fd: int, touch_s: float) -> str:
        """Check the size of a file, and update its time of last use if it is before `touch_s`."""
        found = os.fstat(fd)
        if found.st_size != self._file_bytes:
            if found.st_size >= HEAD_BYTES:
                problem, head = decode_head(os.pread(fd, HEAD_BYTES, 0))
                if problem or (head is not None and head.length != self._identity.block_bytes):
                    return problem or "foreign"
            return "truncated" if found.st_size < self._file_bytes else "corrupt"
        if found.st_mtime < touch_s:
            with contextlib.suppress(OSError):  # a reader may not be allowed to
                os.utime(fd)
        return ""

    def _transfer_in(self, opened: list[Opened], into: Sequence[memoryview], results: list[str]) -> list[memoryview]:
        """Read headers and blocks, and set the results of blocks that cannot be read. Return the headers."""
        if not opened:
            return []
        buffer = memoryview(bytearray(HEAD_BYTES * len(opened)))
        heads = [buffer[at : at + HEAD_BYTES] for at in range(0, len(buffer), HEAD_BYTES)]
        segments: list[Segment] = []
        for (index, fd, _), head in zip(opened, heads, strict=True):
            segments += (Segment(fd, 0, head), Segment(fd, PAYLOAD_OFFSET, into[index]))
        if not self._io.transfer("READ", segments):
            for place, (index, _, _) in enumerate(opened):
                try:
                    transfer_plainly("READ", segments[2 * place])
                    transfer_plainly("READ", segments[2 * place + 1])
                except OSError as error:
                    results[index] = self._read_reason(error)
        return heads

    def _verify(self, name: BlockName, data: memoryview, block: memoryview) -> str:
        problem, head = decode_head(data)
        if head is None:
            return problem
        problem = head_problem(head, name, self._identity.digest, self._identity.block_bytes)
        return problem or ("" if self._checksum(block) == head.checksum else "corrupt")

    def _write_batch(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> list[str]:
        results = [""] * len(blocks)
        opened: list[Opened] = []
        suffix = f".{runtime.random_id()}{TEMPORARY}"
        touch_s = runtime.wall_s() - TOUCH_S
        written: list[BlockName] = []
        try:
            for index, (name, _) in enumerate(blocks):
                if self._exists(name, touch_s):
                    continue
                try:
                    opened.append((index, self._create(self._path(name) + suffix), name))
                except FileExistsError:
                    continue  # the same block twice in one call
                except OSError as error:
                    results[index] = self._write_reason(error)
            self._transfer_out(opened, blocks, results)
        finally:
            for index, fd, name in opened:
                os.close(fd)
                results[index] = results[index] or self._publish(self._path(name), suffix)
                if results[index]:
                    with contextlib.suppress(OSError):
                        os.unlink(self._path(name) + suffix)
                else:
                    written.append(name)
        with self._lock:
            self._stats.write_skipped += results.count("") - len(written)
            self._stats.write_blocks += len(written)
            self._stats.write_bytes += len(written) * self._identity.block_bytes
            self._stats.blocks += len(written)
            self._stats.bytes += len(written) * self._identity.block_bytes
        self._quota.wrote(len(written) * self._file_bytes)
        return results

    def _exists(self, name: BlockName, touch_s: float) -> bool:
        """Return whether the store has a block, and update the time of its last use if it is before `touch_s`."""
        path = self._path(name)
        try:
            found = os.stat(path)
            if found.st_mtime < touch_s:
                os.utime(path)
        except OSError:
            return False
        return found.st_size == self._file_bytes

    def _create(self, path: str) -> int:
        try:
            return os.open(path, WRITE_FLAGS, 0o666)
        except FileNotFoundError:
            os.mkdir(os.path.dirname(path))  # not its parents: if they are gone, the store was removed
            return os.open(path, WRITE_FLAGS, 0o666)

    def _transfer_out(
        self, opened: list[Opened], blocks: Sequence[tuple[BlockName, memoryview]], results: list[str]
    ) -> None:
        if not opened:
            return
        segments: list[Segment] = []
        for index, fd, name in opened:
            block = blocks[index][1]
            head = encode_head(name, self._identity.digest, self._identity.block_bytes, self._checksum(block))
            segments += (Segment(fd, 0, memoryview(bytearray(head))), Segment(fd, PAYLOAD_OFFSET, block))
        done = self._io.transfer("WRITE", segments)
        for place, (index, fd, _) in enumerate(opened):
            if done and os.fstat(fd).st_size == self._file_bytes:
                continue
            try:
                transfer_plainly("WRITE", segments[2 * place])
                transfer_plainly("WRITE", segments[2 * place + 1])
            except OSError as error:
                results[index] = self._write_reason(error)

    def _publish(self, path: str, suffix: str) -> str:
        try:
            os.rename(path + suffix, path)
        except OSError as error:
            return self._write_reason(error)
        return ""

    def _quarantine(self, name: BlockName, reason: str) -> None:
        path = self._path(name)
        folder = self._folder / QUARANTINE
        try:
            if len(os.listdir(folder)) < QUARANTINE_MAX:
                os.rename(path, folder / f"{reason}-{file_name(name)}")
            else:
                os.unlink(path)
        except FileNotFoundError:
            return  # another reader was faster
        except OSError as error:
            self._warn("cannot move the %s file %s to the quarantine: %s", reason, path, error.strerror)
            return
        self._warn("the block %s is %s; it counts as a miss and was moved to the quarantine", path, reason)
        self._forget(name, counter="quarantined")

    def _forget(self, name: BlockName, *, counter: str, is_counted: bool = False) -> None:
        with self._lock:
            setattr(self._stats, counter, getattr(self._stats, counter) + 1)
            self._stats.blocks = max(0, self._stats.blocks - 1)
            self._stats.bytes = max(0, self._stats.bytes - self._identity.block_bytes)
            if not is_counted:
                self._quota.removed(self._file_bytes)
            if counter == "evicted":
                self._evicted.append(name)

    def _count_read(self, results: list[str], start_s: float) -> None:
        count = results.count("")
        with self._lock:
            self._stats.read_blocks += count
            self._stats.read_bytes += count * self._identity.block_bytes
            self._stats.read_us += round((runtime.monotonic_s() - start_s) * 1e6)
            self._stats.read_misses.update(filter(None, results))

    def _read_reason(self, error: OSError) -> str:
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR:
                return "missing"
            case errno.EACCES | errno.EPERM:
                return "denied"
            case errno.ENODATA:
                return "truncated"
            case _:
                self._warn("cannot read a KV block: %s", error)
                return "failed"

    def _write_reason(self, error: OSError) -> str:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                return "full"
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return "denied"
            case _:
                self._warn("cannot write a KV block: %s", error)
                return "failed"

    def _warn(self, text: str, *args: object) -> None:
        now_s = runtime.monotonic_s()
        if now_s - self._warned_s >= WARN_S:
            self._warned_s = now_s
            LOG.warning(text, *args)
