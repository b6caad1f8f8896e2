"""Fit the sizes of all pools to the GPU budget.

The budget is a hard ceiling. If the proposed sizes exceed it, all shrink by the same share. If they fall short of the
lowest number of GPUs, all grow by the same share. Both move a pool only between its present and its proposed size, so
that the budget of one pool never turns the direction of another. Only present sizes outside of the limits move beyond.
Source: Dynamo's budget of two pools (1.6.1), here for any number of pools and in whole numbers.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Wanted:
    """Present size of a pool, the proposed `size`, and the limits of its size now. `size` is from `low` to `high`."""

    current: int
    size: int
    low: int
    high: int
    gpus: int


@dataclass(frozen=True, slots=True)
class Fitted:
    """Size of each pool within the budget; all 0 if the budget does not suffice for the lowest sizes."""

    sizes: tuple[int, ...]
    feasible: bool


def fit(wanted: Sequence[Wanted], budget_gpus: int | None, min_gpus: int) -> Fitted:
    """Return the sizes nearest to the proposal within the limits. A `min_gpus` of 0 is no limit.

    If both limits are set, the number of GPUs may fall short of `min_gpus` by the GPUs of one worker. Otherwise some
    limits could not be met: with 2 GPUs per worker, no size has exactly 5 GPUs.
    """
    sizes = [one.size for one in wanted]
    tolerance = 0
    if budget_gpus is not None:
        if _gpus(wanted, sizes) > budget_gpus:
            return _lowered(wanted, budget_gpus)
        min_gpus = min(min_gpus, budget_gpus)
        tolerance = max((one.gpus for one in wanted), default=0)
    if _gpus(wanted, sizes) < min_gpus - tolerance:
        sizes = _raised(wanted, budget_gpus, min_gpus, tolerance)
    return Fitted(tuple(sizes), feasible=True)


def _lowered(wanted: Sequence[Wanted], budget_gpus: int) -> Fitted:
    lows = [one.low for one in wanted]
    if _gpus(wanted, lows) > budget_gpus:
        return Fitted((0,) * len(wanted), feasible=False)
    least = [max(one.low, min(one.current, one.size)) for one in wanted]
    if _gpus(wanted, least) <= budget_gpus:
        return Fitted(tuple(_shrink(wanted, [one.size for one in wanted], least, budget_gpus)), feasible=True)
    sizes = _shrink(wanted, least, lows, budget_gpus)
    # Workers run in the GPUs that rounding has left. Stopping them would only make the next decision start them again.
    for index, one in enumerate(wanted):
        spare = budget_gpus - _gpus(wanted, sizes)
        sizes[index] = min(least[index], sizes[index] + spare // one.gpus)
    return Fitted(tuple(sizes), feasible=True)


def _shrink(wanted: Sequence[Wanted], sizes: Sequence[int], least: Sequence[int], budget_gpus: int) -> list[int]:
    """Shrink sizes by the same share. `least` is within the budget."""
    room, total, reserved = budget_gpus, _gpus(wanted, sizes), _gpus(wanted, least)
    fitted = []
    for one, size, lowest in zip(wanted, sizes, least, strict=True):
        reserved -= lowest * one.gpus
        share = size * room // total if total else 0
        fitted.append(max(lowest, min(size, share, (room - reserved) // one.gpus)))
        room -= fitted[-1] * one.gpus
        total -= size * one.gpus
    return fitted


def _raised(wanted: Sequence[Wanted], budget_gpus: int | None, min_gpus: int, tolerance: int) -> list[int]:
    sizes = [one.size for one in wanted]
    most = [min(one.high, max(one.current, one.size)) for one in wanted]
    if _gpus(wanted, most) < min_gpus - tolerance:
        sizes, most = most, [one.high for one in wanted]
    return _grow(wanted, sizes, most, budget_gpus, min_gpus)


def _grow(
    wanted: Sequence[Wanted], sizes: Sequence[int], most: Sequence[int], budget_gpus: int | None, min_gpus: int
) -> list[int]:
    """Grow sizes by the same share up to `min_gpus`, as far as `most` and the budget allow."""
    grown = list(sizes)
    ceiling = _gpus(wanted, most) if budget_gpus is None else budget_gpus
    while True:  # each round reaches `min_gpus`, or takes at least one pool to its limit
        used = _gpus(wanted, grown)
        room = ceiling - used
        growing = [index for index, one in enumerate(wanted) if grown[index] < most[index] and one.gpus <= room]
        if used >= min_gpus or not growing:
            return grown
        total = sum(grown[index] * wanted[index].gpus for index in growing)
        goal = min_gpus - used + total
        for position, index in enumerate(growing):
            gpus, size = wanted[index].gpus, grown[index]
            left = len(growing) - position
            share = _ceil(size * goal, total) if total else _ceil(goal, left * gpus)
            grown[index] = max(size, min(most[index], size + room // gpus, share))
            room -= (grown[index] - size) * gpus
            goal -= grown[index] * gpus
            total -= size * gpus


def _ceil(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def _gpus(wanted: Sequence[Wanted], sizes: Sequence[int]) -> int:
    return sum(one.gpus * size for one, size in zip(wanted, sizes, strict=True))
