"""Slots of host memory are reused only after the last transfer that reads them."""

from forebay.workers.kv_tiers.transfers import HostMemory
from tests.workers.kv_tiers.store_cases import BLOCK_BYTES, content, name_of


def test_a_block_keeps_its_bytes() -> None:
    memory = HostMemory(3, BLOCK_BYTES)
    slots = memory.reserve(3)
    for at, slot in enumerate(slots):
        memory.copy_in(slot, memoryview(content(at)))
        memory.put(name_of(at), slot)
    target = bytearray(BLOCK_BYTES)
    for at, slot in enumerate(memory.acquire([name_of(number) for number in range(3)])):
        memory.copy_out(slot, memoryview(target))
        assert target == memory.view(slot) == content(at)


def test_a_slot_is_free_after_its_last_use() -> None:
    memory = HostMemory(2, BLOCK_BYTES)
    first, second = memory.reserve(2)
    memory.put(name_of(1), first)
    memory.give_back(second)
    assert memory.acquire([name_of(1)]) == memory.acquire([name_of(1)]) == [first]
    memory.remove([name_of(1), name_of(9)])
    assert memory.reserve(1) == [second]
    memory.give_back(second)
    memory.release([first])
    assert memory.reserve(1) == [second]
    memory.release([first])
    assert memory.reserve(1) == [first]


def test_a_slot_that_is_not_used_is_free_at_once() -> None:
    memory = HostMemory(1, BLOCK_BYTES)
    (slot,) = memory.reserve(1)
    memory.put(name_of(1), slot)
    memory.release(memory.acquire([name_of(1)]))
    memory.remove([name_of(1)])
    assert memory.reserve(1) == [slot]
