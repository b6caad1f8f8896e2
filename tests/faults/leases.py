"""In-memory store of leases with a fault model, and the port `Leases` of one process on it."""

from collections.abc import Callable
from dataclasses import dataclass

from forebay.transport.base import Lease, LeaseError
from tests.faults.broker import Faults
from tests.faults.loop import NS_PER_S, VirtualLoop


@dataclass(slots=True)
class _Entry:
    token: str
    payload: bytes
    ttl_ms: int
    deadline_ms: int
    released: bool = False


class LeaseStore:
    """Leases of all groups, as in one Redis server with a clock of its own.

    Attributes:
        down: whether the store answers no call.
        skew_ms: milliseconds by which its clock is ahead. It may jump.
        on_forget: called before a router deletes a lease, with its holder, its token, the router, and whether the lease
            has expired.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.down = False
        self.skew_ms = 0
        self.on_forget: Callable[[str, str, str, bool], None] = lambda *_: None
        self._loop = loop
        self._groups: dict[tuple[str, str], dict[str, _Entry]] = {}
        self._announced: dict[str, int] = {}

    def now_ms(self) -> int:
        """Return the clock of the store in milliseconds."""
        return self._loop.now_ns * 1_000 // NS_PER_S + self.skew_ms

    def entries(self, kind: str, group: str) -> dict[str, _Entry]:
        """Return the leases of a group by name of the holder."""
        return self._groups.setdefault((kind, group), {})

    def flush(self) -> None:
        """Forget everything, as a Redis server without persistence does when it restarts."""
        self._groups.clear()
        self._announced.clear()

    def expire(self, kind: str, group: str, name: str) -> bool:
        """Make a lease expire at once. Return whether there was one."""
        entry = self.entries(kind, group).get(name)
        if entry is None:
            return False
        entry.deadline_ms = self.now_ms() - 1
        return True

    def announce(self, group: str, ttl_ms: int) -> None:
        """Count a group as one with leases for `ttl_ms`."""
        self._announced[group] = self.now_ms() + ttl_ms

    def groups(self) -> list[str]:
        """Return each group with an unexpired lease or announcement, sorted."""
        now_ms = self.now_ms()
        found = {group for group, deadline_ms in self._announced.items() if deadline_ms > now_ms}
        for (kind, group), entries in self._groups.items():
            if kind == "worker" and any(entry.deadline_ms > now_ms for entry in entries.values()):
                found.add(group)
        return sorted(found)


class VirtualLeases:
    """The port `Leases` for one process. Every call may fail before or after it had its effect."""

    def __init__(
        self, store: LeaseStore, faults: Faults, is_cut: Callable[[], bool], kind: str = "worker", process: str = ""
    ) -> None:
        self._process = process
        self._store = store
        self._faults = faults
        self._is_cut = is_cut
        self._kind = kind

    def acquire(self, group: str, worker_id: str, token: str, payload: bytes, ttl_ms: int) -> None:
        self._reach()
        deadline_ms = self._store.now_ms() + ttl_ms
        self._store.entries(self._kind, group)[worker_id] = _Entry(token, payload, ttl_ms, deadline_ms)
        self._respond()

    def renew(self, group: str, worker_id: str, token: str, ttl_ms: int) -> bool:
        self._reach()
        entry = self._store.entries(self._kind, group).get(worker_id)
        held = entry is not None and entry.token == token and not entry.released
        if entry is not None and held:
            entry.ttl_ms, entry.deadline_ms = ttl_ms, self._store.now_ms() + ttl_ms
        self._respond()
        return held

    def release(self, group: str, worker_id: str, token: str) -> None:
        self._reach()
        entry = self._store.entries(self._kind, group).get(worker_id)
        if entry is not None and entry.token == token:
            entry.released, entry.deadline_ms = True, self._store.now_ms() - 1
        self._respond()

    def poll(self, group: str) -> list[Lease]:
        self._reach()
        now_ms = self._store.now_ms()
        self._respond()
        return [
            Lease(
                worker_id=name,
                token=entry.token,
                payload=entry.payload,
                expires_in_ms=entry.deadline_ms - now_ms,
                ttl_ms=entry.ttl_ms,
                deadline_ms=entry.deadline_ms,
                released=entry.released,
            )
            for name, entry in sorted(self._store.entries(self._kind, group).items())
        ]

    def forget(self, group: str, worker_id: str, token: str) -> None:
        self._reach()
        entries = self._store.entries(self._kind, group)
        if worker_id in entries and entries[worker_id].token == token:
            has_expired = entries[worker_id].deadline_ms <= self._store.now_ms()
            self._store.on_forget(worker_id, token, self._process, has_expired)
            del entries[worker_id]
        self._respond()

    def groups(self) -> list[str]:
        self._reach()
        self._respond()
        return self._store.groups()

    def announce(self, group: str, ttl_ms: int) -> None:
        self._reach()
        self._store.announce(group, ttl_ms)
        self._respond()

    def _reach(self) -> None:
        """Fail before the call has an effect. Raises LeaseError."""
        if self._store.down or self._is_cut() or self._faults.take("lease_error"):
            raise LeaseError("the lease store cannot be reached (injected)")

    def _respond(self) -> None:
        """Fail after the call had its effect. Raises LeaseError."""
        if self._faults.take("lease_response_lost"):
            raise LeaseError("the lease store did not respond in time (injected)")
