"""Create the KV events of a worker, numbered without gaps, and complete re-announcements of its cache.

Theory of operation. The events of each rank are numbered from 1. The worker appends them in order, as soon as they are
created, and exits if an append fails. So a missing number on the log means that a record was lost. Re-announcements
contain the blocks that were announced so far, and not the engine's cache: that may be ahead of the reported events.
"""

from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from forebay import runtime
from forebay.engine_model.model import Removed, Stored
from forebay.engine_model.steps import StoreChange
from forebay.events.base import Event, pack_u64
from forebay.events.codec import encode
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import (
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    StoreBlocksAdded,
    StoreBlocksRemoved,
    StoreKvEvent,
    Tier,
)
from forebay.events.metrics import TierCosts, TierCostsMeasured
from forebay.events.topics import KV_EVENTS, METRICS
from forebay.transport.base import Draft
from forebay.workers.engine import CacheChange, Cleared

EVENT_HASHES_MAX = 4_096  # the owner applies one record without interruption: a millisecond without decisions

TIERS: tuple[Tier, ...] = get_args(Tier)


@dataclass(slots=True)
class _Tier:
    """Announced blocks of one tier of one rank.

    Attributes:
        parents: sequence hash of each block -> that of the preceding block; None if this block is unknown.
        engine_hashes: sequence hash -> the engine's own block hash, for blocks that have one.
    """

    parents: dict[int, int | None] = field(default_factory=dict)
    engine_hashes: dict[int, int] = field(default_factory=dict)

    def add(self, change: Stored) -> None:
        self.parents.update(zip(change.hashes, (change.parent, *change.hashes), strict=False))
        self.engine_hashes.update(zip(change.hashes, change.engine_hashes, strict=False))

    def remove(self, change: Removed) -> None:
        for block in change.hashes:
            self.parents.pop(block, None)
            self.engine_hashes.pop(block, None)

    def named(self, chain: Stored, tier: Tier) -> Stored:
        """Return a chain of this tier, with the engine's hashes if all of them are known."""
        names = tuple(self.engine_hashes[block] for block in chain.hashes if block in self.engine_hashes)
        return Stored(chain.parent, chain.hashes, tier, names if len(names) == len(chain.hashes) else ())


@dataclass(slots=True)
class _Rank:
    seq: int = 0
    tiers: dict[Tier, _Tier] = field(default_factory=lambda: {tier: _Tier() for tier in TIERS})


class CacheEvents:
    """Creates the KV events of one worker for one worker epoch, and remembers the announced blocks of each rank.

    If `spec.kv_events` is false, it creates no events.
    """

    def __init__(self, spec: WorkerSpec, worker_epoch: int, partition: int) -> None:
        self._worker_id = spec.worker_id
        self._worker_epoch = worker_epoch
        self._partition = partition
        self._silent = not spec.kv_events
        self._ranks = {rank: _Rank() for rank in spec.ranks}

    def changes(self, rank: int, changes: Iterable[CacheChange]) -> list[Draft]:
        if self._silent:
            return []
        one = self._ranks[rank]
        drafts: list[Draft] = []
        for change in changes:
            match change:
                case Stored(tier=tier):
                    one.tiers[tier].add(change)
                case Removed(tier=tier):
                    one.tiers[tier].remove(change)
                case Cleared():
                    one.tiers = _Rank().tiers
                    drafts.append(self._cleared(rank, one))
                    continue
            drafts += self._events(rank, one, change)
        return drafts

    def reannouncement(self, rank: int, above_seq: int) -> list[Draft]:
        """Return events that clear a rank in the prefix index and then store all blocks that it has announced.

        The caller must append the events as one batch. Their numbers exceed `above_seq`, because another process may
        have used numbers up to it.
        """
        if self._silent:
            return []
        one = self._ranks[rank]
        one.seq = max(one.seq, above_seq)
        drafts = [self._cleared(rank, one)]
        announced: set[int] = set()
        for tier, held in one.tiers.items():
            for chain in chains(held.parents, announced):
                drafts += self._events(rank, one, held.named(chain, tier))
            announced.update(held.parents)
        return drafts

    def _cleared(self, rank: int, one: _Rank) -> Draft:
        one.seq += 1
        event = CacheCleared(worker_id=self._worker_id, worker_epoch=self._worker_epoch, seq=one.seq, rank=rank)
        return self._draft(event)

    def _events(self, rank: int, one: _Rank, change: Stored | Removed) -> list[Draft]:
        drafts: list[Draft] = []
        for start in range(0, len(change.hashes), EVENT_HASHES_MAX):
            end = start + EVENT_HASHES_MAX
            one.seq += 1
            fields: dict[str, Any] = {
                "worker_id": self._worker_id,
                "worker_epoch": self._worker_epoch,
                "seq": one.seq,
                "rank": rank,
                "sequence_hashes": pack_u64(change.hashes[start:end]),
                "engine_hashes": pack_u64(change.engine_hashes[start:end]),
                "tier": change.tier,
            }
            event: Event
            match change:
                case Stored():
                    parent = change.hashes[start - 1] if start else change.parent
                    event = BlocksStored(parent_hash=parent, **fields)
                case Removed():
                    event = BlocksRemoved(**fields)
            drafts.append(self._draft(event))
        return drafts

    def _draft(self, event: Event) -> Draft:
        return Draft(KV_EVENTS.name, self._partition, encode(KV_EVENTS, event))


def chains(parents: dict[int, int | None], before: Container[int] = ()) -> list[Stored]:
    """Split blocks, given with their parents, into chains. Each block is in exactly one chain, after its parent.

    A chain that continues another chain comes after it in the result. If the parent of its first block is neither in an
    earlier chain nor among the already announced blocks `before`, for example because an engine reported a cycle, the
    parent of the chain is None.
    """
    found: list[Stored] = []
    done: set[int] = set()
    # Children are mostly newer than their parents, so starting with the newest block gives long chains.
    for youngest in reversed(parents):
        path: dict[int, None] = {}
        block: int | None = youngest
        while block is not None and block in parents and block not in done and block not in path:
            path[block] = None
            block = parents[block]
        if path:
            done.update(path)
            known = block in before or (block in done and block not in path)
            found.append(Stored(block if known else None, tuple(reversed(path))))
    return found


COSTS_INTERVAL_S = 10.0  # per rank; costs follow the hardware, and each report changes the state of the owner
COSTS_CHANGE = 0.1  # a smaller change rarely moves a request to another worker


class StoreEvents:
    """Encodes the events of the shared store of one worker, if it has one and sends KV events.

    The content of a shared store outlives workers, so its events have no sequence numbers and no worker epoch.
    """

    def __init__(self, spec: WorkerSpec, partition: int) -> None:
        self._worker_id = spec.worker_id
        self._store = spec.kv_store if spec.kv_events else ""
        self._partition = partition

    def announcement(self, hashes: Sequence[int]) -> list[Draft]:
        """Return the events that announce the content of the store, at least one.

        The owner also learns from them which store the worker uses, if it admitted the worker under an older owner.
        """
        if not self._store:
            return []
        return [self._draft(StoreBlocksAdded, part) for part in _parts(hashes) or [()]]

    def changes(self, changes: Iterable[StoreChange]) -> list[Draft]:
        if not self._store:
            return []
        drafts: list[Draft] = []
        for change in changes:
            drafts += [self._draft(StoreBlocksRemoved, part) for part in _parts(change.removed)]
            drafts += [self._draft(StoreBlocksRemoved, part, stale=True) for part in _parts(change.stale)]
            drafts += [self._draft(StoreBlocksAdded, part) for part in _parts(change.stored)]
        return drafts

    def _draft(self, kind: type[StoreKvEvent], hashes: Sequence[int], **fields: Any) -> Draft:
        packed, at_us = pack_u64(hashes), runtime.wall_us()
        event = kind(store=self._store, worker_id=self._worker_id, sequence_hashes=packed, at_us=at_us, **fields)
        return Draft(KV_EVENTS.name, self._partition, encode(KV_EVENTS, event))


class CostReports:
    """Encodes the measured costs of one worker's ranks: a report per change of 10 %, at most one in 10 s per rank."""

    def __init__(self, spec: WorkerSpec, worker_epoch: int, partition: int) -> None:
        self._worker_id = spec.worker_id
        self._worker_epoch = worker_epoch
        self._partition = partition
        self._reported: dict[int, tuple[float, TierCosts]] = {}  # time and content of the last report, by rank

    def report(self, rank: int, costs: TierCosts, at_us: int) -> list[Draft]:
        """Return the report of a rank, or nothing if the last report is similar or recent."""
        now_s = runtime.monotonic_s()
        last = self._reported.get(rank)
        if last is not None and (now_s - last[0] < COSTS_INTERVAL_S or not _differs(last[1], costs)):
            return []
        self._reported[rank] = now_s, costs
        event = TierCostsMeasured(
            worker_id=self._worker_id, worker_epoch=self._worker_epoch, costs=costs, rank=rank, at_us=at_us
        )
        return [Draft(METRICS.name, self._partition, encode(METRICS, event))]


def _parts(hashes: Sequence[int]) -> list[Sequence[int]]:
    return [hashes[start : start + EVENT_HASHES_MAX] for start in range(0, len(hashes), EVENT_HASHES_MAX)]


def _differs(earlier: TierCosts, later: TierCosts) -> bool:
    """Return whether a duration has changed by `COSTS_CHANGE` or more, or another tier was measured."""
    if [one.tier for one in earlier.tiers] != [one.tier for one in later.tiers]:
        return True
    pairs = [(earlier.prefill_block_us, later.prefill_block_us)]
    for one, other in zip(earlier.tiers, later.tiers, strict=True):
        pairs += [(one.fixed_us, other.fixed_us), (one.block_us, other.block_us)]
    return any(one != other and abs(other - one) >= COSTS_CHANGE * one for one, other in pairs)
