"""Offload and onboard the KV blocks of one worker rank, to and from host memory, disk and shared store.

Theory of operation. All methods are called on one thread, which never waits for a transfer. A thread that has ended a
transfer calls `wake`, and the owner then calls `poll`, which applies the end of the transfers. A tier that fails is
suspended: its blocks are not matched and nothing is written to it, until it is tried again.
"""

import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from forebay import runtime
from forebay.engine_model.steps import CacheChange, Removed, StoreChange, Stored
from forebay.events.kv import LowerTier
from forebay.kv_tiers.costs import CostModel
from forebay.kv_tiers.decisions import leading_runs
from forebay.kv_tiers.manager import TierLimits, TierManager, TierRun, TierSet
from forebay.workers.engine import EngineError
from forebay.workers.kv_tiers.block_format import file_bytes
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.disk import DirectoryStore, NetworkDirectoryStore, may_hang
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_tiers.metrics import TierCounters
from forebay.workers.kv_tiers.object_store import ObjectStore
from forebay.workers.kv_tiers.settings import DISK_BYTES, STORE_BYTES, TierSettings
from forebay.workers.kv_tiers.transfers import (
    Blocks,
    HostMemory,
    LoadResult,
    OfferedBlocks,
    TierTransfers,
    TransferLanes,
    hashes,
)

TIERS: tuple[LowerTier, ...] = ("host", "disk", "store")
OWN_TIERS: tuple[Literal["host", "disk"], ...] = ("host", "disk")  # the shared store belongs to no worker
STORES: tuple[Literal["disk", "store"], ...] = ("disk", "store")
KNOWN_MAX = 1_000_000  # blocks of the shared store that a rank remembers, about 300 bytes each
WRITE_BYTES = 2 << 30  # in flight to one tier: a prompt of 12,000 tokens of a large model; a disk writes it in a second
WRITES_MAX = 1024  # blocks, if they are small
WRITES_MIN = 16  # blocks, if they are large
HIT_RATE_REQUESTS = 1000  # hit rates are over so many recent requests
UNPIN_S = 1.0  # between two searches for pins that have ended
TICK_S = 600.0  # as in KVBM, a block must be offered twice within ten minutes to pass the filter


class OffloadManager:
    """Tiers of one rank. The caller adds the prefills to `costs`, and this class adds the loads.

    Args:
        wake: called on any thread when `poll` has work.
        owner: name of this worker, for the error of another worker that uses the same disk tier.
    """

    def __init__(
        self,
        settings: TierSettings,
        identity: KvIdentity,
        *,
        wake: Callable[[], None],
        owner: str = "",
    ) -> None:
        self.costs = CostModel()
        self._settings = settings
        self._identity = identity
        self._owner = owner
        self._lanes = TransferLanes(wake)
        self._requests: deque[Counter[str]] = deque()  # blocks of recent prompts: all, and those found in each tier
        self._found: Counter[str] = Counter()  # sums over them
        tiers = _tier_set(settings, identity)
        self._manager: TierManager[BlockName] = TierManager(tiers)
        host = HostMemory(tiers.host.blocks, identity.block_bytes) if tiers.host else None
        self._transfers = TierTransfers(
            self._manager, identity, host, self._lanes, self.costs, read_s=settings.read_s, write_s=settings.write_s
        )
        self._tick_s = self._unpin_s = runtime.monotonic_s()

    def open(self) -> None:
        """Open disk and shared store, and list their blocks. This blocks.

        Raises EngineError if a tier cannot be opened.
        """
        try:
            for tier in STORES:
                if getattr(self._settings, tier):
                    store = open_store(tier, self._settings, self._identity, self._owner)
                    self._transfers.add_store(tier, store)
        except EngineError:
            self.close()
            raise
        for name, store in self._transfers.stores.items():
            for page in store.inventory():
                self._manager.add(name, page)
                if name == "disk":  # its size was reduced
                    self._transfers.remove_files([one for one in page if not self._manager.holds("disk", one)])
        self._manager.changes()  # the worker announces `content` when it joins

    def close(self) -> None:
        """Drop the transfers that have not begun, wait for those in progress, and close disk and store."""
        self._lanes.close()
        for store in self._transfers.stores.values():
            store.close()

    @property
    def store_name(self) -> str:
        """Name of the shared store for the router; empty without one."""
        store = self._transfers.stores.get("store")
        return "" if store is None else store.name

    @property
    def busy(self) -> bool:
        return self._lanes.running > 0

    def match(self, names: Sequence[BlockName], begin: int, cached_tokens: int, hinted: int = 0) -> list[TierRun]:
        """Return where to load the blocks from index `begin` on, as far as loading is faster than computing.

        The result is for `load`, and valid until the next call of `poll`.

        Args:
            names: blocks of a prompt. The caller leaves out blocks that must be computed.
            begin: index of the first block that device memory lacks.
            cached_tokens: tokens of the blocks before it.
            hinted: number of leading blocks that the router expects in the tiers or in device memory.
        """
        self._refresh()
        if self._transfers.full:
            return []
        runs = self._usable(names, begin, hinted)
        blocks = self.costs.worthwhile(cached_tokens, runs, self._identity.block_size)
        self._transfers.counters.rejected_blocks += sum(run.blocks for run in runs) - blocks
        return leading_runs(runs, blocks)

    def load(
        self,
        names: Sequence[BlockName],
        begin: int,
        runs: Sequence[TierRun],
        into: Sequence[memoryview],
        done: Callable[[LoadResult], None],
    ) -> None:
        """Load blocks that `match` has found, from index `begin` on.

        The memory `into` belongs to the load until `poll` calls `done`, when all transfers have ended.
        """
        self._believe(names, begin, runs)
        self._transfers.load(names, begin, runs, into, done)

    def offer(self, names: Sequence[BlockName], block: Blocks, done: Callable[[], None] = lambda: None) -> None:
        """Offload full blocks of a prompt, in order, that device memory has stored or used again.

        Args:
            block: memory of each block, or a function that returns the memory of the block with an index, and is called
                on another thread. It is only used for the blocks that are copied.
            done: called when the memory of all blocks may be reused: at once if none is copied, otherwise by `poll`.
        """
        self._refresh()
        writes = self._manager.offer(names)
        if any(write.source == "device" for write in writes):
            self._transfers.write(writes, OfferedBlocks(block, {name: at for at, name in enumerate(names)}, done))
        else:
            self._transfers.write(writes)
            done()

    def prefetch(self, names: Sequence[BlockName], begin: int, hinted: int = 0) -> None:
        """Copy blocks from disk or store to host memory while a request waits, if that will pay. See `match`."""
        self._refresh()
        if self._transfers.host is None:
            return
        runs = self._usable(names, begin, hinted)
        blocks = self.costs.worthwhile(begin * self._identity.block_size, runs, self._identity.block_size)
        if blocks:
            self._believe(names, begin, leading_runs(runs, blocks))
            self._transfers.write(self._manager.prefetch(names[: begin + blocks], begin))

    def pin(self, names: Sequence[BlockName], seconds: int) -> None:
        """Keep the blocks of a prompt in host memory and on disk for some time, once they are there.

        Blocks beyond half of the larger of these tiers are not pinned, and counted. A pin never shortens an earlier
        one.
        """
        self._manager.pin(names, round((runtime.monotonic_s() + seconds) * 1e6))

    def poll(self) -> None:
        """Apply the end of transfers, and call the `done` of loads and offers."""
        self._lanes.poll()
        self._refresh()

    def changes(self) -> tuple[list[CacheChange], list[StoreChange]]:
        """Return the changes of host and disk, and those of the shared store, since the last call, in order."""
        cache: list[CacheChange] = []
        for tier, stored, removed in self._manager.changes():
            if tier == "store":
                continue  # what the manager remembers of it also changes by hints
            if stored:
                cache.append(Stored(None, hashes(stored), tier))
            else:
                cache.append(Removed(hashes(removed), tier))
        store = self._transfers.store_changes[:]
        self._transfers.store_changes.clear()
        return cache, store

    def content(self) -> tuple[list[CacheChange], list[StoreChange]]:
        """Return all blocks of host and disk, and all known blocks of the shared store."""
        cache: list[CacheChange] = [
            Stored(None, hashes(self._manager.resident(tier)), tier) for tier in OWN_TIERS if self._manager.count(tier)
        ]
        known = hashes(self._manager.resident("store"))
        return cache, [StoreChange(stored=known)] if known else []

    def resident(self, tier: LowerTier) -> Sequence[BlockName]:
        return self._manager.resident(tier)

    def clear(self) -> None:
        """Remove all blocks of host memory and disk. The shared store keeps its blocks."""
        host, disk = self._manager.resident("host"), self._manager.resident("disk")
        self._manager.clear(OWN_TIERS)
        if self._transfers.host is not None:
            self._transfers.host.remove(host)
        self._transfers.remove_files(disk)

    def observe_request(self, total_blocks: int, device_blocks: int, loaded: Mapping[LowerTier, int]) -> None:
        """Count a request for the hit rates, once its prompt has been computed."""
        found: Counter[str] = Counter(all=total_blocks, device=device_blocks)
        found.update(loaded)
        self._requests.append(found)
        self._found.update(found)
        if len(self._requests) > HIT_RATE_REQUESTS:
            self._found.subtract(self._requests.popleft())

    def counters(self) -> TierCounters:
        self._refresh()
        counters = self._transfers.counters
        counted = self._manager.counters
        for reason in ("filter", "full", "busy", "pin"):
            counters.skipped[reason] = counted[f"skipped_{reason}"]
        for tier in OWN_TIERS:
            counters.evicted[tier] = counted[f"evicted_{tier}"]
        counters.evicted["store"] = 0  # the manager only forgets them
        counters.evicted.update(self._transfers.quota_evicted)
        present = [
            tier for tier in TIERS if tier in self._transfers.stores or (tier == "host" and self._transfers.host)
        ]
        counters.resident_blocks = {tier: self._manager.count(tier) for tier in present}
        counters.resident_bytes = {
            tier: blocks * self._identity.block_bytes for tier, blocks in counters.resident_blocks.items()
        }
        counters.pinned_blocks = {tier: self._manager.pinned(tier) for tier in present if tier != "store"}
        total = max(1, self._found["all"])
        counters.hit_rates = {tier: self._found[tier] / total for tier in ("device", *present)}
        return counters

    def _usable(self, names: Sequence[BlockName], begin: int, hinted: int) -> list[TierRun]:
        """Return where the blocks from index `begin` on are, up to the first block in a suspended tier."""
        reads = self._transfers.reads
        hinted = min(hinted, len(names))
        runs: list[TierRun] = []
        at = begin
        while True:
            found = self._manager.match(names, at)
            if not found and at < hinted and "store" in reads:
                found = [TierRun("store", self._unknown(names, at, hinted))]
            if not found:
                return runs
            for run in found:
                if run.tier in reads and reads[run.tier].suspended():
                    return runs
                runs.append(run)
                at += run.blocks

    def _unknown(self, names: Sequence[BlockName], begin: int, end: int) -> int:
        """Return how many blocks from index `begin` on are in no tier, as far as this rank knows; at least 1."""
        manager = self._manager
        known = (at for at in range(begin + 1, end) if any(manager.holds(tier, names[at]) for tier in TIERS))
        return next(known, end) - begin

    def _believe(self, names: Sequence[BlockName], begin: int, runs: Sequence[TierRun]) -> None:
        """Add the blocks that only the router's hint has located to the manager, because they are about to be read.

        Blocks that are not read are not added, because a wrong hint would keep them from being written.
        """
        for tier, blocks in runs:
            if tier == "store":
                self._manager.add(tier, names[begin : begin + blocks])
            begin += blocks

    def _refresh(self) -> None:
        """Pause and resume the writes of suspended tiers, end pins, and let the frequencies of blocks decay."""
        for tier, health in self._transfers.writes.items():
            self._manager.set_paused(tier, paused=health.suspended())
        now_s = runtime.monotonic_s()
        if now_s - self._unpin_s >= UNPIN_S:
            self._unpin_s = now_s
            self._manager.unpin(round(now_s * 1e6))
        if now_s - self._tick_s >= TICK_S:
            self._tick_s = now_s
            self._manager.tick()


def open_store(
    tier: Literal["disk", "store"], settings: TierSettings, identity: KvIdentity, owner: str = ""
) -> BlockStore:
    """Open the disk tier or the shared store of the worker `owner`; create it if necessary.

    Raises EngineError if that fails, PackageMissing if a package that the store needs is not installed.
    """
    place, quota = settings.store, settings.store_bytes or STORE_BYTES
    if tier == "store" and place.startswith("s3://"):
        return ObjectStore(place, identity, quota_bytes=quota, endpoint=settings.store_endpoint)
    root = Path(place)
    if tier == "disk":
        assert settings.disk is not None
        root, quota = settings.disk, settings.disk_bytes or DISK_BYTES
    owner = owner or f"process {os.getpid()} on {socket.gethostname()}"
    kind = NetworkDirectoryStore if may_hang(root) else DirectoryStore
    return kind(root, identity, quota_bytes=quota, shared=tier == "store", owner=owner)


def _tier_set(settings: TierSettings, identity: KvIdentity) -> TierSet:
    """Return the sizes and policies of the tiers. Raises EngineError if a tier has no room for a block."""
    size = identity.block_bytes
    limits: dict[LowerTier, TierLimits] = {}
    sizes: tuple[tuple[LowerTier, bool, int, int], ...] = (
        ("host", settings.host_bytes > 0, settings.host_bytes, size),
        ("disk", settings.disk is not None, settings.disk_bytes or DISK_BYTES, file_bytes(size)),
        ("store", bool(settings.store), KNOWN_MAX, 1),
    )
    for tier, configured, total, block in sizes:
        if not configured:
            continue
        if total < block:
            raise EngineError(f"a {tier} tier of {total:,} bytes has no room for one KV block of {block:,} bytes")
        limits[tier] = TierLimits(blocks=total // block, filter=tier != "host" and settings.filters)
    writes_max = min(WRITES_MAX, max(WRITES_MIN, WRITE_BYTES // size))
    return TierSet(host=limits.get("host"), disk=limits.get("disk"), store=limits.get("store"), writes_max=writes_max)
