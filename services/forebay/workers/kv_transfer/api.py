"""Types of the KV transport: offers, results of fetches, and counters.

A transport owns the memory of its worker's KV blocks. The memory consists of slots of `block_bytes`, one per block,
numbered from 0. The worker that computed a prompt (the holder) offers the blocks of the prompt. One other worker (the
reader) fetches some or all of these blocks into its own slots, and notifies the holder.
"""

from bisect import bisect_left
from collections.abc import Callable
from typing import Any, Final, Literal, Protocol, runtime_checkable

import msgspec
import numpy as np

Array = np.ndarray[Any, np.dtype[np.uint8]]
Numbers = np.ndarray[Any, np.dtype[np.int64]]  # block numbers

# Upper bounds of fetch durations in seconds; `fetch_s` ends a fetch after 10 s.
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

NIXL: Final = "nixl"  # value of `Prefilled.connector` and `KvLayout.connector`
FreeReason = Literal["fetched", "expired", "released"]
OnFree = Callable[[str, FreeReason], None]

# Reasons of failed fetches, in this order: the offer has ended; the holder is gone; it did not reply in time; the bytes
# have a wrong checksum; the descriptor was refused; this worker is full; its transport is closed; any other error.
REASONS = ("expired", "gone", "deadline", "corrupt", "refused", "full", "closed", "failed")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that a holder keeps for one reader: the values of `Prefilled.descriptor` and `Prefilled.checksum`.

    Attributes:
        checksum: XXH3-64 of the XXH3-64s of all blocks, in order, as little-endian u64; None if none was requested. The
            descriptor has the hash per block, so a reader can verify a part of the blocks.
    """

    descriptor: bytes
    checksum: str | None
    bytes: int


class FetchedKv(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a completed fetch. The duration includes time in the queue; retries are reads after wrong checksums."""

    bytes: int
    blocks: int
    us: int
    retries: int = 0


class Stats(msgspec.Struct, kw_only=True):
    """Statistics of one transport: counters since it was opened, and gauges of its current state.

    `bytes`, `read_us` (with time in the queue) and `took` count completed fetches. `failed` is by reason (`REASONS`).
    `retries` are reads of blocks with a wrong checksum, and `corrupt` counts these blocks.

    Attributes:
        took: histogram of the durations: the number of completed fetches per bucket. The key is the index in
            `BUCKETS_S` of the smallest bound that is not exceeded, or the length of `BUCKETS_S` if all are exceeded.
        quarantined_blocks: slots that an abandoned transfer may still write to.
    """

    bytes: int = 0
    blocks: int = 0
    fetched: int = 0
    read_us: int = 0
    took: dict[int, int] = msgspec.field(default_factory=dict)
    retries: int = 0
    corrupt: int = 0
    cancelled: int = 0
    failed: dict[str, int] = msgspec.field(default_factory=dict)
    offered: int = 0
    freed: dict[str, int] = msgspec.field(default_factory=dict)  # by FreeReason
    in_flight: int = 0
    in_flight_bytes: int = 0
    waiting: int = 0
    held_offers: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0

    def add_fetch(self, fetch: FetchedKv) -> None:
        self.fetched += 1
        self.blocks += fetch.blocks
        self.bytes += fetch.bytes
        self.read_us += fetch.us
        bucket = bisect_left(BUCKETS_S, fetch.us / 1e6)
        self.took[bucket] = self.took.get(bucket, 0) + 1


@runtime_checkable
class KvMover(Protocol):
    """Engine that transfers KV with forebay's own transport, and so has statistics of the transfers."""

    def kv_stats(self) -> Stats:
        """Return the statistics of KV transfers since the start of the engine, over all worker epochs."""
