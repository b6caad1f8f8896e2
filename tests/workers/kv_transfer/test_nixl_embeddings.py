"""Embeddings through real NIXL: content, room, expired offers, cancelled reads and dishonest descriptors.

Tests of the KV transport cover holders that die or hang, because the same transport moves embeddings.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer import nixl_thread
from forebay.workers.kv_transfer.embeddings import BLOCK_BYTES, EmbeddingTransfer
from forebay.workers.kv_transfer.nixl_agent import TransferError
from tests.workers.conftest import until
from tests.workers.other_process import PATIENCE_S

NUMBERS = itertools.count()


def array(seed: int, size: int) -> "np.ndarray[tuple[int, int], np.dtype[np.float32]]":
    return np.random.default_rng(seed).standard_normal((size, 16), dtype=np.float32)


@asynccontextmanager
async def transfer(**changes: Any) -> AsyncIterator[EmbeddingTransfer]:
    one = EmbeddingTransfer(f"e{next(NUMBERS)}@1", **{"arena_bytes": 64 << 20, "fetch_s": PATIENCE_S, **changes})
    try:
        yield one
    finally:
        one.close()


async def test_nixl_arrays_arrive_unchanged_and_are_freed() -> None:
    async with transfer() as reader, transfer() as holder:
        for seed, rows in ((1, 1), (2, 40_000), (3, 300)):
            got = await reader.read(await holder.offer(array(seed, rows)))
            assert got.dtype == np.float32
            assert np.array_equal(got, array(seed, rows))
        offered = [await holder.offer(array(seed, 500)) for seed in range(20)]
        got_all = await asyncio.gather(*map(reader.read, offered))
        assert all(np.array_equal(got, array(seed, 500)) for seed, got in enumerate(got_all))
        await until(lambda: not holder.waiting)


async def test_nixl_expired_offer_is_reported() -> None:
    async with transfer() as reader, transfer(lease_s=0.01) as holder:
        offered = await holder.offer(array(1, 100))
        await until(lambda: not holder.waiting)
        with pytest.raises(TransferError, match="no longer holds these blocks") as caught:
            await reader.read(offered)
        assert caught.value.reason == "expired"


async def test_nixl_cancelled_read_releases_the_offer() -> None:
    async with transfer() as reader, transfer() as holder:
        await reader.read(await holder.offer(array(1, 10)))
        reading = asyncio.ensure_future(reader.read(await holder.offer(array(1, 300_000))))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert np.array_equal(await reader.read(await holder.offer(array(2, 10))), array(2, 10))
        await until(lambda: not holder.waiting)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"descriptor": b"no"}, "the descriptor of the encode worker is damaged"),
        ({"checksum": "0" * 16}, "do not match"),
        ({"dtype": "float99"}, "unsupported dtype float99"),
        ({"dtype": "O"}, "unsupported dtype O"),
        ({"shape": (0,)}, "has 0 bytes"),
        ({"shape": (1 << 40,)}, "expected 1 to"),
        ({"shape": (BLOCK_BYTES,)}, "offers 1 blocks; to read from block 0 on, 4 target blocks are the wrong number"),
    ],
)
async def test_nixl_descriptors_are_checked_before_the_holder_is_contacted(change: dict[str, Any], text: str) -> None:
    async with transfer() as offers, transfer() as reader:
        good = await offers.offer(np.ones(4, dtype=np.float32))
        with pytest.raises(TransferError, match=text):
            await reader.read(msgspec.structs.replace(good, **change))


async def test_nixl_room_is_bounded_and_expired_offers_leave_it() -> None:
    async with transfer(arena_bytes=4 * BLOCK_BYTES, lease_s=0.5) as offers:
        with pytest.raises(TransferError, match="no room for 327680 bytes of embeddings: 0 offers wait"):
            await offers.offer(np.zeros(5 * BLOCK_BYTES, dtype=np.uint8))
        for _ in range(4):
            await offers.offer(np.zeros(300, dtype=np.uint8))
        await until(lambda: offers.waiting == 0)
        await offers.offer(np.zeros(4 * BLOCK_BYTES, dtype=np.uint8))
        with pytest.raises(TransferError, match="cannot offer 0 bytes of dtype uint8"):
            await offers.offer(np.zeros(0, dtype=np.uint8))
        with pytest.raises(TransferError, match="cannot offer 16 bytes of dtype complex128"):
            await offers.offer(np.zeros(1, dtype=np.complex128))


async def test_nixl_start_that_failed_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_device(name: str, interface: str) -> None:
        raise RuntimeError("no device")

    async with transfer() as offers:
        with monkeypatch.context() as patched:
            patched.setattr(nixl_thread, "open_agent", no_device)
            with pytest.raises(EngineError, match="no device"):
                await offers.offer(np.ones(4, dtype=np.float32))
        await offers.offer(np.ones(4, dtype=np.float32))
