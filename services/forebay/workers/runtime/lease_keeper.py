"""Lease renewal on a separate thread, so that a busy event loop does not look like a dead worker.

A lease only informs the owner; only the owner's event on the log is a fact. If a lease vanishes, the keeper acquires it
again. If another incarnation of the same worker has the lease, the keeper notifies the worker that it was replaced.
After an error of the lease store the keeper retries.
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
RENEW_S_MAX = 1.0  # even with a long TTL, a vanished lease is acquired again within this time
RETRY_S_MAX = 1.0  # maximum pause after an error of the lease store
# Each pause is shorter by a random part of up to this fraction. Otherwise workers that were started together, or whose
# calls an outage of the lease store delayed until one moment, would all call it at the same moments.
JITTER = 0.5


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
        """Return the tokens from which a later `hold` for the worker may take the lease; empty if it was never held."""
        if self.acquired:
            return frozenset({self.token})
        return self.predecessors and self.predecessors | {self.token}


class LeaseKeeper:
    """Acquires, renews and releases the leases of workers on a separate thread."""

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
        """Start the thread. Call this method once, on the event loop that runs the `on_replaced` callbacks."""
        assert self._ticker is None
        assert not self._stopping
        self._loop = asyncio.get_running_loop()
        self._ticker = runtime.start_ticker(self._step, "lease-keeper")

    async def stop(self) -> None:
        if self._ticker is None:
            return
        self._stopping = True
        self._ticker.wake()
        await self._ticker.ended()
        self._ticker = None

    def hold(self, group: str, worker_id: str, token: str, payload: bytes, on_replaced: Callable[[str], None]) -> None:
        """Make the thread acquire the lease of a worker, even from another process, and renew it until `release`.

        One case differs: this keeper has already had the lease of the worker with another token, and another process
        has taken the lease since then. That process keeps the lease, and the keeper calls `on_replaced` on the event
        loop, with the token of that process.
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
        with self._lock:
            hold = self._holds.pop((group, worker_id), None)
            if hold is not None:
                self._released.append(hold)
        self._tick()

    def _tick(self) -> None:
        if self._ticker is not None:
            self._ticker.wake()

    def _step(self) -> float | None:
        """Release and renew the leases that are due. Return the seconds until the next call, None after `stop`."""
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
            hold.due = runtime.monotonic_s() + _jittered(self._period_s)
        except LeaseError as error:
            logger.warning("cannot renew the lease of %s, will retry: %s", hold.worker_id, error)
            hold.due = runtime.monotonic_s() + _jittered(min(RETRY_S_MAX, self._period_s))

    def _take(self, hold: _Hold) -> None:
        self._leases.acquire(hold.group, hold.worker_id, hold.token, hold.payload, self._ttl_ms)
        hold.acquired = True

    def _retake(self, hold: _Hold) -> None:
        """Acquire the lease, unless another process holds it: two processes would take it from each other forever."""
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


def _jittered(pause_s: float) -> float:
    """Return a random pause between (1 - `JITTER`) * `pause_s` and `pause_s`."""
    return pause_s * (1 - JITTER * runtime.random_int(4) / (1 << 32))
