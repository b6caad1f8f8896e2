"""Routing decisions on a log."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from forebay.events.control import RouterConfig
from forebay.live.router.abandoned_tail import AbandonedTail
from forebay.live.router.router import Router, RouterSettings
from forebay.transport.base import Log
from forebay.transport.directory import Directory
from tests.system import System


@asynccontextmanager
async def routing(
    system: System, name: str, log: Log | None = None, on_loss: Callable[[AbandonedTail], None] | None = None
) -> AsyncIterator[Router]:
    log = log or system.log
    directory = Directory(log)
    await directory.start()
    options = RouterSettings(
        router_id=name,
        partitions=1,
        slots_max=16,
        config=RouterConfig(),
        poll_s=0.005,
        retry_s=0.01,
        on_loss=on_loss,
    )
    router = Router(log, system.leases, directory, options, CollectorRegistry())
    running = asyncio.create_task(router.run())
    try:
        yield router
        await router.stop()
        await running
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
