"""Limits of API keys: several ingresses that share one store, a store that fails, and the HTTP responses."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from forebay import runtime
from forebay.events.keys import KeySet
from forebay.events.requests import RequestCancelled, RequestSubmitted
from forebay.ingress.errors import ApiError
from forebay.ingress.http import response
from forebay.ingress.limits import ANSWER_S, BEAT_S, Reservation
from forebay.ingress.limits import LimitsOfKeys as Limits
from forebay.ingress.metrics import IngressMetrics
from forebay.runtime.system import SystemRuntime
from forebay.transport.limits import (
    DAY_S,
    WINDOW_S,
    AllCounts,
    Amounts,
    Ask,
    LimitsUnavailable,
    MemoryLimits,
    Reply,
    total,
)
from tests.ingress.conftest import CHAT, EMBED, MESSAGES, RESPONSES, TEXT, Scene, chat, error, text
from tests.ingress.keyed import bearer, key_of, keyed
from tests.system import until

START_S = 1_800_000_000.0


class SetClock(SystemRuntime):
    """Runtime whose clocks a test sets."""

    now_s = START_S
    jump_s = 0.0

    def wall_ns(self) -> int:
        return round((self.now_s + self.jump_s) * 1e9)

    def monotonic_ns(self) -> int:
        return round(self.now_s * 1e9)


class FaultyStore(MemoryLimits):
    """Store that fails while `is_down`, that may be replaced by an empty one, and that may lose replies."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False
        self.ingresses = 1
        self.known = set[str]()
        self.calls = 0
        self.lost_replies = 0

    async def take(self, ask: Ask) -> Reply:
        if self.is_down:
            raise LimitsUnavailable("down")
        self.calls += 1
        reply = await super().take(ask)
        if self.lost_replies:
            self.lost_replies -= 1
            raise LimitsUnavailable("lost")
        return reply

    async def beat(self, ingress: str) -> tuple[bool, int]:
        if self.is_down:
            raise LimitsUnavailable("down")
        is_new = ingress not in self.known
        self.known.add(ingress)
        return is_new, self.ingresses

    def restart_empty(self) -> None:
        self._packed.clear()
        self.known.clear()


class Cluster:
    """Ingresses that share a store. Time passes only in `pass_s`, in which every ingress reads totals each second."""

    def __init__(self, clock: SetClock, count: int, event: KeySet) -> None:
        self.clock = clock
        self.event = event
        self.store = FaultyStore()
        self.store.ingresses = count
        self.registry = CollectorRegistry()
        metrics = [IngressMetrics(self.registry if not at else CollectorRegistry(), "m") for at in range(count)]
        self.ingresses = [Limits(self.store, f"i{at}", metrics[at]) for at in range(count)]
        self.admitted: list[list[Any]] = []  # time, tokens that count, reservation, whether it has ended
        self._beat_s = clock.now_s

    async def pass_s(self, seconds: float) -> None:
        end_s = self.clock.now_s + seconds
        while self._beat_s + BEAT_S <= end_s:
            self._beat_s += BEAT_S
            self.clock.now_s = self._beat_s
            for ingress in self.ingresses:
                await ingress.beat()
        self.clock.now_s = end_s

    async def arrive(self, at: int, prompt: int = 0, output: int = 0) -> Reservation | None:
        try:
            reservation = await self.ingresses[at].admit(self.event, prompt, output)
        except ApiError as rejection:
            assert rejection.status == 429, rejection
            return None
        self.admitted.append([self.clock.now_s, prompt + output, reservation, False])
        return reservation

    def end(self, number: int, tokens: int) -> None:
        entry = self.admitted[number]
        entry[1] = min(entry[1], tokens)
        entry[2].end(entry[1])
        entry[3] = True

    def totals(self) -> Amounts:
        """Return the totals of the key in the store."""
        counts = msgspec.msgpack.decode(self.store._packed.get(self.event.key_id, b"\x80"), type=AllCounts)
        for one in counts.values():
            one.advance(int(runtime.wall_s()))
        return total(counts.values())

    def most(self) -> tuple[int, int]:
        """Return the most requests and tokens in any 60 s."""
        times, best = [entry[0] for entry in self.admitted], (0, 0)
        for first, begin in enumerate(times):
            window = [entry for entry in self.admitted[first:] if entry[0] < begin + 60]
            best = max(best[0], len(window)), max(best[1], sum(entry[1] for entry in window))
        return best


@contextmanager
def clocked() -> Any:
    clock = SetClock()
    with runtime.use(clock):
        yield clock


def run(part: Any) -> None:
    asyncio.run(part)


ARRIVALS = st.lists(st.tuples(st.floats(0, 20), st.integers(0, 2), st.integers(0, 90), st.integers(0, 90)), max_size=70)


@settings(deadline=None, max_examples=60)
@given(ARRIVALS, st.integers(1, 30), st.integers(180, 900))
def test_no_60_s_have_more_than_the_limits_at_all_ingresses(
    arrivals: list[tuple[float, int, int, int]], requests: int, tokens: int
) -> None:
    async def check() -> None:
        event = key_of("acme", requests_per_minute=requests, tokens_per_minute=tokens, tokens_per_day=10**9)
        with clocked() as clock:
            cluster = Cluster(clock, 3, event)
            for wait_s, at, prompt, output in arrivals:
                await cluster.pass_s(wait_s)
                if await cluster.arrive(at, prompt, output) and output % 2:
                    cluster.end(-1, prompt + output // 3)
                most = cluster.most()
                assert most[0] <= requests
                assert most[1] <= tokens
            day = clock.now_s // DAY_S
            await cluster.pass_s(1.5)
            kept = sum(entry[1] for entry in cluster.admitted)
            assert cluster.totals().day == kept or clock.now_s // DAY_S != day
            for entry in cluster.admitted:
                if not entry[3]:
                    entry[2].release()
                    kept -= entry[1]
            await cluster.pass_s(1.5)
            assert cluster.totals().day == kept or clock.now_s // DAY_S != day

    run(check())


async def test_all_of_a_limit_can_be_used_and_all_of_it_comes_back() -> None:
    with clocked() as clock:
        cluster = Cluster(
            clock, 3, key_of("acme", requests_per_minute=1_000, tokens_per_minute=50_000, in_flight=1_000)
        )
        for number in range(900):
            assert await cluster.arrive(number % 3, 20, 30)
        await cluster.pass_s(2)
        calls = cluster.store.calls
        assert calls < 350, "an ingress takes chunks"
        for number in range(900):
            cluster.end(number, 25)
        await cluster.pass_s(2)
        totals = cluster.totals()
        assert (*totals[:2], totals.in_flight) == (900, 900 * 25, 0)
        for _ in range(100):
            assert await cluster.arrive(2, 100, 150)
        assert not await cluster.arrive(0, 1)
        for entry in cluster.admitted[900:]:
            entry[2].release()
            entry[2].end(7)  # without effect
        await cluster.pass_s(2)
        totals = cluster.totals()
        assert totals[:3] == (900, 900 * 25, 900 * 25)


async def test_requests_in_flight_count_at_all_ingresses_and_lapse_with_a_dead_one() -> None:
    with clocked() as clock:
        cluster = Cluster(clock, 2, key_of("acme", in_flight=3))
        assert [bool(await cluster.arrive(at)) for at in (0, 0, 1, 1, 0)] == [True, True, True, False, False]
        cluster.end(0, 0)
        assert not await cluster.arrive(1), "the other ingress reports the end within a second"
        await cluster.pass_s(1)
        assert await cluster.arrive(1)
        dead = cluster.ingresses.pop(0)
        await cluster.pass_s(11)
        assert dead is not None
        assert await cluster.arrive(0)


async def test_requests_that_wait_for_the_store_are_admitted_in_turn_or_cancelled() -> None:
    with clocked() as clock:
        cluster = Cluster(clock, 1, key_of("acme", requests_per_minute=30))
        gate, take = asyncio.Event(), cluster.store.take

        async def slow(ask: Ask) -> Reply:
            await gate.wait()
            return await take(ask)

        cluster.store.take = slow  # type: ignore[method-assign]
        waiting = [asyncio.create_task(cluster.arrive(0)) for _ in range(50)]
        await asyncio.sleep(0)
        waiting[7].cancel()
        gate.set()
        found = await asyncio.gather(*waiting, return_exceptions=True)
        assert sum(isinstance(one, Reservation) for one in found) == 30
        assert cluster.store.calls <= 31, "and one reply rejects the others"


async def test_rejections_share_a_reply_of_the_store() -> None:
    with clocked() as clock:
        cluster = Cluster(clock, 1, key_of("acme", requests_per_minute=30))
        for _ in range(40):
            await cluster.arrive(0)
        calls = cluster.store.calls
        assert [bool(await cluster.arrive(0)) for _ in range(20)] == [False] * 20
        assert cluster.store.calls == calls
        cluster.admitted[0][2].release()
        assert await cluster.arrive(0)
        assert cluster.store.calls == calls + 1


async def test_a_limit_that_is_off_rejects_nothing_at_any_number_of_ingresses() -> None:
    with clocked() as clock:
        cluster = Cluster(clock, 300, key_of("acme", tokens_per_month=1 << 62))
        assert [bool(await cluster.arrive(at, 10**6)) for at in range(300)] == [True] * 300


@pytest.mark.parametrize("is_empty", [False, True])
@pytest.mark.parametrize("seed", range(3))
async def test_ingresses_without_the_store_exceed_a_limit_by_at_most_a_tenth(*, seed: int, is_empty: bool) -> None:
    rng = random.Random(seed)
    with clocked() as clock:
        cluster = Cluster(clock, 3, key_of("acme", requests_per_minute=600, tokens_per_minute=60_000))
        await cluster.pass_s(1)
        down_s, up_s = clock.now_s + rng.uniform(2, 70), clock.now_s + rng.uniform(75, 150)
        while clock.now_s < up_s + 90:
            await cluster.pass_s(rng.expovariate(30))
            is_down = down_s <= clock.now_s < up_s
            if cluster.store.is_down and not is_down and is_empty:
                cluster.store.restart_empty()
            cluster.store.is_down = is_down
            at = rng.randrange(3)
            if await cluster.arrive(at, rng.randrange(100), rng.randrange(100)) and rng.random() < 0.5:
                cluster.end(-1, rng.randrange(200))
        requests, tokens = cluster.most()
        assert 500 < requests <= 660, seed
        assert tokens <= 66_000, seed


async def test_without_the_store_an_ingress_admits_its_share_of_what_is_left(caplog: pytest.LogCaptureFixture) -> None:
    with clocked() as clock:
        cluster = Cluster(clock, 2, key_of("acme", requests_per_minute=100, tokens_per_day=1_000))
        await cluster.pass_s(1)
        for _ in range(40):
            assert await cluster.arrive(0, 1)
        await cluster.pass_s(1)
        cluster.store.is_down = True
        await cluster.pass_s(1)
        assert cluster.registry.get_sample_value("forebay_ingress_limits_degraded") == 1
        assert sum([bool(await cluster.arrive(0, 1)) for _ in range(50)]) == 30
        await cluster.pass_s(WINDOW_S - 1.5)
        assert not await cluster.arrive(0, 1), "the last total counts for the rest of the window"
        unknown = key_of("beta", requests_per_minute=100)
        for _ in range(5):
            await cluster.ingresses[1].admit(unknown, 0, 0)
        with pytest.raises(ApiError, match="100 requests per minute"):
            await cluster.ingresses[1].admit(unknown, 0, 0)
        await cluster.pass_s(WINDOW_S)
        assert sum([bool(await cluster.arrive(0, 1)) for _ in range(80)]) == 50
        headers = dict(cluster.ingresses[0].headers(cluster.event))
        assert headers[b"x-ratelimit-remaining-requests"] == b"0"
        cluster.store.is_down = False
        cluster.store.restart_empty()
        await cluster.pass_s(4)
        assert cluster.registry.get_sample_value("forebay_ingress_limits_degraded") == 0
        assert cluster.totals().day == 40 + 30 + 50, "the budget of the day does not begin again"
        assert [line.split(",")[0] for line in caplog.messages[:1]] == [
            "limits of API keys are counted by this ingress alone"
        ]
        assert sum("by Redis again" in line for line in caplog.messages) == 2
        assert len(caplog.messages) == 4


async def test_a_call_whose_reply_is_lost_counts_once() -> None:
    with clocked() as clock:
        cluster = Cluster(clock, 1, key_of("acme", requests_per_minute=10, tokens_per_month=10_000))
        assert await cluster.arrive(0, 100)
        await cluster.pass_s(1)
        cluster.end(0, 50)
        cluster.store.lost_replies = 1
        await cluster.arrive(0, 100)
        await cluster.pass_s(4)
        cluster.end(1, 100)
        await cluster.pass_s(2)
        totals = cluster.totals()
        assert (totals.requests, totals.month) == (2, 150)


async def test_a_slow_store_has_failed() -> None:
    cluster = Cluster(SetClock(), 1, key_of("acme", requests_per_minute=10))

    async def hang(_: Ask) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    cluster.store.take = hang  # type: ignore[method-assign, assignment]
    assert ANSWER_S < 1
    assert await cluster.arrive(0)
    assert cluster.registry.get_sample_value("forebay_ingress_limits_degraded") == 1


@pytest.mark.parametrize("jump_s", [-7_200.0, 7_200.0])
async def test_a_wall_clock_that_jumps_does_not_block_a_key_for_longer_than_a_window(jump_s: float) -> None:
    with clocked() as clock:
        cluster = Cluster(clock, 1, key_of("acme", requests_per_minute=10))
        assert sum([bool(await cluster.arrive(0)) for _ in range(20)]) == 10
        clock.jump_s = jump_s
        await cluster.pass_s(2)
        assert sum([bool(await cluster.arrive(0)) for _ in range(20)]) == (10 if jump_s > 0 else 0)
        await cluster.pass_s(WINDOW_S)
        assert sum([bool(await cluster.arrive(0)) for _ in range(20)]) == 10


# --- HTTP -------------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def limited(**limits: int) -> AsyncIterator[Scene]:
    async with keyed(key_of("acme", **limits)) as (scene, _):
        yield scene


async def answered(scene: Scene, path: str, body: Any, output: str = "the river", **headers: str) -> httpx.Response:
    pending = scene.start(path, body, **bearer("acme"), **headers)
    request = await scene.next_request()
    scene.reply(request.request_id, output)
    return await pending


def remaining(response: httpx.Response) -> tuple[int, int]:
    names = ("requests", "tokens")
    assert all(response.headers[f"x-ratelimit-limit-{name}"] for name in names)
    first, second = (int(response.headers[f"x-ratelimit-remaining-{name}"]) for name in names)
    return first, second


async def test_a_response_has_the_headers_of_openai_and_a_429_says_when_to_try_again() -> None:
    async with limited(requests_per_minute=2, tokens_per_minute=1_000) as scene:
        assert remaining(await answered(scene, TEXT, text(max_tokens=100)))[0] == 1
        second = await answered(scene, TEXT, text(max_tokens=100, stream=True))
        assert (remaining(second)[0], second.headers["x-ratelimit-reset-requests"]) == (0, "1m2s")
        for path, body in ((TEXT, text()), (CHAT, chat()), (RESPONSES, {"model": "test-model", "input": "a"})):
            third = await scene.client.post(path, json=body, headers=bearer("acme"))
            assert error(third) == (429, "rate_limit_exceeded")
            assert 1 <= int(third.headers["retry-after"]) <= WINDOW_S
            assert remaining(third)[0] == 0
        message = await scene.client.post(MESSAGES, json=chat(), headers=bearer("acme"))
        assert (message.status_code, message.json()["error"]["type"]) == (429, "rate_limit_error")
        assert scene.metric('forebay_ingress_refused_total{code="rate_limit_exceeded"} 4.0')
        assert len(scene.requests(RequestSubmitted)) == 2
        anonymous = scene.start(TEXT, text())
        scene.reply((await scene.next_request()).request_id, "the river")
        assert "x-ratelimit-limit-requests" not in (await anonymous).headers


async def test_tokens_are_reserved_and_settled_to_those_used() -> None:
    async with limited(tokens_per_minute=200, tokens_per_day=1_000) as scene:
        first = scene.start(TEXT, text(max_tokens=120), **bearer("acme"))
        request = await scene.next_request()
        blocked = await scene.client.post(TEXT, json=text(max_tokens=120), headers=bearer("acme"))
        assert error(blocked) == (429, "rate_limit_exceeded")
        scene.reply(request.request_id, "the river")
        assert (await first).status_code == 200
        assert (await answered(scene, TEXT, text(max_tokens=120))).status_code == 200
        huge = await scene.client.post(TEXT, json=text(max_tokens=250), headers=bearer("acme"))
        assert error(huge) == (400, "limit_exceeded")
        several = await scene.client.post(TEXT, json=text(max_tokens=60, n=4), headers=bearer("acme"))
        assert error(several) == (400, "limit_exceeded"), "all choices count"


async def test_a_rejected_request_counts_nothing_and_a_routed_one_counts() -> None:
    async with limited(requests_per_minute=2, tokens_per_minute=300, in_flight=1) as scene:
        for _ in range(3):
            pending = scene.start(TEXT, text(max_tokens=200), **bearer("acme"))
            scene.refuse((await scene.next_request()).request_id, 503, "no_capacity")
            assert (await pending).status_code == 503
        pending = scene.start(TEXT, text(max_tokens=200), **bearer("acme"))
        request = await scene.next_request()
        assert error(await scene.client.post(TEXT, json=text(), headers=bearer("acme"))) == (429, "in_flight_limit")
        scene.reply(request.request_id, "the river")
        assert remaining(await pending)[0] == 1


async def test_a_budget_that_is_used_up_is_an_insufficient_quota() -> None:
    for limit in ("tokens_per_day", "tokens_per_month"):
        async with limited(**{limit: 130}) as scene:
            assert (await answered(scene, TEXT, text(max_tokens=100), "the river " * 10)).status_code == 200
            rejected = await scene.client.post(TEXT, json=text(max_tokens=120), headers=bearer("acme"))
            assert error(rejected) == (429, "insufficient_quota")
            assert int(rejected.headers["retry-after"]) >= 1


async def test_a_repetition_does_not_count_again() -> None:
    async with limited(requests_per_minute=3) as scene:
        headers = {"idempotency-key": "a"}
        first = await answered(scene, TEXT, text(), **headers)
        assert first.status_code == 200
        (request,) = scene.requests(RequestSubmitted)
        pending = scene.start(TEXT, text(), **bearer("acme"), **headers)
        second = await scene.next_request()
        assert request is not second
        scene.locate(second, 0)
        assert (await pending).headers["idempotency-replayed"] == "true"
        await scene.front.limits.beat()
        limits = dict(scene.front.limits.headers(key_of("acme", requests_per_minute=3)))
        assert limits[b"x-ratelimit-remaining-requests"] == b"2"


async def test_a_client_that_disconnects_has_no_request_in_flight() -> None:
    async with limited(in_flight=1) as scene:
        pending = scene.start(TEXT, text(), **bearer("acme"))
        await scene.next_request()
        pending.cancel()
        await until(lambda: not scene.front.admission.in_flight)
        assert (await answered(scene, TEXT, text())).status_code == 200


async def test_embeddings_count_their_prompts() -> None:
    async with limited(requests_per_minute=5, tokens_per_minute=5) as scene:
        body = {"model": "test-model", "input": "one two three four five six seven eight nine ten"}
        rejected = await scene.client.post(EMBED, json=body, headers=bearer("acme"))
        assert error(rejected) == (400, "limit_exceeded")


async def test_slots_that_a_beat_returns_are_not_used_until_the_store_replies() -> None:
    with clocked() as clock:
        cluster = Cluster(clock, 2, key_of("acme", in_flight=3))
        await cluster.arrive(0)
        cluster.end(0, 0)
        replies, take = asyncio.Event(), cluster.store.take

        async def slow(ask: Ask) -> Reply:
            reply = await take(ask)
            if ask.ingress == "i0":
                await replies.wait()
            return reply

        cluster.store.take = slow  # type: ignore[method-assign]
        beat = asyncio.create_task(cluster.ingresses[0].beat())
        await asyncio.sleep(0)
        others = [bool(await cluster.arrive(1)) for _ in range(3)]
        mine = asyncio.create_task(cluster.arrive(0))
        await asyncio.sleep(0)
        replies.set()
        await beat
        assert sum(others) + bool(await mine) == 3


async def test_a_request_that_outlives_its_client_keeps_its_reservation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response, "BACKGROUND_MAX", 0)
    key = key_of("acme", tokens_per_minute=200)
    async with limited(tokens_per_minute=200) as scene:
        body = {"model": "test-model", "input": "a", "max_output_tokens": 120}
        pending = scene.start(RESPONSES, body, **bearer("acme"))
        await scene.next_request()
        pending.cancel()
        await until(lambda: not scene.front.admission.in_flight)
        await scene.front.limits.beat()
        left = dict(scene.front.limits.headers(key))
        assert int(left[b"x-ratelimit-remaining-tokens"]) <= 80


async def test_a_repeated_request_costs_nothing_for_its_other_choices() -> None:
    async with limited(requests_per_minute=30) as scene:
        headers = {**bearer("acme"), "idempotency-key": "a"}
        pending = scene.start(TEXT, text(n=2, stream=True), **headers)
        first, second = await scene.next_request(), await scene.next_request()
        scene.emit_text(second.request_id, " the river")
        scene.locate(first, 0)
        await until(lambda: scene.requests(RequestCancelled))
        pending.cancel()
        assert [one.output_tokens for one in scene.requests(RequestCancelled)][:1] == [0]
