"""Offload filter: how often blocks were offered to the tiers, with decay.

Theory of operation. A key starts with frequency 1, which doubles with every further offer and decreases by 1 per tick.
Instead of decreasing every frequency, the filter stores for each key the tick at which the frequency is 0. The keys are
also grouped by that tick, so a tick and the removal of the rarest key cost no search.
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

import msgspec

Key = TypeVar("Key", bound=Hashable)

FREQUENCY_MAX = 1024  # a key that is not offered any more is forgotten after as many ticks


class FrequencyLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the offload filter, which needs about 300 bytes per key. Blocks are offloaded from `offload_at` on."""

    keys_max: int = 1_000_000
    offload_at: int = 2

    def __post_init__(self) -> None:
        if self.keys_max < 1 or not 1 <= self.offload_at <= FREQUENCY_MAX:
            raise ValueError(f"keys_max must be at least 1 and offload_at from 1 to {FREQUENCY_MAX}, not {self}")


class FrequencyFilter(Generic[Key]):
    """Frequencies of at most `keys_max` keys.

    If the filter is full, a new key replaces a key with the lowest frequency, of these the one offered first.
    """

    def __init__(self, limits: FrequencyLimits) -> None:
        self._limits = limits
        self._now = 0
        self._ends: dict[Key, int] = {}  # tick at which the frequency is 0
        self._by_end: dict[int, OrderedDict[Key, None]] = {}

    def __len__(self) -> int:
        return len(self._ends)

    def offer(self, keys: Iterable[Key]) -> None:
        ends, now = self._ends, self._now
        once = self._group(now + 1)
        room = self._limits.keys_max - len(ends)
        for key in keys:
            end = ends.get(key)
            if end is not None:
                del self._by_end[end][key]
                end = now + min(2 * (end - now), FREQUENCY_MAX)
                ends[key] = end
                self._group(end)[key] = None
                continue
            if room:
                room -= 1
            else:
                self._forget_rarest()
            ends[key] = now + 1
            once[key] = None

    def frequency(self, key: Key) -> int:
        return self._ends.get(key, self._now) - self._now

    def passing(self, keys: Iterable[Key]) -> list[Key]:
        ends, least = self._ends, self._now + self._limits.offload_at
        return [key for key in keys if ends.get(key, 0) >= least]

    def tick(self) -> None:
        """Decrease every frequency by 1, and forget the keys that reach 0."""
        self._now += 1
        for key in self._by_end.pop(self._now, ()):
            del self._ends[key]

    def clear(self) -> None:
        self._ends.clear()
        self._by_end.clear()

    def _group(self, end: int) -> "OrderedDict[Key, None]":
        group = self._by_end.get(end)
        if group is None:
            group = self._by_end[end] = OrderedDict()
        return group

    def _forget_rarest(self) -> None:
        group = self._by_end[self._now + 1]
        if not group:
            group = self._by_end[min(end for end, found in self._by_end.items() if found)]
        key, _ = group.popitem(last=False)
        del self._ends[key]
