"""Search for the highest speed at which a service meets its SLO: try nearly zero load, bracket, then bisect.

The search assumes that attainment falls monotonically with speed. Speeds are halved, doubled and averaged in pairs.
These operations do not round, so every machine tries the same speeds.
"""

from collections.abc import Callable
from itertools import pairwise
from typing import Literal

import msgspec

TOLERANCE = 0.01
DOUBLINGS_MAX = 10  # from the first speed, up or down: a factor of about 1,000

Answer = Literal["found", "never", "always"]


class SpeedTrial(msgspec.Struct, frozen=True):
    """One factor by which arrival times were divided. `holds`: whether `attained` is high enough for the caller."""

    speed: float
    requests_per_s: float
    attained: float
    holds: bool


class Capacity(msgspec.Struct, frozen=True, kw_only=True):
    """Result of the search for the highest speed that meets the SLO."""

    answer: Answer  # `found`, `never` (nearly zero load misses the SLO) or `always` (every tried speed meets the SLO)
    step: SpeedTrial | None  # the highest tried speed that meets the SLO; None if `answer` is `never`
    steps: tuple[SpeedTrial, ...]  # all tried speeds, in the order of the trials
    monotone: bool  # whether attainment never rose with the speed, as the search assumes


def search(measure: Callable[[float], SpeedTrial], start: float, tolerance: float = TOLERANCE) -> Capacity:
    """Find the highest speed at which the service still meets its SLO. The second trial is at the speed `start`.

    The first trial is at nearly zero load, a thousandth of `start`. If it misses the SLO, it is the only trial. The
    search stops when the gap between the highest speed that meets the SLO and the lowest that misses it is at most the
    share `tolerance` of the speed.
    """
    idle = measure(start * 0.5**DOUBLINGS_MAX)
    if not idle.holds:
        return _capacity("never", [idle])
    steps = [idle, measure(start)]
    if steps[-1].holds:
        while steps[-1].holds:
            if len(steps) == DOUBLINGS_MAX + 2:
                return _capacity("always", steps)
            steps.append(measure(steps[-1].speed * 2.0))
        low, high = steps[-2].speed, steps[-1].speed
    else:
        while not steps[-1].holds and steps[-1].speed > 2.0 * idle.speed:
            steps.append(measure(steps[-1].speed * 0.5))
        low, high = (steps[-1].speed, steps[-2].speed) if steps[-1].holds else (idle.speed, steps[-1].speed)
    while high > low * (1.0 + tolerance):
        steps.append(measure((low + high) / 2))
        low, high = (steps[-1].speed, high) if steps[-1].holds else (low, steps[-1].speed)
    return _capacity("found", steps)


def _capacity(answer: Answer, steps: list[SpeedTrial]) -> Capacity:
    by_speed = sorted(steps, key=lambda step: step.speed)
    pairs = pairwise(by_speed)
    return Capacity(
        answer=answer,
        step=max((step for step in steps if step.holds), key=lambda step: step.speed, default=None),
        steps=tuple(steps),
        monotone=all(slow.attained >= fast.attained for slow, fast in pairs),
    )
