"""The only thread that calls NIXL: starts reads, advances them and receives notifications.

Theory of operation. NIXL releases the interpreter's lock while it copies, so the event loop continues. NIXL makes
progress only while it is polled, because its own progress thread, which would poll without a pause, is disabled.
Between polls the thread sleeps for a fraction of the time since its last activity, so idle polling stays cheap. A
command ends the sleep. A holder must poll while it has offers, because notifications depend on it, and also reads
without shared memory. A worker that has ever offered or read blocks keeps polling slowly, so that late readers can
connect.
"""

import atexit
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator

from forebay.workers.kv_transfer.descriptor import BlockLocation
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError, open_agent
from forebay.workers.kv_transfer.nixl_peers import Peers
from forebay.workers.kv_transfer.nixl_reads import FETCHED, LocalAgent, Read, notify

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

    Args:
        arena: memory of this worker's blocks.
        on_note: called on this thread with each notification that arrives.
        interface: network interface that UCX uses; empty to let UCX select one.

    Attributes:
        metadata: NIXL metadata of the agent, after `start`.
        holding: whether this worker has offers. It may be set on any thread, followed by `wake`.
    """

    def __init__(self, name: str, arena: Arena, on_note: Note, interface: str = "") -> None:
        self.metadata = b""
        self.holding = False  # may be set on any thread, followed by `wake`
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
            self._agent = open_agent(self._name, self._interface)
            self._registered = self._agent.register_memory(
                [(self._arena.address, self._arena.bytes, 0, "")], mem_type="DRAM"
            )
            self._local = LocalAgent(self._agent, self._arena)
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
            LOG.warning("cannot get notifications from NIXL: %s", error)
            return
        for texts in notes.values():
            self._active_s = time.monotonic()
            for text in texts:
                self._on_note(text.decode(errors="replace"))

    def _begin(self, read: Read, report: Report) -> None:
        entry = (read, read.steps(self._local, self._peers), report)
        if self._advance(*entry):
            self._reads.append(entry)

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
        if any(read.abandoned and read.place.agent == agent for read, _, _ in self._reads):
            self._peers.silence(agent)

    def _notify(self, place: BlockLocation, what: bytes) -> None:
        try:
            self._peers.of(place)
            notify(self._agent, place, what)
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
            _left.append((self._agent, self._local, self._reads))
            return
        self._peers.close()
        self._local.close()
        self._agent.deregister_memory(self._registered)
        del self._agent, self._local, self._peers
