"""Data of the report's heat maps: load of each worker over time, reduced in size."""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay.cli.simulate.report.measures import US_PER_S, group_size
from forebay.simulate.outcome import SimulationOutcome, worker_names

ROWS, COLUMNS = 64, 120
KINDS = {
    "computed": "prompt tokens computed per second",
    "running": "running requests",
    "waiting": "requests waiting in the engine",
    "blocks_used": "KV blocks in use",
}


@dataclass(frozen=True, slots=True)
class Heat:
    """Heat map of one run: load per worker and time. If there are too many workers or bins, neighbours are averaged.

    Attributes:
        rows: label of each row, with the names of its workers.
        bin_s: seconds per column.
        values: for each kind of load, a list of values per row, with one value per column.
    """

    rows: list[str]
    bin_s: float
    values: dict[str, list[list[float]]]


def heat_of(outcome: SimulationOutcome) -> Heat:
    """Return the heat map of a run. It has no rows if the run has no timeline."""
    timeline = outcome.timeline
    workers, times = len(timeline.computed), len(timeline.arrived)
    down, across = group_size(workers, ROWS), group_size(times, COLUMNS)
    names = worker_names(outcome) or [str(number) for number in range(workers)]
    rows = [_named(names[at : at + down]) for at in range(0, workers, down)] if times else []
    bin_s = timeline.bin_us * across / US_PER_S
    values = {kind: _averaged(getattr(timeline, kind), down, across) for kind in KINDS}
    for line in values["computed"]:
        line[:] = [round(value / (timeline.bin_us / US_PER_S)) for value in line]
    return Heat(rows, bin_s, values)


def _named(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


def _averaged(lines: Sequence[Sequence[int]], down: int, across: int) -> list[list[float]]:
    found = []
    for at in range(0, len(lines), down):
        some = lines[at : at + down]
        sums = [sum(values) for values in zip(*some, strict=True)]
        chunks = (sums[start : start + across] for start in range(0, len(sums), across))
        found.append([round(sum(chunk) / (len(chunk) * len(some)), 1) for chunk in chunks])
    return found
