"""The holders that a NIXL agent knows: learned from their metadata, with lists of their slots and words prepared."""

from dataclasses import dataclass
from typing import Any

from forebay.workers.kv_transfer.descriptor import OFFERS_MAX, Place
from forebay.workers.kv_transfer.memory import WORD_BYTES, words_offset
from forebay.workers.kv_transfer.nixl_agent import TransferError, said_name

PEERS_MAX = 256  # known at once; the one not asked for longest is forgotten


@dataclass(slots=True, eq=False)
class Peer:
    """A holder. `broken`: NIXL has raised for it, or another has taken its name; it is forgotten when nothing runs."""

    name: str
    metadata: bytes
    address: int
    slots: int
    blocks: Any
    words: Any
    reads: int = 0
    silent: bool = False
    broken: bool = False

    def is_of(self, place: Place) -> bool:
        """Whether a descriptor speaks of this very memory."""
        return (self.metadata, self.address, self.slots) == (place.route, place.address, place.slots)


def prepare(agent: Any, whose: str, address: int, length: int, count: int) -> Any:
    """A prepared list of `count` places of `length` bytes, one after another."""
    import numpy  # noqa: PLC0415 - an extra

    strided = numpy.array([[address, length, 0, length, count]], dtype=numpy.uint64)
    return agent.prep_xfer_dlist(whose, strided, mem_type="DRAM")


def told(text: str, error: Exception) -> TransferError:
    """What the bindings raise, told as ours: their classes have no common one, and are known by name."""
    kind = type(error).__name__
    gone = "Disconnect" in kind or "Backend" in kind
    refused = any(word in kind for word in ("Mismatch", "InvalidParam", "NotFound", "NotAllowed"))
    return TransferError(f"{text}: {str(error) or kind}", "gone" if gone else "refused" if refused else "failed")


class Peers:
    """In the thread of its agent only."""

    def __init__(self, agent: Any, name: str) -> None:
        self._agent = agent
        self._name = name
        self._known: dict[str, Peer] = {}  # the least lately asked first

    def of(self, place: Place) -> Peer:
        """The holder that a place is of, learned if need be. Raises TransferError when it cannot be asked."""
        peer = self._known.pop(place.agent, None)
        if peer is not None:
            self._known[place.agent] = peer
            if peer.silent:
                raise TransferError(f"{peer.name} owes an earlier read, and is asked no more", "deadline")
            if peer.broken or not peer.is_of(place):
                if peer.reads:
                    raise TransferError(f"{peer.name} broke off, or two agents are called so", "gone")
                self.forget(peer)
                peer = None
        return peer or self._learn(place)

    def ended(self, peer: Peer) -> None:
        """A read from a holder is over."""
        peer.reads -= 1
        if not peer.reads:
            peer.silent = False
            if peer.broken:
                self.forget(peer)

    def silence(self, name: str) -> None:
        """Ask a holder, from which something is being read, no more until all of that has ended."""
        self._known[name].silent = True

    def close(self) -> None:
        """Forget all; nothing is being read."""
        for peer in list(self._known.values()):
            self.forget(peer)

    def forget(self, peer: Peer) -> None:
        """Disconnect from a holder from which nothing is read."""
        self._known.pop(peer.name, None)
        self._agent.release_dlist_handle(peer.blocks)
        self._agent.release_dlist_handle(peer.words)
        self._agent.remove_remote_agent(peer.name)

    def _learn(self, place: Place) -> Peer:
        if place.agent == self._name:
            raise TransferError(f"the blocks are those of {place.agent} itself", "refused")
        if len(self._known) >= PEERS_MAX:
            idle = next((peer for peer in self._known.values() if not peer.reads), None)
            if idle is None:
                raise TransferError(f"{PEERS_MAX} holders are being read from", "full")
            self.forget(idle)
        try:
            name = said_name(self._agent.add_remote_agent(place.route))
        except Exception as error:
            raise told(f"NIXL could not connect to {place.agent}", error) from error
        try:
            if name != place.agent:
                raise TransferError(f"the metadata of {place.agent} is of {name}", "refused")
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
            raise told(f"NIXL finds no such memory of {place.agent}", error) from error
        self._known[name] = peer
        return peer
