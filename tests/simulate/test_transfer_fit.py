"""Fitting links to recorded transfers recovers the generating parameters despite outliers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay.simulate.settings import Transfer
from forebay.simulate.transfer_fit import FITTED_MIN, GROUPS, ObservedTransfer, TransferFit, fit_transfers

A, B, C = ("a", 0), ("b", 0), ("c", 0)
S = 1_000_000


def moved(at: int, size: int, took_us: int, reader: tuple[str, int] = B) -> ObservedTransfer:
    return ObservedTransfer(A, reader, size, took_us, at * S + took_us)


def fitted(transfers: list[ObservedTransfer], **given: float) -> TransferFit:
    return fit_transfers(transfers, 1_000, given)


@given(
    latency_us=st.integers(0, 5_000),
    bandwidth=st.sampled_from([0.05, 1.0, 12.5]),
    count=st.integers(FITTED_MIN, 90),
    more=st.integers(1, 9),
    slow=st.integers(0, 3),
)
def test_fit_is_robust_to_outliers(latency_us: int, bandwidth: float, count: int, more: int, slow: int) -> None:
    link = Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=bandwidth, kv_transfer_latency_us=latency_us)
    sizes = [1 + more * at for at in range(count)]
    took = [latency_us + link.lasts_us(16 * size) for size in sizes]
    most_us = took[-1]
    for at in range(0, count, count // 3) if slow and count >= 5 * GROUPS else ():
        took[at] += 600_000 * slow  # each outlier is in a group of five or more
    seen = [moved(10 * at, 16_000 * size, one) for at, (size, one) in enumerate(zip(sizes, took, strict=True))]
    found = fitted(seen)
    assert (found.seen, found.fitted, found.note) == (count, count, "")
    for size in (sizes[0], sizes[-1]):
        expected = latency_us + link.lasts_us(16 * size)
        again = found.transfer.kv_transfer_latency_us + found.transfer.lasts_us(16 * size)
        assert abs(again - expected) <= 3 + (0.03 * most_us if slow else 0)


def test_overlapping_transfers_of_a_worker_are_excluded() -> None:
    alone = [moved(at, 1_000 * (at + 1), 500) for at in range(FITTED_MIN)]
    together = [
        ObservedTransfer(A, B, 5_000, 40_000, 100 * S),
        ObservedTransfer(A, C, 5_000, 90_000, 100 * S + 20_000),  # the same holder
        ObservedTransfer(("x", 0), C, 5_000, 10_000, 100 * S),  # the same reader
        ObservedTransfer(A, B, 5_000, 10, 100 * S + 20_000),  # overlaps the previous transfer
        ObservedTransfer(("y", 0), ("z", 0), 5_000, 500, 100 * S),  # shares neither holder nor reader
    ]
    found = fitted([*together, *alone])
    assert (found.seen, found.fitted) == (FITTED_MIN + 5, FITTED_MIN + 1)
    assert found.transfer == Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=0.0, kv_transfer_latency_us=500)
    assert found.off_percent == 0
    crowded = fitted([*together[:4], *together[:4], *alone[:-2]])
    assert crowded.fitted == crowded.seen == FITTED_MIN + 6
    assert f"only {FITTED_MIN - 2} transfers shared no link" in str(crowded)


def test_too_few_transfers_are_not_fitted() -> None:
    few = fitted([moved(at, 1_000 * at, 100 * at) for at in range(1, FITTED_MIN)])
    assert few.transfer == Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=0.0, kv_transfer_latency_us=1_000)
    assert "20 transfers are needed for a fit" in str(few)
    none = fitted([])
    assert (none.fitted, none.transfer.kv_transfer_latency_us, none.off_percent) == (0, 0, 0.0)
    assert str(none) == (
        "0 us latency and unlimited bandwidth, 1,000 bytes per token; from 0 of 0 transfers "
        "(no transfer was recorded with its duration, so transfers take no time)"
    )


def test_size_independent_times_and_negative_intercepts_are_handled() -> None:
    falling = fitted([moved(at, 1_000 * (at + 1), 900 - at) for at in range(40)])
    assert falling.transfer.kv_transfer_bandwidth == 0
    assert falling.transfer.kv_transfer_latency_us in (880, 881)
    steep = fitted([moved(at, 1_000 * (at + 1), 10 * at**2) for at in range(1, 40)])
    assert steep.transfer.kv_transfer_latency_us == 0
    assert steep.transfer.kv_transfer_bandwidth > 0


def test_given_parameters_are_not_fitted() -> None:
    seen = [moved(at, 1_000 * (at + 1), 500 + at + 1) for at in range(40)]
    found = fitted(seen)
    assert found.transfer == Transfer(kv_bytes_per_token=1_000, kv_transfer_bandwidth=1.0, kv_transfer_latency_us=500)
    found = fitted(seen, kv_transfer_latency_us=100)
    assert (found.transfer.kv_transfer_latency_us, found.transfer.kv_transfer_bandwidth) == (100, 1.0)
    assert found.off_percent == pytest.approx(76.8, abs=0.5)
    assert "kv_transfer_latency_us given, not fitted" in str(found)
    found = fitted(seen[:3], kv_transfer_bandwidth=5.0)
    assert found.note.startswith("20 transfers are needed for a fit"), "the latency is not given"
    assert found.note.endswith("median time; kv_transfer_bandwidth given, not fitted")


def test_instant_transfers_are_handled() -> None:
    found = fitted([moved(at, 1_000, 0) for at in range(40)])
    assert (found.transfer.kv_transfer_latency_us, found.transfer.kv_transfer_bandwidth, found.off_percent) == (0, 0, 0)
