"""Create the events of a worker's shared store, and its reports of measured tier costs.

The content of a shared store outlives workers, so its events have no sequence numbers and no worker epoch. Changes that
the owner could not read are not kept: the worker announces the whole store when an owner becomes able to read them.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from forebay import runtime
from forebay.engine_model.steps import StoreChange
from forebay.events.base import pack_u64
from forebay.events.codec import encode
from forebay.events.fleet import WorkerSpec
from forebay.events.kv import StoreBlocksAdded, StoreBlocksRemoved, StoreKvEvent
from forebay.events.metrics import TierCosts, TierCostsMeasured
from forebay.events.topics import KV_EVENTS, METRICS
from forebay.events.versions import may_write
from forebay.transport.base import Draft
from forebay.workers.runtime.cache_events import EVENT_HASHES_MAX

COSTS_INTERVAL_S = 10.0  # per rank; costs follow the hardware, and each report changes the state of the owner
COSTS_CHANGE = 0.1  # a smaller change rarely moves a request to another worker


class StoreEvents:
    """Encodes the events of the shared store of one worker.

    A worker without a shared store, and one that sends no KV events, creates none.
    """

    def __init__(self, spec: WorkerSpec, partition: int) -> None:
        self._worker_id = spec.worker_id
        self._store = spec.kv_store if spec.kv_events else ""
        self._partition = partition

    def announcement(self, hashes: Sequence[int], owner_events: int) -> list[Draft]:
        """Return the events that announce the content of the store, at least one.

        The owner also learns from them which store the worker uses, if it admitted the worker under an older owner.

        Args:
            owner_events: version of the event types that the owner can read; nothing is returned if it is too low.
        """
        if not self._store or not may_write(StoreBlocksAdded, owner_events):
            return []
        return [self._draft(StoreBlocksAdded, part) for part in _parts(hashes) or [()]]

    def changes(self, changes: Iterable[StoreChange], owner_events: int) -> list[Draft]:
        """Return the events for changes of the store, in order; nothing if the owner cannot read them."""
        if not self._store or not may_write(StoreBlocksAdded, owner_events):
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

    def report(self, rank: int, costs: TierCosts, owner_events: int, at_us: int) -> list[Draft]:
        """Return the report of a rank, or nothing if the last report is similar or recent, or cannot be read."""
        if not may_write(TierCostsMeasured, owner_events):
            return []
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
