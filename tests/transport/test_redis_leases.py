"""Contract tests of the port `Leases`, on the embedded Redis and on a real one."""

import threading
from concurrent.futures import ThreadPoolExecutor

import fakeredis
import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st
from redis.backoff import NoBackoff
from redis.retry import Retry

from forebay.transport.base import LeaseError
from forebay.transport.redis.leases import KEPT_TTLS, RedisLeases, embedded_leases
from tests.system import until

GROUP = "model"
LONG_MS = 60_000


def tokens(leases: RedisLeases, group: str = GROUP) -> dict[str, str]:
    return {lease.worker_id: lease.token for lease in leases.poll(group)}


def released(leases: RedisLeases) -> dict[str, bool]:
    return {lease.worker_id: lease.released for lease in leases.poll(GROUP)}


async def until_expired(leases: RedisLeases, worker_id: str) -> None:
    """Wait until the lease of a worker has expired and is still listed."""
    await until(lambda: [x for x in leases.poll(GROUP) if x.worker_id == worker_id and x.expires_in_ms < 0])


def test_a_lease_is_polled_as_it_was_acquired(leases: RedisLeases) -> None:
    assert leases.poll(GROUP) == []
    leases.acquire(GROUP, "w", "t1", bytes(range(256)), LONG_MS)
    (lease,) = leases.poll(GROUP)
    assert (lease.worker_id, lease.token, lease.payload, lease.ttl_ms) == ("w", "t1", bytes(range(256)), LONG_MS)
    assert 0 < lease.expires_in_ms <= LONG_MS


def test_leases_are_polled_in_worker_order_within_their_group(leases: RedisLeases) -> None:
    names = ["w10", "w2", "a:b", "W", "\u00e9", "a%3Ab", "a"]
    for ttl_ms, name in enumerate(names, LONG_MS):
        leases.acquire(GROUP, name, f"token of {name}", b"", ttl_ms)
    leases.acquire("other", "w", "t", b"", LONG_MS)
    leases.acquire(GROUP + ":x", "w", "t", b"", LONG_MS)
    assert [lease.worker_id for lease in leases.poll(GROUP)] == sorted(names)
    assert tokens(leases) == {name: f"token of {name}" for name in names}
    assert tokens(leases, "other") == {"w": "t"}


def test_another_incarnation_takes_over_and_the_first_fails_to_renew(leases: RedisLeases) -> None:
    leases.acquire(GROUP, "w", "t1", b"one", LONG_MS)
    assert leases.renew(GROUP, "w", "t1", LONG_MS)
    leases.acquire(GROUP, "w", "t2", b"two", LONG_MS)
    assert not leases.renew(GROUP, "w", "t1", LONG_MS)
    leases.release(GROUP, "w", "t1")
    leases.forget(GROUP, "w", "t1")
    (lease,) = leases.poll(GROUP)
    assert (lease.token, lease.payload) == ("t2", b"two")
    assert leases.renew(GROUP, "w", "t2", LONG_MS)


def test_renewing_extends_the_lease_and_updates_its_ttl(leases: RedisLeases) -> None:
    leases.acquire(GROUP, "w", "t", b"p", LONG_MS)
    assert leases.renew(GROUP, "w", "t", 3 * LONG_MS)
    (lease,) = leases.poll(GROUP)
    assert 2 * LONG_MS < lease.expires_in_ms <= lease.ttl_ms == 3 * LONG_MS
    assert lease.payload == b"p"


def test_a_released_lease_is_marked_until_it_is_forgotten(leases: RedisLeases) -> None:
    assert not leases.renew(GROUP, "w", "t", LONG_MS)
    leases.release(GROUP, "w", "t")
    for name in ("w", "v"):
        leases.acquire(GROUP, name, "t", b"", LONG_MS)
    leases.release(GROUP, "w", "t")
    assert released(leases) == {"v": False, "w": True}
    assert not leases.renew(GROUP, "w", "t", LONG_MS)
    assert [lease.expires_in_ms <= 0 for lease in leases.poll(GROUP)] == [False, True]
    leases.forget(GROUP, "w", "t")
    assert tokens(leases) == {"v": "t"}


def test_a_released_lease_can_be_acquired_again(leases: RedisLeases) -> None:
    for token in ("t", "t", "t2"):
        leases.acquire(GROUP, "w", token, b"", LONG_MS)
        assert leases.renew(GROUP, "w", token, LONG_MS)
        assert released(leases) == {"w": False}
        leases.release(GROUP, "w", token)
        assert released(leases) == {"w": True}
    leases.release(GROUP, "w", "t")
    assert leases.groups() == []


async def test_every_renewal_changes_the_deadline(leases: RedisLeases) -> None:
    leases.acquire(GROUP, "w", "t", b"", LONG_MS)
    seen: set[int] = set()

    def renewed() -> bool:
        assert leases.renew(GROUP, "w", "t", LONG_MS)
        seen.update(lease.deadline_ms for lease in leases.poll(GROUP))
        return len(seen) > 3

    await until(renewed)
    (lease,) = leases.poll(GROUP)
    assert {one.deadline_ms for one in leases.poll(GROUP)} == {lease.deadline_ms}


async def test_an_expired_lease_stays_until_it_is_forgotten(leases: RedisLeases) -> None:
    leases.acquire(GROUP, "b", "t", b"p", 1)
    leases.acquire(GROUP, "a", "t", b"p", LONG_MS)
    await until_expired(leases, "b")
    assert tokens(leases) == {"a": "t", "b": "t"}
    leases.forget(GROUP, "b", "other")
    assert tokens(leases) == {"a": "t", "b": "t"}
    leases.forget(GROUP, "b", "t")
    assert tokens(leases) == {"a": "t"}
    assert not leases.renew(GROUP, "b", "t", LONG_MS)


async def test_an_expired_lease_can_be_renewed_until_it_is_forgotten(leases: RedisLeases) -> None:
    leases.acquire(GROUP, "w", "t", b"p", 1)
    await until_expired(leases, "w")
    assert leases.renew(GROUP, "w", "t", LONG_MS)
    assert leases.poll(GROUP)[0].expires_in_ms > 0


def test_everything_in_redis_expires_well_after_its_deadline(leases: RedisLeases, client: redis.Redis) -> None:
    leases.acquire(GROUP, "w", "t", b"", LONG_MS)
    leases.acquire(GROUP, "v", "t", b"", 10)
    lifetimes = {key: client.pttl(key) for key in client.scan_iter()}
    assert sorted(lifetimes) == [
        b"test:groups",
        b"test:lease:model:v",
        b"test:lease:model:w",
        b"test:leases:model",
    ]
    assert min(lifetimes.values()) > 10 * KEPT_TTLS
    assert lifetimes[b"test:leases:model"] > LONG_MS * (KEPT_TTLS - 1)
    assert lifetimes[b"test:groups"] > LONG_MS * (KEPT_TTLS - 1)


async def test_groups_are_those_with_an_unexpired_lease(leases: RedisLeases, client: redis.Redis) -> None:
    assert leases.groups() == []
    for group in ("b", "a:b", "a", "short"):
        leases.acquire(group, "w", "t", b"", 1 if group == "short" else LONG_MS)
    await until(lambda: "short" not in leases.groups())
    assert leases.groups() == ["a", "a:b", "b"]
    assert leases.renew("short", "w", "t", LONG_MS)
    assert leases.groups() == ["a", "a:b", "b", "short"]
    for group in ("a", "a:b", "b"):
        leases.release(group, "w", "t")
    assert leases.groups() == ["short"]
    for group in ("a", "a:b", "b"):
        leases.forget(group, "w", "t")
    assert leases.groups() == ["short"]
    assert client.smembers("test:groups") == {b"short"}
    client.delete("test:groups")
    assert leases.renew("short", "w", "t", LONG_MS)
    assert leases.groups() == ["short"]


def test_a_group_can_be_announced_before_it_has_a_lease(leases: RedisLeases, client: redis.Redis) -> None:
    leases.announce("announced", LONG_MS)
    assert leases.groups() == ["announced"]
    assert leases.poll("announced") == [], "a poll before placement must not undo the announcement"
    assert leases.groups() == ["announced"]
    leases.announce("announced", 1)
    while leases.groups():
        assert leases.poll("announced") == []
    leases.acquire(GROUP, "w", "t", b"", LONG_MS)
    leases.announce(GROUP, 1)
    assert min(client.pttl(key) for key in client.scan_iter()) > LONG_MS / 2
    assert tokens(leases) == {"w": "t"}


def test_deadlines_without_a_lease_are_swept(leases: RedisLeases, client: redis.Redis) -> None:
    leases.acquire(GROUP, "w", "t", b"", LONG_MS)
    leases.acquire(GROUP, "v", "t", b"", LONG_MS)
    client.delete("test:lease:model:w")
    assert tokens(leases) == {"v": "t"}
    assert client.zrange("test:leases:model", 0, -1) == [b"v"]


def test_stores_namespaces_and_kinds_of_holders_are_separate(client: redis.Redis) -> None:
    workers, ingresses = RedisLeases(client, "one"), RedisLeases(client, "one", "ingress")
    ingresses.acquire(GROUP, "w", "t1", b"", LONG_MS)
    assert workers.groups() == [], "an ingress alone places no group"
    workers.acquire(GROUP, "w", "t2", b"", LONG_MS)
    other, embedded = RedisLeases(client, "other"), embedded_leases()
    other.acquire(GROUP, "w", "t3", b"", LONG_MS)
    embedded.acquire(GROUP, "w", "t4", b"", LONG_MS)
    held = [tokens(one)["w"] for one in (ingresses, workers, other, embedded, embedded_leases()) if tokens(one)]
    assert held == ["t1", "t2", "t3", "t4"]


def test_scripts_are_loaded_again_after_a_server_loses_them(leases: RedisLeases, client: redis.Redis) -> None:
    leases.acquire(GROUP, "w", "t", b"", LONG_MS)
    client.script_flush()
    assert leases.renew(GROUP, "w", "t", LONG_MS)
    assert tokens(leases) == {"w": "t"}


def test_threads_can_renew_while_another_thread_polls(leases: RedisLeases) -> None:
    names = [f"w{number}" for number in range(4)]
    for name in names:
        leases.acquire(GROUP, name, name, b"payload", LONG_MS)
    begin = threading.Barrier(len(names) + 1)

    def renew(name: str) -> bool:
        begin.wait()
        return all(leases.renew(GROUP, name, name, LONG_MS) for _ in range(100))

    with ThreadPoolExecutor(len(names)) as pool:
        renewing = [pool.submit(renew, name) for name in names]
        begin.wait()
        polls = [tokens(leases) for _ in range(50)]
        assert all(done.result() for done in renewing)
    assert polls == [{name: name for name in names}] * 50


@given(st.lists(st.tuples(st.text(max_size=4), st.text(max_size=4)), max_size=5))
def test_leases_of_any_names_are_distinct(pairs: list[tuple[str, str]]) -> None:
    leases = embedded_leases()
    expected: dict[str, set[str]] = {}
    for group, worker_id in pairs:
        leases.acquire(group, worker_id, "t", b"", LONG_MS)
        expected.setdefault(group, set()).add(worker_id)
    for group, workers in expected.items():
        assert set(tokens(leases, group)) == workers


def test_an_unreachable_redis_raises_a_lease_error() -> None:
    server = fakeredis.FakeServer()
    leases = RedisLeases(fakeredis.FakeRedis(server=server))
    leases.acquire(GROUP, "w", "t", b"", LONG_MS)
    server.connected = False
    for call in (
        lambda: leases.acquire(GROUP, "w", "t", b"", 1),
        lambda: leases.renew(GROUP, "w", "t", 1),
        lambda: leases.release(GROUP, "w", "t"),
        lambda: leases.poll(GROUP),
        lambda: leases.forget(GROUP, "w", "t"),
        lambda: leases.announce(GROUP, 1),
        leases.groups,
    ):
        with pytest.raises(LeaseError, match="cannot be reached"):
            call()
    server.connected = True
    assert tokens(leases) == {"w": "t"}


def test_a_refused_connection_raises_a_lease_error() -> None:
    client = redis.Redis(unix_socket_path="no.sock", retry=Retry(NoBackoff(), 0))
    with pytest.raises(LeaseError, match="check its address and that it is running"):
        RedisLeases(client).poll(GROUP)
    client.close()


def test_a_redis_error_reply_raises_a_lease_error(leases: RedisLeases, client: redis.Redis) -> None:
    client.set("test:leases:model", "no sorted set")
    with pytest.raises(LeaseError, match="rejected"):
        leases.poll(GROUP)
