"""Prefill and decode stages at a worker with any engine: events, rejections, released KV and repeated items."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from forebay.core.block_hashes import sequence_hashes
from forebay.engine_model.model import Emitted, EngineLoad, Finished, FirstTokenStep
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.control import Command
from forebay.events.fleet import WorkerDraining, WorkerSpec
from forebay.events.media import Media
from forebay.events.progress import (
    AttemptRejected,
    FirstTokenEmitted,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.tokens import AttemptStarted, PrefilledBy, ResponseEnded, ResponseError, TokenChunk, TokensEmitted
from forebay.events.topics import FLEET, TOKENS
from forebay.events.transfer import Prefilled
from forebay.events.work import ReleaseKv, WorkItem
from forebay.workers.engine import EngineBatch, EngineRefused, Failed, NotFetched, PromptPrefilled, Publish
from forebay.workers.runtime.worker import Worker
from tests.workers.conftest import PARTITION, Scene, until, work_item

PROMPT = [1, 2, 3, 4, 5, 6]
IDLE = EngineLoad(0, 0, 0, 8)


class Engine:
    """Engine that records its requests and publishes the batches of the test."""

    def __init__(self) -> None:
        self.items: list[WorkItem] = []
        self.cancelled: list[str] = []
        self.released: list[str] = []
        self.dropped: list[bytes] = []
        self.holds: set[str] = set()
        self.resets = 0
        self.generated: asyncio.Queue[EngineBatch] = asyncio.Queue()

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        return spec

    async def run(self, publish: Publish) -> None:
        while True:
            publish(await self.generated.get())

    async def stop(self) -> None: ...

    def held(self, rank: int) -> Sequence[int]:
        return ()

    def submit(self, item: WorkItem) -> None:
        self.items.append(item)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    async def command(self, command: Command) -> tuple[str, ...]:
        raise EngineRefused("it does nothing")

    async def check(self) -> None: ...

    def collectors(self) -> Sequence[Any]:
        return ()

    def reset(self) -> None:
        self.resets += 1
        self.holds.clear()

    def emit(self, **what: Any) -> None:
        self.generated.put_nowait(EngineBatch(rank=0, load=IDLE, **what))


class KvEngine(Engine):
    def release(self, request_id: str) -> None:
        self.released.append(request_id)
        self.holds.discard(request_id)

    def drop(self, prefilled: Prefilled) -> None:
        self.dropped.append(prefilled.descriptor)

    def kept(self) -> int:
        return len(self.holds)


def prefilled(epoch: int = 0, lease_us: int = 60_000_000) -> Prefilled:
    return Prefilled(
        worker_id="w1", worker_epoch=epoch, model="model", connector="nixl", descriptor=b"here", tokens=6,
        lease_us=lease_us, bytes=32,
    )  # fmt: skip


class Stages:
    """A worker with a recording engine, which is sent prefill and decode stages."""

    def __init__(self, scene: Scene, engine: KvEngine, worker: Worker) -> None:
        self.scene = scene
        self.engine = engine
        self.worker = worker

    async def send(self, name: str, stage: str, **changes: Any) -> WorkItem:
        item = stage_item(self.scene, name, stage, **changes)
        await self.scene.send(item)
        return item

    async def submit(self, name: str, stage: str, **changes: Any) -> WorkItem:
        """Send an item and wait until the engine has it."""
        count = len(self.engine.items)
        item = await self.send(name, stage, **changes)
        await until(lambda: len(self.engine.items) > count)
        return item

    async def computed(self, name: str, lease_us: int = 60_000_000, **changes: Any) -> Any:
        """Send a prefill, publish its result, and return the event. The engine has released nothing afterwards."""
        before = len(self.scene.progress(PrefillFinished))
        item = await self.submit(name, "prefill", **changes)
        self.engine.holds.add(name)
        self.engine.emit(prefilled=[PromptPrefilled(name, item.attempt, prefilled(item.worker_epoch, lease_us), 4)])
        await until(lambda: len(self.scene.progress(PrefillFinished)) > before)
        self.engine.released.clear()
        return self.scene.progress(PrefillFinished)[-1]

    async def release(self, name: str, attempt: int = 1) -> None:
        order = ReleaseKv(request_id=name, attempt=attempt, owner_epoch=0, worker_epoch=self.scene.epoch)
        await self.scene.send(order)

    async def repeated(self, count: int = 1) -> None:
        await until(lambda: self.worker.counters.repeated == count)

    async def emitted_before(self, tokens: list[int], *, ended: bool = False) -> None:
        """Append output of an earlier attempt on another worker."""
        if tokens:
            chunk = TokenChunk(request_id="r", attempt=1, first_index=0, token_ids=pack_u32(tokens))
            event = TokensEmitted(worker_id="w0", worker_epoch=0, owner_epoch=0, chunks=(chunk,))
            await self.scene.append(TOKENS, 3, event)
        if ended:
            error = ResponseError(status=500, code="x", message="it broke")
            end = ResponseEnded(request_id="r", attempt=1, owner_epoch=0, finish_reason="error", error=error)
            await self.scene.append(TOKENS, 3, end)


def stage_item(scene: Scene, name: str, stage: str, **changes: Any) -> WorkItem:
    kept = prefilled() if stage == "decode" else None
    return work_item(name, PROMPT, 4, **{"stage": stage, "worker_epoch": scene.epoch, "prefilled": kept, **changes})


@asynccontextmanager
async def staged(scene: Scene, **spec: Any) -> AsyncIterator[Stages]:
    engine = KvEngine()
    worker = scene.worker(engine=engine, **spec)
    async with scene.serving(worker):
        yield Stages(scene, engine, worker)


@pytest.fixture
async def stages(scene: Scene) -> AsyncIterator[Stages]:
    async with staged(scene) as found:
        yield found


async def test_prefill_result_is_reported_to_the_owner_only(scene: Scene) -> None:
    async with staged(scene, dp_size=2) as stages:
        generated = await stages.computed("r", owner_epoch=7, rank=1)
        assert generated.prefilled == msgspec.structs.replace(prefilled(scene.epoch), rank=1, cached_tokens=4)
        assert (generated.request_id, generated.attempt, generated.owner_epoch) == ("r", 1, 7)
        assert generated.worker_epoch == scene.epoch
        assert scene.progress() == [generated]
        assert not scene.tokens()
        assert not stages.worker.active_requests


@pytest.mark.parametrize(("status", "reported"), [(400, 400), (503, 503), (0, 500), (302, 500), (700, 500)])
async def test_prefill_failure_is_reported_to_the_owner_only(
    scene: Scene, stages: Stages, status: int, reported: int
) -> None:
    await stages.submit("r", "prefill")
    stages.engine.emit(failed=[Failed("r", 1, ResponseError(status=status, code="c" * 300, message="m" * 900))])
    await until(scene.progress)
    (generated,) = scene.progress(PrefillFailed)
    assert (generated.status, generated.code, generated.error) == (reported, "c" * 256, "m" * 500)
    assert not scene.tokens()
    assert not scene.progress(RequestFailed)


async def test_disagg_stage_with_an_unknown_rank_fails(scene: Scene, stages: Stages) -> None:
    await stages.send("p", "prefill", rank=3)
    await stages.send("d", "decode", rank=3)
    await until(lambda: scene.progress(PrefillFailed) and scene.tokens(ResponseEnded))
    (generated,) = scene.progress(PrefillFailed)
    assert (generated.request_id, generated.status, generated.code) == ("p", 500, "no_such_rank")
    assert [end.request_id for end in scene.tokens(ResponseEnded)] == ["d"]
    assert stages.engine.dropped == [b"here"], "the holder is notified"
    assert not stages.engine.items


async def test_disagg_stages_are_refused_by_engines_without_kv_transfer(scene: Scene) -> None:
    engine = Engine()
    async with scene.serving(scene.worker(engine=engine)):
        await scene.send(stage_item(scene, "p", "prefill"))
        await scene.send(stage_item(scene, "d", "decode"))
        await scene.cancel("x")
        await scene.send(stage_item(scene, "a", "aggregated"))
        await until(lambda: engine.items)
    (generated,) = scene.progress(PrefillFailed)
    assert (generated.request_id, generated.status, generated.code) == ("p", 501, "stage_not_supported")
    (end,) = scene.tokens(ResponseEnded)
    assert (end.request_id, end.error.status) == ("d", 501)
    assert "the engine Engine " in end.error.message
    assert [item.request_id for item in engine.items] == ["a"]


async def test_disagg_transfer_is_reported_with_the_first_token(scene: Scene, stages: Stages) -> None:
    await stages.submit("r", "decode", prefilled=msgspec.structs.replace(prefilled(), rank=3))
    stages.engine.emit(
        emitted=[Emitted("r", 1, 0, pack_u32([9, 9, 9, 9]))],
        first_tokens=[FirstTokenStep("r", 1, 5, transferred_bytes=32, transfer_us=11)],
        finished=[Finished("r", 1, "length", 6, 4, 5)],
    )
    await until(lambda: scene.progress(RequestFinished))
    (first,) = scene.progress(FirstTokenEmitted)
    assert (first.cached_tokens, first.transferred_bytes, first.transfer_us) == (5, 32, 11)
    assert not first.unfetched
    whose = PrefilledBy(worker_id="w1", rank=3, transferred_bytes=32, transfer_us=11)
    assert [chunk.prefilled for chunk in scene.chunks("r")] == [whose]
    assert scene.tokens(ResponseEnded)


async def test_disagg_prefill_worker_is_named_with_the_first_token_only(scene: Scene, stages: Stages) -> None:
    for name in "rs":
        await stages.submit(name, "decode")
    stages.engine.emit(
        emitted=[Emitted(name, 1, 0, pack_u32([9])) for name in "sr"],
        first_tokens=[FirstTokenStep(name, 1, 5, transferred_bytes=size) for name, size in (("r", 8), ("s", 16))],
    )
    stages.engine.emit(emitted=[Emitted(name, 1, 1, pack_u32([9])) for name in "sr"])
    await until(lambda: len(scene.chunks("r")) == len(scene.chunks("s")) == 2)
    for name, size in (("r", 8), ("s", 16)):
        assert [one.prefilled and one.prefilled.transferred_bytes for one in scene.chunks(name)] == [size, None]


async def test_disagg_kv_that_cannot_be_fetched_goes_back_to_the_owner(scene: Scene, stages: Stages) -> None:
    await stages.submit("r", "decode")
    stages.engine.emit(not_fetched=[NotFetched("r", 2, "another attempt"), NotFetched("r", 1, "w9 is gone" * 100)])
    await until(scene.progress)
    assert not stages.worker.active_requests
    (generated,) = scene.progress()
    assert type(generated) is TransferFailed
    assert generated.error == ("w9 is gone" * 100)[:500]
    assert not scene.tokens()


async def test_disagg_failure_before_the_first_token_drops_the_kv(scene: Scene, stages: Stages) -> None:
    engine, refused = stages.engine, ResponseError(status=404, code="adapter_not_loaded", message="it is not loaded")
    for name in ("refused", "begun", "stale"):
        await stages.submit(name, "decode", attempt=1)
    await stages.submit("whole", "aggregated")
    engine.emit(failed=[Failed("stale", 2, refused), Failed("whole", 1, refused), Failed("nobody", 1, refused)])
    engine.emit(first_tokens=[FirstTokenStep("begun", 1, 5)])
    engine.emit(failed=[Failed("begun", 1, refused)])
    await until(lambda: len(scene.progress(RequestFailed)) == 2)
    assert not engine.dropped, "it was fetched, or is somebody else's"
    engine.emit(failed=[Failed("refused", 1, refused)])
    await until(lambda: len(scene.progress(RequestFailed)) == 3)
    assert engine.dropped == [b"here"]


@pytest.mark.parametrize("has_token", [False, True])
async def test_only_the_owner_is_informed_of_a_rejection_before_the_first_token(
    scene: Scene, stages: Stages, has_token: bool
) -> None:
    await stages.submit("r", "aggregated")
    if has_token:
        stages.engine.emit(first_tokens=[FirstTokenStep("r", 1, 0)], emitted=[Emitted("r", 1, 0, pack_u32([9]))])
    error = ResponseError(status=429, code="engine_overloaded", message="not now", retry_after_s=9)
    stages.engine.emit(failed=[Failed("r", 1, error, is_rejection=True)])
    await until(lambda: scene.progress(RequestFailed) or scene.progress(AttemptRejected))
    assert [end.error for end in scene.tokens(ResponseEnded)] == [error] * has_token
    found = [(one.status, one.code, one.error, one.retry_after_s) for one in scene.progress(AttemptRejected)]
    assert found == [] if has_token else [(429, "engine_overloaded", "not now", 9)]
    assert not stages.worker.active_requests


async def test_disagg_later_attempt_without_output_fetches(scene: Scene, stages: Stages) -> None:
    item = await stages.submit("r", "decode", attempt=2)
    assert stages.engine.items == [item]
    assert scene.tokens(AttemptStarted)
    assert not stages.engine.dropped


async def test_disagg_later_attempt_with_output_continues_locally(scene: Scene, stages: Stages) -> None:
    await stages.emitted_before([70, 71])
    await stages.submit("r", "decode", attempt=2)
    stages.engine.emit(first_tokens=[FirstTokenStep("r", 2, 0)], emitted=[Emitted("r", 2, 0, pack_u32([72]))])
    stages.engine.emit(failed=[Failed("r", 2, ResponseError(status=503, code="full", message="no room"))])
    await until(lambda: scene.tokens(ResponseEnded))
    assert [chunk.prefilled for chunk in scene.chunks("r", 2)] == [None], "nobody else computed it"
    (first,) = scene.progress(FirstTokenEmitted)
    assert first.unfetched, "the owner releases it if the holder cannot be notified"
    (item,) = stages.engine.items
    assert (item.stage, item.prefilled) == ("aggregated", None)
    assert unpack_u32(item.token_ids) == [*PROMPT, 70, 71]
    assert item.sequence_hashes == sequence_hashes(pack_u32([*PROMPT, 70, 71]), 4)
    assert item.sampling.max_tokens == 2
    assert stages.engine.dropped == [b"here"]


@pytest.mark.parametrize(("generated", "ended"), [([], True), ([70], True), ([70, 71, 72, 73], False)])
async def test_disagg_complete_response_needs_no_kv(
    scene: Scene, stages: Stages, generated: list[int], ended: bool
) -> None:
    await stages.emitted_before(generated, ended=ended)
    await stages.send("r", "decode", attempt=2)
    await until(scene.progress)
    assert not stages.worker.active_requests
    assert stages.engine.dropped == [b"here"]
    assert not stages.engine.items


async def test_disagg_later_prefill_releases_the_kv_of_the_previous_attempt(scene: Scene, stages: Stages) -> None:
    await stages.computed("r")
    await stages.submit("r", "prefill", attempt=2)
    assert stages.engine.released == ["r"]
    assert stages.worker.counters.reading.passes == 0
    assert not scene.tokens()


async def test_disagg_cancellation_frees_kept_kv(scene: Scene, stages: Stages) -> None:
    engine = stages.engine
    await stages.computed("r")
    await scene.cancel("r")
    await until(lambda: engine.released == ["r"])
    # The result is not sent again either.
    await stages.send("r", "prefill", owner_epoch=9)
    await stages.repeated()
    # One that is under way is cancelled; what comes of it all the same is given back.
    await stages.submit("s", "prefill")
    await scene.cancel("s")
    await until(lambda: engine.cancelled == ["s"])
    engine.released.clear()
    engine.emit(prefilled=[PromptPrefilled("s", 1, prefilled(scene.epoch))])
    await until(lambda: engine.released == ["s"])
    assert len(scene.progress(PrefillFinished)) == 1


async def test_disagg_release_frees_only_its_attempt(scene: Scene, stages: Stages) -> None:
    """A release may come late, from an owner that does not know whether its predecessor sent it."""
    engine = stages.engine
    await stages.computed("r")
    await stages.release("r")
    await until(lambda: engine.released == ["r"])
    await stages.send("r", "prefill", owner_epoch=9)
    await stages.repeated()
    assert len(scene.progress(PrefillFinished)) == 1, "a released result is not sent again"
    # The next attempt: while it is computed, and while its KV is kept.
    await stages.submit("r", "prefill", attempt=2)
    engine.released.clear()
    await stages.release("r")
    engine.holds.add("r")
    engine.emit(prefilled=[PromptPrefilled("r", 2, prefilled(scene.epoch), 4)])
    await until(lambda: len(scene.progress(PrefillFinished)) == 2)
    await stages.release("r")
    await stages.release("unknown")
    await until(lambda: engine.released == ["unknown"])
    assert not engine.cancelled
    await stages.release("r", attempt=2)
    await until(lambda: not engine.kept())


async def test_disagg_repeated_prefill_has_the_same_descriptor(scene: Scene, stages: Stages) -> None:
    first = await stages.computed("r")
    await stages.send("r", "prefill", owner_epoch=9)
    await until(lambda: len(scene.progress(PrefillFinished)) == 2)
    await stages.computed("short", lease_us=1)
    await stages.send("short", "prefill", owner_epoch=9)
    await stages.repeated(2)
    _, again, _ = scene.progress(PrefillFinished)
    assert again.owner_epoch == 9
    left_us = again.prefilled.lease_us
    assert 0 < left_us < first.prefilled.lease_us, "its lease goes on, and does not begin again"
    assert msgspec.structs.replace(again.prefilled, lease_us=first.prefilled.lease_us) == first.prefilled
    assert [item.request_id for item in stages.engine.items] == ["r", "short"], "nothing is computed twice"


async def test_disagg_rejected_decode_drops_the_kv(scene: Scene, stages: Stages) -> None:
    media = (Media(kind="image", digest="ab" * 32, mime="image/png", first_token=1, tokens=2, content=b"x"),)
    await stages.send("r", "decode", media=media)
    await until(lambda: scene.progress(RequestFailed))
    assert scene.end("r").error.code == "media_not_supported"
    assert stages.engine.dropped == [b"here"]


async def test_disagg_repeated_earlier_attempt_is_ignored(scene: Scene, stages: Stages) -> None:
    for attempt in (1, 2):
        await stages.computed("r", attempt=attempt)
    await stages.send("r", "prefill", attempt=1, owner_epoch=9)
    await stages.repeated()
    assert [generated.attempt for generated in scene.progress(PrefillFinished)] == [1, 2]


async def test_disagg_lost_epoch_frees_kept_kv(scene: Scene, stages: Stages) -> None:
    await stages.computed("r")
    await scene.lose(scene.epoch)
    await until(lambda: stages.worker.worker_epoch is None)
    assert stages.engine.resets == 1
    assert not stages.engine.kept()


@pytest.mark.parametrize("fetched", [True, False])
async def test_a_prefill_worker_that_drains_waits_for_its_disagg_readers(scene: Scene, fetched: bool) -> None:
    engine = KvEngine()
    worker = scene.worker(engine=engine)
    stages = Stages(scene, engine, worker)
    async with scene.running(worker) as task:
        await stages.computed("r")
        worker.drain(60.0 if fetched else 0.3)
        draining = WorkerDraining(owner_epoch=0, worker_id="w1", worker_epoch=scene.epoch)
        await scene.append(FLEET, PARTITION, draining)
        if fetched:
            await stages.submit("later", "prefill")
            engine.emit(prefilled=[PromptPrefilled("later", 1, prefilled(scene.epoch))])
            await until(lambda: not worker.active_requests)
            assert not task.done()
            engine.holds.clear()
        async with asyncio.timeout(20):
            await task
    assert worker.counters.handed_back == 0
    assert engine.resets == 1
