"""Sizes, bandwidths and latencies of the simulated tiers of KV blocks."""

import re
from typing import Annotated

import msgspec

from forebay.kv_tiers.manager import TierLimits, TierSet

BANDWIDTH_MAX = 1e6  # GB per second
LATENCY_US_MAX = 60_000_000
BLOCKS_MAX = 1 << 31
BYTES_PER_US = 1_000  # at 1 GB/s
SIZE = re.compile(r"(?P<number>\d+(\.\d+)?)\s*(?P<unit>[A-Za-z]*)", re.ASCII)
UNITS = {
    **{name: 1000**power for power, name in enumerate(("B", "KB", "MB", "GB", "TB", "PB"))},
    **{name: 1024**power for power, name in enumerate(("KIB", "MIB", "GIB", "TIB", "PIB"), 1)},
}
BLOCKS = ("BLOCK", "BLOCKS")

Bandwidth = Annotated[float, msgspec.Meta(ge=0, le=BANDWIDTH_MAX)]
Latency = Annotated[int, msgspec.Meta(ge=0, le=LATENCY_US_MAX)]


class TierUnusable(ValueError):
    """A tier has an unusable size."""

    def __init__(self, tier: str, reason: str) -> None:
        super().__init__(f"{tier}: {reason}")
        self.tier = tier
        self.reason = reason


class TierModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One tier. Everything that uses it at the same time shares its bandwidth equally: loads and writes."""

    size: str  # size in bytes with a unit, as in `64GB`, or in blocks, as in `4096 blocks`; `0` for no tier
    bandwidth: Bandwidth  # GB (10^9 bytes) per second; 0 for an unlimited bandwidth
    latency_us: Latency  # microseconds from the begin of a load or write to its first byte
    # Whether only blocks that were used again are written; None filters blocks on their way from host memory to disk
    # and store.
    filter: bool | None = None

    def __post_init__(self) -> None:
        self.blocks(1)

    def blocks(self, block_bytes: int) -> int:
        """Return the size in blocks of `block_bytes` bytes. Raises ValueError if the size is malformed."""
        match = SIZE.fullmatch(self.size.strip())
        unit = match["unit"].upper() if match else ""
        if match is None or not (unit in UNITS or unit in BLOCKS or float(match["number"]) == 0):
            raise ValueError(f"got {self.size!r}, expected a size with a unit, as in 64GB, 512GiB or 4096blocks")
        number = float(match["number"])
        return int(number * UNITS[unit]) // block_bytes if unit in UNITS else int(number)


class HostTier(TierModel, frozen=True, kw_only=True):
    """Host memory of a rank. The default bandwidth is that of PCIe 4.0 with 16 lanes."""

    bandwidth: Bandwidth = 25.0
    latency_us: Latency = 20


class DiskTier(TierModel, frozen=True, kw_only=True):
    """Local disk of a rank. The default bandwidth is that of one NVMe disk."""

    bandwidth: Bandwidth = 5.0
    latency_us: Latency = 100


class StoreTier(TierModel, frozen=True, kw_only=True):
    """Store that all ranks of a model share, with its bandwidth. The defaults are those of 100 Gbit/s and a bucket."""

    bandwidth: Bandwidth = 12.5
    latency_us: Latency = 10_000


class WorkerTiers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    host: HostTier | None = None  # host memory; None for none
    disk: DiskTier | None = None  # local disk; None for none


class FleetTiers(WorkerTiers, frozen=True, kw_only=True):
    """Tiers of a fleet. `host` and `disk` apply to workers whose engine profile has no such tier."""

    store: StoreTier | None = None  # shared store, one per model; None for none

    def of(self, own: WorkerTiers | None) -> "FleetTiers":
        """Return the tiers of workers whose engine profile has the tiers `own`."""
        own = own or WorkerTiers()
        return FleetTiers(host=own.host or self.host, disk=own.disk or self.disk, store=self.store)

    def limits(self, block_bytes: int) -> TierSet:
        """Return sizes and policies for blocks of `block_bytes` bytes. A tier of size 0 is left out.

        Raises TierUnusable if a tier is smaller than one block, or too large.
        """
        is_filtered = self.host is not None and self.host.blocks(1) > 0
        return TierSet(
            host=_limits("host", self.host, block_bytes, is_filtered=False),
            disk=_limits("disk", self.disk, block_bytes, is_filtered=is_filtered),
            store=_limits("store", self.store, block_bytes, is_filtered=is_filtered),
        )


def _limits(name: str, tier: TierModel | None, block_bytes: int, *, is_filtered: bool) -> TierLimits | None:
    if tier is None or not tier.blocks(1):
        return None
    blocks = tier.blocks(block_bytes)
    if not blocks:
        raise TierUnusable(name, f"got a size of {tier.size}, but one block has {block_bytes} bytes")
    if blocks > BLOCKS_MAX:
        raise TierUnusable(name, f"got a size of {tier.size}, which is {blocks} blocks; the maximum is {BLOCKS_MAX}")
    return TierLimits(blocks=blocks, filter=is_filtered if tier.filter is None else tier.filter)
