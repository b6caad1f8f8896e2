"""Decide which KV blocks of one worker rank are in which tier. The caller moves the bytes and reports the result.

Theory of operation. Blocks go down from tier to tier: a tier is offered a block when the next faster tier has it. A
write reserves room and leases its source. The block can be found only after `written`. A load leases the blocks that it
reads. No block waits for room: if there is none, or too many writes are in flight, the block is skipped and counted. It
is offered again with the next request that uses it.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Sequence
from itertools import groupby
from typing import Generic, NamedTuple

from forebay.events.kv import LowerTier
from forebay.kv_tiers.decisions import Loading, TierChange, TierRun, TierSet, Write
from forebay.kv_tiers.frequency import FrequencyFilter, FrequencyLimits, Key
from forebay.kv_tiers.tier_content import SourceTier, TierContent, TierLimits

__all__ = [
    "Loading",
    "LowerTier",
    "SourceTier",
    "TierChange",
    "TierLimits",
    "TierManager",
    "TierRun",
    "TierSet",
    "Write",
]


class _WriteInFlight(NamedTuple, Generic[Key]):
    write: Write[Key]
    tier: TierContent[Key]
    source: TierContent[Key] | None


class _LoadInFlight(NamedTuple, Generic[Key]):
    loading: Loading[Key]
    tier: TierContent[Key]


class TierManager(Generic[Key]):
    """Host memory, disk and shared store of one rank. Not thread-safe.

    Keys name blocks together with all blocks before them, so a prompt is a sequence of keys. A block that a transfer
    uses, or that is pinned, is never evicted.

    Attributes:
        counters: `skipped_filter`, `skipped_full`, `skipped_busy`, `skipped_pin` and, per tier, `evicted_<tier>`
            and `stale_<tier>` (could not be read). Blocks in each case.
    """

    def __init__(self, tiers: TierSet, frequency: FrequencyLimits = FrequencyLimits()) -> None:  # noqa: B008 - frozen
        limits: dict[LowerTier, TierLimits | None] = {"host": tiers.host, "disk": tiers.disk, "store": tiers.store}
        self.counters: Counter[str] = Counter()
        self._tiers: list[TierContent[Key]] = [TierContent(name, given) for name, given in limits.items() if given]
        self._writes_max = tiers.writes_max
        self._frequency: FrequencyFilter[Key] = FrequencyFilter(frequency)
        self._number = 0
        self._writes: dict[int, _WriteInFlight[Key]] = {}
        self._loads: dict[int, _LoadInFlight[Key]] = {}
        self._pins: dict[Key, int] = {}  # until when, in microseconds
        self._pins_max = max((tier.limits.blocks // 2 for tier in self._tiers if tier.name != "store"), default=0)
        self._changes: list[tuple[LowerTier, bool, list[Key]]] = []  # tier, whether stored, blocks

    def match(self, keys: Sequence[Key], begin: int = 0) -> list[TierRun]:
        """Return where the blocks from index `begin` on can be read, each from its fastest tier.

        The runs end at the first block that no tier has.
        """
        runs: list[TierRun] = []
        tiers = self._tiers
        last: TierContent[Key] | None = None
        count = 0
        for key in keys[begin:] if begin else keys:
            for tier in tiers:
                if key in tier.blocks:
                    break
            else:
                break
            if tier is not last:
                if last is not None:
                    runs.append(TierRun(last.name, count))
                last, count = tier, 0
            count += 1
        if last is not None:
            runs.append(TierRun(last.name, count))
        return runs

    def load(self, keys: Sequence[Key], begin: int, runs: Iterable[TierRun]) -> list[Loading[Key]]:
        """Begin to load blocks that `match` has found, one load per run.

        If the manager has changed since and a block can no longer be read from its tier, the loads end before it.
        """
        loads: list[Loading[Key]] = []
        for run in runs:
            tier = self._find(run.tier)
            part = keys[begin : begin + run.blocks]
            begin += run.blocks
            count = 0
            if tier is not None:
                count = next((at for at, key in enumerate(part) if key not in tier), len(part))
            if tier is not None and count:
                loading = Loading(self._next_number(), run.tier, tuple(part[:count]))
                tier.touch(loading.keys)
                tier.lease(loading.keys)
                self._loads[loading.number] = _LoadInFlight(loading, tier)
                loads.append(loading)
            if count < run.blocks:
                break
        return loads

    def loaded(self, number: int, failed: Collection[Key] = ()) -> None:
        """End a load. Blocks in `failed` could not be read, so they leave the tier."""
        loading, tier = self._loads.pop(number)
        if failed:
            stale = [key for key in dict.fromkeys(failed) if key in tier]
            self.counters[f"stale_{tier.name}"] += len(stale)
            self._note(tier, stored=False, keys=tier.remove(stale))
        tier.release(loading.keys)

    def offer(self, keys: Sequence[Key]) -> list[Write[Key]]:
        """Return the writes for full blocks in prompt order that device memory has, newly stored or used again."""
        filtering = [tier for tier in self._tiers if self._filters(tier)]
        lacking = {key for tier in filtering for key in tier.lacking(keys)}
        if lacking:
            self._frequency.offer(key for key in keys if key in lacking)
        return self._descend(keys, 0, from_device=True)

    def prefetch(self, keys: Sequence[Key], begin: int) -> list[Write[Key]]:
        """Return the writes that copy blocks from disk or the shared store to host memory, before they are loaded.

        At most half of the host memory is used for one prompt. Device memory lacks the block at `begin`.
        """
        host = self._find("host")
        if host is None or host.paused:
            return []
        window = keys[begin : begin + host.limits.blocks // 2]
        host.touch(window)
        found: list[tuple[TierContent[Key], Key]] = []
        for key in window:
            if key in host or host.is_busy(key):
                continue
            source = next((tier for tier in self._tiers if key in tier), None)
            if source is None:
                break
            found.append((source, key))
        writes: list[Write[Key]] = []
        keep = frozenset(window)
        for name, group in groupby(found, key=lambda one: one[0].name):
            writes += self._begin(host, name, [key for _, key in group], keep)
        return writes

    def written(self, number: int, failed: Collection[Key] = ()) -> list[Write[Key]]:
        """End a write. Its blocks become readable, except those in `failed`. Return the writes that follow from it."""
        write, tier, source = self._writes.pop(number)
        tier.writing.difference_update(write.keys)
        if source is not None:
            source.release(write.keys)
        stored = list(write.keys)
        if failed or tier.abandoned:
            bad = tier.abandoned.union(failed)
            stored = [key for key in write.keys if key not in bad]
            tier.abandoned.difference_update(write.keys)
        tier.insert(stored)
        self._pin(tier, stored)
        self._note(tier, stored=True, keys=stored)
        at = self._tiers.index(tier)
        readable: Sequence[Key] = stored
        if len(stored) < len(write.keys):
            above = self._tiers[: at + 1]
            readable = [key for key in write.keys if any(key in one for one in above)]
        return self._descend(readable, at + 1, from_device=False)

    def add(self, tier: LowerTier, keys: Iterable[Key]) -> None:
        """Add blocks that a tier has: from its inventory, oldest first, or because a router has named them.

        Blocks for which host memory or disk has no room are ignored. A full shared store forgets the oldest.
        """
        content = self._find(tier)
        if content is None:
            return
        known: list[Key] = []
        new: list[Key] = []
        for key in dict.fromkeys(keys):
            if key in content:
                known.append(key)
            elif not content.is_busy(key):
                new.append(key)
        content.touch(known)
        new = new[: content.limits.blocks]
        if tier == "store" and len(new) > content.free:
            self._evict(content, len(new) - content.free, ())
        new = new[: content.free]
        content.insert(new)
        self._pin(content, new)
        self._note(content, stored=True, keys=new)

    def remove(self, tier: LowerTier, keys: Collection[Key]) -> None:
        """Remove blocks that a tier no longer has. Writes of these blocks in flight will not make them readable."""
        content = self._find(tier)
        if content is not None:
            self._note(content, stored=False, keys=content.remove(dict.fromkeys(keys)))

    def pin(self, keys: Sequence[Key], until_us: int) -> None:
        """Keep the leading blocks of a prompt in host memory and on disk, also if they arrive there later.

        A pin never shortens an earlier one. Pinned blocks take at most half of each tier; blocks beyond half of the
        larger tier are counted as `skipped_pin`. `unpin` has the same clock.
        """
        for at, key in enumerate(keys):
            if key not in self._pins and len(self._pins) >= self._pins_max:
                self.counters["skipped_pin"] += len(keys) - at
                keys = keys[:at]
                break
            self._pins[key] = max(until_us, self._pins.get(key, 0))
        for tier in self._tiers:
            self._pin(tier, keys)

    def unpin(self, now_us: int) -> None:
        ended = [key for key, until_us in self._pins.items() if until_us <= now_us]
        for key in ended:
            del self._pins[key]
        if ended:
            for tier in self._tiers:
                tier.pinned.difference_update(ended)
                self._pin(tier, self._pins)  # those for which the tier had too many pins

    def pinned(self, tier: LowerTier) -> int:
        content = self._find(tier)
        return 0 if content is None else len(content.pinned)

    def set_paused(self, tier: LowerTier, *, paused: bool) -> None:
        """Begin no writes into a tier while it is paused; blocks that it lacks pass it on their way down."""
        content = self._find(tier)
        if content is not None:
            content.paused = paused

    def clear(self, tiers: Collection[LowerTier] = ("host", "disk", "store")) -> None:
        """Remove all blocks of some tiers, and all pins and frequencies. Writes in flight to these tiers are lost."""
        for tier in self._tiers:
            if tier.name in tiers:
                self._note(tier, stored=False, keys=tier.clear())
        for tier in self._tiers:
            tier.pinned.clear()
        self._pins.clear()
        self._frequency.clear()

    def tick(self) -> None:
        self._frequency.tick()

    def changes(self) -> list[TierChange[Key]]:
        changes = self._changes
        self._changes = []
        return [
            TierChange(tier, tuple(keys) if stored else (), () if stored else tuple(keys))
            for tier, stored, keys in changes
        ]

    def resident(self, tier: LowerTier) -> Sequence[Key]:
        """Return the readable blocks of a tier, in the order of their eviction."""
        content = self._find(tier)
        return [] if content is None else [*content.blocks]

    def holds(self, tier: LowerTier, key: Key) -> bool:
        content = self._find(tier)
        return content is not None and key in content

    def count(self, tier: LowerTier) -> int:
        content = self._find(tier)
        return 0 if content is None else len(content.blocks)

    def used(self, tier: LowerTier) -> int:
        """Return the number of blocks that take room in a tier, including writes in flight."""
        content = self._find(tier)
        return 0 if content is None else content.used

    def _find(self, name: str) -> TierContent[Key] | None:
        for tier in self._tiers:
            if tier.name == name:
                return tier
        return None

    def _pin(self, tier: TierContent[Key], keys: Iterable[Key]) -> None:
        if self._pins and tier.name != "store":
            tier.pin(key for key in keys if key in self._pins)

    def _filters(self, tier: TierContent[Key]) -> bool:
        return tier.limits.filter and (tier.name != "disk" or self._tiers[0].name == "host")

    def _descend(self, keys: Sequence[Key], at: int, *, from_device: bool) -> list[Write[Key]]:
        """Offer blocks to the tiers from index `at` on; each tier is offered those that the tier above it has."""
        writes: list[Write[Key]] = []
        keep: frozenset[Key] = frozenset(keys)
        for index in range(at, len(self._tiers)):
            tier = self._tiers[index]
            if not keys:
                break
            present = tier.present(keys)
            tier.touch(present)
            if tier.paused:
                continue
            wanted = self._wanted(tier, keys) if len(present) < len(keys) else []
            for source, group in self._by_source(wanted, index, from_device=from_device):
                writes += self._begin(tier, source, group, keep)
            keys = present
        return writes

    def _by_source(self, keys: Sequence[Key], at: int, *, from_device: bool) -> list[tuple[SourceTier, list[Key]]]:
        """Return from where blocks are copied to the tier with index `at`: host memory, device memory or disk."""
        groups: list[tuple[SourceTier, list[Key]]] = []
        for tier in self._tiers[:at]:
            if keys and (tier.name == "host" or not from_device):
                groups.append((tier.name, tier.present(keys)))
                keys = tier.lacking(keys)
        if from_device:
            groups.append(("device", list(keys)))
        return [(source, group) for source, group in groups if group]

    def _wanted(self, tier: TierContent[Key], keys: Iterable[Key]) -> list[Key]:
        lacking = tier.writable(keys)
        if not lacking or not self._filters(tier):
            return lacking
        passing = self._frequency.passing(lacking)
        self.counters["skipped_filter"] += len(lacking) - len(passing)
        return passing

    def _begin(
        self, tier: TierContent[Key], source: SourceTier, keys: Sequence[Key], keep: Container[Key]
    ) -> list[Write[Key]]:
        """Begin one write of the leading blocks for which there is room; evict others, but none of `keep`."""
        keys = list(dict.fromkeys(keys))
        count = min(len(keys), max(0, self._writes_max - len(tier.writing)))
        self.counters["skipped_busy"] += len(keys) - count
        evicted: list[Key] = []
        if count > tier.free:
            evicted = self._evict(tier, count - tier.free, keep)
            room = min(count, tier.free)
            self.counters["skipped_full"] += count - room
            count = room
        if not count:
            return []
        taken = tuple(keys[:count])
        tier.writing.update(taken)
        origin = None if source == "device" else self._find(source)
        if origin is not None:
            origin.lease(taken)
        write = Write(self._next_number(), tier.name, source, taken, () if tier.name == "store" else tuple(evicted))
        self._writes[write.number] = _WriteInFlight(write, tier, origin)
        return [write]

    def _evict(self, tier: TierContent[Key], count: int, keep: Container[Key]) -> list[Key]:
        evicted = tier.evict(count, keep)
        self.counters[f"evicted_{tier.name}"] += len(evicted)
        self._note(tier, stored=False, keys=evicted)
        return evicted

    def _note(self, tier: TierContent[Key], *, stored: bool, keys: list[Key]) -> None:
        if not keys:
            return
        # Stored blocks are not merged with those before, because they are consecutive blocks of a prompt.
        if not stored and self._changes and self._changes[-1][:2] == (tier.name, False):
            self._changes[-1][2].extend(keys)
        else:
            self._changes.append((tier.name, stored, list(keys)))

    def _next_number(self) -> int:
        self._number += 1
        return self._number
