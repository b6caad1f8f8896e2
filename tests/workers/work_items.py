"""Output of a mock engine without a worker."""

import asyncio
from collections.abc import Sequence

from forebay.events.base import unpack_u32
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine


async def finish(engine: MockEngine, *items: WorkItem) -> list[EngineBatch]:
    """Run items on an engine. Return all batches until every item has ended."""
    batches: list[EngineBatch] = []
    done = asyncio.Event()

    def publish(batch: EngineBatch) -> None:
        batches.append(batch)
        if sum(len(one.finished) for one in batches) == len(items):
            done.set()

    running = asyncio.create_task(engine.run(publish))
    for one in items:
        engine.submit(one)
    await done.wait()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return batches


def tokens_of(batches: Sequence[EngineBatch]) -> list[int]:
    """Return the output tokens of batches in which only one request runs."""
    return [token for batch in batches for chunk in batch.emitted for token in unpack_u32(chunk.token_ids)]
