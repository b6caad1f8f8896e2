"""Encode worker that runs vLLM, with a stand-in for vLLM."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from forebay.events.media import Media
from forebay.workers.engine import EngineError, MediaEncoded
from forebay.workers.engines.settings import EngineSettings
from forebay.workers.engines.vllm import encoder
from forebay.workers.engines.vllm.core import VllmCore
from forebay.workers.engines.vllm.encoder import DIRECTORY, EC_TRANSFER, FILE, TENSOR, VllmEncodeEngine
from forebay.workers.engines.vllm.media import ItemMetadata
from forebay.workers.kv_tiers.identity import weights_digest
from tests.workers.conftest import until
from tests.workers.encode_engines import encode_item, encoded_by, memory, running
from tests.workers.engine_setup import SPEC
from tests.workers.pictures import Memory, shown

__all__ = ["memory"]  # a fixture
GRIDS = {"image": "image_grid_thw", "video": "video_grid_thw"}
RED, BLUE = shown((250, 0, 0)), shown((0, 0, 250))


class Vllm:
    """Stand-in for `AsyncLLM` as the producer of an encoder cache: its embeddings are the colors of an image."""

    def __init__(self, arguments: dict[str, Any], *, rows: int = 4, processes: int = 1, gap: bool = False) -> None:
        self.directory = Path(arguments[EC_TRANSFER]["ec_connector_extra_config"][DIRECTORY])
        self.errored = False
        self.rows, self.gap, self.fails = rows, gap, False
        self.names: list[str] = []
        self.answers = asyncio.Event()
        self.answers.set()
        self.renderer = self
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(world_size=processes),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=arguments.get("max_num_batched_tokens", 64)),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(model_type="qwen2_5_vl")),
        )

    async def render_cmpl_async(self, prompts: list[dict[str, Any]], *, skip_mm_cache: bool) -> list[dict[str, Any]]:
        (one,) = prompts
        (kind,) = one["multi_modal_data"]
        assert skip_mm_cache and one["prompt"] == f"<{kind}>"
        place = SimpleNamespace(is_embed=np.array([True, not self.gap]))
        made = {"prompt_token_ids": [7] * self.rows, "mm_placeholders": {kind: [place]}}
        processed = SimpleNamespace(get_data=lambda: {"second_per_grid_ts": np.float32(0.5)})
        return [{**one, **made, "mm_kwargs": {kind: [processed]}}]

    async def generate(self, prompt: dict[str, Any], _params: Any, request_id: str) -> AsyncIterator[Any]:
        ((kind, (data,)),), ((name,),) = prompt["multi_modal_data"].items(), prompt["multi_modal_uuids"].values()
        assert name == request_id and name not in self.names, "vLLM would not encode an image of the same name again"
        self.names.append(name)
        await self.answers.wait()
        (self.directory / name).mkdir()
        if self.fails:
            raise MemoryError("full")
        with (self.directory / name / FILE).open("wb") as file:
            color = data.getpixel((0, 0)) if kind == "image" else list(data[0])
            np.save(file, np.tile(np.array(color, dtype=np.float32), (self.rows, 1)))
        yield SimpleNamespace(ec_transfer_params={name: {"metadata": {GRIDS[kind]: [1, 2, self.rows]}}})


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, memory: Memory) -> Callable[..., list[Vllm]]:
    """Return a function that lets the engine start the stand-in with some faults, and returns those that started."""

    def install(**faults: Any) -> list[Vllm]:
        found: list[Vllm] = []

        async def start(_: VllmCore, arguments: dict[str, Any], _logger: Any, __: dict[str, str]) -> Vllm:
            found.append(Vllm(arguments, **faults))
            return found[-1]

        calls = SimpleNamespace(
            placeholder=lambda _, kind: f"<{kind}>",
            sampled_video=lambda content: (content[:3], {}),
            sampling_params=lambda one: one,
            read_tensor=lambda file, name: np.load(file) if name == TENSOR else None,
        )
        monkeypatch.setattr(VllmCore, "start", start)
        monkeypatch.setitem(sys.modules, "forebay.workers.engines.vllm.calls", calls)
        return found

    return install


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> EngineSettings:
    monkeypatch.setenv("HOME", str(tmp_path))  # digests of files are remembered there
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.bin").write_bytes(b"weights")
    return EngineSettings(model=tmp_path, model_name="m", role="encode")


async def test_images_are_encoded_by_vllm_and_cached(
    started: Callable[..., list[Vllm]], settings: EngineSettings, memory: Memory
) -> None:
    vllm = started()
    async with running(VllmEncodeEngine(settings)) as (one, batches):
        first = await encoded_by(one, batches, "a", RED)
        both = await encoded_by(one, batches, "b", BLUE, RED)
        assert (first.cached, both.cached, len(vllm[0].names)) == (0, 1, 3), "one image is encoded at the start"
        rows = memory.arrays[both.encoded.descriptor]
        assert rows.tolist() == [[0, 0, 250]] * 4 + [[250, 0, 0]] * 4
        described = {"weights": weights_digest(settings.model), "fields": {"image_grid_thw": [1, 2, 4]}}
        assert msgspec.json.decode(both.encoded.metadata) == [described, described]
        assert not list(vllm[0].directory.iterdir()), "files that were read are removed"
        await one.check()
        vllm[0].errored = True
        with pytest.raises(EngineError, match="vLLM died"):
            await one.check()
        vllm[0].errored = False
        await one.check()
    assert not vllm[0].directory.exists()


async def test_videos_are_encoded_with_their_rate_and_cached(
    started: Callable[..., list[Vllm]], settings: EngineSettings, memory: Memory
) -> None:
    started()
    clip = msgspec.structs.replace(RED, kind="video", content=bytes([7, 8, 9, 10]))
    async with running(VllmEncodeEngine(settings)) as (one, batches):
        first = await encoded_by(one, batches, "a", clip)
        again = await encoded_by(one, batches, "b", clip, RED)
        assert (first.cached, again.cached) == (0, 1)
        assert memory.arrays[again.encoded.descriptor].tolist() == [[7, 8, 9]] * 4 + [[250, 0, 0]] * 4
        of_clip, of_image = msgspec.json.decode(again.encoded.metadata, type=list[ItemMetadata])
        assert of_clip.fields == {"video_grid_thw": [1, 2, 4], "second_per_grid_ts": 0.5}
        assert of_image.fields == {"image_grid_thw": [1, 2, 4]}


async def test_images_that_vllm_cannot_encode(
    started: Callable[..., list[Vllm]], settings: EngineSettings, memory: Memory
) -> None:
    vllm = started()
    video = msgspec.structs.replace(RED, kind="video", content=b"frames")
    async with running(VllmEncodeEngine(settings)) as (one, batches):

        async def failure(name: str, image: Media) -> tuple[str, str]:
            one.submit(encode_item(name, image, epoch=1))
            await until(lambda: any(done.request_id == name for batch in batches for done in batch.failed))
            error = batches[-1].failed[0].error
            return error.code, error.message

        vllm[0].vllm_config.model_config.hf_config.model_type = "llava"
        code, message = await failure("video", video)
        assert code == "media_not_encoded" and "decode videos for qwen2_vl, qwen2_5_vl, not for llava" in message
        vllm[0].rows = 5
        assert await failure("rows", RED) == (
            "encode_failed",
            "the encoder returned an array of shape 5 x 3 for 4 placeholders",
        )
        vllm[0].rows = 65
        code, message = await failure("long", RED)
        assert message == "the image has 65 tokens; --max-num-batched-tokens is 64, so increase it"
        vllm[0].rows, vllm[0].fails = 4, True
        assert await failure("full", RED) == ("encode_failed", "MemoryError: full")
        assert not list(vllm[0].directory.iterdir()), "files of a failed request are removed"
        vllm[0].fails = False
        done: MediaEncoded = await encoded_by(one, batches, "again", RED)
        assert done.cached == 0


async def test_vllm_that_hangs_ends_the_worker(
    started: Callable[..., list[Vllm]], settings: EngineSettings, memory: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = started()
    async with running(VllmEncodeEngine(settings)) as (one, batches):
        monkeypatch.setattr(encoder, "ENCODE_S", 0.0)
        vllm[0].answers.clear()
        one.submit(encode_item("r", RED, epoch=1))
        await until(lambda: any(batch.failed for batch in batches))
        assert batches[-1].failed[0].error.message == "vLLM has not encoded the images and videos within 0 s"
        with pytest.raises(EngineError, match="vLLM died or hangs"):
            await one.check()


@pytest.mark.parametrize(
    ("faults", "arguments", "message"),
    [
        ({}, {EC_TRANSFER: {}}, "--role encode sets ec_transfer_config itself"),
        ({"processes": 2}, {}, "in one process, not in 2: start more encode workers"),
        ({"gap": True}, {}, "images of this model have tokens without embeddings; start no encode workers"),
    ],
)
async def test_unsupported_encoders_do_not_start(
    started: Callable[..., list[Vllm]],
    settings: EngineSettings,
    faults: dict[str, Any],
    arguments: dict[str, Any],
    message: str,
) -> None:
    started(**faults)
    engine = VllmEncodeEngine(replace(settings, arguments=arguments))
    with pytest.raises(EngineError, match=message):
        await engine.start(SPEC)
    await engine.stop()
