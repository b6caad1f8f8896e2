"""Hit rates over a sliding window."""

import pytest

from forebay.kv_tiers.hit_rates import HitRates, TierHits


def test_rates_are_shares_of_blocks() -> None:
    one = HitRates()
    assert one.rate("host") == 0
    one.observe(10, device=2, host=3)
    one.observe(30, disk=9, store=10)
    assert [one.rate(tier) for tier in ("device", "host", "disk", "store")] == [0.05, 0.075, 0.225, 0.25]


def test_old_requests_leave_the_window() -> None:
    one = HitRates(window=2)
    for total in (10, 20, 30):
        one.observe(total, 1, 2, 3, 4)
    assert one.sums == TierHits(50, 2, 4, 6, 8)


def test_a_window_has_at_least_one_request() -> None:
    with pytest.raises(ValueError, match="at least 1 request, not 0"):
        HitRates(0)
