"""The highest speed at which a service keeps its promise: bracket, then bisect.

What holds at a speed is taken to hold at every lower one. Speeds are halves and doubles, and means of two of them: no
rounding, so every machine tries the same ones.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import msgspec

TOLERANCE = 0.01
DOUBLINGS_MAX = 10  # from the first speed, up or down: a thousand times

Answer = Literal["found", "never", "always"]


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """One speed that was tried.

    Attributes:
        requests_per_s: that arrived at that speed.
        attained: the share of requests that kept the promise; `holds` if that is enough.
    """

    speed: float
    requests_per_s: float
    attained: float
    holds: bool


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """What a search found.

    Attributes:
        answer: `found`; `never`, at no speed tried; `always`, at every speed tried, so that there may be more.
        step: the highest that holds; None for `never`.
        steps: all, in the order in which they were tried.
        monotone: whether no higher speed tried kept the promise to more requests than a lower one.
    """

    answer: Answer
    step: Step | None
    steps: tuple[Step, ...]
    monotone: bool


def search(measure: Callable[[float], Step], start: float, tolerance: float = TOLERANCE) -> Capacity:
    """Where the promise begins to break, from a first speed on.

    The highest speed that holds is below one that does not by at most `tolerance`, relative.
    """
    steps = [measure(start)]
    factor = 2.0 if steps[0].holds else 0.5
    for _ in range(DOUBLINGS_MAX):
        if steps[-1].holds is not steps[0].holds:
            break
        steps.append(measure(steps[-1].speed * factor))
    if steps[-1].holds is steps[0].holds:
        return _capacity("always" if steps[0].holds else "never", steps)
    low, high = sorted(step.speed for step in steps[-2:])
    while high > low * (1.0 + tolerance):
        steps.append(measure((low + high) / 2))
        low, high = (steps[-1].speed, high) if steps[-1].holds else (low, steps[-1].speed)
    return _capacity("found", steps)


def _capacity(answer: Answer, steps: list[Step]) -> Capacity:
    by_speed = sorted(steps, key=lambda step: step.speed)
    pairs = pairwise(by_speed)
    return Capacity(
        answer=answer,
        step=max((step for step in steps if step.holds), key=lambda step: step.speed, default=None),
        steps=tuple(steps),
        monotone=all(slow.attained >= fast.attained for slow, fast in pairs),
    )
