"""The status of a group: from the log it equals that of the owner, and problems are named."""

from pathlib import Path

import msgspec
import pytest

from forebay.events.codec import decode, encode
from forebay.events.control import QueueConfig
from forebay.events.decisions import OwnerClaimed, RequestRouted
from forebay.events.fleet import WorkerSuspect
from forebay.events.requests import RoutingHints
from forebay.events.topics import DECISIONS, FLEET
from forebay.replay import status
from forebay.replay.at import last_time, seek
from forebay.replay.states import States
from forebay.replay.status import GroupStatus, owner_status, read_status, with_heartbeats
from forebay.transport.base import Draft, Log
from forebay.transport.heartbeats import RouterHeartbeats
from forebay.transport.sqlite.log import SqliteLog
from tests.harness.memory_log import memory_log
from tests.replay.recorder import fleet
from tests.system import BLOCK, MODEL, System, submitted, until

REQUESTS = 6


async def served(system: System, count: int = REQUESTS) -> None:
    for number in range(count):
        system.send(submitted(f"r{number}", [number, *[7] * 4 * BLOCK]))


def shown(status: GroupStatus) -> object:
    """Return the parts of a status that do not depend on its source."""
    return msgspec.to_builtins([status.pools, status.workers, status.requests, status.problems, status.ready])


async def test_events_after_the_newest_decision_are_applied() -> None:
    log, _ = memory_log()
    async with System(log).started(workers=2) as system, system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == 2)
        await served(system)
        await until(lambda: len(system.decisions(RequestRouted)) == REQUESTS and not len(owner.world.requests))
        journalled = (await seek(States(log, 0))).world
        assert len(journalled.requests) > 0, "the journal alone does not show that the requests have ended"
        exact = await owner_status(log, 0, MODEL, owner.world)
        derived = await read_status(log, 0, MODEL)
        assert shown(derived) == shown(exact)
        assert (exact.source, derived.source) == ("owner", "log")
        assert (exact.ready, exact.problems, exact.requests.in_flight) == (True, [], 0)
        assert (exact.owner.owner_id, exact.owner.alive, derived.owner.alive) == ("test", True, None)
        assert exact.owner.since_us == derived.owner.since_us is not None
        assert all(topic.lag == 0 for topic in (*exact.topics, *derived.topics)), "an idle system has no lag"
        assert [pool.routed for pool in exact.pools] == [REQUESTS]
        assert sum(rank.cached_blocks for worker in exact.workers for rank in worker.ranks) > 0
    log.close()


async def test_an_outage_begins_at_the_previous_claim_and_is_unknown_if_clocks_differ() -> None:
    async with System(memory_log()[0]).started(workers=0) as system:
        for _ in range(2):
            async with system.owned(dies=True):
                pass
        first, second = system.decisions(OwnerClaimed)
        assert (await read_status(system.log, 0, MODEL)).owner.outage_us == second.at_us - first.at_us
    made = fleet("a")
    made.take_over("second", at_us=1, previous_seen_us=2)
    assert (await read_status(await made.log(), 0, MODEL)).owner.outage_us is None


async def test_the_first_decision_may_be_written_while_the_log_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    made = fleet("a")
    made.ask("r", [1])
    log, before = await made.log(), iter([1])

    async def read_too_early(log: Log, partition: int) -> int:
        return next(before, 0) or await last_time(log, partition)

    expected = await read_status(log, 0, MODEL)
    monkeypatch.setattr(status, "last_time", read_too_early)
    assert await read_status(log, 0, MODEL) == expected
    assert next(before, None) is None, "the time was read"


async def test_workers_are_shown_before_the_first_decision() -> None:
    log, _ = memory_log()
    async with System(log).started(workers=1) as system, system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == 1)
        journal = [decode(DECISIONS, one.value) for one in log.records(DECISIONS.name, 0, 0, 100)]
        assert [(type(one), one.consumed) for one in journal] == [(OwnerClaimed, ())]
        derived = await read_status(log, 0, MODEL)
    assert (derived.ready, derived.problems, len(derived.workers)) == (True, [], 1)
    log.close()


async def test_requests_in_flight_are_counted_by_phase() -> None:
    log, _ = memory_log()
    async with System(log).started(workers=0) as system, system.owned() as owner:
        system.start_worker("slow", speedup=1e-3)
        await until(lambda: len(owner.world.fleet) == 1)
        for number in range(3):
            hints = RoutingHints(allowed_workers=("slow",))
            system.send(submitted(f"r{number}", [number] * 40, max_tokens=50, routing=hints))
        await until(lambda: len(system.decisions(RequestRouted)) == 3)
        for status in (await owner_status(log, 0, MODEL, owner.world), await read_status(log, 0, MODEL)):
            assert (status.requests.in_flight, status.requests.queued) == (3, 0)
            assert sum(status.requests.by_phase.values()) == 3
            ((rank,),) = (worker.ranks for worker in status.workers)
            assert rank.active_requests == 3
        for number in range(3):
            system.cancel(f"r{number}")
        await until(lambda: not len(owner.world.requests))
    log.close()


async def test_the_tenants_with_the_most_requests_are_shown() -> None:
    made = fleet("a", queue=QueueConfig(threshold=0.1))
    for number in range(12):
        for part in range(1 + number // 11):
            made.ask(f"r{number}-{part}", tenant=f"t{number:02}", at_us=1)
    made.ask("anonymous")
    made.seal()
    requests = (await read_status(await made.log(), 0, "m")).requests
    assert requests.in_flight == 14
    assert [one.tenant for one in requests.tenants] == ["t11", *(f"t{number:02}" for number in range(11))]
    assert [(one.in_flight, one.queued) for one in requests.tenants] == [(2, 2), (1, 0), *[(1, 1)] * 10]


async def test_a_log_without_an_owner_has_a_status() -> None:
    log, _ = memory_log()
    status = await read_status(log, 0, MODEL)
    assert (status.ready, status.owner.epoch, status.owner.owner_id, status.workers) == (False, -1, "", [])
    assert status.problems == ["no router has owned the group yet", "no worker is ready"]
    log.close()


async def test_a_suspect_worker_and_a_silent_owner_are_problems(tmp_path: Path) -> None:
    log = SqliteLog.open(tmp_path / "log.db")
    async with System(log).started(workers=1) as system, system.owned() as owner:
        await until(lambda: len(owner.world.fleet) == 1)
        (member,) = owner.world.fleet.workers()
        epoch = owner.world.owner_epoch
    assert (await read_status(log, 0, MODEL)).ready
    suspect = WorkerSuspect(worker_id="w0", worker_epoch=member.worker_epoch, owner_epoch=epoch)
    await log.append([Draft(FLEET.name, 0, encode(FLEET, suspect))])
    status = with_heartbeats(await read_status(log, 0, MODEL), RouterHeartbeats(log, MODEL))
    assert (status.ready, status.owner.alive, status.owner.standbys) == (False, False, [])
    assert [worker.state for worker in status.workers] == ["suspect"]
    assert status.problems == [
        "no router owns the group now, so requests wait",
        "no worker is ready",
        "worker w0 is suspect, because its lease was not renewed",
    ]
    log.close()
