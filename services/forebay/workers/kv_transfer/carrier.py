"""What differs between the ways that bytes go: the seam between a transport and NIXL or plain sockets."""

from typing import TYPE_CHECKING, Protocol

from forebay.workers.kv_transfer.descriptor import Place

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.api import Numbers
    from forebay.workers.kv_transfer.descriptor import Slots


class Carrier(Protocol):
    """Brings blocks from holders, and lets others come for this worker's.

    Attributes:
        route: the way to this worker, for `Place.route`.
    """

    route: bytes

    async def start(self) -> None:
        """Be ready for both. Raises EngineError or OSError."""

    async def read(self, place: Place, theirs: "Slots", into: "Numbers", *, tell: bool) -> None:
        """Read a holder's slots into own blocks, make sure that they are still held then, and tell the holder if asked.

        Raises TransferError. However it ends, nobody writes to those blocks afterwards.
        """

    def tell(self, place: Place, *, fetched: bool) -> None:
        """Tell a holder that its blocks were fetched, or will not be: best effort, in the background."""

    def unanswered(self, place: Place) -> None:
        """A read from this holder has just ended by its deadline."""

    def holding(self, offers: int) -> None:
        """How many offers wait now."""

    async def close(self) -> None:
        """End; reads have ended before."""
