"""Interface between a transport and its carrier, which moves the bytes: NIXL or plain sockets."""

from typing import TYPE_CHECKING, Protocol

from forebay.workers.kv_transfer.descriptor import BlockLocation

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots


class Carrier(Protocol):
    """The part of a transport that reads blocks of other workers and serves the blocks of this worker to readers.

    Attributes:
        route: address at which readers reach this worker, for `BlockLocation.route`.
    """

    route: bytes

    async def start(self) -> None:
        """Start to read and serve.

        Raises:
            EngineError: NIXL cannot be started.
            OSError: the listening address cannot be used.
        """

    async def read(self, place: BlockLocation, theirs: "Slots", into: "Numbers", *, notify: bool) -> None:
        """Read slots of a holder into blocks of this worker, and verify that the holder kept them during the read.

        When this call has ended, successfully or not, the carrier no longer writes to the blocks `into`.

        Args:
            place: location of the offered blocks.
            into: blocks of this worker that receive the content.
            notify: whether to notify the holder after the read that it can free the blocks.

        Raises:
            TransferError: the read failed, or the holder no longer keeps the blocks.
        """

    def notify(self, place: BlockLocation, *, fetched: bool) -> None:
        """Notify a holder that it can free its blocks, in the background and without retries.

        Args:
            place: location of the offered blocks.
            fetched: whether the blocks were fetched; false if they will not be fetched.
        """

    def unanswered(self, place: BlockLocation) -> None:
        """Record that a read from the holder of these blocks has timed out."""

    def holding(self, offers: int) -> None:
        """Record how many offers of this worker have not ended."""

    async def close(self) -> None:
        """Stop to serve. The caller ensures that all reads have ended."""
