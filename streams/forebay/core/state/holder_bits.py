"""Which holder each bit of a mask stands for.

Theory of operation. Letting go of all that a holder has takes constant time: its bit is retired, which leaves
it in the masks but in no question. When enough bits are retired, a sweep takes them out of the masks, a bounded
piece with each change, and only then they are given out again.
"""

from collections.abc import Sequence
from itertools import compress

from forebay.core.state.block_sets import BlockSets

HolderKey = tuple[str, int]

RETIRED_BITS_MAX = 64  # a sweep goes through every run, so it must be rare; the masks grow by what is retired
SWEEP_STEPS = 256  # of one change: tens of microseconds, and a sweep of 10**6 blocks ends within thousands of changes
REMEMBERED_KEYS_MAX = 65_536  # a few megabytes; the masks of what is popular now are far fewer
DIGIT_VALUES = bytes.maketrans(b"01", b"\0\1")


class HolderBits:
    """Bits of the holders of some `BlockSets`, which they are asked with. `live`: all bits that are given out."""

    __slots__ = ("_keys", "_remembered", "_remembered_keys", "_retired", "_sets", "live", "sweeping")

    def __init__(self, sets: Sequence[BlockSets]) -> None:
        self._sets = sets
        self._keys: list[HolderKey] = []  # by bit, lowest first; what a retired bit was stays until it is taken
        self._retired = 0
        self._remembered: dict[int, dict[HolderKey, None]] = {}
        self._remembered_keys = 0
        self.live = 0
        self.sweeping = 0

    def take(self, key: HolderKey) -> int:
        """A bit that nobody has."""
        taken = self.live | self._retired
        bit = ~taken & (taken + 1)
        at = bit.bit_length() - 1
        self._keys[at : at + 1] = [key]
        self._remembered.clear()
        self._remembered_keys = 0
        self.live |= bit
        return bit

    def retire(self, bit: int) -> None:
        """The holder has nothing any more, and another bit or none."""
        for sets in self._sets:
            sets.retire(bit)
        self.live ^= bit
        self._retired |= bit
        if not self.sweeping and self._retired.bit_count() > RETIRED_BITS_MAX:
            self.sweeping = self._retired
            for sets in self._sets:
                sets.begin_sweep()

    def sweep(self) -> None:
        """A bounded piece of a sweep that is on (`sweeping`)."""
        steps = SWEEP_STEPS
        for sets in self._sets:
            steps = sets.sweep(self.sweeping, steps)
            if steps <= 0:
                return
        self._retired ^= self.sweeping
        self.sweeping = 0

    def key_of(self, bit: int) -> HolderKey:
        """The holder of one bit."""
        return self._keys[bit.bit_length() - 1]

    def keys_of(self, mask: int) -> dict[HolderKey, None]:
        """The holders of a mask's bits, lowest first. Not to be changed: popular masks are remembered."""
        keys = self._remembered.get(mask)
        if keys is None:
            digits = f"{mask:b}"[::-1]
            keys = dict.fromkeys(compress(self._keys, digits.encode().translate(DIGIT_VALUES)))
            self._remembered_keys += len(keys)
            if self._remembered_keys > REMEMBERED_KEYS_MAX:
                self._remembered.clear()
                self._remembered_keys = len(keys)
            self._remembered[mask] = keys
        return keys
