"""One read by NIXL: pieces of the block list, then the generation word, then what the holder is told."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from forebay.workers.kv_transfer.descriptor import Place
from forebay.workers.kv_transfer.memory import READS_MAX, WORD_BYTES, Arena
from forebay.workers.kv_transfer.nixl_agent import LOCAL, TransferError
from forebay.workers.kv_transfer.nixl_peers import Peer, Peers, prepare, told

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.descriptor import Slots

# Through shared memory a post copies all of its list before it returns: 32 MiB are some 4 ms, in which the thread
# serves nobody else.
PIECE_BYTES = 32 << 20
FETCHED, DROPPED = b"f", b"d"  # what a notification begins with; the generation follows


class Here:
    """This side of all reads: lists of the own slots, and of the words that generations are read into."""

    def __init__(self, agent: Any, arena: Arena) -> None:
        self.agent = agent
        self.arena = arena
        self.slots = prepare(agent, LOCAL, arena.address, arena.block_bytes, arena.slots)
        self.words = prepare(agent, LOCAL, arena.scratch.ctypes.data, WORD_BYTES, READS_MAX)
        self.free_words = list(range(READS_MAX))

    def close(self) -> None:
        """Release the lists. Nothing is being read."""
        self.agent.release_dlist_handle(self.slots)
        self.agent.release_dlist_handle(self.words)


class Read:
    """Slots `theirs` of a place into the own slots `ours`, one each, in the thread of the agent.

    `abandoned` may be set by another thread: the read ends when NIXL is through with what was posted. `tell`: the
    holder is to be told, after all `steps`.
    """

    def __init__(self, place: Place, theirs: "Slots", ours: "Slots", *, tell: bool) -> None:
        self.place = place
        self.abandoned = False
        self._theirs = theirs
        self._ours = ours
        self.tell = tell

    def steps(self, here: Here, peers: Peers) -> Iterator[None]:
        """Go on whenever NIXL may have got further, to the end.

        Raises TransferError: what was read is worth nothing; NIXL is through with the slots all the same.
        """
        if self.abandoned:
            raise TransferError("given up before it began")
        peer = peers.of(self.place)
        peer.reads += 1
        try:
            yield from self._through(here, peer)
        except TransferError:
            raise
        except Exception as error:
            peer.broken = True
            raise told(f"NIXL could not read from {peer.name}", error) from error
        finally:
            peers.ended(peer)

    def _through(self, here: Here, peer: Peer) -> Iterator[None]:
        piece = max(1, PIECE_BYTES // here.arena.block_bytes)
        for start in range(0, len(self._theirs), piece):
            ours, theirs = self._ours[start : start + piece], self._theirs[start : start + piece]
            yield from _transfer(here.agent, here.slots, ours, peer.blocks, theirs)
            if self.abandoned:
                raise TransferError("given up")
        if not here.free_words:
            raise TransferError(f"{READS_MAX} reads are under way", "full")
        word = here.free_words.pop()
        try:
            yield from _transfer(here.agent, here.words, [word], peer.words, [self.place.word])
            found = int(here.arena.scratch[word])
        finally:
            here.free_words.append(word)
        if found != self.place.generation:
            raise TransferError(f"{peer.name} holds these blocks no longer", "expired")


def tell(agent: Any, place: Place, what: bytes) -> None:
    """Say to a known holder that its blocks were fetched, or will not be. It has the lease to go by, if this fails."""
    try:
        agent.send_notif(place.agent, what + b"%d" % place.generation)
    except Exception as error:
        raise told(f"NIXL could not tell {place.agent}", error) from error


def _transfer(agent: Any, ours: Any, our_numbers: Any, theirs: Any, their_numbers: Any) -> Iterator[None]:
    handle = agent.make_prepped_xfer("READ", ours, our_numbers, theirs, their_numbers)
    try:
        state = agent.transfer(handle)
        while state == "PROC":
            yield
            state = agent.check_xfer_state(handle)
        if state != "DONE":
            raise TransferError(f"the transfer ended as {state}")
    finally:
        agent.release_xfer_handle(handle)
