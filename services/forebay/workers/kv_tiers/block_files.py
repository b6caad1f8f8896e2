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
from typing import NamedTuple

from forebay import runtime
from forebay.workers.kv_tiers.block_file import (
    HEAD_BYTES,
    PAYLOAD_OFFSET,
    Checksum,
    HeadFormat,
    file_bytes,
    file_name,
)
from forebay.workers.kv_tiers.directory_layout import TEMPORARY
from forebay.workers.kv_tiers.file_io import FileIo, Segment, transfer_plainly
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity

LOG = logging.getLogger(__name__)

TOUCH_S = 60.0  # the time of last use of a file is updated at most this often, so that most reads write nothing
WARN_S = 10.0  # between two warnings, because a broken disk fails for every block
READ_FLAGS = os.O_RDONLY | os.O_CLOEXEC
WRITE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC


class _Opened(NamedTuple):
    place: int
    fd: int
    name: BlockName
    checksum: bytes = b""


class BlockFiles:
    """Block files in a folder. Thread-safe.

    Args:
        folder: folder of the identity.
        identity: identity of the blocks.
        io: moves the bytes.
        checksum: checksum of blocks.
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
        """Return the path of the file of a block."""
        file = file_name(name)
        return f"{self._prefix}{file[:2]}/{file}"

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[str]:
        """Read and verify blocks. Return the reasons of failures, as `BlockStore.read`."""
        results = [""] * len(names)
        opened: list[_Opened] = []
        fds: list[int] = []
        touched = self._recently_touched()
        try:
            for index, name in enumerate(names):
                try:
                    fd = os.open(self.path(name), READ_FLAGS)
                    fds.append(fd)
                    checksum = self._format.checksum(os.pread(fd, HEAD_BYTES, 0), name)
                except OSError as error:
                    results[index] = self._read_reason(error)
                    continue
                if isinstance(checksum, str):
                    results[index] = checksum
                    continue
                opened.append(_Opened(index, fd, name, checksum))
                if name.key not in touched:
                    _touch(fd)
                    touched.add(name.key)
            self._transfer_in(opened, into, results)
            for one in opened:
                if not results[one.place] and self._checksum(into[one.place]) != one.checksum:
                    # Short reads are not reported, so a truncated file is noticed here.
                    results[one.place] = "truncated" if os.fstat(one.fd).st_size < self._file_bytes else "corrupt"
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
        opened: list[_Opened] = []
        suffix = f".{runtime.random_id()}{TEMPORARY}"
        touched = self._recently_touched()
        written, moved = 0, False
        try:
            for index, (name, block) in enumerate(blocks):
                path = self.path(name)
                if self._exists(path, name, touched):
                    continue
                try:
                    fd = _create(path + suffix)
                except FileExistsError:
                    continue  # the same block twice in one call
                except OSError as error:
                    results[index] = self._write_reason(error)
                    continue
                opened.append(_Opened(index, fd, name, self._checksum(block)))
            self._transfer_out(opened, blocks, results)
            moved = True
        finally:
            for index, fd, name, _ in opened:
                os.close(fd)
                results[index] = results[index] or (self._publish(self.path(name), suffix) if moved else "failed")
                if results[index]:
                    with contextlib.suppress(OSError):
                        os.unlink(self.path(name) + suffix)
                else:
                    written += 1
                    touched.add(name.key)
        return results, written

    def _transfer_in(self, opened: list[_Opened], into: Sequence[memoryview], results: list[str]) -> None:
        """Read blocks, and set the results of those that cannot be read."""
        segments = [Segment(one.fd, PAYLOAD_OFFSET, into[one.place]) for one in opened]
        if not segments or self._io.transfer("READ", segments):
            return
        for one, segment in zip(opened, segments, strict=True):
            try:
                transfer_plainly("READ", segment)
            except OSError as error:
                results[one.place] = self._read_reason(error)

    def _transfer_out(
        self, opened: list[_Opened], blocks: Sequence[tuple[BlockName, memoryview]], results: list[str]
    ) -> None:
        """Write headers and blocks, and set the results of those that cannot be written."""
        segments = []
        for one in opened:
            try:
                os.pwrite(one.fd, self._format.encode(one.name, one.checksum), 0)
            except OSError as error:
                results[one.place] = self._write_reason(error)
            segments.append(Segment(one.fd, PAYLOAD_OFFSET, blocks[one.place][1]))
        done = not segments or self._io.transfer("WRITE", segments)
        for one, segment in zip(opened, segments, strict=True):
            try:
                # Short writes are not reported, but show in the size.
                if not done or os.fstat(one.fd).st_size != self._file_bytes:
                    transfer_plainly("WRITE", segment)
            except OSError as error:
                results[one.place] = self._write_reason(error)
                with contextlib.suppress(OSError):
                    os.ftruncate(one.fd, 0)  # on a full disk, this makes room for the next block

    def _publish(self, path: str, suffix: str) -> str:
        try:
            os.rename(path + suffix, path)
        except OSError as error:
            return self._write_reason(error)
        return ""

    def _exists(self, path: str, name: BlockName, touched: set[bytes]) -> bool:
        """Return whether a file exists. It is needed again, so the time of its last use is updated."""
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
