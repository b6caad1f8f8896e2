"""The path of an image from HTTP through the log, an encode worker and NIXL to the decoding worker."""

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")
Image = pytest.importorskip("PIL.Image", reason="Pillow is not installed")

from forebay.events.codec import encode  # noqa: E402 - what may be missing comes first
from forebay.events.control import PoolConfigured  # noqa: E402
from forebay.events.decisions import RequestAborted, RequestRouted  # noqa: E402
from forebay.events.fleet import WorkerSpec  # noqa: E402
from forebay.events.progress import EncodeFailed, EncodeFinished, TransferFailed  # noqa: E402
from forebay.events.topics import CONTROL, PROGRESS  # noqa: E402
from forebay.ingress.model import Model  # noqa: E402
from forebay.transport.base import Draft  # noqa: E402
from forebay.workers.engines.encode import EncodeEngine, StandInEncoder  # noqa: E402
from forebay.workers.kv_transfer.embeddings import EmbeddingTransfer  # noqa: E402
from forebay.workers.runtime.worker import Worker  # noqa: E402
from tests.ingress import media_model  # noqa: E402
from tests.ingress.conftest import Scene, make_scene  # noqa: E402
from tests.system import BLOCK, MODEL, System, until  # noqa: E402

CHAT = "/v1/chat/completions"


def picture(red: int) -> str:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (red, 60, 90)).save(buffer, "PNG")
    return "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()


class ImageSystem:
    """Ingress, owner, two aggregated workers and encode workers."""

    def __init__(self, system: System, scene: Scene, group: asyncio.TaskGroup) -> None:
        self.system = system
        self.scene = scene
        self._group = group
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def encoder(self, name: str, encoder: StandInEncoder | None = None) -> Worker:
        """Start an encode worker and wait until it is admitted."""
        size: dict[str, Any] = {"block_size": 1, "kv_blocks_total": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1}
        spec = WorkerSpec(worker_id=name, model=MODEL, pool="encoders", role="encode", **size)
        engine = EncodeEngine(encoder or StandInEncoder(), arena_bytes=1 << 20)
        worker = Worker(self.system.log, self.system.keeper, spec, engine, token=f"{name}-token", group=MODEL)
        self._tasks[name] = self._group.create_task(worker.run())
        await until(lambda: worker.worker_epoch is not None)
        return worker

    async def stop(self, name: str) -> None:
        """Stop an encode worker, which releases its lease."""
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def stop_all(self) -> None:
        for name in list(self._tasks):
            await self.stop(name)

    async def complete(self, red: int) -> Any:
        """Send a chat request with an image and return the response."""
        parts = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": picture(red)}}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 6, "seed": 1}
        return await self.scene.client.post(CHAT, json=body)

    def stages(self) -> list[tuple[str, str]]:
        return [(one.stage, one.worker_id) for one in self.system.decisions(RequestRouted)]

    def progress(self, kind: type) -> list[Any]:
        return self.system.events(PROGRESS, kind)


@asynccontextmanager
async def running_system(tmp_path: Path) -> AsyncIterator[ImageSystem]:
    model = Model(media_model.make(tmp_path / "model"))
    async with make_scene(model, model_name=MODEL, block_size=BLOCK) as scene:
        system = System(scene.log)
        async with system.started(workers=2), system.owned() as owner, asyncio.TaskGroup() as group:
            encoders = PoolConfigured(pool="encoders", model=MODEL, block_size=1, role="encode", attempts_max=3)
            await scene.log.append([Draft(CONTROL.name, 0, encode(CONTROL, encoders))])
            await until(lambda: "encoders" in owner.world.pools and len(owner.world.fleet) == 2)
            images = ImageSystem(system, scene, group)
            yield images
            await images.stop_all()


async def test_nixl_a_response_does_not_depend_on_where_the_image_is_encoded(tmp_path: Path) -> None:
    async with running_system(tmp_path) as images:
        alone = (await images.complete(10)).json()["choices"][0]["message"]["content"]
        assert [stage for stage, _ in images.stages()] == ["aggregated"]
        await images.encoder("e0")
        contents = [(await images.complete(red)).json()["choices"][0]["message"]["content"] for red in (10, 11, 10)]
        assert contents[0] == contents[2] == alone != contents[1]
        assert images.stages()[1:3][0] == ("encode", "e0")
        assert [stage for stage, _ in images.stages()[1:]] == ["encode", "aggregated"] * 3
        assert [event.cached for event in images.progress(EncodeFinished)] == [0, 0, 1]
        fetched = [worker.media.fetched for worker in images.system.workers.values()]
        assert sum(fetched) == 3


async def test_nixl_an_image_is_encoded_again_if_its_encoder_dies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, waiting = asyncio.Event(), asyncio.Event()
    read = EmbeddingTransfer.read

    async def slow(reader: EmbeddingTransfer, encoded: Any) -> Any:
        waiting.set()
        await gate.wait()
        return await read(reader, encoded)

    monkeypatch.setattr(EmbeddingTransfer, "read", slow)
    async with running_system(tmp_path) as images:
        await images.encoder("e0")
        answer = asyncio.create_task(images.complete(10))
        await waiting.wait()
        await images.stop("e0")
        await images.encoder("e1")
        gate.set()
        assert (await answer).status_code == 200
        assert len(images.progress(TransferFailed)) == 1
        assert images.stages()[0] == ("encode", "e0")
        assert ("encode", "e1") in images.stages()


class Broken(StandInEncoder):
    def encode_all(self, media: Any) -> Any:
        raise MemoryError("no memory is left")


async def test_nixl_a_failed_encode_is_reported_with_the_reason(tmp_path: Path) -> None:
    async with running_system(tmp_path) as images:
        for name in ("e0", "e1"):
            await images.encoder(name, Broken())
        answer = await images.complete(10)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (502, "encode_failed")
        assert "could not be encoded and fetched in 3 attempts: MemoryError: no memory is left" in error["message"]
        assert len(images.progress(EncodeFailed)) == 3
        assert [one.reason for one in images.system.decisions(RequestAborted)] == ["encode_failed"]
        assert {name for _, name in images.stages()} == {"e0", "e1"}
