"""KV tiers of the mock engine: real bytes are offloaded and loaded, and they decide the tokens."""

import asyncio
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.base import array_u64, unpack_u64
from forebay.events.control import Command
from forebay.events.kv import BlocksStored, StoreBlocksAdded
from forebay.events.progress import FirstTokenEmitted, OnboardedTokens, PrefillFinished
from forebay.events.work import ReannounceCache
from forebay.workers.engine import EngineError
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.kv_tiers.offload_manager import OffloadManager
from forebay.workers.kv_tiers.settings import TierSettings
from tests.workers.conftest import Scene, engine_config, until, work_item
from tests.workers.disagg import Pair, Side, aggregated, kv_settings, pair_of, serving
from tests.workers.pictures import hashes_with, shown
from tests.workers.tiered import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    HOST,
    PROMPT,
    SPEC,
    SPEEDUP,
    TIMING,
    disk_of,
    expected,
    flipped_bytes,
    hashes_of,
    item_of,
    tiered,
)

BLOCKS = hashes_of(PROMPT)
CLEAR = Command(action="clear_kv_blocks")


def store_of(folder: Path, **changes: Any) -> TierSettings:
    """Return settings with a shared store only."""
    return TierSettings(**{"store": str(folder), **changes})


@pytest.fixture(params=["host", "disk", "store"])
def one_tier(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, TierSettings]:
    settings = {"host": HOST, "disk": disk_of(tmp_path / "disk"), "store": store_of(tmp_path / "store")}
    return request.param, settings[request.param]


async def test_blocks_are_loaded_from_each_tier(one_tier: tuple[str, TierSettings]) -> None:
    tier, settings = one_tier
    tokens = await expected(item_of("a"))
    async with tiered(settings) as one:
        assert await one.run(item_of("a")) == tokens
        await one.has(tier, BLOCKS)
        one.forget()
        assert await one.run(item_of("b")) == tokens
        assert one.onboarded("a") == {}
        assert one.onboarded("b") == {tier: 16}
        assert one.cached("b") == 16
        await one.idle()


async def test_failed_tiers_break_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An unexpected error must not leave a request waiting for its load."""
    async with tiered(HOST) as one:
        await one.run(item_of("a"))
        monkeypatch.setattr(OffloadManager, "poll", lambda _: 1 // 0)
        one.submit(item_of("b", [9, *PROMPT]))
        with pytest.raises(ExceptionGroup) as raised:
            await one.until(lambda: False)
        assert raised.group_contains(ZeroDivisionError)


async def test_an_engine_loads_what_another_one_has_computed(tmp_path: Path) -> None:
    tokens = await expected(item_of("a"))
    other = msgspec.structs.replace(SPEC, worker_id="w2")
    async with tiered(store_of(tmp_path)) as one, tiered(store_of(tmp_path), other) as two:
        assert one.spec.kv_store == two.spec.kv_store != ""
        await one.run(item_of("a"))
        await one.has("store", BLOCKS)
        assert two.engine.stored() == [], "it was opened before the blocks were written"
        # The owner tells in the item that the store has the blocks.
        assert await two.run(item_of("b", store_blocks=4)) == tokens
        assert two.onboarded("b") == {"store": 16}
    async with tiered(store_of(tmp_path)) as three:
        assert {*BLOCKS} <= {*three.engine.stored()}
        assert await three.run(item_of("c")) == tokens
        assert three.onboarded("c") == {"store": 16}


async def test_a_store_is_not_shared_with_another_model(tmp_path: Path) -> None:
    other = msgspec.structs.replace(SPEC, model="other")
    async with tiered(store_of(tmp_path)) as one, tiered(store_of(tmp_path), other) as two:
        await one.run(item_of("a"))
        await one.has("store", BLOCKS)
        assert one.spec.kv_store != two.spec.kv_store
        await two.run(item_of("b", store_blocks=4))
        assert two.onboarded("b") == {}


@pytest.mark.parametrize(
    "change",
    [{"cache_namespace": "tenant"}, {"lora_name": "law"}, {"media": (shown((255, 0, 0), 0),)}],
    ids=["salt", "adapter", "media"],
)
async def test_other_salts_adapters_and_images_have_other_blocks(change: dict[str, Any]) -> None:
    spec = msgspec.structs.replace(SPEC, loras=("law",))
    async with tiered(HOST, spec) as one:
        plain = await one.run(item_of("a"))
        await one.has("host", BLOCKS)
        one.forget()
        special = await one.run(item_of("b", **change))
        assert one.onboarded("b") == {}
        await one.has("host", array_u64(item_of("b", **change).sequence_hashes))
        one.forget()
        assert await one.run(item_of("c", **change)) == special
        assert await one.run(item_of("d")) == plain
        assert (one.onboarded("c"), one.onboarded("d")) == ({"host": 16}, {"host": 16})


async def test_a_wrong_byte_that_a_store_returns_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flips = flipped_bytes(monkeypatch)
    async with tiered(disk_of(tmp_path)) as one:
        await one.run(item_of("a"))
        await one.has("disk", BLOCKS)
        one.forget()
        flips[:] = [(2, 31)]
        one.submit(item_of("b"))
        with pytest.raises(ExceptionGroup) as raised:
            await one.until(lambda: False)
        assert raised.group_contains(EngineError, match=f"wrong bytes for the block {BLOCKS[2]:016x}")


async def test_the_filter_of_the_disk_accepts_blocks_that_are_used_again(tmp_path: Path) -> None:
    settings = TierSettings(host_bytes=HOST.host_bytes, disk=tmp_path, disk_bytes=1 << 20)
    async with tiered(settings) as one:
        await one.run(item_of("a"))
        await one.has("host", BLOCKS)
        await one.run(item_of("b", PROMPT[:10]))  # its two blocks are in device memory
        await one.has("disk", BLOCKS[:2])
        assert one.lower["disk"] == {*BLOCKS[:2]}
        assert (one.cached("b"), one.onboarded("b")) == (8, {})


async def test_blocks_are_copied_to_host_memory_while_a_request_waits(tmp_path: Path) -> None:
    async with tiered(disk_of(tmp_path)) as one:
        tokens = await one.run(item_of("a"))
        await one.has("disk", BLOCKS)
    settings = disk_of(tmp_path, host_bytes=HOST.host_bytes)
    async with tiered(settings) as one:
        await one.engine.command(Command(action="pause"))
        one.submit(item_of("b"))
        await one.has("host", BLOCKS)
        await one.engine.command(Command(action="resume"))
        await one.idle()
        assert one.answers["b"].tokens == tokens
        assert one.onboarded("b") == {"host": 16}


@pytest.mark.parametrize("pin_s", [0, 60])
async def test_a_pinned_prompt_stays_in_host_memory(pin_s: int) -> None:
    async with tiered(TierSettings(host_bytes=8 * BLOCK_BYTES)) as one:
        await one.run(item_of("a", kv_pin_s=pin_s))
        await one.has("host", BLOCKS)
        for number in range(3):
            other = [number + 100] * 3 + PROMPT
            await one.run(item_of(f"other{number}", other))
            await one.has("host", hashes_of(other)[:1])
        one.forget()
        await one.run(item_of("b"))
        assert one.onboarded("b") == ({"host": 16} if pin_s else {})


async def test_ranks_have_their_own_tiers(tmp_path: Path) -> None:
    settings = TierSettings(host_bytes=HOST.host_bytes, disk=tmp_path / "disk", disk_bytes=1 << 20, filter=False)
    spec = msgspec.structs.replace(SPEC, dp_size=2)
    async with tiered(settings, spec, dp_size=2) as one:
        await one.run(item_of("a", rank=1))
        for tier in ("host", "disk"):
            await one.has(tier, BLOCKS)
        assert (one.announced(0), {*BLOCKS} <= one.announced(1)) == (set(), True)
        one.forget()
        await one.run(item_of("b", rank=0))
        await one.run(item_of("c", rank=1))
        assert (one.onboarded("b"), one.onboarded("c")) == ({}, {"host": 16})
    assert sorted(folder.name for folder in (tmp_path / "disk").iterdir()) == ["rank-0", "rank-1"]


async def test_clearing_the_cache_clears_host_and_disk_but_not_the_store(tmp_path: Path) -> None:
    settings = TierSettings(
        host_bytes=HOST.host_bytes,
        disk=tmp_path / "disk",
        disk_bytes=1 << 20,
        store=str(tmp_path / "store"),
        filter=False,
    )
    async with tiered(settings) as one:
        tokens = await one.run(item_of("a"))
        for tier in ("host", "disk", "store"):
            await one.has(tier, BLOCKS)
        await one.idle()
        await one.engine.command(CLEAR)
        await one.until(lambda: not one.lower["host"] | one.lower["disk"] | one.held[0])
        assert {*BLOCKS} <= one.shared
        assert await one.run(item_of("b")) == tokens
        assert one.onboarded("b").keys() <= {"store", "host"}  # a prefetch may have copied blocks to host memory
        assert sum(one.onboarded("b").values()) == 16


async def test_a_sleeping_engine_keeps_its_tiers() -> None:
    async with tiered(HOST) as one:
        tokens = await one.run(item_of("a"))
        await one.has("host", BLOCKS)
        await one.engine.command(Command(action="sleep"))
        await one.engine.command(Command(action="wake_up"))
        assert await one.run(item_of("b")) == tokens
        assert one.onboarded("b") == {"host": 16}
        assert {*BLOCKS} <= one.lower["host"], "the blocks are announced again"


async def test_measured_costs_are_reported(tmp_path: Path) -> None:
    async with tiered(disk_of(tmp_path)) as one:
        for number in range(6):
            await one.run(item_of(f"a{number}", [number, *PROMPT]))
        await one.has("disk", hashes_of([5, *PROMPT]))
        one.forget()
        for number in range(6):
            await one.run(item_of(f"b{number}", [number, *PROMPT]))
        costs = one.batches[-1].tier_costs
        assert costs is not None
        assert costs.prefill_block_us == pytest.approx(BLOCK_SIZE * 2_000, rel=0.1), "20 ms per token at tenfold speed"
        assert [cost.tier for cost in costs.tiers] == ["disk"]


async def test_a_retried_request_continues_after_its_output(tmp_path: Path) -> None:
    item = item_of("a", max_tokens=8)
    tokens = await expected(item)
    async with tiered(disk_of(tmp_path)) as one:
        await one.run(item_of("other"))
        await one.has("disk", hashes_of([*PROMPT, *tokens])[:5])
        one.forget()
        again = item_of("a", [*PROMPT, *tokens[:3]], 5, attempt=2, output_tokens=3)
        assert await one.run(again) == tokens[3:]
        assert one.onboarded("a") == {"disk": 20}, "the other request had the same output"


@pytest.mark.parametrize("seed", [0, 5, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 12))])
async def test_nothing_is_left_after_random_histories(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    settings = TierSettings(
        host_bytes=24 * 32,
        disk=tmp_path / "disk",
        disk_bytes=1 << 20,
        store=str(tmp_path / "store"),
        filter=rng.random() < 0.5,
    )
    prompts = [[100 + number, *PROMPT[: rng.randint(3, 18)]] * rng.randint(1, 3) for number in range(6)]
    right = [await expected(item_of("a", prompt)) for prompt in prompts]
    async with tiered(settings) as one:
        prompt_of: dict[str, int] = {}
        dropped: set[str] = set()
        for number in range(60):
            name, which = f"r{number}", rng.randrange(len(prompts))
            one.submit(item_of(name, prompts[which], store_blocks=rng.choice((0, 3)), kv_pin_s=rng.choice((0, 60))))
            prompt_of[name] = which
            await asyncio.sleep(0)
            match rng.randrange(10):
                case 0:
                    name = rng.choice([*prompt_of])
                    one.engine.cancel(name)
                    dropped.add(name)
                case 1:
                    one.forget()
                case 2:
                    one.engine.reset()
                    dropped.update(prompt_of)
                case 3:
                    await one.engine.command(Command(action="sleep"))
                    await one.engine.command(Command(action="wake_up"))
                case 4:
                    await one.until(lambda: len(one.engine.requests()) < 3)
        await one.idle()
        for name, which in prompt_of.items():
            tokens = one.answers[name].tokens
            assert tokens == right[which][: len(tokens)]
            assert name in dropped or len(tokens) == 6


SLOTS = {"prefill": 5, "decode": 6, "aggregated": 7}


def tiered_side(scene: Scene, role: str, tiers: TierSettings, name: str = "") -> Side:
    engine = MockEngine(engine_config(timing=TIMING), speedup=SPEEDUP, kv=kv_settings(), tiers=tiers)
    name = name or f"{role}-1"
    return Side(scene.worker(engine=engine, name=name, token=f"t-{name}", role=role), engine, SLOTS[role])


async def run_on(scene: Scene, one: Side, name: str, prompt: list[int] = PROMPT, **changes: Any) -> list[int]:
    """Run a request on a worker and return its output."""
    await scene.send(work_item(name, prompt, 6, worker_epoch=one.epoch, **changes), one.slot)
    await scene.ended(name)
    return scene.output(name)


def announced(scene: Scene, epoch: int, tier: str) -> set[int]:
    events = [one for one in scene.kv() if isinstance(one, BlocksStored)]
    return {
        block
        for one in events
        if one.worker_epoch == epoch and one.tier == tier
        for block in unpack_u64(one.sequence_hashes)
    }


def onboarded(scene: Scene, name: str, kind: type = FirstTokenEmitted) -> dict[str, int]:
    (event,) = (one for one in scene.progress(kind) if one.request_id == name)
    parts: tuple[OnboardedTokens, ...] = event.onboarded
    return {one.tier: one.tokens for one in parts}


async def test_a_worker_announces_the_tiers_that_survived(scene: Scene, tmp_path: Path) -> None:
    tiers = disk_of(tmp_path)
    async with serving(scene, tiered_side(scene, "aggregated", tiers)) as one:
        tokens = await run_on(scene, one, "a")
        await until(lambda: {*BLOCKS} <= announced(scene, one.epoch, "disk"))
        # The owner loses the worker, which joins again.
        await scene.lose(one.epoch, one.worker.spec.worker_id)
        epoch = await scene.admit(one.worker, f"t-{one.worker.spec.worker_id}.2", slot=one.slot)
        await until(lambda: {*BLOCKS} <= announced(scene, epoch, "disk"))
        await one.idle()
    async with serving(scene, tiered_side(scene, "aggregated", tiers)) as one:
        await until(lambda: {*BLOCKS} <= announced(scene, one.epoch, "disk"))
        assert await run_on(scene, one, "b") == tokens
        assert onboarded(scene, "b") == {"disk": 16}
        await one.idle()


async def test_a_worker_announces_its_shared_store(scene: Scene, tmp_path: Path) -> None:
    tiers = TierSettings(store=str(tmp_path))

    def stored() -> set[int]:
        events = [one for one in scene.kv() if isinstance(one, StoreBlocksAdded)]
        return {block for one in events for block in unpack_u64(one.sequence_hashes)}

    async with serving(scene, tiered_side(scene, "aggregated", tiers)) as one:
        assert one.worker.spec.kv_store
        await run_on(scene, one, "a")
        await until(lambda: {*BLOCKS} <= {*one.engine.stored()})
        await until(lambda: {*BLOCKS} <= stored())
        more = [9, *PROMPT]
        await run_on(scene, one, "b", more)
        await until(lambda: {*hashes_of(more)} <= stored())
        await one.idle()
        # The next epoch begins with the whole store. A re-announcement concerns the ranks only.
        before = len(scene.kv())
        await scene.lose(one.epoch, one.worker.spec.worker_id)
        epoch = await scene.admit(one.worker, f"t-{one.worker.spec.worker_id}.2", slot=one.slot)
        await until(lambda: any(isinstance(event, StoreBlocksAdded) for event in scene.kv()[before:]))
        before = len(scene.kv())
        await scene.send(ReannounceCache(owner_epoch=0, worker_epoch=epoch, rank=0), one.slot)
        await until(lambda: one.worker.counters.reannounced)
        assert not any(isinstance(event, StoreBlocksAdded) for event in scene.kv()[before:])


def tiered_pair(scene: Scene, folder: Path) -> Any:
    tiers = TierSettings(store=str(folder))
    return pair_of(scene, tiered_side(scene, "prefill", tiers), tiered_side(scene, "decode", tiers))


async def test_disagg_stages_load_from_the_shared_store(scene: Scene, tmp_path: Path) -> None:
    expected = await aggregated(scene, "alone", PROMPT)
    async with tiered_pair(scene, tmp_path) as both:
        prefilled = await both.compute("a", PROMPT)
        await until(lambda: len([*tmp_path.rglob("*.kv")]) == len(BLOCKS))
        # The decode worker loads full blocks, and fetches the last one, which is not full.
        await both.answer("a", prefilled, store_blocks=4)
        assert await both.generated("a") == expected
        assert onboarded(scene, "a") == {"store": 16}
        (first,) = (one for one in scene.progress(FirstTokenEmitted) if one.request_id == "a")
        assert first.transferred_bytes == 32
        for side in (both.prefill, both.decode):
            await side.idle()
            side.rank.clear(keep_tiers=True)
        # The prefill worker loads the prefix, which is in its store.
        prefilled = await both.compute("b", [*PROMPT, 1, 2, 3], store_blocks=4)
        assert onboarded(scene, "b", PrefillFinished) == {"store": 16}
        assert prefilled.cached_tokens == 16
        await both.answer("b", prefilled, store_blocks=4)
        assert await both.generated("b") == await aggregated(scene, "alone.b", [*PROMPT, 1, 2, 3])
        await both.idle()


@pytest.mark.parametrize("first_token", [0, 4, 9])
async def test_disagg_media_and_loaded_blocks(scene: Scene, tmp_path: Path, first_token: int) -> None:
    images = {color: shown(rgb, first_token) for color, rgb in (("red", (255, 0, 0)), ("blue", (0, 0, 255)))}
    fields: dict[str, dict[str, Any]] = {
        color: {"media": (image,), "sequence_hashes": hashes_with(PROMPT, image)} for color, image in images.items()
    }
    expected = {color: await aggregated(scene, f"alone.{color}", PROMPT, **one) for color, one in fields.items()}
    both: Pair
    async with tiered_pair(scene, tmp_path) as both:
        for turn in range(2):
            for color, one in fields.items():
                name = f"{color}.{turn}"
                prefilled = await both.compute(name, PROMPT, store_blocks=4, **one)
                await both.answer(name, prefilled, store_blocks=4)
                assert await both.generated(name) == expected[color]
                await both.prefill.idle()
                await both.decode.idle()
                await until(both.decode.engine.stored)
                for side in (both.prefill, both.decode):
                    side.rank.clear(keep_tiers=True)
        assert expected["red"] != expected["blue"]
        assert onboarded(scene, "red.1") == {"store": 16}
        assert onboarded(scene, "blue.1") == {"store": 16}
