"""Embeddings by NIXL, for real: two processes, one that dies, one that hangs, bytes that changed."""

import asyncio
import base64
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

np = pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

from forebay.events.media import Encoded  # noqa: E402 - NIXL first
from forebay.workers.kv_transfer.embeddings import EmbeddingOffers, Reader  # noqa: E402
from forebay.workers.kv_transfer.nixl_agent import TransferError, agent_name  # noqa: E402
from tests.workers.conftest import until  # noqa: E402
from tests.workers.nixl_peer import array  # noqa: E402
from tests.workers.other_process import PATIENCE_S, TIMEOUT_S, OtherProcess, running  # noqa: E402

pytestmark = pytest.mark.timeout(TIMEOUT_S)


class Peer(OtherProcess):
    """The other process."""

    async def offer(self, seed: int, rows: int) -> Encoded:
        return msgspec.msgpack.decode(base64.b64decode(await self.ask(f"offer {seed} {rows}")), type=Encoded)


@asynccontextmanager
async def peer(name: str) -> AsyncIterator[Peer]:
    async with running("tests.workers.nixl_peer", name) as process:
        yield Peer(process)


async def reader_of() -> Reader:
    return Reader(agent_name("reader", os.getpid()), read_s=PATIENCE_S)


async def test_nixl_arrays_arrive_whole_and_are_given_back() -> None:
    reader = await reader_of()
    async with peer("e@7") as other:
        for seed, rows in ((1, 1), (2, 40_000), (3, 300)):
            got = await reader.read(await other.offer(seed, rows))
            assert got.dtype == np.float32
            assert np.array_equal(got, array(seed, rows))
        offered = [await other.offer(seed, 500) for seed in range(20)]
        got_all = await asyncio.gather(*map(reader.read, offered))
        assert all(np.array_equal(got, array(seed, 500)) for seed, got in enumerate(got_all))
        async with asyncio.timeout(PATIENCE_S):
            while await other.ask("waiting") != "0":
                pass
    reader.close()


async def test_nixl_bytes_that_changed_are_told() -> None:
    reader = await reader_of()
    async with peer("e@8") as other:
        offered = await other.offer(1, 100)
        await other.ask("spoil")
        with pytest.raises(TransferError, match="ebd: the embeddings were freed before they were read"):
            await reader.read(offered)
        good = await other.offer(2, 100)
        assert np.array_equal(await reader.read(good), array(2, 100))
        wrong = msgspec.structs.replace(good, shape=(99, 16))
        with pytest.raises(TransferError, match="99 x 16 float32 does not have 6400 bytes"):
            await reader.read(wrong)
    reader.close()


async def test_nixl_a_peer_that_died_is_an_error_at_once_and_its_successor_is_read() -> None:
    reader = await reader_of()
    async with peer("e@9") as other:
        assert len(await reader.read(await other.offer(1, 100))) == 100
        offered = await other.offer(2, 100)
        other.signal(signal.SIGKILL)
        await other.process.wait()
        with pytest.raises(TransferError, match="e@9"):
            await reader.read(offered)
    async with peer("e@10") as other:
        assert np.array_equal(await reader.read(await other.offer(3, 10)), array(3, 10))
    async with peer("e@9") as other:
        assert np.array_equal(await reader.read(await other.offer(3, 10)), array(3, 10)), "the name may come again"
    reader.close()


async def test_nixl_a_peer_that_hangs_is_given_up_at_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # through shared memory the data move without their owner
    reader = await reader_of()
    async with peer("e@11") as hung, peer("e@12") as well:
        assert len(await reader.read(await hung.offer(1, 10))) == 10
        offered = [await hung.offer(seed, 100_000) for seed in (2, 3)]
        hung.signal(signal.SIGSTOP)
        reader._read_s = 4.0  # only for what is to miss it: on a busy machine a first read takes seconds
        with pytest.raises(TransferError, match="did not reply within"):
            await reader.read(offered[0])
        reader._read_s = PATIENCE_S
        with pytest.raises(TransferError, match="did not reply to an earlier read"):
            await reader.read(offered[1])
        assert np.array_equal(await reader.read(await well.offer(4, 10)), array(4, 10)), "others are still read"
        hung.signal(signal.SIGCONT)
    reader.close()


async def test_nixl_who_asked_may_leave_and_the_rest_goes_on() -> None:
    reader = await reader_of()
    async with peer("e@13") as other:
        asked = asyncio.ensure_future(reader.read(await other.offer(1, 300_000)))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert np.array_equal(await reader.read(await other.offer(2, 10)), array(2, 10))
        await until(lambda: not reader._tasks)
        async with asyncio.timeout(PATIENCE_S):
            while await other.ask("waiting") != "0":
                pass
    reader.close()


async def test_nixl_what_is_being_read_when_the_reader_is_closed_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # through shared memory the data move without their owner
    reader = await reader_of()
    async with peer("e@17") as other:
        await reader.read(await other.offer(1, 10))
        offered = await other.offer(2, 100_000)
        other.signal(signal.SIGSTOP)
        asked = asyncio.ensure_future(reader.read(offered))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        reader.close()
        other.signal(signal.SIGCONT)
        async with asyncio.timeout(PATIENCE_S):
            while await other.ask("waiting") != "0":
                pass


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"descriptor": b"no"}, "cannot decode the descriptor: Expected `object`, got `int`"),
        ({"dtype": "float99"}, "unsupported dtype float"),
        ({"dtype": "O"}, "unsupported dtype O"),
        ({"shape": (2,)}, "does not have"),
    ],
)
async def test_nixl_descriptors_are_checked_before_anybody_is_asked(change: dict[str, Any], text: str) -> None:
    offers, reader = EmbeddingOffers("e@14", arena_bytes=1 << 20), await reader_of()
    good = offers.offer(np.ones(4, dtype=np.float32))
    with pytest.raises(TransferError, match=text):
        await reader.read(msgspec.structs.replace(good, **change))
    reader.close()
    offers.close()


async def test_nixl_metadata_that_is_none_or_of_another_is_refused() -> None:
    offers, others, reader = (
        EmbeddingOffers("e@15", arena_bytes=1 << 20),
        EmbeddingOffers("f@15", arena_bytes=1 << 20),
        await reader_of(),
    )
    good, of_other = (one.offer(np.ones(4, dtype=np.float32)) for one in (offers, others))
    place, other_place = (msgspec.msgpack.decode(one.descriptor) for one in (good, of_other))
    outside = place["address"] + (1 << 20)
    for change, text in (
        ({"metadata": b"garbage"}, "NIXL cannot read from e@"),
        ({"metadata": other_place["metadata"]}, "belongs to f@15"),
        ({"address": outside}, "NIXL cannot read from e@"),
    ):
        bad = msgspec.structs.replace(good, descriptor=msgspec.msgpack.encode({**place, **change}))
        with pytest.raises(TransferError, match=text):
            await reader.read(bad)
    got = asyncio.ensure_future(reader.read(good))

    def polled() -> bool:
        offers.poll()
        return got.done()

    await until(polled)
    assert np.array_equal(await got, np.ones(4)), "one that lies does no harm to the others"
    for one in (reader, offers, others):
        one.close()


def test_nixl_what_nobody_fetches_is_given_back_and_the_room_is_bounded() -> None:
    now_s = 0.0
    offers = EmbeddingOffers("e@16", arena_bytes=1_000, lease_s=60.0, now_s=lambda: now_s)
    for _ in range(3):
        offers.offer(np.zeros(300, dtype=np.uint8))
    with pytest.raises(TransferError, match="bytes of embeddings:"):
        offers.offer(np.zeros(300, dtype=np.uint8))
    now_s = 59.0
    offers.offer(np.zeros(100, dtype=np.uint8))
    now_s = 60.0
    offers.poll()
    assert (offers.waiting, offers.expired) == (1, 3)
    offers.offer(np.zeros(900, dtype=np.uint8))
    with pytest.raises(TransferError, match="cannot offer 0 bytes of dtype uint8"):
        offers.offer(np.zeros(0, dtype=np.uint8))
    with pytest.raises(TransferError, match="cannot offer 16 bytes of dtype complex128"):
        offers.offer(np.zeros(1, dtype=np.complex128))
    offers.close()
