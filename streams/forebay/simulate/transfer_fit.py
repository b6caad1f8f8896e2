"""Fit of the KV transfer model to recorded transfers.

Method: sort the transfers by size, split them into groups, and fit a line through the medians of the groups by least
squares. Medians limit the weight of outliers, which may take ten times as long. The duration of a transfer that shared
a link with another transfer includes waiting time. The model adds this time itself, so the fit ignores such transfers
if enough others remain.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from forebay.core.state.holder_bits import HolderKey
from forebay.simulate.settings import Transfer
from forebay.simulate.tiers.settings import BANDWIDTH_MAX, BYTES_PER_US

FITTED_MIN = 20  # with fewer transfers the medians of the groups are too noisy
GROUPS = 10


@dataclass(frozen=True, slots=True)
class ObservedTransfer:
    """One recorded transfer.

    Attributes:
        holder: rank that sent the KV.
        reader: rank that received the KV.
        took_us: duration in microseconds.
        over_us: time at which the transfer ended, in microseconds.
    """

    holder: HolderKey
    reader: HolderKey
    bytes: int
    took_us: int
    over_us: int


class TransferFit(msgspec.Struct, frozen=True, kw_only=True):
    """Transfer model fitted to recorded transfers.

    Attributes:
        transfer: fitted parameters. The bandwidth is 0 (unlimited) if larger transfers did not take longer.
        off_percent: median absolute error of the model on the fitted transfers, in percent of their duration.
        note: warning to the user about the quality of the fit; empty if there is none.
    """

    transfer: Transfer
    seen: int
    fitted: int
    off_percent: float
    note: str

    def __str__(self) -> str:
        link = self.transfer
        bandwidth = link.kv_transfer_bandwidth
        rate = f"{bandwidth:.4g} GB/s" if bandwidth else "unlimited bandwidth"
        text = f"{link.kv_transfer_latency_us:,} us latency and {rate}"
        text += f", {link.kv_bytes_per_token:,} bytes per token; from {self.fitted:,} of {self.seen:,} transfers"
        text += f", median error {self.off_percent:.1f} %" if self.fitted else ""
        return f"{text} ({self.note})" if self.note else text


def fit_transfers(
    moved: Sequence[ObservedTransfer], kv_bytes_per_token: int, given: Mapping[str, float]
) -> TransferFit:
    """Fit the parameters of the KV transfer model to recorded transfers.

    With fewer than `FITTED_MIN` transfers the fitted latency is the median duration, and the bandwidth is unlimited.

    Args:
        kv_bytes_per_token: bytes of KV per token.
        given: values of `Transfer` fields that the user has set. These fields are not fitted.
    """
    fitted, note = _alone(moved), ""
    latency_us = us_per_byte = 0.0
    if len(fitted) < FITTED_MIN <= len(moved):
        note = f"only {len(fitted)} transfers shared no link, so the latency includes waiting for other transfers"
        fitted = list(moved)
    if len(fitted) >= FITTED_MIN:
        latency_us, us_per_byte = _line(fitted)
    elif moved:
        fitted = list(moved)
        latency_us = statistics.median(one.took_us for one in moved)
        note = f"{FITTED_MIN} transfers are needed for a fit, so every transfer takes the median time"
    else:
        note = "no transfer was recorded with its duration, so transfers take no time"
    transfer = Transfer(
        kv_bytes_per_token=kv_bytes_per_token,
        kv_transfer_bandwidth=min(BANDWIDTH_MAX, 1 / (us_per_byte * BYTES_PER_US)) if us_per_byte else 0.0,
        kv_transfer_latency_us=round(latency_us),
    )
    if given:
        transfer = msgspec.structs.replace(transfer, **given)
        note = "; ".join(filter(None, (note, f"{' and '.join(given)} given, not fitted")))
    off = [abs(_takes_us(transfer, one) - one.took_us) / one.took_us for one in fitted if one.took_us]
    return TransferFit(
        transfer=transfer,
        seen=len(moved),
        fitted=len(fitted),
        off_percent=100 * statistics.median(off) if off else 0.0,
        note=note,
    )


def _takes_us(transfer: Transfer, one: ObservedTransfer) -> float:
    bandwidth = transfer.kv_transfer_bandwidth * BYTES_PER_US
    return transfer.kv_transfer_latency_us + (one.bytes / bandwidth if bandwidth else 0.0)


def _line(moved: Sequence[ObservedTransfer]) -> tuple[float, float]:
    """Return the fixed microseconds of a transfer, and the microseconds per byte; both at least 0."""
    by_size = sorted(moved, key=lambda one: one.bytes)
    ends = [len(by_size) * at // GROUPS for at in range(GROUPS + 1)]
    groups = [by_size[first:end] for first, end in pairwise(ends)]
    sizes = [statistics.median(one.bytes for one in group) for group in groups]
    times = [statistics.median(one.took_us for one in group) for group in groups]
    flat = statistics.median(one.took_us for one in moved), 0.0
    if sizes[0] == sizes[-1]:
        return flat
    line = statistics.linear_regression(sizes, times)
    if line.slope <= 0:
        return flat
    if line.intercept < 0:
        return 0.0, statistics.linear_regression(sizes, times, proportional=True).slope
    return line.intercept, line.slope


def _alone(moved: Sequence[ObservedTransfer]) -> list[ObservedTransfer]:
    """Return the transfers during which neither of their workers had another transfer."""
    shared: set[int] = set()
    for worker in ("holder", "reader"):
        last: dict[HolderKey, tuple[int, int]] = {}  # end and index of the latest transfer of each worker
        for at in sorted(range(len(moved)), key=lambda at: moved[at].over_us - moved[at].took_us):
            one = moved[at]
            until_us, other = last.get(getattr(one, worker), (-1, -1))
            if one.over_us - one.took_us < until_us:
                shared |= {at, other}
            if one.over_us > until_us:
                last[getattr(one, worker)] = one.over_us, at
    return [one for at, one in enumerate(moved) if at not in shared]
