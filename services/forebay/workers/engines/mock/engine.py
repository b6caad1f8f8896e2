"""Engine without a GPU: runs `EngineModel` in real time or faster, never ahead of the model's time.

Logprobs and embeddings are derived from hashes; structured outputs, tool calls and reasoning are made up. The roles
prefill and decode have KV of real bytes where NIXL transfers them, and KV tiers have real bytes too.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import assert_never

import msgspec
from prometheus_client.registry import Collector
from xxhash import xxh3_64_intdigest

from forebay import runtime
from forebay.engine_model.model import EngineConfig
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import CacheChange, EngineError, EngineRefused, Publish
from forebay.workers.engines.encode import MediaUnusable, StandInEncoder
from forebay.workers.engines.loras import LoraAdapter, Loras
from forebay.workers.engines.mock.kv import KvSettings, MockKv, ModelledKv
from forebay.workers.engines.mock.outputs import TASKS, OutputScripts
from forebay.workers.engines.mock.rank import MockRank, MockTiers, RequestState
from forebay.workers.engines.settings import LORA_SLOTS
from forebay.workers.kv_tiers.metrics import tier_metrics
from forebay.workers.kv_tiers.settings import TierSettings
from forebay.workers.kv_transfer.api import NIXL, Stats
from forebay.workers.kv_transfer.embeddings import Array


class MockLoras(msgspec.Struct, frozen=True):
    """How many adapters an engine has at a time, and how many seconds it takes to load one."""

    slots: int = LORA_SLOTS
    load_s: float = 0.0


KV_ROLES = frozenset(("prefill", "decode"))


class MockEngine:
    """Engine that imitates a GPU with `EngineModel`. Its ranks are independent of each other.

    Like vLLM with its default scheduling policy, it serves requests in arrival order and ignores priorities. It runs
    `speedup` times as fast as the modelled GPU. Without `scripts`, which write structured output, tool calls and
    reasoning, it generates only words. `kv` is None for roles that transfer no KV, and before the start.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        dp_size: int = 1,
        dp_start_rank: int = 0,
        speedup: float = 1.0,
        kv: KvSettings | None = None,
        scripts: OutputScripts | None = None,
        tiers: TierSettings | None = None,
        loras: MockLoras | None = None,
    ) -> None:
        if not 0 < speedup < float("inf"):
            raise ValueError(f"speedup must be a positive number, got {speedup}")
        ranks = range(dp_start_rank, dp_start_rank + dp_size)
        self._config = config
        self.kv_settings = kv or KvSettings()
        self.tiers = tiers
        self.ranks = {rank: MockRank(rank, config, speedup, scripts, has_tiers=tiers is not None) for rank in ranks}
        self._loras = Loras(checks_directories=False)
        self._lora_limits = loras or MockLoras()
        self.kv: MockKv | None = None
        self._ending: set[asyncio.Task[None]] = set()  # cancelled fetches
        self._collector: Collector | None = None

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """Open the KV tiers, and the transport of KV if the role needs it.

        Return the spec with KV layout and shared store. Raises PackageMissing if a package for them is not installed,
        EngineError if the settings are invalid or one of them cannot be opened.
        """
        for name in spec.loras:
            self._loras.add(LoraAdapter(name, 0, ""))
        spec = msgspec.structs.replace(spec, tasks=TASKS, max_loras=self._lora_limits.slots)
        has_transfers = spec.role in KV_ROLES
        if not has_transfers and self.tiers is None:
            return spec
        layout = self.kv_settings.layout(self._config.block_size)
        if has_transfers:
            await self._open(spec)
        if self.tiers is not None:
            for rank in self.ranks.values():
                await rank.open_tiers(self.tiers, spec, layout.block_bytes)
            managers = {number: tiers.manager for number, tiers in self._opened_tiers().items()}
            (name,) = {manager.store_name for manager in managers.values()}  # all ranks have the same identity
            spec = msgspec.structs.replace(spec, kv_store=name)
            self._collector = tier_metrics(spec.worker_id, {at: one.counters for at, one in managers.items()})
        return msgspec.structs.replace(spec, kv_layout=layout) if has_transfers else spec

    async def run(self, publish: Publish) -> None:
        async with asyncio.TaskGroup() as group:
            for rank in self.ranks.values():
                group.create_task(rank.run(publish))

    async def stop(self) -> None:
        if self.kv is not None:
            self.reset()
            await asyncio.gather(*self._ending, return_exceptions=True)
            await self.kv.close()
        for tiers in self._opened_tiers().values():
            await runtime.offload(tiers.manager.close)

    def warm(self, hashes: Sequence[int], rank: int = 0) -> None:
        self.ranks[rank].model.warm(hashes)

    def held(self, rank: int) -> list[int]:
        return self.ranks[rank].model.held()

    def held_in_tiers(self, rank: int) -> Sequence[CacheChange]:
        return self.ranks[rank].held_in_tiers()

    def stored(self) -> Sequence[int]:
        names = [name for tiers in self._opened_tiers().values() for name in tiers.manager.resident("store")]
        return list(dict.fromkeys(name.sequence_hash for name in names))

    def submit(self, item: WorkItem) -> None:
        """Queue an item on its rank, which must belong to this engine."""
        rank, lora = self.ranks[item.rank], item.lora_name
        if lora and lora not in self._loras.loaded:
            rank.refuse(item, 404, "adapter_not_loaded", f"the adapter {lora} is not loaded")
        elif item.media and item.stage != "decode":
            try:
                self.submit_embedded(item, StandInEncoder().encode_all(item.media))
            except (MediaUnusable, EngineError) as error:
                rank.refuse(item, 400 if isinstance(error, MediaUnusable) else 500, "media_not_encoded", str(error))
        else:
            self._submit(item, 0)

    def submit_embedded(self, item: WorkItem, embeddings: Array) -> None:
        """Queue an item with the embeddings of its media. The output tokens depend on every byte of the embeddings."""
        self._submit(item, xxh3_64_intdigest(embeddings.tobytes()))

    def cancel(self, request_id: str) -> None:
        for rank in self.ranks.values():
            rank.cancel(request_id)

    def release(self, request_id: str) -> None:
        if self.kv is not None:
            self.kv.release(request_id)

    def drop(self, prefilled: Prefilled) -> None:
        if self.kv is not None:
            self.kv.drop(prefilled)

    def kept(self) -> int:
        return 0 if self.kv is None else self.kv.kept

    def requests(self) -> dict[str, RequestState]:
        """Return the state of each request of all ranks that is in flight or whose KV is kept."""
        return {name: state for rank in self.ranks.values() for name, state in rank.requests().items()}

    def kv_stats(self) -> Stats:
        return Stats() if self.kv is None else self.kv.stats

    async def command(self, command: Command) -> tuple[str, ...]:
        """Execute a command as vLLM would, and return the names of the loaded adapters.

        The cache can be cleared only while no request runs. Clearing it clears host memory and disk too, but not the
        shared store, whose blocks belong to all workers. Pausing keeps the requests in flight. Sleeping drops the
        cache, so running requests are computed again after waking up. Raises EngineRefused if the command cannot be
        executed now.
        """
        ranks = self.ranks.values()
        match command.action:
            case "clear_kv_blocks":
                used = sum(rank.model.pool.used for rank in ranks)
                if used:
                    raise EngineRefused(
                        f"{used} KV blocks are in use by running requests; retry when they have finished"
                    )
                for rank in ranks:
                    rank.clear()
            case "load_lora":
                if (adapter := self._offered(command.lora_name, command.lora_path)) is not None:
                    await asyncio.sleep(self._lora_limits.load_s)
                    self._loras.add(adapter)
            case "unload_lora":
                with self._loras.removing(command.lora_name):
                    pass  # nothing else remembers it
            case "list_loras" | "drain":  # a worker drains without its engine
                pass
            case "sleep":
                for rank in ranks:
                    rank.hold("asleep", is_held=True)
                    rank.clear(keep_tiers=True)  # as vLLM, which discards the KV of the device
            case "wake_up":
                for rank in ranks:
                    rank.hold("asleep", is_held=False)
            case "pause" | "resume":
                for rank in ranks:
                    rank.hold("paused", is_held=command.action == "pause")
            case _:
                assert_never(command.action)
        return tuple(self._loras.loaded)

    def _offered(self, name: str, directory: str) -> LoraAdapter | None:
        if not Path(directory).is_dir():
            raise EngineRefused(f"no such directory: {directory}")
        adapter = self._loras.offered(name, directory)
        if adapter is not None and len(self._loras.loaded) >= self._lora_limits.slots:
            raise EngineRefused(f"all {self._lora_limits.slots} slots for adapters are taken; unload one first")
        return adapter

    async def check(self) -> None:
        """Do nothing, because a rank that fails ends `run`."""

    def collectors(self) -> Sequence[Collector]:
        return () if self._collector is None else (self._collector,)

    def reset(self) -> None:
        """Drop every request, the caches of all ranks, and all KV that is kept for other workers."""
        for rank in self.ranks.values():
            for task in rank.reset():
                self._ending.add(task)
                task.add_done_callback(self._ending.discard)
        if self.kv is not None:
            self.kv.release_all()

    def _submit(self, item: WorkItem, seen: int) -> None:
        if item.stage in KV_ROLES and self.kv is None:
            message = "this mock engine has neither role prefill nor decode and cannot transfer KV"
            self.ranks[item.rank].refuse(item, 501, "stage_not_supported", message)
        else:
            self.ranks[item.rank].submit(item, seen)

    def _opened_tiers(self) -> dict[int, MockTiers]:
        return {number: rank.tiers for number, rank in self.ranks.items() if rank.tiers is not None}

    async def _open(self, spec: WorkerSpec) -> None:
        kind = MockKv if self.kv_settings.connector == NIXL else ModelledKv
        kv = kind(self.kv_settings, spec, self._config.block_size, self._on_free)
        await kv.open(len(self.ranks) * self._config.kv_blocks_total)
        self.kv = kv
        for rank in self.ranks.values():
            rank.kv = kv

    def _on_free(self, request_id: str) -> None:
        for rank in self.ranks.values():
            rank.freed(request_id)
