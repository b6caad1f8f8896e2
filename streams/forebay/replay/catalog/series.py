"""Metrics over time: counts and histograms per interval, written by a pass and merged by queries.

There are intervals of each length of `LEVELS_US`, so that a query over any span reads a bounded number of rows. An
interval is the sum of the shorter intervals in it. The owner's clock never runs backwards, so only the newest interval
of each length can change.
"""

import sqlite3
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from forebay.replay.catalog import histogram
from forebay.replay.catalog.facts import MetricSeries, WorkerActivity
from forebay.replay.catalog.histogram import Histogram
from forebay.replay.catalog.request_steps import UNSUCCESSFUL, CatalogRequest

SECOND_US = 1_000_000
LEVELS_US = tuple(seconds * SECOND_US for seconds in (1, 10, 60, 600, 3_600, 36_000, 360_000))  # each divides the next
ROWS_MAX = 600  # rows of one level that a query reads: about 50 ms of work
POINTS_MAX = 600
SLICE_US = 10 * SECOND_US  # activity of workers is counted per slice
ACTIVITY_US = 60 * SECOND_US
_VALUES = "begin_us, submitted, failed, prompt_tokens, cached_tokens, ttft, itl"
_MARKS = ", ".join("?" * 8)
SCHEMA = """
CREATE TABLE metrics (
    level_us INTEGER, begin_us INTEGER, submitted INTEGER, failed INTEGER, prompt_tokens INTEGER,
    cached_tokens INTEGER, ttft BLOB, itl BLOB, PRIMARY KEY (level_us, begin_us)
) WITHOUT ROWID;
CREATE TABLE worker_activity (
    begin_us INTEGER, worker_id TEXT, first_tokens INTEGER, prompt_tokens INTEGER, cached_tokens INTEGER, ttft BLOB,
    PRIMARY KEY (begin_us, worker_id)
) WITHOUT ROWID;
"""


@dataclass(slots=True)
class MetricInterval:
    begin_us: int
    submitted: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: Histogram = field(default_factory=dict)
    itl: Histogram = field(default_factory=dict)

    @classmethod
    def of_row(cls, begin_us: int, row: Sequence[Any]) -> "MetricInterval":
        submitted, failed, prompt_tokens, cached_tokens, ttft, itl = row
        counts = submitted, failed, prompt_tokens, cached_tokens
        return cls(begin_us, *counts, ttft=histogram.decode(ttft), itl=histogram.decode(itl))

    def merge(self, other: "MetricInterval") -> None:
        self.submitted += other.submitted
        self.failed += other.failed
        self.prompt_tokens += other.prompt_tokens
        self.cached_tokens += other.cached_tokens
        histogram.merge(self.ttft, other.ttft)
        histogram.merge(self.itl, other.itl)

    def row(self, level_us: int) -> tuple[int | bytes, ...]:
        counts = self.submitted, self.failed, self.prompt_tokens, self.cached_tokens
        return level_us, self.begin_us, *counts, histogram.encode(self.ttft), histogram.encode(self.itl)


@dataclass(slots=True)
class WorkerSlice:
    first_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttft: Histogram = field(default_factory=dict)

    def add(self, first_tokens: int, prompt_tokens: int, cached_tokens: int, ttft: bytes) -> None:
        self.first_tokens += first_tokens
        self.prompt_tokens += prompt_tokens
        self.cached_tokens += cached_tokens
        histogram.merge(self.ttft, histogram.decode(ttft))


class MetricRecorder:
    """Counts events in the newest intervals, and writes the intervals that changed.

    Events count in the shortest interval only. `_ended` has a sum per longer interval, of the shorter ones that ended.
    """

    def __init__(self) -> None:
        self._newest = MetricInterval(0)
        self._ended = [MetricInterval(0) for _ in LEVELS_US[1:]]
        self._workers: dict[str, WorkerSlice] = {}
        self._slice_us = 0
        self._rows: list[tuple[int | bytes, ...]] = []
        self._worker_rows: list[tuple[int | str | bytes, ...]] = []
        self._is_changed = False

    def open(self, connection: sqlite3.Connection) -> None:
        last = f"SELECT {_VALUES} FROM metrics WHERE level_us = ? ORDER BY begin_us DESC LIMIT 1"
        for begin_us, *values in connection.execute(last, [LEVELS_US[0]]):
            self._newest = MetricInterval.of_row(begin_us, values)
        span = f"SELECT {_VALUES} FROM metrics WHERE level_us = ? AND begin_us >= ? AND begin_us < ?"
        end_us = self._newest.begin_us
        for number, (shorter_us, level_us) in enumerate(pairwise(LEVELS_US)):
            ended = self._ended[number] = MetricInterval(end_us - end_us % level_us)
            for begin_us, *values in connection.execute(span, [shorter_us, ended.begin_us, end_us]):
                ended.merge(MetricInterval.of_row(begin_us, values))
            end_us = ended.begin_us
        newest = "SELECT * FROM worker_activity WHERE begin_us = (SELECT max(begin_us) FROM worker_activity)"
        for begin_us, worker_id, *values in connection.execute(newest):
            self._slice_us = begin_us
            self._workers[worker_id] = WorkerSlice()
            self._workers[worker_id].add(*values)

    def count_submission(self, now_us: int) -> None:
        self._roll(now_us)
        self._newest.submitted += 1

    def count_first_token(self, request: CatalogRequest, worker_id: str, now_us: int) -> None:
        self._roll(now_us)
        cached_tokens = request.cached_tokens or 0
        ttft = None if request.ttft_us is None else histogram.bucket_of(request.ttft_us)
        worker = self._workers.get(worker_id)
        if worker is None:
            worker = self._workers[worker_id] = WorkerSlice()
        worker.first_tokens += 1
        both: tuple[WorkerSlice | MetricInterval, ...] = (worker, self._newest)
        for counted in both:
            counted.prompt_tokens += request.prompt_tokens
            counted.cached_tokens += cached_tokens
            if ttft is not None:
                counted.ttft[ttft] = counted.ttft.get(ttft, 0) + 1

    def count_end(self, request: CatalogRequest, now_us: int) -> None:
        self._roll(now_us)
        if request.state == "finished" and (itl_us := request.itl_us) is not None:
            histogram.add(self._newest.itl, itl_us)
        elif request.state in UNSUCCESSFUL:
            self._newest.failed += 1

    def write(self, connection: sqlite3.Connection) -> None:
        if self._is_changed:
            total = self._newest
            self._rows.append(total.row(LEVELS_US[0]))
            for ended, level_us in zip(self._ended, LEVELS_US[1:], strict=True):
                longer = MetricInterval(ended.begin_us)
                longer.merge(ended)
                longer.merge(total)
                total = longer
                self._rows.append(total.row(level_us))
            self._worker_rows += self._slice_rows()
            self._is_changed = False
        connection.executemany(f"INSERT OR REPLACE INTO metrics VALUES ({_MARKS})", self._rows)
        connection.executemany("INSERT OR REPLACE INTO worker_activity VALUES (?, ?, ?, ?, ?, ?)", self._worker_rows)
        self._rows.clear()
        self._worker_rows.clear()

    def _roll(self, now_us: int) -> None:
        """Begin new intervals for those that have ended by `now_us`."""
        if now_us >= self._newest.begin_us + LEVELS_US[0]:
            total, self._newest = self._newest, MetricInterval(now_us - now_us % LEVELS_US[0])
            if self._is_changed:
                self._rows.append(total.row(LEVELS_US[0]))
            for number, level_us in enumerate(LEVELS_US[1:]):
                ended = self._ended[number]
                ended.merge(total)
                if now_us < ended.begin_us + level_us:
                    break
                if self._is_changed:
                    self._rows.append(ended.row(level_us))
                total, self._ended[number] = ended, MetricInterval(now_us - now_us % level_us)
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


def series(connection: sqlite3.Connection, from_us: int, to_us: int, points: int) -> MetricSeries:
    """Return metrics in at most `points` intervals, from 2 to `POINTS_MAX`. Quantiles are at most 2 % off.

    The first interval may begin up to one interval before `from_us`.
    """
    points, span_us = max(2, min(points, POINTS_MAX)), max(1, to_us - from_us)
    level_us = next((us for us in LEVELS_US if span_us <= ROWS_MAX * us), LEVELS_US[-1])
    interval_us = _interval_us(from_us, to_us, points, level_us)
    begin_us = from_us - from_us % interval_us
    intervals = [MetricInterval(start) for start in range(begin_us, max(to_us, begin_us + 1), interval_us)]
    select = f"SELECT {_VALUES} FROM metrics WHERE level_us = ? AND begin_us >= ? AND begin_us < ?"
    for start_us, *values in connection.execute(select, [level_us, begin_us, to_us]):
        intervals[(start_us - begin_us) // interval_us].merge(MetricInterval.of_row(start_us, values))
    # The last interval may end after the span, whose end is usually the newest event.
    ends_us = [min(one.begin_us + interval_us, -(-to_us // level_us) * level_us) for one in intervals]
    seconds = [max(end_us - one.begin_us, level_us) / SECOND_US for one, end_us in zip(intervals, ends_us, strict=True)]
    ttft = [histogram.quantiles(one.ttft, (0.5, 0.95)) for one in intervals]
    itl = [histogram.quantiles(one.itl, (0.5, 0.95)) for one in intervals]
    return MetricSeries(
        from_us=begin_us,
        interval_us=interval_us,
        requests_per_s=[one.submitted / s for one, s in zip(intervals, seconds, strict=True)],
        failed_per_s=[one.failed / s for one, s in zip(intervals, seconds, strict=True)],
        ttft_p50_us=[median for median, _ in ttft],
        ttft_p95_us=[late for _, late in ttft],
        itl_p50_us=[median for median, _ in itl],
        itl_p95_us=[late for _, late in itl],
        hit_rate=[_share(one.cached_tokens, one.prompt_tokens) for one in intervals],
    )


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
    # A longer interval is the sum of shorter ones, so they stay as long as it has not ended.
    for level_us, longer_us in pairwise((*LEVELS_US, LEVELS_US[-1])):
        end_us = now_us - now_us % longer_us
        connection.execute("DELETE FROM metrics WHERE level_us = ? AND begin_us < ?", [level_us, end_us])
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
