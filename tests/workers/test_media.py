"""Images at workers: encoding, fetching of embeddings, and their failures."""

import re
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from forebay.core.block_hashes import mm_hashes, sequence_hashes
from forebay.events.base import pack_u32, unpack_u64
from forebay.events.control import Command
from forebay.events.kv import BlocksStored
from forebay.events.media import Encoded, Media
from forebay.events.progress import EncodeFailed, EncodeFinished, RequestFailed, RequestFinished, TransferFailed
from forebay.events.tokens import ResponseEnded
from forebay.ingress.model import DEFAULT_MODEL
from forebay.processes.engines import EngineChoice, built
from forebay.workers.engine import EngineBatch, EngineError, EngineRefused
from forebay.workers.engines.embedding_cache import EncodedMedia
from forebay.workers.engines.encode import WIDTH, EncodeEngine, MediaUnusable, StandInEncoder, load_encoder
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.kv_transfer.nixl_agent import TransferError
from forebay.workers.runtime import media_feed
from forebay.workers.runtime.resume import continued
from forebay.workers.runtime.worker import Worker
from tests.workers.conftest import Scene, engine_config, until, work_item
from tests.workers.encode_engines import encode_item, encoded_by, memory, running
from tests.workers.engine_setup import SPEC
from tests.workers.pictures import Memory, hashes_with, png
from tests.workers.work_items import finish, tokens_of

__all__ = ["memory"]  # a fixture


def media(content: bytes, first_token: int = 1, tokens: int = 4, **changes: Any) -> Media:
    digest = sha256(content).hexdigest()
    fields = {"kind": "image", "mime": "image/png", "digest": digest, **changes}
    return Media(first_token=first_token, tokens=tokens, content=content, **fields)


class Encoder(StandInEncoder):
    """Encoder that waits at a gate, and fails if `fails` is set."""

    def __init__(self) -> None:
        self.fails: Exception | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.rows = 0
        self.begun = 0  # calls
        self.passed = 0  # calls that have passed the gate

    def encode_all(self, media: Sequence[Media]) -> Any:
        self.begun += 1
        self.gate.wait()
        self.passed += 1
        if self.fails is not None:
            raise self.fails
        return super().encode_all(media)[self.rows :]


def encode_worker(scene: Scene, encoder: StandInEncoder) -> Worker:
    return scene.worker(engine=EncodeEngine(encoder), role="encode")


def answer_item(name: str, *some: Media, epoch: int, max_tokens: int = 6, **changes: Any) -> Any:
    prompt, hashes = list(range(10)), hashes_with(list(range(10)), *some)
    return work_item(name, prompt, max_tokens, media=some, sequence_hashes=hashes, worker_epoch=epoch, **changes)


async def offer(scene: Scene, memory: Memory, name: str, one: Media, array: Any = None, **changes: Any) -> None:
    """Send a request whose image another worker has encoded."""
    encoded = memory.offers("e@1").offer_now(StandInEncoder().encode_all([one]) if array is None else array)
    await scene.send(answer_item(name, withheld(one), epoch=scene.epoch, encoded=encoded, **changes))


def withheld(one: Media) -> Media:
    return msgspec.structs.replace(one, content=b"")


# Encoding


async def test_encode_result_is_reported_to_the_owner_only(scene: Scene, memory: Memory) -> None:
    worker = encode_worker(scene, StandInEncoder())
    async with scene.serving(worker) as epoch:
        assert (worker.spec.role, worker.spec.tasks, worker.spec.kv_events) == ("encode", (), False)
        await scene.send(encode_item("r", media(png()), media(png((1, 2, 3)), 5, 2), epoch=epoch, attempt=3))
        await until(lambda: scene.progress(EncodeFinished))
        (reported,) = scene.progress(EncodeFinished)
        assert (reported.request_id, reported.attempt, reported.worker_epoch) == ("r", 3, epoch)
        assert reported.encoded.shape == (6, WIDTH)
        assert reported.encoded.descriptor.startswith(b"w1@")
        await until(lambda: not worker.active_requests)
        await scene.lose(epoch)
        await until(lambda: memory.closed)
    assert [name.partition("@")[0] for name in memory.closed] == ["w1"], "the next epoch offers under a new name"
    assert scene.tokens() == [], "no attempt to answer begins"
    assert worker.counters.reading.passes == 0
    assert not scene.kv()


@pytest.mark.parametrize("error", [EngineError("out of memory"), TransferError("no room"), ValueError("?"), None])
async def test_encoder_failure_is_reported_to_the_owner_only(
    scene: Scene, memory: Memory, error: Exception | None
) -> None:
    encoder = Encoder()
    encoder.fails, encoder.rows = error, error is None
    async with scene.serving(encode_worker(scene, encoder)) as epoch:
        await scene.send(encode_item("r", media(png()), epoch=epoch))
        await until(lambda: scene.progress(EncodeFailed))
        (failed,) = scene.progress(EncodeFailed)
        assert str(error or f"the encoder returned an array of shape 3 x {WIDTH} for 4 placeholders") in failed.error
        encoder.fails, encoder.rows = None, 0
        await scene.send(encode_item("s", media(png()), epoch=epoch))
        await until(lambda: scene.progress(EncodeFinished))
    assert scene.tokens() == [], "the client hears nothing of it"


async def test_invalid_media_are_reported_to_the_client(scene: Scene, memory: Memory) -> None:
    async with scene.serving(encode_worker(scene, StandInEncoder())) as epoch:
        await scene.send(encode_item("r", media(b"no image"), epoch=epoch))
        await until(lambda: scene.progress(RequestFailed))
    (ended,) = scene.tokens(ResponseEnded)
    assert (ended.error.status, ended.error.code) == (400, "media_not_encoded")
    assert ended.error.message.startswith("cannot decode an image")


async def test_encode_worker_refuses_other_requests(scene: Scene, memory: Memory) -> None:
    worker = encode_worker(scene, StandInEncoder())
    async with scene.serving(worker):
        await scene.ask("r", [1, 2], 3)
        await until(lambda: scene.progress(RequestFailed))
        assert scene.tokens(ResponseEnded)[0].error.message == "this worker only encodes images and videos"
        with pytest.raises(EngineRefused, match="does not support sleep"):
            await worker.engine.command(Command(action="sleep"))
        await worker.engine.check()
        assert not worker.engine.held(0)


@asynccontextmanager
async def engine(encoder: Any, **sizes: Any) -> AsyncIterator[tuple[EncodeEngine, list[EngineBatch]]]:
    async with running(EncodeEngine(encoder, **sizes)) as batches:
        yield batches


async def test_cancelled_and_reset_work_is_not_published(memory: Memory) -> None:
    encoder = Encoder()
    async with engine(encoder) as (one, batches):
        for number, name in enumerate(("a", "b", "c")):
            one.submit(encode_item(name, media(png((number, 0, 0))), epoch=1))
        one.cancel("b")
        one.cancel("nobody")
        await until(lambda: len([1 for batch in batches if batch.encoded]) == 2)
        assert [done.request_id for batch in batches for done in batch.encoded] == ["a", "c"]
        encoder.gate.clear()
        one.submit(encode_item("d", media(png((3, 0, 0))), epoch=1))
        await until(lambda: encoder.begun == 3)
        one.cancel("d")
        encoder.gate.set()
        await until(lambda: encoder.passed == 3)  # a, c and d: the gate must not close before d has passed
        encoder.gate.clear()
        one.submit(encode_item("e", media(png((4, 0, 0))), epoch=1))
        await until(lambda: encoder.begun == 4)
        one.reset()
        encoder.gate.set()
        one.submit(encode_item("f", media(png((5, 0, 0))), epoch=2))
        await until(lambda: any(done.request_id == "f" for batch in batches for done in batch.encoded))
        assert [done.request_id for batch in batches for done in batch.encoded] == ["a", "c", "f"]
        assert [name.partition("@")[0] for name in memory.closed] == ["w1"]


# The cache of embeddings


RED, GREEN, BLUE = (media(png(color)) for color in ((255, 0, 0), (0, 255, 0), (0, 0, 255)))
BYTES_EACH = 4 * WIDTH * 4


class CountingEncoder(Encoder):
    """Encoder that keeps the images of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[list[str]] = []

    def encode_all(self, media: Sequence[Media]) -> Any:
        self.calls.append([one.digest for one in media])
        return super().encode_all(media)


def metrics_of(one: EncodeEngine) -> dict[str, float]:
    samples = [sample for metric in one.collectors()[0].collect() for sample in metric.samples]
    assert {sample.labels["worker_id"] for sample in samples} == {"w1"}
    return {sample.name.removeprefix("forebay_embedding_cache_"): sample.value for sample in samples}


async def test_cached_embeddings_equal_the_encoded_ones(memory: Memory) -> None:
    encoder = CountingEncoder()
    async with engine(encoder) as (one, batches):
        first = await encoded_by(one, batches, "a", RED)
        mixed = await encoded_by(one, batches, "b", GREEN, RED, GREEN, BLUE)
        one.reset()  # the worker lost its epoch, but not its images
        again = await encoded_by(one, batches, "c", GREEN)
        assert [done.cached for done in (first, mixed, again)] == [0, 1, 1]
        assert encoder.calls == [[RED.digest], [GREEN.digest, BLUE.digest]], "each image is encoded once"
        rows = memory.arrays[mixed.encoded.descriptor]
        assert np.array_equal(rows, StandInEncoder().encode_all([GREEN, RED, GREEN, BLUE]))
        assert np.array_equal(memory.arrays[again.encoded.descriptor], rows[:4])
        assert metrics_of(one) == {"hits_total": 2, "misses_total": 4, "bytes": 3 * BYTES_EACH}


async def test_metadata_of_images_stay_with_their_embeddings(memory: Memory) -> None:
    class Describing(StandInEncoder):
        def encode_all(self, media: Sequence[Media]) -> Any:
            return [EncodedMedia(self.encode(one), b'{"of":"%s"}' % one.digest[:4].encode()) for one in media]

    async with engine(Describing()) as (one, batches):
        done = [await encoded_by(one, batches, name, *some) for name, some in (("a", [RED]), ("b", [GREEN, RED]))]
        rows = memory.arrays[done[1].encoded.descriptor]
        size = metrics_of(one)["bytes"]
    assert (done[1].cached, size) == (1, 2 * (BYTES_EACH + len('{"of":"1234"}')))
    assert np.array_equal(rows, StandInEncoder().encode_all([GREEN, RED]))
    assert [msgspec.json.decode(each.encoded.metadata) for each in done] == [
        [{"of": one.digest[:4]} for one in some] for some in ([RED], [GREEN, RED])
    ]


async def test_least_recently_used_embeddings_are_evicted(memory: Memory) -> None:
    async with engine(StandInEncoder(), cache_bytes=2 * BYTES_EACH) as (one, batches):
        order = (RED, GREEN, RED, BLUE, RED, GREEN)
        cached = [(await encoded_by(one, batches, str(at), some)).cached for at, some in enumerate(order)]
        assert cached == [0, 0, 1, 0, 1, 0], "BLUE replaces GREEN, not RED"
        large = media(png(), tokens=9)
        assert [(await encoded_by(one, batches, name, large)).cached for name in "xy"] == [0, 0]
        assert (await encoded_by(one, batches, "z", RED)).cached == 1, "what does not fit evicts nothing"
        assert metrics_of(one)["bytes"] == 2 * BYTES_EACH


async def test_size_of_the_cache_is_that_of_the_settings(memory: Memory) -> None:
    settings = EngineSettings(model=DEFAULT_MODEL, model_name="m", role="encode", embedding_cache_bytes=0)
    async with running(built(EngineChoice(engine="mock", settings=settings), "w1", pool="")[0]) as (one, batches):
        assert [(await encoded_by(one, batches, name, RED)).cached for name in "ab"] == [0, 0]


async def test_embeddings_are_shared_only_within_a_cache_namespace(memory: Memory) -> None:
    async with engine(StandInEncoder()) as (one, batches):
        names = ("", "acme", "acme", "")
        done = [await encoded_by(one, batches, str(at), RED, cache_namespace=name) for at, name in enumerate(names)]
        assert [each.cached for each in done] == [0, 0, 1, 1]


async def test_cache_survives_an_encoder_that_reuses_its_array(memory: Memory) -> None:
    class Reusing(StandInEncoder):
        array = np.zeros((4, WIDTH), dtype=np.float32)

        def encode_all(self, media: Sequence[Media]) -> Any:
            self.array[:] = super().encode_all(media)
            return self.array

    async with engine(Reusing()) as (one, batches):
        for name, some in (("a", RED), ("b", GREEN)):
            await encoded_by(one, batches, name, some)
        red = await encoded_by(one, batches, "c", RED)
        assert np.array_equal(memory.arrays[red.encoded.descriptor], StandInEncoder().encode_all([RED]))


async def test_failed_encoding_is_not_cached(scene: Scene, memory: Memory) -> None:
    encoder = Encoder()
    encoder.fails = MemoryError("full")
    async with scene.serving(encode_worker(scene, encoder)) as epoch:
        await scene.send(encode_item("r", RED, epoch=epoch))
        await until(lambda: scene.progress(EncodeFailed))
        encoder.fails = None
        for name in "st":
            await scene.send(encode_item(name, RED, epoch=epoch))
        await until(lambda: len(scene.progress(EncodeFinished)) == 2)
    assert [event.cached for event in scene.progress(EncodeFinished)] == [0, 1]


# Answering


async def test_output_depends_on_every_fetched_byte(scene: Scene, memory: Memory) -> None:
    """It also equals the output of an engine that encodes the image itself."""
    one, worker = media(png()), scene.worker()
    async with scene.serving(worker) as epoch:
        wrong = StandInEncoder().encode_all([one])
        wrong[3, 7] += 1.0
        await offer(scene, memory, "right", one)
        await offer(scene, memory, "wrong", one, wrong)
        await scene.send(answer_item("itself", one, epoch=epoch))
        await scene.ended("right", "wrong", "itself")
    assert scene.output("right") == scene.output("itself") != scene.output("wrong")
    assert worker.media.fetched == 2
    assert not memory.arrays


async def test_failed_fetches_are_reported_to_the_owner(scene: Scene, memory: Memory) -> None:
    one, worker = media(png()), scene.worker()
    async with scene.serving(worker) as epoch:
        encoded = Encoded(descriptor=b"elsewhere", shape=(4, WIDTH), dtype="float32", checksum="0" * 16)
        await scene.send(answer_item("r", withheld(one), epoch=epoch, encoded=encoded))
        await until(lambda: scene.progress(TransferFailed))
        await offer(scene, memory, "s", one, np.zeros((3, WIDTH), dtype=np.float32))
        await until(lambda: len(scene.progress(TransferFailed)) == 2)
        assert [failed.error for failed in scene.progress(TransferFailed)] == [
            "nobody is there",
            "fetched 3 rows of embeddings, expected 4, one per placeholder",
        ]
        await offer(scene, memory, "r", one, attempt=2)
        await scene.ended("r")
    assert worker.media.not_fetched == 2
    assert len(scene.output("r")) == 6
    assert len(scene.tokens(ResponseEnded)) == 1


@pytest.mark.usefixtures("memory", "epoch")
async def test_engine_exception_on_embeddings_ends_the_request(
    scene: Scene, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("no such shape")

    monkeypatch.setattr(MockEngine, "submit_embedded", broken)
    await offer(scene, memory, "r", media(png()))
    await until(lambda: scene.progress(TransferFailed))
    assert [failed.error for failed in scene.progress(TransferFailed)] == ["no such shape"]


async def test_cancellation_and_lost_epoch_during_a_fetch(scene: Scene, memory: Memory) -> None:
    memory.gate.clear()
    worker = scene.worker()
    async with scene.serving(worker) as epoch:
        for name in ("r", "s"):
            await offer(scene, memory, name, media(png()))
        await until(lambda: memory.reading == 2)
        await scene.cancel("r")
        await until(lambda: "r" not in worker.active_requests)
        memory.gate.set()
        await scene.ended("s")
        memory.gate.clear()
        await offer(scene, memory, "t", media(png()))
        await until(lambda: memory.reading == 3)
        await scene.lose(epoch)
        await until(lambda: memory.closed and memory.cancelled == 2)
    assert [name.partition("@")[0] for name in memory.closed] == ["w1/reader"]
    assert {one.request_id for one in scene.progress()} == {"s"}


class Blind:
    """An engine for text alone."""

    def submit(self, item: Any) -> None:
        raise AssertionError("it must not get that")


async def test_text_engine_refuses_images() -> None:
    failed: list[Any] = []
    feed = media_feed.MediaFeed(Blind(), "w", lambda item, error: failed.append(error))  # type: ignore[arg-type]
    feed.submit(answer_item("r", media(png()), epoch=1))
    assert (failed[0].error.status, str(failed[0])) == (501, "the engine Blind does not support images or videos")


@pytest.mark.parametrize("places", [[(7, 4)], [(1, 4), (4, 2)], [(5, 2), (1, 2)]])
async def test_placeholders_outside_the_prompt_are_refused(
    scene: Scene, memory: Memory, places: list[tuple[int, int]]
) -> None:
    some = [media(png(), first, tokens) for first, tokens in places]
    async with scene.serving(scene.worker()) as epoch:
        await scene.send(work_item("r", list(range(10)), 2, media=tuple(some), worker_epoch=epoch))
        await until(lambda: scene.tokens(ResponseEnded))
    (ended,) = scene.tokens(ResponseEnded)
    assert ended.error.status == 400
    assert "lie outside the prompt or overlap" in ended.error.message


async def test_images_may_share_a_token_of_newlines(scene: Scene) -> None:
    some = (media(png(), 1, 4), media(png(), 4, 3, replaced=(9,)))
    async with scene.serving(scene.worker()) as epoch:
        hashes = hashes_with(list(range(10)), *some)
        await scene.send(
            work_item("r", list(range(10)), 2, media=some, sequence_hashes=hashes, worker_epoch=epoch),
        )
        await until(lambda: scene.tokens(ResponseEnded))
    (ended,) = scene.tokens(ResponseEnded)
    assert ended.error is None


async def test_mock_engine_reports_undecodable_images(scene: Scene) -> None:
    async with scene.serving(scene.worker()) as epoch:
        await scene.send(answer_item("r", media(b"no image"), epoch=epoch))
        await until(lambda: scene.tokens(ResponseEnded))
    assert scene.tokens(ResponseEnded)[0].error.code == "media_not_encoded"


# Block identity


async def test_hashes_of_generated_blocks_depend_on_media(scene: Scene) -> None:
    """The output completes the last block of the prompt, whose hash must still contain the image."""
    one = media(png(), first_token=7, tokens=2)
    async with scene.serving(scene.worker()) as epoch:
        await scene.send(answer_item("r", one, epoch=epoch, max_tokens=7))
        await until(lambda: scene.progress(RequestFinished))
    generated = scene.output("r")
    packed = pack_u32([*range(10), *generated[:6]])
    expected = unpack_u64(sequence_hashes(packed, 4, mm_hashes=mm_hashes([one], 4)))
    stored = [
        block for event in scene.kv() if isinstance(event, BlocksStored) for block in unpack_u64(event.sequence_hashes)
    ]
    assert stored == expected
    assert len(expected) == 4


def test_later_attempt_has_the_same_block_hashes() -> None:
    one = media(b"pixels", first_token=7, tokens=2)
    item = answer_item("r", one, epoch=1)
    later = continued(item, [50, 51, 52], 4)
    assert later.sequence_hashes[:16] == item.sequence_hashes
    packed = pack_u32([*range(10), 50, 51, 52])
    assert later.sequence_hashes == sequence_hashes(packed, 4, mm_hashes=mm_hashes([one], 4))


async def test_mock_engine_continues_the_response_to_an_image() -> None:
    engine = MockEngine(engine_config(), speedup=1e4)
    item = answer_item("r", media(png(), first_token=7, tokens=2), epoch=1)
    whole = tokens_of(await finish(engine, item))
    assert len(whole) == 6
    for begin in range(1, 6):
        assert tokens_of(await finish(engine, continued(item, whole[:begin], 4))) == whole[begin:]


# The stand-in


def test_standin_depends_on_pixels_and_placeholders() -> None:
    encoder = StandInEncoder()
    made = encoder.encode(media(png()))
    assert (made.shape, made.dtype.name) == ((4, WIDTH), "float32")
    assert np.array_equal(made, encoder.encode(media(png())))
    assert not np.array_equal(made, encoder.encode(media(png((200, 30, 91)))))
    assert float(made[0].sum()) == float(np.rint(made[0]).sum())
    video = media(b"frames", kind="video")
    assert encoder.encode(video).shape == (4, WIDTH)
    assert encoder.encode_all([media(png()), video]).shape == (8, WIDTH)


async def test_encoder_of_the_documentation_works(tmp_path: Path, memory: Memory) -> None:
    page = Path(__file__).parents[2] / "docs/multimodal.md"
    (code,) = re.findall(r"```python stripes.py\n(.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "stripes.py").write_text(code)
    some = [media(png(color)) for color in ((200, 30, 91), (1, 2, 3))]
    async with engine(load_encoder(f"{tmp_path}/stripes.py:Stripes")()) as (one, batches):
        one.submit(encode_item("a", *some, epoch=1))
        one.submit(encode_item("b", media(b"no image"), epoch=1))
        await until(lambda: any(batch.failed for batch in batches))
    (done,) = [done for batch in batches for done in batch.encoded]
    assert done.encoded.shape == (8, 8)
    rows = memory.arrays[done.encoded.descriptor]
    assert not np.array_equal(rows[:4], rows[4:])
    (failed,) = [failed for batch in batches for failed in batch.failed]
    assert (failed.error.status, failed.error.code) == (400, "media_not_encoded")


async def test_failure_to_load_names_the_encoder(memory: Memory) -> None:
    class Unloadable(Encoder):
        def load(self) -> None:
            raise FileNotFoundError("weights.bin")

    with pytest.raises(EngineError, match=r"Unloadable failed to load: FileNotFoundError: weights\.bin"):
        await EncodeEngine(Unloadable()).start(SPEC)


@pytest.mark.parametrize("listed", [lambda array: array.tolist(), lambda array: [array]])
async def test_result_that_is_no_array_is_named(scene: Scene, memory: Memory, listed: Callable[[Any], Any]) -> None:
    class Lists(Encoder):
        def encode_all(self, media: Sequence[Media]) -> Any:
            return listed(super().encode_all(media))

    async with scene.serving(encode_worker(scene, Lists())) as epoch:
        await scene.send(encode_item("r", media(png()), epoch=epoch))
        await until(lambda: scene.progress(EncodeFailed))
    expected = "the encoder returned a list, expected a numpy array or 1 EncodedMedia"
    assert scene.progress(EncodeFailed)[0].error == expected


def test_standin_refuses_invalid_images(monkeypatch: pytest.MonkeyPatch) -> None:
    for content in (b"", b"GIF89a", png()[:40]):
        with pytest.raises(MediaUnusable, match="cannot decode an image"):
            StandInEncoder().encode(media(content))
    monkeypatch.setattr("forebay.workers.engines.encode.IMAGE_PIXELS_MAX", 100)
    with pytest.raises(MediaUnusable, match="16 x 16 pixels is too large"):
        StandInEncoder().encode(media(png()))


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL.Image", None)
    with pytest.raises(EngineError, match=r"pip install 'PATH\[media\]'"):
        StandInEncoder().load()
