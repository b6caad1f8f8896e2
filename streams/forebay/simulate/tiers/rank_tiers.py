"""Host memory, disk and shared store of one simulated rank: which blocks are loaded and written, and when.

Theory of operation. `TierManager` and `CostModel` decide, as on a live worker; this module plays their transfers in
virtual time. A prompt is offered to the tiers once it was computed, and an output block once it is full. Each tier gets
one write at a time, and its loads go on beside it. When a request arrives, the rank looks up which of its blocks the
shared store has. If another rank has removed them since, the load of these blocks fails, and they are computed.
"""

from array import array
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from forebay.engine_model.model import EngineConfig, EngineModel, Load
from forebay.engine_model.timing import StepWork
from forebay.events.metrics import TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.kv_tiers.costs import CostModel
from forebay.kv_tiers.decisions import leading_runs
from forebay.kv_tiers.manager import Loading, LowerTier, TierManager, TierRun, TierSet, Write
from forebay.simulate.tiers.link import Scheduler, SharedLink

TICK_US = 600_000_000  # the offload filter forgets as fast as that of KVBM
COSTS_INTERVAL_US = 10_000_000  # as on live workers
LOWER_TIERS: tuple[LowerTier, ...] = ("host", "disk", "store")


class SharedStore:
    """Blocks of a shared store. If it is full, the blocks that were not used for the longest time leave first."""

    def __init__(self, blocks: int) -> None:
        self._limit = blocks
        self._blocks: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: int) -> bool:
        return key in self._blocks

    def use(self, keys: Iterable[int]) -> None:
        for key in keys:
            if key in self._blocks:
                self._blocks.move_to_end(key)

    def add(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Add blocks, in prompt order. Return those that are new, and those that had to leave."""
        new = {key: None for key in keys if key not in self._blocks}
        for key in reversed(keys):  # the last block of a prompt leaves first
            self._blocks[key] = None
            self._blocks.move_to_end(key)
        removed = [self._blocks.popitem(last=False)[0] for _ in range(len(self._blocks) - self._limit)]
        gone = set(removed)
        return [key for key in new if key not in gone], [key for key in removed if key not in new]


class BlockChange(NamedTuple):
    """Blocks that a tier has stored or removed."""

    tier: LowerTier
    stored: Sequence[int] = ()
    removed: Sequence[int] = ()
    stale: bool = False  # whether the blocks were removed because they were missing when they were to be loaded


class TierPlan(NamedTuple):
    """Tiers of a rank before it exists."""

    limits: TierSet
    links: Mapping[LowerTier, SharedLink]
    store: SharedStore | None  # shared store; None for none
    block_bytes: int  # bytes per block
    reports_costs: bool  # whether the router uses measured costs


class SimulatedTiers:
    """Tiers of one rank. The step times of its engine stand for measurements of prefills.

    `on_changed` is called when a load or a write has ended, with whether it was the load of a request.
    """

    def __init__(
        self, plan: TierPlan, config: EngineConfig, scheduler: Scheduler, on_changed: Callable[[bool], object]
    ) -> None:
        self.engine = EngineModel(config, self._match, self._name)
        self.loaded_blocks = Counter[str]()
        self.written_blocks = Counter[str]()
        self._plan = plan
        self._config = config
        self._scheduler = scheduler
        self._on_changed = on_changed
        self._manager: TierManager[int] = TierManager(plan.limits)
        self._costs = CostModel()
        self._prompts: dict[str, array[int]] = {}  # of requests whose prompt was not computed yet
        self._matched: dict[str, tuple[array[int], list[TierRun]]] = {}
        self._loads: dict[str, _RequestLoad] = {}
        self._onboarded: dict[str, tuple[OnboardedTokens, ...]] = {}
        self._outputs: list[int] = []  # output blocks that became full in the current step
        self._queued: dict[LowerTier, deque[Write[int]]] = {tier: deque() for tier in LOWER_TIERS}
        self._store_changes: list[BlockChange] = []
        self._next_tick_us = scheduler.now_us + TICK_US
        self._costs_at_us = 0  # time from which the costs may be reported
        self._closed = False

    @property
    def counters(self) -> Counter[str]:
        """Blocks that were skipped, evicted or stale, as in `TierManager.counters`."""
        return self._manager.counters

    def stored_on_disk(self) -> list[int]:
        """Return the blocks on disk, least recently used first. They survive the process of the worker."""
        return list(self._manager.resident("disk"))

    def restore(self, tier: LowerTier, keys: Sequence[int]) -> None:
        """Add blocks that a tier has from the start, least recently used first."""
        self._manager.add(tier, keys)

    def submitted(self, request_id: str, hashes: "array[int]") -> None:
        """Prepare a request that was sent to the engine: take the hint of the router, and prefetch while it waits."""
        self._prompts[request_id] = hashes
        store = self._plan.store
        if store is not None:
            self._manager.add("store", [key for key in hashes if key in store])
        load = self.engine.load()
        if load.running + load.waiting > 1:
            cached = self.engine.pool.find(hashes, len(hashes)).blocks
            if blocks := self._worthwhile(cached, self._manager.match(hashes, cached)):
                self._begin_writes(self._manager.prefetch(hashes[: cached + blocks], cached))

    def cancelled(self, request_id: str) -> None:
        """Forget a request. A load in flight goes on without effect."""
        for kept in (self._prompts, self._matched, self._loads, self._onboarded):
            kept.pop(request_id, None)

    def begin_loads(self) -> None:
        """Begin the loads that the engine has requested. Call this after every step of the engine."""
        for load in self.engine.loads():
            hashes, runs = self._matched.pop(load.request_id)
            loading = self._manager.load(hashes, load.first_block, leading_runs(runs, load.blocks))
            assert loading, "nothing has changed since the blocks were found"
            request = self._loads[load.request_id] = _RequestLoad(load, loading, self._scheduler.now_us)
            for one in loading:
                self._plan.links[one.tier].begin(
                    len(one.keys) * self._plan.block_bytes,
                    partial(self._run_loaded, request, one, self._missing(one)),
                    is_load=True,
                    owner=self,
                )

    def computed(self, request_id: str, cached_tokens: int, *, is_fetched: bool) -> tuple[OnboardedTokens, ...]:
        """Offer a computed prompt to the tiers. Return the part of `cached_tokens` that was loaded.

        `cached_tokens` were not computed. If `is_fetched`, another rank computed the prompt.
        """
        hashes = self._prompts.pop(request_id, None)
        if hashes is None:
            return ()
        self._matched.pop(request_id, None)
        if not is_fetched:
            self._observe_prefill(len(hashes) * self._config.block_size - cached_tokens, cached_tokens)
        self._offer(hashes)
        onboarded = self._onboarded.pop(request_id, ())
        return _at_most(onboarded, cached_tokens)

    def stepped(self) -> None:
        """Offer the output blocks that became full in a step."""
        outputs, self._outputs = self._outputs, []
        if outputs:
            self._offer(outputs)

    def changes(self) -> list[BlockChange]:
        """Return the changes of all tiers since the last call, in order per tier."""
        store_changes, self._store_changes = self._store_changes, []
        own = [BlockChange(*change) for change in self._manager.changes() if change.tier != "store"]
        return own + store_changes

    def due_costs(self) -> TierCosts | None:
        """Return the measured costs if the router uses them and has not got them for `COSTS_INTERVAL_US`."""
        now_us = self._scheduler.now_us
        if not self._plan.reports_costs or now_us < self._costs_at_us:
            return None
        self._costs_at_us = now_us + COSTS_INTERVAL_US
        return self._costs.measured(self._config.block_size)

    def close(self) -> None:
        """Stop all transfers, because the worker has died."""
        self._closed = True
        for link in self._plan.links.values():
            link.drop(self)

    def _match(self, request_id: str, hashes: "array[int]", first: int) -> int:
        runs = self._manager.match(hashes, first)
        count = self._worthwhile(first, runs)
        self._matched[request_id] = hashes, leading_runs(runs, count)
        return count

    def _worthwhile(self, first: int, runs: Sequence[TierRun]) -> int:
        block_size = self._config.block_size
        return self._costs.worthwhile(first * block_size, runs, block_size) if runs else 0

    def _name(self, parent: int, block: int, token_ids: bytes) -> None:
        self._outputs.append(block)

    def _missing(self, loading: Loading[int]) -> list[int]:
        """Return the blocks of a load that another rank has removed from the shared store."""
        store = self._plan.store
        if loading.tier != "store" or store is None:
            return []
        store.use(loading.keys)
        return [key for key in loading.keys if key not in store]

    def _run_loaded(self, request: "_RequestLoad", loading: Loading[int], failed: list[int]) -> None:
        """End the load of the blocks in one tier. The last of them ends the load of the request."""
        if self._closed:
            return
        self._manager.loaded(loading.number, failed)
        took_us = self._scheduler.now_us - request.began_us
        if failed:
            self._store_changes.append(BlockChange("store", removed=failed, stale=True))
        else:
            self._costs.observe_load(loading.tier, len(loading.keys), max(1, took_us))
            self.loaded_blocks[loading.tier] += len(loading.keys)
        is_last = request.ended(loading, failed, took_us)
        if is_last:
            request_id = request.load.request_id
            if self._loads.get(request_id) is request:
                del self._loads[request_id]
                blocks, onboarded = request.result(self._config.block_size)
                # A request that was preempted may load twice. Its cached tokens are those of its first admission.
                if self.engine.loaded(request_id, blocks) and request_id in self._prompts:
                    self._onboarded.setdefault(request_id, onboarded)
        self._on_changed(is_last)

    def _observe_prefill(self, tokens: int, cached_tokens: int) -> None:
        """Observe the time that the steps of a prompt take without other sequences."""
        us, done = 0, cached_tokens
        config = self._config
        while tokens > 0:
            chunk = min(tokens, config.max_num_batched_tokens)
            attended = chunk * done + chunk * (chunk + 1) // 2
            us += config.timing.step_us(StepWork(chunk, attended, 0, 0, config.kv_blocks_total * config.block_size))
            done, tokens = done + chunk, tokens - chunk
        self._costs.observe_prefill(done - cached_tokens, cached_tokens, us)

    def _offer(self, keys: Sequence[int]) -> None:
        while self._scheduler.now_us >= self._next_tick_us:
            self._manager.tick()
            self._next_tick_us += TICK_US
        self._begin_writes(self._manager.offer(keys))

    def _begin_writes(self, writes: Iterable[Write[int]]) -> None:
        for write in writes:
            link = write.tier if write.source == "device" or write.tier != "host" else write.source
            queue = self._queued[link]
            queue.append(write)
            if len(queue) == 1:
                self._begin_write(link)

    def _begin_write(self, link: LowerTier) -> None:
        write = self._queued[link][0]
        store = self._plan.store
        blocks, failed = len(write.keys), list[int]()
        if store is not None and write.tier == "store":
            blocks = sum(key not in store for key in write.keys)  # another rank may have written some
        elif store is not None and write.source == "store":
            failed = [key for key in write.keys if key not in store]
            blocks -= len(failed)
        size = blocks * self._plan.block_bytes
        self._plan.links[link].begin(size, partial(self._written, link, write, failed), is_load=False, owner=self)

    def _written(self, link: LowerTier, write: Write[int], failed: list[int]) -> None:
        if self._closed:
            return
        store = self._plan.store
        if write.tier == "store" and store is not None:
            stored, removed = store.add(write.keys)
            self._store_changes.append(BlockChange("store", stored, removed))
            self._manager.remove("store", removed)
        elif failed:
            self._store_changes.append(BlockChange("store", removed=failed, stale=True))
            self._manager.remove("store", failed)
        self.written_blocks[write.tier] += len(write.keys) - len(failed)
        queue = self._queued[link]
        queue.popleft()
        if queue:
            self._begin_write(link)
        self._begin_writes(self._manager.written(write.number, failed))
        self._on_changed(False)


class _RequestLoad:
    """Load of a request, from one or more tiers at the same time."""

    def __init__(self, load: Load, runs: Sequence[Loading[int]], began_us: int) -> None:
        self.load = load
        self.began_us = began_us
        self._runs = runs
        self._results: dict[int, tuple[int, int]] = {}  # by number of the run: leading blocks that arrived, time in us

    def ended(self, run: Loading[int], failed: Sequence[int], took_us: int) -> bool:
        lost = set(failed)
        arrived = next((at for at, key in enumerate(run.keys) if key in lost), len(run.keys))
        self._results[run.number] = arrived, took_us
        return len(self._results) == len(self._runs)

    def result(self, block_size: int) -> tuple[int, tuple[OnboardedTokens, ...]]:
        """Return the number of leading blocks that arrived, and their tokens by tier."""
        tokens: dict[LowerTier, list[int]] = {}
        blocks = 0
        for run in self._runs:
            arrived, took_us = self._results[run.number]
            blocks += arrived
            if arrived:
                of_tier = tokens.setdefault(run.tier, [0, 0])
                of_tier[0] += arrived * block_size
                of_tier[1] = max(of_tier[1], took_us)
            if arrived < len(run.keys):
                break
        return blocks, tuple(OnboardedTokens(tier=tier, tokens=count, us=us) for tier, (count, us) in tokens.items())


def _at_most(onboarded: tuple[OnboardedTokens, ...], tokens: int) -> tuple[OnboardedTokens, ...]:
    """Return the leading part of `onboarded` with at most `tokens` tokens."""
    found: list[OnboardedTokens] = []
    for one in onboarded:
        count = min(one.tokens, tokens)
        if count:
            found.append(OnboardedTokens(tier=one.tier, tokens=count, us=one.us))
        tokens -= count
    return tuple(found)
