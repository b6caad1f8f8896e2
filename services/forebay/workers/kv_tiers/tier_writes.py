"""Copy blocks into the tiers of one rank: from device memory, and from one tier to another.

Theory of operation. The manager decides on each write, and leases its source. A thread of the written tier moves the
bytes, in chunks. Then the owner's thread reports the end to the manager, which returns the writes that follow from it.
Files of evicted blocks are removed by the thread that writes the tier, so that a block that is evicted and written
again is not removed afterwards.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from forebay import runtime
from forebay.kv_tiers.manager import TierManager, Write
from forebay.workers.kv_tiers.block_stores import BlockStore
from forebay.workers.kv_tiers.identity import BlockName
from forebay.workers.kv_tiers.rank_places import SUSPENDED, RankPlaces
from forebay.workers.kv_tiers.transfer_lanes import Lane, TransferLanes

CHUNK_BYTES = 32 << 20  # copied before it is written, where a copy is needed; a slow disk writes it in a quarter second
SOURCE = "source"  # reason of blocks whose source could not be read

Blocks = Sequence[memoryview] | Callable[[int], memoryview]


@dataclass(slots=True)
class OfferedBlocks:
    """Blocks in device memory that are being copied.

    Attributes:
        blocks: memory of each block, or a function that returns it on another thread.
        index: index of each block in `blocks`.
        done: called when the memory may be reused.
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
    """A write in flight.

    Attributes:
        offer: source of the blocks, if they are in device memory.
        slots: slots of host memory into which the blocks are copied, if that is the tier.
        source_slots: slots of host memory from which the blocks are copied, if that is the source.
        read: results of reading the source, by block; empty if it is memory.
    """

    write: Write[BlockName]
    offer: OfferedBlocks | None
    slots: list[int]
    source_slots: list[int]
    read: dict[BlockName, str] = field(default_factory=dict)


class TierWrites:
    """Writes of one rank.

    Args:
        read_s: seconds after which a read from disk or store ends.
        write_s: seconds after which a write to disk or store ends, from the moment at which a thread begins it.
    """

    def __init__(
        self,
        manager: TierManager[BlockName],
        places: RankPlaces,
        lanes: TransferLanes,
        *,
        read_s: float,
        write_s: float,
    ) -> None:
        self._manager = manager
        self._places = places
        self._lanes = lanes
        self._read_s = read_s
        self._write_s = write_s
        self._chunk = max(1, CHUNK_BYTES // places.block_bytes)

    def begin(self, writes: Sequence[Write[BlockName]], offer: OfferedBlocks | None = None) -> None:
        """Begin the writes that the manager has returned.

        Args:
            offer: memory of the blocks whose source is device memory.
        """
        for write in writes:
            host = self._places.host
            slots: list[int] = []
            source_slots: list[int] = []
            if write.tier == "host" and host is not None:
                host.remove(write.evicted)
                slots = host.reserve(len(write.keys))
            if write.source == "host" and host is not None:
                source_slots = host.acquire(write.keys)
            if write.source == "device":
                assert offer is not None
                offer.pending += 1
            job = _Job(write, offer if write.source == "device" else None, slots, source_slots)
            lane, work = self._plan(job)
            self._lanes.submit(lane, work, partial(self._ended, job), ["failed"] * len(write.keys))

    def remove(self, names: Sequence[BlockName]) -> None:
        """Remove the files of blocks from the disk tier."""
        store = self._places.stores.get("disk")
        if store is not None and names:
            self._lanes.submit("disk-write", lambda: store.remove(names), lambda _: None, None)

    def _plan(self, job: _Job) -> tuple[Lane, Callable[[], list[str]]]:
        """Return which lane executes a write, and how."""
        write = job.write
        if write.tier != "host":
            lane: Lane = "disk-write" if write.tier == "disk" else "store-write"
            return lane, partial(self._write_store, job, self._places.stores[write.tier])
        if write.source == "device":
            return "host-write", partial(self._copy_in, job)
        return "prefetch", partial(self._read_in, job)

    def _copy_in(self, job: _Job) -> list[str]:
        host = self._places.host
        assert host is not None
        assert job.offer is not None
        for name, slot in zip(job.write.keys, job.slots, strict=True):
            host.copy_in(slot, job.offer.memory(name))
        return [""] * len(job.slots)

    def _read_in(self, job: _Job) -> list[str]:
        host = self._places.host
        assert host is not None
        reasons = self._read(job, job.write.keys, [host.view(slot) for slot in job.slots])
        return [SOURCE if reason else "" for reason in reasons]

    def _write_store(self, job: _Job, store: BlockStore) -> list[str]:
        write = job.write
        if write.evicted:
            store.remove(write.evicted)
        end_s = runtime.monotonic_s() + self._write_s
        results: list[str] = []
        buffer: list[memoryview] = []
        if write.source == "disk":
            size = self._places.block_bytes
            memory = memoryview(bytearray(min(self._chunk, len(write.keys)) * size))
            buffer = [memory[at : at + size] for at in range(0, len(memory), size)]
        for at in range(0, len(write.keys), self._chunk):
            part = write.keys[at : at + self._chunk]
            left_s = end_s - runtime.monotonic_s()
            if self._places.writes[write.tier].suspended():
                results += [SUSPENDED] * len(part)
            elif left_s <= 0:
                results += ["deadline"] * len(part)
            else:
                results += self._write_chunk(job, store, at, part, buffer, left_s)
        return results

    def _write_chunk(
        self,
        job: _Job,
        store: BlockStore,
        at: int,
        names: Sequence[BlockName],
        buffer: list[memoryview],
        left_s: float,
    ) -> list[str]:
        host = self._places.host
        bad = [""] * len(names)
        if job.offer is not None:
            views = [job.offer.memory(name) for name in names]
        elif job.source_slots:
            assert host is not None
            views = [host.view(slot) for slot in job.source_slots[at : at + len(names)]]
        else:
            views = buffer[: len(names)]
            bad = self._read(job, names, views)
        readable = [(name, view) for name, view, reason in zip(names, views, bad, strict=True) if not reason]
        written = iter(store.write(readable, left_s) if readable else ())
        return [SOURCE if reason else next(written) for reason in bad]

    def _read(self, job: _Job, names: Sequence[BlockName], into: Sequence[memoryview]) -> list[str]:
        source = job.write.source
        assert source in {"disk", "store"}
        if self._places.reads[source].suspended():
            reasons = [SUSPENDED] * len(names)
        else:
            reasons = self._places.stores[source].read(names, into, self._read_s)
        job.read.update(zip(names, reasons, strict=True))
        return reasons

    def _ended(self, job: _Job, results: list[str]) -> None:
        write, places, host = job.write, self._places, self._places.host
        if host is not None:
            host.release(job.source_slots)
        if job.read and write.source != "device":
            gone = places.observe_read(write.source, list(job.read), list(job.read.values()))
            self._manager.remove(write.source, gone)
        self._count(write, results)
        failed = {name for name, reason in zip(write.keys, results, strict=True) if reason}
        following = self._manager.written(write.number, failed)
        lost = [name for name in write.keys if not self._manager.holds(write.tier, name)]
        if write.tier == "host" and host is not None:
            absent = set(lost)
            for name, slot in zip(write.keys, job.slots, strict=True):
                if name in absent:
                    host.give_back(slot)
                else:
                    host.put(name, slot)
        elif write.tier == "disk":
            self.remove([name for name in lost if name not in failed])
        if job.offer is not None:
            job.offer.end_write()
        if write.tier != "host":
            self._take_evicted(write)
        self.begin(following)

    def _count(self, write: Write[BlockName], results: list[str]) -> None:
        places = self._places
        counters = places.counters
        stored = [name for name, reason in zip(write.keys, results, strict=True) if not reason]
        if write.tier == "host" and write.source != "device":
            counters.prefetched_blocks[write.source] += len(stored)
        else:
            counters.offloaded_blocks[write.source, write.tier] += len(stored)
            counters.offloaded_bytes[write.tier] += len(stored) * places.block_bytes
        for reason in filter(None, results):
            if reason in {SUSPENDED, SOURCE}:
                counters.skipped[reason] += 1
            else:
                counters.write_failures[write.tier, reason] += 1
        if write.tier in places.writes:
            places.writes[write.tier].observe([reason for reason in results if reason not in {SUSPENDED, SOURCE}])
        if write.tier == "store":
            places.note_store(stored=stored)

    def _take_evicted(self, write: Write[BlockName]) -> None:
        evicted = self._places.stores[write.tier].take_evicted()
        if evicted:
            self._places.quota_evicted[write.tier] += len(evicted)
            self._manager.remove(write.tier, evicted)
            if write.tier == "store":
                self._places.note_store(removed=evicted)
