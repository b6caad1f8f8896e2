"""Counts of the limits of API keys: in memory and on Redis."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakeredis
import msgspec
import pytest
import redis
from hypothesis import given, settings
from hypothesis import strategies as st

from forebay.transport.limits import (
    DAY_S,
    LAPSE_S,
    MEMBER_S,
    WINDOW_S,
    AllCounts,
    Amounts,
    Ask,
    Counts,
    LimitsUnavailable,
    MemoryLimits,
    Reply,
    pack,
    take,
    total,
)
from forebay.transport.redis.limits import RedisLimits
from tests.harness.local import Missing, local_redis

LIMITS = Amounts(requests=10, tokens=1_000, in_flight=4, day=5_000, month=8_000)
START = 20_000 * DAY_S + 100  # 2024-10-04


def ask(version: int, ingress: str = "i1", limits: Amounts = LIMITS, known: AllCounts | None = None, **f: Any) -> Ask:
    """Return a call of an ingress that has no counts of its own, besides those that it knows."""
    mine = (known or {}).get(ingress, Counts())
    counts = {**(known or {}), ingress: msgspec.structs.replace(mine, version=version)}
    return Ask("key", ingress, limits, pack(counts), **f)


class Store:
    """The counts of one key, with a clock in seconds that the test sets."""

    def __init__(self) -> None:
        self.counts: AllCounts = {}
        self.now = START
        self._version = 0

    def take(
        self, requests: int = 0, tokens: int = 0, ingress: str = "i1", known: AllCounts | None = None, **fields: Any
    ) -> Reply:
        self._version += 1
        given = ask(self._version, ingress, known=known or self.counts, requests=requests, tokens=tokens, **fields)
        reply = take(pack(self.counts), given, self.now)
        self.counts = reply.counts
        return reply


def granted(reply: Reply) -> tuple[int, int]:
    return reply.requests, reply.tokens


def totals(reply: Reply) -> Amounts:
    return total(reply.counts.values())


def test_what_was_taken_counts_for_the_window_and_then_no_longer() -> None:
    store = Store()
    assert granted(store.take(8, 900)) == (8, 900)
    assert granted(store.take(8, 900)) == (2, 100)
    store.now += WINDOW_S - 1
    assert granted(store.take(1, 1)) == (0, 0)
    store.now += 1
    assert granted(store.take(20, 5_000)) == (10, 1_000)


def test_corrections_change_the_second_for_which_they_are_made() -> None:
    store = Store()
    store.take(10, 1_000)
    store.now += 30
    store.counts["i1"].add(START, -1, -400)
    assert granted(store.take(5, 500)) == (1, 400)
    store.now += WINDOW_S - 30
    assert granted(store.take(10, 1_000)) == (9, 600)


def test_a_budget_ends_with_its_day_and_its_month() -> None:
    store = Store()
    limits = Amounts(day=100, month=150)
    assert store.take(1, 120, limits=limits).tokens == 100
    store.now += DAY_S
    assert store.take(1, 120, "i2", limits=limits).tokens == 50, "also one that another ingress has used"
    store.now += 31 * DAY_S
    assert store.take(limits=limits).tokens == 0
    store.counts["i1"].add(START, 0, -100)
    assert store.take(1, 120, limits=limits).tokens == 100
    store.counts["i1"].add(store.now, 0, -30)
    assert store.take(1, 1, limits=limits).tokens == 1


def test_slots_of_a_dead_ingress_lapse() -> None:
    store = Store()
    assert slots(store.take(slots=3)) == (3, 3)
    assert slots(store.take(ingress="i2", slots=3), "i2") == (1, 4)
    store.now += LAPSE_S - 1
    assert slots(store.take(ingress="i2", in_flight=1, slots=3), "i2") == (1, 4)
    store.now += 1
    assert slots(store.take(ingress="i2", in_flight=1, slots=5), "i2") == (4, 4)
    assert slots(store.take(in_flight=3, slots=3)) == (3, 7), "an ingress keeps what it has in flight"


def slots(reply: Reply, ingress: str = "i1") -> tuple[int, int]:
    """Return the slots of the ingress, and those of all ingresses."""
    return reply.counts[ingress].slots, totals(reply).in_flight


def test_a_call_replaces_one_without_a_reply_and_a_late_one_has_no_effect() -> None:
    lost = take(b"", ask(1, requests=2, tokens=20), START)
    later = take(pack(lost.counts), ask(2, requests=3, tokens=30), START)
    assert totals(later)[:2] == (3, 30)
    with pytest.raises(LimitsUnavailable, match="later call"):
        take(pack(later.counts), ask(1, requests=2, tokens=20), START)


@pytest.mark.parametrize("is_older", [False, True])
def test_a_store_that_has_lost_its_counts_gets_them_from_each_ingress(*, is_older: bool) -> None:
    store = Store()
    older = pack(store.take(1, 10).counts)
    known = store.take(2, 100, ingress="i2").counts
    store.counts = msgspec.msgpack.decode(older, type=AllCounts) if is_older else {}
    store.now += 5
    assert store.take(1, 100, ingress="i3", known={"i3": Counts()}).requests == 1
    for name in ("i1", "i2", "i1"):
        reached = totals(store.take(ingress=name, known=known))
    assert reached[:2] == (4, 210)
    assert reached.day == reached.month == reached.tokens
    store.now += WINDOW_S
    assert totals(store.take(known=known)).day == reached.day


def test_only_the_budgets_of_a_dead_ingress_are_kept() -> None:
    store = Store()
    store.take(1, 10)
    store.take(ingress="i2")
    store.now += MEMBER_S
    assert set(store.take(ingress="i3").counts) == {"i1", "i3"}


@pytest.mark.parametrize("jump_s", [-3_600, -DAY_S, 3_600])
def test_a_clock_that_jumps_blocks_and_opens_a_key_for_at_most_a_window(jump_s: int) -> None:
    store = Store()
    store.take(10, 1_000, slots=4)
    store.now += jump_s
    assert granted(store.take(10, 1_000, ingress="i2", slots=4)) == ((10, 1_000) if jump_s > 0 else (0, 0))
    assert granted(store.take(10, 1_000, ingress="i2", slots=4)) == (0, 0)
    store.now += WINDOW_S
    reply = store.take(10, 1_000, ingress="i2", slots=4)
    assert (granted(reply), reply.counts["i2"].slots) == ((10, 1_000), 4)
    assert totals(reply).day == (3_000 if jump_s > 0 else 2_000), "the budget of a day does not begin again"


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 700)), max_size=60))
def test_no_window_has_more_than_the_limit(calls: list[tuple[int, int, int]]) -> None:
    store, taken = Store(), list[tuple[int, int, int]]()
    for wait_s, requests, tokens in calls:
        store.now += wait_s
        reply = store.take(requests, tokens, ingress=f"i{requests % 3}")
        taken.append((store.now, *granted(reply)))
        recent = [one for one in taken if one[0] > store.now - WINDOW_S]
        assert sum(one[1] for one in recent) == totals(reply).requests <= LIMITS.requests
        assert sum(one[2] for one in recent) == totals(reply).tokens <= LIMITS.tokens


@pytest.fixture(params=["in process", pytest.param("server", marks=pytest.mark.integration)])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[redis.Redis]:
    if request.param == "in process":
        with fakeredis.FakeRedis(server=fakeredis.FakeServer()) as client:
            yield client
        return
    try:
        with local_redis(tmp_path) as url, redis.Redis.from_url(url) as client:
            yield client
    except Missing as missing:
        pytest.skip(str(missing))


async def test_ingresses_share_the_counts_on_redis(client: redis.Redis) -> None:
    store = RedisLimits(client, "a:b")
    assert granted(await store.take(ask(1, "i1", requests=6, tokens=1))) == (6, 1)
    reply = await store.take(ask(1, "i2", requests=6, tokens=1))
    assert granted(reply) == (4, 1)
    assert [await store.beat(name) for name in ("i1", "i2", "i1")] == [(True, 1), (True, 2), (False, 2)]
    assert client.ttl("a%3Ab:limits:key") > 31 * DAY_S
    client.flushall()
    assert await store.beat("i2") == (True, 1), "the store has lost everything"
    for damaged in (b"no counts", pack({"i1": Counts(at_s=1 << 60)})):
        client.set("a%3Ab:limits:key", damaged)
        assert granted(await store.take(ask(2, "i2", requests=6, known=reply.counts))) == (0, 0), "counts are restored"


async def test_ingresses_that_write_at_the_same_time_take_no_more_than_the_limit(client: redis.Redis) -> None:
    async def take(ingress: str) -> int:
        store, taken, known = RedisLimits(client), 0, dict[str, Counts]()
        for number in range(1, 4):
            reply = await store.take(ask(number, ingress, known=known, requests=1))
            taken, known = taken + reply.requests, reply.counts
        return taken

    taken = await asyncio.gather(*(take(f"i{number}") for number in range(8)))
    assert sum(taken) == LIMITS.requests


async def test_the_store_in_memory_has_one_ingress() -> None:
    store = MemoryLimits()
    assert granted(await store.take(ask(1, requests=20))) == (10, 0)
    assert await store.beat("i1") == (False, 1)
