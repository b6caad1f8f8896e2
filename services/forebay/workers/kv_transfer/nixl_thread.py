"""The thread that calls NIXL, and nobody else does: begins reads, sees them through, hears what readers say.

Theory of operation. NIXL gives up the interpreter's lock while it copies, so the event loop goes on meanwhile. It has
no progress thread here, which would spin: whatever is under way goes on when it is polled. Naps between polls are a
part of the time since anything last happened, so that waiting costs a share of what it waited for; a command ends one
at once. Whoever offers must poll as long as offers wait: notifications, and reads without shared memory, need it.
Whoever has ever offered or read goes on polling at leisure: its late readers must not take it for silent.
"""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from forebay.workers.kv_transfer.descriptor import Place
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError, open_agent
from forebay.workers.kv_transfer.nixl_peers import Peers
from forebay.workers.kv_transfer.nixl_reads import FETCHED, Here, Read, tell

LOG = logging.getLogger(__name__)

SPIN_S = 0.0002  # of polling without naps: what most transfers take
NAP_SHARE = 0.25
NAP_S = 0.001  # at most, with anything under way or on offer
IDLE_NAP_S = 0.02
STOP_S = 5.0
GRACE_S = 0.3  # for what is under way when the thread ends
LINGER_S = 0.01  # for the last notifications to leave

Report = Callable[[TransferError | None], None]
Note = Callable[[str], None]

# Agents and memory that may still be written to when their transport is closed: kept for the life of the process.
_left: list[object] = []


class NixlThread:
    """An agent and its memory, registered. `start` returns when both are there."""

    def __init__(self, name: str, arena: Arena, on_note: Note, interface: str = "") -> None:
        self.metadata = b""
        self.holding = False  # anybody may set it, then call `wake`
        self._name = name
        self._interface = interface
        self._arena = arena
        self._on_note = on_note
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: list[tuple[Read, Iterator[None], Report]] = []
        self._used = False
        self._active_s = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=f"nixl {name}", daemon=True)
        self._opened = threading.Event()
        self._error: Exception | None = None

    def start(self) -> None:
        """Blocks, for some 0.1 s. Raises what NIXL raises."""
        # A thread that is within NIXL when the interpreter goes away aborts the process.
        atexit.register(self.stop)
        self._thread.start()
        self._opened.wait()
        if self._error is not None:
            raise self._error

    def wake(self) -> None:
        """End a nap."""
        self._commands.put(None)

    def read(self, read: Read, report: Report) -> None:
        """Begin a read; `report` is called from the thread when it is over."""
        self._commands.put(lambda: self._begin(read, report))

    def tell(self, place: Place, what: bytes) -> None:
        """Tell a holder; a failure is logged and forgotten."""
        self._commands.put(lambda: self._tell(place, what))

    def silence(self, agent: str) -> None:
        """Ask a holder no more, if a read that was given up is still under way there, until all have ended."""
        self._commands.put(lambda: self._silence(agent))

    def stop(self) -> None:
        """Blocks until the thread has ended: some 0.3 s after what NIXL is at, which is left alone after `STOP_S`."""
        atexit.unregister(self.stop)
        self._stopping = True
        self.wake()
        self._thread.join(STOP_S)
        if self._thread.is_alive():
            LOG.warning("NIXL does not return; its agent %s is left alone", self._name)
            _left.append(self)

    def _run(self) -> None:
        try:
            self._agent = open_agent(self._name, self._interface)
            self._registered = self._agent.register_memory(
                [(self._arena.address, self._arena.bytes, 0, "")], mem_type="DRAM"
            )
            self._here = Here(self._agent, self._arena)
            self._peers = Peers(self._agent, self._name)
            self.metadata = self._agent.get_agent_metadata()
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
            notes = self._agent.get_new_notifs()
        except Exception as error:  # noqa: BLE001 - the bindings' own classes; a reader's fault must not end the others
            LOG.warning("NIXL could not be asked for notifications: %s", error)
            return
        for texts in notes.values():
            self._active_s = time.monotonic()
            for text in texts:
                self._on_note(text.decode(errors="replace"))

    def _begin(self, read: Read, report: Report) -> None:
        entry = (read, read.steps(self._here, self._peers), report)
        if self._advance(*entry):
            self._reads.append(entry)

    def _advance(self, read: Read, steps: Iterator[None], report: Report) -> bool:
        """Whether it still goes on; else it has been reported."""
        try:
            next(steps)
        except StopIteration:
            report(None)
            if read.tell:  # afterwards: whoever waits for the blocks need not wait for this
                self._tell(read.place, FETCHED)
        except TransferError as error:
            report(error)
        except Exception as error:  # whatever it is, whoever waits must hear of it
            LOG.exception("a read from %s failed", read.place.agent)
            report(TransferError(f"the read from {read.place.agent} failed: {error!r}"))
        else:
            return True
        return False

    def _silence(self, agent: str) -> None:
        if any(read.abandoned and read.place.agent == agent for read, _, _ in self._reads):
            self._peers.silence(agent)

    def _tell(self, place: Place, what: bytes) -> None:
        try:
            self._peers.of(place)
            tell(self._agent, place, what)
        except TransferError as error:
            LOG.info("%s is left to its lease: %s", place.agent, error)

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
            _left.append((self._agent, self._here, self._reads))
            return
        self._peers.close()
        self._here.close()
        self._agent.deregister_memory(self._registered)
        del self._agent, self._here, self._peers
