"""Host memory for KV blocks, in slots of one block each."""

from collections.abc import Iterable, Sequence
from typing import Any

from forebay.workers.engine import PackageMissing
from forebay.workers.kv_tiers.identity import BlockName


class HostMemory:
    """Slots of host memory, and the blocks in them. The operating system provides the memory when it is first used.

    Methods that change slots are called by one thread; copies may run on other threads at the same time.

    Args:
        block_bytes: bytes per block.

    Raises:
        PackageMissing: numpy is not installed.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        try:
            import numpy  # noqa: PLC0415 - an extra
        except ImportError:
            raise PackageMissing("a host tier needs numpy: pip install forebay[kv-tiers]") from None
        self._numpy = numpy
        self._memory: Any = numpy.empty((blocks, block_bytes), numpy.uint8)
        self._free = list(range(blocks - 1, -1, -1))
        self._slots: dict[BlockName, int] = {}
        self._uses: dict[int, int] = {}  # by slot: transfers that read it
        self._removed: set[int] = set()  # slots that become free when no transfer reads them any more

    def reserve(self, count: int) -> list[int]:
        """Take free slots. The caller must know that there are enough."""
        assert count <= len(self._free), "the tier manager reserves room before a write"
        return [self._free.pop() for _ in range(count)]

    def put(self, name: BlockName, slot: int) -> None:
        """Record that a reserved slot contains a block."""
        self._slots[name] = slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def remove(self, names: Iterable[BlockName]) -> None:
        """Remove blocks. Slots that transfers read become free afterwards. Unknown blocks are ignored."""
        for name in names:
            slot = self._slots.pop(name, None)
            if slot is None:
                continue
            if slot in self._uses:
                self._removed.add(slot)
            else:
                self._free.append(slot)

    def acquire(self, names: Sequence[BlockName]) -> list[int]:
        """Return the slots of blocks, and keep them in place until `release`."""
        slots = [self._slots[name] for name in names]
        for slot in slots:
            self._uses[slot] = self._uses.get(slot, 0) + 1
        return slots

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self._uses[slot] > 1:
                self._uses[slot] -= 1
                continue
            del self._uses[slot]
            if slot in self._removed:
                self._removed.discard(slot)
                self._free.append(slot)

    def view(self, slot: int) -> memoryview:
        return memoryview(self._memory[slot])

    def copy_in(self, slot: int, source: memoryview) -> None:
        """Copy a block into a slot. Other threads run meanwhile."""
        self._memory[slot] = self._numpy.frombuffer(source, dtype=self._numpy.uint8)

    def copy_out(self, slot: int, target: memoryview) -> None:
        """Copy a slot to other memory. Other threads run meanwhile."""
        self._numpy.frombuffer(target, dtype=self._numpy.uint8)[:] = self._memory[slot]
