"""Decide from polled leases whether their holders are alive. Pure: leases and observed time go in, verdicts come out.

An account per holder counts, by the owner's clock, the readable time without a renewal (a change of the deadline):

    standing   renewed  silent                absent                  released, replaced
    alive      alive    late after half a TTL vanished                lost
    late       alive    lost after one TTL    vanished                lost
    vanished   alive    lost after one TTL    lost after one TTL      lost
    excused    alive    late after one TTL    vanished after one TTL  lost

If more than half of the leases vanish between two polls, or none of several is renewed for half a TTL, that is a fault
of Redis. Their holders are excused for one TTL, once per renewal, so real deaths are noticed after two.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from forebay.transport.base import Lease

TTL_UNKNOWN_MS = 30_000  # of a holder that an older owner admitted: no worker has had a longer one by default


class Standing(StrEnum):
    """What the leases say about their holder."""

    ALIVE = "alive"
    LATE = "late"
    VANISHED = "vanished"
    EXCUSED = "excused"
    LOST = "lost"


DOUBTED = frozenset((Standing.LATE, Standing.VANISHED))


class Sign(StrEnum):
    """What one poll shows of a lease."""

    RENEWED = "renewed"
    SILENT = "silent"
    ABSENT = "absent"
    RELEASED = "released"
    REPLACED = "replaced"


@dataclass(frozen=True, slots=True)
class Verdict:
    """The standing of a holder and the reason, for people."""

    standing: Standing
    reason: str


class ObservedTime:
    """Measures the time in which leases could be read. Times are in seconds, on the caller's monotonic clock."""

    def __init__(self) -> None:
        self._read_s: float | None = None

    def read(self, now_s: float) -> int:
        """Return the milliseconds since the previous poll; 0 if that failed, or if this is the first."""
        before, self._read_s = self._read_s, now_s
        return 0 if before is None else max(0, round((now_s - before) * 1000))

    def failed(self) -> None:
        """Note that a poll failed: the time around it does not count."""
        self._read_s = None


@dataclass(slots=True)
class _Account:
    """What is known of one holder. `silent_ms` is observed time; `deadline_ms` is None until the lease is seen."""

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
        """The lease was renewed since the previous poll, or is seen for the first time."""
        self.ttl_ms = lease.ttl_ms
        # Redis' clock narrows down when that was. It is trusted for no more than the time between two polls, or at
        # first sight for a suspicion.
        bound_ms = self.ttl_ms // 2 if self.deadline_ms is None else min(observed_ms, self.ttl_ms // 2)
        self.silent_ms = max(0, min(lease.ttl_ms - lease.expires_in_ms, bound_ms))
        seen_late = self.deadline_ms is None and self.silent_ms >= self.ttl_ms / 2
        self.standing = Standing.LATE if seen_late else Standing.ALIVE
        self.deadline_ms = lease.deadline_ms
        self.was_excused = False

    def excuse(self) -> None:
        # A holder that this owner never saw stays in doubt: it may be dead since before a restart of everything.
        self.standing = Standing.EXCUSED if self.deadline_ms is not None else Standing.VANISHED
        self.silent_ms = 0
        self.was_excused = True

    def wait(self, sign: Sign, observed_ms: int) -> None:
        """The lease is silent or absent for this much longer."""
        # A loss takes at least two polls, however long the owner itself was paused between them.
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
    """Judges the leases of one group's holders, by name.

    Attributes:
        faults: How often the leases failed together.
    """

    def __init__(self) -> None:
        self.faults = 0
        self._accounts: dict[str, _Account] = {}

    def add(self, name: str, token: str, ttl_ms: int, lease: Lease | None = None) -> None:
        """Begin to judge a holder, whose `lease` was just read if it was admitted by it."""
        account = self._accounts[name] = _Account(token, ttl_ms or TTL_UNKNOWN_MS)
        if lease is not None:
            account.renew(lease, 0)

    def remove(self, name: str) -> None:
        """Stop judging a holder."""
        del self._accounts[name]

    def poll(self, leases: Mapping[str, Lease], observed_ms: int) -> dict[str, Verdict]:
        """Judge every holder by one poll; `observed_ms` is the time since the previous readable one."""
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
        """Mark those whose lease was there and is not: alone in doubt, excused if most leases went with it."""
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
        """Excuse all holders if several are left and none of them renewed its lease for half a TTL."""
        left = {name: self._accounts[name] for name, sign in signs.items() if sign in (Sign.RENEWED, Sign.SILENT)}
        others_absent = any(sign is Sign.ABSENT for sign in signs.values())
        if len(left) < 2 or others_absent:
            return
        if all(one.standing is Standing.LATE and not one.was_excused for one in left.values()):
            self.faults += 1
            for name, account in left.items():
                account.excuse()
                verdicts[name] = Verdict(account.standing, _reason(account, signs[name]))


def _reason(account: _Account, sign: Sign) -> str:
    ttl_ms = account.ttl_ms
    if sign is Sign.RELEASED:
        return "its lease was released"
    if sign is Sign.REPLACED:
        return "another incarnation took its name"
    match account.standing:
        case Standing.ALIVE:
            return f"its lease of {ttl_ms} ms is renewed"
        case Standing.EXCUSED:
            return "its lease failed together with the others, which is a fault of Redis"
        case Standing.LATE:
            return f"its lease of {ttl_ms} ms was not renewed for {account.silent_ms} ms"
        case Standing.VANISHED:
            return f"its lease vanished; it has {ttl_ms} ms to take it again"
        case Standing.LOST:
            what = "vanished and was not taken again" if sign is Sign.ABSENT else "ran out"
            return f"its lease of {ttl_ms} ms {what}"
