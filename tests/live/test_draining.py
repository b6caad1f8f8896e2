"""A draining worker gets no new requests, finishes its own, and hands unfinished ones to another worker."""

from forebay.core.state.fleet import WorkerPhase
from forebay.events.control import Command
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerDraining, WorkerLost
from forebay.events.tokens import ResponseEnded
from forebay.events.topics import FLEET, TOKENS
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.runtime.life_cycle import State
from tests.system import MODEL, SLOT, System, submitted, until, until_ended

LONG_S = 3600.0
SLOW = 3.0


async def test_new_requests_avoid_a_draining_worker_that_finishes_its_own(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner:
        system.start_worker("a", speedup=SLOW)
        await until(lambda: len(owner.world.fleet) == 1)
        system.send(submitted("old", [1, 2, 3], max_tokens=150))
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
    assert len(system.answer("old")) == 150
    facts = [type(event) for event in system.events(FLEET) if isinstance(event, WorkerDraining | WorkerLost)]
    assert facts[:2] == [WorkerDraining, WorkerLost]


async def test_a_handed_back_request_continues_on_another_worker(log: SqliteLog) -> None:
    async with System(log).started(workers=0) as system, system.owned() as owner:
        system.start_worker("a", speedup=SLOW)
        await until(lambda: len(owner.world.fleet) == 1)
        system.send(submitted("r", [1, 2, 3], max_tokens=150))
        await until(lambda: system.answer("r"))
        system.workers["a"].drain(0.0)
        await until(lambda: owner.world.fleet.get("a") is None)
        emitted = system.answer("r")
        assert 0 < len(emitted) < 150
        system.start_worker("b")
        await until_ended(system, "r")
        await until(lambda: not len(owner.world.requests))
    assert system.answer("r")[: len(emitted)] == emitted
    assert len(system.answer("r")) == 150
    (end,) = system.events(TOKENS, ResponseEnded, SLOT)
    assert (end.attempt, end.finish_reason) == (2, "length")
    assert [one.worker_id for one in system.decisions(RequestRouted)] == ["a", "b"]
    assert system.workers["a"].counters.handed_back == 1
