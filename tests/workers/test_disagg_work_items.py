"""Prefill and decode stages at a worker with any engine: events, released KV and repeated items."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from prometheus_client.registry import Collector

from forebay.core.block_hashes import sequence_hashes
from forebay.engine_model.model import Emitted, EngineLoad, Finished, FirstTokenStep
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.control import Command
from forebay.events.fleet import WorkerDraining, WorkerSpec
from forebay.events.media import Media
from forebay.events.progress import (
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
from forebay.events.work import ReleaseKv, WorkCancelled, WorkItem
from forebay.workers.engine import EngineBatch, EngineRefused, Failed, NotFetched, PromptPrefilled, Publish
from forebay.workers.runtime.worker import Worker
from tests.workers.conftest import GROUP, PARTITION, Scene, until, work_item

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

    def collectors(self) -> Sequence[Collector]:
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


def worker_of(scene: Scene, engine: Engine) -> Worker:
    return Worker(scene.log, scene.keeper, scene.spec(), engine, token="t1", group=GROUP, partition=PARTITION)


def item_of(name: str, stage: str, epoch: int, **changes: Any) -> WorkItem:
    kept = prefilled() if stage == "decode" else None
    return work_item(name, PROMPT, 4, **{"stage": stage, "worker_epoch": epoch, "prefilled": kept, **changes})


@pytest.fixture
def engine() -> KvEngine:
    return KvEngine()


@pytest.fixture
def worker(scene: Scene, engine: KvEngine) -> Worker:
    return worker_of(scene, engine)


async def computed(scene: Scene, engine: KvEngine, item: WorkItem, lease_us: int = 60_000_000) -> None:
    """Send a prefill and publish its result."""
    before = len(scene.progress(PrefillFinished))
    await scene.send(item)
    await until(lambda: item in engine.items)
    engine.holds.add(item.request_id)
    kept = prefilled(item.worker_epoch, lease_us)
    engine.emit(prefilled=[PromptPrefilled(item.request_id, item.attempt, kept, 4)])
    await until(lambda: len(scene.progress(PrefillFinished)) > before)


async def test_prefill_result_is_reported_to_the_owner_only(
    scene: Scene, engine: KvEngine, worker: Worker, epoch: int
) -> None:
    await computed(scene, engine, item_of("r", "prefill", epoch, owner_epoch=7))
    (generated,) = scene.progress()
    assert generated.prefilled == msgspec.structs.replace(prefilled(epoch), cached_tokens=4)
    assert (generated.request_id, generated.attempt, generated.owner_epoch, generated.worker_epoch) == (
        "r",
        1,
        7,
        epoch,
    )
    assert not scene.tokens()
    assert not worker.active_requests


async def test_disagg_result_has_the_rank(scene: Scene) -> None:
    engine = KvEngine()
    spec = scene.spec(dp_size=2)
    worker = Worker(scene.log, scene.keeper, spec, engine, token="t1", group=GROUP, partition=PARTITION)
    async with scene.serving(worker) as epoch:
        await computed(scene, engine, item_of("r", "prefill", epoch, rank=1))
    (generated,) = scene.progress()
    assert generated.prefilled.rank == 1


@pytest.mark.parametrize(("status", "reported"), [(400, 400), (503, 503), (0, 500), (302, 500), (700, 500)])
async def test_prefill_failure_is_reported_to_the_owner_only(
    scene: Scene, engine: KvEngine, epoch: int, status: int, reported: int
) -> None:
    await scene.send(item_of("r", "prefill", epoch))
    await until(lambda: engine.items)
    engine.emit(failed=[Failed("r", 1, ResponseError(status=status, code="c" * 300, message="m" * 900))])
    await until(scene.progress)
    (generated,) = scene.progress(PrefillFailed)
    assert (generated.status, generated.code, generated.error) == (reported, "c" * 256, "m" * 500)
    assert not scene.tokens()
    assert not scene.progress(RequestFailed)


async def test_disagg_stage_with_an_unknown_rank_fails(scene: Scene, engine: KvEngine, epoch: int) -> None:
    await scene.send(item_of("p", "prefill", epoch, rank=3))
    await scene.send(item_of("d", "decode", epoch, rank=3))
    await until(lambda: scene.progress(PrefillFailed) and scene.tokens(ResponseEnded))
    (generated,) = scene.progress(PrefillFailed)
    assert (generated.request_id, generated.status, generated.code) == ("p", 500, "no_such_rank")
    assert [end.request_id for end in scene.tokens(ResponseEnded)] == ["d"]
    assert engine.dropped == [b"here"], "the holder is notified"
    assert not engine.items


async def test_disagg_stages_are_refused_by_engines_without_kv_transfer(scene: Scene) -> None:
    engine = Engine()
    async with scene.serving(worker_of(scene, engine)) as epoch:
        await scene.send(item_of("p", "prefill", epoch))
        await scene.send(item_of("d", "decode", epoch))
        await scene.send(WorkCancelled(request_id="x", attempt=1, owner_epoch=0, worker_epoch=epoch))
        await scene.send(item_of("a", "aggregated", epoch))
        await until(lambda: engine.items)
    (generated,) = scene.progress(PrefillFailed)
    assert (generated.request_id, generated.status, generated.code) == ("p", 501, "stage_not_supported")
    (end,) = scene.tokens(ResponseEnded)
    assert (end.request_id, end.error.status) == ("d", 501)
    assert "the engine Engine " in end.error.message
    assert [item.request_id for item in engine.items] == ["a"]


async def test_disagg_transfer_is_reported_with_the_first_token(scene: Scene, engine: KvEngine, epoch: int) -> None:
    kept = msgspec.structs.replace(prefilled(), rank=3)
    item = item_of("r", "decode", epoch, prefilled=kept)
    await scene.send(item)
    await until(lambda: engine.items == [item])
    engine.emit(
        emitted=[Emitted("r", 1, 0, pack_u32([9, 9, 9, 9]))],
        first_tokens=[FirstTokenStep("r", 1, 5, transferred_bytes=32, transfer_us=11)],
        finished=[Finished("r", 1, "length", 6, 4, 5)],
    )
    await until(lambda: scene.progress(RequestFinished))
    (first,) = scene.progress(FirstTokenEmitted)
    assert (first.cached_tokens, first.transferred_bytes, first.transfer_us) == (5, 32, 11)
    assert not first.unfetched
    (emitted,) = scene.tokens(TokensEmitted)
    whose = PrefilledBy(worker_id="w1", rank=3, transferred_bytes=32, transfer_us=11)
    assert [chunk.prefilled for chunk in emitted.chunks] == [whose]
    assert scene.tokens(ResponseEnded)


async def test_disagg_prefill_worker_is_named_with_the_first_token_only(
    scene: Scene, engine: KvEngine, epoch: int
) -> None:
    for name in "rs":
        await scene.send(item_of(name, "decode", epoch))
    await until(lambda: len(engine.items) == 2)
    engine.emit(
        emitted=[Emitted(name, 1, 0, pack_u32([9])) for name in "sr"],
        first_tokens=[FirstTokenStep(name, 1, 5, transferred_bytes=size) for name, size in (("r", 8), ("s", 16))],
    )
    engine.emit(emitted=[Emitted(name, 1, 1, pack_u32([9])) for name in "sr"])
    await until(lambda: sum(len(event.chunks) for event in scene.tokens(TokensEmitted)) == 4)
    chunks = [chunk for event in scene.tokens(TokensEmitted) for chunk in event.chunks]
    reported = [(one.request_id, one.first_index, one.prefilled and one.prefilled.transferred_bytes) for one in chunks]
    assert reported == [("s", 0, 16), ("r", 0, 8), ("s", 1, None), ("r", 1, None)]


async def test_disagg_kv_that_cannot_be_fetched_goes_back_to_the_owner(
    scene: Scene, engine: KvEngine, worker: Worker, epoch: int
) -> None:
    await scene.send(item_of("r", "decode", epoch))
    await until(lambda: engine.items)
    engine.emit(not_fetched=[NotFetched("r", 2, "another attempt"), NotFetched("r", 1, "w9 is gone" * 100)])
    await until(scene.progress)
    assert not worker.active_requests
    (generated,) = scene.progress()
    assert type(generated) is TransferFailed
    assert generated.error == ("w9 is gone" * 100)[:500]
    assert not scene.tokens()


async def test_disagg_failure_before_the_first_token_drops_the_kv(scene: Scene, engine: KvEngine, epoch: int) -> None:
    refused = ResponseError(status=404, code="adapter_not_loaded", message="it is not loaded")
    for name in ("refused", "begun", "stale"):
        await scene.send(item_of(name, "decode", epoch, attempt=1))
    await scene.send(item_of("whole", "aggregated", epoch))
    await until(lambda: len(engine.items) == 4)
    engine.emit(failed=[Failed("stale", 2, refused), Failed("whole", 1, refused), Failed("nobody", 1, refused)])
    engine.emit(first_tokens=[FirstTokenStep("begun", 1, 5)])
    engine.emit(failed=[Failed("begun", 1, refused)])
    await until(lambda: len(scene.progress(RequestFailed)) == 2)
    assert not engine.dropped, "it was fetched, or is somebody else's"
    engine.emit(failed=[Failed("refused", 1, refused)])
    await until(lambda: len(scene.progress(RequestFailed)) == 3)
    assert engine.dropped == [b"here"]


async def append_earlier_output(scene: Scene, tokens: list[int], ended: bool = False) -> None:
    """Append output of an earlier attempt on another worker."""
    event: Any
    if tokens:
        chunk = TokenChunk(request_id="r", attempt=1, first_index=0, token_ids=pack_u32(tokens))
        event = TokensEmitted(worker_id="w0", worker_epoch=0, owner_epoch=0, chunks=(chunk,))
        await scene.append(TOKENS, 3, event)
    if ended:
        error = ResponseError(status=500, code="x", message="it broke")
        event = ResponseEnded(request_id="r", attempt=1, owner_epoch=0, finish_reason="error", error=error)
        await scene.append(TOKENS, 3, event)


async def test_disagg_later_attempt_without_output_fetches(scene: Scene, engine: KvEngine, epoch: int) -> None:
    item = item_of("r", "decode", epoch, attempt=2)
    await scene.send(item)
    await until(lambda: engine.items == [item])
    assert scene.tokens(AttemptStarted)
    assert not engine.dropped


async def test_disagg_later_attempt_with_output_continues_locally(scene: Scene, engine: KvEngine, epoch: int) -> None:
    await append_earlier_output(scene, [70, 71])
    await scene.send(item_of("r", "decode", epoch, attempt=2))
    await until(lambda: engine.items)
    engine.emit(first_tokens=[FirstTokenStep("r", 2, 0)], emitted=[Emitted("r", 2, 0, pack_u32([72]))])
    engine.emit(failed=[Failed("r", 2, ResponseError(status=503, code="full", message="no room"))])
    await until(lambda: scene.tokens(ResponseEnded))
    chunks = [chunk for event in scene.tokens(TokensEmitted) for chunk in event.chunks]
    assert [chunk.prefilled for chunk in chunks if chunk.attempt == 2] == [None], "nobody else computed it"
    (first,) = scene.progress(FirstTokenEmitted)
    assert first.unfetched, "the owner releases it if the holder cannot be notified"
    (item,) = engine.items
    assert (item.stage, item.prefilled) == ("aggregated", None)
    assert unpack_u32(item.token_ids) == [*PROMPT, 70, 71]
    assert item.sequence_hashes == sequence_hashes(pack_u32([*PROMPT, 70, 71]), 4)
    assert item.sampling.max_tokens == 2
    assert engine.dropped == [b"here"]


@pytest.mark.parametrize(("generated", "ended"), [([], True), ([70], True), ([70, 71, 72, 73], False)])
async def test_disagg_complete_response_needs_no_kv(
    scene: Scene, engine: KvEngine, worker: Worker, epoch: int, generated: list[int], ended: bool
) -> None:
    await append_earlier_output(scene, generated, ended)
    await scene.send(item_of("r", "decode", epoch, attempt=2))
    await until(scene.progress)
    assert not worker.active_requests
    assert engine.dropped == [b"here"]
    assert not engine.items


async def test_disagg_later_prefill_releases_the_kv_of_the_previous_attempt(
    scene: Scene,
    engine: KvEngine,
    worker: Worker,
    epoch: int,
) -> None:
    await computed(scene, engine, item_of("r", "prefill", epoch))
    engine.released.clear()
    await scene.send(item_of("r", "prefill", epoch, attempt=2))
    await until(lambda: len(engine.items) == 2)
    assert engine.released == ["r"]
    assert worker.counters.reading.passes == 0
    assert not scene.tokens()


async def test_disagg_cancellation_frees_kept_kv(scene: Scene, engine: KvEngine, worker: Worker, epoch: int) -> None:
    await computed(scene, engine, item_of("r", "prefill", epoch))
    engine.released.clear()
    cancelled = WorkCancelled(request_id="r", attempt=1, owner_epoch=0, worker_epoch=epoch)
    await scene.send(cancelled)
    await until(lambda: engine.released == ["r"])
    # The result is not sent again either.
    await scene.send(item_of("r", "prefill", epoch, owner_epoch=9))
    await until(lambda: worker.counters.repeated == 1)
    # One that is under way is cancelled; what comes of it all the same is given back.
    await scene.send(item_of("s", "prefill", epoch))
    await until(lambda: len(engine.items) == 2)
    await scene.send(msgspec.structs.replace(cancelled, request_id="s"))
    await until(lambda: engine.cancelled == ["s"])
    engine.released.clear()
    engine.emit(prefilled=[PromptPrefilled("s", 1, prefilled(epoch))])
    await until(lambda: engine.released == ["s"])
    assert len(scene.progress(PrefillFinished)) == 1


async def test_disagg_release_frees_only_its_attempt(
    scene: Scene, engine: KvEngine, worker: Worker, epoch: int
) -> None:
    """A release may come late, from an owner that does not know whether its predecessor sent it."""
    first = ReleaseKv(request_id="r", attempt=1, owner_epoch=0, worker_epoch=epoch)
    await computed(scene, engine, item_of("r", "prefill", epoch))
    engine.released.clear()
    await scene.send(first)
    await until(lambda: engine.released == ["r"])
    await scene.send(item_of("r", "prefill", epoch, owner_epoch=9))
    await until(lambda: worker.counters.repeated == 1)
    assert len(scene.progress(PrefillFinished)) == 1, "a released result is not sent again"
    # The next attempt: while it is computed, and while its KV is kept.
    await scene.send(item_of("r", "prefill", epoch, attempt=2))
    await until(lambda: len(engine.items) == 2)
    engine.released.clear()
    await scene.send(first)
    engine.holds.add("r")
    engine.emit(prefilled=[PromptPrefilled("r", 2, prefilled(epoch), 4)])
    await until(lambda: len(scene.progress(PrefillFinished)) == 2)
    await scene.send(first)
    await scene.send(msgspec.structs.replace(first, request_id="unknown"))
    await until(lambda: engine.released == ["unknown"])
    assert not engine.cancelled
    await scene.send(msgspec.structs.replace(first, attempt=2))
    await until(lambda: not engine.kept())


async def test_disagg_repeated_prefill_has_the_same_descriptor(
    scene: Scene,
    engine: KvEngine,
    worker: Worker,
    epoch: int,
) -> None:
    await computed(scene, engine, item_of("r", "prefill", epoch))
    await scene.send(item_of("r", "prefill", epoch, owner_epoch=9))
    await until(lambda: len(scene.progress(PrefillFinished)) == 2)
    await computed(scene, engine, item_of("short", "prefill", epoch), lease_us=1)
    await scene.send(item_of("short", "prefill", epoch, owner_epoch=9))
    await until(lambda: worker.counters.repeated == 2)
    first, again, _ = scene.progress(PrefillFinished)
    assert again.owner_epoch == 9
    left_us = again.prefilled.lease_us
    assert 0 < left_us < first.prefilled.lease_us, "its lease goes on, and does not begin again"
    assert msgspec.structs.replace(again.prefilled, lease_us=first.prefilled.lease_us) == first.prefilled
    assert [item.request_id for item in engine.items] == ["r", "short"], "nothing is computed twice"


async def test_disagg_rejected_decode_drops_the_kv(scene: Scene, engine: KvEngine, epoch: int) -> None:
    media = (Media(kind="image", digest="ab" * 32, mime="image/png", first_token=1, tokens=2, content=b"x"),)
    await scene.send(item_of("r", "decode", epoch, media=media))
    await until(lambda: scene.progress(RequestFailed))
    (ended,) = scene.tokens(ResponseEnded)
    assert ended.error.code == "media_not_supported"
    assert engine.dropped == [b"here"]


async def test_disagg_repeated_earlier_attempt_is_ignored(
    scene: Scene, engine: KvEngine, worker: Worker, epoch: int
) -> None:
    for attempt in (1, 2):
        await computed(scene, engine, item_of("r", "prefill", epoch, attempt=attempt))
    await scene.send(item_of("r", "prefill", epoch, attempt=1, owner_epoch=9))
    await until(lambda: worker.counters.repeated == 1)
    assert [generated.attempt for generated in scene.progress(PrefillFinished)] == [1, 2]


async def test_disagg_lost_epoch_frees_kept_kv(scene: Scene, engine: KvEngine, worker: Worker, epoch: int) -> None:
    await computed(scene, engine, item_of("r", "prefill", epoch))
    await scene.lose(epoch)
    await until(lambda: worker.worker_epoch is None)
    assert engine.resets == 1
    assert not engine.kept()


@pytest.mark.parametrize("fetched", [True, False])
async def test_a_prefill_worker_that_drains_waits_for_its_disagg_readers(scene: Scene, fetched: bool) -> None:
    engine = KvEngine()
    worker = worker_of(scene, engine)
    task = asyncio.create_task(worker.run())
    epoch = await scene.admit(worker, "t1")
    await computed(scene, engine, item_of("r", "prefill", epoch))
    worker.drain(60.0 if fetched else 0.3)
    draining = WorkerDraining(owner_epoch=0, worker_id="w1", worker_epoch=epoch)
    await scene.append(FLEET, PARTITION, draining)
    if fetched:
        await scene.send(item_of("later", "prefill", epoch))
        await until(lambda: len(engine.items) == 2)
        engine.emit(prefilled=[PromptPrefilled("later", 1, prefilled(epoch))])
        await until(lambda: not worker.active_requests)
        assert not task.done()
        engine.holds.clear()
    async with asyncio.timeout(20):
        await task
    assert worker.counters.handed_back == 0
    assert engine.resets == 1
