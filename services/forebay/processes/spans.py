"""Export the spans of a log while a process runs."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry

from forebay.live.partitions import Partitions
from forebay.live.spans import SpanExporter, SpanSettings
from forebay.processes.otlp import OtlpSender
from forebay.transport.base import Log

LAST_S = 5.0  # for the spans of the last requests, after the log has their end


@asynccontextmanager
async def exporting(
    log: Log, registry: CollectorRegistry, settings: SpanSettings, namespace: str
) -> AsyncIterator[Partitions[SpanExporter]]:
    """Yield exporters with open connections."""
    sender = OtlpSender(settings, namespace, registry)
    try:
        yield Partitions(log, registry, "spans", lambda number: SpanExporter(log, number, settings, sender.send))
    finally:
        await sender.close()


@asynccontextmanager
async def exporting_beside(
    log: Log, registry: CollectorRegistry, settings: SpanSettings, namespace: str
) -> AsyncIterator[None]:
    """Export while the body runs, and within `LAST_S` after it what is left. If the export fails, end the body.

    Raises an error of the export or of the body in a group.
    """
    async with exporting(log, registry, settings, namespace) as exporters, asyncio.TaskGroup() as group:
        running = group.create_task(exporters.run(), name="spans")
        yield
        await exporters.stop()
        await asyncio.wait([running], timeout=LAST_S)
        running.cancel()
