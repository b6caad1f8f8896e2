"""Offload and onboard the KV blocks of one vLLM rank. Imports neither vLLM nor torch.

Theory of operation. vLLM's scheduler calls `match` for a request that waits, then `allocated` with the blocks to load
into. The load runs in threads while other requests are computed; `received` reports its end. A full block is offered to
the tiers after the step that computes it. Until its bytes are copied, the block has one more reference in vLLM's block
pool, so vLLM neither overwrites nor evicts it. No step waits for a copy.

Everything here runs on the thread of vLLM's engine core, except the copies.
"""

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, get_origin

import msgspec

from forebay import runtime
from forebay.core.block_hashes import block_hashes, extend_chain, hash_seed, mm_hash
from forebay.engine_model.steps import CacheChange, StoreChange
from forebay.events.base import pack_u32
from forebay.events.kv import LowerTier
from forebay.events.metrics import TierCosts
from forebay.events.progress import OnboardedTokens
from forebay.kv_tiers.manager import TierRun
from forebay.workers.engines.vllm.tiers.configuration import RequestHints
from forebay.workers.kv_tiers.identity import BlockName, KeyChain, KvIdentity, media_by_block
from forebay.workers.kv_tiers.metrics import TierCounters
from forebay.workers.kv_tiers.offload_manager import OffloadManager
from forebay.workers.kv_tiers.transfers import LoadResult

if TYPE_CHECKING:
    from forebay.workers.engines.vllm.tiers.device_memory import DeviceMemory

logger = logging.getLogger(__name__)

PREFETCHES_MAX = 4  # waiting requests whose blocks are copied to host memory ahead of their load
IDLE_WAIT_S = 0.002  # an engine that only waits for copies looks for their end this often
STEPS_MAX = 16  # vLLM schedules a few steps ahead; a longer queue would mean that the end of steps is not reported
REPORT_S = 1.0  # interval of reports in which no load has ended
WARM_UPS = 1  # the first prompt of an engine takes much longer than others
MIXED_SHARE = 8  # the duration of a step is that of its prefill if other tokens are fewer than an eighth


class TierReport(msgspec.Struct, frozen=True):
    """Report of the KV tiers of one rank: tokens loaded since the previous report, by request id on the log."""

    onboarded: dict[str, tuple[OnboardedTokens, ...]]
    costs: TierCosts
    counters: TierCounters

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, encoded: bytes) -> "TierReport":
        return msgspec.msgpack.decode(encoded, type=cls, dec_hook=_counter)


def _counter(kind: Any, value: Any) -> Any:
    assert get_origin(kind) is Counter
    return Counter(value)


class PromptNames:
    """Names of the full blocks of one request, extended while the request generates tokens.

    Block keys depend on the digest of the LoRA adapter, which is empty without one.
    """

    def __init__(
        self,
        identity: KvIdentity,
        *,
        salt: str = "",
        lora_name: str = "",
        adapter: str = "",
        features: Sequence[Any] = (),
    ) -> None:
        self.names: list[BlockName] = []
        self._block_size = identity.block_size
        self._chain = KeyChain(identity, salt=salt, adapter=adapter)
        self._seed = hash_seed(lora_name, salt)
        objects = [(one.identifier, one.mm_position.offset, one.mm_position.length) for one in features]
        self._media: Mapping[int, Sequence[str]] = media_by_block(objects, self._block_size)
        self._mm_hashes: dict[int, list[int]] = {}
        for identifier, first, tokens in objects:
            for block in range(first // self._block_size, (first + tokens - 1) // self._block_size + 1):
                self._mm_hashes.setdefault(block, []).append(mm_hash(identifier))

    def extend(self, token_ids: Sequence[int]) -> list[BlockName]:
        """Return the names of all full blocks of `token_ids`, which begin with those of earlier calls."""
        first, full = len(self.names), len(token_ids) // self._block_size
        if full > first:
            packed = pack_u32(token_ids[first * self._block_size : full * self._block_size])
            parent = self.names[-1] if self.names else None
            media = {block - first: found for block, found in self._media.items() if block >= first}
            hashes = {block - first: found for block, found in self._mm_hashes.items() if block >= first}
            keys = self._chain.extend(parent and parent.key, packed, media)
            blocks = block_hashes(packed, self._block_size, self._seed, hashes)
            chain = extend_chain(None if parent is None else parent.sequence_hash, blocks)
            self.names += map(BlockName, keys, chain)
        return self.names


@dataclass(eq=False)
class _Request:
    request: Any
    names: PromptNames
    hints: RequestHints
    offered: int = 0  # leading blocks that were offered to the tiers
    first: int = 0  # block at which the load begins
    runs: list[TierRun] = field(default_factory=list)
    waiting: bool = True  # has no blocks yet
    prefetched: bool = False
    barred: bool = False  # a load failed; the request is computed
    loaded: dict[LowerTier, int] = field(default_factory=dict)  # blocks
    observed: bool = False  # counted for the hit rates


@dataclass(eq=False)
class _Load:
    request: _Request
    request_id: str
    into: list[int]  # blocks of the cache
    payloads: list[memoryview]
    result: LoadResult | None = None
    placed: int = 0  # leading blocks whose bytes are in the cache


@dataclass
class _Offer:
    names: list[BlockName]
    block_ids: list[int]


@dataclass
class _Step:
    began_s: float
    offers: list[_Offer]
    prefill: tuple[int, int] | None  # tokens, tokens before them


class VllmRank:
    """Tiers of one rank of vLLM. It closes `copier`, the executor of copies into the KV cache.

    `skipped` counts blocks that were not offered, because copies in flight already reference half of the KV cache.
    """

    def __init__(
        self,
        tiers: OffloadManager,
        memory: "DeviceMemory",
        identity: KvIdentity,
        wake: threading.Event,
        copier: Executor,
    ) -> None:
        self.tiers = tiers
        self.skipped = 0
        self._memory = memory
        self._identity = identity
        self._block_size = identity.block_size
        self._wake = wake
        self.pool: Any = None  # vLLM's `BlockPool`, set by the connector
        self._onboarded: dict[str, tuple[OnboardedTokens, ...]] = {}
        self._reported_s = 0.0
        self._prefills = 0
        self._was_busy = True
        self._requests: dict[str, _Request] = {}
        self._steps: deque[_Step] = deque(maxlen=STEPS_MAX)
        self._loading: Counter[bytes] = Counter()  # blocks that are being loaded, by key
        self._loads: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[int] = set()
        self._referenced = 0
        self._announces = True  # what disk and shared store have from earlier
        self._copier = copier
        self._placed: deque[_Load] = deque()  # loads whose blocks are in the cache, added by the copier

    # Scheduler

    def add(self, request: Any, hints: RequestHints, adapter: str) -> None:
        names = PromptNames(
            self._identity,
            salt=request.cache_salt or "",
            lora_name=request.lora_request.lora_name if request.lora_request else "",
            adapter=adapter,
            features=request.mm_features,
        )
        self._requests[request.request_id] = _Request(request, names, hints)

    def match(self, request_id: str, computed_tokens: int) -> int | None:
        """Return the number of tokens to load for a waiting request after the computed ones, which are full blocks.

        The result is None if another request is loading the next block, so that it can be shared soon.
        """
        one = self._requests.get(request_id)
        if one is None or one.barred:
            return 0
        names = self._prompt(one)
        one.first = computed_tokens // self._block_size
        if one.first >= len(names):
            return 0
        if names[one.first].key in self._loading:
            return None
        one.runs = list(self.tiers.match(names, one.first, computed_tokens, one.hints.store_blocks))
        return sum(run.blocks for run in one.runs) * self._block_size

    def has_all(self, request_id: str, computed_tokens: int, tokens: int) -> bool:
        """Return whether loading `tokens` after the computed ones leaves less than a block of the prompt."""
        one = self._requests[request_id]
        return computed_tokens + tokens >= len(self._prompt(one)) * self._block_size

    def allocated(self, request_id: str, block_ids: Sequence[int], tokens: int) -> None:
        """Begin the load that `match` has planned, or nothing if `tokens` is 0."""
        one = self._requests.get(request_id)
        if one is None:
            return
        one.waiting = False
        if not tokens:
            return
        count = tokens // self._block_size
        names = one.names.names
        into = list(block_ids[one.first : one.first + count])
        self._loading.update(name.key for name in names[one.first : one.first + count])
        self._loads.add(request_id)
        load = _Load(one, request_id, into, [memoryview(bytearray(self._identity.block_bytes)) for _ in into])
        self.tiers.load(names, one.first, one.runs, load.payloads, partial(self._on_loaded, load))

    def schedule(self, scheduled: Mapping[str, int], block_ids: Callable[[str], Sequence[int]]) -> None:
        """Note the blocks that the next step completes, and prefetch for requests that still wait.

        `scheduled` has the number of tokens that the step computes, by vLLM's id of the request.
        """
        offers: list[_Offer] = []
        prefill: list[tuple[int, int]] = []
        for request_id, tokens in scheduled.items():
            one = self._requests.get(request_id)
            if one is None:
                continue
            one.waiting = False
            if not one.observed:
                one.observed = True
                self.tiers.observe_request(len(self._prompt(one)), one.first, one.loaded)
                if one.hints.kv_pin_s:
                    self.tiers.pin(one.names.extend(one.request.all_token_ids), one.hints.kv_pin_s)
            before = one.request.num_computed_tokens
            if tokens > 1:
                prefill.append((tokens, before))
            # Without tokens that a draft model has proposed and that may be rejected.
            full = min(before + tokens, one.request.num_tokens) // self._block_size
            if full > one.offered:
                names = one.names.extend(one.request.all_token_ids[: full * self._block_size])
                ids = list(block_ids(request_id)[one.offered : full])
                if (offer := self._reference(names[one.offered : full], ids)) is not None:
                    offers.append(offer)
                one.offered = full
        others = sum(scheduled.values()) - sum(tokens for tokens, _ in prefill)
        alone = len(prefill) == 1 and others * MIXED_SHARE < prefill[0][0]
        self._steps.append(_Step(runtime.monotonic_s(), offers, prefill[0] if alone else None))
        self._prefetch()

    def _prompt(self, one: _Request) -> list[BlockName]:
        """Return the names of the blocks that may be loaded: at least one token must be computed."""
        loadable = (one.request.num_tokens - 1) // self._block_size
        if len(one.names.names) < loadable:
            one.names.extend(one.request.all_token_ids)
        return one.names.names[:loadable]

    def _reference(self, names: list[BlockName], ids: list[int]) -> _Offer | None:
        if self._referenced > len(self.pool.blocks) // 2:
            self.skipped += len(ids)
            return None
        self.pool.touch([self.pool.blocks[block] for block in ids])
        self._referenced += len(ids)
        return _Offer(names, ids)

    def _prefetch(self) -> None:
        ahead = islice((one for one in self._requests.values() if one.waiting), PREFETCHES_MAX)
        for one in ahead:
            if not one.prefetched:
                one.prefetched = True
                self.tiers.prefetch(self._prompt(one), one.first, one.hints.store_blocks)

    # Worker

    def step_launched(self) -> None:
        """Offer the blocks of the step that the worker has launched. Called once per step, also for empty steps."""
        if not self._steps:
            return
        for offer in self._steps[-1].offers:
            self.tiers.offer(offer.names, partial(self._gather, offer.block_ids), partial(self._on_offered, offer))
        self._steps[-1].offers = []

    def _gather(self, block_ids: list[int], at: int) -> memoryview:
        return self._memory.gather(block_ids[at])

    def step_ended(self) -> None:
        step = self._steps.popleft() if self._steps else None
        if step is not None and step.prefill is not None:
            self._prefills += 1
            if self._prefills <= WARM_UPS:
                return
            tokens, cached = step.prefill
            self.tiers.costs.observe_prefill(tokens, cached, (runtime.monotonic_s() - step.began_s) * 1e6)

    def poll(self, *, idle: bool) -> None:
        """Apply the end of copies. If the engine has nothing to compute, wait a little for the end of one."""
        if idle and self.busy:
            self._wake.wait(IDLE_WAIT_S)
        self._wake.clear()
        self.tiers.poll()
        while self._placed:
            self._end_load(self._placed.popleft())

    def take_received(self) -> set[str]:
        received, self._received = self._received, set()
        return received

    def take_failed(self) -> set[int]:
        failed, self._failed = self._failed, set()
        return failed

    def report(self) -> TierReport | None:
        """Return a report; None if no load has ended, the last report is recent, and the tiers are busy."""
        was_busy, self._was_busy = self._was_busy, self.busy
        now_s = runtime.monotonic_s()
        came_to_rest = was_busy and not self._was_busy
        if not self._onboarded and not came_to_rest and now_s - self._reported_s < REPORT_S:
            return None
        self._reported_s = now_s
        onboarded, self._onboarded = self._onboarded, {}
        counters = self.tiers.counters()
        counters.skipped["referenced"] = self.skipped
        return TierReport(onboarded, self.tiers.costs.measured(self._block_size), counters)

    def close(self) -> None:
        self.tiers.close()
        self._copier.shutdown()

    def take_changes(self) -> tuple[list[CacheChange], list[StoreChange]]:
        changes, store_changes = self.tiers.changes()
        if self._announces:
            self._announces = False
            content, stored = self.tiers.content()
            changes, store_changes = changes + content, store_changes + stored
        return changes, store_changes

    def announce(self) -> None:
        self._announces = True

    def finish(self, request_id: str) -> None:
        self._requests.pop(request_id, None)

    @property
    def busy(self) -> bool:
        """Whether copies run whose end should be applied soon."""
        return bool(self._loads or self._referenced or self._announces or self.tiers.busy)

    @property
    def frees_blocks(self) -> bool:
        """Whether the end of copies will free blocks that no request uses."""
        return self._referenced > 0

    def _on_offered(self, offer: _Offer) -> None:
        self._referenced -= len(offer.block_ids)
        # In reverse order, so that vLLM evicts the end of a prompt first.
        self.pool.free_blocks([self.pool.blocks[block] for block in reversed(offer.block_ids)])

    def _on_loaded(self, load: _Load, result: LoadResult) -> None:
        load.result = result
        # In a thread, because other requests may be computed at the same time.
        self._copier.submit(self._place, load)

    def _place(self, load: _Load) -> None:
        assert load.result is not None
        try:
            for block, payload in zip(load.into[: load.result.blocks], load.payloads, strict=False):
                self._memory.scatter(block, payload)
                load.placed += 1
        except Exception:
            logger.exception("cannot copy loaded KV into the cache of vLLM, so it is computed")
        self._placed.append(load)
        self._wake.set()

    def _end_load(self, load: _Load) -> None:
        one, count = load.request, len(load.into)
        self._loading.subtract(name.key for name in one.names.names[one.first : one.first + count])
        self._loading += Counter()  # drops zeros
        self._loads.discard(load.request_id)
        self._received.add(load.request_id)
        if load.placed < count:
            one.barred = True
            self._failed.update(load.into[load.placed :])
            self._correct_statistics(one, load.placed)
        assert load.result is not None
        one.loaded = load.result.by_tier
        self._onboarded[one.hints.request_id] = load.result.onboarded(self._block_size)

    def _correct_statistics(self, one: _Request, placed: int) -> None:
        """Correct the number of cached tokens, because vLLM has counted all blocks of a load before it ended."""
        stats = one.request.prefill_stats
        if stats is not None and not one.request.num_preemptions:
            stats.set(
                num_prompt_tokens=one.request.num_prompt_tokens,
                num_local_cached_tokens=one.first * self._block_size,
                num_external_cached_tokens=placed * self._block_size,
            )
