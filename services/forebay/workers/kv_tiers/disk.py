"""Store of KV blocks in a directory: the disk tier of one worker rank, or a store that workers share.

Theory of operation. Two threads move the blocks of a large call: the caller and a helper. So the checksum of one block
overlaps with the transfer of another one. A block is written to a temporary file, which is then renamed, so a reader
never sees a part of a block. Files are not synchronized to the disk, so after a power loss a file may have any content.
Readers therefore check the header and the checksum of every block. The modification time of a file is the time of its
last use: reads update it, at most once per minute.
"""

import contextlib
import errno
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from forebay import runtime
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers import block_format
from forebay.workers.kv_tiers.block_format import HEAD_BYTES, PAYLOAD_OFFSET
from forebay.workers.kv_tiers.block_store import (
    DESCRIPTION_BYTES_MAX,
    IDENTITY_NAME,
    QUARANTINE,
    TEMPORARY,
    BlockStore,
    StorageError,
    StoredFile,
    start_call,
)
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity

LOG = logging.getLogger(__name__)

LOCK_FILE = "owner.lock"
QUOTA_LOCK = "quota.lock"
BLOCK_FOLDER = re.compile(f"[0-9a-f]{{2}}|{QUARANTINE}")

SPLIT_BYTES = 4 << 20  # less is moved by the caller alone, because starting a thread takes longer than it saves
TOUCH_S = 60.0  # the time of last use of a file is updated at most this often, so that most reads write nothing
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC

HANGING_MAX = 4  # calls to a network file system that may hang at a time
GUARDED_BYTES = 64 << 20  # of memory per guarded call
MARGIN_S = 0.5  # for a call that notices the deadline itself, and whose partial results are better than none
LISTING_S = 60.0  # for removals, and per page of an inventory
MOUNTS = Path("/proc/self/mounts")  # per line: device, directory, type and options
NETWORK_TYPES = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gluster", "gpfs", "lustre", "nfs", "smb", "weka")

T = TypeVar("T")


class Directory:
    def __init__(self, root: Path) -> None:
        self.place = str(root)

    def get(self, path: str, limit: int = DESCRIPTION_BYTES_MAX) -> bytes:
        with self._explained("read", path), open(self._at(path), "rb") as file:
            return file.read(limit)

    def create(self, path: str, content: bytes) -> None:
        with self._explained("create", path):
            file = Path(self._at(path))
            file.parent.mkdir(parents=True, exist_ok=True)
            temporary = file.with_name(f"{file.name}.{runtime.random_id()}{TEMPORARY}")
            temporary.write_bytes(content)
            try:
                with contextlib.suppress(FileExistsError):
                    os.link(temporary, file)
            finally:
                temporary.unlink()

    def move(self, path: str, to: str) -> None:
        with self._explained("move", path):
            Path(self._at(to)).parent.mkdir(exist_ok=True)
            os.rename(self._at(path), self._at(to))

    def delete(self, paths: Sequence[str]) -> list[str]:
        removed = []
        for path in paths:
            with contextlib.suppress(OSError):  # another process has removed it, or it cannot be removed
                os.unlink(self._at(path))
                removed.append(path)
        return removed

    def identities(self) -> list[str]:
        with self._explained("list", ""):
            return sorted(filter(IDENTITY_NAME.fullmatch, os.listdir(self.place)))

    def pages(self, folder: str = "") -> Iterator[list[StoredFile]]:
        for one in self._folders(folder):
            page: list[StoredFile] = []
            missing = contextlib.suppress(FileNotFoundError, NotADirectoryError)  # another process has removed it
            with self._explained("list", one), missing, os.scandir(self._at(one)) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        found = entry.stat(follow_symlinks=False)
                        page.append(StoredFile(f"{one}/{entry.name}", found.st_size, found.st_mtime))
            if page:
                yield page

    def names(self, identity: str) -> Iterator[list[str]]:
        for folder in self._folders(identity):
            with self._explained("list", folder):
                found = os.listdir(self._at(folder))
            yield found

    @contextlib.contextmanager
    def counting(self) -> Iterator[bool]:
        """Lock a file. Where a file system has no locks, two processes may remove more than needed."""
        try:
            fd = os.open(self._at(QUOTA_LOCK), LOCK_FLAGS, 0o666)
        except OSError:
            yield True
            return
        try:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except OSError as error:
                alone = not isinstance(error, BlockingIOError)
            yield alone
        finally:
            os.close(fd)

    def _at(self, path: str) -> str:
        return f"{self.place}/{path}"

    def _folders(self, folder: str) -> Iterator[str]:
        """Yield the folders that contain files: those of two digits and the quarantine of each identity."""
        if "/" in folder:
            yield folder
        elif folder:
            with self._explained("list", folder):
                names = sorted(filter(BLOCK_FOLDER.fullmatch, os.listdir(self._at(folder))))
            yield from (f"{folder}/{name}" for name in names)
        else:
            for identity in self.identities():
                yield from self._folders(identity)

    @contextlib.contextmanager
    def _explained(self, verb: str, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StorageError(f"cannot {verb} {self._at(path)}: {error.strerror}", _reason(error)) from error


class DirectoryStore(BlockStore):
    """Store of KV blocks of one identity in a directory, which is locked for this worker alone unless it is `shared`.

    `owner` names this worker in the error of another worker that uses the same directory. Raises EngineError if the
    directory cannot be used or belongs to another worker.
    """

    def __init__(self, root: Path, identity: KvIdentity, *, quota_bytes: int, shared: bool, owner: str) -> None:
        self._lock_fd = _lock_directory(root, owner, shared=shared)
        directory = Directory(root)
        try:
            super().__init__(directory, identity, quota_bytes)
            if not shared:
                # Nobody writes yet, so the writer of every temporary file has crashed.
                files = (file for page in directory.pages() for file in page)
                directory.delete([file.path for file in files if file.kind == "temporary"])
        except EngineError:
            os.close(self._lock_fd)
            raise
        self._touched: set[bytes] = set()  # keys of files whose time of last use is recent
        self._touched_s = runtime.monotonic_s()

    def close(self) -> None:
        os.close(self._lock_fd)

    def _read(self, names: Sequence[BlockName], into: Sequence[memoryview], end_s: float) -> list[str]:
        return self._move(len(names), end_s, lambda at: self._read_block(names[at], into[at]))

    def _write(self, blocks: Sequence[tuple[BlockName, memoryview]], end_s: float) -> tuple[list[str], list[BlockName]]:
        new: list[BlockName] = []
        return self._move(len(blocks), end_s, lambda at: self._write_block(*blocks[at], new)), new

    def _move(self, count: int, end_s: float, move: Callable[[int], str]) -> list[str]:
        """Move blocks one by one, by the calling thread and maybe a helper. No block is begun after `end_s`."""
        results = ["deadline"] * count
        places = iter(range(count))  # both threads take the next place from it

        def work() -> None:
            while runtime.monotonic_s() < end_s and (place := next(places, None)) is not None:
                results[place] = move(place)

        split = count > 1 and count * self._block_bytes >= SPLIT_BYTES
        helper = start_call(work, "kv-store") if split else None
        try:
            work()
        finally:
            if helper is not None:
                helper.result()  # until then, it uses the caller's memory
        return results

    def _read_block(self, name: BlockName, into: memoryview) -> str:
        try:
            fd = os.open(self._file(name), READ_FLAGS)
        except OSError as error:
            return self._failure("read", error)
        try:
            problem, checksum = self._format.read_head(os.pread(fd, HEAD_BYTES, 0), name)
            if problem:
                return problem
            self._touch(name, fd)
            _transfer(os.preadv, fd, into)
        except OSError as error:
            return self._failure("read", error)
        finally:
            os.close(fd)
        return "" if block_format.checksum(into) == checksum else "corrupt"

    def _write_block(self, name: BlockName, block: memoryview, new: list[BlockName]) -> str:
        """Write a block that does not exist, and add it to `new`."""
        path = self._file(name)
        if self._exists(path, name):
            return ""
        temporary = f"{path}.{runtime.random_id()}{TEMPORARY}"  # another thread may write the same block
        try:
            fd = _create(temporary)
        except OSError as error:
            return self._failure("write", error)
        result = "failed"
        try:
            os.pwrite(fd, self._format.head(name, block_format.checksum(block)), 0)
            _transfer(os.pwritev, fd, block)
            os.rename(temporary, path)
            result = ""
        except OSError as error:
            result = self._failure("write", error)
        finally:
            os.close(fd)
            if result:
                with contextlib.suppress(OSError):
                    os.unlink(temporary)
        if not result:
            new.append(name)
            self._recently_touched().add(name.key)
        return result

    def _exists(self, path: str, name: BlockName) -> bool:
        """Return whether a file exists. It is needed again, so the time of its last use is updated."""
        if not os.access(path, os.F_OK):  # half the time of `stat` for a file that does not exist
            return False
        try:
            if os.stat(path).st_size != self._format.file_bytes:
                return False
        except OSError:
            return False
        self._touch(name, path)
        return True

    def _touch(self, name: BlockName, file: int | str) -> None:
        if name.key not in (touched := self._recently_touched()):
            with contextlib.suppress(OSError):  # a reader may not be allowed to
                os.utime(file)
            touched.add(name.key)

    def _recently_touched(self) -> set[bytes]:
        now_s = runtime.monotonic_s()
        if now_s - self._touched_s > TOUCH_S:
            self._touched, self._touched_s = set(), now_s
        return self._touched

    def _failure(self, verb: str, error: OSError) -> str:
        reason = _reason(error)
        if verb == "write" and reason in ("missing", "truncated"):
            reason = "failed"
        if reason == "failed":
            self._warn("cannot %s a KV block: %s", verb, error)
        return reason

    def _file(self, name: BlockName) -> str:
        return f"{self._storage.place}/{self._path(name)}"


class NetworkDirectoryStore(DirectoryStore):
    """Store on a file system that may hang, such as NFS while its server is away.

    Theory of operation. A system call on such a file system may block for ever, and nothing can cancel it. Therefore a
    call runs on a thread of its own, with memory of its own, and the caller waits only until the deadline. Threads that
    hang are bounded; while all hang, the store is not used.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._free = threading.Semaphore(HANGING_MAX)
        super().__init__(*args, **options)

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        read = super().read

        def act(at: slice, left_s: float) -> list[str]:
            own = self._views(bytearray(len(names[at]) * self._block_bytes))
            late = ["deadline"] * len(own)
            results = self._run(lambda: read(names[at], own, left_s), left_s + MARGIN_S, late)
            for result, block, target in zip(results, own, into[at], strict=True):
                if not result:
                    target[:] = block
            return results

        return self._guarded(len(names), deadline_s, act)

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]], deadline_s: float) -> list[str]:
        write = super().write

        def act(at: slice, left_s: float) -> list[str]:
            views = self._views(bytearray().join(block for _, block in blocks[at]))
            own = [(name, view) for (name, _), view in zip(blocks[at], views, strict=True)]
            return self._run(lambda: write(own, left_s), left_s + MARGIN_S, ["deadline"] * len(own))

        return self._guarded(len(blocks), deadline_s, act)

    def remove(self, names: Sequence[BlockName]) -> None:
        remove = super().remove
        self._run(lambda: remove(names), LISTING_S, None)

    def inventory(self) -> Iterator[list[BlockName]]:
        """Yield the names of all blocks. If the file system hangs, the inventory ends."""
        pages = super().inventory()
        nothing: list[BlockName] = []
        while page := self._run(lambda: next(pages, nothing), LISTING_S, nothing):
            yield page

    def close(self) -> None:
        self._run(super().close, LISTING_S, None)

    def _views(self, memory: bytearray) -> list[memoryview]:
        whole, size = memoryview(memory), self._block_bytes
        return [whole[at : at + size] for at in range(0, len(whole), size)]

    def _guarded(self, count: int, deadline_s: float, act: Callable[[slice, float], list[str]]) -> list[str]:
        """Move blocks in batches, because each batch needs memory. `act` gets a slice of the blocks, and seconds."""
        end_s = runtime.monotonic_s() + deadline_s
        size = max(1, GUARDED_BYTES // self._block_bytes)
        results: list[str] = []
        for begin in range(0, count, size):
            left_s = end_s - runtime.monotonic_s()
            batch = slice(begin, min(begin + size, count))
            results += act(batch, left_s) if left_s > 0 else ["deadline"] * (batch.stop - begin)
        return results

    def _run(self, act: Callable[[], T], wait_s: float, otherwise: T) -> T:
        """Return the result of a call, or `otherwise` if the call takes too long or all threads hang."""
        if not self._free.acquire(timeout=wait_s):
            return otherwise
        future = start_call(act, "kv-guard")
        future.add_done_callback(lambda _: self._free.release())
        try:
            return future.result(wait_s)
        except TimeoutError:
            return otherwise


def _transfer(call: Callable[[int, list[memoryview], int], int], fd: int, memory: memoryview) -> None:
    """Read or write the block of a file. Raises OSError, with ENODATA at the end of the file."""
    moved = 0
    while moved < len(memory):
        count = call(fd, [memory[moved:]], PAYLOAD_OFFSET + moved)
        if count == 0:
            raise OSError(errno.ENODATA, "the file ends")
        moved += count


def _reason(error: OSError) -> str:
    match error.errno:
        case errno.ENOENT | errno.ENOTDIR:
            return "missing"
        case errno.EACCES | errno.EPERM | errno.EROFS:
            return "denied"
        case errno.ENODATA:
            return "truncated"
        case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
            return "full"
        case _:
            return "failed"


def _create(path: str) -> int:
    try:
        return os.open(path, WRITE_FLAGS, 0o666)
    except FileNotFoundError:
        # Only the folder of the first two digits is created. If its parent is gone, the store was removed.
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.dirname(path))
        return os.open(path, WRITE_FLAGS, 0o666)


def _lock_directory(root: Path, owner: str, *, shared: bool) -> int:
    """Create a directory and lock it, shared or for one worker alone, until the returned file descriptor is closed.

    Raises EngineError if another worker has locked it.
    """
    try:
        root.mkdir(parents=True, exist_ok=True)
        fd = os.open(root / LOCK_FILE, LOCK_FLAGS, 0o666)
    except OSError as error:
        raise EngineError(f"cannot use {root} for KV blocks: {error.strerror}") from error
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        other = os.pread(fd, 1024, 0).decode(errors="replace").strip()
        os.close(fd)
        used = f"is the disk tier of {other}" if other else "is the shared store of other workers"
        raise EngineError(
            f"{root} {used}. A disk tier belongs to one worker rank, so give each its own directory"
        ) from None
    except OSError:
        # Some network file systems have no locks. They cannot protect a shared directory either.
        if not shared:
            os.close(fd)
            raise
        return fd
    os.ftruncate(fd, 0)
    if not shared:
        os.pwrite(fd, owner.encode(), 0)
    return fd


def may_hang(path: Path) -> bool:
    """Return whether a path is on a network file system, or on one of a user-space process."""
    try:
        mounts = MOUNTS.read_text()
    except OSError:  # not on Linux
        return False
    path, kind, longest = path.resolve(), "", -1
    for line in mounts.splitlines():
        _, text, found, *_ = line.split()
        point = Path(text.replace("\\040", " "))
        # A later mount at the same point hides the earlier one.
        if path.is_relative_to(point) and len(point.parts) >= longest:
            kind, longest = found, len(point.parts)
    return kind.startswith(NETWORK_TYPES)
