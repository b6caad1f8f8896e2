"""Move the KV blocks of one worker rank between device memory, host memory, disk and shared store.

Theory of operation. The tier manager decides, and threads move bytes; see `offload_manager` for the owner's thread.
Each lane has its own threads, so that writes never delay loads. `poll` applies the end of a transfer; the manager then
returns the writes that follow from it. Files of evicted blocks are removed by the thread that writes the tier, so that
a block that is evicted and written again is not removed afterwards. A failing tier is suspended, so that neither
requests nor writes wait for it again and again.
"""

import logging
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeVar

import numpy as np

from forebay import runtime
from forebay.engine_model.steps import StoreChange
from forebay.events.kv import LowerTier
from forebay.events.progress import OnboardedTokens
from forebay.kv_tiers.costs import CostModel
from forebay.kv_tiers.manager import Loading, TierManager, TierRun, Write
from forebay.workers.kv_tiers.block_format import BAD_REASONS
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.identity import BlockName, KvIdentity
from forebay.workers.kv_tiers.metrics import TierCounters

LOG = logging.getLogger(__name__)

T = TypeVar("T")
Blocks = Sequence[memoryview] | Callable[[int], memoryview]
Lane = Literal["host-read", "host-write", "disk-read", "disk-write", "store-read", "store-write", "prefetch"]

# One thread writes per tier, so that a removal and a later write of the same block are executed in this order. Loads
# from disk and store use a second thread, because a slow one should not delay the others.
THREADS: dict[Lane, int] = {
    "host-read": 1,
    "host-write": 1,
    "disk-read": 2,
    "disk-write": 1,
    "store-read": 2,
    "store-write": 1,
    "prefetch": 1,
}
READ_LANES: dict[LowerTier, Lane] = {"host": "host-read", "disk": "disk-read", "store": "store-read"}
LOADS_MAX = 256  # requests that load at the same time, as many as engines usually run
CHUNK_BYTES = 32 << 20  # copied before it is written, where a copy is needed; a slow disk writes it in a quarter second
FAILURES_MAX = 3  # consecutive failing calls until a tier is suspended; one that ran into its deadline counts as all
FIRST_S = 1.0
LONGEST_S = 60.0  # a tier that works again is noticed after this time
FAILING = frozenset({"deadline", "denied", "failed", "full"})  # other reasons are answers of a working store
GONE_REASONS = frozenset({"missing", *BAD_REASONS})  # the tier does not have the block any more
SUSPENDED = "suspended"  # reason of blocks that were not moved because the tier is suspended
SOURCE = "source"  # reason of blocks whose source could not be read


class HostMemory:
    """Slots of host memory for one block each. The operating system provides the memory when it is first used.

    Methods that change slots are called by one thread; copies may run on other threads at the same time.
    """

    def __init__(self, blocks: int, block_bytes: int) -> None:
        self._memory = np.empty((blocks, block_bytes), np.uint8)
        self._free = list(range(blocks - 1, -1, -1))
        self._slots: dict[BlockName, int] = {}
        self._uses: dict[int, int] = {}  # by slot: transfers that read it
        self._removed: set[int] = set()  # slots that become free when no transfer reads them any more

    def reserve(self, count: int) -> list[int]:
        """Take free slots. The caller must know that there are enough."""
        assert count <= len(self._free), "the tier manager reserves room before a write"
        return [self._free.pop() for _ in range(count)]

    def put(self, name: BlockName, slot: int) -> None:
        self._slots[name] = slot

    def give_back(self, slot: int) -> None:
        self._free.append(slot)

    def remove(self, names: Iterable[BlockName]) -> None:
        """Remove blocks. Slots that transfers read become free afterwards. Unknown blocks are ignored."""
        for name in names:
            slot = self._slots.pop(name, None)
            if slot is None:
                continue
            if slot in self._uses:
                self._removed.add(slot)
            else:
                self._free.append(slot)

    def acquire(self, names: Sequence[BlockName]) -> list[int]:
        """Return the slots of blocks, and keep them in place until `release`."""
        slots = [self._slots[name] for name in names]
        for slot in slots:
            self._uses[slot] = self._uses.get(slot, 0) + 1
        return slots

    def release(self, slots: Iterable[int]) -> None:
        for slot in slots:
            if self._uses[slot] > 1:
                self._uses[slot] -= 1
                continue
            del self._uses[slot]
            if slot in self._removed:
                self._removed.discard(slot)
                self._free.append(slot)

    def view(self, slot: int) -> memoryview:
        return memoryview(self._memory[slot])

    def copy_in(self, slot: int, source: memoryview) -> None:
        """Copy a block into a slot. Other threads run meanwhile."""
        self._memory[slot] = np.frombuffer(source, dtype=np.uint8)

    def copy_out(self, slot: int, target: memoryview) -> None:
        """Copy a slot to other memory. Other threads run meanwhile."""
        np.frombuffer(target, dtype=np.uint8)[:] = self._memory[slot]


class TierHealth:
    """Health of the reads or of the writes of one tier; `what` names tier and direction for the log.

    After several failing calls in a row, the tier is suspended for 1 s. One further failing call then suspends it for
    twice as long, up to 60 s. The first call with a success ends this.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._failures = 0
        self._length_s = 0.0
        self._until_s = 0.0

    def suspended(self) -> bool:
        return self._length_s > 0 and runtime.monotonic_s() < self._until_s

    def observe(self, results: Sequence[str]) -> None:
        """Note the results of a call, per block: an empty text or the reason of a failure."""
        if not results:
            return
        if any(reason not in FAILING for reason in results):
            if self._length_s:
                LOG.info("%s work again", self._what)
            self._failures = 0
            self._length_s = 0.0
            return
        self._failures += FAILURES_MAX if "deadline" in results else 1
        if self._failures < FAILURES_MAX or self.suspended():
            return  # calls that began before the suspension do not extend it
        self._length_s = min(LONGEST_S, self._length_s * 2 or FIRST_S)
        self._until_s = runtime.monotonic_s() + self._length_s
        LOG.warning("%s fail (%s); they are suspended for %.0f s", self._what, results[0], self._length_s)


class TransferLanes:
    """Thread pools whose results are applied on the thread of the caller. A pool calls `wake` when `poll` has work.

    What waits in a lane is bounded by its callers: they limit the blocks in flight per tier, and the loads.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._pools: dict[Lane, Executor] = {}
        self._ended: deque[Callable[[], None]] = deque()
        self._closing = False
        self.running = 0

    def submit(self, lane: Lane, work: Callable[[], T], then: Callable[[T], None], on_error: T) -> None:
        """Run `work` in a lane, and pass its result to `then` within `poll`.

        If it raises, log that and pass `on_error`.
        """
        if self._closing:
            self.defer(partial(then, on_error))
            return
        if lane not in self._pools:
            self._pools[lane] = runtime.executor(THREADS[lane], f"kv-{lane}")
        self.running += 1
        self._pools[lane].submit(self._run, work, then, on_error)

    def defer(self, call: Callable[[], None]) -> None:
        self.running += 1
        self._ended.append(call)
        self._wake()

    def poll(self) -> None:
        while self._ended:
            self.running -= 1
            self._ended.popleft()()

    def close(self) -> None:
        """Drop the work that has not begun, and wait for the work in progress."""
        self._closing = True
        for pool in self._pools.values():
            pool.shutdown(cancel_futures=True)

    def _run(self, work: Callable[[], T], then: Callable[[T], None], on_error: T) -> None:
        result = on_error
        if not self._closing:
            try:
                result = work()
            except Exception:  # the thread must report the end of the transfer in any case
                LOG.exception("a transfer of KV blocks failed")
        self._ended.append(partial(then, result))
        self._wake()


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Result of a load. The memory of blocks after the first `blocks` has undefined content.

    Times are in microseconds, from the call of `load` to the end of the last transfer of each tier.
    """

    blocks: int
    by_tier: dict[LowerTier, int]
    us_by_tier: dict[LowerTier, int]

    def onboarded(self, block_size: int) -> tuple[OnboardedTokens, ...]:
        return tuple(
            OnboardedTokens(tier=tier, tokens=blocks * block_size, us=self.us_by_tier[tier])
            for tier, blocks in self.by_tier.items()
        )


# The result of each block, the results of those that were read again by their place in the load, and the end.
LoadedPart = tuple[list[str], dict[int, str], float]


@dataclass(slots=True)
class _Load:
    done: Callable[[LoadResult], None]
    began_s: float
    names: Sequence[BlockName]
    into: Sequence[memoryview]
    tiers: list[LowerTier]  # of each block
    reasons: list[str]  # why each block was not loaded, or an empty text
    pending: int  # tiers whose transfer has not ended
    us_by_tier: dict[LowerTier, int] = field(default_factory=dict)  # duration of the transfers that have ended


@dataclass(slots=True)
class OfferedBlocks:
    """Blocks in device memory that are being copied. `done` is called when the memory may be reused.

    `index` is the place of each block in `blocks`: memory, or a function that returns it on another thread.
    """

    blocks: Blocks
    index: dict[BlockName, int]
    done: Callable[[], None]
    pending: int = 0

    def memory(self, name: BlockName) -> memoryview:
        at = self.index[name]
        return self.blocks(at) if callable(self.blocks) else self.blocks[at]

    def end_write(self) -> None:
        self.pending -= 1
        if not self.pending:
            self.done()


@dataclass(frozen=True, slots=True)
class _Job:
    write: Write[BlockName]
    offer: OfferedBlocks | None  # source of the blocks, if they are in device memory
    slots: list[int]  # of host memory, if that is the tier
    source_slots: list[int]  # of host memory, if that is the source
    read: dict[BlockName, str] = field(default_factory=dict)  # results of reading the source, if it is no memory


class TierTransfers:
    """Memory and stores of one rank, and its transfers. The tiers of a load are read at the same time.

    A read from disk or store ends after `read_s` seconds, including the time in which a load waits for a thread. A
    write ends after `write_s` seconds, from the moment at which a thread begins it.

    Attributes:
        quota_evicted: blocks that stores removed because their quota was exceeded, by tier.
        store_changes: changes of the shared store that the rank has observed and not reported yet, in order.
    """

    def __init__(
        self,
        manager: TierManager[BlockName],
        identity: KvIdentity,
        host: HostMemory | None,
        lanes: TransferLanes,
        costs: CostModel,
        *,
        read_s: float,
        write_s: float,
    ) -> None:
        self.host = host
        self.stores: dict[LowerTier, BlockStore] = {}
        self.reads: dict[LowerTier, TierHealth] = {}
        self.writes: dict[LowerTier, TierHealth] = {}
        self.counters = TierCounters()
        self.quota_evicted: Counter[str] = Counter()
        self.store_changes: list[StoreChange] = []
        self._manager = manager
        self._identity = identity
        self._lanes = lanes
        self._costs = costs
        self._read_s = read_s
        self._write_s = write_s
        self._chunk = max(1, CHUNK_BYTES // identity.block_bytes)
        self._loads = 0  # in flight

    @property
    def full(self) -> bool:
        return self._loads >= LOADS_MAX

    def add_store(self, tier: LowerTier, store: BlockStore) -> None:
        self.stores[tier] = store
        self.reads[tier] = TierHealth(f"reads from the {tier} tier")
        self.writes[tier] = TierHealth(f"writes to the {tier} tier")

    def load(
        self,
        names: Sequence[BlockName],
        begin: int,
        runs: Sequence[TierRun],
        into: Sequence[memoryview],
        done: Callable[[LoadResult], None],
    ) -> None:
        """Begin a load. See `OffloadManager.load`."""
        loadings = self._manager.load(names, begin, runs)
        tiers = [one.tier for one in loadings for _ in one.keys]
        own = names[begin : begin + len(tiers)]
        load = _Load(done, runtime.monotonic_s(), own, into, tiers, [SUSPENDED] * len(tiers), len(set(tiers)))
        self._loads += 1
        if not loadings:
            self._lanes.defer(partial(self._finish_load, load))
        for tier in dict.fromkeys(tiers):
            places = [at for at, one in enumerate(tiers) if one == tier]
            slots = self.host.acquire([own[at] for at in places]) if tier == "host" and self.host is not None else []
            work = partial(self._load_part, load, tier, places, slots)
            then = partial(self._end_part, load, places, slots, [one for one in loadings if one.tier == tier])
            failed: LoadedPart = (["failed"] * len(places), {}, load.began_s)
            self._lanes.submit(READ_LANES[tier], work, then, failed)

    def write(self, writes: Sequence[Write[BlockName]], offer: OfferedBlocks | None = None) -> None:
        """Begin the writes that the manager has returned. `offer` has the blocks whose source is device memory."""
        for write in writes:
            slots: list[int] = []
            source_slots: list[int] = []
            if write.tier == "host" and self.host is not None:
                self.host.remove(write.evicted)
                slots = self.host.reserve(len(write.keys))
            if write.source == "host" and self.host is not None:
                source_slots = self.host.acquire(write.keys)
            source = offer if write.source == "device" else None
            if source is not None:
                source.pending += 1
            job = _Job(write, source, slots, source_slots)
            lane: Lane
            if write.tier != "host":
                lane = "disk-write" if write.tier == "disk" else "store-write"
                work = partial(self._write_store, job, self.stores[write.tier])
            elif write.source == "device":
                lane, work = "host-write", partial(self._copy_in, job)
            else:
                lane, work = "prefetch", partial(self._read_in, job)
            self._lanes.submit(lane, work, partial(self._end_write, job), ["failed"] * len(write.keys))

    def remove_files(self, names: Sequence[BlockName]) -> None:
        store = self.stores.get("disk")
        if store is not None and names:
            self._lanes.submit("disk-write", lambda: store.remove(names), lambda _: None, None)

    # On threads of the lanes

    def _load_part(self, load: _Load, tier: LowerTier, places: list[int], slots: list[int]) -> LoadedPart:
        """Read the blocks of a load that are in one tier. Blocks that the disk has lost are read from the store."""
        into = [load.into[at] for at in places]
        if tier == "host":
            assert self.host is not None
            for slot, memory in zip(slots, into, strict=True):
                self.host.copy_out(slot, memory)
            return [""] * len(into), {}, runtime.monotonic_s()
        end_s = load.began_s + self._read_s
        reasons = self._read(tier, [load.names[at] for at in places], into, end_s - runtime.monotonic_s())
        lost = {at: memory for at, memory, why in zip(places, into, reasons, strict=True) if why in GONE_REASONS}
        again: list[str] = []
        if tier == "disk" and lost and "store" in self.stores:
            names = [load.names[at] for at in lost]
            again = self._read("store", names, [*lost.values()], end_s - runtime.monotonic_s())
        return reasons, dict(zip(lost, again, strict=False)), runtime.monotonic_s()

    def _read(
        self, tier: LowerTier, names: Sequence[BlockName], into: Sequence[memoryview], wait_s: float
    ) -> list[str]:
        if self.reads[tier].suspended():
            return [SUSPENDED] * len(names)
        return self.stores[tier].read(names, into, wait_s) if wait_s > 0 else ["deadline"] * len(names)

    def _copy_in(self, job: _Job) -> list[str]:
        assert self.host is not None
        assert job.offer is not None
        for name, slot in zip(job.write.keys, job.slots, strict=True):
            self.host.copy_in(slot, job.offer.memory(name))
        return [""] * len(job.slots)

    def _read_in(self, job: _Job) -> list[str]:
        assert self.host is not None
        return self._read_source(job, job.write.keys, [self.host.view(slot) for slot in job.slots])

    def _read_source(self, job: _Job, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[str]:
        source = job.write.source
        assert source != "device"
        reasons = self._read(source, names, into, self._read_s)
        job.read.update(zip(names, reasons, strict=True))
        return [SOURCE if reason else "" for reason in reasons]

    def _write_store(self, job: _Job, store: BlockStore) -> list[str]:
        write = job.write
        if write.evicted:
            store.remove(write.evicted)
        end_s = runtime.monotonic_s() + self._write_s
        results: list[str] = []
        buffer: list[memoryview] = []
        if write.source == "disk":
            size = self._identity.block_bytes
            memory = memoryview(bytearray(min(self._chunk, len(write.keys)) * size))
            buffer = [memory[at : at + size] for at in range(0, len(memory), size)]
        for at in range(0, len(write.keys), self._chunk):
            part = write.keys[at : at + self._chunk]
            left_s = end_s - runtime.monotonic_s()
            if self.writes[write.tier].suspended():
                results += [SUSPENDED] * len(part)
            elif left_s <= 0:
                results += ["deadline"] * len(part)
            else:
                results += self._write_chunk(job, store, at, part, buffer, left_s)
        return results

    def _write_chunk(
        self, job: _Job, store: BlockStore, at: int, names: Sequence[BlockName], buffer: list[memoryview], left_s: float
    ) -> list[str]:
        bad = [""] * len(names)
        if job.offer is not None:
            views = [job.offer.memory(name) for name in names]
        elif job.source_slots:
            assert self.host is not None
            views = [self.host.view(slot) for slot in job.source_slots[at : at + len(names)]]
        else:
            views = buffer[: len(names)]
            bad = self._read_source(job, names, views)
        readable = [(name, view) for name, view, reason in zip(names, views, bad, strict=True) if not reason]
        written = iter(store.write(readable, left_s) if readable else ())
        return [reason or next(written) for reason in bad]

    # On the owner's thread

    def _end_part(
        self,
        load: _Load,
        places: list[int],
        slots: list[int],
        loadings: list[Loading[BlockName]],
        result: LoadedPart,
    ) -> None:
        reasons, again, ended_s = result
        tier = load.tiers[places[0]]
        us = max(1, round((ended_s - load.began_s) * 1e6))
        if self.host is not None:
            self.host.release(slots)
        gone = set(self._observe_read(tier, [load.names[at] for at in places], reasons))
        for one in loadings:
            self._manager.loaded(one.number, gone.intersection(one.keys))
        if not any(reasons):
            self._costs.observe_load(tier, len(reasons), us)
        self.counters.loads[tier] += 1
        self.counters.load_us[tier] += us
        for at, reason in zip(places, reasons, strict=True):
            load.reasons[at] = reason
        load.us_by_tier[tier] = us
        if again:
            self._observe_read("store", [load.names[at] for at in again], [*again.values()])
        for at, reason in again.items():
            load.reasons[at] = reason
            if not reason:
                load.tiers[at] = "store"
                load.us_by_tier.setdefault("store", us)
                self._manager.add("store", [load.names[at]])
        load.pending -= 1
        if not load.pending:
            self._finish_load(load)

    def _finish_load(self, load: _Load) -> None:
        self._loads -= 1
        size = self._identity.block_bytes
        blocks = next((at for at, reason in enumerate(load.reasons) if reason), len(load.reasons))
        by_tier = Counter(load.tiers[:blocks])
        self.counters.matched_tokens += blocks * self._identity.block_size
        for tier, count in by_tier.items():
            self.counters.onboarded_blocks[tier] += count
            self.counters.onboarded_bytes[tier] += count * size
        load.done(LoadResult(blocks, dict(by_tier), {tier: load.us_by_tier[tier] for tier in by_tier}))

    def _end_write(self, job: _Job, results: list[str]) -> None:
        write, host = job.write, self.host
        if host is not None:
            host.release(job.source_slots)
        if job.read and write.source != "device":
            gone = self._observe_read(write.source, list(job.read), list(job.read.values()))
            self._manager.remove(write.source, gone)
        self._count_write(write, results)
        failed = {name for name, reason in zip(write.keys, results, strict=True) if reason}
        following = self._manager.written(write.number, failed)
        lost = {name for name in write.keys if not self._manager.holds(write.tier, name)}
        if write.tier == "host" and host is not None:
            for name, slot in zip(write.keys, job.slots, strict=True):
                if name in lost:
                    host.give_back(slot)
                else:
                    host.put(name, slot)
        elif write.tier == "disk":
            self.remove_files([*(lost - failed)])
        if job.offer is not None:
            job.offer.end_write()
        if write.tier in self.stores and (evicted := self.stores[write.tier].take_evicted()):
            self.quota_evicted[write.tier] += len(evicted)
            self._manager.remove(write.tier, evicted)
            if write.tier == "store":
                self._note_store(removed=evicted)
        self.write(following)

    def _count_write(self, write: Write[BlockName], results: list[str]) -> None:
        counters = self.counters
        stored = [name for name, reason in zip(write.keys, results, strict=True) if not reason]
        if write.tier == "host" and write.source != "device":
            counters.prefetched_blocks[write.source] += len(stored)
        else:
            counters.offloaded_blocks[write.source, write.tier] += len(stored)
            counters.offloaded_bytes[write.tier] += len(stored) * self._identity.block_bytes
        for reason in filter(None, results):
            if reason in {SUSPENDED, SOURCE}:
                counters.skipped[reason] += 1
            else:
                counters.write_failures[write.tier, reason] += 1
        if write.tier in self.writes:
            self.writes[write.tier].observe([reason for reason in results if reason not in {SUSPENDED, SOURCE}])
        if write.tier == "store":
            self._note_store(stored=stored)

    def _observe_read(self, tier: LowerTier, names: Sequence[BlockName], reasons: Sequence[str]) -> list[BlockName]:
        """Count the results of a read. Return the blocks that the tier does not have any more."""
        if tier in self.reads and SUSPENDED not in reasons:
            self.reads[tier].observe(reasons)
        self.counters.misses.update((tier, reason) for reason in reasons if reason)
        gone = [name for name, reason in zip(names, reasons, strict=True) if reason in GONE_REASONS]
        if tier == "store":
            self._note_store(stale=gone)
        return gone

    def _note_store(
        self, *, stored: Iterable[BlockName] = (), removed: Iterable[BlockName] = (), stale: Iterable[BlockName] = ()
    ) -> None:
        change = StoreChange(stored=hashes(stored), removed=hashes(removed), stale=hashes(stale))
        if change.stored or change.removed or change.stale:
            self.store_changes.append(change)


def hashes(names: Iterable[BlockName]) -> Sequence[int]:
    return array("Q", [name.sequence_hash for name in names])
