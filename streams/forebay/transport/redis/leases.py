"""Implement the port `Leases` on Redis, with Lua scripts that use the server's clock.

Owners poll the deadlines of leases. Keyspace events are not used, because they are late and get lost while
disconnected. Keys outlive their deadline by far, so that an owner sees expired and released leases, and appends the
loss to `fleet`.
"""

import contextlib
from collections.abc import Iterator
from typing import Literal

import fakeredis
import redis

from forebay.transport.base import Lease, LeaseError
from forebay.transport.certificates import certificate_remedy

LeaseKind = Literal["worker", "ingress"]
# The keys of a lease live for KEPT_TTLS times its TTL plus KEPT_MS after a renewal, so a new owner sees expired leases.
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
# The keys are kept as after an expiry, so that the owner sees that the lease was released.
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
# This script also deletes the deadlines of leases whose keys Redis has expired, because no other script does.
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
# This adds a deadline for an empty worker name, which `poll` deletes only once it has passed. Until then the group
# counts as one with leases.
_ANNOUNCE = f"""
{_NOW}
local ttl = tonumber(ARGV[2])
redis.call('ZADD', KEYS[1], now + ttl, '')
redis.call('SADD', KEYS[2], ARGV[1])
for i = 1, 2 do
  if redis.call('PTTL', KEYS[i]) < ttl then redis.call('PEXPIRE', KEYS[i], ttl) end
end
"""
# This script also removes groups without deadlines, because no other script does.
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
    """The port `Leases` on one Redis server. May be used from several threads.

    Each method raises LeaseError if Redis cannot be reached or rejects the command.

    Redis Cluster is not supported, because `poll` reads the keys of all workers in one script.

    Keys: a hash `<namespace>:lease:<group>:<worker>` with token, payload, ttl_ms and released; a sorted set
    `<namespace>:leases:<group>` of deadlines in milliseconds of the server's clock; a set `<namespace>:groups`. Colons
    in names are escaped. Leases of the kind `ingress` use the same keys with the prefix `ingress-` in the second part.
    """

    def __init__(self, client: redis.Redis, namespace: str = "forebay", kind: LeaseKind = "worker") -> None:
        assert not client.get_encoder().decode_responses, "payloads are bytes"
        # Ingresses have keys of their own, because the lease of an ingress must not cause the placement of a group.
        self._prefix = escape(namespace) + (":" if kind == "worker" else f":{kind}-")
        self._acquire = client.register_script(_ACQUIRE)
        self._renew = client.register_script(_RENEW)
        self._release = client.register_script(_RELEASE)
        self._drop = client.register_script(_DROP)
        self._poll = client.register_script(_POLL)
        self._groups = client.register_script(_GROUPS)
        self._announce = client.register_script(_ANNOUNCE)

    def acquire(self, group: str, worker_id: str, token: str, payload: bytes, ttl_ms: int) -> None:
        assert ttl_ms >= 1
        with redis_errors(LeaseError):
            args: list[str | int | bytes] = [escape(worker_id), escape(group), token, ttl_ms, payload]
            self._acquire(keys=self._keys(group, worker_id), args=args)

    def renew(self, group: str, worker_id: str, token: str, ttl_ms: int) -> bool:
        """Extend the lease, even if it expired but was not deleted yet."""
        assert ttl_ms >= 1
        with redis_errors(LeaseError):
            args: list[str | int] = [escape(worker_id), escape(group), token, ttl_ms]
            return bool(self._renew(keys=self._keys(group, worker_id), args=args))

    def release(self, group: str, worker_id: str, token: str) -> None:
        """Mark the lease as released if this incarnation holds it. The owner can then tell a release from a loss."""
        with redis_errors(LeaseError):
            self._release(keys=self._keys(group, worker_id), args=[escape(worker_id), token])

    def poll(self, group: str) -> list[Lease]:
        with redis_errors(LeaseError):
            found = self._poll(keys=[self._deadlines_key(group)], args=[self._lease_key(group, "")])
        leases = [
            Lease(
                worker_id=_unescape(worker.decode()),
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
        """Delete a lease after the owner appended the loss to `fleet`, unless another incarnation took it since.

        A late renewal by the lost incarnation does not prevent the deletion, because that incarnation must learn that
        it was declared lost.
        """
        with redis_errors(LeaseError):
            self._drop(keys=self._keys(group, worker_id), args=[escape(worker_id), token])

    def announce(self, group: str, ttl_ms: int) -> None:
        """A worker calls this if its group needs a control partition before the worker has a lease."""
        with redis_errors(LeaseError):
            self._announce(keys=[self._deadlines_key(group), self._groups_key], args=[escape(group), ttl_ms])

    def groups(self) -> list[str]:
        with redis_errors(LeaseError):
            found = self._groups(keys=[self._groups_key], args=[self._deadlines_key("")])
        return sorted(_unescape(group.decode()) for group in found)

    def _keys(self, group: str, worker_id: str) -> list[str]:
        return [self._lease_key(group, worker_id), self._deadlines_key(group), self._groups_key]

    @property
    def _groups_key(self) -> str:
        return f"{self._prefix}groups"

    def _deadlines_key(self, group: str) -> str:
        return f"{self._prefix}leases:{escape(group)}"

    def _lease_key(self, group: str, worker_id: str) -> str:
        return f"{self._prefix}lease:{escape(group)}:{escape(worker_id)}"


def embedded_leases(namespace: str = "forebay") -> RedisLeases:
    """Return a lease store for this process only, on an in-process implementation of Redis."""
    return RedisLeases(fakeredis.FakeRedis(server=fakeredis.FakeServer()), namespace)


def escape(name: str) -> str:
    return name.replace("%", "%25").replace(":", "%3A")


def _unescape(part: str) -> str:
    return part.replace("%3A", ":").replace("%25", "%")


@contextlib.contextmanager
def redis_errors(kind: type[Exception]) -> Iterator[None]:
    """Raise errors of the client as this exception, with advice."""
    try:
        yield
    except redis.RedisError as error:
        is_away = isinstance(error, redis.ConnectionError | redis.TimeoutError)
        failure = "Redis cannot be reached" if is_away else "Redis rejected a command"
        raise kind(f"{failure} ({error}); {_remedy(error)}") from error


def _remedy(error: redis.RedisError) -> str:
    if isinstance(error, redis.exceptions.AuthenticationError | redis.exceptions.AuthorizationError):
        return "check the user and the password in its URL"
    if not isinstance(error, redis.ConnectionError | redis.TimeoutError):
        return "check its version (6 or later) and its memory"
    return certificate_remedy(str(error), "Redis", "ssl_ca_certs in its URL") or (
        "check its address and that it is running"
    )
