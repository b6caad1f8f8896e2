"""Parts of a transfer by NIXL: room for fetches, memory with spare slots, and damaged or foreign descriptors."""

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_digest, xxh3_64_intdigest

from forebay.events.base import hex_digest, pack_u32, pack_u64
from forebay.events.transfer import Prefilled
from forebay.workers.engine import EngineError
from forebay.workers.kv_transfer import memory, nixl_thread
from forebay.workers.kv_transfer import transport as kv_transport
from forebay.workers.kv_transfer.api import FreeReason, Stats
from forebay.workers.kv_transfer.descriptor import BlockLocation, decode_location, encode_location, slots_of
from forebay.workers.kv_transfer.memory import Arena
from forebay.workers.kv_transfer.nixl_agent import TransferError, open_agent
from forebay.workers.kv_transfer.nixl_thread import DROPPED, notify
from forebay.workers.kv_transfer.transport import FetchLimiter, open_transport
from tests.workers.conftest import until
from tests.workers.kv_transfer.conftest import BLOCK_BYTES, have, transport
from tests.workers.kv_transfer.peer import prefilled

pytest.importorskip("nixl_cu12", reason="NIXL (nixl-cu12) is not installed")


FETCHES, BYTES = 3, 100


@given(st.lists(st.tuples(st.sampled_from(["enter", "leave", "cancel"]), st.integers(0, 150)), max_size=60))
def test_nixl_fetch_limiter_is_bounded_fair_and_leaks_nothing(acts: list[tuple[str, int]]) -> None:
    async def run() -> None:
        stats = Stats()
        room = FetchLimiter(stats, fetches_max=FETCHES, bytes_max=BYTES)
        inside: list[tuple[int, int]] = []
        waiting: deque[tuple[int, asyncio.Task[None]]] = deque()

        async def enter(number: int, size: int) -> None:
            await room.enter(size)
            inside.append((number, size))

        for number, (act, value) in enumerate(acts):
            if act == "enter":
                waiting.append((number, asyncio.create_task(enter(number, value))))
            elif act == "leave" and inside:
                room.leave(inside.pop(value % len(inside))[1])
            elif act == "cancel" and waiting:
                waiting[value % len(waiting)][1].cancel()
                if value % 2 and inside:  # its turn may come before it hears of that
                    room.leave(inside.pop()[1])
            for _ in range(4):
                await asyncio.sleep(0)
            waiting = deque((n, task) for n, task in waiting if not task.done())
            assert stats.in_flight == len(inside) <= FETCHES
            assert stats.in_flight_bytes == sum(size for _, size in inside)
            assert stats.in_flight_bytes <= BYTES or len(inside) == 1, "a large one goes alone"
            assert stats.waiting == len(waiting)
            assert inside or not waiting
            assert not waiting or all(n < waiting[0][0] for n, _ in inside), "first come, first served"
        while inside:
            room.leave(inside.pop()[1])
            for _ in range(4):
                await asyncio.sleep(0)
        assert (stats.in_flight, stats.in_flight_bytes, stats.waiting) == (0, 0, 0)

    asyncio.run(run())


async def test_nixl_too_many_waiting_fetches_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_transport, "WAITING_MAX", 2)
    room = FetchLimiter(Stats(), fetches_max=1)
    await room.enter(1)
    tasks = [asyncio.create_task(room.enter(1)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(TransferError, match="2 fetches are already waiting") as caught:
        await room.enter(1)
    assert caught.value.reason == "full"
    for task in tasks:
        room.leave(1)
        await task


@given(st.data())
def test_nixl_no_two_blocks_ever_share_memory(data: st.DataObject) -> None:
    blocks = data.draw(st.integers(1, 12))
    arena = Arena(blocks, 16)
    apart: list[Any] = []
    for number in range(data.draw(st.integers(0, 20))):
        chosen = arena.numbers(
            data.draw(st.lists(st.integers(0, blocks - 1), min_size=1, max_size=blocks, unique=True))
        )
        try:
            arena.reserve(len(chosen))
        except TransferError as error:
            assert error.reason == "full"
            assert sum(map(len, apart)) + len(chosen) > blocks
            if apart:
                arena.restore_spares(apart.pop(0))
            continue
        apart.append(arena.quarantine(chosen))
        arena.unreserve(len(chosen))
        slots = [*arena.slots_of(arena.numbers(range(blocks))).tolist(), *(s for kept in apart for s in kept.tolist())]
        assert len(slots) == len(set(slots))
        for block in range(blocks):
            arena.view(block)[:] = number
        assert all((arena.view(block) == number).all() for block in range(blocks))


@pytest.mark.parametrize(("blocks", "block_bytes"), [(0, 16), (1, 0), (1 << 20, 1), (1 << 19, 1 << 45)])
async def test_nixl_invalid_memory_sizes_are_rejected_at_the_start(blocks: int, block_bytes: int) -> None:
    with pytest.raises(EngineError, match=f"{blocks}|{2 * blocks} KV blocks of {block_bytes} bytes"):
        await open_transport(name="p@1", blocks=blocks, block_bytes=block_bytes, on_free=lambda *_: None)


async def test_nixl_missing_package_is_reported_without_a_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "nixl_cu12", None)
    with pytest.raises(EngineError, match="pip install --no-deps nixl-cu12"):
        await open_transport(name="p@1", blocks=1, block_bytes=16, on_free=lambda *_: None)


async def test_nixl_failed_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str, interface: str) -> None:
        raise RuntimeError(f"no device for {name}")

    monkeypatch.setattr(nixl_thread, "open_agent", broken)
    with pytest.raises(EngineError, match="cannot start NIXL: no device for p@1"):
        await open_transport(name="p@1", blocks=1, block_bytes=16, on_free=lambda *_: None)


class Clock:
    """Event loop with a manual clock, for leases."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._due: list[tuple[float, Callable[[], None]]] = []

    def time(self) -> float:
        return self.now_s

    def call_at(self, when_s: float, act: Callable[[], None]) -> SimpleNamespace:
        entry = (when_s, act)
        self._due.append(entry)
        return SimpleNamespace(cancel=lambda: self._due.remove(entry))

    def until(self, now_s: float) -> None:
        self.now_s = now_s
        due = [entry for entry in self._due if entry[0] <= now_s]
        self._due = [entry for entry in self._due if entry not in due]
        for _, act in due:
            act()


def test_nixl_each_lease_ends_at_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    freed: list[tuple[str, FreeReason]] = []
    monkeypatch.setattr(memory, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    arena = Arena(4, 64)
    held = memory.KvOffers(arena, Stats(), lambda name, why: freed.append((name, why)))
    for number, name in enumerate("abc"):
        clock.until(number * 0.4)
        held.add(name, [number], lease_s=1.0, agent="p@1", route=b"x", checksum=False)
    for now_s, gone in ((0.99, 0), (1.0, 1), (1.39, 1), (1.4, 2), (1.79, 2)):
        clock.until(now_s)
        assert freed == [(name, "expired") for name in "abc"[:gone]]
        assert int((arena.words != 0).sum()) == len(held) == 3 - gone
    assert held.release("c")
    clock.until(9.0)
    assert freed[-1] == ("c", "released")
    assert not arena.words.any()


SUMS = pack_u64([11, 22, 33])
PLACE = BlockLocation(
    agent="p@7",
    route=b"somewhere",
    address=1 << 40,
    slots=64,
    block_bytes=BLOCK_BYTES,
    blocks=pack_u32([5, 1, 63]),
    word=3,
    generation=77,
    sums=SUMS,
)


def offered(place: BlockLocation = PLACE, **changes: Any) -> Prefilled:
    generated: dict[str, Any] = {
        "worker_id": "p",
        "worker_epoch": 7,
        "model": "m",
        "connector": "nixl",
        "descriptor": encode_location(place),
        "tokens": 3,
        "lease_us": 1,
        "checksum": hex_digest(xxh3_64_intdigest(SUMS)),
        **changes,
    }
    return Prefilled(**generated)


def changed(**changes: Any) -> Prefilled:
    return offered(msgspec.structs.replace(PLACE, **changes))


def test_nixl_descriptor_decodes_to_the_offer() -> None:
    place = decode_location(offered(), BLOCK_BYTES)
    assert place == PLACE
    assert slots_of(place).tolist() == [5, 1, 63]
    assert place.count == 3


@given(st.integers(0), st.integers(1, 255))
def test_nixl_descriptor_with_a_flipped_bit_is_refused(where: int, mask: int) -> None:
    descriptor = bytearray(offered().descriptor)
    descriptor[where % len(descriptor)] ^= mask
    with pytest.raises(TransferError, match="the descriptor of p is damaged") as caught:
        decode_location(offered(descriptor=bytes(descriptor)), BLOCK_BYTES)
    assert caught.value.reason == "refused"


@given(st.binary(max_size=200))
def test_nixl_garbage_is_refused_with_and_without_a_checksum(garbage: bytes) -> None:
    for descriptor in (garbage, garbage + xxh3_64_digest(garbage)):
        with pytest.raises(TransferError, match=r"the descriptor of p( is damaged|: )"):
            decode_location(offered(descriptor=descriptor), BLOCK_BYTES)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (offered(connector="tcp"), "p transfers KV by tcp, this worker by nixl"),
        (offered(worker_id="q"), "the descriptor is of p@7, expected one of q"),
        (offered(checksum="0" * 16), "the checksums of p@7 do not match 0000000000000000"),
        (changed(sums=b""), "p@7 offers 3 blocks but 0 checksums"),
        (changed(sums=SUMS[:16]), "p@7 offers 3 blocks but 2 checksums"),
        (changed(block_bytes=512), "a block of p@7 has 512 bytes, a block of this worker 4096"),
        (changed(blocks=b""), "p@7 offers an invalid list of blocks"),
        (changed(blocks=b"12345"), "p@7 offers an invalid list of blocks"),
        (changed(blocks=pack_u32([5, 1, 64])), "p@7 offers a block beyond its 64 slots"),
        (changed(blocks=pack_u32([5, 1, (1 << 32) - 1])), "p@7 offers a block beyond its 64 slots"),
        (changed(address=(1 << 63) - 1), "p@7 has impossible memory: 64 blocks of 4096 bytes at"),
        (changed(slots=1 << 30), "cannot decode the descriptor of p: "),
        (changed(word=4096), "cannot decode the descriptor of p: "),
        (changed(generation=0), "cannot decode the descriptor of p: "),
        (changed(agent=""), "cannot decode the descriptor of p: "),
        (changed(route=b""), "cannot decode the descriptor of p: "),
    ],
)
def test_nixl_impossible_descriptors_are_refused_locally(bad: Prefilled, text: str) -> None:
    with pytest.raises(TransferError, match=text) as caught:
        decode_location(bad, BLOCK_BYTES)
    assert caught.value.reason == "refused"


async def test_nixl_forged_location_is_an_error_and_the_next_fetch_succeeds() -> None:
    async with transport("p@1") as (holder, freed), transport("d@1") as (reader, _), transport("f@1") as (stranger, _):
        good, strange = prefilled(holder, "a", [1, 2]), prefilled(stranger, "a", [1])
        place, their_place = (decode_location(one, BLOCK_BYTES) for one in (good, strange))
        for reason, changes in (
            ("refused", {"route": b"garbage"}),
            ("refused", {"route": their_place.route}),
            ("refused", {"address": place.address + (1 << 30)}),
            ("refused", {"slots": place.slots * 2}),
            ("expired", {"word": place.word - 1}),
            ("expired", {"generation": place.generation ^ 1}),
        ):
            descriptor = encode_location(msgspec.structs.replace(place, **changes))
            with pytest.raises(TransferError, match="p@1") as caught:
                await reader.fetch(msgspec.structs.replace(good, descriptor=descriptor), 0, [0, 3])
            assert caught.value.reason == reason
        assert reader.stats.failed == {"refused": 4, "expired": 2}
        assert freed == []
        await reader.fetch(good, 0, [0, 3])
        assert have(reader, [0, 3], [1, 2], seed=2)
        await until(lambda: freed == [("a", "fetched")])


async def test_nixl_a_worker_does_not_fetch_from_itself() -> None:
    async with transport("p@3") as (holder, _):
        with pytest.raises(TransferError, match="the blocks belong to p@3 itself"):
            await holder.fetch(prefilled(holder, "a", [1]), 0, [2])


async def test_nixl_invalid_notifications_are_ignored() -> None:
    async with transport("p@4") as (holder, freed):
        place = decode_location(prefilled(holder, "a", [1]), BLOCK_BYTES)
        agent = open_agent("x@4")
        agent.add_remote_agent(place.route)
        for text in ("", "f", "x1", "f-1", "f1e9", "f٣", "f" + "9" * 1000, "f99"):
            agent.send_notif(place.agent, text.encode())
        notify(agent, place, DROPPED)
        await until(lambda: agent.get_new_notifs() or freed)
        assert freed == [("a", "released")]
        agent.remove_remote_agent(place.agent)


async def test_nixl_least_recently_used_holder_is_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nixl_thread, "PEERS_MAX", 2)
    removed: list[str] = []

    class RecordedPeers(nixl_thread.Peers):
        def forget(self, peer: nixl_thread.Peer) -> None:
            removed.append(peer.name)
            super().forget(peer)

    monkeypatch.setattr(nixl_thread, "Peers", RecordedPeers)
    async with (
        transport("d@5") as (reader, _),
        transport("p@5") as (p, _),
        transport("q@5") as (q, _),
        transport("r@5") as (r, _),
    ):
        for turn, holder in enumerate((p, q, p, r, q, p, r)):
            await reader.fetch(prefilled(holder, f"a{turn}", [turn + 9]), 0, [0])
            assert have(reader, [0], [turn + 9], seed=2)
        assert removed == ["q@5", "p@5", "r@5", "q@5"]
