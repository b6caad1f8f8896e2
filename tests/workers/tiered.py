"""Mock engines with KV tiers, without a worker: they get items, and everything that they publish is kept."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.engine_model.model import EngineConfig, Stored
from forebay.engine_model.timing import LinearTiming
from forebay.events.base import pack_u32, unpack_u32
from forebay.events.fleet import WorkerSpec
from forebay.events.requests import Sampling
from forebay.events.work import WorkItem
from forebay.workers.engine import Cleared, EngineBatch
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.engines.mock.tiers import MockTiers
from forebay.workers.kv_tiers import offload_manager
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.identity import BlockName
from forebay.workers.kv_tiers.settings import TierSettings
from tests.workers.conftest import VOCABULARY, until

BLOCK_SIZE = 4
BLOCK_BYTES = 32
PROMPT = list(range(1, 19))  # four full blocks and half of one
# A block takes 8 ms to compute at this speed, so that loading it is always faster.
TIMING = LinearTiming(step=100.0, prefill_token=20_000.0, decode_step=1_000.0)
SPEEDUP = 10.0
SPEC = WorkerSpec(
    worker_id="w1", model="model", block_size=4, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=256
)
CONFIG = EngineConfig(
    vocabulary=VOCABULARY, timing=TIMING, block_size=4, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=256
)
HOST = TierSettings(host_bytes=64 * BLOCK_BYTES)


Flips = list[tuple[int, int]]


def disk_of(folder: Path, **changes: Any) -> TierSettings:
    """Return settings with a disk only."""
    return TierSettings(**{"disk": folder, "disk_bytes": 1 << 20, "io": "plain", **changes})


def item_of(name: str, prompt: list[int] = PROMPT, max_tokens: int = 6, **changes: Any) -> WorkItem:
    packed = pack_u32(prompt)
    seed = hash_seed(changes.get("lora_name", ""), changes.get("cache_namespace", ""))
    media = mm_hashes(changes.get("media", ()), BLOCK_SIZE)
    item = WorkItem(
        request_id=name,
        attempt=1,
        owner_epoch=1,
        worker_epoch=1,
        rank=0,
        token_ids=packed,
        sequence_hashes=sequence_hashes(packed, BLOCK_SIZE, seed, media),
        reply_slot=0,
        sampling=Sampling(max_tokens=max_tokens, temperature=0.0),
    )
    return msgspec.structs.replace(item, **changes)


def hashes_of(prompt: list[int]) -> list[int]:
    """Return the sequence hashes of the full blocks of a prompt."""
    packed = sequence_hashes(pack_u32(prompt), BLOCK_SIZE)
    return [int.from_bytes(packed[at : at + 8], "little") for at in range(0, len(packed), 8)]


class FlippingStore:
    """Store that flips bytes after it has verified their checksums, as a broken transfer might."""

    def __init__(self, store: BlockStore, flips: Flips) -> None:
        self._store = store
        self._flips = flips

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def read(self, names: Sequence[BlockName], into: Sequence[memoryview], deadline_s: float) -> list[str]:
        reasons = self._store.read(names, into, deadline_s)
        for block, offset in self._flips:
            into[block][offset] ^= 1
        return reasons


def flipped_bytes(monkeypatch: pytest.MonkeyPatch) -> Flips:
    """Return the bytes that every store flips in each read: number of the block, and offset in it. None at first."""
    found: Flips = []
    open_store = offload_manager.open_store
    monkeypatch.setattr(offload_manager, "open_store", lambda *args: FlippingStore(open_store(*args), found))
    return found


class Tiered:
    """A running mock engine with tiers."""

    def __init__(self, engine: MockEngine, spec: WorkerSpec) -> None:
        self.engine = engine
        self.spec = spec
        self.batches: list[EngineBatch] = []
        self.running: asyncio.Task[None] | None = None

    async def until(self, condition: Callable[[], object]) -> None:
        """Wait until the condition holds. Raises the error of the engine if it has failed."""

        def holds() -> object:
            assert self.running is not None
            if self.running.done():
                self.running.result()
            return condition()

        await until(holds)

    def tiers(self, rank: int = 0) -> MockTiers:
        found = self.engine.ranks[rank].tiers
        assert found is not None
        return found

    async def ask(self, item: WorkItem) -> list[int]:
        """Run an item and return its output tokens."""
        self.engine.submit(item)
        await self.ended(item.request_id)
        return self.tokens(item.request_id)

    async def ended(self, *names: str) -> None:
        await self.until(
            lambda: (
                {*names}
                <= {end.request_id for one in self.batches for end in one.finished}
                | {end.request_id for one in self.batches for end in one.failed}
            )
        )

    def tokens(self, name: str) -> list[int]:
        chunks = [chunk for one in self.batches for chunk in one.emitted if chunk.request_id == name]
        return [token for chunk in chunks for token in unpack_u32(chunk.token_ids)]

    def onboarded(self, name: str) -> dict[str, int]:
        """Return the tokens that a request has loaded, by tier."""
        (first,) = (one for batch in self.batches for one in batch.first_tokens if one.request_id == name)
        return {part.tier: part.tokens for part in first.onboarded}

    def cached(self, name: str) -> int:
        """Return the prompt tokens of a request that were not computed."""
        (end,) = (end for batch in self.batches for end in batch.finished if end.request_id == name)
        return end.cached_tokens

    def content(self, tier: str, rank: int = 0) -> set[int]:
        """Return the blocks of a tier of a rank, from the changes that the engine has published."""
        found: set[int] = set()
        for batch in self.batches:
            for change in batch.cache_changes if batch.rank == rank else ():
                if isinstance(change, Cleared):
                    found.clear()
                elif change.tier == tier:
                    (found.update if isinstance(change, Stored) else found.difference_update)(change.hashes)
        return found

    def held(self, rank: int = 0) -> set[int]:
        """Return the blocks in host memory and on disk that the engine would announce."""
        held = self.engine.held_in_tiers(rank)
        return {block for change in held if isinstance(change, Stored) for block in change.hashes}

    def store(self) -> set[int]:
        """Return the blocks of the shared store, from the changes that the engine has published."""
        found: set[int] = set()
        for batch in self.batches:
            for change in batch.store_changes:
                found = (found | set(change.stored)) - set(change.removed) - set(change.stale)
        return found

    async def has(self, tier: str, blocks: Sequence[int], rank: int = 0) -> None:
        await self.until(lambda: {*blocks} <= (self.store() if tier == "store" else self.content(tier, rank)))

    async def idle(self) -> None:
        """Wait until the engine has no request, and all blocks that were offered to tiers are written."""
        ranks = self.engine.ranks.values()
        await self.until(
            lambda: not self.engine.requests() and not any(one.tiers and one.tiers.manager.busy for one in ranks)
        )

    def forget(self) -> None:
        """Empty device memory, as other requests would do in the long run."""
        for rank in self.engine.ranks.values():
            rank.clear(keep_tiers=True)


@asynccontextmanager
async def tiered(
    tiers: TierSettings | None, spec: WorkerSpec = SPEC, config: EngineConfig = CONFIG, **changes: Any
) -> AsyncIterator[Tiered]:
    kv = KvSettings(bytes_per_token=BLOCK_BYTES // BLOCK_SIZE)
    engine = MockEngine(config, **{"speedup": SPEEDUP, "kv": kv, "tiers": tiers, **changes})
    try:
        one = Tiered(engine, await engine.start(spec))
        running = one.running = asyncio.create_task(engine.run(one.batches.append))
        try:
            yield one
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    finally:
        await engine.stop()


async def expected(item: WorkItem) -> list[int]:
    """Return the output of an engine without tiers."""
    async with tiered(None) as one:
        return await one.ask(item)
