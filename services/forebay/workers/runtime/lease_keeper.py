"""Keeps the leases of a process's workers, in one thread: a busy event loop must not look like a dead worker.

A lease is a sensor, not the truth. One that vanished is taken again; only when another incarnation
of the same worker holds it the worker is told, since it was replaced. A store that fails is tried again.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from forebay.transport.base import LeaseError, Leases

logger = logging.getLogger(__name__)

TTL_S = 3.0
RENEWALS_PER_TTL = 3  # two renewals may be missed before the lease runs out
RENEW_S_MAX = 1.0  # a lease that vanished is taken again this soon, however long its TTL is
RETRY_S_MAX = 1.0  # after an error, long before the next renewal would be


@dataclass(slots=True, kw_only=True)
class _Hold:
    group: str
    worker_id: str
    token: str
    payload: bytes
    on_replaced: Callable[[str], None]
    predecessors: frozenset[str]  # tokens under which this keeper may still hold the lease
    acquired: bool = False
    due: float = 0.0

    def tokens_of_successor(self) -> frozenset[str]:
        """What the hold that comes after this one has as predecessors: none when this never held anything."""
        if self.acquired:
            return frozenset({self.token})
        return self.predecessors and self.predecessors | {self.token}


class LeaseKeeper:
    """Takes, renews and gives up leases. `hold` and `release` return at once; the thread does the work."""

    def __init__(self, leases: Leases, *, ttl_s: float = TTL_S) -> None:
        assert ttl_s > 0
        self._leases = leases
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._period_s = min(ttl_s / RENEWALS_PER_TTL, RENEW_S_MAX)
        self._lock = threading.Lock()
        self._holds: dict[tuple[str, str], _Hold] = {}
        self._released: list[_Hold] = []
        self._wake = threading.Event()
        self._stopping = False
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread, once; called on the event loop that is told about replaced workers."""
        assert self._thread is None
        assert not self._stopping
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)
        self._thread.start()

    async def stop(self) -> None:
        """Give up every lease and end the thread."""
        if self._thread is None:
            return
        self._stopping = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)
        self._thread = None

    def hold(self, group: str, worker_id: str, token: str, payload: bytes, on_replaced: Callable[[str], None]) -> None:
        """Take the lease, from whoever has it, and keep it until released.

        It succeeds what this keeper held for the worker; then a stranger that took that over keeps it.
        `on_replaced` is called on the event loop with the token of the incarnation that has the lease.
        """
        with self._lock:
            before = self._holds.get((group, worker_id))
            self._holds[group, worker_id] = _Hold(
                group=group,
                worker_id=worker_id,
                token=token,
                payload=payload,
                on_replaced=on_replaced,
                predecessors=frozenset() if before is None else before.tokens_of_successor(),
            )
        self._wake.set()

    def release(self, group: str, worker_id: str) -> None:
        """Give the worker's lease up, if it is held."""
        with self._lock:
            hold = self._holds.pop((group, worker_id), None)
            if hold is not None:
                self._released.append(hold)
        self._wake.set()

    def _run(self) -> None:
        while True:
            self._wake.clear()
            with self._lock:
                stopping = self._stopping
                if stopping:
                    self._released += self._holds.values()
                    self._holds.clear()
                released, self._released = self._released, []
                holds = list(self._holds.values())
            for hold in released:
                self._give_up(hold)
            if stopping:
                return
            now = time.monotonic()
            for hold in holds:
                if hold.due <= now:
                    self._tend(hold)
            wait_s = min((hold.due for hold in holds), default=now + self._period_s) - time.monotonic()
            self._wake.wait(max(0.0, wait_s))

    def _give_up(self, hold: _Hold) -> None:
        try:
            self._leases.release(hold.group, hold.worker_id, hold.token)
        except LeaseError as error:
            logger.warning("lease of %s not released, it will run out: %s", hold.worker_id, error)

    def _tend(self, hold: _Hold) -> None:
        try:
            if hold.acquired:
                if not self._leases.renew(hold.group, hold.worker_id, hold.token, self._ttl_ms):
                    logger.warning("lease of %s was gone", hold.worker_id)
                    self._retake(hold)
            elif hold.predecessors:
                self._retake(hold)
            else:
                self._take(hold)
            hold.due = time.monotonic() + self._period_s
        except LeaseError as error:
            logger.warning("lease of %s not renewed, trying again: %s", hold.worker_id, error)
            hold.due = time.monotonic() + min(RETRY_S_MAX, self._period_s)

    def _take(self, hold: _Hold) -> None:
        self._leases.acquire(hold.group, hold.worker_id, hold.token, hold.payload, self._ttl_ms)
        hold.acquired = True

    def _retake(self, hold: _Hold) -> None:
        """Take it unless a stranger lives on it: two that took it from each other would go on for ever."""
        ours = hold.predecessors | {hold.token}
        for lease in self._leases.poll(hold.group):
            if lease.worker_id == hold.worker_id and lease.token not in ours and lease.expires_in_ms > 0:
                self._report(hold, lease.token)
                return
        self._take(hold)

    def _report(self, hold: _Hold, other: str) -> None:
        with self._lock:
            if self._holds.get((hold.group, hold.worker_id)) is not hold:
                return
            del self._holds[hold.group, hold.worker_id]
        assert self._loop is not None
        self._loop.call_soon_threadsafe(hold.on_replaced, other)
