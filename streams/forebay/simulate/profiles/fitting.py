"""Fit of a linear engine timing to recorded engine runs.

The first estimate consists of the costs that best explain the recorded times, given the work between recorded events
(`timeline.py`). Then the engine model runs the recorded requests, and least squares refine its parameters. The error of
a request is the logarithm of modelled over recorded TTFT and ITL. A soft L1 loss limits the weight of outliers. The fit
uses the first 70 % of the requests (the fitted set). The reported errors are those of the other requests (the test
set).
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
from forebay.simulate.profiles.observed import EngineRun, ModelledRun, remove_rejected
from forebay.simulate.profiles.regression import OUTLIER, SHRINK, Vector, regression
from forebay.simulate.profiles.timeline import COSTS, amounts

NAMES = (*COSTS, "work")  # work: time outside the engine, which is part of every TTFT
REQUESTS_MIN = 20  # too few for seven parameters
REQUESTS_MAX = 2_000  # more do not change the parameters, and the engine model runs some hundred times
FITTED_SHARE = 0.7
STEPS = (
    0.02,
    0.005,
)  # step widths of finite differences, as a share of the times; smaller steps are dominated by noise
MOVES_MAX = 12
UNSEEN = 3e-3  # singular values below this share of the largest one mark parameters that cannot be separated
PARTNER = 0.3  # a warning names the parameters whose component in such a direction is at least this
NORMAL = 1.4826  # standard deviation of a normal distribution in units of its median absolute deviation
CACHE_AGREES_MIN = 0.95

Mask = NDArray[np.bool_]
OnProgress = Callable[[int], object]


class FitImpossible(Exception):
    """The recorded data does not suffice for a fit. The message says what is missing."""


class FitError(NamedTuple):
    """Error of modelled times against recorded times, measured on the test set.

    Attributes:
        p50: median of the relative errors of the requests.
        p90: 90th percentile of the relative errors of the requests.
        recorded_ms: p50 and p90 of the recorded times, in milliseconds.
        modelled_ms: p50 and p90 of the modelled times, in milliseconds.
    """

    requests: int
    p50: float
    p90: float
    recorded_ms: tuple[float, float]
    modelled_ms: tuple[float, float]


class Estimate(NamedTuple):
    """Fitted parameter and its standard error, both in microseconds."""

    name: str
    value: float
    error: float


@dataclass(slots=True)
class TimingFit:
    """Result of a fit.

    Attributes:
        timing: fitted costs of the engine.
        work_us: fitted time outside the engine, in microseconds per request.
        estimates: each parameter with its standard error.
        ttft: error of the modelled TTFT.
        itl: error of the modelled ITL; None if no request of the test set has more than one output token.
        left_out: for each reason not to compare a request, the number of requests that it excluded.
        warnings: messages to the user about limits of the recorded data.
    """

    timing: LinearTiming
    work_us: int
    estimates: list[Estimate]
    fitted: int
    ttft: FitError
    itl: FitError | None
    left_out: dict[str, int]
    warnings: list[str] = field(default_factory=list)


class _ModelledRequests(NamedTuple):
    """Modelled times of all compared requests, in order. The rows are TTFT and ITL; nan if a request has none."""

    times: Vector  # (2, requests)
    agrees: Mask  # (requests): whether the cached tokens match the recorded ones


def fit(runs: Sequence[EngineRun], on_progress: OnProgress) -> TimingFit:
    """Fit an engine timing to recorded engine runs.

    Args:
        runs: recorded engine runs. The function removes requests that the engine model rejects from these objects.
        on_progress: called with the number of evaluations of the engine model so far.

    Raises:
        FitImpossible: too few requests can be compared.
    """
    refused = [reason for run in runs for reason in remove_rejected(run)]
    problem = _Problem(_limit_requests(runs), on_progress)
    theta = problem.solve()
    modelled = problem.modelled(theta)
    tested = ~problem.fitted & modelled.agrees
    ttft = _error(problem.recorded[0], modelled.times[0], tested)
    if ttft is None:
        raise FitImpossible(
            "no request of the test set can be compared: the engine model finds other cached prefixes than the "
            "recording; check that the engine's sizes match the recording"
        )
    estimates, unseen = problem.estimates(theta)
    left_out = Counter(one.left_out for run in runs for one in run.requests if one.left_out) + Counter(refused)
    if differing := int((~modelled.agrees).sum()):
        left_out["the engine model finds other cached prefixes"] = differing
    return TimingFit(
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
    """Optimization problem: find the parameters with the smallest error of the model on the compared requests."""

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

    def modelled(self, theta: Vector) -> _ModelledRequests:
        """Run every engine in the model with these parameters."""
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
        return _ModelledRequests(times, agrees)

    def solve(self) -> Vector:
        """Return non-negative parameters that minimize the error of the fitted set.

        Raises:
            FitImpossible: too few requests can be compared.
        """
        shares = self._shares()
        units = np.maximum(shares.mean(axis=0), 1e-12)  # scales each parameter to its share of the times
        x = regression(shares) * units
        for step in STEPS:
            x = self._refine(x, units, step)
        return np.asarray(x / units)

    def estimates(self, theta: Vector) -> tuple[list[Estimate], list[str]]:
        """Return each parameter with its standard error, and warnings for parameters that cannot be separated."""
        shares = self._shares()
        units = np.linalg.norm(shares, axis=0)
        seen = units > 0
        names = [name for name, there in zip(NAMES, seen, strict=True) if there]
        unseen = [f"no recorded time depends on {name}" for name in NAMES if name not in names]
        _, values, directions = np.linalg.svd(shares[:, seen] / units[seen], full_matrices=False)
        blind = np.abs(directions[values < UNSEEN * values[0]]).max(axis=0, initial=0.0)
        if meant := [name for name, part in zip(names, blind, strict=True) if part > PARTNER]:
            unseen.append(f"these requests determine only the sum of {' and '.join(meant)}, not each of them")
        spread = NORMAL * np.median(np.abs(shares @ theta - 1.0))
        errors = np.full(len(NAMES), np.inf)
        deviations = np.sqrt(((directions.T / np.maximum(values, 1e-9)) ** 2).sum(axis=1))
        errors[seen] = spread * deviations / units[seen]
        found = zip(NAMES, theta, errors, strict=True)
        return [Estimate(name, float(value), float(error)) for name, value, error in found], unseen

    def warnings(self, modelled: _ModelledRequests) -> list[str]:
        """Return further warnings about the recorded data."""
        found = []
        share = modelled.agrees.mean()
        if share < CACHE_AGREES_MIN:
            found.append(f"only {share:.0%} of the requests find the same cached prefixes in the model as recorded")
        if self._amounts[1, :, COSTS.index("decode_sequence")].max(initial=0.0) <= 1.0:
            found.append("no two requests decoded together, so the profile is unreliable for larger batches")
        return found

    def _shares(self) -> Vector:
        """Return what one microsecond of each parameter adds to each fitted time, as a share of that time."""
        used = ~np.isnan(self.recorded) & self.fitted
        return np.asarray(self._amounts[used] / self.recorded[used][:, None])

    def _refine(self, x: Vector, units: Vector, step: float) -> Vector:
        """Return parameters near `x` with a smaller error.

        Raises:
            FitImpossible: too few requests find the recorded prefixes in the modelled cache.
        """
        modelled = self.modelled(x / units)
        used = ~np.isnan(self.recorded) & ~np.isnan(modelled.times) & self.fitted & modelled.agrees
        if used[0].sum() < REQUESTS_MIN * FITTED_SHARE:
            raise FitImpossible(
                f"only {used[0].sum()} requests find the same cached prefixes in the model as recorded; check that the "
                "engine's sizes match the recording, and that the recording begins with the state of its cache"
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


def _limit_requests(runs: Sequence[EngineRun]) -> Sequence[EngineRun]:
    """Sort the requests of each run by time, and keep the first REQUESTS_MAX of all runs together."""
    for run in runs:
        run.requests.sort(key=lambda one: one.routed_us)
    times = sorted(one.routed_us for run in runs for one in run.requests if not one.left_out)
    if len(times) < REQUESTS_MIN:
        reason = f"only {len(times)} requests can be compared; at least {REQUESTS_MIN} are needed"
        raise FitImpossible(f"{reason}: use a longer recording")
    if len(times) > REQUESTS_MAX:
        for run in runs:
            run.requests = [one for one in run.requests if one.routed_us < times[REQUESTS_MAX]]
    return runs


def _timing(theta: Vector) -> LinearTiming:
    costs = dict(zip(COSTS, map(float, theta), strict=False))
    if not any(costs.values()):
        costs[COSTS[0]] = 1.0  # the optimizer may try all zeros, but a timing must take some time
    return LinearTiming(**costs)


def _error(recorded: Vector, modelled: Vector, tested: Mask) -> FitError | None:
    both = tested & ~np.isnan(recorded) & ~np.isnan(modelled)
    if not both.any():
        return None
    relative = np.abs(modelled[both] / recorded[both] - 1.0)
    recorded_ms, modelled_ms = (np.percentile(times[both] / 1e3, (50, 90)) for times in (recorded, modelled))
    return FitError(
        requests=int(both.sum()),
        p50=float(np.percentile(relative, 50)),
        p90=float(np.percentile(relative, 90)),
        recorded_ms=(float(recorded_ms[0]), float(recorded_ms[1])),
        modelled_ms=(float(modelled_ms[0]), float(modelled_ms[1])),
    )
