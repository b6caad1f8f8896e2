"""Dead holders, expired leases, cancellations at every stage, lost epochs: nothing hangs or leaks."""

import asyncio
from typing import Any

import pytest

from forebay.events.control import Command
from forebay.events.fleet import WorkerLost
from forebay.events.progress import PrefillFinished
from forebay.events.tokens import ResponseEnded
from forebay.events.topics import FLEET
from forebay.events.work import ReleaseKv
from tests.workers.conftest import PARTITION, Scene, until
from tests.workers.disagg import PROMPT, Pair, aggregated, kv_settings, output_by, pair_of, side


def pair(scene: Scene, decode_speedup: float = 1000.0, prefill_speedup: float = 1000.0, **settings: Any) -> Any:
    kv = kv_settings(**settings)
    return pair_of(scene, side(scene, "prefill", kv, prefill_speedup), side(scene, "decode", kv, decode_speedup))


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
    await both.answer("warm", await both.compute("warm", [500]))
    await both.generated("warm")


# Who keeps KV dies


# Requests given up


async def test_disagg_cancellation_during_prefill(scene: Scene) -> None:
    async with pair(scene, prefill_speedup=0.1) as both:
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
        assert stats.freed["released"] == before.get("released", 0) + 1
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
