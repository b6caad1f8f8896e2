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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple, Protocol

from forebay.workers.kv_tiers.block_stores import IoKind
from forebay.workers.kv_transfer.nixl_agent import load_nixl

LOG = logging.getLogger(__name__)

FAILURES_MAX = 8  # failed transfers, each of which leaves an agent behind, until a mover uses plain I/O only
Operation = Literal["READ", "WRITE"]

# Agents of failed transfers. They may still be written to, so they are kept for the life of the process.
_left: list[object] = []


class Segment(NamedTuple):
    """Consecutive bytes of a file, and the memory to read them into or to write them from.

    Attributes:
        fd: open file.
        offset: position in the file.
        memory: the memory. It must be writable for a read.
    """

    fd: int
    offset: int
    memory: memoryview


class FileIo(Protocol):
    """Moves bytes between memory and files. Thread-safe."""

    def transfer(self, operation: Operation, segments: Sequence[Segment]) -> bool:
        """Move all segments. Return False if that failed, after which the memory or the files have any content."""
        ...

    def close(self) -> None:
        """Release all resources."""
        ...


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
        self._idle: list[Any] = []
        self._lock = threading.Lock()
        self._failures = 0
        self._plain = PlainIo()

    def transfer(self, operation: Operation, segments: Sequence[Segment]) -> bool:
        """Move all segments. Return False if that failed."""
        if self._failures >= FAILURES_MAX:
            return self._plain.transfer(operation, segments)
        agent = None
        try:
            agent = self._borrow()
            _transfer(agent, operation, segments)
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
        """Release all agents."""
        with self._lock:
            self._idle.clear()

    def _borrow(self) -> Any:
        with self._lock:
            if self._idle:
                return self._idle.pop()
        config = self._nixl.nixl_agent_config(enable_prog_thread=False, backends=[])
        agent = self._nixl.nixl_agent("forebay-tiers", config)
        agent.create_backend("POSIX", {"use_aio": "true"})
        return agent


def open_file_io(kind: IoKind) -> FileIo:
    """Return the mover of this kind. Raises PackageMissing if NIXL is not installed."""
    return NixlIo() if kind == "nixl" else PlainIo()


def _transfer(agent: Any, operation: Operation, segments: Sequence[Segment]) -> None:
    memory = [(address(segment.memory), len(segment.memory), 0) for segment in segments]
    files = [(segment.offset, len(segment.memory), segment.fd) for segment in segments]
    with _registered(agent, memory, "DRAM"), _registered(agent, files, "FILE"):
        handle = agent.initialize_xfer(
            operation,
            agent.get_xfer_descs(memory, mem_type="DRAM"),
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


@contextmanager
def _registered(agent: Any, places: list[tuple[int, int, int]], kind: str) -> Iterator[None]:
    known = agent.register_memory([(*place, "") for place in places], mem_type=kind)
    yield
    agent.deregister_memory(known)  # not after an error, because the agent is never used again


def address(memory: memoryview) -> int:
    """Return the address of contiguous memory."""
    if memory.readonly:
        import numpy  # noqa: PLC0415 - an extra, which NIXL needs

        return int(numpy.frombuffer(memory, dtype=numpy.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a fifth of the time of numpy
