"""The holders to which a NIXL agent is connected, each with NIXL's prepared lists of its slots and generation words."""

from dataclasses import dataclass
from typing import Any

from forebay.workers.kv_transfer.descriptor import OFFERS_MAX, BlockLocation
from forebay.workers.kv_transfer.memory import WORD_BYTES, words_offset
from forebay.workers.kv_transfer.nixl_agent import TransferError, remote_name

PEERS_MAX = 256  # connected holders; beyond that the least recently used one is disconnected


@dataclass(slots=True, eq=False)
class Peer:
    """A holder to which this worker's NIXL agent is connected.

    Attributes:
        name: name of the holder's agent.
        address: memory address of the holder's first slot.
        blocks: NIXL's prepared list of the slots.
        words: NIXL's prepared list of the generation words.
        silent: whether a read has timed out. No read begins until all reads in progress have ended.
        broken: whether a NIXL error or a name conflict occurred. The peer is removed when no read is in progress.
    """

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
        """Return whether a descriptor refers to the memory for which this peer was prepared."""
        return (self.metadata, self.address, self.slots) == (place.route, place.address, place.slots)


def prepare(agent: Any, whose: str, address: int, length: int, count: int) -> Any:
    """Return NIXL's prepared list of consecutive pieces of memory.

    Args:
        whose: name of the agent that owns the memory.
        address: memory address of the first piece.
        length: bytes per piece.
    """
    import numpy  # noqa: PLC0415 - an extra

    strided = numpy.array([[address, length, 0, length, count]], dtype=numpy.uint64)
    return agent.prep_xfer_dlist(whose, strided, mem_type="DRAM")


def transfer_error(text: str, error: Exception) -> TransferError:
    """Return the TransferError for an exception of NIXL's bindings.

    The name of the exception's class determines the reason, because the classes have no common base.

    Args:
        text: beginning of the message: what failed.
    """
    kind = type(error).__name__
    gone = "Disconnect" in kind or "Backend" in kind
    refused = any(word in kind for word in ("Mismatch", "InvalidParam", "NotFound", "NotAllowed"))
    return TransferError(f"{text}: {str(error) or kind}", "gone" if gone else "refused" if refused else "failed")


class Peers:
    """The holders to which a NIXL agent is connected. Use it on the thread of the agent only."""

    def __init__(self, agent: Any, name: str) -> None:
        self._agent = agent
        self._name = name
        self._known: dict[str, Peer] = {}  # least recently used first

    def of(self, place: BlockLocation) -> Peer:
        """Return the holder of a location. If the agent is not connected to it, connect by its metadata.

        Raises:
            TransferError: no read from the holder can begin now.
        """
        peer = self._known.pop(place.agent, None)
        if peer is not None:
            self._known[place.agent] = peer
            if peer.silent:
                raise TransferError(
                    f"{peer.name} did not reply to an earlier read, so no new read from it begins", "deadline"
                )
            if peer.broken or not peer.is_of(place):
                if peer.reads:
                    raise TransferError(f"{peer.name} disconnected, or two agents have this name", "gone")
                self.forget(peer)
                peer = None
        return peer or self._learn(place)

    def ended(self, peer: Peer) -> None:
        """Record that a read from a holder has ended."""
        peer.reads -= 1
        if not peer.reads:
            peer.silent = False
            if peer.broken:
                self.forget(peer)

    def silence(self, name: str) -> None:
        """Begin no reads from a holder until all its reads in progress have ended."""
        self._known[name].silent = True

    def close(self) -> None:
        """Disconnect from all holders. The caller ensures that no reads are in progress."""
        for peer in list(self._known.values()):
            self.forget(peer)

    def forget(self, peer: Peer) -> None:
        """Disconnect from a holder. The caller ensures that no read from it is in progress."""
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
