"""Mock engines with KV tiers, without a worker: they get items, and everything that they publish is kept."""

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.core.block_hashes import hash_seed, mm_hashes, sequence_hashes
from forebay.engine_model.model import EngineConfig, Stored
from forebay.engine_model.timing import LinearTiming
from forebay.events.base import pack_u32
from forebay.events.fleet import WorkerSpec
from forebay.events.work import WorkItem
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.kv_tiers import offload_manager
from forebay.workers.kv_tiers.block_store import BlockStore
from forebay.workers.kv_tiers.identity import BlockName
from forebay.workers.kv_tiers.settings import TierSettings
from tests.engines.driven import Driven
from tests.workers.conftest import VOCABULARY, until, work_item
from tests.workers.hosted import HOSTED_SPEC

BLOCK_SIZE = 4
BLOCK_BYTES = 32
PROMPT = list(range(1, 19))  # four full blocks and half of one
# A block takes 8 ms to compute at this speed, so that loading it is always faster.
TIMING = LinearTiming(step=100.0, prefill_token=20_000.0, decode_step=1_000.0)
SPEEDUP = 10.0
SPEC = msgspec.structs.replace(HOSTED_SPEC, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=256)
CONFIG = EngineConfig(
    vocabulary=VOCABULARY, timing=TIMING, block_size=4, kv_blocks_total=64, max_num_seqs=8, max_num_batched_tokens=256
)
HOST = TierSettings(host_bytes=64 * BLOCK_BYTES)


Flips = list[tuple[int, int]]


def disk_of(folder: Path, **changes: Any) -> TierSettings:
    """Return settings with a disk only."""
    return TierSettings(**{"disk": folder, "disk_bytes": 1 << 20, **changes})


def item_of(name: str, prompt: list[int] = PROMPT, max_tokens: int = 6, **changes: Any) -> WorkItem:
    seed = hash_seed(changes.get("lora_name", ""), changes.get("cache_namespace", ""))
    hashes = sequence_hashes(pack_u32(prompt), BLOCK_SIZE, seed, mm_hashes(changes.get("media", ()), BLOCK_SIZE))
    return work_item(name, prompt, max_tokens, **{"sequence_hashes": hashes, **changes})


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


class Tiered(Driven):
    """A running mock engine with tiers."""

    engine: MockEngine

    async def until(self, generated: Callable[[], object]) -> None:
        """Wait until the condition holds, also one that is not about batches."""

        def holds() -> object:
            if self.ended is not None:
                raise self.ended
            return generated()

        await until(holds)

    async def run(self, item: WorkItem) -> list[int]:
        """Run an item and return its output tokens."""
        answer = self.submit(item)
        await self.until(lambda: answer.over)
        return answer.tokens

    def onboarded(self, name: str) -> dict[str, int]:
        """Return the tokens that a request has loaded, by tier."""
        return {part.tier: part.tokens for part in self.answers[name].onboarded}

    def cached(self, name: str) -> int:
        """Return the prompt tokens of a request that were not computed."""
        end = self.answers[name].finished
        assert end is not None
        return end.cached_tokens

    def announced(self, rank: int = 0) -> set[int]:
        """Return the blocks in host memory and on disk that the engine would announce."""
        held = self.engine.held_in_tiers(rank)
        return {block for change in held if isinstance(change, Stored) for block in change.hashes}

    async def has(self, tier: Any, blocks: Sequence[int]) -> None:
        await self.until(lambda: {*blocks} <= (self.shared if tier == "store" else self.lower[tier]))

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
    async with Tiered.running(engine, spec) as one:
        yield one


async def expected(item: WorkItem) -> list[int]:
    """Return the output of an engine without tiers."""
    async with tiered(None) as one:
        return await one.run(item)
