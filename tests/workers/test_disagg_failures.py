"""Dead holders, expired leases, cancellations at every stage, lost epochs: nothing hangs or leaks."""

import asyncio
import signal
from functools import partial
from typing import Any

import pytest

from forebay.events.control import Command
from forebay.events.fleet import WorkerDraining, WorkerLost
from forebay.events.progress import PrefillFinished
from forebay.events.tokens import ResponseEnded
from forebay.events.topics import FLEET
from forebay.events.work import ReleaseKv
from forebay.workers.engines.mock import kv as mock_kv
from forebay.workers.kv_transfer.transport import open_transport
from tests.workers.conftest import PARTITION, Scene, until, work_item
from tests.workers.disagg import PROMPT, Pair, aggregated, kv_settings, output_by, pair_of, serving, side
from tests.workers.disagg_peer import peer


def pair(scene: Scene, decode_speedup: float = 1000.0, prefill_speedup: float = 1000.0, **settings: Any) -> Any:
    kv = kv_settings(**settings)
    return pair_of(scene, side(scene, "prefill", kv, prefill_speedup), side(scene, "decode", kv, decode_speedup))


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout for unresponsive holders."""
    monkeypatch.setattr(mock_kv, "open_transport", partial(open_transport, fetch_s=1.0))


class Gate:
    """Gate at which the fetches of a decode worker wait."""

    def __init__(self, both: Pair) -> None:
        self.open = asyncio.Event()
        self.waiting = 0
        transport: Any = both.decode.kv.transport
        fetch = transport.fetch

        async def gated(*arguments: Any) -> Any:
            self.waiting += 1
            try:
                await self.open.wait()
            finally:
                self.waiting -= 1
            return await fetch(*arguments)

        transport.fetch = gated


async def warmed(both: Pair) -> None:
    """Both sides have a transport."""
    await both.answer("warm", await both.compute("warm", [500]))
    await both.generated("warm")


# Who keeps KV dies


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("when", ["before", "after"])
async def test_a_disagg_holder_that_is_killed(scene: Scene, when: str) -> None:
    expected = await aggregated(scene, "alone")
    async with pair(scene) as both, peer("elsewhere") as other:
        item = both.requested["r"] = work_item("r", PROMPT, 6, stage="prefill", worker_epoch=9)
        prefilled = await other.compute(item)
        if when == "after":
            await both.answer("r", prefilled)
            assert await both.generated("r") == expected
        await other.kill()
        if when == "before":
            await both.answer("r", prefilled)
            assert await both.not_fetched("r")
            assert sum(both.decode.engine.kv_stats().failed.values()) == 1
            assert not output_by(scene, "r")
        await both.idle()
        # The next one is fetched from another holder.
        await both.answer("s", await both.compute("s"))
        assert await both.generated("s") == expected
        await both.idle()


@pytest.mark.slow
@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("then", ["killed", "stopped"])
async def test_a_disagg_holder_that_dies_while_it_is_read_from(scene: Scene, then: str) -> None:
    expected = await aggregated(scene, "alone")
    async with pair(scene) as both, peer("elsewhere") as other:
        item = both.requested["r"] = work_item("r", PROMPT, 6, stage="prefill", worker_epoch=9)
        prefilled = await other.compute(item)
        other.signal(signal.SIGSTOP)
        await both.answer("r", prefilled)
        await until(lambda: both.decode.engine.requests().get("r") == "fetching")
        if then == "killed":
            await until(lambda: both.decode.engine.kv_stats().in_flight)
            await other.kill()
        assert await both.not_fetched("r")
        assert not output_by(scene, "r")
        assert not both.decode.used
        await both.answer("s", await both.compute("s"))
        assert await both.generated("s") == expected


# Requests given up


async def test_disagg_cancellation_during_prefill(scene: Scene) -> None:
    async with pair(scene, prefill_speedup=1.0) as both:
        await both.compute("warm", [5])
        await both.cancel("warm", both.prefill)
        await both.prefill.engine.command(Command(action="pause"))
        await both.ask("waits")
        await until(lambda: both.prefill.engine.requests() == {"waits": "prefill"})
        await both.cancel("waits", both.prefill)
        await both.idle()
        await both.prefill.engine.command(Command(action="resume"))
        await both.ask("runs")
        await until(lambda: both.prefill.used)
        await both.cancel("runs", both.prefill)
        await both.idle()
        # What was to be offered just then is not.
        await both.ask("last")
        await both.computed("last")
        assert both.prefill.engine.kept() == 1
        await both.cancel("last", both.prefill)
        await both.idle()
    assert [generated.request_id for generated in scene.progress(PrefillFinished)] == ["warm", "last"]


async def test_disagg_cancellation_during_decode(scene: Scene) -> None:
    kv = kv_settings()
    prefill = side(scene, "prefill", kv)
    decode = side(scene, "decode", kv, speedup=0.1, kv_blocks_total=6)
    async with pair_of(scene, prefill, decode) as both:
        await warmed(both)
        gate = Gate(both)
        for name in ("fetched", "waits"):
            await both.answer(name, await both.compute(name, [ord(name[0]), *PROMPT, 7, 8, 9], 8))
        await until(lambda: gate.waiting == 1 and len(both.decode.engine.requests()) == 2)
        await both.cancel("waits", both.decode)
        await until(lambda: list(both.decode.engine.requests()) == ["fetched"])
        await both.cancel("fetched", both.decode)
        await until(lambda: not both.decode.used and not gate.waiting)
        # A cancelled fetch notifies the holder; for one that never began, the owner does.
        await both.cancel("waits", both.prefill)
        await both.idle()
        gate.open.set()
        await both.answer("answers", await both.compute("answers", PROMPT, 12))
        await until(lambda: output_by(scene, "answers"))
        await both.cancel("answers", both.decode)
        await both.idle()
    assert {end.request_id for end in scene.tokens(ResponseEnded)} == {"warm"}


async def test_disagg_cancellation_before_the_first_token(scene: Scene) -> None:
    async with pair(scene) as both:
        await warmed(both)
        gate = Gate(both)
        await both.answer("r", await both.compute("r"))
        await until(lambda: gate.waiting)
        await both.decode.engine.command(Command(action="pause"))
        gate.open.set()
        await until(lambda: both.decode.engine.requests() == {"r": "fetched"})
        await both.cancel("r", both.decode)
        await both.idle()
    assert not output_by(scene, "r")


@pytest.mark.parametrize("connector", ["nixl", "modelled"])
async def test_a_second_disagg_attempt_at_the_same_worker_replaces_the_first(scene: Scene, connector: str) -> None:
    expected = await aggregated(scene, "alone")
    async with pair(scene, connector=connector) as both:
        first = await both.compute("r")
        await both.ask("r", attempt=2)
        await until(lambda: len(scene.progress(PrefillFinished)) == 2)
        again = await both.computed("r")
        assert both.prefill.engine.kept() == 1
        await both.answer("r", first, attempt=1)
        assert await both.not_fetched("r")
        await both.answer("r", again, attempt=2)
        assert await both.generated("r") == expected
        await both.idle()


async def test_disagg_released_kv_is_not_read_and_that_of_the_next_attempt_stays(scene: Scene) -> None:
    expected = await aggregated(scene, "alone")
    async with pair(scene) as both:
        await warmed(both)
        gate = Gate(both)
        first = await both.compute("r")
        await both.answer("r", first)
        await until(lambda: gate.waiting)
        before = dict(both.prefill.engine.kv_stats().freed)
        order = ReleaseKv(request_id="r", attempt=1, owner_epoch=0, worker_epoch=both.prefill.epoch)
        await scene.send(order, both.prefill.slot)
        await until(lambda: not both.prefill.engine.kept())
        stats = both.prefill.engine.kv_stats()
        assert (stats.held_offers, stats.held_blocks) == (0, 0)
        assert stats.freed == before | {"released": before.get("released", 0) + 1}
        await both.prefill.idle()
        await both.ask("r", attempt=2)
        await until(lambda: len([one for one in scene.progress(PrefillFinished) if one.request_id == "r"]) == 2)
        await scene.send(order, both.prefill.slot)
        gate.open.set()
        assert await both.not_fetched("r")
        await both.answer("r", await both.computed("r"), attempt=2)
        assert await both.generated("r") == expected
        await both.idle()


# Workers that lose their place, go to sleep, or stop


async def test_disagg_kv_is_freed_with_a_lost_epoch(scene: Scene) -> None:
    expected = await aggregated(scene, "alone")
    async with pair(scene) as both:
        kept = await both.compute("kept")
        before = both.prefill.kv
        lost = WorkerLost(owner_epoch=0, worker_id="prefill-1", worker_epoch=both.prefill.epoch, reason="test")
        await scene.append(FLEET, PARTITION, lost)
        both.prefill.epoch = await scene.admit(both.prefill.worker, "t-prefill-1.2", slot=both.prefill.slot)
        assert both.prefill.engine.kept() == 0
        await until(lambda: not before.slots.used)
        await both.answer("kept", kept)
        assert await both.not_fetched("kept")
        # The new epoch serves.
        prefilled = await both.compute("next")
        assert prefilled.worker_epoch == both.prefill.epoch
        await both.answer("next", prefilled)
        assert await both.generated("next") == expected
        await both.idle()
        # So does a decode worker that loses its place in the middle of a fetch.
        gate = Gate(both)
        await both.answer("there", await both.compute("there"))
        await until(lambda: gate.waiting)
        lost = WorkerLost(owner_epoch=0, worker_id="decode-1", worker_epoch=both.decode.epoch, reason="test")
        await scene.append(FLEET, PARTITION, lost)
        both.decode.epoch = await scene.admit(both.decode.worker, "t-decode-1.2", slot=both.decode.slot)
        await until(lambda: not gate.waiting)
        gate.open.set()
        await both.cancel("there", both.prefill)
        await both.idle()
        await both.answer("last", await both.compute("last"))
        assert await both.generated("last") == expected
        await both.idle()


async def test_disagg_sleeping_engines_keep_no_kv_and_continue_afterwards(scene: Scene) -> None:
    expected = await aggregated(scene, "alone")
    async with pair(scene) as both:
        await warmed(both)
        gate = Gate(both)
        kept = await both.compute("kept")
        fetched = await both.compute("fetched")
        await both.answer("fetched", fetched)
        await until(lambda: gate.waiting)
        for one in (both.prefill, both.decode):
            await one.engine.command(Command(action="sleep"))
        assert "the cache was cleared" in await both.not_fetched("fetched")
        await both.answer("kept", kept)
        await until(lambda: both.decode.engine.requests() == {"kept": "to_fetch"})
        assert not both.prefill.engine.kept()
        assert not (both.prefill.used or both.decode.used)
        for one in (both.prefill, both.decode):
            await one.engine.command(Command(action="wake_up"))
        gate.open.set()
        assert await both.not_fetched("kept")
        await both.answer("next", await both.compute("next"))
        assert await both.generated("next") == expected
        await both.idle()


async def test_disagg_draining_prefill_worker_waits_for_its_readers(scene: Scene) -> None:
    expected = await aggregated(scene, "alone")
    kv = kv_settings()
    prefill, decode = side(scene, "prefill", kv), side(scene, "decode", kv)
    async with serving(scene, decode):
        task = asyncio.create_task(prefill.worker.run())
        prefill.epoch = await scene.admit(prefill.worker, "t-prefill-1", slot=prefill.slot)
        both = Pair(scene, prefill, decode)
        prefilled = await both.compute("r")
        prefill.worker.drain(60.0)
        draining = WorkerDraining(owner_epoch=0, worker_id="prefill-1", worker_epoch=prefill.epoch)
        await scene.append(FLEET, PARTITION, draining)
        await scene.read_by(prefill.worker)
        assert not task.done()
        await both.answer("r", prefilled)
        assert await both.generated("r") == expected
        async with asyncio.timeout(20):
            await task
    assert prefill.engine.kv_stats().freed == {"fetched": 1}
