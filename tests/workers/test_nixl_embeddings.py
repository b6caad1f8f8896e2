"""Embeddings through real NIXL between two processes: dead, hung and dishonest holders, cancelled readers."""

import asyncio
import base64
import itertools
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

from forebay.events.media import Encoded  # noqa: E402 - NIXL first
from forebay.workers.engine import EngineError  # noqa: E402
from forebay.workers.kv_transfer import nixl_thread  # noqa: E402
from forebay.workers.kv_transfer.embeddings import BLOCK_BYTES, EmbeddingTransfer  # noqa: E402
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name  # noqa: E402
from tests.workers.conftest import until  # noqa: E402
from tests.workers.nixl_peer import array  # noqa: E402
from tests.workers.other_process import PATIENCE_S, TIMEOUT_S, OtherProcess, running  # noqa: E402

pytestmark = pytest.mark.timeout(TIMEOUT_S)
NUMBERS = itertools.count()


class Holder(OtherProcess):
    async def offer(self, seed: int, rows: int) -> Encoded:
        return msgspec.msgpack.decode(base64.b64decode(await self.ask(f"offer {seed} {rows}")), type=Encoded)

    async def all_fetched(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while await self.ask("waiting") != "0":
                pass


@asynccontextmanager
async def holder(name: str, lease_s: float = 60.0) -> AsyncIterator[Holder]:
    async with running("tests.workers.nixl_peer", name, str(lease_s)) as connected:
        yield Holder(*connected)


@asynccontextmanager
async def transfer(name: str = "", **changes: Any) -> AsyncIterator[EmbeddingTransfer]:
    name = name or agent_name(f"reader{next(NUMBERS)}")
    one = EmbeddingTransfer(name, **{"arena_bytes": 64 << 20, "fetch_s": PATIENCE_S, **changes})
    try:
        yield one
    finally:
        one.close()


async def test_nixl_arrays_arrive_unchanged_and_are_freed() -> None:
    async with transfer() as reader, holder("e@7") as other:
        for seed, rows in ((1, 1), (2, 40_000), (3, 300)):
            got = await reader.read(await other.offer(seed, rows))
            assert got.dtype == np.float32
            assert np.array_equal(got, array(seed, rows))
        offered = [await other.offer(seed, 500) for seed in range(20)]
        got_all = await asyncio.gather(*map(reader.read, offered))
        assert all(np.array_equal(got, array(seed, 500)) for seed, got in enumerate(got_all))
        await other.all_fetched()


async def test_nixl_expired_offer_is_reported() -> None:
    async with transfer() as reader, holder("e@8", lease_s=0.01) as other:
        offered = await other.offer(1, 100)
        await other.all_fetched()
        with pytest.raises(TransferError, match="e@8 no longer holds these blocks") as caught:
            await reader.read(offered)
        assert caught.value.reason == "expired"


async def test_nixl_dead_holder_fails_at_once_and_its_successor_is_read() -> None:
    async with transfer() as reader:
        async with holder("e@9") as other:
            assert len(await reader.read(await other.offer(1, 100))) == 100
            offered = await other.offer(2, 100)
            await other.kill()
            with pytest.raises(TransferError, match="e@9"):
                await reader.read(offered)
        for name in ("e@10", "e@9"):  # another epoch, and the same agent name again
            async with holder(name) as other:
                assert np.array_equal(await reader.read(await other.offer(3, 10)), array(3, 10))


@pytest.mark.slow
async def test_nixl_hung_holder_misses_the_deadline_and_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # with shared memory the read succeeds without the holder
    async with transfer(fetch_s=2.0) as reader, transfer() as patient, holder("e@11") as hung, holder("e@12") as good:
        offered = [await hung.offer(seed, 100_000) for seed in (2, 3)]
        hung.signal(signal.SIGSTOP)
        with pytest.raises(TransferError, match="did not arrive within") as caught:
            await reader.read(offered[0])
        assert caught.value.reason == "deadline"
        with pytest.raises(TransferError, match="did not reply to an earlier read"):
            await reader.read(offered[1])
        assert np.array_equal(await patient.read(await good.offer(4, 10)), array(4, 10))
        hung.signal(signal.SIGCONT)


async def test_nixl_cancelled_read_releases_the_offer() -> None:
    async with transfer() as reader, holder("e@13") as other:
        await reader.read(await other.offer(1, 10))
        reading = asyncio.ensure_future(reader.read(await other.offer(1, 300_000)))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert np.array_equal(await reader.read(await other.offer(2, 10)), array(2, 10))
        await other.all_fetched()


async def test_nixl_closed_transfer_fails_reads_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # with shared memory the read succeeds without the holder
    async with transfer() as reader, holder("e@17") as other:
        offered = await other.offer(2, 100_000)
        await reader.read(await other.offer(1, 10))
        other.signal(signal.SIGSTOP)
        reading = asyncio.ensure_future(reader.read(offered))
        await asyncio.sleep(0)
        reader.close()
        with pytest.raises(TransferError, match="the transport is closed"):
            await reading
        other.signal(signal.SIGCONT)


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
    async with transfer("e@14") as offers, transfer() as reader:
        good = await offers.offer(np.ones(4, dtype=np.float32))
        with pytest.raises(TransferError, match=text):
            await reader.read(msgspec.structs.replace(good, **change))


async def test_nixl_room_is_bounded_and_expired_offers_leave_it() -> None:
    async with transfer("e@16", arena_bytes=4 * BLOCK_BYTES, lease_s=0.5) as offers:
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

    async with transfer("e@18") as offers:
        with monkeypatch.context() as patched:
            patched.setattr(nixl_thread, "open_agent", no_device)
            with pytest.raises(EngineError, match="no device"):
                await offers.offer(np.ones(4, dtype=np.float32))
        await offers.offer(np.ones(4, dtype=np.float32))
