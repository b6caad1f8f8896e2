"""Counts of the limits of API keys: the port `LimitStore`, and a store in the memory of one process.

Theory of operation. Each ingress has counts of its own for every key, and a store has the counts of all ingresses. An
ingress takes requests and tokens of a key in advance, spends them within a second, and removes the rest from its counts
before its next call. Counts have buckets of one second. `WINDOW_S` buckets cover any 60 s in which something can have
been spent: the second of the bucket itself is incomplete, and so is the last one in which the amount may be spent.

A call contains all counts that the ingress knows, and of each ingress the newest version counts. So a call without a
reply needs no repetition, and a store that has lost its counts gets them back. The clock is that of the store. If it
jumps back, later buckets become current ones, so they count for at most one more window, and the day does not begin
again.
"""

from collections.abc import Collection
from datetime import UTC, datetime
from functools import lru_cache
from typing import Annotated, NamedTuple, Protocol

import msgspec

from forebay import runtime
from forebay.events.codec import MALFORMED

WINDOW_S = 62
DAY_S = 86_400
LAPSE_S = 10  # requests in flight at an ingress that has not called for this time have ended
MEMBER_S = 3_600  # for which the version of an ingress is known, longer than any of its calls takes
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

    def minus(self, other: "Amounts") -> "Amounts":
        return Amounts(*(one - less for one, less in zip(self, other, strict=True)))


NOTHING = Amounts(0, 0, 0, 0, 0)
Second = Annotated[int, msgspec.Meta(ge=0, lt=1 << 37)]  # Unix time


class Counts(msgspec.Struct):
    """What one ingress counts for one key.

    Attributes:
        version: higher in each call of the ingress.
        called_s: second of the last call.
        at_s: second up to which the counts were advanced.
        window: requests and tokens by second.
        day: tokens of the day of `at_s`; so are those of the `month`.
        slots: requests that the ingress may have in flight.
    """

    version: int = 0
    called_s: Second = 0
    at_s: Second = 0
    window: dict[int, tuple[int, int]] = {}
    day: int = 0
    month: int = 0
    slots: int = 0

    def advance(self, now: int) -> None:
        """Forget what does not count at a second any more."""
        if now // DAY_S > self.at_s // DAY_S:
            self.day = 0
        if month_of(now) > month_of(self.at_s):
            self.month = 0
        self.at_s, self.called_s = now, min(self.called_s, now)
        window, self.window = self.window, {}
        for second, amounts in window.items():
            self._count(second, *amounts)

    def add(self, second: int, requests: int, tokens: int) -> None:
        """Count requests and tokens for the second in which they were taken."""
        self._count(second, requests, tokens)
        if second // DAY_S >= self.at_s // DAY_S:
            self.day += tokens
        if month_of(second) >= month_of(self.at_s):
            self.month += tokens

    def totals(self) -> Amounts:
        requests, tokens = (max(0, sum(amounts[at] for amounts in self.window.values())) for at in (0, 1))
        slots = self.slots if self.at_s - self.called_s < LAPSE_S else 0
        return Amounts(requests, tokens, self.day, self.month, slots)

    def _count(self, second: int, requests: int, tokens: int) -> None:
        second = min(second, self.at_s)
        if second > self.at_s - WINDOW_S:
            had = self.window.pop(second, (0, 0))
            if (amounts := (had[0] + requests, had[1] + tokens)) != (0, 0):
                self.window[second] = amounts


AllCounts = dict[str, Counts]  # of a key, by ingress


class Ask(NamedTuple):
    """A call of an ingress about one key.

    Attributes:
        counts: packed `AllCounts` that the ingress knows. Its own ones have a new version.
        requests: requests to take; so are `tokens`.
        in_flight: requests in flight at the ingress.
        slots: requests that the ingress wants to have in flight.
    """

    key_id: str
    ingress: str
    limits: Amounts
    counts: bytes
    requests: int = 0
    tokens: int = 0
    in_flight: int = 0
    slots: int = 0


class Reply(NamedTuple):
    """Counts of all ingresses after a call, and the requests and tokens that it took, which count in its second."""

    counts: AllCounts
    requests: int
    tokens: int


class LimitStore(Protocol):
    """Counts of all API keys. Each method raises LimitsUnavailable."""

    async def take(self, ask: Ask) -> Reply: ...

    async def beat(self, ingress: str) -> tuple[bool, int]:
        """Note that an ingress runs. Return whether the store did not know this, and the number of ingresses."""
        ...


def pack(counts: AllCounts) -> bytes:
    return msgspec.msgpack.encode(counts)


def _unpacked(packed: bytes) -> AllCounts:
    try:
        return msgspec.msgpack.decode(packed, type=AllCounts)
    except MALFORMED:  # the first call, or a value of another program: the ingresses write their counts again
        return {}


def take(packed: bytes, ask: Ask, now: int) -> Reply:
    """Apply a call to the packed counts of a key, at a second of the store's clock. Raises LimitsUnavailable."""
    counts, given = _unpacked(packed), _unpacked(ask.counts)
    if ask.ingress in counts and counts[ask.ingress].version >= given[ask.ingress].version:
        raise LimitsUnavailable("a later call of this ingress came first")
    given[ask.ingress].called_s = now
    counts |= {name: one for name, one in given.items() if name not in counts or counts[name].version < one.version}
    for name, one in list(counts.items()):
        one.advance(now)
        if now - one.called_s >= MEMBER_S and not any(one.totals()):
            del counts[name]
    mine = counts[ask.ingress]
    mine.slots = 0
    left = ask.limits.minus(total(counts.values()))
    requests, tokens = min(ask.requests, max(0, left.requests)), min(ask.tokens, max(0, left.tokens_max))
    mine.add(now, requests, tokens)
    mine.slots = max(ask.in_flight, min(ask.slots, left.in_flight))
    return Reply(counts, requests, tokens)


def total(counts: Collection[Counts]) -> Amounts:
    """Return the totals of all ingresses."""
    return Amounts(*(map(sum, zip(*(one.totals() for one in counts), strict=True)))) if counts else NOTHING


@lru_cache(1_000)
def month_of(at_s: int) -> tuple[int, int]:
    """Return the year and the month in UTC of a Unix time."""
    date = datetime.fromtimestamp(at_s, UTC)
    return date.year, date.month


class MemoryLimits:
    """Counts of the only ingress of a system. They end with the process."""

    def __init__(self) -> None:
        self._packed: dict[str, bytes] = {}  # by id of the key; at most as many as there are API keys

    async def take(self, ask: Ask) -> Reply:
        reply = take(self._packed.get(ask.key_id, b""), ask, int(runtime.wall_s()))
        self._packed[ask.key_id] = pack(reply.counts)
        return reply

    async def beat(self, ingress: str) -> tuple[bool, int]:
        del ingress
        return False, 1
