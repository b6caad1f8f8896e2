"""Read and write batches of block files in the folder of one identity.

Theory of operation. The files of a batch are opened, moved by one transfer, and closed. A block is written to a
temporary file, which is then renamed, so a reader never sees a part of a block. Files are not synchronized to the disk,
so after a power loss a file may have any content. Readers therefore trust nothing: they check the header and the
checksum of every block.
"""

import contextlib
import errno
import logging
import os
from collections.abc import Sequence

from forebay import runtime
from forebay.workers.kv_tiers.block_file import (
    HEAD_BYTES,
    PAYLOAD_OFFSET,
    SUFFIX,
    Checksum,
    HeadFormat,
    file_bytes,
)
from forebay.workers.kv_tiers.directory_layout import TEMPORARY
from forebay.workers.kv_tiers.file_io import FileIo, Segment, transfer_plainly
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity

LOG = logging.getLogger(__name__)

TOUCH_S = 60.0  # the time of last use of a file is updated at most this often, so that most reads write nothing
WARN_S = 10.0  # between two warnings, because a broken disk fails for every block
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class BlockFiles:
    """Block files in a folder. Thread-safe.

    Args:
        io: moves the bytes.
    """

    def __init__(self, folder: str, identity: KvIdentity, io: FileIo, checksum: Checksum) -> None:
        self._prefix = f"{folder}/"
        self._format = HeadFormat(identity.digest, identity.block_bytes)
        self._file_bytes = file_bytes(identity.block_bytes)
        self._io = io
        self._checksum = checksum
        self._touched: set[bytes] = set()  # keys of files whose time of last use is recent
        self._touched_s = runtime.monotonic_s()
        self._warned_s = -WARN_S

    def path(self, name: BlockName) -> str:
        key = name.key.hex()
        return f"{self._prefix}{key[:2]}/{key}-{name.sequence_hash:016x}{SUFFIX}"  # as `file_name`, but faster

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[str]:
        """Read and verify blocks. Return the reasons of failures, as `BlockStore.read`."""
        results = [""] * len(names)
        places: list[int] = []
        checksums: list[bytes] = []
        segments: list[Segment] = []
        fds: list[int] = []
        touched = self._recently_touched()
        try:
            for place, name in enumerate(names):
                try:
                    fd = os.open(self.path(name), READ_FLAGS)
                    fds.append(fd)
                    checksum = self._format.checksum(os.pread(fd, HEAD_BYTES, 0), name)
                except OSError as error:
                    results[place] = self._read_reason(error)
                    continue
                if isinstance(checksum, str):
                    results[place] = checksum
                    continue
                places.append(place)
                checksums.append(checksum)
                segments.append((fd, PAYLOAD_OFFSET, into[place]))
                if name.key not in touched:
                    _touch(fd)
                    touched.add(name.key)
            self._transfer_in(places, segments, results)
            for place, (fd, _, block), checksum in zip(places, segments, checksums, strict=True):
                if not results[place] and self._checksum(block) != checksum:
                    # Short reads are not reported, so a truncated file is noticed here.
                    results[place] = "truncated" if os.fstat(fd).st_size < self._file_bytes else "corrupt"
        finally:
            for fd in fds:
                os.close(fd)
        return results

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]]) -> tuple[list[str], int]:
        """Write blocks that do not exist.

        Returns:
            The reasons of failures, as `BlockStore.write`, and the number of blocks that were written.
        """
        results = [""] * len(blocks)
        places: list[int] = []
        segments: list[Segment] = []
        suffix = f".{runtime.random_id()}{TEMPORARY}"
        touched = self._recently_touched()
        written, moved = 0, False
        try:
            for place, (name, block) in enumerate(blocks):
                path = self.path(name)
                if self._exists(path, name, touched):
                    continue
                try:
                    fd = _create(path + suffix)
                except FileExistsError:
                    continue  # the same block twice in one call
                except OSError as error:
                    results[place] = self._write_reason(error)
                    continue
                places.append(place)
                segments.append((fd, PAYLOAD_OFFSET, block))
                try:
                    os.pwrite(fd, self._format.encode(name, self._checksum(block)), 0)
                except OSError as error:
                    results[place] = self._write_reason(error)
            self._transfer_out(places, segments, results)
            moved = True
        finally:
            for place, (fd, _, _) in zip(places, segments, strict=True):
                os.close(fd)
                name = blocks[place][0]
                path = self.path(name)
                results[place] = results[place] or (self._publish(path, suffix) if moved else "failed")
                if results[place]:
                    with contextlib.suppress(OSError):
                        os.unlink(path + suffix)
                else:
                    written += 1
                    touched.add(name.key)
        return results, written

    def _transfer_in(self, places: list[int], segments: list[Segment], results: list[str]) -> None:
        """Read blocks, and set the results of those that cannot be read."""
        if not segments or self._io.transfer("READ", segments):
            return
        for place, segment in zip(places, segments, strict=True):
            try:
                transfer_plainly("READ", segment)
            except OSError as error:
                results[place] = self._read_reason(error)

    def _transfer_out(self, places: list[int], segments: list[Segment], results: list[str]) -> None:
        """Write blocks, and set the results of those that cannot be written."""
        done = not segments or self._io.transfer("WRITE", segments)
        for place, segment in zip(places, segments, strict=True):
            fd = segment[0]
            try:
                # Short writes are not reported, but show in the size.
                if not done or os.lseek(fd, 0, os.SEEK_END) != self._file_bytes:
                    transfer_plainly("WRITE", segment)
            except OSError as error:
                results[place] = self._write_reason(error)
                with contextlib.suppress(OSError):
                    os.ftruncate(fd, 0)  # on a full disk, this makes room for the next block

    def _publish(self, path: str, suffix: str) -> str:
        try:
            os.rename(path + suffix, path)
        except OSError as error:
            return self._write_reason(error)
        return ""

    def _exists(self, path: str, name: BlockName, touched: set[bytes]) -> bool:
        """Return whether a file exists. It is needed again, so the time of its last use is updated."""
        if not os.access(path, os.F_OK):  # half the time of `stat` for a file that does not exist
            return False
        try:
            if os.stat(path).st_size != self._file_bytes:
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

    def _read_reason(self, error: OSError) -> str:
        match error.errno:
            case errno.ENOENT | errno.ENOTDIR:
                return "missing"
            case errno.EACCES | errno.EPERM:
                return "denied"
            case errno.ENODATA:
                return "truncated"
            case _:
                self.warn("cannot read a KV block: %s", error)
                return "failed"

    def _write_reason(self, error: OSError) -> str:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT | errno.EFBIG:
                return "full"
            case errno.EACCES | errno.EPERM | errno.EROFS:
                return "denied"
            case _:
                self.warn("cannot write a KV block: %s", error)
                return "failed"

    def warn(self, text: str, *args: object) -> None:
        """Log a warning, unless the last one is recent."""
        now_s = runtime.monotonic_s()
        if now_s - self._warned_s >= WARN_S:
            self._warned_s = now_s
            LOG.warning(text, *args)


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
