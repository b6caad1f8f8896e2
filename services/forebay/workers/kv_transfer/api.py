"""What a worker asks of the layer that moves KV blocks, all of it on the event loop of `open_transport`.

A transport has the memory of its worker's KV blocks: slots of `block_bytes`, numbered from 0. Whoever has computed a
prompt offers its blocks; one reader fetches some or all of them into slots of its own, and tells the holder.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import msgspec

from forebay.events.transfer import Prefilled

if TYPE_CHECKING:
    import numpy as np

    Array = np.ndarray[Any, np.dtype[np.uint8]]
    Numbers = np.ndarray[Any, np.dtype[np.int64]]  # of blocks

# Upper bounds in seconds of what fetches took: `fetch_s` ends a fetch after 10 s.
BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)

Kind = Literal["nixl", "tcp"]
GivenBack = Literal["fetched", "expired", "released"]
OnGivenBack = Callable[[str, GivenBack], None]

# Why a fetch failed, in one word: what was offered is no longer held; the holder is gone, or does not answer in time;
# the bytes are not those offered; the descriptor is refused; this side is full or closed; anything else.
REASONS = ("expired", "gone", "deadline", "corrupt", "refused", "full", "closed", "failed")


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Where blocks lie, for `Prefilled.descriptor`.

    `checksum`, for `Prefilled.checksum`, is the XXH3-64 of the blocks' own XXH3-64s, in order, as little-endian u64,
    so that whoever fetches a part can check that part. None where no checksum was asked for.
    """

    descriptor: bytes
    checksum: str | None
    bytes: int


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks that have come. `us` runs from the call to the end, waiting for other fetches included."""

    bytes: int
    blocks: int
    us: int
    retries: int = 0


class Stats(msgspec.Struct, kw_only=True):
    """Counters of one transport since it was opened, and what is so at the moment.

    `failed` is by reason (REASONS). `read_us` are the microseconds that fetches which came took, waiting included;
    `took` counts them by the place in BUCKETS_S of the first bound that is not below, its length for none.
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
    given_back: dict[str, int] = msgspec.field(default_factory=dict)  # by GivenBack
    in_flight: int = 0
    in_flight_bytes: int = 0
    waiting: int = 0
    held_offers: int = 0
    held_blocks: int = 0
    quarantined_blocks: int = 0


class KvMemory(Protocol):
    """The slots of this worker's KV blocks."""

    block_bytes: int
    blocks: int

    def view(self, block: int) -> "Array":
        """The bytes of a slot, writable. Ask anew each time: after a failed fetch other memory stands for a slot.

        Memory that was never written to costs nothing. Raises IndexError for a slot that is none.
        """


class KvTransport(Protocol):
    """Offers blocks of this worker to others and fetches theirs.

    Attributes:
        kind: what moves the bytes; goes into `Prefilled.connector` and `KvLayout.connector`.
        name: `agent_name(worker_id, epoch)`.
        lease_s: how long an offer is held at most; `Prefilled.lease_us` must not be longer.
        stats: live counters.
    """

    kind: Kind
    name: str
    lease_s: float
    stats: Stats

    @property
    def memory(self) -> KvMemory:
        """This worker's blocks."""

    def offer(self, request_id: str, blocks: Sequence[int], *, checksum: bool = False) -> Offer:
        """Hold blocks, in the order of the prompt, for one reader, for `lease_s` from now.

        They must not be written to until they are given back: `on_given_back(request_id, why)` says so, once for every
        offer, never from within this call; the blocks may be reused from within that callback on. With `checksum` all
        of them are hashed before this returns. A block may be in several offers.

        Raises TransferError when there are no blocks, more than a descriptor holds, one that is not there, too many
        offers, an offer of that request already, or the transport is closed.
        """

    def release(self, request_id: str) -> bool:
        """Give back what is held for a request, now; whether anything was. A reader in the middle of it will fail."""

    async def fetch(self, prefilled: Prefilled, first: int, into: Sequence[int]) -> Fetched:
        """Read the offered blocks from number `first` on into the own slots `into`, one each, and tell the holder.

        `first` may be the number of all blocks: nothing is read then, and the holder is told. Waits, first come first
        served, for fetches before it; the deadline of `fetch_s` counts that too. When this returns or raises,
        cancelled or not, nobody writes to those slots any more.

        Raises TransferError, with a `reason`: what is in the slots is worth nothing then. The holder still holds the
        blocks, as far as it can be known: call again, `drop`, or leave it to the lease.
        """

    def drop(self, prefilled: Prefilled) -> None:
        """Tell a holder that nobody will fetch; best effort, in the background. A bad descriptor is ignored."""

    async def close(self) -> None:
        """Fail what is under way (`closed`), give back everything that is held, end. May be called again."""
