"""Bound the time of calls to a store whose file system may hang, such as NFS while its server is away.

Theory of operation. A system call on such a file system may block for ever, and nothing can cancel it. Therefore a call
runs on a thread of its own, with memory of its own, and the caller waits only until the deadline. Threads that hang are
bounded; while all hang, the store is not used. After a call without a success, the store pauses.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from forebay import runtime
from forebay.workers.kv_tiers.block_stores import BlockStore, StoreStats
from forebay.workers.kv_tiers.daemon_calls import start_call
from forebay.workers.kv_tiers.identity import BlockName
from forebay.workers.kv_tiers.pause import Pause

THREADS = 4
BATCH_BYTES = 64 << 20  # of memory per thread
MARGIN_S = 0.5  # for a call that notices the deadline itself, and whose partial results are better than none
LISTING_S = 60.0  # for removals, and per page of an inventory
MOUNTS = Path("/proc/self/mountinfo")
NETWORK_TYPES = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gluster", "gpfs", "lustre", "nfs", "smb", "weka")

T = TypeVar("T")


class GuardedStore:
    """Store that returns at its deadlines, whatever the store inside does.

    Args:
        block_bytes: bytes per block.
    """

    def __init__(self, inside: BlockStore, block_bytes: int, what: str) -> None:
        self._inside = inside
        self._block_bytes = block_bytes
        self._free = threading.Semaphore(THREADS)
        self._pause = Pause(what)

    @property
    def name(self) -> str:
        return self._inside.name

    @property
    def stats(self) -> StoreStats:
        """Return the statistics of the store inside. Blocks that were abandoned are missing in them."""
        return self._inside.stats

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        """Read blocks. See `BlockStore.read`."""

        def act(at: slice, left_s: float) -> list[str]:
            own = self._views(bytearray(len(names[at]) * self._block_bytes))
            results = self._transfer(lambda: self._inside.read(names[at], own, left_s), len(own), left_s)
            for result, block, target in zip(results, own, into[at], strict=True):
                if not result:
                    target[:] = block
            return results

        return self._in_batches(len(names), deadline_s, act)

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]], deadline_s: float) -> list[str]:
        """Write blocks. See `BlockStore.write`."""

        def act(at: slice, left_s: float) -> list[str]:
            views = self._views(bytearray().join(block for _, block in blocks[at]))
            own = [(name, view) for (name, _), view in zip(blocks[at], views, strict=True)]
            return self._transfer(lambda: self._inside.write(own, left_s), len(own), left_s)

        return self._in_batches(len(blocks), deadline_s, act)

    def remove(self, names: Sequence[BlockName]) -> None:
        """Remove blocks. See `BlockStore.remove`."""
        self._run(lambda: self._inside.remove(names), LISTING_S, None)

    def inventory(self) -> Iterator[list[BlockName]]:
        """Yield the names of all blocks. See `BlockStore.inventory`. If the file system hangs, the inventory ends."""
        pages = self._inside.inventory()
        nothing: list[BlockName] = []
        while page := self._run(lambda: next(pages, nothing), LISTING_S, nothing):
            yield page

    def take_evicted(self) -> list[BlockName]:
        """Return the blocks that were removed because of the quota. See `BlockStore.take_evicted`."""
        return self._inside.take_evicted()

    def close(self) -> None:
        """Close the store, unless a call hangs."""
        self._run(self._inside.close, LISTING_S, None)

    def _views(self, memory: bytearray) -> list[memoryview]:
        whole, size = memoryview(memory), self._block_bytes
        return [whole[at : at + size] for at in range(0, len(whole), size)]

    def _in_batches(self, count: int, deadline_s: float, act: Callable[[slice, float], list[str]]) -> list[str]:
        """Move blocks in batches, because each batch needs memory. `act` gets a slice of the blocks, and seconds."""
        end_s = runtime.monotonic_s() + deadline_s
        size = max(1, BATCH_BYTES // self._block_bytes)
        results: list[str] = []
        for begin in range(0, count, size):
            left_s = end_s - runtime.monotonic_s()
            batch = slice(begin, min(begin + size, count))
            results += act(batch, left_s) if left_s > 0 else ["deadline"] * (batch.stop - begin)
        return results

    def _transfer(self, act: Callable[[], list[str]], count: int, deadline_s: float) -> list[str]:
        if self._pause.active():
            return ["failed"] * count
        results = self._run(act, deadline_s + MARGIN_S, ["deadline"] * count)
        self._pause.observe(results)
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


def is_on_network(path: Path, mounts: str) -> bool:
    """Return whether a path is on a network file system, or on one of a user-space process.

    Args:
        path: absolute path.
        mounts: content of `/proc/self/mountinfo`.
    """
    kind, longest = "", -1
    for line in mounts.splitlines():
        before, separator, after = line.partition(" - ")
        fields = before.split()
        if not separator or len(fields) < 5:
            continue
        point = fields[4].replace("\\040", " ")
        inside = path == Path(point) or Path(point) in path.parents
        if inside and len(point) >= longest:  # a later mount at the same point hides the earlier one
            kind, longest = after.split()[0], len(point)
    return kind.startswith(NETWORK_TYPES)


def may_hang(path: Path) -> bool:
    """Return whether a path is on a file system that may hang. Without Linux's list of mounts, return False."""
    try:
        return is_on_network(path.resolve(), MOUNTS.read_text())
    except OSError:
        return False
