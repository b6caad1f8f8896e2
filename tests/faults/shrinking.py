"""Find a smaller plan that violates the same invariant, by leaving out faults and requests."""

import re
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import msgspec

from tests.faults.plan import Plan
from tests.faults.simulation import Result, simulate

T = TypeVar("T")


def kind_of(violation: str) -> str:
    """Return a violation without numbers and lists, so that the same violation of other requests is recognised."""
    return re.sub(r"\[.*?\]|'.*?'|\d+", "", violation)


def shrink(failed: Result, seconds: float) -> Result:
    """Return the result of the smallest plan found within some seconds that has the same kind of violation."""
    kind, ends_s = kind_of(failed.violation), time.monotonic() + seconds
    best = failed

    def keeps(field: str) -> Callable[[Sequence[Any]], bool]:
        def fails_with(parts: Sequence[Any]) -> bool:
            nonlocal best
            if time.monotonic() >= ends_s:
                return False
            plan: Plan = msgspec.structs.replace(best.plan, **{field: tuple(parts)})
            result = simulate(plan)
            if kind_of(result.violation) != kind:
                return False
            best = result
            return True

        return fails_with

    size = -1
    while size != _size(best.plan) and time.monotonic() < ends_s:
        size = _size(best.plan)
        _minimise(best.plan.faults, keeps("faults"))
        _minimise(best.plan.requests, keeps("requests"))
    return best


def _size(plan: Plan) -> int:
    return len(plan.faults) + len(plan.requests)


def _minimise(parts: Sequence[T], fails_with: Callable[[Sequence[T]], bool]) -> None:
    """Leave out as many parts as possible, in halves first and then in smaller pieces (Zeller's ddmin)."""
    left, pieces = list(parts), 2
    while left:
        step = max(1, len(left) // pieces)
        for begin in range(0, len(left), step):
            rest = left[:begin] + left[begin + step :]
            if fails_with(rest):
                left, pieces = rest, max(2, pieces - 1)
                break
        else:
            if step == 1:
                return
            pieces *= 2
