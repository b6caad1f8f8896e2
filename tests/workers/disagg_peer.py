"""Process with a mock prefill engine. It replies to each prompt with its KV descriptor."""

import asyncio
import base64
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine
from tests.workers.conftest import Scene, engine_config
from tests.workers.disagg import kv_settings
from tests.workers.other_process import OtherProcess, running, serve


class Peer(OtherProcess):
    """Client of the other process."""

    async def compute(self, item: WorkItem) -> Prefilled:
        """Compute a prompt in the other process."""
        reported = await self.ask(base64.b64encode(msgspec.msgpack.encode(item)).decode())
        return msgspec.msgpack.decode(base64.b64decode(reported), type=Prefilled)

    async def kept(self) -> int:
        """Return the number of requests whose KV is kept."""
        return int(await self.ask("kept"))


@asynccontextmanager
async def peer(name: str) -> AsyncIterator[Peer]:
    """A process whose worker is called so."""
    async with running("tests.workers.disagg_peer", name) as connected:
        yield Peer(*connected)


async def main(name: str, channel: socket.socket) -> None:
    """Compute prompts until the socket is closed."""
    engine = MockEngine(engine_config(), speedup=1000.0, kv=kv_settings())
    batches: asyncio.Queue[EngineBatch] = asyncio.Queue()
    await engine.start(Scene.spec(None, name=name, role="prefill"))  # type: ignore[arg-type]
    running = asyncio.create_task(engine.run(batches.put_nowait))

    async def obey(line: str) -> str:
        if line == "kept":
            return str(engine.kept())
        engine.submit(msgspec.msgpack.decode(base64.b64decode(line), type=WorkItem))
        while not (generated := (await batches.get()).prefilled):
            pass
        return base64.b64encode(msgspec.msgpack.encode(generated[0].prefilled)).decode()

    await serve(channel, obey)
    running.cancel()
    await engine.stop()
