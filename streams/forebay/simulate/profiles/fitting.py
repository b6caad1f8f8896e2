"""Fit of a linear engine timing to recorded requests.

A recording has the arrival, the first token and the last token of each request. Between these events every running
sequence gets one token per iteration. The number of iterations between events therefore follows from the tokens of each
request. It is solved by fitting the counts to one request after another (multiplicative algebraic reconstruction:
Gordon, Bender, Herman 1970). Prompts are assumed to be computed first come, first served. The tokens of a prompt are
spread evenly over its prefill time. So each TTFT and each ITL is a sum of unknown costs with known counts, which a
robust regression finds. The fit uses the first 70 % of the requests (the fitted set). The reported errors are those of
the other requests (the test set).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, nnls

from forebay.engine_model.timing import LinearTiming
from forebay.events.fleet import WorkerSpec

COSTS = LinearTiming.__struct_fields__
NAMES = (*COSTS, "work")  # work: time outside the engine, which is part of every TTFT
REQUESTS_MIN = 20  # too few for seven parameters
FITTED_SHARE = 0.7
PASSES = 30  # iterations of the reconstruction; after these the counts hardly change
STEP_REMAINING = 0.5  # mean remaining share of the current step when a request arrives
FULL = 0.95  # share of the KV cache above which it counts as full
CHANGE_MAX = 2.0  # maximum factor by which one request changes a count in one pass
UNSEEN = 3e-3  # singular values below this share of the largest one mark parameters that cannot be separated
PARTNER = 0.3  # a warning names the parameters whose component in such a direction is at least this
NORMAL = 1.4826  # standard deviation of a normal distribution in units of its median absolute deviation
OUTLIER = 0.05  # relative errors far above this hardly count
SHRINK = 1e-4  # weak regularization: of indistinguishable solutions, take the smallest

Vector = NDArray[np.float64]


class FitImpossible(Exception):
    """The recorded data does not suffice for a fit. The message says what is missing."""


@dataclass(slots=True)
class TimedRequest:
    """Recorded request with the times at which its engine processed it. All times are microseconds of one clock."""

    routed_us: int  # when the router sent the request to the engine
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int = 0  # prompt tokens that the engine found in its cache
    first_us: int = 0  # time of the first output token; 0 if there was none
    last_us: int = 0  # time of the last output token; 0 if there was none
    stopped_us: int = 0  # time at which the request was cancelled; 0 if it was not
    left_out: str = ""  # reason why the times of the request must not be compared; empty if they may


@dataclass(slots=True)
class EngineRun:
    """Recorded requests of one worker rank, in the order in which the router sent them."""

    spec: WorkerSpec
    requests: list[TimedRequest] = field(default_factory=list)


class Estimate(NamedTuple):
    """Fitted parameter and its standard error, both in microseconds."""

    name: str
    value: float
    error: float


@dataclass(slots=True)
class TimingFit:
    timing: LinearTiming
    work_us: int  # fitted time outside the engine, in microseconds per request
    estimates: list[Estimate]
    fitted: int  # number of requests in the fitted set
    # P50 and p90 of the relative errors of TTFT and ITL in the test set, by name.
    errors: dict[str, tuple[float, float]]
    warnings: list[str]  # messages to the user about limits of the recorded data


def fit(runs: Sequence[EngineRun]) -> TimingFit:
    """Fit an engine timing to recorded requests. Raises FitImpossible if too few requests can be compared."""
    compared = sum(not one.left_out for run in runs for one in run.requests)
    if compared < REQUESTS_MIN:
        reason = f"only {compared} requests can be compared; at least {REQUESTS_MIN} are needed"
        raise FitImpossible(f"{reason}: use a longer recording")
    work = [amounts(run) for run in runs]
    fitted, tested = [], []
    for requests, done in work:
        shares = _shares(requests, done)
        split = math.ceil(shares.shape[1] * FITTED_SHARE)
        fitted.append(shares[:, :split])
        tested.append(shares[:, split:])
    known, other = np.concatenate(fitted, axis=1), np.concatenate(tested, axis=1)
    rows = known[~np.isnan(known[:, :, 0])]
    theta = regression(rows)
    estimates, warnings = _estimates(rows, theta)
    if max(done[1, :, COSTS.index("decode_sequence")].max(initial=0.0) for _, done in work) <= 1.0:
        warnings.append("no two requests decoded together, so the profile is unreliable for larger batches")
    costs = dict(zip(COSTS, map(float, theta), strict=False))
    if not any(costs.values()):
        costs[COSTS[0]] = 1.0  # a timing must take some time
    errors = {}
    for name, of in zip(("TTFT", "ITL"), other, strict=True):
        if len(of := of[~np.isnan(of[:, 0])]):
            p50, p90 = np.percentile(np.abs(of @ theta - 1.0), (50, 90))
            errors[name] = float(p50), float(p90)
    return TimingFit(LinearTiming(**costs), round(theta[-1]), estimates, known.shape[1], errors, warnings)


def _shares(requests: Sequence[TimedRequest], done: Vector) -> Vector:
    """Return what one microsecond of each parameter adds to TTFT and ITL of each request, as a share of that time.

    The shape is (2, requests, parameters). A request without an ITL has nan.
    """
    found = np.zeros((2, len(requests), len(NAMES)))
    found[:, :, :-1] = done
    found[0, :, -1] = 1.0
    for place, one in enumerate(requests):
        found[0, place] /= max(1, one.first_us - one.routed_us)
        gaps = one.output_tokens - 1
        found[1, place] *= gaps / max(1, one.last_us - one.first_us) if gaps > 0 else math.nan
    return found


def _estimates(rows: Vector, theta: Vector) -> tuple[list[Estimate], list[str]]:
    """Return each parameter with its standard error, and warnings for parameters that cannot be separated."""
    units = np.linalg.norm(rows, axis=0)
    seen = units > 0
    names = [name for name, there in zip(NAMES, seen, strict=True) if there]
    warnings = [f"no recorded time depends on {name}" for name in NAMES if name not in names]
    _, values, directions = np.linalg.svd(rows[:, seen] / units[seen], full_matrices=False)
    blind = np.abs(directions[values < UNSEEN * values[0]]).max(axis=0, initial=0.0)
    if meant := [name for name, part in zip(names, blind, strict=True) if part > PARTNER]:
        warnings.append(f"these requests determine only the sum of {' and '.join(meant)}, not each of them")
    spread = NORMAL * np.median(np.abs(rows @ theta - 1.0))
    errors = np.full(len(NAMES), np.inf)
    errors[seen] = spread * np.sqrt(((directions.T / np.maximum(values, 1e-9)) ** 2).sum(axis=1)) / units[seen]
    found = zip(NAMES, theta, errors, strict=True)
    return [Estimate(name, float(value), float(error)) for name, value, error in found], warnings


def amounts(run: EngineRun) -> tuple[list[TimedRequest], Vector]:
    """Return the compared requests, and the amounts of work that explain their TTFT and ITL.

    The amounts have the shape (2, requests, costs): for each request and each kind of cost, the amount of work during
    its TTFT (index 0) and during an average gap between its tokens (index 1).
    """
    begun = [one for one in run.requests if one.first_us]
    moments = np.unique([at for one in begun for at in (one.routed_us, one.first_us, _end(one))])
    if len(moments) < 2:
        return [], np.zeros((2, 0, len(COSTS)))
    spans = [tuple(np.searchsorted(moments, (one.routed_us, one.first_us, _end(one)))) for one in begun]
    middles, lasted = (moments[1:] + moments[:-1]) / 2, np.diff(moments)
    sequences, contexts = np.zeros(len(lasted)), np.zeros(len(lasted))
    for one, (_, first, last) in zip(begun, spans, strict=True):
        if last > first:
            sequences[first:last] += 1
            grown = (middles[first:last] - one.first_us) / (_end(one) - one.first_us)
            contexts[first:last] += one.prompt_tokens + grown * one.output_tokens + run.spec.block_size / 2
    room = run.spec.max_num_seqs, FULL * run.spec.kv_blocks_total * run.spec.block_size
    waits = (sequences >= room[0]) | (contexts >= room[1])  # the engine is full, so a new request has to wait
    prefill = _prefill(begun, spans, lasted, sequences > 0, run.spec.max_num_batched_tokens)
    fixed = (prefill[:, 2] > 0) & ~waits
    decoded = _iterations(begun, spans, lasted, np.where(fixed, prefill[:, 2], np.nan))
    # Where no sequence decodes, every iteration is a prefill.
    iterations = np.where(sequences > 0, decoded, prefill[:, 2])
    done = np.column_stack(
        [iterations, prefill[:, 0], prefill[:, 1], decoded * (sequences > 0), decoded * sequences, decoded * contexts]
    )
    until = np.vstack([np.zeros(len(COSTS)), np.cumsum(done, axis=0)])
    compared = [(one, span) for one, span in zip(begun, spans, strict=True) if not one.left_out]
    ttft = [until[first] - until[came] for _, (came, first, _) in compared]
    itl = [(until[last] - until[first]) / max(1, one.output_tokens - 1) for one, (_, first, last) in compared]
    return [one for one, _ in compared], np.array([ttft, itl]).reshape(2, len(compared), len(COSTS))


def _end(one: TimedRequest) -> int:
    """Return when a request left the engine. A request without a recorded end leaves at its first token."""
    return max(one.first_us, one.last_us or one.stopped_us)


def _iterations(
    begun: Sequence[TimedRequest], spans: Sequence[tuple[int, ...]], lasted: Vector, fixed: Vector
) -> Vector:
    """Return the number of iterations between consecutive events. It is fractional where an event splits an iteration.

    Args:
        spans: indexes of each request's arrival, first token and end among the events.
        lasted: microseconds between consecutive events.
        fixed: counts that are already known; nan elsewhere.
    """
    is_free = np.isnan(fixed)
    known = []
    for one, (_, first, last) in zip(begun, spans, strict=True):
        if last > first and one.last_us and one.output_tokens > 1:
            free = first + np.flatnonzero(is_free[first:last])
            gaps = one.output_tokens - 1 - np.nansum(fixed[first:last])
            if len(free) and gaps > 0:
                known.append((free, gaps))
    counts, seen = np.zeros(len(lasted)), np.zeros(len(lasted))
    for free, gaps in known:
        counts[free] += gaps / lasted[free].sum()
        seen[free] += 1
    counts *= lasted / np.maximum(seen, 1)
    for _ in range(PASSES):
        for free, gaps in known:
            counts[free] *= min(max(gaps / counts[free].sum(), 1 / CHANGE_MAX), CHANGE_MAX)
    return np.where(is_free, counts, fixed)


def _prefill(
    begun: Sequence[TimedRequest],
    spans: Sequence[tuple[int, ...]],
    lasted: Vector,
    busy: NDArray[np.bool_],
    budget: int,
) -> Vector:
    """Return tokens, pairs and steps of prefill between consecutive events, with shape (events - 1, 3)."""
    done = np.zeros((len(lasted), 3))
    groups: dict[int, list[int]] = {}  # requests whose first tokens came in one step, by the index of that event
    for number, (_, first, _) in enumerate(spans):
        groups.setdefault(first, []).append(number)
    free = 0  # event at which all earlier prefills were done
    for first, members in sorted(groups.items()):
        tokens = pairs = 0
        for number in members:
            one = begun[number]
            cached = one.cached_tokens
            new = max(1, one.prompt_tokens - cached)
            tokens += new
            pairs += new * cached + new * (new + 1) // 2
        came = min(spans[number][0] for number in members)
        began = min(first - 1, max(free, came))
        span = slice(began, first)
        share = lasted[span] / lasted[span].sum()
        steps = -(-tokens // budget) + (STEP_REMAINING if came > free and busy[began] else 0.0)
        done[span] += share[:, None] * (tokens, pairs, steps)
        free = first
    return done


def regression(shares: Vector) -> Vector:
    """Return the non-negative cost of each column that explains the observed times best, robust to outliers.

    `shares` has a row per observed time and a column per kind of work. A cell is the amount of that work, divided by
    the time. With the right costs the sum of amount times cost is 1 in each row.
    """
    units = np.maximum(shares.mean(axis=0), 1e-12)  # scales each cost to its share of the times
    columns = shares.shape[1]
    rows = np.vstack([shares / units, SHRINK * np.eye(columns)])
    wanted = np.append(np.ones(len(shares)), np.zeros(columns))
    x = nnls(rows, wanted)[0]
    for loss in ("soft_l1", "cauchy"):  # cauchy ignores outliers, but needs a good start
        found = least_squares(
            lambda x: rows @ x - wanted, np.maximum(x, 1e-9), lambda _: rows, bounds=(0.0, np.inf), loss=loss,
            f_scale=OUTLIER,
        )  # fmt: skip
        x = np.asarray(found.x)
    return np.asarray(x / units)
