"""Limits of API keys: admits or rejects a prepared request, and counts it, together with all other ingresses.

Theory of operation. A round trip to the store per request would cost too much. So an ingress takes a chunk of requests
and tokens in advance, and spends it within `CHUNK_S` without the store. A request takes its prompt and `max_tokens`,
and gives back at its end what it has not used, with the next round trip. Every second the ingress reads the totals of
the keys in use.

Without the store an ingress counts alone: it admits its share of what the last totals left, for the rest of the window,
and later a share of the limit. An ingress that does not know the totals of a key admits a share of a tenth. When the
store is back, the ingress writes its counts, and still counts alone until the other ingresses have written, too.
"""

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from forebay import runtime
from forebay.events.keys import KeySet
from forebay.ingress.errors import ApiError
from forebay.ingress.metrics import IngressMetrics
from forebay.transport.limits import (
    DAY_S,
    NOTHING,
    UNLIMITED,
    WINDOW_S,
    AllCounts,
    Amounts,
    Ask,
    Counts,
    LimitStore,
    LimitsUnavailable,
    Reply,
    pack,
    total,
)

CHUNK_S = 1.0
CHUNKS = 100  # a chunk is this part of the limit
CHUNK_MAX = 1 << 20  # more than an ingress spends
BEAT_S = 1.0
REJECT_S = 0.1  # a reply that leaves nothing is valid for this time, so that rejections cost no round trips
ANSWER_S = 0.25  # the store has failed if it takes longer
CURRENT_S = 3.0  # totals are read every second, so older ones may lack what other ingresses counted
RETURN_BEATS = 3  # until all ingresses have noticed that the store is back
UNKNOWN_PARTS = 10  # without known totals, all ingresses together admit one of these parts of a limit
RESET = b"%dm%ds" % divmod(WINDOW_S, 60)  # nothing that counts now counts later

logger = logging.getLogger(__name__)


@lru_cache(1_000)
def limits_of(event: KeySet) -> Amounts | None:
    """Return the limits of an API key, None if it has none."""
    limits = (
        event.requests_per_minute,
        event.tokens_per_minute,
        event.tokens_per_day,
        event.tokens_per_month,
        event.in_flight,
    )
    return Amounts(*(min(limit or UNLIMITED, UNLIMITED) for limit in limits)) if any(limits) else None


class Reservation:
    """What a request counts for its key until `end`, which may be called again without effect. Nothing without key."""

    def __init__(self, key: "_Key | None" = None, tokens: int = 0, second: int = 0) -> None:
        self._key = key  # None after the end
        self._tokens = tokens
        self._second = second
        if key is not None:
            key.in_flight += 1

    def end(self, tokens: int | None) -> None:
        """Count the tokens that the request has used; with None those that it reserved."""
        self._finish(0, 0 if tokens is None else tokens - self._tokens)

    def release(self) -> None:
        """Count nothing, because no worker got the request."""
        self._finish(-1, -self._tokens)

    def _finish(self, requests: int, tokens: int) -> None:
        key, self._key = self._key, None
        if key is not None:
            key.in_flight -= 1
            key.correct(self._second, requests, tokens)


class _Key:
    """One API key at this ingress.

    Attributes:
        lock: held during a call of the store.
        in_flight: requests in flight.
        counts: counts of this ingress. They are the truth, of which a store has a copy.
        known: counts of all ingresses, as the store replied last before it failed.
    """

    def __init__(self, key_id: str, limits: Amounts, ingress: str) -> None:
        self.limits = limits
        self.lock = asyncio.Lock()
        self.in_flight = 0
        self.counts = Counts()
        self.known: AllCounts = {}
        self._key_id = key_id
        self._ingress = ingress
        self._totals = NOTHING  # of `known`
        self._read_s = runtime.monotonic_s()  # time of `known`; so is `_second` on the store's clock
        self._second = int(runtime.wall_s())
        self._requests = self._tokens = 0  # granted and not spent
        self._written = 0  # version of `counts` that the store has

    def spend(self, tokens: int) -> Reservation | None:
        """Return the reservation of a request from what the store has granted, None if that is not enough."""
        is_current = runtime.monotonic_s() < self._read_s + CHUNK_S
        is_granted = is_current and self._requests and tokens <= self._tokens
        if not is_granted or self.in_flight >= self.counts.slots:
            return None
        self._requests -= 1
        self._tokens -= tokens
        return Reservation(self, tokens, self._second)

    def spend_alone(self, tokens: int) -> Reservation:
        """Return the reservation of a request that no store has granted."""
        second = self.counts.at_s
        self.correct(second, 1, tokens)
        return Reservation(self, tokens, second)

    def left(self) -> Amounts:
        """Return what the last reply of the store left, with what it granted to this ingress."""
        mine = (self._requests, self._tokens, self._tokens, self._tokens, self.counts.slots - self.in_flight)
        return Amounts(*(limit + own for limit, own in zip(self.limits.minus(self._totals), mine, strict=True)))

    def left_alone(self, failed_s: float, ingresses: int) -> Amounts:
        """Return what this ingress may count without the store, which failed at that time."""
        now_s = runtime.monotonic_s()
        for one in (self.counts, *self.known.values()):
            one.advance(self._second + int(now_s - self._read_s))
        known = total(self.known.values())
        if now_s < self._read_s + WINDOW_S:
            known = self._totals._replace(in_flight=known.in_flight)
        shares = self.limits.minus(known)
        if not self.known or failed_s - self._read_s >= CURRENT_S:
            unknown = Amounts(*(limit // UNKNOWN_PARTS for limit in self.limits))
            if now_s >= failed_s + WINDOW_S:  # nothing that was unknown counts per minute any more
                unknown = Amounts(day=unknown.day, month=unknown.month)
            shares = Amounts(*map(min, shares, unknown))
        read = total([self.known[self._ingress]]) if self.known else NOTHING
        own = self.counts.totals()._replace(in_flight=self.in_flight).minus(read)
        return Amounts(*(max(0, share) // ingresses for share in shares)).minus(own)

    def first_s(self) -> int:
        """Return the oldest second that counts in the window."""
        windows = [one.window for one in (self.counts, *self.known.values())]
        return min((second for window in windows for second in window), default=self.counts.at_s)

    def is_short(self, tokens: int) -> bool:
        """Return whether the last reply is so new that it also rejects another request."""
        is_new = runtime.monotonic_s() - self._read_s < REJECT_S and not self.is_changed
        return is_new and not self.left().allow(tokens)

    @property
    def is_changed(self) -> bool:
        """Whether the store lacks a change of the counts."""
        return self.counts.version != self._written

    def ask(self, tokens: int | None) -> Ask:
        """Return a call of the store, for a request with these tokens or for none.

        What is granted and not spent is given back.
        """
        self.correct(self._second, -self._requests, -self._tokens)
        self._requests = self._tokens = 0
        self.counts.version += 1
        packed = pack({**self.known, self._ingress: self.counts})
        limits, requests, slots = self.limits, 0, self.in_flight
        if tokens is not None:
            slots += _chunk(1, limits.in_flight)
            requests, tokens = _chunk(1, limits.requests), _chunk(tokens, limits.tokens_max)
        return Ask(self._key_id, self._ingress, limits, packed, requests, tokens or 0, self.in_flight, slots)

    def take(self, reply: Reply, began_s: float, *, is_alone: bool) -> None:
        """Take the reply of a call that began at this time. While it counts alone, keep the counts from before."""
        mine = reply.counts[self._ingress]
        self._written = mine.version
        if is_alone:
            return
        self.known, self._totals = reply.counts, total(reply.counts.values())
        self._read_s, self._second = began_s, mine.at_s
        self._requests, self._tokens = reply.requests, reply.tokens
        self.counts.advance(mine.at_s)
        self.counts.add(mine.at_s, reply.requests, reply.tokens)
        self.counts.slots = mine.slots

    def correct(self, second: int, requests: int, tokens: int) -> None:
        """Change the counts for a second of the store's clock."""
        if requests or tokens:
            self.counts.add(second, requests, tokens)
            self.counts.version += 1


class LimitsOfKeys:
    """Applies the limits of all API keys at this ingress.

    Args:
        ingress: name of the ingress, which no other process has.
    """

    def __init__(self, store: LimitStore, ingress: str, metrics: IngressMetrics) -> None:
        self._store = store
        self._ingress = ingress
        self._keys: dict[str, _Key] = {}  # by id; at most as many as there are API keys
        self._in_use: set[_Key] = set()  # whose totals are read
        self._ingresses = 1
        self._failed_s: float | None = None  # time at which the store failed
        self._returned = 0  # beats since the store is back
        metrics.limits_degraded.set_function(lambda: self._failed_s is not None)

    async def admit(self, event: KeySet, prompt_tokens: int, max_tokens: int) -> Reservation:
        """Return the reservation of a request.

        Raises ApiError: 429 if a limit is reached, 400 if the request can never be admitted.
        """
        key = self._key(event)
        if key is None:
            return Reservation()
        tokens, most = prompt_tokens + max_tokens, key.limits.tokens_max
        if tokens > most:
            text = f"{prompt_tokens:,} prompt tokens and {max_tokens:,} output tokens exceed the {most:,} tokens"
            remedy = "shorten the prompt or set a lower max_tokens"
            raise ApiError(400, "limit_exceeded", f"{text} of the API key; {remedy}", "max_tokens")
        if (found := await self._spend(key, tokens)) is not None:
            return found
        left = self._left(key)
        if self._failed_s is None or not left.allow(tokens):
            raise _shortage(key.limits, left, tokens, key.counts.at_s, key.first_s())
        return key.spend_alone(tokens)

    async def _spend(self, key: _Key, tokens: int) -> Reservation | None:
        """Return the reservation of a request, None if the store does not grant enough or fails."""
        if not key.lock.locked() and (found := key.spend(tokens)) is not None:
            return found
        async with key.lock:
            found = key.spend(tokens)
            if found is None and self._failed_s is None and not key.is_short(tokens):
                await self._call(key, tokens)
                found = key.spend(tokens)
            return found

    def _key(self, event: KeySet) -> _Key | None:
        """Return the state of an API key, None if it has no limits."""
        limits, key = limits_of(event), self._keys.get(event.key_id)
        if limits is None:
            return None
        if key is None:
            key = self._keys[event.key_id] = _Key(event.key_id, limits, self._ingress)
        key.limits = limits
        return key

    def _left(self, key: _Key) -> Amounts:
        """Return what is left of the limits of a key at this ingress."""
        return key.left() if self._failed_s is None else key.left_alone(self._failed_s, self._ingresses)

    async def _call(self, key: _Key, tokens: int | None = None) -> None:
        """Call the store for a key."""
        self._in_use.add(key)
        began_s = runtime.monotonic_s()
        try:
            async with asyncio.timeout(ANSWER_S):
                reply = await self._store.take(key.ask(tokens))
        except (TimeoutError, LimitsUnavailable) as error:
            self._fail(error)
        else:
            key.take(reply, began_s, is_alone=self._failed_s is not None)

    def _fail(self, error: Exception) -> None:
        self._returned = 0
        if self._failed_s is None:
            reason = str(error) or f"no response in {ANSWER_S:g} s"
            logger.warning("limits of API keys are counted by this ingress alone, because Redis fails: %s", reason)
            self._failed_s = runtime.monotonic_s()

    async def run(self) -> None:
        """Read the totals of keys in use every second, until cancelled."""
        while True:
            await asyncio.sleep(BEAT_S)
            await self.beat()

    async def beat(self) -> None:
        """Read the totals of keys in use. If the store has failed or lost them, write those of all keys."""
        try:
            async with asyncio.timeout(ANSWER_S):
                is_new, self._ingresses = await self._store.beat(self._ingress)
        except (TimeoutError, LimitsUnavailable) as error:
            self._fail(error)
            return
        if self._failed_s is not None or is_new:
            self._in_use.update(self._keys.values())
        self._returned += 1
        for key in list(self._in_use):
            async with key.lock:
                await self._call(key)
            if not self._returned:  # the store has failed again
                return
            if not key.in_flight and not key.is_changed:
                self._in_use.discard(key)
        if self._failed_s is not None and self._returned >= RETURN_BEATS:
            self._failed_s = None
            logger.warning("limits of API keys are counted by Redis again")

    def headers(self, event: KeySet) -> list[tuple[bytes, bytes]]:
        """Return the headers about the limits of a key per minute, as OpenAI sends them."""
        key = self._key(event)
        if key is None:
            return []
        found, left = [], self._left(key)
        for name, limit, rest in zip((b"requests", b"tokens"), key.limits, left, strict=False):
            if limit < UNLIMITED:
                found += [
                    (b"x-ratelimit-limit-" + name, b"%d" % limit),
                    (b"x-ratelimit-remaining-" + name, b"%d" % max(0, min(rest, limit))),
                    (b"x-ratelimit-reset-" + name, b"0s" if rest >= limit else RESET),
                ]
        return found


def _chunk(needed: int, limit: int) -> int:
    return max(needed, min(limit // CHUNKS, CHUNK_MAX))


def _shortage(limits: Amounts, left: Amounts, tokens: int, at_s: int, first_s: int) -> ApiError:
    """Return the error of a request for which not enough is left. `first_s` is the oldest second in the window."""
    date = datetime.fromtimestamp(at_s, UTC)
    month_end = (date.replace(day=1) + timedelta(days=31)).replace(day=1, hour=0, minute=0, second=0)
    month_s, day_s, window_s = round(month_end.timestamp()) - at_s, DAY_S - at_s % DAY_S, first_s + WINDOW_S - at_s
    causes = (
        (left.in_flight < 1, 1, "in_flight_limit", f"have {limits.in_flight:,} requests in flight"),
        (tokens > left.month, month_s, "insufficient_quota", f"use {limits.month:,} tokens per month in UTC"),
        (tokens > left.day, day_s, "insufficient_quota", f"use {limits.day:,} tokens per day in UTC"),
        (left.requests < 1, window_s, "rate_limit_exceeded", f"send {limits.requests:,} requests per minute"),
        (
            True,
            window_s,
            "rate_limit_exceeded",
            f"use {limits.tokens:,} tokens per minute; a request counts with max_tokens",
        ),
    )
    after_s, code, text = next(cause[1:] for cause in causes if cause[0])
    return ApiError(429, code, f"the API key may {text}; try again in {after_s:,} s", retry_after_s=after_s)
