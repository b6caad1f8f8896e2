"""From costs to a choice: the lowest, or a draw weighted by cost. Chance comes in as a seed.

At temperature 0 equal lowest costs are decided by a second column, where given, then by the seed. Above it, costs are
scaled to [0, 1] over their range and weighted exp(-cost / temperature), as Dynamo's selector does; the weights are
integers from decimal arithmetic, because libm's exp may differ in its last bit between machines.
"""

from bisect import bisect_right
from collections.abc import Sequence
from decimal import Context, Decimal
from itertools import accumulate

from forebay.events.base import U64_MASK

WEIGHT_ONE = 1 << 53  # the weight of the lowest cost: as fine as a double's mantissa
_DECIMAL = Context(prec=30)


def lowest(values: Sequence[float], seed: int, then: Sequence[int] = ()) -> int:
    """The position of the lowest value, of equal ones the lowest in `then`, where given, and then by `seed`."""
    least = min(values)
    if values.count(least) == 1:
        return values.index(least)
    tied = [at for at, value in enumerate(values) if value == least]
    if then:
        fewest = min([then[at] for at in tied])
        tied = [at for at in tied if then[at] == fewest]
    return tied[seed % len(tied)]


def softmax_weights(costs: Sequence[float], temperature: float) -> list[int]:
    """Integer weights in [0, WEIGHT_ONE], the lowest cost having WEIGHT_ONE; equal costs weigh the same."""
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
    """A position, drawn in proportion to the weights by the 64-bit `seed`."""
    ends = list(accumulate(weights))
    return bisect_right(ends, scaled(seed, ends[-1]))


def scaled(seed: int, end: int) -> int:
    """An integer in [0, end), drawn by the 64-bit `seed`; all are as likely, but for one part in 2**64 / end."""
    return (mix64(seed) * end) >> 64


def mix64(value: int) -> int:
    """A 64-bit integer with all bits stirred (the finaliser of splitmix64)."""
    value = (value + 0x9E3779B97F4A7C15) & U64_MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & U64_MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & U64_MASK
    return value ^ (value >> 31)
