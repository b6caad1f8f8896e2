"""Histograms of durations with a bounded relative error, which are small on disk and can be merged.

Bucket `i` counts durations from `GROWTH ** i` to `GROWTH ** (i + 1)` microseconds. A quantile is reported as the
geometric middle of its bucket, which is at most 2 % off.
"""

import struct
from math import log

GROWTH = 1.04  # the square root of this is 1.0198
_BY_LOG = 1 / log(GROWTH)
_MIDDLE = GROWTH**0.5
_PAIR_BYTES = struct.calcsize("<HI")
_COUNT_MAX = (1 << 32) - 1

Histogram = dict[int, int]


def add(histogram: Histogram, duration_us: float) -> None:
    """Count a duration in microseconds. Durations below one microsecond count as one."""
    bucket = bucket_of(duration_us)
    histogram[bucket] = histogram.get(bucket, 0) + 1


def bucket_of(duration_us: float) -> int:
    return int(log(duration_us) * _BY_LOG) if duration_us > 1 else 0


def merge(histogram: Histogram, other: Histogram) -> None:
    for bucket, count in other.items():
        histogram[bucket] = histogram.get(bucket, 0) + count


def encode(histogram: Histogram) -> bytes:
    """Return a histogram as bytes: all buckets as u16, then all counts as u32."""
    counts = (min(count, _COUNT_MAX) for count in histogram.values())
    return struct.pack(f"<{len(histogram)}H{len(histogram)}I", *histogram, *counts)


def decode(encoded: bytes) -> Histogram:
    size = len(encoded) // _PAIR_BYTES
    values = struct.unpack(f"<{size}H{size}I", encoded)
    return dict(zip(values[:size], values[size:], strict=True))


def quantiles(histogram: Histogram, shares: tuple[float, ...]) -> list[float | None]:
    """Return the quantiles of these shares, which ascend, in microseconds; each is None for an empty histogram."""
    total = sum(histogram.values())
    if not total:
        return [None] * len(shares)
    found: list[float | None] = []
    buckets = iter(sorted(histogram.items()))
    bucket, reached = next(buckets)
    for share in shares:
        rank = share * (total - 1)  # from 0
        while reached <= rank:
            bucket, count = next(buckets)
            reached += count
        found.append(GROWTH**bucket * _MIDDLE)
    return found
