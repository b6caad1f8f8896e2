"""Encode engines without a worker, and with a transfer of embeddings in memory."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from forebay.events.media import Media
from forebay.workers.engine import EngineBatch, MediaEncoded
from forebay.workers.engines.encode import EncodeEngine
from forebay.workers.runtime import media_feed
from tests.workers.conftest import until, work_item
from tests.workers.engine_setup import SPEC
from tests.workers.pictures import Memory


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    memory = Memory()
    monkeypatch.setattr("forebay.workers.engines.encode.EmbeddingTransfer", memory.offers)
    monkeypatch.setattr("forebay.workers.engines.encode.load_nixl", lambda: None)
    monkeypatch.setattr(media_feed.MediaFeed.__init__, "__defaults__", (memory.reader,))
    return memory


def encode_item(name: str, *some: Media, epoch: int, **changes: Any) -> Any:
    item = work_item(name, [], 1, media=some, stage="encode", worker_epoch=epoch, **changes)
    return msgspec.structs.replace(item, token_ids=b"", sequence_hashes=b"")


@asynccontextmanager
async def running(one: Any) -> AsyncIterator[tuple[EncodeEngine, list[EngineBatch]]]:
    batches: list[EngineBatch] = []
    await one.start(SPEC)
    task = asyncio.create_task(one.run(batches.append))
    try:
        yield one, batches
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await one.stop()


async def encoded_by(
    one: EncodeEngine, batches: list[EngineBatch], name: str, *some: Media, **changes: Any
) -> MediaEncoded:
    """Encode the images of a request and return the result."""

    def results() -> list[MediaEncoded]:
        return [done for batch in batches for done in batch.encoded if done.request_id == name]

    one.submit(encode_item(name, *some, epoch=1, **changes))
    await until(lambda: bool(results()))
    return results()[0]
