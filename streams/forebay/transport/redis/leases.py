"""Leases on Redis, by Lua scripts on the server's clock; `embedded_leases` runs the same in process.

Never uses keyspace events (late, and lost while disconnected): owners poll deadlines. Keys outlive
their deadline by far, so that an owner sees a lease that ran out or was released, and writes the fact.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import fakeredis
import redis

from forebay.transport.base import Lease, LeaseError

LeaseKind = Literal["worker", "ingress"]
# How long a lease that ran out stays visible to an owner that comes late.
KEPT_TTLS = 10
KEPT_MS = 60_000

_NOW = "local t = redis.call('TIME') local now = t[1] * 1000 + math.floor(t[2] / 1000) "
_EXTEND = f"""
local kept = ttl * {KEPT_TTLS} + {KEPT_MS}
redis.call('ZADD', KEYS[2], now + ttl, ARGV[1])
redis.call('PEXPIRE', KEYS[1], kept)
redis.call('SADD', KEYS[3], ARGV[2])
for i = 2, 3 do
  if redis.call('PTTL', KEYS[i]) < kept then redis.call('PEXPIRE', KEYS[i], kept) end
end
"""
_ACQUIRE = f"""
{_NOW}
local ttl = tonumber(ARGV[4])
redis.call('HSET', KEYS[1], 'token', ARGV[3], 'ttl_ms', ARGV[4], 'payload', ARGV[5], 'released', '0')
{_EXTEND}
"""
_RENEW = f"""
{_NOW}
local held = redis.call('HMGET', KEYS[1], 'token', 'released')
if held[1] ~= ARGV[3] or held[2] == '1' then return 0 end
local ttl = tonumber(ARGV[4])
redis.call('HSET', KEYS[1], 'ttl_ms', ARGV[4])
{_EXTEND}
return 1
"""
# The keys stay as they would after a lease that ran out, so that the owner sees that this one was released.
_RELEASE = f"""
{_NOW}
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
redis.call('HSET', KEYS[1], 'released', '1')
redis.call('ZADD', KEYS[2], now - 1, ARGV[1])
return 1
"""
_DROP = """
if redis.call('HGET', KEYS[1], 'token') ~= ARGV[2] then return 0 end
redis.call('DEL', KEYS[1])
redis.call('ZREM', KEYS[2], ARGV[1])
return 1
"""
# The deadlines of keys that are long gone are dropped here: nobody else would.
_POLL = f"""
{_NOW}
local found = {{}}
local deadlines = redis.call('ZRANGE', KEYS[1], 0, -1, 'WITHSCORES')
for i = 1, #deadlines, 2 do
  local worker = deadlines[i]
  local lease = redis.call('HMGET', ARGV[1] .. worker, 'token', 'payload', 'ttl_ms', 'released')
  if lease[1] then
    local deadline = tonumber(deadlines[i + 1])
    found[#found + 1] = {{worker, lease[1], lease[2], deadline - now, tonumber(lease[3]), deadline, lease[4] or '0'}}
  elseif worker ~= '' or tonumber(deadlines[i + 1]) <= now then
    redis.call('ZREM', KEYS[1], worker)
  end
end
return found
"""
# The deadline of nobody, which no `poll` drops before its time: until then the group counts as one that has leases.
_ASK = f"""
{_NOW}
local ttl = tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], now + ttl, '')
redis.call('SADD', KEYS[2], ARGV[1])
for i = 1, 2 do
  if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
end
"""
# A group whose deadlines are all gone is dropped here, and only here.
_GROUPS = f"""
{_NOW}
local found = {{}}
for _, group in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local deadlines = ARGV[1] .. group
  if redis.call('EXISTS', deadlines) == 0 then
    redis.call('SREM', KEYS[1], group)
  elseif redis.call('ZCOUNT', deadlines, now, '+inf') > 0 then
    found[#found + 1] = group
  end
end
return found
"""


class RedisLeases:
    """`Leases` on one Redis server (not a cluster: `poll` reads every worker's key in one script).

    Layout: a hash `<namespace>:lease:<group>:<worker>` of token, payload and ttl_ms, a sorted set
    `<namespace>:leases:<group>` of deadlines in the server's milliseconds, and a set `<namespace>:groups`;
    colons inside names are escaped. Leases of the kind `ingress` have the same keys with `ingress-` before the second
    part. May be used from several threads.
    """

    def __init__(self, client: redis.Redis, namespace: str = "forebay", kind: LeaseKind = "worker") -> None:
        assert not client.get_encoder().decode_responses, "payloads are bytes"
        # Ingresses have key spaces of their own: an ingress alone does not place a group.
        self._prefix = _part(namespace) + (":" if kind == "worker" else f":{kind}-")
        self._acquire = client.register_script(_ACQUIRE)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)
        self._drop = client.register_script(_DROP)
        self._poll = client.register_script(_POLL)
        self._groups = client.register_script(_GROUPS)
        self._ask = client.register_script(_ASK)

    def acquire(self, group: str, worker_id: str, token: str, payload: bytes, ttl_ms: int) -> None:
        """Take the lease of a worker, or replace it, whoever holds it. Raises LeaseError."""
        assert ttl_ms >= 1
        with _speaking():
            self._acquire(keys=self._keys(group, worker_id), args=[*_names(group, worker_id), token, ttl_ms, payload])

    def renew(self, group: str, worker_id: str, token: str, ttl_ms: int) -> bool:
        """Extend the lease, also one that ran out but was not forgotten yet.

        False when another incarnation holds it or it is gone. Raises LeaseError.
        """
        assert ttl_ms >= 1
        with _speaking():
            args: list[str | int] = [*_names(group, worker_id), token, ttl_ms]
            return bool(self._renew(keys=self._keys(group, worker_id), args=args))

    def release(self, group: str, worker_id: str, token: str) -> None:
        """Mark the lease as released, if this incarnation holds it: the owner tells that from a lease that vanished.

        Raises LeaseError.
        """
        with _speaking():
            self._release(keys=self._keys(group, worker_id), args=[_part(worker_id), token])

    def poll(self, group: str) -> list[Lease]:
        """Every lease of the group in worker order, run-out and released ones too. Raises LeaseError."""
        with _speaking():
            found = self._poll(keys=[self._deadlines_key(group)], args=[self._lease_key(group, "")])
        leases = [
            Lease(
                worker_id=_whole(worker.decode()),
                token=token.decode(),
                payload=payload,
                expires_in_ms=expires_in_ms,
                ttl_ms=ttl_ms,
                deadline_ms=deadline_ms,
                released=released == b"1",
            )
            for worker, token, payload, expires_in_ms, ttl_ms, deadline_ms, released in found
        ]
        return sorted(leases, key=lambda lease: lease.worker_id)

    def forget(self, group: str, worker_id: str, token: str) -> None:
        """Drop a lease after the owner wrote its fact, unless another incarnation took it since.

        A late renewal does not save it: the fact stands, so its holder must hear that it is gone.
        Raises LeaseError.
        """
        with _speaking():
            self._drop(keys=self._keys(group, worker_id), args=[_part(worker_id), token])

    def ask(self, group: str, ttl_ms: int) -> None:
        """Have `groups` name the group for a while, for a worker that cannot take its lease before the group is placed.

        Raises LeaseError.
        """
        with _speaking():
            self._ask(keys=[self._deadlines_key(group), self._groups_key], args=[_part(group), ttl_ms])

    def groups(self) -> list[str]:
        """Every group in which some lease has not run out, sorted. Raises LeaseError."""
        with _speaking():
            found = self._groups(keys=[self._groups_key], args=[self._deadlines_key("")])
        return sorted(_whole(group.decode()) for group in found)

    def _keys(self, group: str, worker_id: str) -> list[str]:
        return [self._lease_key(group, worker_id), self._deadlines_key(group), self._groups_key]

    @property
    def _groups_key(self) -> str:
        return f"{self._prefix}groups"

    def _deadlines_key(self, group: str) -> str:
        return f"{self._prefix}leases:{_part(group)}"

    def _lease_key(self, group: str, worker_id: str) -> str:
        return f"{self._prefix}lease:{_part(group)}:{_part(worker_id)}"


def embedded_leases(namespace: str = "forebay") -> RedisLeases:
    """Leases of this process alone, on a Redis made of Python."""
    return RedisLeases(fakeredis.FakeRedis(server=fakeredis.FakeServer()), namespace)


def _names(group: str, worker_id: str) -> list[str]:
    return [_part(worker_id), _part(group)]


def _part(name: str) -> str:
    return name.replace("%", "%25").replace(":", "%3A")


def _whole(part: str) -> str:
    return part.replace("%3A", ":").replace("%25", "%")


@contextlib.contextmanager
def _speaking() -> Iterator[None]:
    try:
        yield
    except (redis.ConnectionError, redis.TimeoutError) as error:
        raise LeaseError(f"Redis cannot be reached ({error}); check that it runs and its address") from error
    except redis.RedisError as error:
        raise LeaseError(f"Redis refused ({error}); check its version (6 or later) and its memory") from error
