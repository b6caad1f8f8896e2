"""Interface of stores of KV blocks: a directory of a worker, a shared directory, or a bucket.

A store belongs to one identity. All its blocks have the same size, `KvIdentity.block_bytes`.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal, Protocol

import msgspec

from forebay.workers.kv_tiers.identity import BlockName

IoKind = Literal["nixl", "plain"]

# Why a block was not read: the store does not contain the block; its file is too short; a checksum is wrong; the file
# belongs to another block or identity; a newer version of forebay wrote the file; time ran out; the store denies
# access; any other error.
READ_REASONS = ("missing", "truncated", "corrupt", "foreign", "newer", "deadline", "denied", "failed")
# A file with one of these reasons is useless for everyone. It is moved to the quarantine of the store.
BAD_REASONS = ("truncated", "corrupt", "foreign", "newer")
# Why a block was not written: the disk or the quota is full; time ran out; the store denies access; any other error.
WRITE_REASONS = ("full", "deadline", "denied", "failed")


class StoreStats(msgspec.Struct, kw_only=True):
    """Statistics of one open store: counters since it was opened, and gauges of its current content.

    Attributes:
        read_bytes: bytes of these blocks.
        read_us: total duration of reads in microseconds.
        write_bytes: bytes of these blocks.
        write_us: total duration of writes in microseconds.
        write_skipped: blocks that were not written because the store already had them.
        read_misses: number of blocks that were not read, by reason (`READ_REASONS`).
        write_failures: number of blocks that were not written, by reason (`WRITE_REASONS`).
        evicted: blocks that were removed because the quota was exceeded.
        quarantined: bad files that were moved to the quarantine.
        blocks: blocks in the store. For a shared store: as of the last inventory, and changes by this process since.
        bytes: bytes of these blocks.
    """

    read_blocks: int = 0
    read_bytes: int = 0
    read_us: int = 0
    write_blocks: int = 0
    write_bytes: int = 0
    write_us: int = 0
    write_skipped: int = 0
    read_misses: Counter[str] = msgspec.field(default_factory=Counter)
    write_failures: Counter[str] = msgspec.field(default_factory=Counter)
    removed: int = 0
    evicted: int = 0
    quarantined: int = 0
    blocks: int = 0
    bytes: int = 0


class BlockStore(Protocol):
    """Store of KV blocks. Methods block, so the caller runs them in threads. All methods are thread-safe.

    When a method returns, the store does not use the memory of its arguments any more.

    Attributes:
        name: name of the store for the router: the id of the store, and the first digits of the identity digest. All
            workers that open the same store with the same identity see the same name.
    """

    @property
    def name(self) -> str: ...

    @property
    def stats(self) -> StoreStats: ...

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        """Read blocks and verify their checksums.

        Args:
            into: writable memory of `block_bytes` bytes per block.
            deadline_s: seconds from now after which no further blocks are read.

        Returns:
            Per block, an empty text if the memory contains the block, otherwise one of `READ_REASONS`. The memory of a
            block that was not read has undefined content.
        """
        ...

    def write(self, blocks: Sequence[tuple[BlockName, memoryview]], deadline_s: float) -> list[str]:
        """Write blocks that the store does not contain yet.

        Args:
            blocks: names, and memory of `block_bytes` bytes.
            deadline_s: seconds from now after which no further blocks are written.

        Returns:
            Per block, an empty text if the store contains the block, otherwise one of `WRITE_REASONS`.
        """
        ...

    def remove(self, names: Sequence[BlockName]) -> None:
        """Remove blocks. Blocks that the store does not contain are ignored."""
        ...

    def inventory(self) -> Iterator[list[BlockName]]:
        """Yield pages of the names of all blocks of this identity. Only names are listed; no block is opened."""
        ...

    def take_evicted(self) -> list[BlockName]:
        """Return the blocks that this process removed since the last call because the quota was exceeded."""
        ...

    def close(self) -> None:
        """Release the resources of the store, after the calls in progress have ended."""
        ...
