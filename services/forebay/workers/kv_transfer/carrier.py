"""Interface between a transport and what moves the bytes: NIXL or plain sockets."""

from typing import TYPE_CHECKING, Protocol

from forebay.workers.kv_transfer.descriptor import BlockLocation

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots


class Carrier(Protocol):
    """What reads blocks from holders and serves this worker's blocks to readers.

    Attributes:
        route: address of this worker, for `BlockLocation.route`.
    """

    route: bytes

    async def start(self) -> None:
        """Start to read and serve. Raises EngineError or OSError."""

    async def read(self, place: BlockLocation, theirs: "Slots", into: "Numbers", *, notify: bool) -> None:
        """Read a holder's slots into own blocks, verify that they were still held, and notify the holder if `notify`.

        However this ends, nobody writes to those blocks afterwards. Raises TransferError.
        """

    def notify(self, place: BlockLocation, *, fetched: bool) -> None:
        """Notify a holder that its blocks were fetched or will not be, in the background and without retries."""

    def unanswered(self, place: BlockLocation) -> None:
        """Handle a read from this holder that has just timed out."""

    def holding(self, offers: int) -> None:
        """Set the number of pending offers."""

    async def close(self) -> None:
        """Close after all reads have ended."""
