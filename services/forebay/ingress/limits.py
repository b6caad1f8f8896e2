"""Limits of API keys: admits or rejects a prepared request, and counts it, together with all other ingresses.

Theory of operation. A round trip to the store per request would cost too much. So an ingress takes a chunk of requests
and tokens in advance, and spends it within `CHUNK_S` without the store. A request takes its prompt and `max_tokens`,
and gives back at its end what it has not used, with the next round trip. Every second the ingress reads the totals of
the keys in use.

Without the store an ingress counts alone: it admits a share of what its last totals left for the rest of the window,
and later a share of the limit. An ingress that does not know the totals of a key admits a share of a tenth. When the
store is back, the ingress writes what it counted, and still counts alone until the other ingresses have written, too.
"""

import asyncio
import logging
import math
from datetime import UTC, datetime, timedelta
from functools import lru_cache

from forebay import runtime
from forebay.events.keys import KeySet
from forebay.ingress.errors import ApiError
from forebay.ingress.metrics import IngressMetrics
from forebay.transport.limits import (
    DAY_S,
    UNLIMITED,
    WINDOW_S,
    Amounts,
    Ask,
    KeyCounts,
    LimitStore,
    LimitsUnavailable,
    Reply,
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
CHANGES_MAX = 256  # seconds with corrections per key; the oldest ones are joined

logger = logging.getLogger(__name__)


@lru_cache(1_000)
def limits_of(event: KeySet | None) -> Amounts | None:
    """Return the limits of an API key, None if it has none."""
    if event is None:
        return None
    limits = (
        event.requests_per_minute,
        event.tokens_per_minute,
        event.tokens_per_day,
        event.tokens_per_month,
        event.in_flight,
    )
    return Amounts(*(min(limit or UNLIMITED, UNLIMITED) for limit in limits)) if any(limits) else None


class Reservation:
    """What a request counts for its key until `end`, which may be called again without effect."""

    __slots__ = ("_alone", "_key", "_second", "_tokens", "is_open")

    def __init__(self, key: "_Key", tokens: int, second: int, alone: KeyCounts | None = None) -> None:
        self._key = key
        self._tokens = tokens
        self._second = second
        self._alone = alone
        self.is_open = True
        key.in_flight += 1

    def end(self, tokens: int | None) -> None:
        """Count the tokens that the request has used; with None those that it reserved."""
        self._finish(0, 0 if tokens is None else tokens - self._tokens)

    def release(self) -> None:
        """Count nothing, because no worker got the request."""
        self._finish(-1, -self._tokens)

    def _finish(self, requests: int, tokens: int) -> None:
        if self.is_open:
            self.is_open = False
            self._key.in_flight -= 1
            self._key.correct(self._second, requests, tokens)
            if self._alone is not None:
                self._alone.add(self._second, requests, tokens)


class _Alone:
    """Counts of a key at this ingress since the store failed, and what was known of the key at that time."""

    def __init__(self, key: "_Key", failed_s: float) -> None:
        self.counts = KeyCounts()
        self._known, self._read_s = key.reply.known, key.read_s
        self._is_current = 0 <= failed_s - key.read_s < CURRENT_S
        self._in_flight = key.in_flight
        if not self._known.at_s:
            self._known, self._read_s = self._known._replace(at_s=int(runtime.wall_s())), failed_s

    def left(self, key: "_Key", now_s: float, ingresses: int) -> Amounts:
        """Return what this ingress may still count alone."""
        self.counts.advance(self._known.at_s + int(now_s - self._read_s))
        counting = self._known.counting(self.counts.at_s)
        used = self.counts.totals()._replace(in_flight=key.in_flight - self._in_flight * counting[-1])
        left = []
        for limit, total, counts, own in zip(key.limits, self._known.totals, counting, used, strict=True):
            share = max(0, limit - total) if counts else limit
            if counts and not self._is_current:
                share = min(share, limit // UNKNOWN_PARTS)
            left.append(share // ingresses - own)
        return Amounts(*left)

    def spend(self, key: "_Key", tokens: int) -> Reservation:
        second = self.counts.at_s
        self.counts.add(second, 1, tokens)
        key.correct(second, 1, tokens)
        return Reservation(key, tokens, second, self.counts)


class _Key:
    """One API key at this ingress.

    Attributes:
        lock: held during a call of the store.
        in_flight: requests in flight.
        read_s: time of `reply` on the monotonic clock.
        alone: what was counted without the store; None while the store replies.
        unconfirmed: call of the store without a reply, which must be repeated first.
    """

    def __init__(self, limits: Amounts) -> None:
        self.limits = limits
        self.lock = asyncio.Lock()
        self.in_flight = 0
        self.reply = Reply()
        self.read_s = -math.inf
        self.alone: _Alone | None = None
        self.unconfirmed: Ask | None = None
        self._requests = self._tokens = 0  # granted and not spent
        self._sequence = 0
        self._changes: dict[int, tuple[int, int]] = {}

    def spend(self, tokens: int, now_s: float) -> Reservation | None:
        """Return the reservation of a request from what the store has granted, None if that is not enough."""
        is_granted = now_s < self.read_s + CHUNK_S and self._requests and tokens <= self._tokens
        if not is_granted or self.in_flight >= self.reply.slots:
            return None
        self._requests -= 1
        self._tokens -= tokens
        return Reservation(self, tokens, self.reply.granted_s)

    def left(self) -> Amounts:
        """Return what the last reply of the store left, with what it granted to this ingress."""
        mine = (self._requests, self._tokens, self._tokens, self._tokens, self.reply.slots - self.in_flight)
        totals = self.reply.known.totals
        return Amounts(*(limit - total + own for limit, total, own in zip(self.limits, totals, mine, strict=True)))

    def is_short(self, tokens: int, now_s: float) -> bool:
        """Return whether the last reply is so new that it also rejects another request."""
        return now_s - self.read_s < REJECT_S and not self._changes and not self.left().allow(tokens)

    @property
    def is_idle(self) -> bool:
        return not (self.in_flight or self._changes or self.unconfirmed)

    def ask(self, key_id: str, ingress: str, tokens: int | None) -> Ask:
        """Return the next call of the store, for a request with these tokens or for none. Repeat one without a reply.

        What is granted and not spent is given back.
        """
        if self.unconfirmed is not None:
            return self.unconfirmed
        self.correct(self.reply.granted_s, -self._requests, -self._tokens)
        self._requests = self._tokens = 0
        limits, requests, slots = self.limits, 0, self.in_flight
        if tokens is not None:
            slots += _chunk(1, limits.in_flight)
            requests, tokens = _chunk(1, limits.requests), _chunk(tokens, limits.tokens_max)
        self._sequence += 1
        changes = tuple((second, *amounts) for second, amounts in self._changes.items())
        self._changes = {}
        amounts = requests, tokens or 0, self.in_flight, slots, changes
        self.unconfirmed = Ask(key_id, ingress, self._sequence, limits, self.reply.known, *amounts)
        return self.unconfirmed

    def take(self, reply: Reply, began_s: float) -> None:
        """Take the reply of a call that began at this time."""
        self.unconfirmed = None
        self.reply, self.read_s = reply, began_s
        self._requests, self._tokens = reply.requests, reply.tokens

    def correct(self, second: int, requests: int, tokens: int) -> None:
        """Change what the store counts for a second of its clock, with the next call."""
        if not requests and not tokens:
            return
        had = self._changes.get(second, (0, 0))
        self._changes[second] = (had[0] + requests, had[1] + tokens)
        if len(self._changes) > CHANGES_MAX:
            first, second = sorted(self._changes)[:2]
            self.correct(second, *self._changes.pop(first))


class LimitsOfKeys:
    """Applies the limits of all API keys at this ingress.

    Args:
        ingress: name of the ingress, which no other process has.
    """

    def __init__(self, store: LimitStore, ingress: str, metrics: IngressMetrics) -> None:
        self._store = store
        self._ingress = ingress
        self._keys: dict[str, _Key] = {}  # by id; at most as many as there are API keys
        self._in_use: set[str] = set()  # ids of keys whose totals are read
        self._ingresses = 1
        self._generation = 0
        self._failed_s: float | None = None  # time at which the store failed
        self._returned = 0  # beats since the store is back
        metrics.limits_degraded.set_function(lambda: self._failed_s is not None)

    async def admit(self, event: KeySet | None, prompt_tokens: int, max_tokens: int) -> Reservation | None:
        """Return the reservation of a request, None if its key has no limits.

        Raises ApiError: 429 if a limit is reached, 400 if the request can never be admitted.
        """
        limits = limits_of(event)
        if event is None or limits is None:
            return None
        tokens, most = prompt_tokens + max_tokens, limits.tokens_max
        if tokens > most:
            text = f"{prompt_tokens:,} prompt tokens and {max_tokens:,} output tokens exceed the {most:,} tokens"
            remedy = "shorten the prompt or set a lower max_tokens"
            raise ApiError(400, "limit_exceeded", f"{text} of the API key; {remedy}", "max_tokens")
        key = self._key(event, limits)
        if (found := await self._spend(key, event.key_id, tokens)) is not None:
            return found
        left = self._left(key)
        if key.alone is None:
            raise _shortage(limits, left, tokens, key.reply.known.at_s, key.reply.first_s)
        if not left.allow(tokens):
            raise _shortage(limits, left, tokens, key.alone.counts.at_s, key.alone.counts.first_s)
        return key.alone.spend(key, tokens)

    async def _spend(self, key: _Key, key_id: str, tokens: int) -> Reservation | None:
        """Return the reservation of a request, None if the store does not grant enough or fails."""
        if not key.lock.locked() and (found := key.spend(tokens, runtime.monotonic_s())) is not None:
            return found
        async with key.lock:
            found, now_s = key.spend(tokens, runtime.monotonic_s()), runtime.monotonic_s()
            if found is None and self._failed_s is None and not key.is_short(tokens, now_s):
                await self._call(key, key_id, tokens)
                found = key.spend(tokens, runtime.monotonic_s())
            return found

    def _key(self, event: KeySet, limits: Amounts) -> _Key:
        key = self._keys.get(event.key_id)
        if key is None:
            key = self._keys[event.key_id] = _Key(limits)
        key.limits = limits
        return key

    def _left(self, key: _Key) -> Amounts:
        """Return what is left of the limits of a key at this ingress."""
        if self._failed_s is None:
            return key.left()
        if key.alone is None:
            key.alone = _Alone(key, self._failed_s)
        return key.alone.left(key, runtime.monotonic_s(), self._ingresses)

    async def _call(self, key: _Key, key_id: str, tokens: int | None = None) -> None:
        """Call the store for a key; first repeat a call without a reply."""
        self._in_use.add(key_id)
        for _ in range(2 if key.unconfirmed else 1):
            began_s = runtime.monotonic_s()
            try:
                async with asyncio.timeout(ANSWER_S):
                    reply = await self._store.take(key.ask(key_id, self._ingress, tokens))
            except (TimeoutError, LimitsUnavailable) as error:
                self._fail(error)
                return
            key.take(reply, began_s)

    def _fail(self, error: Exception) -> None:
        self._returned = 0
        if self._failed_s is None:
            reason = str(error) or f"no response in {ANSWER_S:g} s"
            logger.warning("limits of API keys are counted by this ingress alone, because Redis fails: %s", reason)
            self._failed_s = runtime.monotonic_s()

    async def run(self) -> None:
        """Read the totals of keys in use every second, until cancelled."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                await self.beat()
        finally:
            await self._store.close()

    async def beat(self) -> None:
        """Read the totals of keys in use. If the store has failed or begun again, write those of all keys."""
        try:
            async with asyncio.timeout(ANSWER_S):
                generation, self._ingresses = await self._store.beat(self._ingress)
        except (TimeoutError, LimitsUnavailable) as error:
            self._fail(error)
            return
        if self._failed_s is not None or self._generation not in (0, generation):
            self._in_use.update(self._keys)
        self._generation = generation
        self._returned += 1
        for key_id in list(self._in_use):
            key = self._keys[key_id]
            async with key.lock:
                await self._call(key, key_id)
            if not self._returned:  # the store has failed again
                return
            if key.is_idle:
                self._in_use.discard(key_id)
        if self._failed_s is not None and self._returned >= RETURN_BEATS:
            self._failed_s = None
            for key in self._keys.values():
                key.alone = None
            logger.warning("limits of API keys are counted by Redis again")

    def headers(self, event: KeySet) -> list[tuple[bytes, bytes]]:
        """Return the headers about the limits of a key per minute, as OpenAI sends them."""
        limits = limits_of(event)
        if limits is None:
            return []
        found, left = [], self._left(self._key(event, limits))
        for name, limit, rest in (
            (b"requests", limits.requests, left.requests),
            (b"tokens", limits.tokens, left.tokens),
        ):
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
