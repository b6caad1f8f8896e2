"""Workers with mock engines and KV tiers on a log: what they announce, and what they load for disaggregated stages."""

from pathlib import Path
from typing import Any

import pytest

from forebay.engine_model.model import EngineConfig
from forebay.events.base import unpack_u64
from forebay.events.kv import BlocksStored, StoreBlocksAdded
from forebay.events.progress import FirstTokenEmitted, OnboardedTokens, PrefillFinished, RequestFinished
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.runtime.worker import Worker
from tests.workers.conftest import GROUP, PARTITION, VOCABULARY, Scene, until, work_item
from tests.workers.disagg import Pair, Side, aggregated, kv_settings, output_by, pair_of, serving
from tests.workers.pictures import hashes_with, shown
from tests.workers.tiered import BLOCK_SIZE, PROMPT, SPEEDUP, TIMING, disk_of, hashes_of

BLOCKS = hashes_of(PROMPT)
SLOTS = {"prefill": 5, "decode": 6, "aggregated": 7}


def tiered_side(scene: Scene, role: str, tiers: TierSettings, name: str = "") -> Side:
    sizes = {"block_size": BLOCK_SIZE, "kv_blocks_total": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    config = EngineConfig(vocabulary=VOCABULARY, timing=TIMING, **sizes)
    engine = MockEngine(config, speedup=SPEEDUP, kv=kv_settings(), tiers=tiers)
    spec = scene.spec(1, name or f"{role}-1", role=role)
    token = f"t-{spec.worker_id}"
    worker = Worker(scene.log, scene.keeper, spec, engine, token=token, group=GROUP, partition=PARTITION)
    return Side(worker, engine, SLOTS[role])


async def run_on(scene: Scene, one: Side, name: str, prompt: list[int] = PROMPT, **changes: Any) -> list[int]:
    """Run a request on a worker and return its output."""
    await scene.send(work_item(name, prompt, 6, worker_epoch=one.epoch, **changes), one.slot)
    await until(lambda: any(end.request_id == name for end in scene.progress(RequestFinished)))
    return output_by(scene, name)


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
    tiers = TierSettings(store=str(tmp_path), io="plain")

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


def tiered_pair(scene: Scene, folder: Path) -> Any:
    tiers = TierSettings(store=str(folder), io="plain")
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
