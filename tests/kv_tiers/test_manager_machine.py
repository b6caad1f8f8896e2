"""Any sequence of calls and failures keeps the tiers consistent with the bytes that a caller has moved."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forebay.kv_tiers.frequency import FrequencyLimits
from forebay.kv_tiers.manager import Loading, LowerTier, TierLimits, TierManager, TierSet, Write

TIERS: tuple[LowerTier, ...] = ("host", "disk", "store")

# Prompts that share prefixes: the key of a block names all blocks before it.
PROMPTS = [[int(f"{prefix}{at}") for at in range(1, 10)] for prefix in (1, 2)]
PROMPTS += [
    prompt[:4] + [1000 + first + at for at in range(5)] for first, prompt in ((0, PROMPTS[0]), (10, PROMPTS[1]))
]

prompts = st.tuples(st.sampled_from(PROMPTS), st.integers(1, 9)).map(lambda one: one[0][: one[1]])
tier_names = st.sampled_from(TIERS)
tier_limits = st.builds(TierLimits, blocks=st.integers(3, 12), filter=st.booleans())
maybe_limits = tier_limits | tier_limits | st.builds(TierLimits, blocks=st.integers(0, 2)) | st.none()
BUSY = 5  # transfers before the tiers may be cleared, so that there is something to remove
picks = st.integers(0, 1 << 30)


def selected(keys: tuple[int, ...], bits: int) -> set[int]:
    """Return the keys whose bits are set; bit 9 selects all, so small numbers are partial failures."""
    return {key for at, key in enumerate(keys) if bits >> at & 1 or bits >> 9 & 1}


class Machine(RuleBasedStateMachine):
    """A caller that moves bytes: it keeps what each tier has, and which transfers are in flight."""

    @initialize(host=maybe_limits, disk=maybe_limits, store=maybe_limits, writes_max=st.integers(1, 12), seed=picks)
    def start(
        self, host: TierLimits | None, disk: TierLimits | None, store: TierLimits | None, writes_max: int, seed: int
    ) -> None:
        self.limits = {"host": host, "disk": disk, "store": store}
        self.writes_max = writes_max
        tiers = TierSet(host=host, disk=disk, store=store, writes_max=writes_max)
        self.manager: TierManager[int] = TierManager(tiers, FrequencyLimits(keys_max=8))
        self.present: dict[str, set[int]] = {name: set() for name, given in self.limits.items() if given}
        self.replayed: dict[str, set[int]] = {name: set() for name in TIERS}
        self.writes: dict[int, Write[int]] = {}
        self.loads: dict[int, Loading[int]] = {}
        self.numbers: set[int] = set()
        self.now_us = 0
        self.pins: dict[int, int] = {}  # until when
        self.abandoned: dict[int, set[int]] = {}  # by the number of the write
        self.burst(seed)

    def begin(self, writes: list[Write[int]], cause: set[int] | None = None) -> None:
        for write in writes:
            assert write.number not in self.numbers
            self.numbers.add(write.number)
            assert write.keys
            in_use = self.in_use(write.tier)
            assert not in_use & {*write.evicted, *write.keys}, "a block that is in use is evicted or overwritten"
            assert not set(write.evicted) & set(self.pinned(write.tier))
            assert write.tier != "store" or not write.evicted
            self.present[write.tier] -= set(write.evicted)
            in_flight = [key for other in self.writes.values() if other.tier == write.tier for key in other.keys]
            assert not set(write.keys) & set(in_flight)
            assert len(in_flight) + len(write.keys) <= self.writes_max
            if write.source == "device":
                assert cause is not None and cause >= set(write.keys)
            else:
                assert self.present[write.source] >= set(write.keys)
            self.writes[write.number] = write

    def in_use(self, tier: str) -> set[int]:
        loads = {key for one in self.loads.values() if one.tier == tier for key in one.keys}
        return loads | {key for one in self.writes.values() if one.source == tier for key in one.keys}

    def pinned(self, tier: str) -> list[int]:
        given = self.limits[tier]
        pinned = [key for key in self.pins if key in self.present.get(tier, ())]
        return pinned if given and tier != "store" and len(self.pins) <= given.blocks // 2 else []

    @rule(keys=prompts)
    def offer(self, keys: list[int]) -> None:
        self.begin(self.manager.offer(keys), set(keys))

    @rule()
    def finish(self) -> None:
        """End the transfers in flight successfully; the writes that follow stay in flight."""
        for number in list(self.loads):
            del self.loads[number]
            self.manager.loaded(number)
        for number in list(self.writes):
            self.end_write(number)

    @rule(keys=prompts, begin=st.integers(0, 3))
    def prefetch(self, keys: list[int], begin: int) -> None:
        writes = self.manager.prefetch(keys, begin)
        self.begin(writes)

    @rule(keys=prompts, begin=st.integers(0, 3), shift=st.booleans())
    def load(self, keys: list[int], begin: int, shift: bool) -> None:
        runs = self.manager.match(keys, begin)
        matched = sum(run.blocks for run in runs)
        for at, key in enumerate(keys[begin : begin + matched + 1]):
            tiers = [name for name in TIERS if key in self.replayed[name]]
            assert bool(tiers) == (at < matched), "match ends at the first block that no tier has"
        begin += shift  # as if the content had changed since the match
        loads = self.manager.load(keys, begin, runs)
        at = begin
        for one in loads:
            assert one.number not in self.numbers
            self.numbers.add(one.number)
            assert keys[at : at + len(one.keys)] == list(one.keys)
            at += len(one.keys)
            assert self.replayed[one.tier] >= set(one.keys)
            assert one.tier == "store" or self.present[one.tier] >= set(one.keys)
            self.loads[one.number] = one
        if not shift:
            assert [(one.tier, len(one.keys)) for one in loads] == runs

    @rule(at=picks, failures=picks)
    def loaded(self, at: int, failures: int) -> None:
        if not self.loads:
            return
        load = self.loads.pop(sorted(self.loads)[at % len(self.loads)])
        failed = selected(load.keys, failures)
        self.manager.loaded(load.number, failed)
        assert not failed & set(self.manager.resident(load.tier))

    @rule(at=picks, failures=picks)
    def written(self, at: int, failures: int) -> None:
        if self.writes:
            self.end_write(sorted(self.writes)[at % len(self.writes)], failures)

    def end_write(self, number: int, failures: int = 0) -> None:
        write = self.writes.pop(number)
        failed = selected(write.keys, failures)
        assert not set(self.manager.resident(write.tier)) & set(write.keys), "readable before it was written"
        self.present[write.tier] |= set(write.keys) - failed
        follow_up = self.manager.written(number, failed)
        assert not (failed | self.abandoned.pop(number, set())) & set(self.manager.resident(write.tier))
        self.begin(follow_up)

    def abandon(self, tier: str, keys: set[int]) -> None:
        for number, write in self.writes.items():
            if write.tier == tier:
                self.abandoned.setdefault(number, set()).update(keys & set(write.keys))

    @rule(tier=tier_names, keys=st.lists(st.sampled_from(PROMPTS[0]), max_size=9))
    def add(self, tier: LowerTier, keys: list[int]) -> None:
        self.manager.add(tier, keys)
        if tier in self.present:
            self.present[tier] |= set(keys) & set(self.manager.resident(tier))

    @rule(tier=tier_names, keys=st.sets(st.sampled_from(PROMPTS[1]), max_size=3))
    def remove(self, tier: LowerTier, keys: set[int]) -> None:
        self.manager.remove(tier, keys)
        self.abandon(tier, keys)
        assert not keys & set(self.manager.resident(tier))

    @rule(keys=prompts, until=st.integers(0, 8))
    def pin(self, keys: list[int], until: int) -> None:
        before = self.manager.counters["skipped_pin"]
        self.manager.pin(keys, self.now_us + until)
        for key in keys[: len(keys) - (self.manager.counters["skipped_pin"] - before)]:
            self.pins[key] = max(self.now_us + until, self.pins.get(key, 0))
        room = max((given.blocks // 2 for name, given in self.limits.items() if given and name != "store"), default=0)
        assert len(self.pins) <= room

    @rule(passed=st.integers(0, 8))
    def unpin(self, passed: int) -> None:
        self.now_us += passed
        self.manager.unpin(self.now_us)
        self.pins = {key: until for key, until in self.pins.items() if until > self.now_us}

    @rule(tier=tier_names, paused=st.booleans())
    def pause(self, tier: LowerTier, paused: bool) -> None:
        self.manager.set_paused(tier, paused=paused)

    @precondition(lambda self: len(self.numbers) >= BUSY)
    @rule()
    def clear(self) -> None:
        self.manager.clear()
        for write in self.writes.values():
            self.abandon(write.tier, set(write.keys))
        self.pins.clear()
        assert not any(self.manager.resident(tier) for tier in TIERS)

    @rule(seed=picks)
    def burst(self, seed: int) -> None:
        """Make many ordinary calls, because Hypothesis alone rarely fills a tier while transfers are in flight."""
        random = Random(seed)
        for _ in range(200):
            keys = random.choice(PROMPTS)[: random.randint(1, 9)]
            begin, pick, failures = random.randint(0, 3), random.getrandbits(30), random.choice((0, 0, 5, 1 << 9))
            match random.choice("oooooooowwwwwwllllldddpprraauuc"):
                case "o":
                    self.offer(keys)
                case "w":
                    self.written(pick, failures)
                case "l":
                    self.load(keys, begin, shift=False)
                case "d":
                    self.loaded(pick, failures)
                case "p":
                    self.prefetch(keys, begin)
                case "r":
                    self.remove(random.choice(TIERS), set(keys[:2]))
                case "a":
                    self.add(random.choice(TIERS), keys)
                case "u":
                    self.unpin(pick % 8) if pick & 1 else self.pin(keys[:4], pick % 16)
                case _:
                    self.interfere(random.choice(TIERS), pick % 16)
            self.consistent()

    def interfere(self, tier: LowerTier, pick: int) -> None:
        if pick == 0:
            self.clear()
        elif pick < 3:
            self.tick()
        else:
            self.pause(tier, paused=pick < 8)

    @rule()
    def tick(self) -> None:
        self.manager.tick()

    @invariant()
    def consistent(self) -> None:
        for change in self.manager.changes():
            assert bool(change.stored) != bool(change.removed)
            assert not self.replayed[change.tier] & set(change.stored)
            assert self.replayed[change.tier] >= set(change.removed)
            self.replayed[change.tier] |= set(change.stored)
            self.replayed[change.tier] -= set(change.removed)
        for tier in TIERS:
            resident = self.manager.resident(tier)
            assert len(resident) == len(set(resident))
            assert set(resident) == self.replayed[tier]
            given = self.limits[tier]
            if given is None:
                assert not resident
                continue
            assert set(resident) <= self.present[tier], "readable, but its bytes are not there"
            self.present[tier] = set(resident) | self.in_use(tier)  # a caller reuses the memory of all others
            writing = {key for one in self.writes.values() if one.tier == tier for key in one.keys}
            assert not set(resident) & writing
            assert len(set(resident) | writing | self.in_use(tier)) == self.manager.used(tier) <= given.blocks
            pinned = set(self.pinned(tier)) & set(resident)
            assert len(pinned) <= self.manager.pinned(tier) <= given.blocks // 2

    def teardown(self) -> None:
        """End all transfers: nothing remains in use."""
        if not hasattr(self, "manager"):
            return
        while self.writes or self.loads:
            self.finish()
            self.consistent()
        for tier in TIERS:
            assert self.manager.used(tier) == len(self.manager.resident(tier))


TestMachine = Machine.TestCase
TestMachine.settings = settings(deadline=None, stateful_step_count=60)
