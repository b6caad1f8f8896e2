"""Decide from polled leases whether their holders are alive, without I/O.

Next standing of a holder, by what a poll shows. A renewal changes the lease's deadline. Only observed time counts.

    standing   renewed  silent                absent                  released, replaced
    alive      alive    late after half a TTL vanished                lost
    late       alive    lost after one TTL    vanished                lost
    vanished   alive    lost after one TTL    lost after one TTL      lost
    excused    alive    late after one TTL    vanished after one TTL  lost

If more than half of the leases vanish between two polls, or none of several is renewed for half a TTL, Redis is faulty.
All affected holders are then excused for one TTL, once until their next renewal: a dead holder is lost after two TTLs.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from forebay.transport.base import Lease

TTL_UNKNOWN_MS = 30_000  # TTL of holders admitted by an older version, the longest default that a worker had


class Standing(StrEnum):
    ALIVE = "alive"
    LATE = "late"
    VANISHED = "vanished"
    EXCUSED = "excused"
    LOST = "lost"


DOUBTED = frozenset((Standing.LATE, Standing.VANISHED))


class Sign(StrEnum):
    """Result of one poll for one lease. `SILENT` is a lease that was not renewed since the previous poll."""

    RENEWED = "renewed"
    SILENT = "silent"
    ABSENT = "absent"
    RELEASED = "released"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Verdict:
    """State of a lease holder, with the reason for logs and events."""

    standing: Standing
    reason: str


class ObservedTime:
    """Measures how long the leases were readable: time between two successful polls in a row."""

    def __init__(self) -> None:
        self._read_s: float | None = None

    def read(self, now_s: float) -> int:
        """Return the milliseconds since the previous poll, 0 if that poll failed or this is the first."""
        before, self._read_s = self._read_s, now_s
        return 0 if before is None else max(0, round((now_s - before) * 1000))

    def failed(self) -> None:
        """Record a failed poll. The time since the previous poll and until the next poll does not count."""
        self._read_s = None


@dataclass(slots=True)
class _Account:
    """State of one lease holder. `silent_ms` is observed time; `deadline_ms` is None until the lease is seen."""

    token: str
    ttl_ms: int
    deadline_ms: int | None = None
    standing: Standing = Standing.ALIVE
    silent_ms: int = 0
    was_excused: bool = False  # since the last renewal

    def sign(self, lease: Lease | None) -> Sign:
        if lease is None:
            return Sign.ABSENT
        if lease.token != self.token:
            return Sign.REPLACED
        if lease.released:
            return Sign.RELEASED
        return Sign.SILENT if lease.deadline_ms == self.deadline_ms else Sign.RENEWED

    def renew(self, lease: Lease, observed_ms: int) -> None:
        """Apply a renewal since the previous poll, or the first sight of the lease."""
        self.ttl_ms = lease.ttl_ms
        # The clock of Redis narrows down the time of the renewal. It may account for at most the time between two
        # polls, or at first sight for at most half a TTL, which makes the holder late but not lost.
        bound_ms = self.ttl_ms // 2 if self.deadline_ms is None else min(observed_ms, self.ttl_ms // 2)
        self.silent_ms = max(0, min(lease.ttl_ms - lease.expires_in_ms, bound_ms))
        seen_late = self.deadline_ms is None and self.silent_ms >= self.ttl_ms / 2
        self.standing = Standing.LATE if seen_late else Standing.ALIVE
        self.deadline_ms = lease.deadline_ms
        self.was_excused = False

    def excuse(self) -> None:
        # A holder that this owner never saw stays suspect: it may have died before the whole cluster restarted.
        self.standing = Standing.EXCUSED if self.deadline_ms is not None else Standing.VANISHED
        self.silent_ms = 0
        self.was_excused = True

    def wait(self, sign: Sign, observed_ms: int) -> None:
        # Capping the step makes a loss take at least two polls, even if the owner was paused between them.
        self.silent_ms += min(observed_ms, self.ttl_ms // 2)
        match self.standing:
            case Standing.ALIVE if self.silent_ms >= self.ttl_ms / 2:
                self.standing = Standing.LATE
            case Standing.EXCUSED if self.silent_ms >= self.ttl_ms:
                absent = sign is Sign.ABSENT
                self.standing = Standing.VANISHED if absent else Standing.LATE
                self.silent_ms = 0 if absent else self.ttl_ms // 2
            case Standing.LATE | Standing.VANISHED if self.silent_ms >= self.ttl_ms:
                self.standing = Standing.LOST
            case _:
                pass

    def vanish(self) -> None:
        self.standing = Standing.VANISHED
        self.silent_ms = 0


class LeaseJudge:
    """Judges the workers or the ingresses of one group. `faults` counts how often most leases failed at once."""

    def __init__(self) -> None:
        self.faults = 0
        self._accounts: dict[str, _Account] = {}

    def add(self, name: str, token: str, ttl_ms: int, lease: Lease | None = None) -> None:
        """Add a holder, with its lease if that lease was just read. A `ttl_ms` of 0 is unknown."""
        account = self._accounts[name] = _Account(token, ttl_ms or TTL_UNKNOWN_MS)
        if lease is not None:
            account.renew(lease, 0)

    def remove(self, name: str) -> None:
        del self._accounts[name]

    def poll(self, leases: Mapping[str, Lease], observed_ms: int) -> dict[str, Verdict]:
        """Return the verdict on each holder. `observed_ms` is the time since the previous poll, 0 if it failed."""
        signs = {name: account.sign(leases.get(name)) for name, account in self._accounts.items()}
        vanished = self._note_vanished(signs)
        verdicts = {}
        for name, account in self._accounts.items():
            lease, sign = leases.get(name), signs[name]
            if sign is Sign.RENEWED:
                assert lease is not None
                account.renew(lease, observed_ms)
            elif sign in (Sign.RELEASED, Sign.REPLACED):
                account.standing = Standing.LOST
            elif name not in vanished:
                account.wait(sign, observed_ms)
            verdicts[name] = Verdict(account.standing, _reason(account, sign))
        self._excuse_silent(signs, verdicts)
        return verdicts

    def _note_vanished(self, signs: Mapping[str, Sign]) -> set[str]:
        """Return the holders whose lease just vanished. Excuse them if most leases vanished, else mark them."""
        accounts = self._accounts
        doubted = (Standing.VANISHED, Standing.EXCUSED)
        new = {name for name, sign in signs.items() if sign is Sign.ABSENT and accounts[name].standing not in doubted}
        present = sum(sign not in (Sign.RELEASED, Sign.REPLACED) for sign in signs.values())
        together = 2 * len(new) > present
        self.faults += together
        for name in new:
            if together and not accounts[name].was_excused:
                accounts[name].excuse()
            else:
                accounts[name].vanish()
        return new

    def _excuse_silent(self, signs: Mapping[str, Sign], verdicts: dict[str, Verdict]) -> None:
        """Excuse all holders if several leases remain and none of them was renewed for half a TTL."""
        left = {name: self._accounts[name] for name, sign in signs.items() if sign in (Sign.RENEWED, Sign.SILENT)}
        others_absent = any(sign is Sign.ABSENT for sign in signs.values())
        if len(left) < 2 or others_absent:
            return
        if all(account.standing is Standing.LATE and not account.was_excused for account in left.values()):
            self.faults += 1
            for name, account in left.items():
                account.excuse()
                verdicts[name] = Verdict(account.standing, _reason(account, signs[name]))


def _reason(account: _Account, sign: Sign) -> str:
    ttl_ms = account.ttl_ms
    if sign is Sign.RELEASED:
        return "its lease was released"
    if sign is Sign.REPLACED:
        return "another incarnation took over its lease"
    match account.standing:
        case Standing.ALIVE:
            return f"its lease of {ttl_ms} ms is renewed"
        case Standing.EXCUSED:
            return "its lease failed at once with most other leases, which indicates a fault of Redis"
        case Standing.LATE:
            return f"its lease of {ttl_ms} ms was not renewed for {account.silent_ms} ms"
        case Standing.VANISHED:
            return f"its lease vanished; the worker has {ttl_ms} ms to acquire it again"
        case Standing.LOST:
            outcome = "vanished and was not acquired again" if sign is Sign.ABSENT else "expired"
            return f"its lease of {ttl_ms} ms {outcome}"
