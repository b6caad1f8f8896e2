"""Assignment of mask bits to holders, which are worker ranks.

`BlockSets` stores the holders of each block as a mask. If a holder loses all its blocks, only its bit is retired. So
this takes constant time, however many blocks there were. A retired bit stays in the stored masks, but lookups ignore
it. When enough bits are retired, a sweep clears them from the masks. Each change of an index does a bounded part of the
sweep. After the sweep the bits can be assigned again.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from forebay.core.state.block_sets import BlockSets

HolderKey = tuple[str, int]

RETIRED_BITS_MAX = 64  # a sweep visits every run, so it must be rare; masks grow by the number of retired bits
SWEEP_STEPS = 256  # per change: tens of microseconds; a sweep of 10**6 blocks ends within thousands of changes


class HolderBits:
    """Assigns each holder a bit that represents it in the `BlockSets`. `live` is the mask of all assigned bits.

    Attributes:
        keys: holder of each bit, lowest first; a retired bit keeps its holder until it is assigned again.
        taken: number of assignments so far, which changes whenever `keys` does.
    """

    __slots__ = ("_retired", "_sets", "keys", "live", "sweeping", "taken")

    def __init__(self, sets: Sequence[BlockSets]) -> None:
        self._sets = sets
        self.keys: list[HolderKey] = []
        self.taken = 0
        self._retired = 0
        self.live = 0
        self.sweeping = 0

    def take(self, key: HolderKey) -> int:
        """Assign a free bit to a holder, and return it as a mask."""
        taken = self.live | self._retired
        bit = ~taken & (taken + 1)
        at = bit.bit_length() - 1
        self.keys[at : at + 1] = [key]
        self.taken += 1
        self.live |= bit
        return bit

    def retire(self, bit: int) -> None:
        """Retire the bit of a holder that left or whose cache was cleared. Start a sweep if many bits are retired."""
        for sets in self._sets:
            sets.retire(bit)
        self.live ^= bit
        self._retired |= bit
        if not self.sweeping and self._retired.bit_count() > RETIRED_BITS_MAX:
            self.sweeping = self._retired
            for sets in self._sets:
                sets.begin_sweep()

    def sweep(self) -> None:
        """Continue the current sweep by up to `SWEEP_STEPS` steps. At its end the swept bits are free again."""
        steps = SWEEP_STEPS
        for sets in self._sets:
            steps = sets.sweep(self.sweeping, steps)
            if steps <= 0:
                return
        self._retired ^= self.sweeping
        self.sweeping = 0

    def key_of(self, bit: int) -> HolderKey:
        return self.keys[bit.bit_length() - 1]

    def keys_of(self, mask: int) -> list[HolderKey]:
        """Return the holders of a mask, lowest bit first."""
        return [self.keys[bit] for bit in bits_of(mask).tolist()]


@lru_cache(maxsize=256)  # small fleets have few masks, and large ones share wide masks; at most some megabytes
def bits_of(mask: int) -> NDArray[np.intp]:
    """Return the numbers of the bits that are set in a mask, in ascending order."""
    packed = np.frombuffer(mask.to_bytes((mask.bit_length() + 7) // 8, "little"), np.uint8)
    return np.unpackbits(packed, bitorder="little").nonzero()[0]
