"""Process with a mock prefill engine. It prints the KV descriptor of each prompt until its standard input ends."""

import asyncio
import base64
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine
from tests.workers.conftest import Scene, engine_config
from tests.workers.disagg import kv_settings
from tests.workers.other_process import OtherProcess, running


class Peer(OtherProcess):
    """Client of the other process."""

    async def compute(self, item: WorkItem) -> Prefilled:
        """Compute a prompt in the other process."""
        reported = await self.ask(base64.b64encode(msgspec.msgpack.encode(item)).decode())
        return msgspec.msgpack.decode(base64.b64decode(reported), type=Prefilled)

    async def kept(self) -> int:
        """Return the number of requests whose KV is kept."""
        return int(await self.ask("kept"))

    async def gone(self) -> None:
        await self.process.wait()


@asynccontextmanager
async def peer(kind: str, name: str) -> AsyncIterator[Peer]:
    """A process whose worker is called so."""
    async with running("tests.workers.disagg_peer", kind, name) as process:
        yield Peer(process)


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
            while not (generated := (await batches.get()).prefilled):
                pass
            answer = base64.b64encode(msgspec.msgpack.encode(generated[0].prefilled)).decode()
        sys.stdout.write(answer + "\n")
        sys.stdout.flush()
    running.cancel()
    await engine.stop()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
