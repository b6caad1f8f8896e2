"""Limits of API keys: admits or rejects a prepared request, and counts it, together with all other ingresses.

Theory of operation. A round trip to the store per request would cost too much. So an ingress takes a chunk of requests
and tokens in advance, and spends it within `CHUNK_S` without the store. Requests that arrive meanwhile share the next
round trip. A request takes its prompt and `max_tokens`, and gives back at its end what it has not used, with the next
round trip. Every second the ingress reads the totals of the keys in use.

Without the store an ingress counts alone: it admits a share of what its last totals left for the rest of the window,
and later a share of the limit. An ingress that does not know the totals of a key admits a share of a tenth. When the
store is back, the ingress writes what it counted, and still counts alone until the other ingresses have written, too.
"""

import asyncio
import logging
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from forebay import runtime
from forebay.events.keys import KeySet
from forebay.ingress.errors import ApiError
from forebay.ingress.metrics import IngressMetrics
from forebay.transport.limits import (
    DAY_S,
    WINDOW_S,
    Ask,
    KeyLimits,
    Known,
    LimitStore,
    LimitsUnavailable,
    Reply,
    month_start,
)

CHUNK_S = 1.0
CHUNKS = 100  # a chunk is this part of the limit
BEAT_S = 1.0
ANSWER_S = 0.25  # the store has failed if it takes longer
CURRENT_S = 3.0  # totals are read every second, so older ones may lack what other ingresses counted
RETURN_BEATS = 3  # until all ingresses have noticed that the store is back
UNKNOWN_PARTS = 10  # without known totals, all ingresses together admit one of these parts of a limit
CHANGES_MAX = 256  # seconds with corrections per key; the oldest ones are joined

logger = logging.getLogger(__name__)


def limits_of(event: KeySet | None) -> KeyLimits | None:
    """Return the limits of an API key, None if it has none."""
    if event is None:
        return None
    limits = KeyLimits(
        event.requests_per_minute,
        event.tokens_per_minute,
        event.in_flight,
        event.tokens_per_day,
        event.tokens_per_month,
    )
    return limits if any(limits) else None


class Reservation:
    """What a request counts for its key until `end`, which may be called again without effect."""

    __slots__ = ("_alone_s", "_key", "_second", "_tokens", "is_open")

    def __init__(self, key: "_Key", tokens: int, second: int, alone_s: int | None = None) -> None:
        self._key = key
        self._tokens = tokens if key.limits_tokens else 0
        self._second = second
        self._alone_s = alone_s
        self.is_open = True
        key.in_flight += 1

    def end(self, tokens: int | None) -> None:
        """Count the tokens that the request has used; with None those that it reserved."""
        self._finish(0, 0 if tokens is None or not self._tokens else tokens - self._tokens)

    def release(self) -> None:
        """Count nothing, because no worker got the request."""
        self._finish(-1 if self._key.limits.requests else 0, -self._tokens)

    def _finish(self, requests: int, tokens: int) -> None:
        if self.is_open:
            self.is_open = False
            self._key.in_flight -= 1
            self._key.correct(self._second, requests, tokens)
            if self._alone_s is not None:
                self._key.count_alone(self._alone_s, requests, tokens)


class _Before(NamedTuple):
    """What was known of a key when the store failed.

    Attributes:
        read_s: time of the reply on the monotonic clock.
        is_current: whether the reply has what other ingresses counted.
        in_flight: requests in flight at this ingress.
    """

    reply: Reply | None
    read_s: float
    is_current: bool
    in_flight: int


class _Key:
    """One API key at this ingress.

    Attributes:
        needed: requests and tokens of all requests that wait for the store.
        asked: number of calls of the store that have begun.
        in_flight: requests in flight.
    """

    def __init__(self, limits: KeyLimits) -> None:
        self.limits = limits
        self.lock = asyncio.Lock()
        self.needed = (0, 0)
        self.asked = 0
        self.in_flight = 0
        self.reply: Reply | None = None
        self.read_s = -math.inf  # time of `reply` on the monotonic clock
        self._requests = self._tokens = 0  # granted and not spent
        self._spend_until_s = -math.inf
        self._sequence = 0
        self._sending: tuple[tuple[int, int, int], ...] | None = None  # corrections in a call without a reply
        self._changes: dict[int, tuple[int, int]] = {}
        self._alone: dict[int, tuple[int, int]] = {}  # counted without the store, by second of the monotonic clock
        self._alone_tokens = 0
        self._before = _Before(None, -math.inf, False, 0)

    # --- with the store ---

    def spend(self, tokens: int, now_s: float) -> Reservation | None:
        """Return the reservation of a request from what the store has granted, None if that is not enough."""
        limits = self.limits
        if now_s >= self._spend_until_s or self.reply is None:
            return None
        if limits.in_flight and self.in_flight >= self.reply.slots:
            return None
        if (limits.requests and not self._requests) or (self.limits_tokens and tokens > self._tokens):
            return None
        if limits.requests:
            self._requests -= 1
        if self.limits_tokens:
            self._tokens -= tokens
        return Reservation(self, tokens, self.reply.granted_s)

    @property
    def limits_tokens(self) -> bool:
        return bool(self.limits.tokens or self.limits.day or self.limits.month)

    @property
    def is_unconfirmed(self) -> bool:
        """Whether a call of the store had no reply, so it must be repeated first."""
        return self._sending is not None

    def ask(self, key_id: str, ingress: str) -> Ask:
        """Return the next call of the store, or repeat one without a reply."""
        limits, (requests, tokens) = self.limits, self.needed
        slots = self.in_flight
        if requests:
            slots += max(requests, limits.in_flight // CHUNKS)
            requests = max(requests, limits.requests // CHUNKS)
            tokens = max(tokens, _least_tokens(limits) // CHUNKS)
        if self._sending is None:
            self._give_back()
            self._sending = tuple((second, *amounts) for second, amounts in self._changes.items())
            self._changes = {}
            self._sequence += 1
        self.asked += 1
        known = Known() if self.reply is None else self.reply.known
        return Ask(
            key_id, ingress, self._sequence, limits, known, requests, tokens, self.in_flight, slots, self._sending
        )

    def take(self, reply: Reply, began_s: float, *, is_repeated: bool) -> None:
        """Take the reply of a call that began at this time. A repeated call may have been granted long ago."""
        self._sending = None
        self.reply, self.read_s = reply, began_s
        self._requests, self._tokens = reply.requests, reply.tokens
        self._spend_until_s = -math.inf if is_repeated else began_s + CHUNK_S

    def _give_back(self) -> None:
        if self.reply is not None:
            self.correct(self.reply.granted_s, -self._requests, -self._tokens)
        self._requests = self._tokens = 0
        self._spend_until_s = -math.inf  # the store may give the slots to other ingresses

    def correct(self, second: int, requests: int, tokens: int) -> None:
        """Change what the store counts for a second of its clock, with the next call."""
        if not requests and not tokens:
            return
        had = self._changes.get(second, (0, 0))
        self._changes[second] = (had[0] + requests, had[1] + tokens)
        if len(self._changes) > CHANGES_MAX:
            first, second = sorted(self._changes)[:2]
            self.correct(second, *self._changes.pop(first))

    def is_in_use(self, now_s: float) -> bool:
        idle = not (self._requests or self._tokens or self._changes or self._sending or self.in_flight)
        return not idle or now_s - self.read_s < CHUNK_S

    def shortage(self, tokens: int) -> ApiError:
        """Return the error of a request for which the last reply did not grant enough."""
        limits, reply = self.limits, self.reply
        assert reply is not None
        known = reply.known
        free = known.at_s + WINDOW_S
        if limits.in_flight and self.in_flight >= reply.slots:
            return _limited("in_flight", limits.in_flight, 1)
        day_end_s = (known.at_s // DAY_S + 1) * DAY_S
        if limits.month and known.month - self._tokens + tokens > limits.month:
            day = known.at_s // DAY_S
            return _limited("month", limits.month, (month_start(month_start(day) + 31) - day) * DAY_S)
        if limits.day and known.day - self._tokens + tokens > limits.day:
            return _limited("day", limits.day, day_end_s - known.at_s)
        if limits.requests and not self._requests:
            return _limited("requests", limits.requests, (reply.first_requests_s or free) + WINDOW_S - known.at_s)
        return _limited("tokens", limits.tokens, (reply.first_tokens_s or free) + WINDOW_S - known.at_s)

    # --- without the store ---

    def begin_alone(self, now_s: float) -> None:
        self._before = _Before(self.reply, self.read_s, now_s - self.read_s < CURRENT_S, self.in_flight)
        self._alone = {}
        self._alone_tokens = 0

    def spend_alone(self, tokens: int, now_s: float, failed_s: float, ingresses: int) -> Reservation:
        """Return the reservation of a request without the store. Raises ApiError (429)."""
        second, limits = int(now_s), self.limits
        for old in [at for at in self._alone if at <= second - WINDOW_S]:
            del self._alone[old]
        shares = self.shares(now_s, failed_s, ingresses)
        used = self._used_alone()
        amounts = KeyLimits(1, tokens, 1, tokens, tokens)
        for reason in ("in_flight", "month", "day", "requests", "tokens"):
            at = KeyLimits._fields.index(reason)
            if limits[at] and used[at] + amounts[at] > shares[at]:
                after_s = 1 if reason == "in_flight" else min(self._alone, default=second) + WINDOW_S - second
                raise _limited(reason, limits[at], after_s)
        self.count_alone(second, 1, tokens)
        reply = self.reply
        store_s = int(runtime.wall_s()) if reply is None else reply.known.at_s + int(now_s - self.read_s)
        self.correct(store_s, 1, tokens)
        return Reservation(self, tokens, store_s, second)

    def shares(self, now_s: float, failed_s: float, ingresses: int) -> KeyLimits:
        """Return what this ingress may count without the store, since the store failed or in a later window."""
        reply, read_s, is_current, held = self._before
        known = Known() if reply is None else reply.known
        day = 0 if reply is None else (known.at_s + int(now_s - read_s)) // DAY_S
        is_first = now_s - failed_s < WINDOW_S
        is_day, is_month = day == known.at_s // DAY_S, month_start(day) == month_start(known.at_s // DAY_S)
        totals = (
            (known.requests, is_first),
            (known.tokens, is_first),
            (0 if reply is None else reply.in_flight, is_first),
            (known.day, is_day),
            (known.month, is_month),
        )
        shares = []
        for limit, (total, counts) in zip(self.limits, totals, strict=True):
            left = limit
            if counts:
                left = max(0, limit - total)
                if not is_current:
                    left = min(left, limit // UNKNOWN_PARTS)
            shares.append(left // ingresses)
        return KeyLimits(*shares)._replace(in_flight=shares[2] + (held if is_first else 0))

    def count_alone(self, second: int, requests: int, tokens: int) -> None:
        had = self._alone.get(second)
        if had is None and requests < 1:
            return  # a request that began before the window has ended
        had = had or (0, 0)
        self._alone[second] = (had[0] + requests, had[1] + tokens)
        self._alone_tokens += tokens

    def _used_alone(self) -> KeyLimits:
        requests = sum(one[0] for one in self._alone.values())
        tokens = sum(one[1] for one in self._alone.values())
        return KeyLimits(requests, tokens, self.in_flight, self._alone_tokens, self._alone_tokens)

    def remaining(self, shares: KeyLimits | None) -> tuple[int, int]:
        """Return the requests and tokens that are left in the window; `shares` is what this ingress counts alone."""
        if shares is not None:
            used = self._used_alone()
            left = shares.requests - used.requests, shares.tokens - used.tokens
        elif self.reply is None:
            left = self.limits.requests, self.limits.tokens
        else:
            known = self.reply.known
            left = (
                self.limits.requests - known.requests + self._requests,
                self.limits.tokens - known.tokens + self._tokens,
            )
        return max(0, left[0]), max(0, left[1])


class LimitsOfKeys:
    """Applies the limits of all API keys at this ingress.

    Args:
        ingress: name of the ingress, which no other process has.
    """

    def __init__(self, store: LimitStore, ingress: str, metrics: IngressMetrics) -> None:
        self._store = store
        self._ingress = ingress
        self._metrics = metrics
        self._keys: dict[str, _Key] = {}  # by id; at most as many as there are API keys
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
        try:
            tokens = prompt_tokens + max_tokens
            most = _least_tokens(limits)
            if most and tokens > most:
                raise _impossible(prompt_tokens, max_tokens, most)
            return await self._admit(self._key(event, limits), event.key_id, tokens)
        except _Limited as error:
            self._metrics.limited.labels(error.reason).inc()
            raise

    async def _admit(self, key: _Key, key_id: str, tokens: int) -> Reservation:
        if self._failed_s is None:
            found = None if key.needed[0] else key.spend(tokens, runtime.monotonic_s())
            if found is None:
                found = await self._wait(key, key_id, tokens)
            if found is not None:
                return found
        if self._failed_s is not None:
            return key.spend_alone(tokens, runtime.monotonic_s(), self._failed_s, self._ingresses)
        raise key.shortage(tokens)

    async def _wait(self, key: _Key, key_id: str, tokens: int) -> Reservation | None:
        """Return a reservation once the store has replied, None if it did not grant enough or failed."""
        asked = key.asked
        key.needed = key.needed[0] + 1, key.needed[1] + tokens
        try:
            async with key.lock:
                if self._failed_s is not None:
                    return None
                found = key.spend(tokens, runtime.monotonic_s())
                if found is None and key.asked == asked:  # otherwise a later call has asked for this request, too
                    await self._call(key, key_id)
                    found = None if self._failed_s is not None else key.spend(tokens, runtime.monotonic_s())
                return found
        finally:
            key.needed = key.needed[0] - 1, key.needed[1] - tokens

    def _key(self, event: KeySet, limits: KeyLimits) -> _Key:
        key = self._keys.get(event.key_id)
        if key is None:
            key = self._keys[event.key_id] = _Key(limits)
            if self._failed_s is not None:
                key.begin_alone(runtime.monotonic_s())
        key.limits = limits
        return key

    async def _call(self, key: _Key, key_id: str) -> None:
        """Call the store for a key; first repeat a call without a reply."""
        for is_repeated in (True, False) if key.is_unconfirmed else (False,):
            began_s = runtime.monotonic_s()
            try:
                async with asyncio.timeout(ANSWER_S):
                    reply = await self._store.take(key.ask(key_id, self._ingress))
            except (TimeoutError, LimitsUnavailable) as error:
                self._fail(error)
                return
            key.take(reply, began_s, is_repeated=is_repeated)

    def _fail(self, error: Exception) -> None:
        self._returned = 0
        if self._failed_s is None:
            reason = str(error) or f"no response in {ANSWER_S:g} s"
            logger.warning("limits of API keys are counted by this ingress alone, because Redis fails: %s", reason)
            self._failed_s = runtime.monotonic_s()
            for key in self._keys.values():
                key.begin_alone(self._failed_s)

    async def run(self, keys: Callable[[], Iterable[KeySet]]) -> None:
        """Read the totals of keys in use every second, until cancelled. Without a key that has limits, do nothing."""
        try:
            while True:
                await asyncio.sleep(BEAT_S)
                if self._keys or any(limits_of(event) for event in keys()):
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
        has_begun = self._generation not in (0, generation)
        self._generation = generation
        now_s = runtime.monotonic_s()
        self._returned += 1
        for key_id, key in list(self._keys.items()):
            if has_begun or self._failed_s is not None or key.is_in_use(now_s):
                async with key.lock:
                    await self._call(key, key_id)
                if not self._returned:  # the store has failed again
                    return
        if self._failed_s is not None and self._returned >= RETURN_BEATS:
            self._failed_s = None
            logger.warning("limits of API keys are counted by Redis again")

    def headers(self, event: KeySet) -> list[tuple[bytes, bytes]]:
        """Return the headers about the limits of a key per minute, as OpenAI sends them."""
        limits = limits_of(event)
        if limits is None:
            return []
        key, now_s = self._key(event, limits), runtime.monotonic_s()
        shares = None if self._failed_s is None else key.shares(now_s, self._failed_s, self._ingresses)
        found = []
        for name, limit, left in zip(("requests", "tokens"), limits, key.remaining(shares), strict=False):
            if limit:
                reset = "0s" if left >= limit else f"{WINDOW_S // 60}m{WINDOW_S % 60}s"
                for kind, value in (("limit", str(limit)), ("remaining", str(min(left, limit))), ("reset", reset)):
                    found.append((f"x-ratelimit-{kind}-{name}".encode(), value.encode()))
        return found


def _least_tokens(limits: KeyLimits) -> int:
    """Return the lowest limit of tokens, 0 for none."""
    return min(filter(None, (limits.tokens, limits.day, limits.month)), default=0)


class _Limited(ApiError):
    reason: str


_TEXTS = {
    "requests": ("rate_limit_exceeded", "the API key may send {:,} requests per minute"),
    "tokens": ("rate_limit_exceeded", "the API key may use {:,} tokens per minute; a request counts with max_tokens"),
    "in_flight": ("in_flight_limit", "the API key may have {:,} requests in flight"),
    "day": ("insufficient_quota", "the API key may use {:,} tokens per day in UTC"),
    "month": ("insufficient_quota", "the API key may use {:,} tokens per month in UTC"),
}


def _limited(reason: str, limit: int, after_s: int) -> _Limited:
    code, text = _TEXTS[reason]
    error = _Limited(429, code, f"{text.format(limit)}; try again in {after_s:,} s", retry_after_s=after_s)
    error.reason = reason
    return error


def _impossible(prompt_tokens: int, max_tokens: int, most: int) -> _Limited:
    text = f"{prompt_tokens:,} prompt tokens and {max_tokens:,} output tokens exceed the {most:,} tokens of the API key"
    error = _Limited(400, "limit_exceeded", f"{text}; shorten the prompt or set a lower max_tokens", "max_tokens")
    error.reason = "size"
    return error
