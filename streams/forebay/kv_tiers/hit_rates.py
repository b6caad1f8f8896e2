"""Hit rates per tier over the most recent requests."""

from collections import deque
from typing import NamedTuple


class TierHits(NamedTuple):
    """Blocks of one request, or of a window of requests, by the tier in which they were found.

    Attributes:
        total: full blocks of the prompts.
        device: blocks found in device memory.
        host: blocks found in host memory.
        store: blocks found in the shared store.
    """

    total: int
    device: int
    host: int
    disk: int
    store: int


class HitRates:
    """Sliding window over requests."""

    def __init__(self, window: int = 1000) -> None:
        if window < 1:
            raise ValueError(f"the window must have at least 1 request, not {window}")
        self._window: deque[TierHits] = deque(maxlen=window)
        self._sum = TierHits(0, 0, 0, 0, 0)

    @property
    def sums(self) -> TierHits:
        """Sums over the requests of the window."""
        return self._sum

    def observe(self, total_blocks: int, device: int = 0, host: int = 0, disk: int = 0, store: int = 0) -> None:
        """Add the most recent request.

        Args:
            device: blocks found in device memory.
            host: blocks onboarded from host memory.
            store: blocks onboarded from the shared store.
        """
        new = TierHits(total_blocks, device, host, disk, store)
        old = self._window[0] if len(self._window) == self._window.maxlen else TierHits(0, 0, 0, 0, 0)
        self._sum = TierHits(*(total + a - b for total, a, b in zip(self._sum, new, old, strict=True)))
        self._window.append(new)

    def rate(self, tier: str) -> float:
        """Return the share of the window's blocks that were found in `tier`; 0 without blocks."""
        found: int = getattr(self._sum, tier)
        return found / self._sum.total if self._sum.total else 0.0
