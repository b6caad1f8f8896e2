"""A linear engine timing from what engines did.

First the costs that explain the recorded times best, given what must have happened between them (`timeline.py`). Then,
from there, those with which the engine model itself comes nearest: each engine is run with its recorded requests, and
what is minimised are the logarithms of modelled over recorded TTFT and ITL, with a loss that grows evenly (soft L1), as
the median counts and not the outliers. Nothing is fitted to the later requests: errors are told of these.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from forebay.engine_model.timing import LinearTiming
from forebay.simulate.profiles.observed import EngineRun, ModelledRun, take_out_refused
from forebay.simulate.profiles.regression import OUTLIER, SHRINK, Vector, regression
from forebay.simulate.profiles.timeline import COSTS, amounts

NAMES = (*COSTS, "work")  # work: what passes before a request is in the engine, and after: on top of every TTFT
REQUESTS_MIN = 20  # fewer say nothing of seven parameters
REQUESTS_MAX = 2_000  # more do not change the parameters, and the engines are run some hundred times
FITTED_SHARE = 0.7
STEPS = (0.02, 0.005)  # by which a parameter's share of the times is moved to see what changes: less is one step's luck
MOVES_MAX = 12
UNSEEN = 3e-3  # times that change so much less in one direction than in another do not tell where along it one is
PARTNER = 0.3  # share of such a direction that makes a parameter one of those meant
NORMAL = 1.4826  # standard deviation of a normal distribution in medians of what is off its middle
CACHE_AGREES_MIN = 0.95

Mask = NDArray[np.bool_]
OnProgress = Callable[[int], object]


class FitImpossible(Exception):
    """What was recorded is not enough; the text says what is missing."""


class Error(NamedTuple):
    """How far modelled times are from recorded ones, of requests that were not fitted to.

    `p50` and `p90` are of the relative errors of single requests; the others are percentiles 50 and 90 of the times
    themselves, in milliseconds.
    """

    requests: int
    p50: float
    p90: float
    recorded_ms: tuple[float, float]
    modelled_ms: tuple[float, float]


class Estimate(NamedTuple):
    """A parameter and its standard error, both in microseconds."""

    name: str
    value: float
    error: float


@dataclass(slots=True)
class Fit:
    """What came of it.

    Attributes:
        fitted: how many requests it was fitted to; `left_out` the others that were not compared, by reason.
        warnings: what it cannot know, for people.
    """

    timing: LinearTiming
    work_us: int
    estimates: list[Estimate]
    fitted: int
    ttft: Error
    itl: Error | None
    left_out: dict[str, int]
    warnings: list[str] = field(default_factory=list)


class _Modelled(NamedTuple):
    """All requests that are compared, in their order; rows are TTFT and ITL, nan where there is none."""

    times: Vector  # (2, requests)
    agrees: Mask  # (requests): found in the cache what was found


def fit(runs: Sequence[EngineRun], on_progress: OnProgress) -> Fit:
    """Fit a timing to what these engines did; `on_progress` gets how often they were run so far.

    Raises FitImpossible.
    """
    refused = [reason for run in runs for reason in take_out_refused(run)]
    problem = _Problem(_bounded(runs), on_progress)
    theta = problem.solve()
    modelled = problem.modelled(theta)
    tested = ~problem.fitted & modelled.agrees
    ttft = _error(problem.recorded[0], modelled.times[0], tested)
    if ttft is None:
        raise FitImpossible(
            "no request of the later part can be compared: the engine model finds other prefixes cached"
        )
    estimates, unseen = problem.estimates(theta)
    left_out = Counter(one.left_out for run in runs for one in run.requests if one.left_out) + Counter(refused)
    if differing := int((~modelled.agrees).sum()):
        left_out["the engine model has other prefixes in its cache"] = differing
    return Fit(
        timing=_timing(theta),
        work_us=round(theta[-1]),
        estimates=estimates,
        fitted=int(problem.fitted.sum()),
        ttft=ttft,
        itl=_error(problem.recorded[1], modelled.times[1], tested),
        left_out=dict(left_out),
        warnings=[*unseen, *problem.warnings(modelled)],
    )


class _Problem:
    """The requests that are compared, and how well parameters give their times."""

    def __init__(self, runs: Sequence[EngineRun], on_progress: OnProgress) -> None:
        self._runs = runs
        self._requests = [one for run in runs for one in run.requests if not one.left_out]
        self._places = {id(one): place for place, one in enumerate(self._requests)}
        self._on_progress = on_progress
        self._evaluations = 0
        self.recorded = np.full((2, len(self._requests)), np.nan)
        for place, one in enumerate(self._requests):
            self.recorded[0, place] = max(1, one.first_us - one.routed_us)
            if one.output_tokens > 1:
                self.recorded[1, place] = max(1, one.last_us - one.first_us) / (one.output_tokens - 1)
        self.fitted = np.zeros(len(self._requests), dtype=np.bool_)
        self._amounts = np.zeros((2, len(self._requests), len(NAMES)))
        self._amounts[0, :, -1] = 1.0
        for run in runs:
            compared, of_run = amounts(run)
            places = [self._places[id(one)] for one in compared]
            self._amounts[:, places, :-1] = of_run
            self.fitted[places[: math.ceil(len(places) * FITTED_SHARE)]] = True

    def modelled(self, theta: Vector) -> _Modelled:
        """Every engine, run with these parameters."""
        times = np.full((2, len(self._requests)), np.nan)
        agrees = np.zeros(len(self._requests), dtype=np.bool_)
        for run in self._runs:
            for one, done in ModelledRun(run, _timing(theta), round(theta[-1])):
                place = self._places[id(one)]
                agrees[place] = one.cached_tokens == done.cached_tokens
                times[0, place] = done.ttft_us
                if one.output_tokens > 1:
                    times[1, place] = done.itl_us
        self._evaluations += 1
        self._on_progress(self._evaluations)
        return _Modelled(times, agrees)

    def solve(self) -> Vector:
        """Parameters, none below 0, that give the recorded times of the requests to fit to. Raises FitImpossible."""
        shares = self._shares()
        units = np.maximum(shares.mean(axis=0), 1e-12)  # in these each parameter is its share of the times
        x = regression(shares) * units
        for step in STEPS:
            x = self._nearer(x, units, step)
        return np.asarray(x / units)

    def estimates(self, theta: Vector) -> tuple[list[Estimate], list[str]]:
        """Each parameter with its standard error, and which of them these requests do not tell apart."""
        shares = self._shares()
        units = np.linalg.norm(shares, axis=0)
        seen = units > 0
        names = [name for name, there in zip(NAMES, seen, strict=True) if there]
        unseen = [f"nothing that was recorded depends on {name}" for name in NAMES if name not in names]
        _, values, directions = np.linalg.svd(shares[:, seen] / units[seen], full_matrices=False)
        blind = np.abs(directions[values < UNSEEN * values[0]]).max(axis=0, initial=0.0)
        if meant := [name for name, part in zip(names, blind, strict=True) if part > PARTNER]:
            unseen.append(f"these requests hardly tell {' and '.join(meant)} apart, but only what they are together")
        spread = NORMAL * np.median(np.abs(shares @ theta - 1.0))
        errors = np.full(len(NAMES), np.inf)
        deviations = np.sqrt(((directions.T / np.maximum(values, 1e-9)) ** 2).sum(axis=1))
        errors[seen] = spread * deviations / units[seen]
        found = zip(NAMES, theta, errors, strict=True)
        return [Estimate(name, float(value), float(error)) for name, value, error in found], unseen

    def warnings(self, modelled: _Modelled) -> list[str]:
        """What else these requests do not say."""
        found = []
        share = modelled.agrees.mean()
        if share < CACHE_AGREES_MIN:
            found.append(f"only {share:.0%} of the requests find the prefixes in the modelled cache that they found")
        if self._amounts[1, :, COSTS.index("decode_sequence")].max(initial=0.0) <= 1.0:
            found.append("no two requests decoded together: nothing is known of an engine that has more to do")
        return found

    def _shares(self) -> Vector:
        """What a microsecond of each parameter adds to each time that is fitted to, as a share of it."""
        used = ~np.isnan(self.recorded) & self.fitted
        return np.asarray(self._amounts[used] / self.recorded[used][:, None])

    def _nearer(self, x: Vector, units: Vector, step: float) -> Vector:
        """Parameters near these with which the engine model gives the recorded times better. Raises FitImpossible."""
        modelled = self.modelled(x / units)
        used = ~np.isnan(self.recorded) & ~np.isnan(modelled.times) & self.fitted & modelled.agrees
        if used[0].sum() < REQUESTS_MIN * FITTED_SHARE:
            raise FitImpossible(
                f"only {used[0].sum()} requests find the prefixes in the modelled cache that they found in the "
                "engine's: are its sizes those of the recording, and does the recording begin with its cache?"
            )

        def errors(at: Vector) -> Vector:
            ratios = self.modelled(at / units).times[used] / self.recorded[used]
            return np.append(np.nan_to_num(np.log(ratios)), SHRINK * at)

        def derivatives(at: Vector) -> Vector:
            here = errors(at)
            return np.column_stack([(errors(at + step * one) - here) / step for one in np.eye(len(at))])

        found = least_squares(
            errors, np.maximum(x, 1e-9), derivatives, bounds=(0.0, np.inf), loss="soft_l1", f_scale=OUTLIER,
            max_nfev=MOVES_MAX, xtol=1e-4, ftol=1e-4,
        )  # fmt: skip
        return np.asarray(found.x)


def _bounded(runs: Sequence[EngineRun]) -> Sequence[EngineRun]:
    """The same without what comes after the first REQUESTS_MAX, each in the order of its times."""
    for run in runs:
        run.requests.sort(key=lambda one: one.routed_us)
    times = sorted(one.routed_us for run in runs for one in run.requests if not one.left_out)
    if len(times) < REQUESTS_MIN:
        raise FitImpossible(f"{len(times)} requests can be compared, but at least {REQUESTS_MIN} are needed")
    if len(times) > REQUESTS_MAX:
        for run in runs:
            run.requests = [one for one in run.requests if one.routed_us < times[REQUESTS_MAX]]
    return runs


def _timing(theta: Vector) -> LinearTiming:
    costs = dict(zip(COSTS, map(float, theta), strict=False))
    if not any(costs.values()):
        costs[COSTS[0]] = 1.0  # on its way a fit may come by an engine that takes no time
    return LinearTiming(**costs)


def _error(recorded: Vector, modelled: Vector, tested: Mask) -> Error | None:
    both = tested & ~np.isnan(recorded) & ~np.isnan(modelled)
    if not both.any():
        return None
    relative = np.abs(modelled[both] / recorded[both] - 1.0)
    recorded_ms, modelled_ms = (np.percentile(times[both] / 1e3, (50, 90)) for times in (recorded, modelled))
    return Error(
        requests=int(both.sum()),
        p50=float(np.percentile(relative, 50)),
        p90=float(np.percentile(relative, 90)),
        recorded_ms=(float(recorded_ms[0]), float(recorded_ms[1])),
        modelled_ms=(float(modelled_ms[0]), float(modelled_ms[1])),
    )
