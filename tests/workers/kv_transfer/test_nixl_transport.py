"""KV transfers by NIXL: content, freed offers and bounds; dead, hung and late holders and readers."""

import asyncio
import contextlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay import runtime
from forebay.events.transfer import Prefilled
from forebay.workers.kv_transfer import nixl_thread
from forebay.workers.kv_transfer import transport as kv_transport
from forebay.workers.kv_transfer.nixl_agent import TransferError
from tests.depth import examples
from tests.workers.conftest import until
from tests.workers.kv_transfer.conftest import BLOCK_BYTES, BLOCKS, have, other, transport, within
from tests.workers.kv_transfer.peer import prefilled, unpacked
from tests.workers.other_process import PATIENCE_S, TIMEOUT_S

pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

pytestmark = pytest.mark.timeout(TIMEOUT_S)


async def test_nixl_scattered_blocks_arrive_and_are_freed() -> None:
    async with other("p@1") as holder, transport("d@1") as (reader, _):
        blocks, into = [7, 3, 60, 4, 5, 0], [1, 50, 2, 49, 3, 63]
        fetched = await reader.fetch(await holder.offer("a", blocks), 0, into)
        assert (fetched.bytes, fetched.blocks, fetched.retries) == (6 * BLOCK_BYTES, 6, 0)
        assert have(reader, into, blocks)
        assert have(reader, [0, 4, 48], [0, 4, 48], seed=2), "nothing else was written to"
        await holder.wait_freed("fetched", 1)
        stats, _ = await holder.stats()
        assert (stats.offered, stats.held_offers, stats.held_blocks) == (1, 0, 0)
        assert (reader.stats.bytes, reader.stats.blocks, reader.stats.fetched) == (6 * BLOCK_BYTES, 6, 1)
        assert reader.stats.read_us >= fetched.us > 0


def test_nixl_any_list_of_blocks_arrives_from_any_index() -> None:
    lists = st.lists(st.integers(0, BLOCKS - 1), min_size=1, max_size=BLOCKS, unique=True)
    with asyncio.Runner() as runner:
        holding, reading = transport("p@2", blocks=BLOCKS), transport("d@2", blocks=BLOCKS)
        holder, freed = runner.run(holding.__aenter__())
        reader, _ = runner.run(reading.__aenter__())

        async def move(blocks: list[int], into: list[int], first: int, checksum: bool) -> None:
            for block in range(BLOCKS):
                reader.memory.view(block)[:] = 0
            freed.clear()
            offer = prefilled(holder, "a", blocks, checksum=checksum)
            await reader.fetch(offer, first, into[: len(blocks) - first])
            assert have(reader, into[: len(blocks) - first], blocks[first:], seed=2)
            untouched = set(range(BLOCKS)) - set(into[: len(blocks) - first])
            assert not any(reader.memory.view(block).any() for block in untouched)
            await until(lambda: freed == [("a", "fetched")])

        @examples(0.6)
        @given(lists, st.permutations(range(BLOCKS)), st.integers(0, BLOCKS), st.booleans())
        def any_list(blocks: list[int], into: list[int], first: int, checksum: bool) -> None:
            runner.run(move(blocks, into, min(first, len(blocks)), checksum))

        any_list()
        runner.run(reading.__aexit__(None, None, None))
        runner.run(holding.__aexit__(None, None, None))


async def test_nixl_corrupt_block_is_read_again_and_counted() -> None:
    async with other("p@4") as holder, transport("d@4") as (reader, _):
        offer = await holder.offer("a", [3, 4, 5], checksum=True)
        await holder.ask("spoil 4")
        with pytest.raises(TransferError, match="1 blocks of p@4 still have wrong checksums") as caught:
            await reader.fetch(offer, 0, [0, 1, 2])
        assert caught.value.reason == "corrupt"
        assert (reader.stats.corrupt, reader.stats.retries, reader.stats.failed) == (3, 2, {"corrupt": 1})
        assert (await holder.stats())[0].held_offers == 1, "it may be fetched once more"
        fetched = await reader.fetch(offer, 2, [9])
        assert fetched.retries == 0, "the part that is well is had"
        assert have(reader, [9], [5])


async def test_nixl_transient_corruption_costs_one_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    async with transport("p@5") as (holder, freed), transport("d@5") as (reader, _):
        offload = runtime.offload
        requested: list[int] = []

        async def flip_once(check: Any, slots: Any, sums: Any) -> Any:
            if not requested:
                reader.memory.view(1)[0] ^= 1  # as if a bit had flipped on the way
            requested.append(len(sums))
            return await offload(check, slots, sums)

        monkeypatch.setattr(runtime, "offload", flip_once)
        fetched = await reader.fetch(prefilled(holder, "a", [5, 6, 7], checksum=True), 0, [0, 1, 2])
        assert (fetched.retries, requested) == (1, [3, 1]), "only what was wrong is read again"
        assert have(reader, [0, 1, 2], [5, 6, 7], seed=2)
        await until(lambda: freed == [("a", "fetched")])


@pytest.mark.usefixtures("by_socket")
async def test_nixl_slots_of_a_cancelled_fetch_are_not_written_to() -> None:
    size = 1 << 20
    async with other("p@7", block_bytes=size) as holder, transport("d@7", block_bytes=size) as (reader, _):
        await reader.fetch(await holder.offer("connects", [0]), 0, [0])
        offer = await holder.offer("a", range(64))
        holder.signal(signal.SIGSTOP)  # the fetch cannot end before it is cancelled
        requested = asyncio.create_task(reader.fetch(offer, 0, range(64)))
        await until(lambda: reader.stats.in_flight)
        requested.cancel()
        with pytest.raises(asyncio.CancelledError):
            await requested
        for block in range(64):
            reader.memory.view(block)[:] = 0x55
        holder.signal(signal.SIGCONT)
        await until(lambda: not reader.stats.quarantined_blocks)
        assert all((reader.memory.view(block) == 0x55).all() for block in range(64))
        assert reader.stats.cancelled == 1
        await reader.fetch(offer, 0, range(64))
        assert have(reader, range(64), range(64)), "it was still held"


async def test_nixl_holder_is_notified_of_a_dropped_offer() -> None:
    async with transport("p@8") as (holder, freed), transport("d@8") as (reader, _):
        dropped, kept = prefilled(holder, "a", [1]), prefilled(holder, "b", [2])
        reader.drop(dropped)
        await until(lambda: freed == [("a", "released")])
        assert holder.release("b")
        assert not holder.release("b")
        with pytest.raises(TransferError, match="p@8 no longer holds these blocks") as caught:
            await reader.fetch(kept, 0, [0])
        assert caught.value.reason == "expired"
        assert holder.stats.freed == {"released": 2}


async def test_nixl_offers_are_checked_and_bounded() -> None:
    async with transport("p@9", blocks=8) as (holder, freed):
        holder.offer("a", [1, 2])
        for request_id, blocks, text in (
            ("a", [3], "blocks of a are already offered"),
            ("b", [], "b has no blocks to offer"),
            ("b", [8], "this worker has blocks 0 to 7"),
            ("b", [-1], "this worker has blocks 0 to 7"),
            ("b", [0] * 70_000, "70000 blocks do not fit into a descriptor"),
        ):
            with pytest.raises(TransferError, match=text):
                holder.offer(request_id, blocks)
        for number in range(4095):
            holder.offer(f"n{number}", [number % 8])
        with pytest.raises(TransferError, match="4096 offers are already waiting"):
            holder.offer("b", [1])
        assert holder.release("a")
        holder.offer("b", [1])
        assert (holder.stats.held_offers, holder.stats.held_blocks) == (4096, 4096)
        assert freed == [("a", "released")]
        for block in (-1, 8):
            with pytest.raises(IndexError):
                holder.memory.view(block)


async def test_nixl_closed_transport_has_freed_its_offers() -> None:
    async with transport("p@10") as (holder, freed), transport("d@10") as (reader, _):
        offer = prefilled(holder, "a", [1])
        await holder.close()
        assert freed == [("a", "released")]
        with pytest.raises(TransferError, match="p@10"):
            await reader.fetch(offer, 0, [0])
        with pytest.raises(TransferError, match="the transport is closed"):
            holder.offer("b", [1])
        await reader.close()
        with pytest.raises(TransferError, match="the transport is closed") as caught:
            await reader.fetch(offer, 0, [0])
        assert caught.value.reason == "closed"
        reader.drop(offer)


LARGE = 1 << 20  # of a block: more than the kernel keeps for a socket
HANG_S = 4.0  # until a holder that was stopped is given up; the read from it has begun by then

pytestmark = pytest.mark.timeout(TIMEOUT_S)


async def test_nixl_dead_holder_fails_at_once_and_its_next_epoch_is_read() -> None:
    async with transport("d@1") as (reader, _):
        async with other("p@1") as holder:
            await reader.fetch(await holder.offer("a", [1]), 0, [0])
            offer = await holder.offer("b", [2])
            await holder.kill()
            for _ in range(2):
                with pytest.raises(TransferError, match="p@1") as caught:
                    await reader.fetch(offer, 0, [0])
                assert caught.value.reason == "gone"
        async with other("p@2") as holder:
            await reader.fetch(await holder.offer("c", [3]), 0, [5])
            assert have(reader, [5], [3])
            with pytest.raises(TransferError, match="p@1"):
                await reader.fetch(offer, 0, [0])
        assert (reader.stats.fetched, reader.stats.failed) == (2, {"gone": 3})
        assert reader.stats.quarantined_blocks == 0


@pytest.mark.usefixtures("by_socket")
async def test_nixl_holder_that_dies_during_a_read_fails_before_the_deadline() -> None:
    async with (
        transport("d@4", block_bytes=LARGE, fetch_s=600.0) as (reader, _),
        other("p@4", block_bytes=LARGE) as holder,
    ):
        await reader.fetch(await holder.offer("a", [1]), 0, [0])
        offer = await holder.offer("b", range(64))
        holder.signal(signal.SIGSTOP)
        requested = asyncio.create_task(reader.fetch(offer, 0, range(64)))
        await until(lambda: reader.stats.in_flight)
        await holder.kill()
        with pytest.raises(TransferError, match="p@4") as caught:
            await requested
        assert caught.value.reason == "gone"
        assert (reader.stats.in_flight, reader.stats.quarantined_blocks) == (0, 0)


@pytest.mark.slow
@pytest.mark.usefixtures("by_socket")
async def test_nixl_hung_holder_misses_the_deadline_and_its_slots_are_quarantined() -> None:
    async with (
        transport("d@5", block_bytes=LARGE) as (reader, _),
        other("p@5", block_bytes=LARGE) as hung,
        other("q@5", block_bytes=LARGE) as well,
    ):
        await reader.fetch(await hung.offer("a", [1]), 0, [0])
        offers = [await hung.offer(name, range(32)) for name in ("b", "c")]
        hung.signal(signal.SIGSTOP)
        within(reader, HANG_S)
        with pytest.raises(TransferError, match=f"the blocks of p@5 did not arrive within {HANG_S:g} s") as caught:
            await reader.fetch(offers[0], 0, range(32))
        within(reader, PATIENCE_S)
        assert caught.value.reason == "deadline"
        owed = reader.stats.quarantined_blocks
        assert owed == 32
        if owed:
            with pytest.raises(TransferError, match="p@5 did not reply to an earlier read"):
                await reader.fetch(offers[1], 0, range(32))
        for block in range(32):
            reader.memory.view(block)[:] = 0x55
        await reader.fetch(await well.offer("d", [7]), 0, [40])
        assert have(reader, [40], [7]), "others are still read"
        hung.signal(signal.SIGCONT)
        await until(lambda: not reader.stats.quarantined_blocks)
        assert all((reader.memory.view(block) == 0x55).all() for block in range(32)), "late bytes went elsewhere"
        await reader.fetch(offers[1], 0, range(32))
        assert have(reader, range(32), range(32)), "it has come back"


async def test_nixl_timeout_in_the_queue_does_not_silence_the_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transport.FetchLimiter.__init__, "__kwdefaults__", {"fetches_max": 0, "bytes_max": 0})
    limiters: list[kv_transport.FetchLimiter] = []

    class RecordedLimiter(kv_transport.FetchLimiter):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            limiters.append(self)

    monkeypatch.setattr("forebay.workers.kv_transfer.transport.FetchLimiter", RecordedLimiter)
    async with transport("p@13") as (holder, _), transport("d@13") as (reader, _):
        await reader.fetch(prefilled(holder, "a", [1]), 0, [0])
        limiter = limiters[-1]  # of the reader
        await limiter.enter(1)
        within(reader, 0.2)
        with pytest.raises(TransferError, match="the blocks of p@13 did not arrive"):
            await reader.fetch(prefilled(holder, "b", [2]), 0, [0])
        within(reader, PATIENCE_S)
        limiter.leave(1)
        assert (reader.stats.quarantined_blocks, reader.stats.waiting) == (0, 0)
        await reader.fetch(prefilled(holder, "c", [3]), 0, [0])
        assert have(reader, [0], [3], seed=2)


async def test_nixl_hung_connection_is_replaced_while_the_holder_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    real, hangs = nixl_thread.transfer, threading.Event()
    hung: list[object] = []

    def transfer(agent: Any, *lists: Any) -> Iterator[None]:
        """As of NIXL, but the first agent finishes none of its transfers while they hang."""
        hung.append(agent)
        while agent is hung[0] and hangs.is_set():
            yield
        yield from real(agent, *lists)

    monkeypatch.setattr(nixl_thread, "transfer", transfer)
    async with transport("d@15") as (reader, _), other("p@15") as holder:
        hangs.set()
        within(reader, HANG_S)
        with pytest.raises(TransferError, match="did not arrive"):
            await reader.fetch(await holder.offer("a", [1]), 0, [0])
        within(reader, PATIENCE_S)
        offer = await holder.offer("b", [5])
        while not have(reader, [3], [5]):
            with contextlib.suppress(TransferError):  # the new connection is still being tried
                await reader.fetch(offer, 0, [3])
        assert reader.stats.quarantined_blocks == 1
        hangs.clear()
        await until(lambda: not reader.stats.quarantined_blocks)
        await reader.fetch(await holder.offer("c", [6]), 0, [4])
        assert have(reader, [4], [6])


@pytest.mark.usefixtures("by_socket")
async def test_nixl_a_transport_closes_while_a_holder_hangs() -> None:
    async with transport("d@6", block_bytes=LARGE) as (reader, _), other("p@6", block_bytes=LARGE) as hung:
        await reader.fetch(await hung.offer("a", [1]), 0, [0])
        offer = await hung.offer("b", range(32))
        hung.signal(signal.SIGSTOP)
        requested = asyncio.create_task(reader.fetch(offer, 0, range(32)))
        await until(lambda: reader.stats.in_flight)
        await reader.close()
        with pytest.raises(TransferError, match="the transport is closed") as caught:
            await requested
        assert caught.value.reason == "closed"


async def test_nixl_unfetched_offer_is_freed_when_its_lease_ends() -> None:
    async with transport("p@7", lease_s=0.05) as (holder, freed), transport("d@7") as (reader, _):
        offer = prefilled(holder, "a", [1])
        holder.offer("b", [2])
        await until(lambda: len(freed) == 2)
        assert freed == [("a", "expired"), ("b", "expired")]
        assert (holder.stats.held_offers, holder.stats.freed) == (0, {"expired": 2})
        with pytest.raises(TransferError, match="p@7 no longer holds these blocks") as caught:
            await reader.fetch(offer, 0, [0])
        assert caught.value.reason == "expired"
        reader.drop(offer)
        await until(lambda: not holder.stats.held_offers)
        holder.offer("c", [1])
        await until(lambda: len(freed) == 3)


@pytest.mark.parametrize("block_bytes", [64 << 10, 1 << 20])
async def test_nixl_reused_blocks_are_never_accepted(block_bytes: int) -> None:
    """Leases end close to the end of a read, and the holder overwrites freed blocks at once, as an engine would."""
    failed = fetched = 0
    lease_s = 0.004
    async with (
        other("p@9", block_bytes=block_bytes, blocks=16) as holder,
        transport("d@9", block_bytes=block_bytes, blocks=16) as (reader, _),
    ):
        for version in range(1, 200):
            offer = unpacked(await holder.ask(f"race {version} {lease_s}"), Prefilled)
            try:
                await reader.fetch(offer, 0, range(16))
            except TransferError as error:
                assert error.reason == "expired"
                failed += 1
                lease_s *= 1.3
            else:
                fetched += 1
                lease_s = max(lease_s / 1.3, 1e-6)
                assert all((reader.memory.view(block) == version).all() for block in range(16))
            if min(failed, fetched) >= 10:
                break
        assert failed + fetched == reader.stats.failed.get("expired", 0) + reader.stats.fetched
        assert min(failed, fetched) >= 10, "the race was not driven"


async def test_nixl_lease_that_ends_during_a_read_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    async with transport("p@10") as (holder, _), transport("d@10") as (reader, _):
        offer = prefilled(holder, "a", [1])
        posted: list[int] = []
        honest, loop = nixl_thread.transfer, asyncio.get_running_loop()

        def late(*lists: Any) -> Any:
            if posted:  # the word comes after the data
                done = asyncio.run_coroutine_threadsafe(release(), loop)
                done.result()
            posted.append(len(lists[2]))
            yield from honest(*lists)

        async def release() -> None:
            assert holder.release("a")
            holder.memory.view(1)[:] = 0xEE

        monkeypatch.setattr(nixl_thread, "transfer", late)
        with pytest.raises(TransferError, match="p@10 no longer holds these blocks"):
            await reader.fetch(offer, 0, [0])
        assert posted == [1, 1]


async def test_nixl_repeated_target_slots_are_refused() -> None:
    async with transport("p@12") as (holder, _), transport("d@12") as (reader, _):
        offer = prefilled(holder, "a", [1, 2])
        for first, into, text in (
            (0, [3, 3], "same slot for two blocks"),
            (0, [3], "p@12 offers 2 blocks; to read from block 0 on, 1 target blocks are the wrong number"),
            (3, [], "p@12 offers 2 blocks; to read from block 3 on"),
            (-1, [1, 2, 3], "p@12 offers 2 blocks; to read from block -1 on"),
            (0, [3, 64], "this worker has blocks 0 to 63"),
        ):
            with pytest.raises(TransferError, match=text) as caught:
                await reader.fetch(offer, first, into)
            assert caught.value.reason == "refused"
        with pytest.raises(TransferError, match="the descriptor is of p@12, expected one of q"):
            await reader.fetch(msgspec.structs.replace(offer, worker_id="q"), 0, [1, 2])
        assert holder.stats.held_blocks * BLOCK_BYTES == 2 * BLOCK_BYTES


OPEN_AT_ITS_END = """
import asyncio, atexit, threading
atexit.register(lambda: print([thread.name for thread in threading.enumerate() if thread.name.startswith("nixl")]))
from forebay.workers.kv_transfer.transport import open_transport

async def opened():
    transport = await open_transport(name="w@1", block_bytes=8, blocks=1, on_free=lambda *_: None)
    transport.offer("r", [0], checksum=False)  # a holder of offers polls
    print([thread.name for thread in threading.enumerate() if thread.name.startswith("nixl")])

asyncio.run(opened())
"""


def test_nixl_thread_ends_before_the_interpreter() -> None:
    """A thread that is within NIXL by then aborts the process: "terminate called without an active exception"."""
    run = subprocess.run(
        [sys.executable, "-c", OPEN_AT_ITS_END], capture_output=True, text=True, check=False, timeout=PATIENCE_S
    )
    assert (run.returncode, run.stdout) == (0, "['nixl w@1']\n[]\n"), run.stderr


@pytest.mark.slow
async def test_nixl_spare_slots_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    async with (
        transport("d@11", block_bytes=LARGE, blocks=32) as (reader, _),
        other("p@11", block_bytes=LARGE) as hung,
        other("q@11", block_bytes=LARGE) as well,
    ):
        await reader.fetch(await hung.offer("a", [1]), 0, [0])
        offer = await hung.offer("b", range(24))
        hung.signal(signal.SIGSTOP)
        within(reader, HANG_S)
        with pytest.raises(TransferError, match="did not arrive"):
            await reader.fetch(offer, 0, range(24))
        within(reader, PATIENCE_S)
        fits, too_many = await well.offer("c", range(8)), await well.offer("d", range(9))
        with pytest.raises(TransferError, match="24 blocks are quarantined for transfers that do not end") as caught:
            await reader.fetch(too_many, 0, range(9))
        assert caught.value.reason == "full"
        await reader.fetch(fits, 0, range(8))
        assert have(reader, range(8), range(8))
        hung.signal(signal.SIGKILL)
        await until(lambda: not reader.stats.quarantined_blocks)
        await reader.fetch(too_many, 0, range(9))
        assert have(reader, range(9), range(9)), "the dead write no more: there is room again"
