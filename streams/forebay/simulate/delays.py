"""How long records are on their way, drawn the same on every machine.

An exponential draw is -ln(u) for a uniform u. Here u is a 64-bit hash of a counter, and the logarithm is a multiple of
ln 2 minus an entry of a table that `decimal` made, which rounds correctly everywhere: integers, and no libm.
"""

from decimal import Decimal, localcontext
from functools import cache

from xxhash import xxh3_64_intdigest

from forebay.events.base import U64_BYTES, U64_MASK
from forebay.simulate.settings import Delay, Delays

_SCALE_BITS = 32
_STEP_BITS = 10  # of a draw choose the step between two halvings, the others how many halvings there are
_REST_BITS = 64 - _STEP_BITS
_DIGITS = 18

ROUTER = "router"  # the owner as a producer: what it tells clients itself


def exponential(draw: int, mean: int) -> int:
    """A value from an exponential distribution of this mean; `draw` is 64 evenly distributed bits."""
    ln_2, logarithms = _tables()
    # u is 2**-halvings * (1 + step / 1024): every halving comes with half the probability of the one before.
    halvings = _REST_BITS + 1 - (draw & ((1 << _REST_BITS) - 1)).bit_length()
    return mean * (halvings * ln_2 - logarithms[draw >> _REST_BITS]) >> _SCALE_BITS


@cache
def _tables() -> tuple[int, list[int]]:
    """Scaled by 2**32: ln 2, and ln(1 + f) in the middle of every step of f from 0 to 1."""
    steps = 1 << _STEP_BITS
    with localcontext() as context:
        context.prec = _DIGITS
        scale = Decimal(1 << _SCALE_BITS)
        middles = [(1 + (Decimal(2 * step + 1) / (2 * steps))).ln() for step in range(steps)]
        return int(Decimal(2).ln() * scale), [int(middle * scale) for middle in middles]


class Draws:
    """Exponential draws of one name: no other's number or order of draws changes them."""

    def __init__(self, seed: int, name: str) -> None:
        self._seed = xxh3_64_intdigest(name.encode(), seed & U64_MASK)
        self._drawn = 0

    def next(self, mean: int) -> int:
        """The next draw from an exponential distribution of this mean."""
        self._drawn += 1
        return exponential(xxh3_64_intdigest(self._drawn.to_bytes(U64_BYTES, "little"), self._seed), mean)


class Hop:
    """The way of one producer's records on one topic: they never overtake each other."""

    def __init__(self, delay: Delay, seed: int, name: str) -> None:
        self._delay = delay
        self._draws = Draws(seed, name)
        self._last_us = 0

    def arrives(self, now_us: int) -> int:
        """When what is sent now, together, arrives."""
        at_us = now_us + self._delay.fixed_us
        if self._delay.jitter_us:
            at_us += self._draws.next(self._delay.jitter_us)
        self._last_us = max(at_us, self._last_us)
        return self._last_us


class Hops:
    """The ways from and to one producer, by the names of `Delays`; None for what arrives at once."""

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
