"""Engine of an encode worker: encodes images and videos, and keeps the embeddings for the worker that runs the request.

Theory of operation. An encoder runs in its own thread, one request at a time, because it may need the whole device. The
engine offers the embeddings of a request to other workers through NIXL (`forebay.workers.kv_transfer.embeddings`). Each
worker epoch has its own NIXL agent. If nobody fetches the embeddings, they are freed when the lease of the offer
expires.

The embeddings of an image also stay in a cache (`forebay.workers.engines.embedding_cache`), from which later requests
with the same image get a copy.
"""

import asyncio
import io
import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from hashlib import shake_128
from inspect import iscoroutinefunction
from itertools import accumulate
from typing import Protocol, cast, runtime_checkable

import msgspec
import numpy as np
from prometheus_client.registry import Collector

from forebay.engine_model.model import EngineLoad
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.media import Media
from forebay.events.work import WorkItem
from forebay.runtime.errors import ConfigError, install_command
from forebay.workers.engine import AttemptFailed, EngineBatch, EngineError, EngineRefused, Failed, MediaEncoded, Publish
from forebay.workers.engines.embedding_cache import EmbeddingCache, EncodedMedia, cache_keys
from forebay.workers.engines.settings import EMBEDDING_CACHE_BYTES
from forebay.workers.kv_transfer.embeddings import ARENA_BYTES, LEASE_S, Array, EmbeddingTransfer
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name, load_nixl
from forebay.workers.service import run_target

logger = logging.getLogger(__name__)

WAITING_MAX = 4_096  # further requests are rejected, and tried on other workers
WIDTH = 64  # length of an embedding
SIDE = 8  # width and height of the small copy, in pixels
CHANNELS = 3
PIXELS = SIDE * SIDE * CHANNELS
WEIGHTS_SEED = 1337
WEIGHT_MAX = 8
IMAGE_PIXELS_MAX = 64 << 20  # the same limit as at the ingress, after decompression


class MediaUnusable(AttemptFailed):
    """An image or video is invalid, so no worker can encode it. The message is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(400, "media_not_encoded", message)


@runtime_checkable
class Encoder(Protocol):
    """Encoder of images and videos. Its methods run in a thread of its own, one call at a time."""

    def load(self) -> None:
        """Prepare the encoder, for example load weights. Any exception ends the worker at its start."""

    def encode_all(self, media: Sequence[Media]) -> Array | list[EncodedMedia]:
        """Return the embeddings of images and videos, in order, of shape [placeholder tokens, width].

        The embeddings may be one array, or an array with metadata for each image or video. Those of one image may
        depend only on its content and number of placeholders, because they are cached.
        Raises MediaUnusable if an image or video is invalid. After any other exception another worker is tried.
        """


def load_encoder(target: str) -> type[Encoder]:
    """Execute a Python file and return the encoder class `FILE.py:Class`.

    Raises ConfigError if the target is invalid, the file cannot be executed, or the class is not an encoder.
    """
    file, name, module = run_target(target, "encoder")
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"{file} has no class {name}")
    is_encoder = isinstance(found, type) and issubclass(found, Encoder)
    if is_encoder and not any(map(iscoroutinefunction, (found.load, found.encode_all))):
        return cast(type[Encoder], found)
    raise ConfigError(
        f"--role encode: {name} of {file} is not an encoder; expected a class with the methods load() and"
        " encode_all(media), both without async"
    )


class StandInEncoder:
    """Stand-in for a vision encoder: deterministic projections of pixels on any CPU, without a model and a meaning.

    An image or video has one float32 vector of length `WIDTH` per placeholder token. The embeddings of an image depend
    on every pixel of a small copy of it, and those of a video on the bytes of its file. They are equal on every
    machine, so tests can verify that the right bytes arrive.
    """

    def load(self) -> None:
        """Check that Pillow is installed. Raises EngineError if it is missing."""
        try:
            import PIL.Image  # noqa: F401, PLC0415 - an extra
        except ImportError as error:
            text = f"the stand-in encoder needs Pillow ({error}): {install_command('media')}"
            raise EngineError(text) from error

    def encode(self, media: Media) -> Array:
        """Return the embeddings of one image or video, of shape [placeholder tokens, WIDTH].

        Raises MediaUnusable if the image is invalid.
        """
        pixels = _pixels(media.content) if media.kind == "image" else shake_128(media.content).digest(PIXELS)
        seen = np.frombuffer(pixels, dtype=np.uint8).astype(np.int32)
        shifted = np.stack([np.roll(seen, at) for at in range(media.tokens)])
        # Integers that float32 represents exactly, so rounding is the same on every machine.
        return (shifted @ _weights()).astype(np.float32)

    def encode_all(self, media: Sequence[Media]) -> Array:
        """Return the embeddings of several images and videos, in order, of shape [placeholder tokens, WIDTH].

        Raises MediaUnusable if an image is invalid, EngineError if Pillow is not installed.
        """
        self.load()
        return np.concatenate([self.encode(one) for one in media])


@cache
def _weights() -> Array:
    draw = np.random.Generator(np.random.PCG64(WEIGHTS_SEED))
    return draw.integers(-WEIGHT_MAX, WEIGHT_MAX, (PIXELS, WIDTH), dtype=np.int32)


def _pixels(content: bytes) -> bytes:
    from PIL import Image  # noqa: PLC0415 - an extra

    try:
        with Image.open(io.BytesIO(content)) as image:
            if image.width * image.height > IMAGE_PIXELS_MAX:
                size = f"{image.width} x {image.height}"
                raise MediaUnusable(f"an image of {size} pixels is too large; the limit is {IMAGE_PIXELS_MAX:,} pixels")
            pixels: bytes = image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX).tobytes()
            return pixels
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise MediaUnusable(f"cannot decode an image: {error}") from error


class EncodeEngine:
    """Engine of an encode worker: encodes the images and videos of requests, and keeps the embeddings for readers."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        arena_bytes: int = ARENA_BYTES,
        lease_s: float = LEASE_S,
        cache_bytes: int = EMBEDDING_CACHE_BYTES,
    ) -> None:
        self._encoder = encoder
        self._cache = EmbeddingCache(cache_bytes)
        self._arena_bytes = arena_bytes
        self._lease_s = lease_s
        self._thread = ThreadPoolExecutor(1, "encode")
        self._wake = asyncio.Event()
        self._waiting: deque[WorkItem] = deque()
        self._running: WorkItem | None = None
        self._offers: EmbeddingTransfer | None = None
        self._refused: list[tuple[int, Failed]] = []
        self._worker_id = ""
        self._generation = 0  # number of resets: results of an earlier generation are not published

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Load the encoder, and return the spec of the worker. The KV sizes in the spec have no meaning.

        Raises EngineError if NIXL or the encoder cannot be loaded.
        """
        load_nixl()
        self._worker_id = self._cache.worker_id = spec.worker_id
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._encoder.load)
        except EngineError:
            raise
        except Exception as error:  # an encoder may raise anything
            name = type(self._encoder).__name__
            raise EngineError(f"{name} failed to load: {type(error).__name__}: {error}") from error
        return msgspec.structs.replace(
            spec,
            role="encode",
            tasks=(),
            kv_events=False,
            block_size=1,
            kv_blocks_total=1,
            max_num_seqs=1,
            max_num_batched_tokens=1,
        )

    async def run(self, publish: Publish) -> None:
        while True:
            self._wake.clear()
            for rank, failed in self._refused:
                publish(EngineBatch(rank=rank, load=self._load(), failed=[failed]))
            self._refused.clear()
            if not self._waiting:
                await self._wake.wait()
                continue
            item = self._running = self._waiting.popleft()
            publish(EngineBatch(rank=item.rank, load=self._load()))
            generation, batch = self._generation, await self._encode(item)
            cancelled, self._running = self._running is None, None
            if generation == self._generation and not cancelled:
                publish(msgspec.structs.replace(batch, load=self._load()))

    async def stop(self) -> None:
        self._forget()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def held(self, rank: int) -> Sequence[int]:
        return ()

    def submit(self, item: WorkItem) -> None:
        """Queue a request to be encoded. Reject it if it has no media or too many requests are queued."""
        if item.stage != "encode" or not item.media:
            self._refuse(item, 500, "encode_only", "this worker only encodes images and videos")
        elif len(self._waiting) >= WAITING_MAX:
            self._refuse(item, 503, "engine_overloaded", f"{WAITING_MAX} requests are already waiting to be encoded")
        else:
            self._waiting.append(item)
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        self._waiting = deque(item for item in self._waiting if item.request_id != request_id)
        if self._running is not None and self._running.request_id == request_id:
            self._running = None

    async def command(self, command: Command) -> tuple[str, ...]:
        """Raise EngineRefused, because an encode worker supports no commands."""
        raise EngineRefused(f"an encode worker does not support {command.action}")

    async def check(self) -> None:
        """Do nothing, because the engine is alive as long as the process of the worker."""

    def collectors(self) -> Sequence[Collector]:
        return (self._cache,)

    def reset(self) -> None:
        """Drop every request and offer. The cache stays, because embeddings depend only on the images."""
        self._generation += 1
        self._waiting.clear()
        self._refused.clear()
        self._running = None
        self._forget()

    def _load(self) -> EngineLoad:
        return EngineLoad(int(self._running is not None), len(self._waiting), 0, 1)

    def _refuse(self, item: WorkItem, status: int, code: str, message: str) -> None:
        self._refused.append((item.rank, _failed(item, AttemptFailed(status, code, message))))

    async def _encode(self, item: WorkItem) -> EngineBatch:
        """Encode a request and return the batch. The caller discards it if a reset happened meanwhile."""
        failed: list[Failed] = []
        encoded: list[MediaEncoded] = []
        try:
            encoded.append(await self._encoded(item))
        except MediaUnusable as error:
            failed.append(_failed(item, error))
        except Exception as error:  # an encoder may raise anything; another worker then tries the request
            known = isinstance(error, TransferError)
            logger.warning("cannot encode %s", item.request_id, exc_info=not known, extra=item.log_extra)
            text = str(error) if isinstance(error, TransferError) else f"{type(error).__name__}: {error}"
            failed.append(_failed(item, AttemptFailed(500, "encode_failed", text)))
        return EngineBatch(rank=item.rank, load=self._load(), failed=failed, encoded=encoded)

    async def _encoded(self, item: WorkItem) -> MediaEncoded:
        generation, loop = self._generation, asyncio.get_running_loop()
        parts, cached = await loop.run_in_executor(self._thread, self._embeddings, item)
        if generation != self._generation:
            raise TransferError("the request was dropped by a reset")
        if self._offers is None:
            name = agent_name(self._worker_id)
            self._offers = EmbeddingTransfer(name, arena_bytes=self._arena_bytes, lease_s=self._lease_s)
        encoded = await self._offers.offer(np.concatenate([part.embeddings for part in parts]))
        if any(part.metadata for part in parts):
            metadata = msgspec.json.encode([msgspec.Raw(part.metadata or b"{}") for part in parts])
            encoded = msgspec.structs.replace(encoded, metadata=metadata)
        return MediaEncoded(item.request_id, item.attempt, encoded, cached)

    def _embeddings(self, item: WorkItem) -> tuple[list[EncodedMedia], int]:
        """Return the embeddings of a request, and the number of its images and videos that were in the cache."""
        keys = cache_keys(item)
        found = self._cache.find(keys)
        cached = sum(key in found for key in keys)
        missing = {key: one for key, one in zip(keys, item.media, strict=True) if key not in found}
        if missing:
            some = list(missing.values())
            for key, part in zip(missing, _parts(self._encoder.encode_all(some), some), strict=True):
                found[key] = part
                self._cache.put(key, part)
        return [found[key] for key in keys], cached

    def _forget(self) -> None:
        if self._offers is not None:
            self._offers.close()
            self._offers = None


def _parts(encoded: Array | list[EncodedMedia], media: Sequence[Media]) -> list[EncodedMedia]:
    """Return the result of an encoder for each image and video. Raises TransferError if the result is invalid."""
    rows = [one.tokens for one in media]
    if not isinstance(encoded, list):
        _check_rows(encoded, sum(rows))
        return [EncodedMedia(part) for part in np.split(encoded, list(accumulate(rows[:-1])))]
    if len(encoded) != len(rows) or not all(isinstance(part, EncodedMedia) for part in encoded):
        raise TransferError(f"the encoder returned a list, expected a numpy array or {len(rows)} EncodedMedia")
    for part, tokens in zip(encoded, rows, strict=True):
        _check_rows(part.embeddings, tokens)
    return encoded


def _check_rows(array: Array, rows: int) -> None:
    if not isinstance(array, np.ndarray):
        raise TransferError(f"the encoder returned a {type(array).__name__}, expected a numpy array")
    if array.ndim != 2 or len(array) != rows:
        shape = " x ".join(map(str, array.shape))
        raise TransferError(f"the encoder returned an array of shape {shape} for {rows} placeholders")


def _failed(item: WorkItem, error: AttemptFailed) -> Failed:
    return Failed(item.request_id, item.attempt, error.error)
