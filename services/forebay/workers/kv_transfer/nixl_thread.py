"""The only thread that calls NIXL: starts reads, advances them and receives notifications.

Theory of operation. NIXL releases the interpreter's lock while it copies, so the event loop continues. NIXL makes
progress only while it is polled, because its own progress thread, which would poll without a pause, is disabled.
Between polls the thread sleeps for a fraction of the time since its last activity, so idle polling stays cheap. A
command ends the sleep. A holder must poll while it has offers, because notifications depend on it, and also reads
without shared memory. A worker that has ever offered or read blocks keeps polling slowly, so that late readers can
connect.

A connection of UCX may hang although the holder is well. After a read that missed its deadline, the thread therefore
opens another agent, and reads the generation word of the offer through it. Once that has arrived, reads from this
holder use the new agent. The hung read stays with its agent, because NIXL may still write to its slots.
"""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from forebay.workers.kv_transfer.descriptor import OFFERS_MAX, BlockLocation, Slots, slots_of
from forebay.workers.kv_transfer.memory import READS_MAX, WORD_BYTES, Arena, words_offset
from forebay.workers.kv_transfer.nixl_agent import LOCAL, TransferError, open_agent, remote_name

PEERS_MAX = 256  # connected holders; beyond that the least recently used one is disconnected
AGENTS_MAX = 4  # agents of a worker; each further one replaces connections that hang
RECONNECT_S = 10.0  # between two agents, because a holder that hangs does not reply to any of them
PIECE_BYTES = 32 << 20
FETCHED, DROPPED = b"f", b"d"  # prefix of a notification; the generation follows


@dataclass(slots=True, eq=False)
class Peer:
    """A holder to which this worker's NIXL agent is connected, with NIXL's prepared lists of its slots and words.

    Attributes:
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
        return (self.metadata, self.address, self.slots) == (place.route, place.address, place.slots)


def prepare(agent: Any, whose: str, address: int, length: int, count: int) -> Any:
    """Return NIXL's prepared list of consecutive pieces of memory."""
    strided = np.array([[address, length, 0, length, count]], dtype=np.uint64)
    return agent.prep_xfer_dlist(whose, strided, mem_type="DRAM")


def transfer_error(text: str, error: Exception) -> TransferError:
    """Return the TransferError for an exception of NIXL's bindings, with a message that begins with `text`.

    The name of the exception's class determines the reason, because the classes have no common base.
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

    def is_silent(self, name: str) -> bool | None:
        """Return whether a read from a holder timed out and is in progress, None if the agent is not connected."""
        return self._known[name].silent if name in self._known else None

    def of(self, place: BlockLocation) -> Peer:
        """Return the holder of a location; connect by its metadata if needed.

        Raises TransferError if no read can begin now.
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
        peer.reads -= 1
        if not peer.reads:
            peer.silent = False
            if peer.broken:
                self.forget(peer)

    def silence(self, name: str) -> None:
        """Begin no reads from a holder until all its reads in progress have ended."""
        self._known[name].silent = True

    def close(self) -> None:
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
                raise TransferError(f"expected the metadata of agent {place.agent}, got that of {name}", "refused")
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


class LocalAgent:
    """A NIXL agent with its holders, and with prepared lists of this worker's slots and of words for generations.

    `free_words` are the indices of the words that no read uses. All agents of a worker share them.
    """

    def __init__(self, agent: Any, name: str, arena: Arena, free_words: list[int]) -> None:
        self.agent = agent
        self.arena = arena
        self.peers = Peers(agent, name)
        self.free_words = free_words
        self._registered = agent.register_memory([(arena.address, arena.bytes, 0, "")], mem_type="DRAM")
        self.slots = prepare(agent, LOCAL, arena.address, arena.block_bytes, arena.slots)
        self.words = prepare(agent, LOCAL, arena.scratch.ctypes.data, WORD_BYTES, READS_MAX)

    def close(self) -> None:
        self.peers.close()
        self.agent.release_dlist_handle(self.slots)
        self.agent.release_dlist_handle(self.words)
        self.agent.deregister_memory(self._registered)


class Read:
    """One read of blocks from a holder. It runs on the thread of the NIXL agent.

    Another thread sets `abandoned` to end the read as soon as NIXL has finished the transfers in progress. `peers` are
    those of its agent, once it has begun.
    """

    peers: Peers

    def __init__(self, place: BlockLocation, theirs: Slots, ours: Slots, *, notify: bool) -> None:
        self.place = place
        self.abandoned = False
        self._theirs = theirs
        self._ours = ours
        self.notify = notify

    def steps(self, local: LocalAgent) -> Iterator[None]:
        """Run the read. The caller resumes this generator whenever NIXL may have made progress.

        Raises TransferError if the read failed: the content of the slots is invalid, but NIXL no longer writes to them.
        """
        if self.abandoned:
            raise TransferError("the read was abandoned before it began")
        peer, self.peers = local.peers.of(self.place), local.peers
        peer.reads += 1
        try:
            yield from self._through(local, peer)
        except TransferError:
            raise
        except Exception as error:
            peer.broken = True
            raise transfer_error(f"NIXL cannot read from {peer.name}", error) from error
        finally:
            local.peers.ended(peer)

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
    """Send a connected holder the notification that it can free its blocks."""
    try:
        agent.send_notif(place.agent, what + b"%d" % place.generation)
    except Exception as error:
        raise transfer_error(f"NIXL cannot notify {place.agent}", error) from error


def transfer(agent: Any, ours: Any, our_numbers: Any, theirs: Any, their_numbers: Any) -> Iterator[None]:
    """Run one READ of NIXL. The caller resumes this generator whenever NIXL may have made progress."""
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


LOG = logging.getLogger(__name__)

SPIN_S = 0.0002  # time of polling without sleep: as long as most transfers take
NAP_SHARE = 0.25
NAP_S = 0.001  # maximum sleep while anything is in flight or offered
IDLE_NAP_S = 0.02
STOP_S = 5.0
GRACE_S = 0.3  # time for transfers in flight when the thread ends
LINGER_S = 0.01  # time for the last notifications to be sent

Report = Callable[[TransferError | None], None]
Note = Callable[[str], None]

# Agents and memory that may still be written to after their transport closed: kept for the life of the process.
_left: list[object] = []


class NixlThread:
    """Thread that creates a NIXL agent, registers the memory of this worker, and runs all NIXL calls.

    Notifications that arrive are passed to `on_note` on this thread. If `interface` is empty, UCX selects one. The NIXL
    metadata of the agent are known after `start`.
    """

    def __init__(self, name: str, arena: Arena, on_note: Note, interface: str = "") -> None:
        self.metadata = b""
        self.holding = False  # may be set on any thread, followed by `wake`
        self._name = name
        self._interface = interface
        self._arena = arena
        self._on_note = on_note
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._agents: list[LocalAgent] = []
        self._free_words = list(range(READS_MAX))
        self._reconnect_s = 0.0  # on the monotonic clock: when another agent may be opened
        self._reads: list[tuple[Read, Iterator[None], Report]] = []
        self._used = False
        self._active_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"nixl {name}", daemon=True)
        self._opened = threading.Event()
        self._error: Exception | None = None

    def start(self) -> None:
        """Start the thread, and wait (about 0.1 s) until the agent exists. Raises the exceptions of NIXL."""
        # A thread inside NIXL at interpreter exit would abort the process.
        atexit.register(self.stop)
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            raise self._error

    def wake(self) -> None:
        """End the current sleep of the thread. May be called on any thread."""
        self._commands.put(None)

    def read(self, read: Read, report: Report) -> None:
        """Begin a read, and call `report` on this thread when it has ended. May be called on any thread."""
        self._commands.put(lambda: self._begin(read, report))

    def notify(self, place: BlockLocation, what: bytes) -> None:
        """Send a notification to a holder. A failure is only logged."""
        self._commands.put(lambda: self._notify(place, what))

    def silence(self, agent: str) -> None:
        """If an abandoned read from a holder is in progress, begin no reads from it until all current ones ended."""
        self._commands.put(lambda: self._silence(agent))

    def stop(self) -> None:
        """Stop the thread, and wait until it has ended: about 0.3 s after its current NIXL call.

        If that call takes longer than `STOP_S` seconds, the thread is left running and its memory is kept.
        """
        atexit.unregister(self.stop)
        self._stopping = True
        self.wake()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            LOG.warning("NIXL does not return; abandoning its agent %s", self._name)
            _left.append(self)

    def _run(self) -> None:
        try:
            self.metadata = self._opened_agent(self._name).agent.get_agent_metadata()
        except Exception as error:  # noqa: BLE001 - it is raised by `start`
            self._error = error
            return
        finally:
            self._opened.set()
        while not self._stopping:
            self._command()
            self._poll()
        self._end()

    def _command(self) -> None:
        nap_s = self._nap_s()
        with contextlib.suppress(queue.Empty):
            command = self._commands.get(timeout=nap_s) if nap_s is None or nap_s > 0 else self._commands.get_nowait()
            self._used = True
            self._active_s = time.monotonic()
            if command is not None:
                command()

    def _nap_s(self) -> float | None:
        if not self._used:
            return None
        quiet_s = time.monotonic() - self._active_s
        if self._reads and quiet_s < SPIN_S:
            return 0.0
        return min(max(quiet_s * NAP_SHARE, SPIN_S), NAP_S if self._reads or self.holding else IDLE_NAP_S)

    def _poll(self) -> None:
        over = [entry for entry in self._reads if not self._advance(*entry)]
        if over:
            self._active_s = time.monotonic()
            self._reads = [entry for entry in self._reads if entry not in over]
        try:
            notes = self._agents[0].agent.get_new_notifs()  # offers name only this agent
        except Exception as error:  # noqa: BLE001 - the bindings' own classes; a reader's fault must not end the others
            LOG.warning("cannot get notifications from NIXL: %s", error)
            return
        for texts in notes.values():
            self._active_s = time.monotonic()
            for text in texts:
                self._on_note(text.decode(errors="replace"))

    def _begin(self, read: Read, report: Report) -> None:
        entry = (read, read.steps(self._agent_for(read.place)), report)
        if self._advance(*entry):
            self._reads.append(entry)

    def _opened_agent(self, name: str) -> LocalAgent:
        agent = open_agent(name, self._interface)
        self._agents.append(LocalAgent(agent, self._name, self._arena, self._free_words))
        return self._agents[-1]

    def _agent_for(self, place: BlockLocation) -> LocalAgent:
        """Return an agent whose reads from a holder end; the first agent if there is none."""
        silent = [one.peers.is_silent(place.agent) for one in self._agents]
        if silent[0] and False not in silent:
            self._reconnect(place)
        return self._agents[silent.index(False) if False in silent else 0]

    def _reconnect(self, place: BlockLocation) -> None:
        """Read the word of an offer through an agent that is not connected to its holder, or through a new agent.

        The holder is silent for this agent until the word has arrived.
        """
        if time.monotonic() < self._reconnect_s:
            return
        self._reconnect_s = time.monotonic() + RECONNECT_S
        free = [one for one in self._agents if one.peers.is_silent(place.agent) is None]
        if not free and len(self._agents) >= AGENTS_MAX:
            return
        LOG.warning("connecting to %s again, because a read did not end in time", place.agent)
        try:
            local = free[0] if free else self._opened_agent(f"{self._name}+{len(self._agents)}")
        except Exception as error:  # noqa: BLE001 - the bindings' own classes; other reads continue
            LOG.warning("cannot open another agent of NIXL: %s", error)
            return
        nothing = slots_of(place)[:0]
        probe = Read(place, nothing, nothing, notify=False)
        entry = (probe, probe.steps(local), lambda _: None)
        if self._advance(*entry):
            self._reads.append(entry)
            local.peers.silence(place.agent)

    def _advance(self, read: Read, steps: Iterator[None], report: Report) -> bool:
        """Advance a read. Return False once it has ended and was reported."""
        try:
            next(steps)
        except StopIteration:
            report(None)
            if read.notify:  # after the report, so that the reader does not wait for the notification
                self._notify(read.place, FETCHED)
        except TransferError as error:
            report(error)
        except Exception as error:  # any error must reach the waiting reader
            LOG.exception("a read from %s failed", read.place.agent)
            report(TransferError(f"the read from {read.place.agent} failed: {error!r}"))
        else:
            return True
        return False

    def _silence(self, agent: str) -> None:
        hung = [read for read, _, _ in self._reads if read.abandoned and read.place.agent == agent]
        for read in hung:
            read.peers.silence(agent)
        if hung:
            self._agent_for(hung[0].place)  # connects again

    def _notify(self, place: BlockLocation, what: bytes) -> None:
        try:
            local = self._agent_for(place)
            local.peers.of(place)
            notify(local.agent, place, what)
        except TransferError as error:
            LOG.info("cannot notify %s, which keeps the KV until its lease ends: %s", place.agent, error)

    def _end(self) -> None:
        until_s = time.monotonic() + GRACE_S
        while not self._commands.empty():
            self._command()
        while self._reads and time.monotonic() < until_s:
            self._poll()
            time.sleep(NAP_S)
        until_s = time.monotonic() + LINGER_S
        while self._used and time.monotonic() < until_s:
            self._poll()
            time.sleep(NAP_S)
        if self._reads:
            for _, _, report in self._reads:
                report(TransferError("the transport was closed", "closed"))
            _left.append((self._agents, self._reads))
            return
        for local in self._agents:
            local.close()
        self._agents.clear()
