"""Data of the report's request explorer, which shows single requests: columns of numbers, limited in size."""

from array import array
from collections.abc import Iterable, Sequence
from heapq import nlargest
from itertools import zip_longest
from typing import Any

from forebay.cli.simulate.report.measures import Measured
from forebay.events.decisions import CostTerms, RequestRouted
from forebay.simulate.outcome import SimulationOutcome, worker_names
from forebay.simulate.slo import latencies_us

ROWS_MAX = 20_000  # requests per page
CELLS_MAX = 120_000  # requests times runs per page
UNKNOWN = -1
TERMS = (
    "cost", "prefill_blocks", "overlap_credit", "eviction_cost", "decode_blocks", "active_requests", "device_overlap",
)  # fmt: skip


def explored(runs: Sequence[Measured]) -> dict[str, Any]:
    """Return the data of the explorer. Requests of different runs match if they have the same number in the workload.

    `rows`: workload numbers of the shown requests, in order. `of`: number of all requests. `prompt` and `output`:
    tokens per shown request. `runs`: the columns of `_run` for each run; unknown values are -1.
    """
    places = [_places(one.run.outcome) for one in runs]
    of = [any(some) for some in zip_longest(*([place != UNKNOWN for place in some] for some in places))]
    rows = _chosen(runs, [number for number, came in enumerate(of) if came])
    taken = [[some[number] if number < len(some) else UNKNOWN for number in rows] for some in places]
    tokens = {}
    for name in ("prompt", "output"):
        columns = [_taken(one.run.outcome, f"{name}_tokens", some) for one, some in zip(runs, taken, strict=True)]
        tokens[name] = [max(values) for values in zip(*columns, strict=True)]  # known under at least one run
    return {
        "rows": rows,
        "of": sum(of),
        **tokens,
        "runs": [_run(one, some) for one, some in zip(runs, taken, strict=True)],
    }


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
        slowest = nlargest(each, latencies_us(one.run.outcome), key=lambda times: (times[1], -times[0]))
        kept.update(number_of[place] for place, *_ in slowest)
    others = [number for number in numbers if number not in kept]
    left = room - len(kept)
    kept.update(others[at * len(others) // left] for at in range(left))
    return sorted(kept)


def _run(one: Measured, places: Sequence[int]) -> dict[str, Any]:
    """Return the columns of a run, for the index of each row's request in `places`, -1 if it never arrived.

    Times are in microseconds. `first` and `last` count from the arrival. `worker` and `prefiller` are indexes into
    `workers`. `failures` has the reason of each failed row, and `routed` the decision of each row or None.
    """
    outcome, failures = one.run.outcome, one.run.outcome.requests.failures
    names = ("worker", "prefiller", "cached_tokens", "attempts", "arrived_us")
    columns: dict[str, Any] = {name: _taken(outcome, name, places) for name in names}
    for name in ("first", "last"):
        columns[name] = [
            time_us - arrived_us if place != UNKNOWN and place not in failures else UNKNOWN
            for time_us, arrived_us, place in zip(
                _taken(outcome, f"{name}_us", places), columns["arrived_us"], places, strict=True
            )
        ]
    workers = max(outcome.requests.column("worker"), default=UNKNOWN) + 1
    return {
        **columns,
        "workers": worker_names(outcome) or [f"worker {number}" for number in range(workers)],
        "failures": {str(row): failures[place] for row, place in enumerate(places) if place in failures},
        "routed": [_decision(outcome.routed.get(place)) for place in places],
    }


def _decision(routed: RequestRouted | None) -> list[Any] | None:
    """Return a decision as mode, candidates, ties, wait, cost terms, and the runner-up with its cost terms."""
    if routed is None:
        return None
    other = routed.runner_up
    terms = [_short(routed.terms), *([] if other is None else [other.worker_id, _short(other.terms)])]
    return [routed.mode, routed.candidates, routed.ties, routed.waited_us, *terms]


def _short(terms: CostTerms) -> list[float]:
    """Return the cost terms with at most two decimals; integers if possible."""
    rounded = [round(getattr(terms, name), 2) for name in TERMS]
    return [int(value) if value == int(value) else value for value in rounded]


def _taken(outcome: SimulationOutcome, name: str, places: Iterable[int]) -> list[int]:
    column = outcome.requests.column(name)
    return [UNKNOWN if place == UNKNOWN else column[place] for place in places]
