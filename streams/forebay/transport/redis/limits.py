"""Implement the port `LimitStore` on Redis. An ingress reads the counts of a key, applies its call, and writes them.

Keys: `<namespace>:limits:<key id>`, packed `AllCounts`; a sorted set `<namespace>:limit-ingresses` of the last second
in which each ingress has called.
"""

import redis

from forebay import runtime
from forebay.transport.limits import DAY_S, LAPSE_S, Ask, LimitsUnavailable, Reply, pack, take
from forebay.transport.redis.leases import escape, redis_errors

KEPT_S = 33 * DAY_S  # longer than the budget of a month counts
TRIES_MAX = 1_000  # the caller has a timeout of its own, but does not stop the thread

# Writes the counts if they are the ones that the caller has read. Otherwise returns the present ones, and the time.
SWAP = """
local found = redis.call('GET', KEYS[1]) or ''
if ARGV[2] and found == ARGV[1] then
  redis.call('SET', KEYS[1], ARGV[2], 'EX', ARGV[3])
  return false
end
return {found, redis.call('TIME')[1]}
"""
BEAT = f"""
local time = redis.call('TIME')
local added = redis.call('ZADD', KEYS[1], time[1], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', time[1] - {LAPSE_S})
redis.call('ZREMRANGEBYSCORE', KEYS[1], time[1] + {LAPSE_S}, '+inf')
return {{added, redis.call('ZCARD', KEYS[1])}}
"""


class RedisLimits:
    """Counts on one Redis server, for all ingresses of a namespace. Each method raises LimitsUnavailable."""

    def __init__(self, client: redis.Redis, namespace: str = "forebay") -> None:
        self._prefix = escape(namespace)
        self._swap = client.register_script(SWAP)
        self._beat = client.register_script(BEAT)

    async def take(self, ask: Ask) -> Reply:
        return await runtime.offload(self._take_now, ask)

    async def beat(self, ingress: str) -> tuple[bool, int]:
        return await runtime.offload(self._beat_now, ingress)

    def _beat_now(self, ingress: str) -> tuple[bool, int]:
        with redis_errors(LimitsUnavailable):
            added, count = self._beat([f"{self._prefix}:limit-ingresses"], [ingress])
        return bool(added), count

    def _take_now(self, ask: Ask) -> Reply:
        keys = [f"{self._prefix}:limits:{ask.key_id}"]
        with redis_errors(LimitsUnavailable):
            found = self._swap(keys)
            for _ in range(TRIES_MAX):  # until no other ingress has written meanwhile
                packed, second = found
                reply = take(packed, ask, int(second))
                found = self._swap(keys, [packed, pack(reply.counts), KEPT_S])
                if found is None:
                    return reply
        raise LimitsUnavailable("other ingresses change the counts of the key all the time")
