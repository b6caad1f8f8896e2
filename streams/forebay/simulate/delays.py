"""Latency draws that are identical on every machine.

An exponential draw is -ln(u) for a uniform u. Here u is a 64-bit hash of a counter. Its logarithm is a multiple of
ln 2 minus an entry of a table. The table is computed with `decimal`, which rounds correctly on every platform. The rest
is integer arithmetic, so no libm is involved.
"""

from decimal import Decimal, localcontext
from functools import cache

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_BYTES, U64_MASK
from forebay.simulate.settings import Delay, Delays

_SCALE_BITS = 32
_STEP_BITS = 10  # these bits of a draw select the table entry; the remaining bits select the number of halvings
_REST_BITS = 64 - _STEP_BITS
_DIGITS = 18
US_PER_MS = 1_000

ROUTER = "router"  # producer name of the owner, for rejections that it sends to clients


def exponential(draw: int, mean: int) -> int:
    """Return a value from an exponential distribution, for a draw of 64 uniformly distributed bits."""
    ln_2, logarithms = _tables()
    # u is 2**-halvings * (1 + step / 1024). Each further halving is half as probable.
    halvings = _REST_BITS + 1 - (draw & ((1 << _REST_BITS) - 1)).bit_length()
    return mean * (halvings * ln_2 - logarithms[draw >> _REST_BITS]) >> _SCALE_BITS


@cache
def _tables() -> tuple[int, list[int]]:
    """Return ln 2 and ln(1 + f) for the midpoint of each step of f from 0 to 1, all scaled by 2**32."""
    steps = 1 << _STEP_BITS
    with localcontext() as context:
        context.prec = _DIGITS
        scale = Decimal(1 << _SCALE_BITS)
        middles = [(1 + (Decimal(2 * step + 1) / (2 * steps))).ln() for step in range(steps)]
        return int(Decimal(2).ln() * scale), [int(middle * scale) for middle in middles]


class Draws:
    """Stream of random draws from exponential distributions. Streams with different names are independent."""

    def __init__(self, seed: int, name: str) -> None:
        self._seed = xxh3_64_intdigest(name.encode(), seed & U64_MASK)
        self._drawn = 0

    def next(self, mean: int) -> int:
        self._drawn += 1
        return exponential(xxh3_64_intdigest(self._drawn.to_bytes(U64_BYTES, "little"), self._seed), mean)


class Hop:
    """Latency of the records that one producer sends to one topic. Records never overtake each other."""

    def __init__(self, delay: Delay, seed: int, name: str) -> None:
        self._fixed_us, self._jitter_us = round(delay.fixed_ms * US_PER_MS), round(delay.jitter_ms * US_PER_MS)
        self._draws = Draws(seed, name)
        self._last_us = 0

    def arrives(self, now_us: int) -> int:
        """Return the time at which records arrive that were sent together at `now_us`."""
        at_us = now_us + self._fixed_us
        if self._jitter_us:
            at_us += self._draws.next(self._jitter_us)
        self._last_us = max(at_us, self._last_us)
        return self._last_us


class Hops:
    """Latencies of the records from and to one client, router or rank, named as in `Delays`. None: no latency."""

    def __init__(self, delays: Delays, seed: int, producer: str) -> None:
        def hop(topic: str) -> Hop | None:
            delay = getattr(delays, topic)
            return None if delay == Delay() else Hop(delay, seed, f"{topic} {producer}")

        self.submit = hop("submit")
        self.work = hop("work")
        self.tokens = hop("tokens")
        self.kv_events = hop("kv_events")
        self.progress = hop("progress")
        self.metrics = hop("metrics")


NO_HOPS = Hops(Delays(), 0, "")
