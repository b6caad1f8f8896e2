"""Store of KV blocks in a directory: the disk tier of one worker rank, or a store that workers share.

Theory of operation. Two threads move the batches of a call: the caller and a helper. So the checksums of one batch
overlap with the transfer of another one. A block is written to a temporary file, which is then renamed, so a reader
never sees a part of a block. Files are not synchronized to the disk, so after a power loss a file may have any content.
Readers therefore check the header and the checksum of every block. The modification time of a file is the time of its
last use: reads update it, at most once per minute.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

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
from forebay.workers.kv_tiers.settings import IoKind
from forebay.workers.kv_transfer.nixl_agent import load_nixl

LOG = logging.getLogger(__name__)

LOCK_FILE = "owner.lock"
QUOTA_LOCK = "quota.lock"
BLOCK_FOLDER = re.compile(f"[0-9a-f]{{2}}|{QUARANTINE}")

THREADS = 2  # per call: one transfers while the other opens files or computes checksums
BATCH_BLOCKS = 128  # files that a thread has open at a time; a process may open 1,024 by default
BATCH_BYTES = 32 << 20  # a deadline is checked between batches, and a slow disk moves this in a quarter of a second
SPLIT_BYTES = 4 << 20  # less is moved by the caller alone, because starting a thread takes longer than it saves
TOUCH_S = 60.0  # the time of last use of a file is updated at most this often, so that most reads write nothing
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
LOCK_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC

NIXL_FAILURES_MAX = 8  # failed transfers, each of which leaves an agent behind, until plain I/O is used only
ALL_MEMORY = 2**63 - 1  # bytes of a range with every address
ALL_BYTES = 2**62  # of a range with every position in a file

HANGING_MAX = 4  # calls to a network file system that may hang at a time
GUARDED_BYTES = 64 << 20  # of memory per guarded call
MARGIN_S = 0.5  # for a call that notices the deadline itself, and whose partial results are better than none
LISTING_S = 60.0  # for removals, and per page of an inventory
MOUNTS = Path("/proc/self/mounts")  # per line: device, directory, type and options
NETWORK_TYPES = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gluster", "gpfs", "lustre", "nfs", "smb", "weka")

T = TypeVar("T")
Operation = Literal["READ", "WRITE"]
# Consecutive bytes of a file, and the memory to read them into or to write them from: file descriptor, position in the
# file, memory. A tuple, because creating a named tuple takes longer than moving some of the bytes.
Segment = tuple[int, int, memoryview]

_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer

# Agents of failed transfers. They may still be written to, so they are kept for the life of the process.
_left: list[object] = []


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
    directory cannot be used or belongs to another worker, PackageMissing if NIXL is not installed.
    """

    def __init__(
        self, root: Path, identity: KvIdentity, *, quota_bytes: int, io: IoKind, shared: bool, owner: str
    ) -> None:
        self._nixl = NixlFiles() if io == "nixl" else None
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
        if self._nixl is not None:
            self._nixl.close()
        os.close(self._lock_fd)

    def _read(self, names: Sequence[BlockName], into: Sequence[memoryview], end_s: float) -> list[str]:
        return self._in_batches(len(names), end_s, lambda at: self._read_batch(names[at], into[at]))

    def _write(self, blocks: Sequence[tuple[BlockName, memoryview]], end_s: float) -> tuple[list[str], list[BlockName]]:
        new: list[BlockName] = []
        return self._in_batches(len(blocks), end_s, lambda at: self._write_batch(blocks[at], new)), new

    def _in_batches(self, count: int, end_s: float, act: Callable[[slice], list[str]]) -> list[str]:
        """Move blocks in batches, by the calling thread and a helper. No batch is begun after `end_s`."""
        results = ["deadline"] * count
        split = count * self._block_bytes >= SPLIT_BYTES
        fair = -(-count // THREADS) if split else count
        size = max(1, min(fair, BATCH_BLOCKS, BATCH_BYTES // self._block_bytes))
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

    def _read_batch(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[str]:
        results = [""] * len(names)
        places: list[int] = []
        checksums: list[bytes] = []
        segments: list[Segment] = []
        fds: list[int] = []
        touched = self._recently_touched()
        try:
            for place, name in enumerate(names):
                try:
                    fd = os.open(self._file(name), READ_FLAGS)
                    fds.append(fd)
                    results[place], checksum = self._format.read_head(os.pread(fd, HEAD_BYTES, 0), name)
                except OSError as error:
                    results[place] = self._failure("read", error)
                if results[place]:
                    continue
                places.append(place)
                checksums.append(checksum)
                segments.append((fd, PAYLOAD_OFFSET, into[place]))
                if name.key not in touched:
                    _touch(fd)
                    touched.add(name.key)
            self._transfer("READ", places, segments, results)
            for place, (fd, _, block), checksum in zip(places, segments, checksums, strict=True):
                if not results[place] and block_format.checksum(block) != checksum:
                    # NIXL does not report short reads, so a truncated file is noticed here.
                    results[place] = "truncated" if os.fstat(fd).st_size < self._format.file_bytes else "corrupt"
        finally:
            for fd in fds:
                os.close(fd)
        return results

    def _write_batch(self, blocks: Sequence[tuple[BlockName, memoryview]], new: list[BlockName]) -> list[str]:
        """Write the blocks that do not exist, and add them to `new`."""
        results = [""] * len(blocks)
        places: list[int] = []
        segments: list[Segment] = []
        suffix = f".{runtime.random_id()}{TEMPORARY}"
        touched = self._recently_touched()
        moved = False
        try:
            for place, (name, block) in enumerate(blocks):
                path = self._file(name)
                if self._exists(path, name, touched):
                    continue
                try:
                    fd = _create(path + suffix)
                except FileExistsError:
                    continue  # the same block twice in one call
                except OSError as error:
                    results[place] = self._failure("write", error)
                    continue
                places.append(place)
                segments.append((fd, PAYLOAD_OFFSET, block))
                try:
                    os.pwrite(fd, self._format.head(name, block_format.checksum(block)), 0)
                except OSError as error:
                    results[place] = self._failure("write", error)
            self._transfer("WRITE", places, segments, results)
            moved = True
        finally:
            for place, (fd, _, _) in zip(places, segments, strict=True):
                os.close(fd)
                name = blocks[place][0]
                path = self._file(name)
                if not results[place]:
                    results[place] = self._publish(path, suffix) if moved else "failed"
                if results[place]:
                    with contextlib.suppress(OSError):
                        os.unlink(path + suffix)
                else:
                    new.append(name)
                    touched.add(name.key)
        return results

    def _transfer(self, operation: Operation, places: list[int], segments: list[Segment], results: list[str]) -> None:
        """Move blocks by NIXL, or else by system calls, and set the results of those that cannot be moved."""
        done = bool(segments) and self._nixl is not None and self._nixl.transfer(operation, segments)
        for place, segment in zip(places, segments, strict=True):
            fd = segment[0]
            try:
                # NIXL does not report short writes, but they show in the size.
                if not done or (operation == "WRITE" and os.lseek(fd, 0, os.SEEK_END) != self._format.file_bytes):
                    _transfer_plainly(operation, segment)
            except OSError as error:
                results[place] = self._failure(operation.lower(), error)
                if operation == "WRITE":
                    with contextlib.suppress(OSError):
                        os.ftruncate(fd, 0)  # on a full disk, this makes room for the next block

    def _publish(self, path: str, suffix: str) -> str:
        try:
            os.rename(path + suffix, path)
        except OSError as error:
            return self._failure("write", error)
        return ""

    def _exists(self, path: str, name: BlockName, touched: set[bytes]) -> bool:
        """Return whether a file exists. It is needed again, so the time of its last use is updated."""
        if not os.access(path, os.F_OK):  # half the time of `stat` for a file that does not exist
            return False
        try:
            if os.stat(path).st_size != self._format.file_bytes:
                return False
        except OSError:
            return False
        if name.key not in touched:
            _touch(path)
            touched.add(name.key)
        return True

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


class NixlFiles:
    """Moves bytes between memory and open files by NIXL's POSIX plugin. Thread-safe.

    Theory of operation. A NIXL agent must be used by one thread at a time, so each call borrows an agent from a pool.
    The plugin reports a failed transfer as a whole, without an error number. It also may complete the remaining
    descriptors of that transfer later, so the agent of a failed transfer is never used again. The caller then repeats
    the transfer by system calls, which fail with the error number of the one file at fault.
    """

    def __init__(self) -> None:
        self._nixl = load_nixl("KV tiers")
        self._idle: list[_Agent] = []
        self._lock = threading.Lock()
        self._failures = 0

    def transfer(self, operation: Operation, segments: Sequence[Segment]) -> bool:
        """Move all segments. Return False if that failed, after which the memory or the files have any content."""
        if self._failures >= NIXL_FAILURES_MAX:
            return False
        agent = None
        try:
            with self._lock:
                agent = self._idle.pop() if self._idle else None
            agent = agent or _Agent(self._nixl)
            agent.transfer(operation, segments)
        except Exception as error:  # noqa: BLE001 - NIXL's own classes; the caller repeats the transfer by plain I/O
            _left.append(agent)
            self._failures += 1
            LOG.info("NIXL failed to %s %d segments: %s", operation.lower(), len(segments), error)
            if self._failures == NIXL_FAILURES_MAX:
                LOG.warning("NIXL failed %d file transfers; this worker uses plain I/O from now on", NIXL_FAILURES_MAX)
            return False
        with self._lock:
            self._idle.append(agent)
        return True

    def close(self) -> None:
        with self._lock:
            self._idle.clear()


class _Agent:
    """NIXL agent with the POSIX plugin.

    That plugin keeps nothing about memory and files: NIXL only checks that a transfer is within a registered range.
    Registering each block and file would take as long as moving 10 KiB, so the agent registers all memory at once, and
    each file descriptor when it is first used.
    """

    def __init__(self, nixl: Any) -> None:
        config = nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        self._agent = nixl.nixl_agent("forebay-tiers", config)
        self._agent.create_backend("POSIX", {"use_aio": "true"})
        self._agent.register_memory([(0, ALL_MEMORY, 0, "")], mem_type="DRAM")
        self._fds: set[int] = set()

    def transfer(self, operation: Operation, segments: Sequence[Segment]) -> None:
        """Move all segments. Raises an exception of NIXL if that fails."""
        agent = self._agent
        files = [(offset, len(memory), fd) for fd, offset, memory in segments]
        if new := {fd for fd, _, _ in segments} - self._fds:
            agent.register_memory([(0, ALL_BYTES, fd, "") for fd in new], mem_type="FILE")
            self._fds |= new
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs([(address(memory), len(memory), 0) for _, _, memory in segments], mem_type="DRAM"),
            agent.get_xfer_descs(files, mem_type="FILE"),
            agent.name,
            b"",
        )
        state = agent.transfer(handle)
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise OSError(errno.EIO, f"the state of the transfer is {state}")


def address(memory: memoryview) -> int:
    if memory.readonly:
        import numpy  # noqa: PLC0415 - an extra, which NIXL needs

        return int(numpy.frombuffer(memory, dtype=numpy.uint8).ctypes.data)
    return _addressof(_from_buffer(memory))  # a fifth of the time of numpy


def _transfer_plainly(operation: Operation, segment: Segment) -> None:
    """Move one segment by system calls. Raises OSError, with ENODATA at the end of the file."""
    call = os.preadv if operation == "READ" else os.pwritev
    fd, offset, memory = segment
    count = call(fd, [memory], offset)
    while count < len(memory):
        moved = call(fd, [memory[count:]], offset + count)
        if moved == 0:
            raise OSError(errno.ENODATA, "the file ends")
        count += moved


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


def _touch(file: int | str) -> None:
    with contextlib.suppress(OSError):  # a reader may not be allowed to
        os.utime(file)


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
