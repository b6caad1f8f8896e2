"""Interface of the KV transports. All methods are called on the event loop of `open_transport`.

A transport owns the memory of its worker's KV blocks: slots of `block_bytes`, numbered from 0. The worker that computed
a prompt offers its blocks. One reader fetches some or all of them into its own slots and notifies the holder.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from forebay.events.media import Encoded
from forebay.events.transfer import Prefilled

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.uint8]]
    Numbers = np.ndarray[Any, np.dtype[np.int64]]  # in blocks

# Upper bounds of fetch durations in seconds; `fetch_s` ends a fetch after 10 s.
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Kind = Literal["nixl", "tcp"]
FreeReason = Literal["fetched", "expired", "released"]
OnFree = Callable[[str, FreeReason], None]

# Reasons of failed fetches: the offer is no longer held; the holder is gone; it did not reply in time;
# the bytes differ; the descriptor is refused; this side is full or closed; any other error.
REASONS = ("expired", "gone", "deadline", "corrupt", "refused", "full", "closed", "failed")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Location of offered blocks, for `Prefilled.descriptor`.

    `checksum`, for `Prefilled.checksum`, is the XXH3-64 of the blocks' own XXH3-64s, in order, as little-endian u64. A
    reader of some of the blocks can therefore verify them. None if no checksum was requested.
    """

    descriptor: bytes
    checksum: str | None
    bytes: int


class FetchedKv(msgspec.Struct, frozen=True, kw_only=True):
    """Result of a completed fetch. `us` is its duration, including time in the queue."""

    bytes: int
    blocks: int
    us: int
    retries: int = 0


class Stats(msgspec.Struct, kw_only=True):
    """Counters of one transport since it was opened, and its current state.

    Attributes:
        failed: failed fetches by reason (`REASONS`).
        read_us: total microseconds of completed fetches, including time in the queue.
        took: completed fetches by the index of the first bound in `BUCKETS_S` that is not below their duration; the
            length of `BUCKETS_S` for longer ones.
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
    offered_bytes: int = 0
    freed: dict[str, int] = msgspec.field(default_factory=dict)  # by FreeReason
    in_flight: int = 0
    in_flight_bytes: int = 0
    waiting: int = 0
    held_offers: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0


class KvMemory(Protocol):
    """Slots of this worker's KV blocks."""

    block_bytes: int
    blocks: int

    def view(self, block: int) -> "Array":
        """Return the writable bytes of a slot. Do not keep the view: a failed fetch may replace the slot's memory.

        Memory that was never written to uses no RAM. Raises IndexError for an invalid slot.
        """


class KvTransport(Protocol):
    """Transport that offers blocks of this worker and fetches blocks of other workers.

    Attributes:
        kind: what moves the bytes; value of `Prefilled.connector` and `KvLayout.connector`.
        name: `agent_name(worker_id, epoch)`.
        lease_s: maximum duration of an offer in seconds; `Prefilled.lease_us` must not be longer.
        stats: live counters.
    """

    kind: Kind
    name: str
    lease_s: float
    stats: Stats

    @property
    def memory(self) -> KvMemory:
        """Blocks of this worker."""

    def offer(self, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Offer:
        """Offer blocks, in the order of the prompt, to one reader for `lease_s` seconds.

        The blocks must not be written to until `on_free(request_id, why)` is called. This happens once per offer,
        never within this call. A block may be in several offers. With `checksum`, all blocks are hashed before this
        returns.

        Raises:
            TransferError: there are no blocks, more than a descriptor holds, an invalid one, too many offers, another
                offer of this request, or the transport is closed.
        """

    def release(self, request_id: str) -> bool:
        """Free the offer of a request now. Return whether there was one. A fetch of it in progress will fail."""

    async def fetch(self, offered: Prefilled | Encoded, first: int, into: Sequence[int]) -> FetchedKv:
        """Read the offered blocks from index `first` on into the own slots `into`, and notify the holder.

        If `first` is the number of blocks, nothing is read and the holder is only notified. The fetch waits its turn in
        arrival order; its deadline of `fetch_s` seconds includes the wait. After it ends, in any way, nobody writes to
        those slots any more.

        Raises:
            TransferError: with a `reason`. The slots have no valid content. As far as known, the holder still holds the
                blocks: fetch again, call `drop`, or let the lease end.
        """

    def drop(self, offered: Prefilled | Encoded) -> None:
        """Notify a holder that nobody will fetch, in the background and without retries.

        Ignores invalid descriptors.
        """

    async def close(self) -> None:
        """Fail fetches in flight (`closed`), free all offers and end. May be called repeatedly."""
