"""A process with a mock engine that computes prompts: says where the KV of each lies, until its standard input ends."""

import asyncio
import base64
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch
from forebay.workers.mock.engine import MockEngine
from tests.workers.conftest import Scene, engine_config
from tests.workers.disagg import kv_settings

PATIENCE_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


class Peer:
    """The other process, seen from the test."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process

    async def ask(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line.encode() + b"\n")
        async with asyncio.timeout(PATIENCE_S):
            return (await self._process.stdout.readline()).decode().strip()

    async def compute(self, item: WorkItem) -> Prefilled:
        """Have it compute a prompt."""
        told = await self.ask(base64.b64encode(msgspec.msgpack.encode(item)).decode())
        return msgspec.msgpack.decode(base64.b64decode(told), type=Prefilled)

    async def kept(self) -> int:
        """Of how many requests it keeps KV."""
        return int(await self.ask("kept"))

    def signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    async def gone(self) -> None:
        await self._process.wait()


@asynccontextmanager
async def peer(kind: str, name: str) -> AsyncIterator[Peer]:
    """A process whose worker is called so."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.workers.disagg_peer", kind, name),
        cwd=ROOT,
        env={**os.environ, "NIXL_LOG_LEVEL": "ERROR"},
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def main(kind: str, name: str) -> None:
    """Obey."""
    engine = MockEngine(engine_config(), speedup=1000.0, kv=kv_settings(transport=kind))
    batches: asyncio.Queue[EngineBatch] = asyncio.Queue()
    await engine.start(Scene.spec(None, name=name, role="prefill"))  # type: ignore[arg-type]
    running = asyncio.create_task(engine.run(batches.put_nowait))
    while line := (await asyncio.to_thread(sys.stdin.readline)).strip():
        if line == "kept":
            answer = str(engine.kept())
        else:
            engine.submit(msgspec.msgpack.decode(base64.b64decode(line), type=WorkItem))
            while not (said := (await batches.get()).prefilled):
                pass
            answer = base64.b64encode(msgspec.msgpack.encode(said[0].prefilled)).decode()
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
    running.cancel()
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
