"""What came of a simulated workload, and its figures."""

import statistics
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from forebay.events.decisions import RequestRouted

FAILURES_SHOWN = 20  # a trace that fits nowhere fails in thousands of rows for the same reason
EXPLAINED_MAX = 20_000  # decisions that are kept whole, for people to look at
NOBODY = -1


@dataclass(slots=True)
class Served:
    """One request of the workload; times in virtual microseconds, as its client sees them.

    Attributes:
        worker: the number of the worker that it was routed to last; None before, and for those refused.
        cached_tokens: prompt tokens that this worker found in its cache.
        first_us: when its first token came; 0 for one without. `last_us` likewise, 0 where the answer is not complete.
        attempts: how many workers it was sent to, one after another: of those for its prompt and those for its answer
            the more.
        failure: why it has no answer, or not all of it; empty for one that has.
        number: which turn of the workload it is.
        prefiller: the number of the worker that computed its prompt for another; that had `cached_tokens` then.
        prefilled_us: when it had. The KV was `transferred_bytes`, there `transfer_us` after it was asked for.
    """

    arrived_us: int
    prompt_tokens: int
    output_tokens: int
    worker: int | None = None
    cached_tokens: int = 0
    first_us: int = 0
    last_us: int = 0
    attempts: int = 0
    failure: str = ""
    number: int = 0
    prefiller: int | None = None
    prefilled_us: int = 0
    transferred_bytes: int = 0
    transfer_us: int = 0


class Requests:
    """Every request of a run in the order of arrival, in columns: some 80 bytes each.

    Another 32 if the prompt of any was computed for another worker.
    """

    def __init__(self, served: Iterable[Served] = ()) -> None:
        self._columns = {name: array("q") for name in COLUMNS}
        self.failures: dict[int, str] = {}
        for one in served:
            self.append(one)

    def __len__(self) -> int:
        return len(self._columns["arrived_us"])

    def __iter__(self) -> Iterator[Served]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, place: int) -> Served:
        values: dict[str, int | None] = {name: column[place] for name, column in self._columns.items()}
        for name in WORKERS:
            if values.get(name) == NOBODY:
                values[name] = None
        return Served(**values, failure=self.failures.get(place, ""))  # type: ignore[arg-type]

    def append(self, served: Served) -> int:
        """Keep one; its place."""
        place = len(self)
        self._make_room(served)
        for name, column in self._columns.items():
            column.append(_value(served, name))
        if served.failure:
            self.failures[place] = served.failure
        return place

    def put(self, place: int, served: Served) -> None:
        """Keep what became of the one at `place`."""
        self._make_room(served)
        for name, column in self._columns.items():
            column[place] = _value(served, name)
        if served.failure:
            self.failures[place] = served.failure

    def _make_room(self, served: Served) -> None:
        if served.prefiller is not None and "prefiller" not in self._columns:
            self._columns |= {name: self.column(name) for name in TRANSFER_COLUMNS}

    def column(self, name: str) -> "array[int]":
        """One attribute of all, in order; a worker that is None is -1."""
        if name in self._columns:
            return self._columns[name]
        return array("q", [NOBODY if name in WORKERS else 0]) * len(self)


COLUMNS = (
    "arrived_us", "prompt_tokens", "output_tokens", "worker", "cached_tokens", "first_us", "last_us", "attempts",
    "number",
)  # fmt: skip


TRANSFER_COLUMNS = ("prefiller", "prefilled_us", "transferred_bytes", "transfer_us")
WORKERS = ("worker", "prefiller")


def _value(served: Served, name: str) -> int:
    value: int | None = getattr(served, name)
    return NOBODY if value is None else value


@dataclass(slots=True)
class Timeline:
    """How a run went, in at most some hundred bins of equal width; the bins grow with the run.

    Attributes:
        bin_us: their width; the first begins at 0.
        arrived: requests that came in each; `finished`, those that were answered or failed.
        prompt_tokens: of those whose prompt was computed in it; `cached_tokens` of these were found.
        queued: requests that waited in the router at its end.
        workers: at its end, how many workers were members of the fleet.
        computed: by worker, prompt tokens computed in each bin.
        running: by worker, at the end of each; `waiting` in the engine, and `blocks_used`, likewise.
    """

    bin_us: int = 1_000_000
    arrived: list[int] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    cached_tokens: list[int] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    workers: list[int] = field(default_factory=list)
    computed: list[list[int]] = field(default_factory=list)
    running: list[list[int]] = field(default_factory=list)
    waiting: list[list[int]] = field(default_factory=list)
    blocks_used: list[list[int]] = field(default_factory=list)


@dataclass(slots=True)
class Outcome:
    """A whole run. `digest` is of all decisions, in hexadecimal.

    Attributes:
        workers: the ids of all that ever took part, by their number.
        prefill_workers: the numbers of those that compute prompts for others.
        gpu_s: GPU seconds that workers were there for, from start to end or death.
        lasted_us: from the start to the last answer or failure.
        routed: of the first `EXPLAINED_MAX` requests, by place, the last decision that sent it somewhere.
    """

    requests: Requests = field(default_factory=Requests)
    digest: str = ""
    workers: list[str] = field(default_factory=list)
    prefill_workers: tuple[int, ...] = ()
    gpu_s: float = 0.0
    lasted_us: int = 0
    timeline: Timeline = field(default_factory=Timeline)
    routed: dict[int, RequestRouted] = field(default_factory=dict)


def worker_names(outcome: Outcome) -> list[str]:
    """The ids of all workers, with what some of them do, for people."""
    return [
        f"{name} (prefill)" if number in outcome.prefill_workers else name
        for number, name in enumerate(outcome.workers)
    ]


def summary(outcome: Outcome, workers: int) -> dict[str, Any]:
    """The figures of a run, as JSON prints them. Names are those of `forebay trace`.

    `workers` is how many there were at the start; more may have come.
    """
    workers = max(workers, len(outcome.workers))
    column, failures = outcome.requests.column, outcome.requests.failures
    computed = [0] * workers
    requests = [0] * workers
    prompt_tokens = cached_tokens = output_tokens = 0
    ttft_ms, itl_ms, e2e_ms = array("d"), array("d"), array("d")
    names = (
        "worker",
        "prefiller",
        "prompt_tokens",
        "cached_tokens",
        "output_tokens",
        "arrived_us",
        "first_us",
        "last_us",
    )
    rows = zip(*map(column, names), strict=True)
    for place, (worker, prefiller, prompt, cached, output, arrived_us, first_us, last_us) in enumerate(rows):
        if place in failures:
            continue
        assert worker != NOBODY, "who has an answer has it from a worker"
        computed[worker if prefiller == NOBODY else prefiller] += prompt - cached
        requests[worker] += 1
        prompt_tokens += prompt
        cached_tokens += cached
        output_tokens += output
        ttft_ms.append((first_us - arrived_us) / 1e3)
        e2e_ms.append((last_us - arrived_us) / 1e3)
        if output > 1:
            itl_ms.append((last_us - first_us) / 1e3 / (output - 1))
    # Where some are there for that, the others are not to compute as much.
    balanced = [computed[number] for number in outcome.prefill_workers] or computed
    shown = [{"request": place + 1, "reason": failures[place]} for place in sorted(failures)[:FAILURES_SHOWN]]
    return {
        "requests": len(ttft_ms),
        "failed": len(failures),
        "failures": shown,
        "prefix_reuse": cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        "load_max_over_mean": max(balanced) * len(balanced) / sum(balanced) if sum(balanced) else 0.0,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "ttft_ms": percentiles(ttft_ms),
        "itl_ms": percentiles(itl_ms),
        "e2e_ms": percentiles(e2e_ms),
        "workers": [
            {"requests": count, "computed_tokens": tokens} for count, tokens in zip(requests, computed, strict=True)
        ],
        "digest": outcome.digest,
        **(_transfers(outcome) if outcome.prefill_workers else {}),
    }


def _transfers(outcome: Outcome) -> dict[str, Any]:
    """The figures that only a run with prefill workers has: of answered requests whose prompt one of them computed."""
    column, failures = outcome.requests.column, outcome.requests.failures
    prefill_ms, transfer_ms = array("d"), array("d")
    moved = 0
    names = ("prefiller", "arrived_us", "prefilled_us", "transferred_bytes", "transfer_us")
    for place, (prefiller, arrived_us, prefilled_us, of_it, took_us) in enumerate(
        zip(*map(column, names), strict=True)
    ):
        if prefiller != NOBODY and place not in failures:
            prefill_ms.append((prefilled_us - arrived_us) / 1e3)
            transfer_ms.append(took_us / 1e3)
            moved += of_it
    return {
        "prefilled_remotely": len(prefill_ms),
        "transferred_bytes": moved,
        "prefill_ms": percentiles(prefill_ms),
        "transfer_ms": percentiles(transfer_ms),
    }


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Mean, p50, p90 and p99, interpolated between ranks; empty for no values."""
    if not values:
        return {}
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else [values[0]] * 99
    return {"mean": statistics.fmean(values), "p50": cuts[49], "p90": cuts[89], "p99": cuts[98]}
