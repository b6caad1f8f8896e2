"""KV blocks with places: `BlockPool` counts them and knows what is cached, this knows where each one lies."""

from collections.abc import Sequence

from forebay.engine_model.block_pool import BlockPool


class KvBlocks:
    """`total` places, 0 to `total` - 1; a block is in use, cached under its sequence hash, or free."""

    def __init__(self, total: int) -> None:
        self.pool = BlockPool(total)
        self._place: dict[int, int] = {}
        self._free = list(range(total))

    def cached_prefix(self, hashes: Sequence[int], blocks_max: int) -> int:
        """How many leading hashes can be found, at most `blocks_max`."""
        return self.pool.cached_prefix(hashes, blocks_max)

    def take(self, prefix: Sequence[int], new: int) -> tuple[list[int], list[int]] | None:
        """Use the blocks of `prefix`, all of which can be found, and `new` ones: their places, and hashes evicted.

        None, and nothing is taken, when there is no room.
        """
        evicted = self.pool.take(prefix, new)
        if evicted is None:
            return None
        self._free += [self._place.pop(block) for block in evicted]
        return [*(self._place[block] for block in prefix), *(self._free.pop() for _ in range(new))], evicted

    def name(self, place: int, block: int) -> tuple[int, bool]:
        """The block at `place` is full, and known as `block` from now on: where it lies then, and if it was new.

        When such a block was there already the two become one, and the place is free.
        """
        if self.pool.fill(block):
            self._place[block] = place
            return place, True
        self._free.append(place)
        return self._place[block], False

    def release(self, hashes: Sequence[int], unnamed: Sequence[int]) -> None:
        """Give back a chain's blocks, head first, which stay cached, and places without a name."""
        self.pool.release(hashes, len(unnamed))
        self._free += unnamed

    def clear(self) -> None:
        """Forget everything. Nobody may use a block."""
        self.pool.clear()
        self._place.clear()
        self._free = list(range(self.pool.total))
