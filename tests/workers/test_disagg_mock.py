"""Disaggregated mock engines: by NIXL with correct and corrupt bytes, and in modelled time."""

import asyncio
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from forebay.events.control import Command
from forebay.events.kv import BlocksStored
from forebay.events.media import Media
from forebay.events.progress import FirstTokenEmitted, PrefillFinished
from forebay.events.work import ReleaseKv
from forebay.workers.engine import EngineError
from forebay.workers.engines.encode import StandInEncoder
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.kv_transfer.api import REASONS
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime import media_feed
from forebay.workers.runtime.metrics import Probes, WorkerMetrics
from tests.workers.conftest import Scene, engine_config, until
from tests.workers.disagg import BLOCK_BYTES, PROMPT, Pair, aggregated, kv_settings, pair_of, serving, side
from tests.workers.pictures import Memory, hashes_with, shown

KINDS = ("nixl", "modelled")
CLEAR = Command(action="clear_kv_blocks")


def pair(scene: Scene, **settings: Any) -> Any:
    kv = kv_settings(**settings)
    return pair_of(scene, side(scene, "prefill", kv), side(scene, "decode", kv))


def bytes_of(both: Pair, number: int = 0) -> Any:
    """The bytes of a block that the prefill worker keeps, in the order in which they were written."""
    slots = both.prefill.kv.slots
    return both.prefill.kv.transport.memory.view(slots.held[number])


@pytest.mark.parametrize(("kind", "checksum"), [("nixl", False), ("nixl", True), ("modelled", False)])
@pytest.mark.parametrize("length", [1, 8, 10])
async def test_disagg_output_equals_that_of_one_worker(scene: Scene, kind: str, checksum: bool, length: int) -> None:
    prompt = list(range(1, length + 1))
    expected = await aggregated(scene, "alone", prompt)
    async with pair(scene, connector=kind, checksum=checksum) as both:
        prefilled = await both.compute("apart", prompt)
        assert prefilled.connector == kind
        assert (prefilled.tokens, prefilled.bytes) == (length, -(-length // 4) * BLOCK_BYTES)
        assert (prefilled.checksum is not None) == (checksum and kind == "nixl")
        await both.answer("apart", prefilled)
        assert await both.generated("apart") == expected
        await both.idle()
        stats = both.decode.engine.kv_stats()
        assert (stats.fetched, stats.bytes, sum(stats.took.values())) == (1, prefilled.bytes, 1)
    first = next(one for one in scene.progress(FirstTokenEmitted) if one.request_id == "apart")
    assert first.transferred_bytes == prefilled.bytes
    assert first.transfer_us > 0
    assert first.cached_tokens == length - 1


async def test_disagg_output_depends_on_every_transferred_byte(scene: Scene) -> None:
    expected = await aggregated(scene, "alone")
    answers = []
    async with pair(scene) as both:
        for at, offset in enumerate((0, 7, BLOCK_BYTES - 1)):
            for number in range(3):
                name = f"{at}.{number}"
                prefilled = await both.compute(name)
                bytes_of(both, number)[offset] ^= 1
                # Its own cache would hide what came: every one is answered from nothing.
                await both.decode.engine.command(CLEAR)
                await both.answer(name, prefilled)
                answers.append(await both.generated(name))
        # All bytes wrong alike is wrong, too.
        prefilled = await both.compute("all")
        for number in range(3):
            bytes_of(both, number)[:] ^= 1
        await both.decode.engine.command(CLEAR)
        await both.answer("all", prefilled)
        answers.append(await both.generated("all"))
        await both.idle()
    assert expected not in answers
    assert len(set(map(tuple, answers))) == len(answers)


async def test_disagg_cached_blocks_are_not_fetched(scene: Scene) -> None:
    prompt = [*PROMPT[:8], 77, 78]
    expected = await aggregated(scene, "alone", prompt)
    async with pair(scene) as both:
        await both.answer("first", await both.compute("first"))
        await both.generated("first")
        stored = [event for event in scene.kv() if isinstance(event, BlocksStored)]
        prefilled = await both.compute("second", prompt)
        assert prefilled.bytes == 3 * BLOCK_BYTES
        await both.answer("second", prefilled)
        assert await both.generated("second") == expected
        await both.idle()
    assert {event.worker_id for event in stored} == {"one-alone", "prefill-1", "decode-1"}
    first = [one for one in scene.progress(FirstTokenEmitted) if one.request_id == "second"]
    assert [one.transferred_bytes for one in first] == [BLOCK_BYTES]


@pytest.mark.parametrize(("length", "kind"), [(8, "nixl"), (10, "nixl"), (10, "modelled")])
async def test_disagg_kv_contains_the_media(scene: Scene, length: int, kind: str) -> None:
    prompt = list(range(1, length + 1))
    red, blue = shown((255, 0, 0), 4), shown((0, 0, 255), 4)

    def fields(*media: Media) -> dict[str, Any]:
        return {"media": media, "sequence_hashes": hashes_with(prompt, *media)}

    cases = {"red": fields(red), "blue": fields(blue), "none": fields()}
    expected = {name: await aggregated(scene, f"alone.{name}", prompt, **case) for name, case in cases.items()}
    async with pair(scene, connector=kind) as both:
        for name, case in cases.items():
            await both.compute(name, prompt, **case)
        blocks = -(-length // 4)
        # Before the image all are alike, but not what the model makes of it: none of its blocks is another's.
        assert kind == "modelled" or both.prefill.kv.slots.used == 3 * blocks
        for name in cases:
            await both.answer(name, await both.computed(name))
        generated = {name: await both.generated(name) for name in cases}
        await both.idle()
    assert generated == expected
    assert len(set(map(tuple, generated.values()))) == 3


async def test_a_disagg_prompt_whose_images_another_worker_encoded(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = shown((9, 99, 199), 4)
    fields: dict[str, Any] = {"media": (image,), "sequence_hashes": hashes_with(PROMPT, image)}
    expected = await aggregated(scene, "alone", **fields)
    memory = Memory()
    monkeypatch.setattr(media_feed.MediaFeed.__init__, "__defaults__", (memory.reader,))
    async with pair(scene) as both:
        encoded = memory.offers("e@1").offer_now(StandInEncoder().encode_all([image]))
        fields["media"] = (msgspec.structs.replace(image, content=b""),)
        prefilled = await both.compute("apart", encoded=encoded, **fields)
        # What was encoded is in the KV: the decode worker needs neither it nor the image.
        await both.answer("apart", prefilled)
        assert await both.generated("apart") == expected
        encoded = msgspec.structs.replace(encoded, descriptor=b"elsewhere")
        await both.ask("lost", encoded=encoded, **fields)
        assert "nobody is there" in await both.not_fetched("lost")
        await both.idle()
    assert both.prefill.worker.media.fetched == 1
    assert both.decode.worker.media.fetched == 0


async def test_disagg_blocks_must_hold_whole_words(scene: Scene) -> None:
    spec = scene.spec(role="prefill")
    for size in (1, 3):
        engine = MockEngine(engine_config(), kv=kv_settings(bytes_per_token=size))
        with pytest.raises(EngineError, match="expected a multiple of 8"):
            await engine.start(spec)


async def test_an_engine_of_another_role_refuses_disagg_stages(scene: Scene) -> None:
    async with pair(scene) as both, serving(scene, side(scene, "aggregated", kv_settings())) as one:
        prefilled = await both.compute("r")
        both.prefill = one
        await both.ask("s")
        failed = await both.failed("s")
        assert (failed.status, failed.code) == (501, "stage_not_supported")
        both.decode = one
        await both.answer("r", prefilled)
        await until(lambda: scene.end("r"))
        assert scene.end("r").error.status == 501


async def test_disagg_kv_of_another_prompt_or_model_is_refused(scene: Scene) -> None:
    async with pair(scene) as both:
        for name, change in (
            ("tokens", {"tokens": 9}),
            ("model", {"model": "other"}),
            ("worker", {"worker_id": "another"}),
        ):
            prefilled = await both.compute(name)
            await both.answer(name, msgspec.structs.replace(prefilled, **change))
            error = await both.not_fetched(name)
            assert str(next(iter(change.values()))) in error, error
            await both.cancel(name, both.prefill)
        both.requested["nowhere"] = both.requested["model"]
        await both.answer("nowhere", None, request_id="nowhere")
        await until(lambda: scene.end("nowhere"))
        assert scene.end("nowhere").error.code == "nothing_to_fetch"
        await both.idle()


async def test_disagg_prompt_that_cannot_be_kept_fails_the_prefill(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(scene) as both:
        await both.compute("first")
        transport = both.prefill.kv.transport

        def full(*_: Any, **__: Any) -> Any:
            raise TransferError("there is no room", "full")

        with monkeypatch.context() as patched:
            patched.setattr(transport, "offer", full)
            await both.ask("offer", [1, 2])
            failed = await both.failed("offer")
            assert (failed.status, failed.code) == (503, "kv_not_kept")
            assert "there is no room" in failed.error
        taken = both.prefill.kv.slots.take(64 - both.prefill.kv.slots.used)
        await both.ask("slots", [5, 6])
        assert "1 slots are needed, but only 0 of 64 are free" in (await both.failed("slots")).error
        both.prefill.kv.slots.free(taken)
        await both.cancel("first", both.prefill)
        await both.idle()


def metrics(one: Any) -> dict[str, float]:
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(one.worker))
    return {
        "|".join((sample.name, *(value for key, value in sample.labels.items() if key != "worker_id"))): sample.value
        for family in registry.collect()
        for sample in family.samples
    }


async def test_disagg_metrics_and_readiness_show_the_transport(scene: Scene) -> None:
    probes = Probes()
    async with pair(scene, checksum=True) as both:
        probes.worker = both.decode.worker
        await until(lambda: probes.ready()[0])
        assert probes.ready()[1] == "healthy, KV transport nixl"
        prefilled = await both.compute("r")
        assert metrics(both.prefill)["forebay_kv_transfer_held"] == 1
        await both.answer("r", prefilled)
        await both.generated("r")
        await both.idle()
        # An epoch that ended counts on.
        await both.decode.engine.stop()
        decode, prefill = metrics(both.decode), metrics(both.prefill)
    assert decode["forebay_kv_transport_info|nixl"] == 1
    expected = {"fetches": 1, "bytes": 3 * BLOCK_BYTES, "blocks": 3, "retries": 0, "corrupt_blocks": 0}
    assert {name: decode[f"forebay_kv_transfer_{name}_total"] for name in expected} == expected
    assert decode["forebay_kv_transfer_seconds_sum"] > 0
    slowest = [decode[f"forebay_kv_transfer_seconds_bucket|{bound}"] for bound in ("0.0005", "10.0", "+Inf")]
    assert slowest == sorted(slowest)
    assert slowest[1:] == [1, decode["forebay_kv_transfer_seconds_count"]] == [1, 1]
    assert {reason: decode[f"forebay_kv_transfer_failures_total|{reason}"] for reason in REASONS} == dict.fromkeys(
        REASONS, 0
    )
    assert prefill["forebay_kv_transfer_offers_total"] == 1
    assert prefill["forebay_kv_transfer_seconds_count"] == 0
    assert prefill["forebay_kv_transfer_given_back_total|fetched"] == 1
    assert prefill["forebay_kv_transfer_given_back_total|expired"] == 0
    assert (prefill["forebay_kv_transfer_held"], decode["forebay_kv_transfer_in_flight"]) == (0, 0)
    async with serving(scene, side(scene, "aggregated", kv_settings())) as one:
        assert not [name for name in metrics(one) if "kv_trans" in name]
        probes.worker = one.worker
        await until(lambda: probes.ready() == (True, "healthy"))


async def test_disagg_ranks_share_one_transport(scene: Scene) -> None:
    expected = {name: await aggregated(scene, name, [ord(name), *PROMPT]) for name in "abcd"}
    kv = kv_settings()
    sides = [side(scene, role, kv, dp_size=2) for role in ("prefill", "decode")]
    async with pair_of(scene, *sides) as both:
        for at, name in enumerate("abcd"):
            await both.ask(f"apart.{name}", [ord(name), *PROMPT], rank=at % 2)
        for at, name in enumerate("abcd"):
            await both.answer(f"apart.{name}", await both.computed(f"apart.{name}"), rank=at // 2)
        generated = {name: await both.generated(f"apart.{name}") for name in "abcd"}
        await both.idle()
        assert both.prefill.engine.kv_stats().freed == {"fetched": 4}
        assert not any(rank.model.pool.used for one in sides for rank in one.engine.ranks.values())
    assert generated == expected


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("why", ["expired", "released"])
async def test_disagg_kv_that_is_no_longer_kept_is_not_fetched(scene: Scene, kind: str, why: str) -> None:
    async with pair(scene, connector=kind, lease_s=0.02 if why == "expired" else 20.0) as both:
        prefilled = await both.compute("r")
        if why == "released":
            await both.cancel("r", both.prefill)
        await both.prefill.idle()
        await both.answer("r", prefilled)
        assert await both.not_fetched("r")
        assert both.prefill.engine.kv_stats().freed == {why: 1}
        await both.idle()


@pytest.mark.parametrize(("by", "other"), [KINDS, KINDS[::-1]])
async def test_disagg_kv_of_another_connector_is_not_fetched(scene: Scene, by: str, other: str) -> None:
    prefill, decode = (
        side(scene, "prefill", kv_settings(connector=by)),
        side(scene, "decode", kv_settings(connector=other)),
    )
    async with pair_of(scene, prefill, decode) as both:
        await both.answer("r", await both.compute("r"))
        assert f"transfers KV by {by}" in await both.not_fetched("r")
        await both.cancel("r", both.prefill)
        await both.idle()


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
        await both.answer("warm", await both.compute("warm", [500]))
        await both.generated("warm")
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
