"""Move bytes between memory and open files, by NIXL or by plain system calls.

Theory of operation. A NIXL agent must be used by one thread at a time, so each call borrows an agent from a pool.
NIXL's POSIX plugin reports a failed transfer as a whole, without an error number. It also may complete the remaining
descriptors of that transfer later, so the agent of a failed transfer is never used again. The caller then repeats the
transfer by plain I/O, which fails with the error number of the one file at fault. The plugin does not report short
reads and writes, so callers check the size of files.
"""

import ctypes
import errno
import logging
import os
import threading
from collections.abc import Sequence
from typing import Any, Literal, Protocol

from forebay.workers.kv_tiers.block_stores import IoKind
from forebay.workers.kv_transfer.nixl_agent import load_nixl

LOG = logging.getLogger(__name__)

FAILURES_MAX = 8  # failed transfers, each of which leaves an agent behind, until a mover uses plain I/O only
ALL_MEMORY = 2**63 - 1  # bytes of a range with every address
ALL_BYTES = 2**62  # of a range with every position in a file
Operation = Literal["READ", "WRITE"]

_addressof, _from_buffer = ctypes.addressof, ctypes.c_char.from_buffer

# Agents of failed transfers. They may still be written to, so they are kept for the life of the process.
_left: list[object] = []


# Consecutive bytes of a file, and the memory to read them into or to write them from: file descriptor, position in the
# file, memory. A tuple, because creating a named tuple takes longer than moving some of the bytes.
Segment = tuple[int, int, memoryview]


class FileIo(Protocol):
    """Moves bytes between memory and files. Thread-safe."""

    def transfer(self, operation: Operation, segments: Sequence[Segment]) -> bool:
        """Move all segments. Return False if that failed, after which the memory or the files have any content."""
        ...

    def close(self) -> None: ...


class PlainIo:
    """Moves bytes by `preadv` and `pwritev`."""

    def transfer(self, operation: Operation, segments: Sequence[Segment]) -> bool:
        """Move all segments. Return False if that failed."""
        try:
            for segment in segments:
                transfer_plainly(operation, segment)
        except OSError:
            return False
        return True

    def close(self) -> None:
        """Release all resources: there are none."""


def transfer_plainly(operation: Operation, segment: Segment) -> None:
    """Move one segment by system calls. Raises OSError, with ENODATA at the end of the file."""
    call = os.preadv if operation == "READ" else os.pwritev
    fd, offset, memory = segment
    count = call(fd, [memory], offset)
    while count < len(memory):
        moved = call(fd, [memory[count:]], offset + count)
        if moved == 0:
            raise OSError(errno.ENODATA, "the file ends")
        count += moved


class NixlIo:
    """Moves bytes by NIXL's POSIX plugin.

    Raises:
        PackageMissing: NIXL is not installed.
    """

    def __init__(self) -> None:
        self._nixl = load_nixl("KV tiers")
        self._idle: list[_Agent] = []
        self._lock = threading.Lock()
        self._failures = 0
        self._plain = PlainIo()

    def transfer(self, operation: Operation, segments: Sequence[Segment]) -> bool:
        """Move all segments. Return False if that failed."""
        if self._failures >= FAILURES_MAX:
            return self._plain.transfer(operation, segments)
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
            if self._failures == FAILURES_MAX:
                LOG.warning("NIXL failed %d file transfers; this worker uses plain I/O from now on", FAILURES_MAX)
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


def open_file_io(kind: IoKind) -> FileIo:
    """Return the mover of this kind. Raises PackageMissing if NIXL is not installed."""
    return NixlIo() if kind == "nixl" else PlainIo()


def address(memory: memoryview) -> int:
    if memory.readonly:
        import numpy  # noqa: PLC0415 - an extra, which NIXL needs

        return int(numpy.frombuffer(memory, dtype=numpy.uint8).ctypes.data)
    return _addressof(_from_buffer(memory))  # a fifth of the time of numpy
