"""How long KV takes from worker to worker, from transfers that were recorded.

A robust line: transfers are put into groups of like size, and ordinary least squares go through the groups' medians, so
that the few which took ten times as long count as any other. Those that shared a worker with another one at that time
say nothing of a link by itself, which is what the model has, and adds the waiting to: they are left out where enough
others are there.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from forebay.core.state.holder_bits import HolderKey
from forebay.simulate.settings import BANDWIDTH_MAX, BYTES_PER_US, Transfer

FITTED_MIN = 20  # of fewer the medians of a few groups are draws
GROUPS = 10


@dataclass(frozen=True, slots=True)
class Moved:
    """A transfer: whose KV, to whom, how many bytes in how many microseconds; `over_us` is when it was over."""

    holder: HolderKey
    reader: HolderKey
    bytes: int
    took_us: int
    over_us: int


class TransferFit(msgspec.Struct, frozen=True, kw_only=True):
    """What came of it.

    Attributes:
        transfer: the model's parameters. Its bandwidth is 0 where longer transfers did not take longer.
        seen: transfers that were recorded; `fitted` is how many of these parameters are fitted to.
        off_percent: how far the model is from these, at the median, in percent of what each took.
        note: what there is to know of it beyond that, for people; empty for nothing.
    """

    transfer: Transfer
    seen: int
    fitted: int
    off_percent: float
    note: str

    def __str__(self) -> str:
        link = self.transfer
        bandwidth = link.kv_transfer_bandwidth
        told = f"{link.kv_transfer_latency_us:,} us and {f'{bandwidth:.4g} GB/s' if bandwidth else 'no time for bytes'}"
        told += f", {link.kv_bytes_per_token:,} bytes a token; from {self.fitted:,} of {self.seen:,} transfers"
        told += f", off by {self.off_percent:.1f} % p50" if self.fitted else ""
        return f"{told} ({self.note})" if self.note else told


def fit_transfers(moved: Sequence[Moved], kv_bytes_per_token: int, given: Mapping[str, float]) -> TransferFit:
    """The parameters that fit, but for those of `Transfer` that are `given`.

    Of too few to fit the latency is their median, and a byte takes no time.
    """
    fitted, note = _alone(moved), ""
    latency_us = us_per_byte = 0.0
    if len(fitted) < FITTED_MIN <= len(moved):
        note = f"only {len(fitted)} had both workers to themselves: what others waited for is in the latency, too"
        fitted = list(moved)
    if len(fitted) >= FITTED_MIN:
        latency_us, us_per_byte = _line(fitted)
    elif moved:
        fitted = list(moved)
        latency_us = statistics.median(one.took_us for one in moved)
        note = f"too few to fit, {FITTED_MIN} are needed: each is taken to take the time of the median one"
    else:
        note = "no transfer is recorded with its time: they are taken to take none"
    transfer = Transfer(
        kv_bytes_per_token=kv_bytes_per_token,
        kv_transfer_bandwidth=min(BANDWIDTH_MAX, 1 / (us_per_byte * BYTES_PER_US)) if us_per_byte else 0.0,
        kv_transfer_latency_us=round(latency_us),
    )
    if given:
        transfer = msgspec.structs.replace(transfer, **given)
        note = "; ".join(filter(None, (note, f"{' and '.join(given)} as given")))
    off = [abs(_takes_us(transfer, one) - one.took_us) / one.took_us for one in fitted if one.took_us]
    return TransferFit(
        transfer=transfer,
        seen=len(moved),
        fitted=len(fitted),
        off_percent=100 * statistics.median(off) if off else 0.0,
        note=note,
    )


def _takes_us(transfer: Transfer, one: Moved) -> float:
    bandwidth = transfer.kv_transfer_bandwidth * BYTES_PER_US
    return transfer.kv_transfer_latency_us + (one.bytes / bandwidth if bandwidth else 0.0)


def _line(moved: Sequence[Moved]) -> tuple[float, float]:
    """Microseconds of any transfer, and those of a byte; neither is below 0."""
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


def _alone(moved: Sequence[Moved]) -> list[Moved]:
    """Those during which neither of their workers moved anything else."""
    shared: set[int] = set()
    for worker in ("holder", "reader"):
        last: dict[HolderKey, tuple[int, int]] = {}  # until when it was busy so far, and with which
        for at in sorted(range(len(moved)), key=lambda at: moved[at].over_us - moved[at].took_us):
            one = moved[at]
            until_us, other = last.get(getattr(one, worker), (-1, -1))
            if one.over_us - one.took_us < until_us:
                shared |= {at, other}
            if one.over_us > until_us:
                last[getattr(one, worker)] = one.over_us, at
    return [one for at, one in enumerate(moved) if at not in shared]
