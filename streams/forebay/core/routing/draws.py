"""Select a candidate by cost: the lowest cost, or a random draw weighted by cost.

At temperature 0, a tie for the lowest cost is broken by a second list of values, if given, then by the seed. Above 0,
costs are scaled to [0, 1] over their range and weighted by exp(-cost / temperature), as in Dynamo's selector. Weights
are integers from decimal arithmetic, because libm's exp may differ in its last bit between machines. The seed of the
request is the only source of randomness.
"""

from bisect import bisect_right
from collections.abc import Sequence
from decimal import Context, Decimal
from itertools import accumulate
from typing import Any

from numpy.typing import NDArray

from forebay.events.base import U64_MASK

WEIGHT_ONE = 1 << 53  # weight of the lowest cost: the resolution of a double's mantissa
_DECIMAL = Context(prec=30)


def lowest(values: NDArray[Any], seed: int, then: NDArray[Any] | None = None) -> int:
    """Return the position of the lowest value. Break ties by the lowest number in `then`, if given, then by `seed`."""
    tied = (values == values[values.argmin()]).nonzero()[0]
    if then is not None and len(tied) > 1:
        numbers = then[tied]
        tied = tied[numbers == numbers[numbers.argmin()]]
    return int(tied[seed % len(tied)])


def softmax_weights(costs: Sequence[float], temperature: float) -> list[int]:
    """Return the softmax weight of each cost: `WEIGHT_ONE` for the lowest, at least 0, equal for equal costs."""
    assert temperature > 0.0
    least, most = min(costs), max(costs)
    if least == most:
        return [WEIGHT_ONE] * len(costs)
    low = Decimal(least)
    spread = _DECIMAL.multiply(_DECIMAL.subtract(Decimal(most), low), Decimal(temperature))
    return [
        int(_DECIMAL.multiply(_DECIMAL.exp(_DECIMAL.divide(_DECIMAL.subtract(low, Decimal(cost)), spread)), WEIGHT_ONE))
        for cost in costs
    ]


def draw(weights: Sequence[int], seed: int) -> int:
    """Return a position in `weights`, drawn with probability proportional to its weight, using the 64-bit `seed`."""
    ends = list(accumulate(weights))
    return bisect_right(ends, scale_draw(seed, ends[-1]))


def scale_draw(seed: int, end: int) -> int:
    """Return an integer from 0 to `end` - 1, drawn by the 64-bit `seed`.

    The draw is uniform, except that the probabilities may differ by a factor of up to 1 + `end` / 2**64.
    """
    return (mix64(seed) * end) >> 64


def mix64(value: int) -> int:
    """Return a 64-bit integer in which every bit depends on all bits of `value` (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & U64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & U64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & U64_MASK
    return value ^ (value >> 31)
