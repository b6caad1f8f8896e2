"""The totals of a comparison are bounded and complete."""

import pytest

from forebay.events.decisions import CostTerms
from forebay.replay.diff.report import MovedRequest
from forebay.replay.diff.tally import (
    INTERVAL_FIRST_US,
    INTERVALS_MAX,
    MOST,
    PairTally,
    Series,
    WorldTally,
    max_over_mean,
)


def terms(device: int, host: int = 0, disk: int = 0, store: int = 0) -> CostTerms:
    return CostTerms(
        cost=0.0,
        prefill_blocks=0.0,
        overlap_credit=0.0,
        decode_blocks=0.0,
        active_requests=0,
        device_overlap=device,
        host_overlap=host,
        disk_overlap=disk,
        store_overlap=store,
    )


def moved(number: int, gain: int) -> MovedRequest:
    return MovedRequest(
        request_id=f"r{number}",
        at_us=number,
        prompt_tokens=1,
        blocks=1,
        worker_id="a",
        rank=0,
        overlap=1_000,
        other_worker_id="b",
        other_rank=0,
        other_overlap=1_000 + gain,
        by_choice=False,
    )


@pytest.mark.parametrize("count", [1, INTERVALS_MAX, INTERVALS_MAX + 1, 5 * INTERVALS_MAX])
def test_time_bins_widen_without_losing_events(count: int) -> None:
    series = Series(7)
    for number in range(count):
        at_us = 7 + number * INTERVAL_FIRST_US
        series.route(0, at_us, ("a", 0), 10, 4)
        series.route(1, at_us, ("b", 0), 10, 5)
    intervals = series.intervals([("a", 0), ("b", 0)])
    assert len(intervals) <= INTERVALS_MAX
    assert {(one.reuse, one.other_reuse, one.max_over_mean, one.other_max_over_mean) for one in intervals} == {
        (0.4, 0.5, 2.0, 2.0)
    }
    assert [one.after_s for one in intervals] == [number * series.width_us / 1e6 for number in range(len(intervals))]


def test_a_gap_in_time_leaves_empty_bins() -> None:
    series = Series(0)
    for at_us in (0, 1 << 40):
        series.route(0, at_us, ("a", 0), 10, 5)
    intervals = series.intervals([("a", 0)])
    assert len(intervals) <= INTERVALS_MAX
    assert (intervals[0].reuse, intervals[-1].reuse, intervals[1].reuse) == (0.5, 0.5, None)
    assert intervals[1].max_over_mean is intervals[0].other_reuse is None


def test_gained_and_lost_overlap_is_summed_by_tier() -> None:
    sums = PairTally()
    sums.add(terms(5, 1, 0), terms(2, 4, 0), later=True)
    sums.add(terms(1, 0, 7), terms(9, 0, 0), later=True)
    overlap = sums.overlap()
    assert (overlap.won.device, overlap.won.host, overlap.won.disk) == (8, 3, 0)
    assert (overlap.lost.device, overlap.lost.host, overlap.lost.disk) == (3, 0, 7)
    assert (overlap.later, overlap.later_won) == (2, 1)
    sums.add(terms(1, 0, 0, 4), terms(1, 0, 0, 6), later=False)
    sums.add(terms(1, 0, 0, 4), terms(1, 0, 0, 1), later=False)
    assert (sums.overlap().won.store, sums.overlap().lost.store) == (2, 3)


def test_the_most_moved_requests_are_kept_and_ties_go_to_the_earlier() -> None:
    sums = PairTally()
    for number in range(3 * MOST):
        sums.move(moved(number, (-1) ** number * (number // 2)))
    most = sums.most()
    assert [abs(one.gain) for one in most] == sorted(
        (number // 2 for number in range(2 * MOST, 3 * MOST)), reverse=True
    )
    assert [one.request_id for one in most][:2] == [f"r{3 * MOST - 2}", f"r{3 * MOST - 1}"]


def test_waits_are_reported_in_milliseconds() -> None:
    tally = WorldTally()
    tally.waits_us.extend([0, 1_000, 1_001, 2_000, 2_001, 64_000])
    side = tally.side([], 0, None)
    assert side.wait_ms["max"] == 64.0
    assert side.wait_ms["p50"] == 1.001


def test_a_comparison_without_requests() -> None:
    assert max_over_mean([0, 0]) is None
    assert max_over_mean([]) is None
    assert max_over_mean([3, 1]) == 1.5
