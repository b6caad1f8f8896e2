"""A console that follows the log of a benchmark in processes of its own, without a page."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay.cli.console.run import WHAT_IF
from forebay.console.console import Console
from forebay.console.settings import ConsoleSettings
from forebay.ingress.explain_worker import LogSource
from forebay.transport.kafka.settings import KafkaSettings

READY_S = 60.0
POLL_S = 0.05


@asynccontextmanager
async def following_console(kafka: KafkaSettings, group: str) -> AsyncIterator[None]:
    """Run a console of a group in partition 0, and wait until it follows the log.

    The process that follows the log is a child of this one. This process only reads its messages.
    """
    with tempfile.TemporaryDirectory(prefix="forebay-bench-") as folder:
        console = Console(
            ConsoleSettings(
                source=LogSource(kafka=kafka),
                name="bench",
                kind="kafka",
                group=group,
                partition=0,
                cache_dir=folder,
                host="127.0.0.1",
                port=1,
                allow_hosts=(),
                certfile=None,
                keyfile=None,
                token="bench",
                ingress_url="",
            ),
            WHAT_IF,
        )
        running = asyncio.create_task(console.run())
        try:
            async with asyncio.timeout(READY_S):
                await _until_complete(console)
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await console.close()


async def _until_complete(console: Console) -> None:
    while True:
        if (await console.catalog.state()).is_complete:
            return
        await asyncio.sleep(POLL_S)
