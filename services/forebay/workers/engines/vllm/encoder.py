"""Engine of an encode worker that runs vLLM as the encoder of a model, without its language model.

Theory of operation. vLLM runs as the producer of its encoder cache (`ec_transfer_config`). It loads only the vision
encoder, and its connector `ECExampleConnector` writes the embeddings of each image to a file. This file is in a private
directory, and is removed once it was read. The embeddings then take the way of all encode workers: the cache, NIXL, and
the serving worker, which passes them to its own vLLM (`forebay.workers.engines.vllm.media`). So workers on several
machines need no common directory, and the serving vLLM needs no connector.

vLLM keeps the embeddings of an image under its name and would not write them again, so each call uses another name.
"""

import asyncio
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
from prometheus_client.registry import Collector

from forebay import runtime
from forebay.events.media import Media, MediaKind
from forebay.events.requests import Sampling
from forebay.workers.engine import EngineError
from forebay.workers.engines.embedding_cache import EncodedMedia
from forebay.workers.engines.encode import EncodeEngine
from forebay.workers.engines.model_engine import PrefixedMetrics, check_model
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm.core import VllmCore, engine_arguments
from forebay.workers.engines.vllm.engine import VllmEngine, VllmStepStats
from forebay.workers.engines.vllm.media import ItemMetadata, decoded, model_type_of
from forebay.workers.kv_tiers.identity import default_cache, weights_digest
from forebay.workers.kv_transfer.nixl_agent import TransferError

EC_TRANSFER = "ec_transfer_config"  # argument of vLLM
CONNECTOR, DIRECTORY = "ECExampleConnector", "shared_storage_path"
FILE, TENSOR = "encoder_cache.safetensors", "ec_cache"
SECONDS = "second_per_grid_ts"  # of a video for Qwen2.5-VL
SAMPLING = Sampling(max_tokens=1)  # ignored, because nothing is generated
WARM_UP_SIDE = 64  # pixels
ENCODE_S = 300.0  # for all images of a request, of which even a CPU encodes one in seconds


def encoder_arguments(settings: EngineSettings, directory: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's `AsyncEngineArgs` for an encoder that writes the embeddings to a directory."""
    arguments = engine_arguments(settings, kv_events=False, sockets=directory)
    arguments.setdefault("mm_processor_cache_gb", 0)  # `EmbeddingCache` has the images that repeat
    config = {"ec_connector": CONNECTOR, "ec_role": "ec_producer"}
    return {**arguments, EC_TRANSFER: {**config, "ec_connector_extra_config": {DIRECTORY: str(directory)}}}


class VllmEncoder:
    """Encoder (`forebay.workers.engines.encode.Encoder`) that runs vLLM. Create it on the event loop of vLLM."""

    def __init__(self, settings: EngineSettings) -> None:
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._core = VllmCore()
        self._directory = Path(tempfile.mkdtemp(prefix="forebay-encoder-"))
        self._numbers = itertools.count()
        self._llm: Any = None
        self._calls: Any = None  # module `forebay.workers.engines.vllm.calls`, which imports vLLM
        self._placeholders: dict[MediaKind, str] = {}
        self._weights = ""
        self._hangs = False

    @property
    def is_dead(self) -> bool:
        return self._llm is None or self._llm.errored or self._hangs

    def load(self) -> None:
        """Start vLLM and encode an image. Raises EngineError if that fails, or the model is not supported."""
        asyncio.run_coroutine_threadsafe(self._load(), self._loop).result()

    def encode_all(self, media: Sequence[Media]) -> list[EncodedMedia]:
        """Return the embeddings of images and videos, in order.

        Raises MediaUnusable if one is invalid, or a video of a model without them, TransferError for other failures.
        """
        model_type = model_type_of(self._llm.vllm_config.model_config)
        items = [(one.kind, decoded(one, model_type)) for one in media]
        return asyncio.run_coroutine_threadsafe(self._encode_all(items), self._loop).result()

    async def stop(self) -> None:
        await self._core.stop()
        await runtime.offload(shutil.rmtree, self._directory, ignore_errors=True)

    async def _load(self) -> None:
        settings = self._settings
        await runtime.offload(check_model, settings)
        if EC_TRANSFER in settings.arguments:
            raise EngineError(f"--engine-args: --role encode sets {EC_TRANSFER} itself, so remove it")
        self._weights = await runtime.offload(weights_digest, settings.model, default_cache())
        self._llm = await self._core.start(encoder_arguments(settings, self._directory), _stats, {})
        config = self._llm.vllm_config
        if (processes := config.parallel_config.world_size) > 1:
            text = f"vLLM runs an encoder in one process, not in {processes}: start more encode workers instead"
            raise EngineError(text)
        self._calls = import_module("forebay.workers.engines.vllm.calls")
        await self._warm_up()

    async def _warm_up(self) -> None:
        from PIL import Image  # noqa: PLC0415 - a dependency of vLLM

        try:
            await self._encode("image", Image.new("RGB", (WARM_UP_SIDE, WARM_UP_SIDE)))
        except Exception as error:
            raise EngineError(f"vLLM cannot encode an image with this model: {error}") from error

    async def _encode_all(self, items: Sequence[tuple[MediaKind, Any]]) -> list[EncodedMedia]:
        try:
            async with asyncio.timeout(ENCODE_S):
                return list(await asyncio.gather(*(self._encode(kind, data) for kind, data in items)))
        except TimeoutError:
            self._hangs = True  # so that the worker ends, and other workers get its requests
            raise TransferError(f"vLLM has not encoded the images and videos within {ENCODE_S:g} s") from None

    async def _encode(self, kind: MediaKind, data: Any) -> EncodedMedia:
        if (placeholder := self._placeholders.get(kind)) is None:
            config = self._llm.vllm_config.model_config
            placeholder = self._placeholders[kind] = await runtime.offload(self._calls.placeholder, config, kind)
        name = f"{kind}-{next(self._numbers)}"
        fields = {"multi_modal_data": {kind: [data]}, "multi_modal_uuids": {kind: [name]}}
        (prompt,) = await self._llm.renderer.render_cmpl_async([{"prompt": placeholder, **fields}], skip_mm_cache=True)
        (place,) = prompt["mm_placeholders"][kind]
        if place.is_embed is not None and not bool(place.is_embed.all()):
            # A serving vLLM would need to know which tokens are those of the embeddings.
            raise TransferError(f"{kind}s of this model have tokens without embeddings; start no encode workers for it")
        limit = self._llm.vllm_config.scheduler_config.max_num_batched_tokens
        if (tokens := len(prompt["prompt_token_ids"])) > limit:
            # vLLM would wait for ever, because an encoder does not split a prompt.
            raise TransferError(f"the {kind} has {tokens} tokens; --max-num-batched-tokens is {limit}, so increase it")
        try:
            params = self._calls.sampling_params(SAMPLING)
            last = [output async for output in self._llm.generate(prompt, params, name)][-1]
            array = await runtime.offload(self._calls.read_tensor, self._directory / name / FILE, TENSOR)
        finally:
            await runtime.offload(shutil.rmtree, self._directory / name, ignore_errors=True)
        found = (last.ec_transfer_params or {}).get(name, {}).get("metadata", {})
        if kind == "video" and (seconds := prompt["mm_kwargs"][kind][0].get_data().get(SECONDS)) is not None:
            found = {**found, SECONDS: float(seconds)}  # vLLM 0.32 sends the grid alone
        return EncodedMedia(array, msgspec.json.encode(ItemMetadata(self._weights, found)))


class VllmEncodeEngine(EncodeEngine):
    """Engine of an encode worker that runs vLLM."""

    def __init__(self, settings: EngineSettings) -> None:
        self._vllm = VllmEncoder(settings)
        super().__init__(self._vllm, cache_bytes=settings.embedding_cache_bytes)

    async def check(self) -> None:
        """Raise EngineError if vLLM is dead or hangs."""
        if self._vllm.is_dead:
            raise EngineError("vLLM died or hangs; see its log for the cause")

    def collectors(self) -> Sequence[Collector]:
        return (*super().collectors(), PrefixedMetrics(*VllmEngine.METRICS))

    async def stop(self) -> None:
        await super().stop()
        await self._vllm.stop()


def _stats(_config: Any, index: int) -> VllmStepStats:
    """Return a receiver of statistics that ignores them, because the worker counts the requests itself."""
    return VllmStepStats(index, lambda *_: None, lambda *_: None)
