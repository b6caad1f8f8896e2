"""Metrics over time, compared with values that are computed directly from the events."""

import random
import sqlite3
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from forebay.events.decisions import RequestAborted, RequestRejected, RequestRouted
from forebay.events.progress import FirstTokenEmitted, RequestFailed, RequestFinished
from forebay.events.requests import RequestSubmitted
from forebay.journal.groups import groups_of
from forebay.journal.reader import read_whole
from forebay.replay.catalog import histogram
from forebay.replay.catalog.request_steps import CatalogRequest
from forebay.replay.catalog.series import LEVELS_US, SECOND_US, MetricRecorder, remove_before, series, worker_activity
from forebay.transport.sqlite.log import SqliteLog
from tests.logs.own_policy import CUSTOM
from tests.replay.catalog.scene import RECORDINGS, fill, new_tables

ERROR_MAX = 0.02
SEED = 7
DAY_US = 86_400 * SECOND_US


def quantile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


class Reference:
    """The same metrics per second, kept as lists."""

    def __init__(self) -> None:
        self.counts: dict[str, dict[int, int]] = defaultdict(lambda: defaultdict(int))
        self.values: dict[str, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))

    def count(self, name: str, at_us: int, number: int = 1) -> None:
        self.counts[name][at_us // SECOND_US] += number

    def add(self, name: str, at_us: int, value: float) -> None:
        self.values[name][at_us // SECOND_US].append(value)

    def check(self, connection: sqlite3.Connection, from_us: int, to_us: int, points: int) -> None:
        found = series(connection, from_us, to_us, points)
        assert len(found.requests_per_s) <= points
        assert found.from_us <= from_us < found.from_us + found.interval_us
        for number in range(len(found.requests_per_s)):
            begin = found.from_us + number * found.interval_us
            end = min(begin + found.interval_us, -(-to_us // SECOND_US) * SECOND_US)
            seconds = range(begin // SECOND_US, end // SECOND_US)

            def rate(name: str, seconds: range = seconds) -> float:
                return sum(self.counts[name][second] for second in seconds) / len(seconds)

            assert found.requests_per_s[number] == pytest.approx(rate("submitted"))
            assert found.failed_per_s[number] == pytest.approx(rate("failed"))
            prompt = rate("prompt_tokens")
            assert found.hit_rate[number] == (pytest.approx(rate("cached_tokens") / prompt) if prompt else None)
            quantiles = {
                "ttft": (found.ttft_p50_us[number], found.ttft_p95_us[number]),
                "itl": (found.itl_p50_us[number], found.itl_p95_us[number]),
            }
            for name, shown in quantiles.items():
                values = [value for second in seconds for value in self.values[name][second]]
                for share, value in zip((0.5, 0.95), shown, strict=True):
                    expected = pytest.approx(quantile(values, share), rel=ERROR_MAX) if values else None
                    assert value == expected


async def reference_of(log: SqliteLog, partition: int) -> Reference:
    """Return the metrics of a log, from its events and nothing else."""
    reader = await read_whole(log, partition, CUSTOM)
    reference = Reference()
    submitted: dict[str, tuple[int, int]] = {}
    on: dict[str, tuple[int, str, int]] = {}
    first_us: dict[str, int] = {}
    stages: dict[str, str] = {}

    def on_applied(_: str, event: Any, now_us: int, decided: Any) -> None:
        current = getattr(event, "attempt", 0), getattr(event, "worker_id", ""), getattr(event, "worker_epoch", 0)
        match event:
            case RequestSubmitted() if decided:
                reference.count("submitted", now_us)
                if not isinstance(decided[0], RequestRejected) or decided[0].reason != "duplicate_id":
                    submitted[event.request_id] = now_us, event.prompt_tokens
                    first_us.pop(event.request_id, None)
            case FirstTokenEmitted() if on.get(event.request_id) == current and event.request_id not in first_us:
                first_us[event.request_id] = now_us
                if event.request_id in submitted:
                    since_us, prompt_tokens = submitted[event.request_id]
                    reference.add("ttft", now_us, now_us - since_us)
                    reference.count("prompt_tokens", now_us, prompt_tokens)
                    reference.count("cached_tokens", now_us, min(event.cached_tokens, prompt_tokens))
            case RequestFinished() if on.get(event.request_id) == current:
                if event.request_id in first_us and event.output_tokens > 1:
                    reference.add("itl", now_us, (now_us - first_us[event.request_id]) / (event.output_tokens - 1))
                del on[event.request_id]
            case RequestFailed() if on.get(event.request_id) == current and stages[event.request_id] != "prefill":
                reference.count("failed", now_us)
                del on[event.request_id]
        for one in decided:
            match one:
                case RequestRouted():
                    on[one.request_id] = one.attempt, one.worker_id, one.worker_epoch
                    stages[one.request_id] = one.stage
                case RequestRejected():
                    reference.count("failed", now_us)
                case RequestAborted():
                    reference.count("failed", now_us, one.reason != "cancelled")
                    on.pop(one.request_id, None)

    reader.followed.on_applied = on_applied
    async for step in reader:
        assert step.divergence is None
    return reference


@pytest.mark.parametrize("path", [one for one in RECORDINGS if one.stem != "from-snapshot"], ids=lambda path: path.stem)
@pytest.mark.parametrize("reopen_every", [0, 1])
async def test_series_equal_the_events(path: Path, reopen_every: int) -> None:
    log = SqliteLog.open(path, readonly=True)
    for partition in (await groups_of(log)).values():
        connection = new_tables()
        reader = await fill(connection, log, partition, write_every=7, reopen_every=reopen_every)
        reference = await reference_of(log, partition)
        end_us = reader.world.now_us + 1
        begin_us = min(reference.counts["submitted"], default=0) * SECOND_US
        for span_us, points in ((3 * SECOND_US, 600), (end_us - begin_us, 5), (end_us - begin_us, 600)):
            reference.check(connection, end_us - span_us, end_us, points)
    log.close()


def random_requests(seed: int, days: float) -> list[tuple[int, CatalogRequest]]:
    """Return requests with the times of their first tokens, at times that become rarer."""
    rng = random.Random(seed)
    found, at_us = [], 5 * DAY_US
    for number in range(2_000):
        at_us += int(rng.expovariate(1) * days * DAY_US / 2_000)
        one = CatalogRequest(number, f"r{number}", "m", "", rng.randint(1, 4_000), at_us)
        one.cached_tokens = rng.randint(0, one.prompt_tokens)
        one.ttft_us = int(rng.lognormvariate(12, 2)) + 1
        found.append((at_us, one))
    return found


@pytest.mark.parametrize("days", [0.001, 0.3, 40.0])
def test_spans_of_any_length_are_sums(days: float) -> None:
    connection, reference = new_tables(), Reference()
    recorder = MetricRecorder()
    recorder.open(connection)
    found = random_requests(SEED, days)
    for number, (at_us, one) in enumerate(found):
        recorder.count_submission(at_us)
        recorder.count_first_token(one, "a", at_us)
        reference.count("submitted", at_us)
        reference.add("ttft", at_us, one.ttft_us or 0)
        if number % 250 == 0:
            recorder.write(connection)
            recorder = MetricRecorder()
            recorder.open(connection)
    recorder.write(connection)
    begin_us, end_us = found[0][0], found[-1][0] + 1
    for points in (2, 60, 600):
        shown = series(connection, begin_us, end_us, points)
        assert len(shown.requests_per_s) <= points
        values = [one.ttft_us or 0 for _, one in found]
        intervals: dict[int, list[float]] = defaultdict(list)
        for (at_us, _), value in zip(found, values, strict=True):
            intervals[(at_us - shown.from_us) // shown.interval_us].append(value)
        for number, median in enumerate(shown.ttft_p50_us):
            some = intervals.get(number)
            assert median == (pytest.approx(quantile(some, 0.5), rel=ERROR_MAX) if some else None)
        total = sum(rate * shown.interval_us / SECOND_US for rate in shown.requests_per_s[:-1])
        assert total == pytest.approx(sum(len(intervals[number]) for number in range(len(shown.requests_per_s) - 1)))


def test_removed_rows_do_not_change_longer_intervals() -> None:
    connection = new_tables()
    recorder = MetricRecorder()
    recorder.open(connection)
    found = random_requests(SEED, 0.3)
    for at_us, _ in found:
        recorder.count_submission(at_us)
    recorder.write(connection)
    begin_us, cut_us, end_us = found[0][0], found[1_000][0], found[-1][0]
    before = series(connection, cut_us, end_us, 600)
    remove_before(connection, cut_us)
    assert series(connection, cut_us, end_us, 600) == before
    assert connection.execute("SELECT min(begin_us) FROM metrics").fetchone()[0] >= begin_us - LEVELS_US[-1]
    counted = "SELECT count(*) FROM metrics WHERE level_us = ? AND begin_us < ?"
    assert connection.execute(counted, [SECOND_US, cut_us - 10 * SECOND_US]).fetchone() == (0,)
    reopened = MetricRecorder()
    reopened.open(connection)
    reopened.count_submission(end_us)
    reopened.write(connection)
    total = "SELECT sum(submitted) FROM metrics WHERE level_us = ?"
    assert connection.execute(total, [LEVELS_US[-1]]).fetchone() == (len(found) + 1,)


def test_activity_of_workers_covers_the_last_minute() -> None:
    connection = new_tables()
    recorder = MetricRecorder()
    recorder.open(connection)
    for second in range(0, 200):
        one = CatalogRequest(second, f"r{second}", "m", "", 100, second * SECOND_US)
        one.cached_tokens, one.ttft_us = 25, 1_000 * (1 + second)
        recorder.count_first_token(one, "ab"[second % 2], second * SECOND_US)
        if second % 30 == 0:
            recorder.write(connection)
    recorder.write(connection)
    found = worker_activity(connection, 119 * SECOND_US)
    assert [(one.worker_id, one.first_tokens, one.hit_rate) for one in found] == [("a", 30, 0.25), ("b", 30, 0.25)]
    assert found[0].ttft_p50_us == pytest.approx(89_000, rel=0.03)
    assert worker_activity(connection, 900 * SECOND_US) == []


def test_empty_tables_have_empty_series() -> None:
    connection = new_tables()
    shown = series(connection, 0, 1 << 57, 600)
    assert set(shown.requests_per_s) == {0.0}
    assert set(shown.hit_rate) == set(shown.ttft_p50_us) == {None}
    assert len(shown.requests_per_s) <= 600


def test_histograms_are_accurate_to_two_percent() -> None:
    rng = random.Random(SEED)
    for _ in range(50):
        values = [rng.lognormvariate(10, 3) + 1 for _ in range(rng.randint(1, 200))]
        made: histogram.Histogram = {}
        for value in values:
            histogram.add(made, value)
        assert histogram.decode(histogram.encode(made)) == made
        found = histogram.quantiles(made, (0.0, 0.5, 0.95, 1.0))
        for share, shown in zip((0.0, 0.5, 0.95, 1.0), found, strict=True):
            assert shown == pytest.approx(quantile(values, share), rel=ERROR_MAX)
    assert histogram.quantiles({}, (0.5,)) == [None]
