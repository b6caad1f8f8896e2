"""The parts that a transfer by NIXL or sockets has in common: room for fetches, and memory with spare slots."""

import asyncio
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

np = pytest.importorskip("numpy", reason="numpy is not installed")

from forebay.workers.engine import EngineError  # noqa: E402 - numpy first
from forebay.workers.kv_transfer import nixl_thread, offers  # noqa: E402
from forebay.workers.kv_transfer import transport as kv_transport  # noqa: E402
from forebay.workers.kv_transfer.api import FreeReason, Stats  # noqa: E402
from forebay.workers.kv_transfer.memory import Arena  # noqa: E402
from forebay.workers.kv_transfer.nixl_agent import TransferError  # noqa: E402
from forebay.workers.kv_transfer.transport import FetchLimiter, open_transport  # noqa: E402

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
    monkeypatch.setattr(offers, "asyncio", SimpleNamespace(get_running_loop=lambda: clock))
    arena = Arena(4, 64)
    held = offers.KvOffers(arena, Stats(), lambda name, why: freed.append((name, why)))
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
