"""Set-up shared by the tests of engine adapters with stand-ins."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec

from forebay.events.fleet import WorkerSpec
from forebay.events.transfer import Prefilled
from forebay.workers.engine import Engine, KvEngine
from forebay.workers.engines.settings import EngineSettings
from tests.engines.driven import Answer, Driven, driven
from tests.workers.conftest import until
from tests.workers.hosted import HOSTED_SPEC

BLOCK_SIZE = 4
KV_BLOCKS = 32
PROMPT = list(range(50, 62))  # three blocks
OTHER = list(range(150, 162))
SPEC = msgspec.structs.replace(HOSTED_SPEC, block_size=1)  # before the engine reports its sizes

Backend = TypeVar("Backend")
Start = Callable[..., AbstractAsyncContextManager[Driven]]


def model_directory(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text('{"max_position_embeddings": 128}')
    (folder / "model.bin").write_bytes(b"weights")
    return folder


def lora_directory(folder: Path) -> Path:
    folder.mkdir()
    (folder / "adapter_config.json").write_text("{}")
    return folder


def standin_settings(folder: Path) -> EngineSettings:
    return EngineSettings(
        model=model_directory(folder / "model"), model_name="m", block_size=BLOCK_SIZE, kv_blocks=KV_BLOCKS
    )


def starter(make: Callable[[EngineSettings], Engine], settings: EngineSettings) -> Start:
    """Return a function that runs an engine with these settings. Further keyword arguments are the engine's own."""

    @asynccontextmanager
    async def start(spec: WorkerSpec = SPEC, role: Any = "aggregated", **arguments: Any) -> AsyncIterator[Driven]:
        engine = make(replace(settings, role=role, arguments=arguments))
        async with driven(engine, msgspec.structs.replace(spec, block_size=BLOCK_SIZE)) as one:
            yield one

    return start


async def reported(one: Driven, blocks: set[int], rank: int = 0) -> None:
    """Wait until an index would hold these."""
    await one.until(lambda: blocks <= one.held[rank])


@dataclass
class StandinPair(Generic[Backend]):
    """A prefill and a decode engine, each with its stand-in."""

    prefill: Driven
    decode: Driven
    prefill_backend: Backend
    decode_backend: Backend

    async def prefilled(self, prompt: list[int], **options: Any) -> Prefilled:
        answer = await self.prefill.ask(prompt, 6, stage="prefill", **options)
        assert answer.prefilled is not None, answer
        return answer.prefilled

    async def decoded(self, prompt: list[int], prefilled: Prefilled | None, **options: Any) -> Answer:
        return await self.decode.ask(prompt, 6, stage="decode", prefilled=prefilled, **options)

    async def nothing_kept(self) -> None:
        engine = self.prefill.engine
        assert isinstance(engine, KvEngine)
        await until(lambda: not engine.kept())


@asynccontextmanager
async def standin_pair(
    folder: Path, make: Callable[[EngineSettings], Engine], backend: Callable[[], Backend | None]
) -> AsyncIterator[StandinPair[Backend]]:
    """Run a prefill and a decode engine. `backend` returns the stand-in of the engine that was started last."""
    model = model_directory(folder / "model")
    roles: tuple[Any, ...] = ("prefill", "decode")
    engines: list[Driven] = []
    backends: list[Backend] = []
    async with AsyncExitStack() as stack:
        for role in roles:
            settings = EngineSettings(model=model, model_name="m", role=role, block_size=4, kv_blocks=32)
            spec = msgspec.structs.replace(SPEC, worker_id=role, block_size=4)
            engines.append(await stack.enter_async_context(driven(make(settings), spec)))
            found = backend()
            assert found is not None
            backends.append(found)
        yield StandinPair(engines[0], engines[1], backends[0], backends[1])
