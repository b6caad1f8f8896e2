"""KV transfers by NIXL: content, freed offers and bounds."""

import asyncio
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("numpy", reason="numpy is not installed")
pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")

from forebay import runtime
from forebay.workers.kv_transfer import transport as kv_transport
from forebay.workers.kv_transfer.nixl_agent import TransferError
from tests.depth import examples
from tests.workers.conftest import until
from tests.workers.kv_transfer.conftest import BLOCK_BYTES, BLOCKS, have, other, transport
from tests.workers.kv_transfer.peer import prefilled
from tests.workers.other_process import TIMEOUT_S

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


async def test_nixl_two_readers_have_two_holders() -> None:
    async with (
        other("p@3") as one,
        other("q@3") as two,
        other("e@3") as far,
        transport("d@3") as (reader, _),
    ):
        for turn in range(3):
            mine = [await holder.offer(f"m{turn}", range(20)) for holder in (one, two)]
            theirs = [await holder.offer(f"t{turn}", range(20)) for holder in (one, two)]
            answers = await asyncio.gather(
                *(reader.fetch(offer, 0, range(30 * n, 30 * n + 20)) for n, offer in enumerate(mine)),
                far.fetch(theirs[0], range(20)),
            )
            assert await far.fetch(theirs[1], range(20, 40)) == answers[2] == "done"
            assert have(reader, range(20), range(20))
            assert have(reader, range(30, 50), range(20))
        for holder in (one, two):
            await holder.wait_freed("fetched", 6)


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


async def test_nixl_fetches_are_bounded_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        kv_transport.FetchLimiter.__init__, "__kwdefaults__", {"fetches_max": 3, "bytes_max": 6 * BLOCK_BYTES}
    )
    async with transport("p@6", blocks=256) as (holder, _), transport("d@6", blocks=256) as (reader, _):
        offers = [prefilled(holder, str(n), range(4 * n, 4 * n + 4)) for n in range(40)]
        most, order = [0, 0, 0], []

        async def fetch(number: int) -> None:
            await reader.fetch(offers[number], 0, range(4 * number, 4 * number + 4))
            order.append(number)

        def seen() -> bool:
            stats = reader.stats
            most[:] = map(max, most, (stats.in_flight, stats.in_flight_bytes, stats.waiting))
            return len(order) == 40

        tasks = [asyncio.create_task(fetch(number)) for number in range(40)]
        await until(seen)
        await asyncio.gather(*tasks)
        assert most[0] <= 3
        assert most[1] <= 6 * BLOCK_BYTES
        assert most[2] >= 30
        assert order == list(range(40)), "one at a time fits here, so they end in turn"
        assert (reader.stats.in_flight, reader.stats.in_flight_bytes, reader.stats.waiting) == (0, 0, 0)
        assert have(reader, range(160), range(160), seed=2)


@pytest.mark.usefixtures("by_socket")
async def test_nixl_slots_of_a_cancelled_fetch_are_not_written_to() -> None:
    size = 1 << 20
    async with (
        other("p@7", block_bytes=size) as holder,
        transport("d@7", block_bytes=size) as (reader, _),
    ):
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
