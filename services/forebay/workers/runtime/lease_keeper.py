"""Lease renewal on a separate thread, so that a busy event loop does not look like a dead worker.

A lease is a hint, not the truth: the log decides. A vanished lease is acquired again. If another incarnation of the
same worker holds it, the worker is notified that it was replaced. Store errors are retried.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from forebay import runtime
from forebay.transport.base import LeaseError, Leases

logger = logging.getLogger(__name__)

TTL_S = 3.0
RENEWALS_PER_TTL = 3  # two renewals may fail before the lease expires
RENEW_S_MAX = 1.0  # a vanished lease is acquired again this soon, independent of its TTL
RETRY_S_MAX = 1.0  # after an error, well before the next renewal


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
        """Return the tokens that a successor of this hold may take the lease from; empty if it never held the lease."""
        if self.acquired:
            return frozenset({self.token})
        return self.predecessors and self.predecessors | {self.token}


class LeaseKeeper:
    """Acquires, renews and releases leases. `hold` and `release` return at once; the thread does the work."""

    def __init__(self, leases: Leases, *, ttl_s: float = TTL_S) -> None:
        assert ttl_s > 0
        self._leases = leases
        self._ttl_ms = max(1, round(ttl_s * 1000))
        self._period_s = min(ttl_s / RENEWALS_PER_TTL, RENEW_S_MAX)
        self._lock = threading.Lock()
        self._holds: dict[tuple[str, str], _Hold] = {}
        self._released: list[_Hold] = []
        self._stopping = False
        self._ticker: runtime.Ticker | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread, once. Call it on the event loop that runs the `on_replaced` callbacks."""
        assert self._ticker is None
        assert not self._stopping
        self._loop = asyncio.get_running_loop()
        self._ticker = runtime.start_ticker(self._step, "lease-keeper")

    async def stop(self) -> None:
        """Release every lease and end the thread."""
        if self._ticker is None:
            return
        self._stopping = True
        self._ticker.wake()
        await self._ticker.ended()
        self._ticker = None

    def hold(self, group: str, worker_id: str, token: str, payload: bytes, on_replaced: Callable[[str], None]) -> None:
        """Acquire the lease, from any holder, and keep it until it is released.

        A new hold succeeds the earlier holds of this keeper for the worker. If another process has taken the lease from
        one of those, that process keeps it. `on_replaced` is then called on the event loop with the holder's token.
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
        self._tick()

    def release(self, group: str, worker_id: str) -> None:
        """Release the worker's lease, if this keeper holds it."""
        with self._lock:
            hold = self._holds.pop((group, worker_id), None)
            if hold is not None:
                self._released.append(hold)
        self._tick()

    def _tick(self) -> None:
        if self._ticker is not None:
            self._ticker.wake()

    def _step(self) -> float | None:
        """Release and renew what is due. Return the seconds until the next step, or None after `stop`."""
        with self._lock:
            stopping = self._stopping
            if stopping:
                self._released += self._holds.values()
                self._holds.clear()
            released, self._released = self._released, []
            holds = list(self._holds.values())
        for hold in released:
            self._release(hold)
        if stopping:
            return None
        now = runtime.monotonic_s()
        for hold in holds:
            if hold.due <= now:
                self._renew(hold)
        wait_s = min((hold.due for hold in holds), default=now + self._period_s) - runtime.monotonic_s()
        return max(0.0, wait_s)

    def _release(self, hold: _Hold) -> None:
        try:
            self._leases.release(hold.group, hold.worker_id, hold.token)
        except LeaseError as error:
            logger.warning("cannot release the lease of %s, it will expire: %s", hold.worker_id, error)

    def _renew(self, hold: _Hold) -> None:
        try:
            if hold.acquired:
                if not self._leases.renew(hold.group, hold.worker_id, hold.token, self._ttl_ms):
                    logger.warning("the lease of %s vanished; acquiring it again", hold.worker_id)
                    self._retake(hold)
            elif hold.predecessors:
                self._retake(hold)
            else:
                self._take(hold)
            hold.due = runtime.monotonic_s() + self._period_s
        except LeaseError as error:
            logger.warning("cannot renew the lease of %s, will retry: %s", hold.worker_id, error)
            hold.due = runtime.monotonic_s() + min(RETRY_S_MAX, self._period_s)

    def _take(self, hold: _Hold) -> None:
        self._leases.acquire(hold.group, hold.worker_id, hold.token, hold.payload, self._ttl_ms)
        hold.acquired = True

    def _retake(self, hold: _Hold) -> None:
        """Acquire the lease, unless another process holds it.

        Two processes would otherwise take it from each other forever.
        """
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
