"""Shared store of one model: a directory or bucket that all its ranks read and write."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence


class SharedStore:
    """Blocks of a shared store. If it is full, the blocks that were not used for the longest time leave first."""

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def use(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def add(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Add blocks, in prompt order. Return those that are new, and those that had to leave."""
        new = {key: None for key in keys if key not in self._blocks}
        for key in reversed(keys):  # the last block of a prompt leaves first
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._limit)]
        gone = set(removed)
        return [key for key in new if key not in gone], [key for key in removed if key not in new]
