"""The whole path of an image: HTTP, the log, an encode worker, NIXL, the worker that answers; and what may go wrong."""

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
from forebay.workers.engines.encode import EncodeEngine  # noqa: E402
from forebay.workers.engines.standin_encoder import StandInEncoder  # noqa: E402
from forebay.workers.kv_transfer.embeddings import EmbeddingTransfer  # noqa: E402
from forebay.workers.runtime.worker import Worker  # noqa: E402
from tests.ingress import media_model  # noqa: E402
from tests.ingress.conftest import Scene, make_scene  # noqa: E402
from tests.system import BLOCK, MODEL, System, until  # noqa: E402

CHAT = "/v1/chat/completions"


def picture(red: int) -> str:
    kept = io.BytesIO()
    Image.new("RGB", (8, 8), (red, 60, 90)).save(kept, "PNG")
    return "data:image/png;base64," + base64.b64encode(kept.getvalue()).decode()


class Whole:
    """An ingress, an owner, two workers that answer, and encode workers."""

    def __init__(self, system: System, scene: Scene, group: asyncio.TaskGroup) -> None:
        self.system = system
        self.scene = scene
        self._group = group
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def encoder(self, name: str, encoder: StandInEncoder | None = None) -> Worker:
        """One encode worker more, admitted."""
        size: dict[str, Any] = {"block_size": 1, "kv_blocks_total": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1}
        spec = WorkerSpec(worker_id=name, model=MODEL, pool="encoders", role="encode", **size)
        engine = EncodeEngine(encoder or StandInEncoder(), arena_bytes=1 << 20)
        worker = Worker(self.system.log, self.system.keeper, spec, engine, token=f"{name}-token", group=MODEL)
        self._tasks[name] = self._group.create_task(worker.run())
        await until(lambda: worker.worker_epoch is not None)
        return worker

    async def stop(self, name: str) -> None:
        """One encode worker less; it gives its lease up."""
        task = self._tasks.pop(name)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    async def stop_all(self) -> None:
        for name in list(self._tasks):
            await self.stop(name)

    async def ask(self, red: int) -> Any:
        """The answer to a question about a picture."""
        parts = [{"type": "text", "text": "what is it"}, {"type": "image_url", "image_url": {"url": picture(red)}}]
        body = {"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 6}
        return await self.scene.client.post(CHAT, json=body)

    def stages(self) -> list[tuple[str, str]]:
        return [(one.stage, one.worker_id) for one in self.system.decisions(RequestRouted)]

    def progress(self, kind: type) -> list[Any]:
        return self.system.events(PROGRESS, kind)


@asynccontextmanager
async def whole(tmp_path: Path) -> AsyncIterator[Whole]:
    model = Model(media_model.make(tmp_path / "model"))
    async with make_scene(model, model_name=MODEL, block_size=BLOCK) as scene:
        system = System(scene.log)
        async with system.started(workers=2), system.owned() as owner, asyncio.TaskGroup() as group:
            encoders = PoolConfigured(pool="encoders", model=MODEL, block_size=1, role="encode", attempts_max=3)
            await scene.log.append([Draft(CONTROL.name, 0, encode(CONTROL, encoders))])
            await until(lambda: "encoders" in owner.world.pools and len(owner.world.fleet) == 2)
            made = Whole(system, scene, group)
            yield made
            await made.stop_all()


async def test_nixl_an_answer_about_a_picture_is_the_same_whoever_encoded_it(tmp_path: Path) -> None:
    async with whole(tmp_path) as all_of_it:
        alone = (await all_of_it.ask(10)).json()["choices"][0]["message"]["content"]
        assert [stage for stage, _ in all_of_it.stages()] == ["aggregated"]
        await all_of_it.encoder("e0")
        said = [(await all_of_it.ask(red)).json()["choices"][0]["message"]["content"] for red in (10, 11, 10)]
        assert said[0] == said[2] == alone != said[1]
        assert all_of_it.stages()[1:3][0] == ("encode", "e0")
        assert [stage for stage, _ in all_of_it.stages()[1:]] == ["encode", "aggregated"] * 3
        assert len(all_of_it.progress(EncodeFinished)) == 3
        fetched = [worker.media.fetched for worker in all_of_it.system.workers.values()]
        assert sum(fetched) == 3


async def test_nixl_an_encoder_that_dies_with_the_embeddings_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, waiting = asyncio.Event(), asyncio.Event()
    read = EmbeddingTransfer.read

    async def slow(reader: EmbeddingTransfer, encoded: Any) -> Any:
        waiting.set()
        await gate.wait()
        return await read(reader, encoded)

    monkeypatch.setattr(EmbeddingTransfer, "read", slow)
    async with whole(tmp_path) as all_of_it:
        await all_of_it.encoder("e0")
        answer = asyncio.create_task(all_of_it.ask(10))
        await waiting.wait()
        await all_of_it.stop("e0")
        await all_of_it.encoder("e1")
        gate.set()
        assert (await answer).status_code == 200
        assert len(all_of_it.progress(TransferFailed)) == 1
        assert all_of_it.stages()[0] == ("encode", "e0")
        assert ("encode", "e1") in all_of_it.stages()


class Broken(StandInEncoder):
    """One that is out of memory."""

    def encode_all(self, media: Any) -> Any:
        raise MemoryError("no memory is left")


async def test_nixl_what_nobody_can_encode_is_told_with_the_reason(tmp_path: Path) -> None:
    async with whole(tmp_path) as all_of_it:
        for name in ("e0", "e1"):
            await all_of_it.encoder(name, Broken())
        answer = await all_of_it.ask(10)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (502, "encode_failed")
        assert "could not be encoded and fetched in 3 attempts: MemoryError: no memory is left" in error["message"]
        assert len(all_of_it.progress(EncodeFailed)) == 3
        assert [one.reason for one in all_of_it.system.decisions(RequestAborted)] == ["encode_failed"]
        assert {name for _, name in all_of_it.stages()} == {"e0", "e1"}
