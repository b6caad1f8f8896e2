"""Simulate many seeds in several processes, and find a smaller plan that violates the same invariant."""

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context
from typing import Any, TypeVar

import msgspec

from tests.faults.plan import Depth, Plan, depth_of, draw_plan
from tests.faults.simulation import Result, simulate

SEEDS_PER_TASK = 4


@dataclass(slots=True)
class Tally:
    """Sums over simulations."""

    seeds: int = 0
    requests: int = 0
    choices: int = 0
    callbacks: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    outcomes: Counter[str] = field(default_factory=Counter)
    fired: Counter[str] = field(default_factory=Counter)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.requests += len(result.plan.requests)
        self.choices += result.choices
        self.callbacks += result.callbacks
        self.virtual_s += result.virtual_s
        self.cpu_s += result.cpu_s
        for name, number in result.outcomes.items():
            self.outcomes[name.split(" ")[0]] += number
        self.fired += result.fired


def results_of(seeds: Iterable[int], depth: Depth | None, jobs: int, seconds: float) -> Iterator[Result]:
    """Yield the results of seeds, in their order, until the time is over. A note on each error names its seeds.

    Args:
        depth: `log` or `kafka`; None for `depth_of` each seed.
    """
    ends_s = time.monotonic() + seconds
    numbers = iter(seeds)
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        while time.monotonic() < ends_s:
            some = list(islice(numbers, SEEDS_PER_TASK * jobs))
            if not some:
                return
            try:
                yield from pool.map(simulate_seed, some, [depth] * len(some))
            except Exception as error:
                error.add_note(f"fuzz: this happened in one of the seeds {some}")
                raise


def simulate_seed(seed: int, depth: Depth | None) -> Result:
    """Return the result of a seed. A note on an error names the seed."""
    try:
        result = simulate(draw_plan(seed, depth or depth_of(seed)))
    except BaseException as error:
        error.add_note(f"fuzz: this happened in seed {seed}")
        raise
    if not result.violation:
        result.partitions = {}  # large, and needed only after a violation
    return result


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
