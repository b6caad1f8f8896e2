"""Counts of the limits of API keys: the port `LimitStore`, and a store in the memory of one process.

Theory of operation. An ingress takes requests and tokens of a key in advance, spends them within a second, and gives
the rest back with its next call. The store counts what was taken in buckets of one second. `WINDOW_S` buckets cover any
60 s in which something can have been spent: the second of the bucket itself is incomplete, and so is the last one in
which the amount may be spent.

A store may lose its counts or return to older ones. A call has the totals that the ingress knew last. If they belong to
counts which the store has no longer, the totals become the minimum. The clock is that of the store. If it jumps back,
later buckets become current ones, so they count for at most one more window, and the day does not begin again.
"""

from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from forebay import runtime

WINDOW_S = 62
DAY_S = 86_400
LAPSE_S = 10  # requests in flight at an ingress that has not called for this time have ended
MEMBER_S = 3_600  # for which the last call of an ingress is recognised if it is repeated


class LimitsUnavailable(Exception):
    """The store cannot be reached, or rejects a call."""


class KeyLimits(NamedTuple):
    """Limits of an API key; 0 is no limit. `day` and `month` are tokens."""

    requests: int
    tokens: int
    in_flight: int
    day: int
    month: int


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
    requests: int = 0
    tokens: int = 0
    day: int = 0
    month: int = 0


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
    limits: KeyLimits
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
        in_flight: slots of all ingresses.
        first_requests_s: second of the oldest requests in the window, 0 for none; so is `first_tokens_s`.
    """

    known: Known
    granted_s: int
    requests: int
    tokens: int
    slots: int
    in_flight: int
    first_requests_s: int
    first_tokens_s: int


class LimitStore(Protocol):
    """Counts of all API keys. Each method raises LimitsUnavailable."""

    async def take(self, ask: Ask) -> Reply: ...

    async def beat(self, ingress: str) -> tuple[int, int]:
        """Note that an ingress runs. Return the generation of the store, and the number of ingresses."""
        ...

    async def close(self) -> None: ...


def month_start(day: int) -> int:
    """Return the first day of the month of a day, both as days since 1970 (Hinnant's `civil_from_days`)."""
    day_of_era = (day + 719_468) % 146_097
    year_of_era = (day_of_era - day_of_era // 1_460 + day_of_era // 36_524 - day_of_era // 146_096) // 365
    day_of_year = day_of_era - (365 * year_of_era + year_of_era // 4 - year_of_era // 100)
    return day - (day_of_year - (153 * ((5 * day_of_year + 2) // 153) + 2) // 5)


class _Member(NamedTuple):
    sequence: int
    at_s: int
    slots: int
    requests: int
    tokens: int


@dataclass(slots=True)
class KeyCounts:
    """Counts of one key. The script of `forebay.transport.redis.limits` has the same steps.

    Attributes:
        requests: requests by second; so are `tokens`.
        day: current day, as days since 1970; `month` is the first day of the month.
        base: requests, tokens, and those of the day and the month that count from before the generation.
    """

    generation: int = 0
    version: int = 0
    day: int = 0
    month: int = 0
    day_tokens: int = 0
    month_tokens: int = 0
    requests: dict[int, int] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)
    base: list[int] = field(default_factory=lambda: [0, 0, 0, 0])
    members: dict[str, _Member] = field(default_factory=dict)

    def take(self, ask: Ask, now_us: int) -> Reply:
        now = now_us // 1_000_000
        self._advance(now)
        known = ask.known
        if not self.generation or (known.generation == self.generation and known.version > self.version):
            self.generation = now_us
            self.base = [_total(self.requests), _total(self.tokens), self.day_tokens, self.month_tokens]
        if known.generation not in (0, self.generation):
            self._restore(known, now)
        mine = self.members.get(ask.ingress)
        if mine is None or mine.sequence != ask.sequence:
            for second, requests, tokens in ask.changes:
                self._add(min(second, now), now, requests, tokens)
            mine = self._grant(ask, now)
        others = sum(
            one.slots for name, one in self.members.items() if name != ask.ingress and now - one.at_s < LAPSE_S
        )
        slots = ask.slots
        if ask.limits.in_flight:
            slots = max(ask.in_flight, min(slots, ask.limits.in_flight - others))
        # The second of the grant stays that of the call, so that a repeated call gets the same reply.
        self.members[ask.ingress] = mine._replace(slots=slots)
        self.version += 1
        totals = (_total(self.requests), _total(self.tokens), self.day_tokens, self.month_tokens)
        reached = Known(self.generation, self.version, now, *totals)
        first = min(self.requests, default=0), min(self.tokens, default=0)
        return Reply(reached, mine.at_s, mine.requests, mine.tokens, slots, others + slots, *first)

    def _advance(self, now: int) -> None:
        day = now // DAY_S
        month = month_start(day)
        if day > self.day:
            self.day_tokens = self.base[2] = 0
        if month > self.month:
            self.month_tokens = self.base[3] = 0
        self.day, self.month = day, month
        for counts in (self.requests, self.tokens):
            for second in sorted(counts):
                if second <= now - WINDOW_S:
                    del counts[second]
                elif second > now:
                    counts[now] = counts.get(now, 0) + counts.pop(second)
        for name, one in list(self.members.items()):
            if now - one.at_s >= MEMBER_S:
                del self.members[name]
            elif one.at_s > now:
                self.members[name] = one._replace(at_s=now)

    def _restore(self, known: Known, now: int) -> None:
        """Make totals of an earlier generation the minimum."""
        second, base = min(known.at_s, now), self.base
        if second > now - WINDOW_S:
            for at, counts in enumerate((self.requests, self.tokens)):
                more = known[3 + at] - base[at]
                if more > 0:
                    counts[second] = counts.get(second, 0) + more
                    base[at] += more
        if second // DAY_S == self.day and known.day > base[2]:
            self.day_tokens += known.day - base[2]
            base[2] = known.day
        if second // DAY_S >= self.month and known.month > base[3]:
            self.month_tokens += known.month - base[3]
            base[3] = known.month

    def _grant(self, ask: Ask, now: int) -> _Member:
        limits = ask.limits
        requests, tokens = ask.requests, ask.tokens
        if limits.requests:
            requests = min(requests, max(0, limits.requests - _total(self.requests)))
        if limits.tokens:
            tokens = min(tokens, max(0, limits.tokens - _total(self.tokens)))
        if limits.day:
            tokens = min(tokens, max(0, limits.day - self.day_tokens))
        if limits.month:
            tokens = min(tokens, max(0, limits.month - self.month_tokens))
        self._add(now, now, requests, tokens)
        return _Member(ask.sequence, now, 0, requests, tokens)

    def _add(self, second: int, now: int, requests: int, tokens: int) -> None:
        if second > now - WINDOW_S:
            for counts, amount in ((self.requests, requests), (self.tokens, tokens)):
                counts[second] = counts.get(second, 0) + amount
                if not counts[second]:
                    del counts[second]
        if second // DAY_S == self.day:
            self.day_tokens = max(0, self.day_tokens + tokens)
        if second // DAY_S >= self.month:
            self.month_tokens = max(0, self.month_tokens + tokens)


def _total(counts: dict[int, int]) -> int:
    return max(0, sum(counts.values()))


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
