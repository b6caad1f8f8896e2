"""Work items, and their output of a mock engine without a worker."""

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec

from forebay.core.block_hashes import sequence_hashes
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.requests import Sampling
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineBatch
from forebay.workers.engines.mock.engine import MockEngine


def item(name: str, tokens: range, **changes: Any) -> WorkItem:
    token_ids = pack_u32(tokens)
    made = WorkItem(
        request_id=name,
        attempt=1,
        owner_epoch=1,
        worker_epoch=1,
        rank=0,
        token_ids=token_ids,
        sequence_hashes=sequence_hashes(token_ids, 4),
        reply_slot=0,
        sampling=Sampling(max_tokens=3, temperature=0.0),
    )
    return msgspec.structs.replace(made, **changes)


def hashes_of(tokens: Sequence[int]) -> bytes:
    return sequence_hashes(pack_u32(tokens), 4)


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
