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
    WINDOW_S,
    Amounts,
    Ask,
    KeyCounts,
    LimitsUnavailable,
    MemoryLimits,
    Reply,
)
from forebay.transport.redis.limits import RedisLimits
from tests.harness.local import Missing, local_redis

LIMITS = Amounts(requests=10, tokens=1_000, in_flight=4, day=5_000, month=8_000)
START = 20_000 * DAY_S + 100  # 2024-10-04


def ask(sequence: int, ingress: str = "i1", limits: Amounts = LIMITS, **fields: Any) -> Ask:
    return Ask("key", ingress, sequence, limits, **fields)


class Counts:
    """The counts of one key, with a clock in seconds that the test sets."""

    def __init__(self) -> None:
        self.state = KeyCounts()
        self.now = START
        self._sequence = 0

    def take(self, requests: int = 0, tokens: int = 0, ingress: str = "i1", **fields: Any) -> Reply:
        self._sequence += 1
        given = ask(self._sequence, ingress, requests=requests, tokens=tokens, **fields)
        return self.state.take(given, self.now * 1_000_000)


def test_what_was_taken_counts_for_the_window_and_then_no_longer() -> None:
    counts = Counts()
    assert counts.take(8, 900)[2:4] == (8, 900)
    assert counts.take(8, 900)[2:4] == (2, 100)
    counts.now += WINDOW_S - 1
    assert counts.take(1, 1)[2:4] == (0, 0)
    counts.now += 1
    reply = counts.take(20, 5_000)
    assert (reply.requests, reply.tokens, reply.first_s) == (10, 1_000, counts.now)


def test_corrections_change_the_second_for_which_they_are_made() -> None:
    counts = Counts()
    first = counts.take(10, 1_000)
    counts.now += 30
    assert counts.take(5, 500, changes=((first.granted_s, -1, -400),))[2:4] == (1, 400)
    counts.now += WINDOW_S - 30
    assert counts.take(10, 1_000)[2:4] == (9, 600)


def test_a_budget_ends_with_its_day_and_its_month() -> None:
    counts = Counts()
    limits = Amounts(day=100, month=150)
    assert counts.take(1, 120, limits=limits).tokens == 100
    counts.now += DAY_S
    assert counts.take(1, 120, limits=limits).tokens == 50
    counts.now += 31 * DAY_S
    late = ((START, 0, -100),)
    assert counts.take(1, 120, limits=limits, changes=late).tokens == 100
    assert counts.take(1, 1, limits=limits, changes=((counts.now, 0, -30),)).tokens == 1


def test_slots_of_a_dead_ingress_lapse() -> None:
    counts = Counts()
    assert counts.take(slots=3).slots == 3
    assert counts.take(ingress="i2", slots=3).slots == 1
    counts.now += LAPSE_S - 1
    assert slots(counts.take(ingress="i2", in_flight=1, slots=3)) == (1, 4)
    counts.now += 1
    assert slots(counts.take(ingress="i2", in_flight=1, slots=5)) == (4, 4)
    assert slots(counts.take(in_flight=3, slots=3)) == (3, 7), "an ingress keeps what it has in flight"


def slots(reply: Reply) -> tuple[int, int]:
    """Return the slots of the ingress, and those of all ingresses."""
    return reply.slots, reply.known.totals.in_flight


def test_a_repeated_call_has_one_effect() -> None:
    state, now_us = KeyCounts(), START * 1_000_000
    first = ask(1, requests=2, tokens=20, changes=((START, 1, 100),))
    reply = state.take(first, now_us)
    again = state.take(first._replace(requests=5), now_us + 3_000_000)
    assert again.known.totals[:2] == (3, 120)
    assert again[1:5] == reply[1:5]


@pytest.mark.parametrize("is_older", [False, True])
def test_totals_are_the_minimum_after_a_store_has_lost_its_counts(*, is_older: bool) -> None:
    counts = Counts()
    older = counts.take(1, 10).known
    state = KeyCounts()
    if is_older:
        state.take(ask(1, requests=1, tokens=10), START * 1_000_000)
        state.generation = older.generation
    for _ in range(5):
        counts.take()
    known = [counts.take(2, 100, ingress=name).known for name in ("i1", "i2")]
    counts.state = state
    counts.now += 5
    assert counts.take(1, 100, ingress="i3").requests == 1
    reached = [counts.take(known=one).known for one in (*known, *known)][-1]
    # Older counts are a part of the known totals, and so is what was added to them before this was noticed.
    assert reached.totals[:2] == ((5, 210) if is_older else (6, 310))
    assert reached.totals.day == reached.totals.month == reached.totals.tokens
    counts.now += WINDOW_S
    assert counts.take(known=known[0]).known.totals.day == reached.totals.day


@pytest.mark.parametrize("jump_s", [-3_600, -DAY_S, 3_600])
def test_a_clock_that_jumps_blocks_and_opens_a_key_for_at_most_a_window(jump_s: int) -> None:
    counts = Counts()
    counts.take(10, 1_000, slots=4)
    counts.now += jump_s
    assert counts.take(10, 1_000, ingress="i2", slots=4)[2:4] == ((10, 1_000) if jump_s > 0 else (0, 0))
    assert counts.take(10, 1_000, ingress="i2", slots=4)[2:4] == (0, 0)
    counts.now += WINDOW_S
    reply = counts.take(10, 1_000, ingress="i2", slots=4)
    assert (reply.requests, reply.tokens, reply.slots) == (10, 1_000, 4)
    assert reply.known.totals.day == (3_000 if jump_s > 0 else 2_000), "the budget of a day does not begin again"


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12), st.integers(0, 700)), max_size=60))
def test_no_window_has_more_than_the_limit(calls: list[tuple[int, int, int]]) -> None:
    counts, taken = Counts(), list[tuple[int, int, int]]()
    for wait_s, requests, tokens in calls:
        counts.now += wait_s
        reply = counts.take(requests, tokens, ingress=f"i{requests % 3}")
        taken.append((reply.granted_s, reply.requests, reply.tokens))
        recent = [one for one in taken if one[0] > counts.now - WINDOW_S]
        assert sum(one[1] for one in recent) == reply.known.totals.requests <= LIMITS.requests
        assert sum(one[2] for one in recent) == reply.known.totals.tokens <= LIMITS.tokens


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
    assert (await store.take(ask(1, "i1", requests=6, tokens=1)))[2:4] == (6, 1)
    assert (await store.take(ask(1, "i2", requests=6, tokens=1)))[2:4] == (4, 1)
    assert (await store.take(ask(1, "i2", requests=6, tokens=1)))[2:4] == (4, 1), "the same call"
    generation, count = await store.beat("i1")
    assert (await store.beat("i2"), count) == ((generation, 2), 1)
    assert client.ttl("a%3Ab:limits:key") > DAY_S
    client.flushall()
    assert (await store.beat("i2"))[0] != generation
    for damaged in (b"no counts", msgspec.msgpack.encode(KeyCounts(at_s=1 << 60))):
        client.set("a%3Ab:limits:key", damaged)
        with pytest.raises(LimitsUnavailable):
            await store.take(ask(2))
    await store.close()


async def test_ingresses_that_write_at_the_same_time_take_no_more_than_the_limit(client: redis.Redis) -> None:
    async def take(ingress: str) -> int:
        store = RedisLimits(client)
        return sum([(await store.take(ask(number, ingress, requests=1))).requests for number in range(1, 4)])

    taken = await asyncio.gather(*(take(f"i{number}") for number in range(8)))
    assert sum(taken) == LIMITS.requests


async def test_the_store_in_memory_has_one_ingress() -> None:
    store = MemoryLimits()
    assert (await store.take(ask(1, requests=20)))[2] == 10
    assert await store.beat("i1") == (1, 1)
    await store.close()
