"""Implement the port `LimitStore` on Redis. An ingress reads the counts of a key, applies its call, and writes them.

Keys: `<namespace>:limits:<key id>`, packed `KeyCounts`; a sorted set `<namespace>:limit-ingresses` of the last second
in which each ingress has called; `<namespace>:limit-generation`, which is missing in a Redis that has begun again.
"""

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import msgspec
import redis

from forebay import runtime
from forebay.events.codec import MALFORMED
from forebay.transport.limits import DAY_S, LAPSE_S, UNLIMITED, WINDOW_S, Ask, KeyCounts, LimitsUnavailable, Reply
from forebay.transport.redis.leases import remedy

P = ParamSpec("P")
T = TypeVar("T")

KEPT_S = 2 * WINDOW_S  # counts of a key without a budget
BUDGET_KEPT_S = 33 * DAY_S
TRIES_MAX = 1_000  # the caller has a timeout of its own, but does not stop the thread

# Writes the counts if they are the ones that the caller has read. Otherwise returns the present ones, and the time.
SWAP = """
local found = redis.call('GET', KEYS[1]) or ''
if ARGV[2] and found == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
  return false
end
return {found, unpack(redis.call('TIME'))}
"""
BEAT = f"""
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], time[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', time[1] - {LAPSE_S})
redis.call('ZREMRANGEBYSCORE', KEYS[1], time[1] + {LAPSE_S}, '+inf')
redis.call('SET', KEYS[2], time[1] .. time[2], 'NX')
return {{tonumber(redis.call('GET', KEYS[2])), redis.call('ZCARD', KEYS[1])}}
"""


class RedisLimits:
    """Counts on one Redis server, for all ingresses of a namespace. Each method raises LimitsUnavailable."""

    def __init__(self, client: redis.Redis, namespace: str = "forebay") -> None:
        self._client = client
        self._prefix = namespace.replace("%", "%25").replace(":", "%3A")
        self._swap = client.register_script(SWAP)
        self._beat = client.register_script(BEAT)

    async def take(self, ask: Ask) -> Reply:
        return await _offloaded(self._take_now, ask)

    async def beat(self, ingress: str) -> tuple[int, int]:
        keys = [f"{self._prefix}:limit-ingresses", f"{self._prefix}:limit-generation"]
        generation, count = await _offloaded(self._beat, keys, [ingress])
        return generation, count

    async def close(self) -> None:
        self._client.close()

    def _take_now(self, ask: Ask) -> Reply:
        keys = [f"{self._prefix}:limits:{ask.key_id}"]
        kept_s = BUDGET_KEPT_S if min(ask.limits.day, ask.limits.month) < UNLIMITED else KEPT_S
        found = self._swap(keys)
        for _ in range(TRIES_MAX):  # until no other ingress has written meanwhile
            packed, second, us = found
            counts = msgspec.msgpack.decode(packed, type=KeyCounts) if packed else KeyCounts()
            reply = counts.take(ask, int(second) * 1_000_000 + int(us))
            found = self._swap(keys, [packed, msgspec.msgpack.encode(counts), kept_s])
            if found is None:
                return reply
        raise LimitsUnavailable("other ingresses change the counts of the key all the time")


async def _offloaded(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    try:
        return await runtime.offload(call, *args, **kwargs)
    except (redis.RedisError, OSError, ValueError, OverflowError, *MALFORMED) as error:
        advice = f"; {remedy(error)}" if isinstance(error, redis.RedisError | OSError) else ""
        raise LimitsUnavailable(str(error).rstrip(".") + advice) from error
