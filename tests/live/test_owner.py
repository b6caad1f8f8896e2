"""An owner on a real log with real workers: routing, recovery, and a kill after every append."""

import asyncio
from pathlib import Path

import pytest

from forebay.events.base import unpack_u32
from forebay.events.codec import decode
from forebay.events.decisions import OwnerClaimed, RequestAborted, RequestRejected, RequestRouted, SnapshotRecord
from forebay.events.topics import DEAD_LETTERS, REQUESTS, work_topic
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.depth import is_quick
from tests.live.scenarios import PREFIX, all_ended, run_until_append, scenario
from tests.live.shared import admit, proven
from tests.system import System, submitted, until


async def test_a_request_is_answered_and_its_prefix_is_found_by_the_next(log: SqliteLog) -> None:
    async with System(log).started(workers=3) as system, system.owned(fleet=3) as owner:
        await system.serve("a", [*PREFIX, 100, 101, 102, 103])
        await system.serve("b", [*PREFIX, 200, 201, 202, 203])
        first, second = system.decisions(RequestRouted)
        assert first.worker_id == second.worker_id
        assert (first.terms.device_overlap, second.terms.device_overlap) == (0, 3)
        (end,) = system.ends()["b"]
        assert end.usage is not None
        assert (end.usage.prompt_tokens, end.usage.output_tokens, end.usage.cached_tokens) == (16, 3, 12)
        assert len(system.answer("b")) == 3
        await until(lambda: not len(owner.world.requests))


async def test_rejections_are_journaled_and_answered(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned():
        system.send(submitted("nobody", PREFIX))
        system.send(submitted("wrong", PREFIX, model="another"))
        await until(lambda: len(system.ends()) == 2)
        assert [(refused.request_id, refused.reason) for refused in system.decisions(RequestRejected)] == [
            ("nobody", "no_workers"),
            ("wrong", "wrong_model"),
        ]
        statuses = {name: end.error.status for name, (end,) in system.ends().items() if end.error}
        assert statuses == {"nobody": 503, "wrong": 404}


async def test_a_repeated_record_has_no_effect_and_a_reused_id_is_rejected(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, system.owned(fleet=1):
        for _ in range(2):
            system.send(submitted("a", PREFIX, nonce=1))
        await until(lambda: "a" in system.ends())
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
        items = [decode(work_topic("default"), one.value) for one in log.records("work.default", 0, 0, 10)]
        assert [unpack_u32(item.token_ids) for item in items] == [PREFIX]


async def test_a_cancelled_request_stops_its_worker(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner:
        system.start_worker("slow", speedup=0.01)
        await until(lambda: len(owner.world.fleet) == 1)
        system.send(submitted("a", PREFIX, max_tokens=200))
        await until(lambda: system.decisions(RequestRouted))
        system.cancel("a")
        await until(lambda: "a" in system.ends())
        (aborted,) = system.decisions(RequestAborted)
        assert (aborted.reason, aborted.worker_id) == ("cancelled", "slow")
        assert not len(owner.world.requests)
        assert owner.world.load.rank_load("slow", 0).active_requests == 0


async def test_a_deadline_expires_by_the_recorded_clock(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner:
        system.start_worker("slow", speedup=0.01)
        await until(lambda: len(owner.world.fleet) == 1)
        await system.serve("a", PREFIX, timeout_us=20_000)
        (end,) = system.ends()["a"]
        assert end.error is not None
        assert (end.error.status, end.error.code) == (504, "deadline_exceeded")


async def test_a_record_that_does_not_decode_goes_to_dead_letters(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, system.owned(fleet=1):
        log.append_soon([Draft(REQUESTS.name, 0, b"\xffno event", b"key", {"from": "elsewhere"})])
        system.send(submitted("a", PREFIX))
        await until(lambda: "a" in system.ends() and log.next_offset(DEAD_LETTERS.name, 0))
        (letter,) = log.records(DEAD_LETTERS.name, 0, 0, 10)
        assert (letter.value, letter.key) == (b"\xffno event", b"key")
        assert letter.headers is not None
        assert letter.headers["from"] == "elsewhere"
        assert letter.headers["source-topic"] == "requests"
        assert "requests" in letter.headers["reason"]


async def test_requests_of_a_lost_worker_move_and_keep_their_tokens(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner:
        system.start_worker("a", speedup=3.0)
        await until(lambda: len(owner.world.fleet) == 1)
        system.send(submitted("r", PREFIX, max_tokens=60))
        await until(lambda: system.answer("r"))
        await system.stop_worker("a")
        await until(lambda: not len(owner.world.fleet))
        emitted = system.answer("r")
        assert 0 < len(emitted) < 60
        system.start_worker("b")
        await until(lambda: "r" in system.ends())
        assert [routed.attempt for routed in system.decisions(RequestRouted)] == [1, 2]
        assert system.answer("r")[: len(emitted)] == emitted
        assert len(system.answer("r")) == 60


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
        report = await proven(log)
        assert report.claims == 3
        log.close()
        appends += step
    assert appends > 15


async def test_repeated_kills_with_snapshots_between_lose_nothing(log: SqliteLog) -> None:
    """Owners of growing run length on one log, with a snapshot after every third record."""
    async with System(log).started(workers=2) as system:
        await admit(system, 2)
        sending = asyncio.create_task(scenario(system))
        deaths = 0
        for appends in range(2, 30, 3):
            deaths += await run_until_append(system, appends, snapshot_every=3)
        async with system.owned(snapshot_every=3) as owner:
            await until(lambda: all_ended(system, owner))
        await sending
        assert deaths > 1
        assert len(system.decisions(SnapshotRecord)) > 2
        assert len(system.decisions(OwnerClaimed)) == 12


async def test_an_owner_restarted_on_a_file_finds_the_cached_prefixes(tmp_path: Path) -> None:
    path = tmp_path / "log.db"
    prompts = {f"p{number}": [number] * 16 for number in range(8)}
    first = SqliteLog.open(path)
    system = System(first)
    async with system.started(workers=4):
        async with system.owned(fleet=4) as owner:
            for name, prompt in prompts.items():
                system.send(submitted(name, prompt))
            await until(lambda: set(prompts) <= set(system.ends()) and not len(owner.world.requests))
            warm = {routed.request_id: routed.worker_id for routed in system.decisions(RequestRouted)}
        async with system.owned() as owner:
            for name, prompt in prompts.items():
                system.send(submitted(f"{name}-again", prompt))
            await until(lambda: len(system.ends()) == 2 * len(prompts))
            again = {routed.request_id: routed for routed in system.decisions(RequestRouted)[len(prompts) :]}
            for name, worker in warm.items():
                routed = again[f"{name}-again"]
                assert (routed.worker_id, routed.terms.device_overlap) == (worker, 4)
    first.close()
    reopened = SqliteLog.open(path, readonly=True)
    await proven(reopened)
    reopened.close()
