"""Metrics over time: counts and histograms per interval, written by a pass and merged by queries.

Every event counts at once in intervals of each length of `LEVELS_US`, so that a query over any span reads a bounded
number of rows. The owner's clock never runs backwards, so only the newest interval of each length can change.
"""

import sqlite3
from collections.abc import Iterable
from dataclasses import dataclass, field

from forebay.replay.catalog import histogram
from forebay.replay.catalog.catalog_request import UNSUCCESSFUL, CatalogRequest
from forebay.replay.catalog.facts import MetricSeries, WorkerActivity
from forebay.replay.catalog.histogram import Histogram

SECOND_US = 1_000_000
LEVELS_US = (SECOND_US, 60 * SECOND_US, 3_600 * SECOND_US, 86_400 * SECOND_US)
ROWS_MAX = 3_600  # rows of one level that a query reads: about 50 ms of work
POINTS_MAX = 600
SLICE_US = 10 * SECOND_US  # activity of workers is counted per slice
ACTIVITY_US = 60 * SECOND_US
SCHEMA = """
CREATE TABLE metrics (
    level_us INTEGER, begin_us INTEGER, submitted INTEGER, finished INTEGER, failed INTEGER, output_tokens INTEGER,
    prompt_tokens INTEGER, cached_tokens INTEGER, ttft BLOB, itl BLOB, PRIMARY KEY (level_us, begin_us)
) WITHOUT ROWID;
CREATE TABLE worker_activity (
    begin_us INTEGER, worker_id TEXT, first_tokens INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER, ttft BLOB,
    PRIMARY KEY (begin_us, worker_id)
) WITHOUT ROWID;
"""


@dataclass(slots=True)
class MetricInterval:
    """Metrics of one interval. `begin_us` is its beginning on the owner's clock."""

    begin_us: int
    submitted: int = 0
    finished: int = 0
    failed: int = 0
    output_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: Histogram = field(default_factory=dict)
    itl: Histogram = field(default_factory=dict)

    def add(self, row: tuple[int, int, int, int, int, int, bytes, bytes]) -> None:
        """Add a row of table `metrics`, without its key."""
        submitted, finished, failed, output_tokens, prompt_tokens, cached_tokens, ttft, itl = row
        self.submitted += submitted
        self.finished += finished
        self.failed += failed
        self.output_tokens += output_tokens
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        histogram.merge(self.ttft, ttft)
        histogram.merge(self.itl, itl)

    def row(self, level_us: int) -> tuple[int | bytes, ...]:
        """Return the row of table `metrics`."""
        counts = self.submitted, self.finished, self.failed, self.output_tokens, self.prompt_tokens, self.cached_tokens
        return level_us, self.begin_us, *counts, histogram.encode(self.ttft), histogram.encode(self.itl)


@dataclass(slots=True)
class WorkerSlice:
    """Activity of one worker in one slice."""

    first_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: Histogram = field(default_factory=dict)

    def add(self, first_tokens: int, prompt_tokens: int, cached_tokens: int, ttft: bytes) -> None:
        """Add a row of table `worker_activity`, without its key."""
        self.first_tokens += first_tokens
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        histogram.merge(self.ttft, ttft)


class MetricRecorder:
    """Counts events in the newest interval of each level. `write` writes the intervals that changed."""

    def __init__(self) -> None:
        self._current = [MetricInterval(0) for _ in LEVELS_US]
        self._workers: dict[str, WorkerSlice] = {}
        self._slice_us = 0
        self._next_us = 0  # when the first of the current intervals ends
        self._rows: list[tuple[int | bytes, ...]] = []
        self._worker_rows: list[tuple[int | str | bytes, ...]] = []
        self._is_changed = False

    def open(self, connection: sqlite3.Connection) -> None:
        """Continue with the newest intervals of the tables."""
        select = "SELECT * FROM metrics WHERE level_us = ? ORDER BY begin_us DESC LIMIT 1"
        for number, level_us in enumerate(LEVELS_US):
            for _, begin_us, *values in connection.execute(select, [level_us]):
                self._current[number] = MetricInterval(begin_us)
                self._current[number].add(tuple(values))
        self._next_us = min(one.begin_us + us for one, us in zip(self._current, LEVELS_US, strict=True))
        newest = "SELECT * FROM worker_activity WHERE begin_us = (SELECT max(begin_us) FROM worker_activity)"
        for begin_us, worker_id, *values in connection.execute(newest):
            self._slice_us = begin_us
            self._workers[worker_id] = WorkerSlice()
            self._workers[worker_id].add(*values)

    def count_submission(self, now_us: int) -> None:
        """Count a submitted request."""
        self._roll(now_us)
        for interval in self._current:
            interval.submitted += 1

    def count_first_token(self, request: CatalogRequest, worker_id: str, now_us: int) -> None:
        """Count the first token of a response, which `worker_id` emitted."""
        self._roll(now_us)
        cached_tokens = request.cached_tokens or 0
        ttft = None if request.ttft_us is None else histogram.bucket_of(request.ttft_us)
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = WorkerSlice()
        worker.first_tokens += 1
        both: list[WorkerSlice | MetricInterval] = [worker, *self._current]
        for counted in both:
            counted.prompt_tokens += request.prompt_tokens
            counted.cached_tokens += cached_tokens
            if ttft is not None:
                counted.ttft[ttft] = counted.ttft.get(ttft, 0) + 1

    def count_end(self, request: CatalogRequest, now_us: int) -> None:
        """Count the end of a request."""
        self._roll(now_us)
        if request.state == "finished":
            output_tokens, itl_us = request.output_tokens or 0, request.itl_us
            itl = None if itl_us is None else histogram.bucket_of(itl_us)
            for interval in self._current:
                interval.finished += 1
                interval.output_tokens += output_tokens
                if itl is not None:
                    interval.itl[itl] = interval.itl.get(itl, 0) + 1
        elif request.state in UNSUCCESSFUL:
            for interval in self._current:
                interval.failed += 1

    def write(self, connection: sqlite3.Connection) -> None:
        """Write the intervals that changed."""
        if self._is_changed:
            self._rows += [one.row(us) for one, us in zip(self._current, LEVELS_US, strict=True)]
            self._worker_rows += self._slice_rows()
            self._is_changed = False
        connection.executemany(f"INSERT OR REPLACE INTO metrics VALUES ({_MARKS})", self._rows)
        connection.executemany("INSERT OR REPLACE INTO worker_activity VALUES (?, ?, ?, ?, ?, ?)", self._worker_rows)
        self._rows.clear()
        self._worker_rows.clear()

    def _roll(self, now_us: int) -> None:
        """Begin new intervals for those that have ended by `now_us`."""
        if now_us >= self._next_us:
            for number, level_us in enumerate(LEVELS_US):
                interval = self._current[number]
                if now_us >= interval.begin_us + level_us:
                    if self._is_changed:
                        self._rows.append(interval.row(level_us))
                    self._current[number] = MetricInterval(now_us - now_us % level_us)
            self._next_us = self._current[0].begin_us + LEVELS_US[0]
            if now_us >= self._slice_us + SLICE_US:
                if self._is_changed:
                    self._worker_rows += self._slice_rows()
                self._workers.clear()
                self._slice_us = now_us - now_us % SLICE_US
        self._is_changed = True

    def _slice_rows(self) -> Iterable[tuple[int | str | bytes, ...]]:
        for worker_id, one in self._workers.items():
            counts = one.first_tokens, one.prompt_tokens, one.cached_tokens
            yield self._slice_us, worker_id, *counts, histogram.encode(one.ttft)


_MARKS = ", ".join("?" * 10)


def series(connection: sqlite3.Connection, from_us: int, to_us: int, points: int) -> MetricSeries:
    """Return metrics over a span of time. Quantiles are at most 2 % off.

    Args:
        connection: connection to the catalog.
        from_us: beginning of the span. The first interval may begin up to one interval earlier.
        to_us: end of the span, exclusive.
        points: maximum number of intervals, from 2 to `POINTS_MAX`.
    """
    points, span_us = max(2, min(points, POINTS_MAX)), max(1, to_us - from_us)
    level_us = next((us for us in LEVELS_US if span_us <= ROWS_MAX * us), LEVELS_US[-1])
    interval_us = _interval_us(from_us, to_us, points, level_us)
    begin_us = from_us - from_us % interval_us
    intervals = [MetricInterval(start) for start in range(begin_us, max(to_us, begin_us + 1), interval_us)]
    select = f"SELECT {_VALUES} FROM metrics WHERE level_us = ? AND begin_us >= ? AND begin_us < ?"
    for start_us, *values in connection.execute(select, [level_us, begin_us, to_us]):
        intervals[(start_us - begin_us) // interval_us].add(tuple(values))
    # The last interval may end after the span, whose end is usually the newest event.
    ends_us = [min(one.begin_us + interval_us, -(-to_us // level_us) * level_us) for one in intervals]
    seconds = [max(end_us - one.begin_us, level_us) / SECOND_US for one, end_us in zip(intervals, ends_us, strict=True)]
    ttft = [histogram.quantiles(one.ttft, (0.5, 0.95)) for one in intervals]
    itl = [histogram.quantiles(one.itl, (0.5, 0.95)) for one in intervals]
    return MetricSeries(
        from_us=begin_us,
        interval_us=interval_us,
        requests_per_s=[one.submitted / s for one, s in zip(intervals, seconds, strict=True)],
        finished_per_s=[one.finished / s for one, s in zip(intervals, seconds, strict=True)],
        failed_per_s=[one.failed / s for one, s in zip(intervals, seconds, strict=True)],
        output_tokens_per_s=[one.output_tokens / s for one, s in zip(intervals, seconds, strict=True)],
        ttft_p50_us=[median for median, _ in ttft],
        ttft_p95_us=[late for _, late in ttft],
        itl_p50_us=[median for median, _ in itl],
        itl_p95_us=[late for _, late in itl],
        hit_rate=[_share(one.cached_tokens, one.prompt_tokens) for one in intervals],
    )


_VALUES = "begin_us, submitted, finished, failed, output_tokens, prompt_tokens, cached_tokens, ttft, itl"


def worker_activity(connection: sqlite3.Connection, at_us: int) -> list[WorkerActivity]:
    """Return the activity of each worker that emitted a first token in the minute before a moment, by worker ID.

    Activity is counted in slices of ten seconds, so the minute may begin up to ten seconds late.
    """
    workers: dict[str, WorkerSlice] = {}
    select = "SELECT worker_id, first_tokens, prompt_tokens, cached_tokens, ttft FROM worker_activity"
    span = [at_us - ACTIVITY_US, at_us]
    for worker_id, *values in connection.execute(f"{select} WHERE begin_us > ? AND begin_us <= ?", span):
        workers.setdefault(worker_id, WorkerSlice()).add(*values)
    return [
        WorkerActivity(
            worker_id=worker_id,
            first_tokens=one.first_tokens,
            hit_rate=_share(one.cached_tokens, one.prompt_tokens),
            ttft_p50_us=histogram.quantiles(one.ttft, (0.5,))[0],
        )
        for worker_id, one in sorted(workers.items())
    ]


def remove_before(connection: sqlite3.Connection, now_us: int) -> None:
    """Remove the intervals that ended before a time."""
    for level_us in LEVELS_US:
        connection.execute("DELETE FROM metrics WHERE level_us = ? AND begin_us <= ?", [level_us, now_us - level_us])
    connection.execute("DELETE FROM worker_activity WHERE begin_us <= ?", [now_us - SLICE_US])


def _interval_us(from_us: int, to_us: int, points: int, level_us: int) -> int:
    """Return the shortest multiple of `level_us` with which at most `points` intervals cover the span."""
    span_us = max(1, to_us - from_us)
    count = -(-span_us // (points * level_us))
    if -(-to_us // (count * level_us)) - from_us // (count * level_us) > points:
        # The first interval begins before the span, so the span needs one interval less.
        count = -(-span_us // ((points - 1) * level_us))
    return count * level_us


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
