"""An owner on a real log with real workers: routing, recovery, clocks, lost and draining workers, and kills."""

import asyncio
import functools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.core.state.fleet import WorkerPhase
from forebay.engine_model.model import EngineConfig
from forebay.engine_model.sequence import generate_tokens
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.control import Command, PoolConfigured, RouterConfig
from forebay.events.decisions import RequestAborted, RequestRejected, RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost, WorkerSpec
from forebay.events.progress import RequestFinished
from forebay.events.tokens import AttemptStarted, ResponseEnded, TokensEmitted
from forebay.events.topics import CONTROL, FLEET, PROGRESS, REQUESTS, TOKENS, work_topic
from forebay.events.work import WorkItem
from forebay.ingress.streams import ReplySlot, Stream
from forebay.live.owner.owner import Owner, RunClock, steady_clock
from forebay.transport.base import Wake
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.runtime.life_cycle import State
from forebay.workers.runtime.worker import Worker
from tests.depth import is_quick
from tests.harness.fake_runtime import FakeRuntime
from tests.live.shared import (
    PREFIX,
    SENT,
    LateTail,
    SharedLog,
    admit,
    all_ended,
    background,
    located,
    prompt,
    proven,
    run_until_append,
    samples,
    scenario,
)
from tests.system import BLOCK, MODEL, SLOT, System, submitted, until, until_ended

LONG_S = 3600.0
SLOW = 3.0  # speedup at which a response takes long enough to lose a worker during it
STUCK = 0.01  # speedup at which a response does not end during a test
LENGTH = 150  # output tokens of a response during which a worker is lost
VOCABULARY = tuple(range(50))


async def started_worker(system: System, owner: Owner, name: str, speedup: float) -> None:
    system.start_worker(name, speedup=speedup)
    await until(lambda: owner.world.fleet.get(name))


async def test_a_request_is_answered_and_its_prefix_is_found_by_the_next(log: SqliteLog) -> None:
    async with System(log).started(workers=3) as system, system.owned(fleet=3) as owner:
        await system.serve("a", prompt(100))
        await system.serve("b", prompt(200))
        first, second = system.decisions(RequestRouted)
        assert first.worker_id == second.worker_id
        assert (first.terms.device_overlap, second.terms.device_overlap) == (0, 3)
        (end,) = system.ends()["b"]
        assert end.usage is not None
        assert (end.usage.prompt_tokens, end.usage.output_tokens, end.usage.cached_tokens) == (16, 3, 12)
        assert len(system.answer("b")) == 3
        await until(lambda: not len(owner.world.requests))


async def test_a_repeated_record_has_no_effect_and_a_reused_id_is_rejected(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, system.owned(fleet=1):
        for _ in range(2):
            system.send(submitted("a", PREFIX, nonce=1))
        await until_ended(system, "a")
        system.send(submitted("a", PREFIX, nonce=2))
        await until(lambda: len(system.ends()["a"]) == 2)
        assert len(system.decisions(RequestRouted)) == 1
        (refused,) = system.decisions(RequestRejected)
        assert refused.reason == "duplicate_id"


async def test_a_work_item_belongs_to_the_accepted_submission(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system:
        await admit(system, 1)
        system.send(submitted("a", PREFIX, nonce=1))
        system.send(submitted("a", [7, 7], nonce=2))
        async with system.owned():
            await until(lambda: len(system.ends().get("a", ())) == 2)
        items = system.events(work_topic("default"), WorkItem)
        assert [unpack_u32(item.token_ids) for item in items] == [PREFIX]


async def test_a_pool_is_configured_by_its_first_lease_and_follows_the_settings(log: SqliteLog) -> None:
    turns = RouterConfig(mode="round-robin")
    async with System(log).started(workers=2) as system:
        async with system.owned(SharedLog(log), pool=None, router=turns, fleet=2) as owner:
            await system.serve("a", PREFIX)
        async with system.owned(SharedLog(log), pool=None, router=turns):
            pass
        async with system.owned(SharedLog(log), pool=None) as owner:
            assert owner.world.pools["default"].router == RouterConfig()
            await system.serve("b", PREFIX)
        pools = system.events(CONTROL, PoolConfigured)
        assert [(pool.pool, pool.model, pool.block_size, pool.router) for pool in pools] == [
            ("default", MODEL, BLOCK, turns),
            ("default", MODEL, BLOCK, RouterConfig()),
        ]
        assert [routed.mode for routed in system.decisions(RequestRouted)] == ["round-robin", "kv"]


# Kills


@pytest.mark.timeout(240)
async def test_a_kill_after_any_append_loses_nothing() -> None:
    """Kill the owner after its k-th append, for every k (every fourth under `quick`) until a run is not killed."""
    appends, died = 1, True
    step = 4 if is_quick() else 1
    while died:
        log = SqliteLog.open(None)
        async with System(log).started(workers=2) as system:
            await admit(system, 2)
            sending = asyncio.create_task(scenario(system))
            died = await run_until_append(system, appends)
            async with system.owned() as owner:
                await until(lambda: all_ended(system, owner))
            await sending
            for number in range(6):
                assert len(system.answer(f"r{number}")) == 3, f"r{number}, killed after append {appends}"
            routed = [(routed.request_id, routed.attempt) for routed in system.decisions(RequestRouted)]
            assert len(routed) == len(set(routed)), f"routed twice, killed after append {appends}"
            assert {name for name, _ in routed} == SENT - {"wrong"}, f"ran a repetition, killed after append {appends}"
            first = [one.request_id for one in system.events(REQUESTS)].index("r0")
            assert located(system) == [("repeated", 0, first)], f"killed after append {appends}"
        report = await proven(log)
        assert report.claims == 3
        log.close()
        appends += step
    assert appends > 15


async def test_an_owner_restarted_on_a_file_finds_the_cached_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    prompts = {f"p{number}": [number] * 16 for number in range(8)}
    with closing(SqliteLog.open(path)) as log:
        async with System(log).started(workers=4) as system:
            async with system.owned(fleet=4) as owner:
                for name, tokens in prompts.items():
                    system.send(submitted(name, tokens))
                await until(lambda: set(prompts) <= set(system.ends()) and not len(owner.world.requests))
                warm = {routed.request_id: routed.worker_id for routed in system.decisions(RequestRouted)}
            async with system.owned():
                for name, tokens in prompts.items():
                    system.send(submitted(f"{name}-again", tokens))
                await until(lambda: len(system.ends()) == 2 * len(prompts))
                again = {routed.request_id: routed for routed in system.decisions(RequestRouted)[len(prompts) :]}
                for name, worker in warm.items():
                    routed = again[f"{name}-again"]
                    assert (routed.worker_id, routed.terms.device_overlap) == (worker, 4)
    with closing(SqliteLog.open(path, readonly=True)) as reopened:
        await proven(reopened)


# The recorded clock starts at the larger of the machine's clock and the last reading, and advances steadily

NOON_US = 1_000_000_000_000
HOUR_US = 3_600_000_000


class ManualClock:
    def __init__(self, now_us: int) -> None:
        self.now_us = now_us

    def __call__(self) -> int:
        return self.now_us


@pytest.mark.parametrize(("recorded_us", "starts_us"), [(NOON_US + 7, NOON_US + 7), (NOON_US - 7, NOON_US)])
def test_the_clock_starts_at_the_larger_reading_and_advances_at_once(recorded_us: int, starts_us: int) -> None:
    hands = ManualClock(NOON_US)
    clock = RunClock(hands)
    clock.resume(recorded_us)
    assert clock.now_us() == starts_us
    hands.now_us += 5
    assert clock.now_us() == starts_us + 5
    hands.now_us -= 3
    assert clock.now_us() == starts_us + 5


def test_steps_of_the_wall_clock_change_nothing() -> None:
    clock = steady_clock()
    before = clock()
    with runtime.use(FakeRuntime(wall_shift_s=-1e6)):
        assert before <= clock() < before + HOUR_US


@pytest.mark.parametrize("skew_us", [HOUR_US, -HOUR_US, 0])
async def test_deadlines_expire_after_a_takeover_between_differing_clocks(
    log: SqliteLog, skew_us: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Deadlines expire under the second owner whether the first owner's clock was ahead, behind or correct."""
    async with System(log).started(workers=0) as system:
        system.start_worker("slow", speedup=STUCK)
        async with system.owned(clock_us=ManualClock(NOON_US + skew_us), fleet=1) as first:
            pass
        recorded_us = first.world.now_us
        hands = ManualClock(NOON_US)
        async with system.owned(clock_us=hands) as second:
            system.send(submitted("a", PREFIX, timeout_us=20_000))
            await until(lambda: len(second.world.requests) == 1)
            assert second.world.now_us == max(NOON_US, recorded_us)
            hands.now_us += 20_000
            await until_ended(system, "a")
            (aborted,) = system.decisions(RequestAborted)
            assert aborted.reason == "deadline"
            (end,) = system.ends()["a"]
            assert end.error is not None
            assert (end.error.status, end.error.code) == (504, "deadline_exceeded")
            assert second.world.now_us == max(NOON_US, recorded_us) + 20_000
            assert second.clock_ahead_us == max(0, skew_us)
            assert ("3600.0 s ahead" in caplog.text) == (skew_us > 0)
            assert samples(second)["forebay_owner_clock_ahead_seconds",] == max(0, skew_us) / 1e6


# A draining worker gets no new requests, finishes its own, and hands unfinished ones to another worker


async def test_new_requests_avoid_a_draining_worker_that_finishes_its_own(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner:
        await started_worker(system, owner, "a", SLOW)
        system.send(submitted("old", [1, 2, 3], max_tokens=LENGTH))
        await until(lambda: system.answer("old"))
        engine = system.workers["a"].engine
        await engine.command(Command(action="pause"))  # paused, so that it finishes only after the new requests
        system.start_worker("b")
        system.workers["a"].drain(LONG_S)
        await until(lambda: (found := owner.world.fleet.get("a")) and found.phase is WorkerPhase.DRAINING)
        await until(lambda: owner.world.fleet.get("b"))
        for number in range(5):
            # The prompts share the prefix that the draining worker has cached.
            await system.serve(f"new{number}", [1, 2, 3, number], max_tokens=2)
        assert "old" not in system.ends()
        await engine.command(Command(action="resume"))
        await until_ended(system, "old")
        await until(lambda: owner.world.fleet.get("a") is None)
        assert system.workers["a"].life.state is State.DEREGISTERED
        assert [lease.worker_id for lease in system.leases.poll(MODEL) if not lease.released] == ["b"]
        await until(lambda: not len(owner.world.requests))
    routed = [(one.request_id, one.worker_id, one.attempt) for one in system.decisions(RequestRouted)]
    assert routed == [("old", "a", 1), *((f"new{number}", "b", 1) for number in range(5))]
    assert len(system.answer("old")) == LENGTH
    facts = [type(event) for event in system.events(FLEET) if isinstance(event, WorkerDraining | WorkerLost)]
    assert facts[:2] == [WorkerDraining, WorkerLost]


async def test_a_handed_back_request_continues_on_another_worker(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner, listening(log, "r") as client:
        await started_worker(system, owner, "a", SLOW)
        system.send(submitted("r", PROMPT, max_tokens=LENGTH))
        await until(lambda: client.tokens)
        system.workers["a"].drain(0.0)
        await until(lambda: owner.world.fleet.get("a") is None)
        system.start_worker("b")
        await until(lambda: client.ended)
        require_continuation(system, client)
        await until(lambda: not len(owner.world.requests))
    assert [one.worker_id for one in system.decisions(RequestRouted)] == ["a", "b"]
    assert system.workers["a"].counters.handed_back == 1


# If a worker is lost during a response, another worker continues it and the client gets each token once

PROMPT = list(range(10))


@dataclass
class Client:
    """The tokens and the end that one client received."""

    tokens: list[int] = field(default_factory=list)
    ended: ResponseEnded | None = None


@asynccontextmanager
async def listening(log: SqliteLog, name: str) -> AsyncIterator[Client]:
    """Follow the response as an ingress does, and yield its client."""
    client = Client()
    slot = ReplySlot(log, SLOT, 0, lambda: None, lambda _: None)
    stream = slot.reader(MODEL).add(name, Stream(submitted(name, PROMPT).reply_key))

    async def take() -> None:
        while client.ended is None:
            await stream.ready()
            assert stream.interrupt_reason is None
            client.tokens += stream.tokens
            stream.tokens = []
            client.ended = stream.ended

    async with background(slot.run()), background(take()) as taking:
        yield client
        await taking


def generated(text: list[int], count: int) -> list[int]:
    """Return the tokens that a mock engine generates for a prompt."""
    return generate_tokens(xxh3_64_intdigest(pack_u32(text), 0), 0, count, VOCABULARY)


def first_index(system: System, attempt: int) -> int | None:
    """Return the position of the first token of an attempt in the response; None before this token."""
    chunks = [event.chunks[0] for event in system.events(TOKENS, TokensEmitted, SLOT)]
    return next((chunk.first_index for chunk in chunks if chunk.attempt == attempt), None)


def has_begun(system: System, attempt: int) -> bool:
    return first_index(system, attempt) is not None


def require_continuation(system: System, client: Client, attempts: int = 2) -> list[int]:
    """Check that each attempt continued the undisturbed response; return the valid tokens of attempt 1."""
    begins = [first_index(system, attempt) or 0 for attempt in range(1, attempts + 1)]
    assert begins == sorted(set(begins))
    assert client.tokens == generated(PROMPT, LENGTH)
    assert client.ended is not None
    assert (client.ended.attempt, client.ended.finish_reason) == (attempts, "length")
    assert client.ended.usage is not None
    assert (client.ended.usage.prompt_tokens, client.ended.usage.output_tokens) == (len(PROMPT), LENGTH)
    assert [routed.attempt for routed in system.decisions(RequestRouted)] == [*range(1, attempts + 1)]
    return client.tokens[: begins[1]]


@pytest.mark.parametrize("losses", [1, 2])
async def test_the_response_of_a_stopped_worker_continues_on_another(log: SqliteLog, losses: int) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner, listening(log, "r") as client:
        for attempt in range(1, losses + 1):
            await started_worker(system, owner, f"lost-{attempt}", SLOW)
            if attempt == 1:
                system.send(submitted("r", PROMPT, max_tokens=LENGTH))
            await until(functools.partial(has_begun, system, attempt))
            await system.stop_worker(f"lost-{attempt}")
            await until(lambda: not len(owner.world.fleet))
        system.start_worker("last")
        await until(lambda: client.ended)
        require_continuation(system, client, attempts=losses + 1)
        await until(lambda: not len(owner.world.requests))


async def test_a_worker_with_a_vanished_lease_continues_as_a_new_incarnation(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner, listening(log, "r") as client:
        await started_worker(system, owner, "a", SLOW)
        system.send(submitted("r", PROMPT, max_tokens=LENGTH))
        await until(lambda: client.tokens)
        (lease,) = system.leases.poll(MODEL)
        system.leases.release(MODEL, "a", lease.token)
        await until(lambda: client.ended)
        require_continuation(system, client)
        await until(lambda: not len(owner.world.requests))


class DeafLog(SharedLog):
    """A log that hides fleet events while `fleet` is not ready, so that its worker does not learn that it is lost."""

    fleet: LateTail

    def tail(self, topic: str, partition: int, offset: int, wake: Wake) -> LateTail:
        tail = super().tail(topic, partition, offset, wake)
        if topic == FLEET.name:
            self.fleet = tail
        return tail


def zombie(system: System, log: DeafLog) -> Worker:
    """Return a slow worker on its own view of the log."""
    config = EngineConfig(block_size=BLOCK, kv_blocks_total=256, vocabulary=VOCABULARY)
    spec = WorkerSpec(
        worker_id="zombie",
        model=MODEL,
        block_size=BLOCK,
        kv_blocks_total=config.kv_blocks_total,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=config.max_num_batched_tokens,
    )
    return Worker(log, system.keeper, spec, MockEngine(config, speedup=SLOW), token="zombie-1", group=MODEL)


async def test_a_worker_unaware_of_its_loss_does_not_disturb_the_response(log: SqliteLog) -> None:
    deaf = DeafLog(log)
    async with System(log).started(workers=0) as system, system.owned() as owner, listening(log, "r") as client:
        async with background(zombie(system, deaf).run()):
            await until(lambda: len(owner.world.fleet) == 1)
            system.send(submitted("r", PROMPT, max_tokens=LENGTH))
            await until(lambda: client.tokens)
            deaf.fleet.is_ready = False
            system.leases.release(MODEL, "zombie", "zombie-1")
            await until(lambda: owner.world.fleet.get("zombie") is None)
            system.start_worker("b")
            await until(lambda: {end.attempt for end in system.events(PROGRESS, RequestFinished)} == {1, 2})
        await until(lambda: client.ended)
        emitted = require_continuation(system, client)
        events = system.events(TOKENS, None, SLOT)
        begin = next(at for at, event in enumerate(events) if isinstance(event, AttemptStarted))
        stale = [event for event in events[begin:] if isinstance(event, TokensEmitted) and event.chunks[0].attempt == 1]
        assert stale, "the zombie emitted nothing, so the test checks nothing"
        assert stale[0].chunks[0].first_index == len(emitted)
        assert sorted(end.attempt for end in system.ends()["r"]) == [1, 2]
        await until(lambda: not len(owner.world.requests))
