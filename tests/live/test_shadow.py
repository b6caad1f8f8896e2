"""A shadow evaluates an alternative configuration on a live log and publishes one event per routing decision."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from prometheus_client import CollectorRegistry

from forebay.core.routing.plan import Plan
from forebay.core.selection.counterfactual import Alternative, Counterfactual, counterfactual
from forebay.core.world import CORE_VERSION
from forebay.events.codec import encode
from forebay.events.control import BusyThresholds, PoolConfigured
from forebay.events.decisions import OwnerClaimed, RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.shadow import DecisionShadowed, ShadowEvent, ShadowStarted
from forebay.events.topics import DECISIONS, SHADOW
from forebay.journal.records import OtherRules
from forebay.live.shadow import shadow as shadow_module
from forebay.live.shadow.shadow import Shadow, ShadowSettings, TopicSink, shadow_metrics
from forebay.live.standby import RecoveryDiverged
from forebay.transport.base import Draft, LogError, Record
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import PROMPTS, Driver, histories, perform_all, request
from tests.depth import examples
from tests.live.shared import SharedLog, dearer, serve, serve_unsealed, valid, write
from tests.system import System, submitted, until

NAME = "try"
SEED = 41


def unchanged(pool: PoolConfigured) -> PoolConfigured:
    return pool


def routed_by(**router: Any) -> Alternative:
    """Return an alternative that changes these router fields of the recorded configuration."""
    return lambda pool: msgspec.structs.replace(pool, router=msgspec.structs.replace(pool.router, **router))


def shadow_of(log: Any, alternative: Alternative = unchanged, name: str = NAME, **changes: Any) -> Shadow:
    fields: dict[str, Any] = {"name": name, "text": "the same", "alternative": alternative, **changes}
    return Shadow(log, 0, ShadowSettings(**fields), TopicSink(log, 0, name))


async def served(log: SqliteLog, *names: str) -> None:
    """Serve requests by a system whose owner takes no final snapshot."""
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, *names)


@asynccontextmanager
async def running(log: SqliteLog, shadow: Shadow) -> AsyncIterator[Shadow]:
    """Run a shadow during the body; before returning, wait until it has published every decision."""
    await shadow.start()
    starts = len(published(log, shadow.settings.name, ShadowStarted))
    task = asyncio.create_task(shadow.run())
    await until(lambda: task.done() or len(published(log, shadow.settings.name, ShadowStarted)) > starts)
    yield shadow
    end = log.next_offset(DECISIONS.name, 0)
    await until(lambda: task.done() or shadow.position >= end)
    await shadow.stop()
    await task


def published(log: SqliteLog, name: str = NAME, kind: type = DecisionShadowed) -> list[Any]:
    """Return the events of a shadow on its topic, in order."""
    records = log.records(SHADOW.name, 0, 0, 100_000)
    values = [record.value for record in records if record.value != b"?"]
    events: list[ShadowEvent] = [msgspec.json.decode(value, type=ShadowEvent) for value in values]
    return [event for event in events if event.shadow == name and isinstance(event, kind)]


async def require_each_once(log: SqliteLog, name: str = NAME) -> None:
    """Check that each routing decision of the journal was published once, in order."""
    routed = await valid(log, RequestRouted)
    assert [(one.request_id, one.attempt) for one in published(log, name)] == [
        (one.request_id, one.attempt) for one in routed
    ]
    offsets = [one.decision_offset for one in published(log, name)]
    assert offsets == sorted(set(offsets))


async def shadowed(log: SqliteLog, alternative: Alternative) -> list[DecisionShadowed]:
    """Return the events that a shadow publishes for a whole log."""
    async with running(log, shadow_of(log, alternative, from_start=True)):
        pass
    return published(log)


# The published events


@examples(0.4)
@given(histories)
def test_the_recorded_configuration_always_agrees_without_regret(history: list[tuple[str, Any]]) -> None:
    drive = perform_all(Driver().fleet("a", "b"), history)

    async def run() -> None:
        log = SqliteLog.open(None)
        await write(log, drive)
        events = await shadowed(log, unchanged)
        assert all(one.agrees and one.regret_blocks == 0.0 and not one.failure for one in events)
        assert not any(one.would_hold for one in events)
        assert all(one.overlap_blocks == one.shadow_overlap_blocks for one in events)
        await require_each_once(log)
        log.close()

    asyncio.run(run())


@examples(0.4)
@given(histories)
def test_an_alternative_policy_matches_a_direct_evaluation(history: list[tuple[str, Any]]) -> None:
    alternative = routed_by(temperature=2.0, overlap_score_credit=0.2, busy=BUSY)
    drive = Driver().fleet("a", "b")
    found: dict[tuple[str, int], Counterfactual] = {}

    def on_plan(plan: Plan) -> None:
        key = plan.request.request_id, plan.attempt + 1
        found[key] = counterfactual(drive.world, alternative(plan.pool), plan)

    drive.world.on_plan = on_plan
    perform_all(drive, history)

    async def run() -> None:
        log = SqliteLog.open(None)
        await write(log, drive)
        for one in await shadowed(log, alternative):
            plain = found[one.request_id, one.attempt]
            assert (one.agrees, one.regret_blocks) == (plain.agrees, plain.regret_blocks)
            assert one.shadow_overlap_blocks == plain.overlap_blocks
            assert bool(one.failure) == (plain.choice is None)
            if plain.choice is not None:
                candidate = plain.choice.table.roster.ranks[plain.choice.at]
                assert (one.shadow_worker_id, one.shadow_rank) == (candidate.worker.spec.worker_id, candidate.rank)
        await require_each_once(log)
        log.close()

    asyncio.run(run())


BUSY = BusyThresholds(active_prefill_tokens_threshold=40)


async def test_a_shadow_of_a_running_system_sees_only_later_decisions(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system, system.owned() as owner:
        await serve(system, owner, "a", "b")
        async with running(log, shadow_of(log)) as shadow:
            await serve(system, owner, "c", "d")
        assert [one.request_id for one in published(log)] == ["c", "d"]
        assert [one.from_offset for one in published(log, kind=ShadowStarted)] == [shadow.from_offset]
        assert str(shadow.statistics).startswith("2 decisions, 100.0% agree, regret mean 0.00 p99 0.00 blocks")


async def test_two_concurrent_shadows_do_not_interfere(log: SqliteLog) -> None:
    async with System(log).started(workers=3) as system, system.owned(fleet=3) as owner:
        one = shadow_of(log)
        other = shadow_of(log, routed_by(mode="round-robin"), name="other", text="round-robin")
        async with running(log, one), running(log, other):
            for number in range(12):
                system.send(submitted(f"r{number}", [*range(12), number]))
                await until(lambda: not len(owner.world.requests) and len(system.ends()) == number + 1)  # noqa: B023
        await require_each_once(log)
        await require_each_once(log, "other")
        assert all(event.agrees for event in published(log))
        assert not all(event.agrees for event in published(log, "other"))
        statistics = other.statistics.pools["default"]
        assert statistics.decisions == 12
        assert statistics.excess_blocks > 0.0, "one worker has the prefix, and round-robin ignores it"
        assert statistics.overlap_blocks_lost > 0


# Owner changes


async def test_an_owner_dies_between_two_decisions_of_one_event(log: SqliteLog) -> None:
    """The next owner journals the remaining decisions of the event; a late record of the dead owner is stale."""
    drive = Driver().fleet("a", "b", "c")
    for number in range(4):
        drive("requests", request(f"r{number}", PROMPTS[number % 3][:2]))
    worker = next(one.worker_id for one in drive.decided if isinstance(one, RequestRouted))
    for number in range(4, 8):
        drive("requests", request(f"r{number}", PROMPTS[0]))
    moved = drive("fleet", WorkerLost(owner_epoch=0, worker_id=worker, worker_epoch=drive.epoch(worker)))
    assert len(moved) > 1
    before = drive.decided[: -len(moved) + 1]
    claim = OwnerClaimed(owner_id="driver", core_version=CORE_VERSION)
    epoch = 1 + len(before)
    late = moved[1]
    after = [msgspec.structs.replace(one, owner_epoch=epoch) for one in moved[1:]]
    await write(log, drive, [claim, *before, claim, late, *after])
    events = await shadowed(log, unchanged)
    await require_each_once(log)
    assert all(one.agrees for one in events)
    assert [one.attempt for one in events[-len(moved) :]] == [2] * len(moved)


# Restarts


async def test_a_restarted_shadow_neither_repeats_nor_skips_decisions(
    log: SqliteLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shadow is stopped or killed at random points while owners change and snapshots are taken."""
    monkeypatch.setattr(shadow_module, "SLICE_RECORDS", 3)
    monkeypatch.setattr(shadow_module, "PAGE_RECORDS", 4)
    chance = random.Random(SEED)
    print(f"seed {SEED}")
    async with System(log).started(workers=2) as system:
        for life in range(3):
            async with system.owned(snapshot_every=7) as owner:
                await serve(system, owner, *(f"r{life}{number}" for number in range(8)))
        end = log.next_offset(DECISIONS.name, 0)
    lives = 0
    while True:
        lives += 1
        shadow = shadow_of(SharedLog(log), from_start=True)
        await shadow.start()
        task = asyncio.create_task(shadow.run())
        for _ in range(chance.randrange(1, 60)):
            await asyncio.sleep(0)
        if chance.random() < 0.5:
            await shadow.stop()
            await task
        else:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.sleep(0)
        if shadow.position == end:
            break
    assert lives > 3
    await require_each_once(log)
    assert all(one.agrees for one in published(log))


class ForgetfulLog(SharedLog):
    """A log whose requests before an offset were removed by retention."""

    kept_from = 0

    async def read(self, topic: str, partition: int, offset: int, limit: int) -> list[Record]:
        if topic == "requests" and offset < self.kept_from:
            raise LogError(f"{topic}/{partition} no longer holds offset {offset}: see the retention of the topic")
        return await super().read(topic, partition, offset, limit)


async def test_records_that_retention_removed_during_downtime_are_skipped_and_logged(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a")
        async with running(log, shadow_of(log, from_start=True)):
            pass
        async with system.owned() as owner:
            await serve(system, owner, "b")
        async with system.owned() as owner:
            await serve(system, owner, "c")
            forgetful = ForgetfulLog(log)
            forgetful.kept_from = owner.world.view["requests"] - 2
            async with running(log, shadow_of(forgetful)):
                pass
    assert [one.request_id for one in published(log)] == ["a", "c"]
    assert ": requests/0 no longer holds offset" in caplog.text
    before, after = published(log, kind=ShadowStarted)
    assert after.from_offset > published(log)[0].decision_offset + 1 > before.from_offset


async def test_a_newer_process_of_the_same_shadow_stops_the_older(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system, system.owned() as owner:
        older = shadow_of(log)
        await older.start()
        ending = asyncio.create_task(older.run())
        await until(lambda: published(log, kind=ShadowStarted))
        async with running(log, shadow_of(log)) as newer:
            await serve(system, owner, "a")
            with pytest.raises(LogError, match="another process started the shadow try"):
                await ending
            await serve(system, owner, "b")
            await until(lambda: newer.statistics.decisions == 2)
    assert {one.request_id for one in published(log)} == {"a", "b"}


async def test_a_shadow_name_belongs_to_one_alternative(log: SqliteLog) -> None:
    async with running(log, shadow_of(log)):
        pass
    with pytest.raises(LogError, match="another alternative already used the shadow name try"):
        await shadow_of(log, text="another").start()


async def test_foreign_records_of_the_topic_are_skipped(log: SqliteLog) -> None:
    foreign = [Draft(SHADOW.name, 0, b"?", NAME.encode()), Draft(SHADOW.name, 0, b"?")]
    for _ in range(2):
        async with running(log, shadow_of(log)):
            await log.append(foreign)
    assert len(published(log, kind=ShadowStarted)) == 2


async def test_a_shadow_continues_from_the_state_that_a_claim_names(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system, running(log, shadow_of(log, from_start=True)):
        await serve_unsealed(system, "a")
        nonce = (await valid(log))[-1].owner_nonce
        claim = OwnerClaimed(owner_id="o", core_version=CORE_VERSION, snapshot=0, previous_nonce=nonce)
        await log.append([Draft(DECISIONS.name, 0, encode(DECISIONS, claim))])
        async with system.owned():
            await system.serve("b", [1, 2, 3])
    await require_each_once(log)


# Journals that a shadow cannot follow


async def test_a_shadow_stops_at_a_journal_that_cannot_be_derived_again(log: SqliteLog) -> None:
    await served(log, "a")
    shadow = shadow_of(dearer(log), from_start=True)
    await shadow.start()
    with pytest.raises(RecoveryDiverged):
        await shadow.run()
    assert published(log) == []


async def test_a_shadow_rejects_a_journal_of_other_rules(log: SqliteLog, monkeypatch: pytest.MonkeyPatch) -> None:
    async with System(log).started(workers=2) as system, system.owned() as owner:
        await serve(system, owner, "a")
    monkeypatch.setattr("forebay.journal.snapshots.CORE_VERSION", CORE_VERSION + 1)
    with pytest.raises(OtherRules):
        await shadow_of(log).start()


class ShortLog(SharedLog):
    """A log that was recreated, so it is empty again."""

    recreated = False

    async def end(self, topic: str, partition: int) -> int:
        return 0 if self.recreated and topic == DECISIONS.name else await super().end(topic, partition)


async def test_a_shadow_rejects_a_recreated_log(log: SqliteLog) -> None:
    async with System(log).started(workers=2) as system:
        await serve_unsealed(system, "a")
        short = ShortLog(log)
        shadow = shadow_of(short)
        await shadow.start()
        short.recreated = True
        with pytest.raises(LogError, match=r"ends at offset 0, before \d+: the log was recreated"):
            await shadow.run()
        with pytest.raises(LogError, match="this is another log; choose another --id"):
            await shadow_of(short).start()


async def test_a_shadow_from_the_start_rejects_a_trimmed_journal(log: SqliteLog) -> None:
    class Headless(SharedLog):
        async def begin(self, topic: str, partition: int) -> int:
            return 5 if topic == DECISIONS.name else await super().begin(topic, partition)

    with pytest.raises(LogError, match="begins at offset 5, retention removed earlier records: omit --from-start"):
        await shadow_of(Headless(log), from_start=True).start()


class Failing:
    """A custom policy that never decides."""

    def decide(self, world: Any, request: Any) -> int:
        raise ValueError


async def test_a_failing_policy_is_counted_and_reported(log: SqliteLog) -> None:
    await served(log, "a", "b")
    shadow = shadow_of(log, routed_by(mode="mine.Failing"), from_start=True, custom={"mine.Failing": Failing})
    async with running(log, shadow):
        pass
    assert [one.failure.partition(":")[0] for one in published(log)] == ["policy_failed"] * 2
    assert all(one.shadow_worker_id == "" and one.regret_blocks is None and not one.agrees for one in published(log))
    assert "2 failed (policy_failed)" in str(shadow.statistics)
    registry = CollectorRegistry()
    registry.register(shadow_metrics(shadow))
    labels = {"shadow": NAME, "pool": "default", "reason": "policy_failed"}
    assert registry.get_sample_value("forebay_shadow_failures_total", labels) == 2


async def test_a_shadow_warns_about_state_taken_from_the_recording(
    log: SqliteLog, caplog: pytest.LogCaptureFixture
) -> None:
    await served(log, "a", "b")
    async with running(log, shadow_of(log, routed_by(session_ttl_s=60.0), from_start=True)):
        pass
    warnings = [record.getMessage() for record in caplog.records if "session_ttl_s" in record.getMessage()]
    assert warnings == [
        "shadow try: the state of session_ttl_s of the pool default is the recorded one, not that of the alternative"
    ]


async def test_statistics_are_exported_to_prometheus(log: SqliteLog) -> None:
    await served(log, *(f"r{number}" for number in range(6)))
    shadow = shadow_of(log, routed_by(mode="round-robin"), from_start=True)
    registry = CollectorRegistry()
    registry.register(shadow_metrics(shadow))
    async with running(log, shadow):
        pass
    events = published(log)
    labels = {"shadow": NAME, "pool": "default"}

    def value(series: str, **more: str) -> float | None:
        return registry.get_sample_value(f"forebay_shadow_{series}", {**labels, **more})

    assert value("decisions_total") == 6
    assert value("agreements_total") == sum(one.agrees for one in events)
    lost = sum(max(0, one.overlap_blocks - one.shadow_overlap_blocks) for one in events)
    assert value("overlap_blocks_lost_total") == lost > 0
    regrets = [one.regret_blocks for one in events]
    assert value("regret_blocks_sum") == sum(max(0.0, regret) for regret in regrets)
    assert value("excess_blocks_total") == sum(max(0.0, -regret) for regret in regrets) > 0
    assert value("regret_blocks_count") == value("regret_blocks_bucket", le="+Inf") == 6
    assert registry.get_sample_value("forebay_shadow_lag_records", {"shadow": NAME}) == 0
