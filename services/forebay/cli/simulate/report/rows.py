"""Data of the report's request explorer, which shows single requests: columns of numbers, limited in size."""

from array import array
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import zip_longest
from typing import Any

from forebay.cli.simulate.report.measures import Measured, times_of
from forebay.events.decisions import RequestRouted
from forebay.simulate.outcome import SimulationOutcome, worker_names

ROWS_MAX = 20_000  # requests per page
CELLS_MAX = 120_000  # requests times runs per page
UNKNOWN = -1
REASONS_MAX = 1_000  # distinct failure reasons
DECISION = ("mode", "candidates", "ties", "waited_us")
TERMS = (
    "cost",
    "prefill_blocks",
    "overlap_credit",
    "eviction_cost",
    "decode_blocks",
    "active_requests",
    "device_overlap",
)


def explored(runs: Sequence[Measured]) -> dict[str, Any]:
    """Return the data of the explorer. Requests of different runs match if they have the same number in the workload.

    Returns:
        A dict. `rows`: workload numbers of the shown requests, in order. `of`: number of all requests. `prompt` and
        `output`: tokens per shown request. `runs`: the columns of `_run` for each run; unknown values are -1.
    """
    places = [_places(one.run.outcome) for one in runs]
    of = [any(some) for some in zip_longest(*([place != UNKNOWN for place in some] for some in places))]
    rows = _chosen(runs, [number for number, came in enumerate(of) if came])
    tokens: dict[str, list[int]] = {"prompt": [], "output": []}
    for number in rows:
        one, place = next(
            (one, some[number])
            for one, some in zip(runs, places, strict=True)
            if number < len(some) and some[number] != UNKNOWN
        )
        for name, column in tokens.items():
            column.append(one.run.outcome.requests.column(f"{name}_tokens")[place])
    shown = [_run(one, _taken(some, rows)) for one, some in zip(runs, places, strict=True)]
    return {"rows": rows, "of": sum(of), **tokens, "runs": shown}


def _places(outcome: SimulationOutcome) -> "array[int]":
    """Return for each request of the workload its index in the order of arrival."""
    numbers = outcome.requests.column("number")
    found = array("q", [UNKNOWN]) * (max(numbers, default=UNKNOWN) + 1)
    for place, number in enumerate(numbers):
        found[number] = place
    return found


def _chosen(runs: Sequence[Measured], numbers: Sequence[int]) -> list[int]:
    """Return the turns to show.

    If there are too many: failed ones up to a quarter, the slowest of each run up to a quarter, the others evenly.
    """
    room = min(ROWS_MAX, CELLS_MAX // max(1, len(runs)))
    if len(numbers) <= room:
        return list(numbers)
    kept: set[int] = set()
    each = room // 4 // len(runs)
    for one in runs:
        requests = one.run.outcome.requests
        number_of = requests.column("number")
        kept.update(number_of[place] for place in sorted(requests.failures)[:each])
        slowest = nlargest(each, times_of(one.run.outcome), key=lambda times: (times[1], -times[0]))
        kept.update(number_of[place] for place, *_ in slowest)
    others = [number for number in numbers if number not in kept]
    left = room - len(kept)
    kept.update(others[at * len(others) // left] for at in range(left))
    return sorted(kept)


def _run(one: Measured, known: Sequence[int]) -> dict[str, Any]:
    """Return the columns of a run.

    Times are in microseconds. `first` and `last` count from the arrival. `worker`, `prefiller` and `other` (the
    runner-up) are indexes into `workers`. `failures` maps rows to indexes into `reasons`. The cost terms of the
    selected worker begin with `my_`, those of the runner-up with `other_`.

    Args:
        known: index of each row's request; -1 if the request never arrived.
    """
    outcome = one.run.outcome
    requests = outcome.requests
    columns = {
        name: _taken(requests.column(name), known)
        for name in ("worker", "prefiller", "cached_tokens", "attempts", "arrived_us")
    }
    for name in ("first", "last"):
        times = _taken(requests.column(f"{name}_us"), known)
        columns[name] = [
            time - arrived if place != UNKNOWN and place not in requests.failures else UNKNOWN
            for time, arrived, place in zip(times, columns["arrived_us"], known, strict=True)
        ]
    reasons = sorted({requests.failures[place] for place in known if place in requests.failures})[:REASONS_MAX]
    numbers = {reason: number for number, reason in enumerate(reasons)}
    return {
        **columns,
        **_decisions(outcome, known),
        "workers": worker_names(outcome) or _numbered(outcome),
        "reasons": reasons,
        "failures": {
            str(row): numbers.get(requests.failures[place], UNKNOWN)
            for row, place in enumerate(known)
            if place in requests.failures
        },
    }


def _decisions(outcome: SimulationOutcome, places: Sequence[int]) -> dict[str, Any]:
    numbers = {worker: number for number, worker in enumerate(outcome.workers)}
    modes: dict[str, int] = {}
    columns: dict[str, list[Any]] = {name: [] for name in (*DECISION, "other", *_named("my"), *_named("other"))}
    for place in places:
        routed = outcome.routed.get(place)
        for name, value in _told(routed, numbers, modes).items():
            columns[name].append(value)
    return {**columns, "modes": list(modes)}


def _told(routed: RequestRouted | None, numbers: dict[str, int], modes: dict[str, int]) -> dict[str, Any]:
    if routed is None:
        return dict.fromkeys((*DECISION, "other", *_named("my"), *_named("other")), UNKNOWN)
    runner_up = routed.runner_up
    mine = [_short(getattr(routed.terms, name)) for name in TERMS]
    theirs = [UNKNOWN] * len(TERMS) if runner_up is None else [_short(getattr(runner_up.terms, name)) for name in TERMS]
    return {
        "mode": modes.setdefault(routed.mode, len(modes)),
        "candidates": routed.candidates,
        "ties": routed.ties,
        "waited_us": routed.waited_us,
        "other": UNKNOWN if runner_up is None else numbers.get(runner_up.worker_id, UNKNOWN),
        **dict(zip(_named("my"), mine, strict=True)),
        **dict(zip(_named("other"), theirs, strict=True)),
    }


def _named(whose: str) -> list[str]:
    return [f"{whose}_{name}" for name in TERMS]


def _short(value: float) -> float:
    """Return a value with at most two decimals; an integer if possible."""
    rounded = round(value, 2)
    return int(rounded) if rounded == int(rounded) else rounded


def _taken(column: Sequence[int], places: Iterable[int]) -> list[int]:
    return [UNKNOWN if place == UNKNOWN or place >= len(column) else column[place] for place in places]


def _numbered(outcome: SimulationOutcome) -> list[str]:
    return [f"worker {number}" for number in range(max(outcome.requests.column("worker"), default=UNKNOWN) + 1)]
