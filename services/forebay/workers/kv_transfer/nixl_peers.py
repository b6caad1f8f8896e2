"""Holders known to a NIXL agent by their metadata, with prepared lists of their slots and generation words."""

from dataclasses import dataclass
from typing import Any

from forebay.workers.kv_transfer.descriptor import OFFERS_MAX, BlockLocation
from forebay.workers.kv_transfer.memory import WORD_BYTES, words_offset
from forebay.workers.kv_transfer.nixl_agent import TransferError, remote_name

PEERS_MAX = 256  # known holders; the least recently used one is removed


@dataclass(slots=True, eq=False)
class Peer:
    """Known holder. `broken` after a NIXL error or a name conflict: it is removed once nothing reads from it."""

    name: str
    metadata: bytes
    address: int
    slots: int
    blocks: Any
    words: Any
    reads: int = 0
    silent: bool = False
    broken: bool = False

    def is_of(self, place: BlockLocation) -> bool:
        """Return whether a descriptor refers to this very memory."""
        return (self.metadata, self.address, self.slots) == (place.route, place.address, place.slots)


def prepare(agent: Any, whose: str, address: int, length: int, count: int) -> Any:
    """Return a prepared list of `count` consecutive pieces of `length` bytes."""
    import numpy  # noqa: PLC0415 - an extra

    strided = numpy.array([[address, length, 0, length, count]], dtype=numpy.uint64)
    return agent.prep_xfer_dlist(whose, strided, mem_type="DRAM")


def transfer_error(text: str, error: Exception) -> TransferError:
    """Convert an exception of the bindings to TransferError by its class name; the classes have no common base."""
    kind = type(error).__name__
    gone = "Disconnect" in kind or "Backend" in kind
    refused = any(word in kind for word in ("Mismatch", "InvalidParam", "NotFound", "NotAllowed"))
    return TransferError(f"{text}: {str(error) or kind}", "gone" if gone else "refused" if refused else "failed")


class Peers:
    """Known holders. Use it on the thread of its agent only."""

    def __init__(self, agent: Any, name: str) -> None:
        self._agent = agent
        self._name = name
        self._known: dict[str, Peer] = {}  # least recently used first

    def of(self, place: BlockLocation) -> Peer:
        """Return the holder of a location; load its metadata if needed.

        Raises TransferError when it cannot be read from.
        """
        peer = self._known.pop(place.agent, None)
        if peer is not None:
            self._known[place.agent] = peer
            if peer.silent:
                raise TransferError(
                    f"{peer.name} did not reply to an earlier read and is not read from any more", "deadline"
                )
            if peer.broken or not peer.is_of(place):
                if peer.reads:
                    raise TransferError(f"{peer.name} disconnected, or two agents have this name", "gone")
                self.forget(peer)
                peer = None
        return peer or self._learn(place)

    def ended(self, peer: Peer) -> None:
        """Handle the end of a read from a holder."""
        peer.reads -= 1
        if not peer.reads:
            peer.silent = False
            if peer.broken:
                self.forget(peer)

    def silence(self, name: str) -> None:
        """Start no new reads from a holder until the ones in progress have ended."""
        self._known[name].silent = True

    def close(self) -> None:
        """Remove all holders; no reads may be in progress."""
        for peer in list(self._known.values()):
            self.forget(peer)

    def forget(self, peer: Peer) -> None:
        """Disconnect from a holder without reads in progress."""
        self._known.pop(peer.name, None)
        self._agent.release_dlist_handle(peer.blocks)
        self._agent.release_dlist_handle(peer.words)
        self._agent.remove_remote_agent(peer.name)

    def _learn(self, place: BlockLocation) -> Peer:
        if place.agent == self._name:
            raise TransferError(f"the blocks belong to {place.agent} itself", "refused")
        if len(self._known) >= PEERS_MAX:
            idle = next((peer for peer in self._known.values() if not peer.reads), None)
            if idle is None:
                raise TransferError(f"reads from {PEERS_MAX} holders are already in progress", "full")
            self.forget(idle)
        try:
            name = remote_name(self._agent.add_remote_agent(place.route))
        except Exception as error:
            raise transfer_error(f"NIXL cannot connect to {place.agent}", error) from error
        try:
            if name != place.agent:
                raise TransferError(f"the metadata of {place.agent} belongs to {name}", "refused")
            words = place.address + words_offset(place.slots, place.block_bytes)
            peer = Peer(
                name,
                place.route,
                place.address,
                place.slots,
                prepare(self._agent, name, place.address, place.block_bytes, place.slots),
                prepare(self._agent, name, words, WORD_BYTES, OFFERS_MAX),
            )
        except TransferError:
            self._agent.remove_remote_agent(name)
            raise
        except Exception as error:
            self._agent.remove_remote_agent(name)
            raise transfer_error(f"NIXL does not find the memory of {place.agent}", error) from error
        self._known[name] = peer
        return peer
