"""One read by NIXL: the blocks in pieces, then the holder's generation word, then a notification to the holder.

The generation word shows whether the holder kept the blocks during the read.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forebay.workers.kv_transfer.descriptor import BlockLocation
from forebay.workers.kv_transfer.memory import READS_MAX, WORD_BYTES, Arena
from forebay.workers.kv_transfer.nixl_agent import LOCAL, TransferError
from forebay.workers.kv_transfer.nixl_peers import Peer, Peers, prepare, transfer_error

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.descriptor import Slots

# With shared memory, posting copies the whole list before it returns: about 4 ms for 32 MiB, during which the
# thread does nothing else.
PIECE_BYTES = 32 << 20
FETCHED, DROPPED = b"f", b"d"  # prefix of a notification; the generation follows


class LocalAgent:
    """This worker's side of all reads: NIXL's prepared lists of its own slots and of words for generations.

    Attributes:
        arena: memory of this worker's blocks.
        words: prepared list of the words into which generation words of holders are read.
        free_words: indices of these words that no read uses.
    """

    def __init__(self, agent: Any, arena: Arena) -> None:
        self.agent = agent
        self.arena = arena
        self.slots = prepare(agent, LOCAL, arena.address, arena.block_bytes, arena.slots)
        self.words = prepare(agent, LOCAL, arena.scratch.ctypes.data, WORD_BYTES, READS_MAX)
        self.free_words = list(range(READS_MAX))

    def close(self) -> None:
        """Release the prepared lists. The caller ensures that no reads are in progress."""
        self.agent.release_dlist_handle(self.slots)
        self.agent.release_dlist_handle(self.words)


class Read:
    """One read of blocks from a holder. It runs on the thread of the NIXL agent.

    Args:
        place: location of the offered blocks.
        ours: slots of this worker that receive the content.

    Attributes:
        abandoned: set by another thread to end the read as soon as NIXL has finished the transfers in progress.
    """

    def __init__(self, place: BlockLocation, theirs: "Slots", ours: "Slots", *, notify: bool) -> None:
        self.place = place
        self.abandoned = False
        self._theirs = theirs
        self._ours = ours
        self.notify = notify

    def steps(self, local: LocalAgent, peers: Peers) -> Iterator[None]:
        """Return a generator that runs the read. The caller resumes it whenever NIXL may have made progress.

        Raises:
            TransferError: the read failed. The content of the slots is invalid, but NIXL no longer writes to them.
        """
        if self.abandoned:
            raise TransferError("the read was abandoned before it began")
        peer = peers.of(self.place)
        peer.reads += 1
        try:
            yield from self._through(local, peer)
        except TransferError:
            raise
        except Exception as error:
            peer.broken = True
            raise transfer_error(f"NIXL cannot read from {peer.name}", error) from error
        finally:
            peers.ended(peer)

    def _through(self, local: LocalAgent, peer: Peer) -> Iterator[None]:
        piece = max(1, PIECE_BYTES // local.arena.block_bytes)
        for start in range(0, len(self._theirs), piece):
            ours, theirs = self._ours[start : start + piece], self._theirs[start : start + piece]
            yield from transfer(local.agent, local.slots, ours, peer.blocks, theirs)
            if self.abandoned:
                raise TransferError("abandoned")
        if not local.free_words:
            raise TransferError(f"{READS_MAX} reads are already in progress", "full")
        word = local.free_words.pop()
        try:
            yield from transfer(local.agent, local.words, [word], peer.words, [self.place.word])
            found = int(local.arena.scratch[word])
        finally:
            local.free_words.append(word)
        if found != self.place.generation:
            raise TransferError(f"{peer.name} no longer holds these blocks", "expired")


def notify(agent: Any, place: BlockLocation, what: bytes) -> None:
    """Send a connected holder the notification that it can free its blocks.

    Args:
        place: location of the offered blocks.
        what: `FETCHED`, or `DROPPED` if the blocks will not be fetched.

    Raises:
        TransferError: NIXL cannot send it. The offer then ends when its lease expires.
    """
    try:
        agent.send_notif(place.agent, what + b"%d" % place.generation)
    except Exception as error:
        raise transfer_error(f"NIXL cannot notify {place.agent}", error) from error


def transfer(agent: Any, ours: Any, our_numbers: Any, theirs: Any, their_numbers: Any) -> Iterator[None]:
    """Return a generator that runs one READ of NIXL. The caller resumes it whenever NIXL may have made progress.

    Args:
        ours: prepared list of this worker's memory.
        our_numbers: indices in that list of the pieces to write.
        theirs: prepared list of the holder's memory.
        their_numbers: indices in that list of the pieces to read.

    Raises:
        TransferError: the transfer failed.
    """
    handle = agent.make_prepped_xfer("READ", ours, our_numbers, theirs, their_numbers)
    try:
        state = agent.transfer(handle)
        while state == "PROC":
            yield
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"the transfer ended in state {state}")
    finally:
        agent.release_xfer_handle(handle)
