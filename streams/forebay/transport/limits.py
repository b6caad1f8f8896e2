"""Counts of the limits of API keys: the port `LimitStore`, and a store in the memory of one process.

Theory of operation. An ingress takes requests and tokens of a key in advance, spends them within a second, and gives
the rest back with its next call. The store counts what was taken in buckets of one second. `WINDOW_S` buckets cover any
60 s in which something can have been spent: the second of the bucket itself is incomplete, and so is the last one in
which the amount may be spent.

A store may lose its counts or return to older ones. A call has the totals that the ingress knew last. If they belong to
counts which the store has no longer, the totals become the minimum. The clock is that of the store. If it jumps back,
later buckets become current ones, so they count for at most one more window, and the day does not begin again.
"""

from datetime import UTC, datetime
from typing import NamedTuple, Protocol

import msgspec

from forebay import runtime

WINDOW_S = 62
DAY_S = 86_400
LAPSE_S = 10  # requests in flight at an ingress that has not called for this time have ended
MEMBER_S = 3_600  # for which the last call of an ingress is recognised if it is repeated
UNLIMITED = 1 << 50


class LimitsUnavailable(Exception):
    """The store cannot be reached, or rejects a call."""


class Amounts(NamedTuple):
    """Limits of an API key, what counts for them, or what is left of them. `day` and `month` are tokens."""

    requests: int = UNLIMITED
    tokens: int = UNLIMITED
    day: int = UNLIMITED
    month: int = UNLIMITED
    in_flight: int = UNLIMITED

    @property
    def tokens_max(self) -> int:
        """The lowest limit of tokens."""
        return min(self.tokens, self.day, self.month)

    def allow(self, tokens: int) -> bool:
        """Return whether another request with these tokens is within the limits."""
        return self.in_flight > 0 and self.requests > 0 and tokens <= self.tokens_max


NOTHING = Amounts(0, 0, 0, 0, 0)


class Known(NamedTuple):
    """Totals of a key at all ingresses after a call.

    Attributes:
        generation: identifies counts without a gap; 0 before the first call.
        version: number of calls that changed the counts of the generation.
        at_s: second of the store's clock.
    """

    generation: int = 0
    version: int = 0
    at_s: int = 0
    totals: Amounts = NOTHING

    def counting(self, at_s: int) -> tuple[bool, ...]:
        """Return which of the totals still count at a second of the store's clock."""
        second = min(self.at_s, at_s)
        is_recent, is_today = second > at_s - WINDOW_S, second // DAY_S == at_s // DAY_S
        return is_recent, is_recent, is_today, month_of(second) == month_of(at_s), is_recent


class Ask(NamedTuple):
    """A call of an ingress about one key.

    Attributes:
        sequence: number of the call. A repeated call with the same number has no further effect.
        requests: requests to take; so are `tokens`.
        in_flight: requests in flight at the ingress.
        slots: requests that the ingress wants to have in flight.
        changes: corrections of earlier amounts: their second, requests and tokens.
    """

    key_id: str
    ingress: str
    sequence: int
    limits: Amounts
    known: Known = Known()
    requests: int = 0
    tokens: int = 0
    in_flight: int = 0
    slots: int = 0
    changes: tuple[tuple[int, int, int], ...] = ()


class Reply(NamedTuple):
    """Result of a call, or of the earlier call with the same number.

    Attributes:
        granted_s: second in which the granted `requests` and `tokens` count.
        slots: requests that the ingress may have in flight.
        first_s: oldest second that counts in the window.
    """

    known: Known = Known()
    granted_s: int = 0
    requests: int = 0
    tokens: int = 0
    slots: int = 0
    first_s: int = 0


class LimitStore(Protocol):
    """Counts of all API keys. Each method raises LimitsUnavailable."""

    async def take(self, ask: Ask) -> Reply: ...

    async def beat(self, ingress: str) -> tuple[int, int]:
        """Note that an ingress runs. Return the generation of the store, and the number of ingresses."""
        ...

    async def close(self) -> None: ...


class _Member(NamedTuple):
    sequence: int
    at_s: int
    slots: int
    requests: int
    tokens: int


class KeyCounts(msgspec.Struct):
    """Counts of one key.

    Attributes:
        at_s: second up to which the counts were advanced.
        window: requests and tokens by second.
        day: tokens of the day of `at_s`; so are those of the `month`.
        restored: the part of the totals that counts from before the generation.
        members: the last call of each ingress.
    """

    generation: int = 0
    version: int = 0
    at_s: int = 0
    window: dict[int, tuple[int, int]] = {}
    day: int = 0
    month: int = 0
    restored: Amounts = NOTHING
    members: dict[str, _Member] = {}

    def take(self, ask: Ask, now_us: int) -> Reply:
        """Apply a call at a time of the store's clock."""
        now, known = now_us // 1_000_000, ask.known
        self.advance(now)
        if not self.generation or (known.generation == self.generation and known.version > self.version):
            self.generation, self.restored = now_us, self.totals()
        if known.generation not in (0, self.generation):
            self._restore(known)
        mine = self.members.pop(ask.ingress, None)
        if mine is None or mine.sequence != ask.sequence:
            for change in ask.changes:
                self.add(*change)
            left = Amounts(*(limit - total for limit, total in zip(ask.limits, self.totals(), strict=True)))
            requests, tokens = min(ask.requests, max(0, left.requests)), min(ask.tokens, max(0, left.tokens_max))
            self.add(now, requests, tokens)
            mine = _Member(ask.sequence, now, 0, requests, tokens)
        slots = max(ask.in_flight, min(ask.slots, ask.limits.in_flight - self.totals().in_flight))
        # The second of the grant stays that of the call, so that a repeated call gets the same reply.
        self.members[ask.ingress] = mine._replace(slots=slots)
        self.version += 1
        reached = Known(self.generation, self.version, now, self.totals())
        return Reply(reached, mine.at_s, mine.requests, mine.tokens, slots, self.first_s)

    @property
    def first_s(self) -> int:
        """Oldest second that counts in the window."""
        return min(self.window, default=self.at_s)

    def totals(self) -> Amounts:
        requests, tokens = (max(0, sum(amounts[at] for amounts in self.window.values())) for at in (0, 1))
        slots = sum(one.slots for one in self.members.values() if self.at_s - one.at_s < LAPSE_S)
        return Amounts(requests, tokens, self.day, self.month, slots)

    def advance(self, now: int) -> None:
        """Forget what does not count at a second any more."""
        if now // DAY_S > self.at_s // DAY_S:
            self.day, self.restored = 0, self.restored._replace(day=0)
        if month_of(now) > month_of(self.at_s):
            self.month, self.restored = 0, self.restored._replace(month=0)
        self.at_s = now
        window, self.window = self.window, {}
        for second, amounts in window.items():
            self._count(second, *amounts)
        self.members = {
            name: one._replace(at_s=min(one.at_s, now))
            for name, one in self.members.items()
            if now - one.at_s < MEMBER_S
        }

    def add(self, second: int, requests: int, tokens: int) -> None:
        """Count requests and tokens for the second in which they were taken."""
        self._count(second, requests, tokens)
        if second // DAY_S >= self.at_s // DAY_S:
            self.day = max(0, self.day + tokens)
        if month_of(second) >= month_of(self.at_s):
            self.month = max(0, self.month + tokens)

    def _count(self, second: int, requests: int, tokens: int) -> None:
        second = min(second, self.at_s)
        if second > self.at_s - WINDOW_S:
            had = self.window.pop(second, (0, 0))
            if (amounts := (had[0] + requests, had[1] + tokens)) != (0, 0):
                self.window[second] = amounts

    def _restore(self, known: Known) -> None:
        """Make the totals of an earlier generation the minimum, as far as they still count."""
        counted = zip(known.totals, known.counting(self.at_s), self.restored, strict=True)
        more = Amounts(*(max(0, total * counts - had) for total, counts, had in counted))
        self._count(known.at_s, more.requests, more.tokens)
        self.day, self.month = self.day + more.day, self.month + more.month
        self.restored = Amounts(*(had + added for had, added in zip(self.restored, more, strict=True)))


def month_of(at_s: int) -> tuple[int, int]:
    """Return the year and the month in UTC of a Unix time."""
    date = datetime.fromtimestamp(at_s, UTC)
    return date.year, date.month


class MemoryLimits:
    """Counts of the only ingress of a system. They end with the process."""

    def __init__(self) -> None:
        self._keys: dict[str, KeyCounts] = {}  # at most as many as there are API keys

    async def take(self, ask: Ask) -> Reply:
        return self._keys.setdefault(ask.key_id, KeyCounts()).take(ask, runtime.wall_us())

    async def beat(self, ingress: str) -> tuple[int, int]:
        del ingress
        return 1, 1

    async def close(self) -> None:
        """Do nothing."""
