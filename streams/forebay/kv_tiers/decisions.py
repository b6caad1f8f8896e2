"""Sizes of the tiers of one rank, and what the tier manager decides: writes, loads, and changes of the content."""

from collections.abc import Iterable
from typing import Generic, NamedTuple

import msgspec

from forebay.events.kv import LowerTier
from forebay.kv_tiers.frequency import Key
from forebay.kv_tiers.tier_content import SourceTier, TierLimits


class TierSet(msgspec.Struct, frozen=True, kw_only=True):
    """Tiers of one rank, from the fastest to the slowest. A tier that is None does not exist.

    Without host memory, blocks go from the device to disk, and the filter of the disk does not apply. If `writes_max`
    blocks are in flight to one tier, more are skipped.
    """

    host: TierLimits | None = None
    disk: TierLimits | None = None
    store: TierLimits | None = None
    writes_max: int = 1024


class TierRun(NamedTuple):
    tier: LowerTier
    blocks: int


class Write(NamedTuple, Generic[Key]):
    """Blocks, in prompt order, to copy into a tier. The caller reports the end with `written`, exactly once.

    The caller removes the blocks in `evicted` from the tier first. They are always empty for the shared store.
    """

    number: int
    tier: LowerTier
    source: SourceTier
    keys: tuple[Key, ...]
    evicted: tuple[Key, ...]


class Loading(NamedTuple, Generic[Key]):
    """Consecutive blocks of a prompt to copy into device memory.

    The caller reports the end with `loaded`, exactly once.
    """

    number: int
    tier: LowerTier
    keys: tuple[Key, ...]


class TierChange(NamedTuple, Generic[Key]):
    """Blocks that became readable in a tier, or left it. One of the two is empty."""

    tier: LowerTier
    stored: tuple[Key, ...]
    removed: tuple[Key, ...]


def leading_runs(runs: Iterable[TierRun], blocks: int) -> list[TierRun]:
    found: list[TierRun] = []
    for tier, count in runs:
        if blocks <= 0:
            break
        found.append(TierRun(tier, min(count, blocks)))
        blocks -= count
    return found
