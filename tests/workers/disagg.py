"""Prefill and decode workers with mock engines on one log, with an owner that each test controls."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from forebay.events.decisions import Stage
from forebay.events.progress import PrefillFailed, PrefillFinished, TransferFailed
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkCancelled, WorkItem
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings, MockKv, ModelledKv
from forebay.workers.engines.mock.rank import MockRank
from forebay.workers.runtime.worker import Worker
from tests.workers.conftest import Scene, engine_config, until, work_item

BLOCK_BYTES = 32
SLOTS = {"prefill": 5, "decode": 6, "aggregated": 7}
PROMPT = list(range(1, 11))  # two full blocks of four and half of one


def kv_settings(**changes: Any) -> KvSettings:
    return KvSettings(**{"bytes_per_token": BLOCK_BYTES // 4, "lease_s": 20.0, **changes})


@dataclass
class Side:
    """One worker, admitted in `epoch`."""

    worker: Worker
    engine: MockEngine
    slot: int
    epoch: int = -1

    @property
    def rank(self) -> MockRank:
        return self.engine.ranks[0]

    @property
    def kv(self) -> MockKv:
        assert self.engine.kv is not None
        return self.engine.kv

    @property
    def used(self) -> int:
        """KV blocks of its model that are referenced."""
        return self.rank.model.pool.used

    async def idle(self) -> None:
        """Nothing is under way, kept, fetched or referenced any more."""
        engine = self.engine
        await until(lambda: not (self.worker.active_requests or engine.kept() or self.used or engine.requests()))
        if engine.kv is not None:
            if not isinstance(self.kv, ModelledKv):
                await until(lambda: not self.kv.slots.used)
            stats = engine.kv_stats()
            assert (stats.held_offers, stats.held_blocks, stats.in_flight) == (0, 0, 0)


@dataclass
class Pair:
    """A prefill worker and a decode worker."""

    scene: Scene
    prefill: Side
    decode: Side
    requested: dict[str, WorkItem] = field(default_factory=dict)

    async def compute(self, name: str, prompt: list[int] = PROMPT, max_tokens: int = 6, **changes: Any) -> Prefilled:
        """Have the prompt computed: where its KV is."""
        await self.ask(name, prompt, max_tokens, **changes)
        return await self.computed(name)

    async def ask(self, name: str, prompt: list[int] = PROMPT, max_tokens: int = 6, **changes: Any) -> None:
        item = work_item(
            name, prompt, max_tokens, **{"stage": "prefill", "worker_epoch": self.prefill.epoch, **changes}
        )
        self.requested[name] = item
        await self.scene.send(item, self.prefill.slot)

    async def computed(self, name: str) -> Prefilled:
        prefilled: Prefilled = (await self._event(PrefillFinished, name)).prefilled
        return prefilled

    async def answer(self, name: str, prefilled: Prefilled | None, stage: Stage = "decode", **changes: Any) -> None:
        """Send a request with prefilled KV to the decode worker."""
        fields = {"stage": stage, "worker_epoch": self.decode.epoch, "prefilled": prefilled, **changes}
        await self.scene.send(msgspec.structs.replace(self.requested[name], **fields), self.decode.slot)

    async def generated(self, name: str) -> list[int]:
        """Return the complete output of a request."""
        await until(lambda: self.scene.end(name))
        assert self.scene.end(name).finish_reason == "length", self.scene.end(name)
        return self.scene.output(name)

    async def not_fetched(self, name: str) -> str:
        """Why the KV could not be had."""
        error: str = (await self._event(TransferFailed, name)).error
        return error

    async def failed(self, name: str) -> PrefillFailed:
        found: PrefillFailed = await self._event(PrefillFailed, name)
        return found

    async def _event(self, kind: type, name: str) -> Any:
        """Wait for the newest event of a request."""
        await until(lambda: any(one.request_id == name for one in self.scene.progress(kind)))
        return [one for one in self.scene.progress(kind) if one.request_id == name][-1]

    async def cancel(self, name: str, side: Side, attempt: int = 1) -> None:
        order = WorkCancelled(request_id=name, attempt=attempt, owner_epoch=0, worker_epoch=side.epoch)
        await self.scene.send(order, side.slot)

    async def idle(self) -> None:
        """Nothing is under way, kept, fetched or referenced any more, on either side."""
        await self.prefill.idle()
        await self.decode.idle()


def side(
    scene: Scene, role: str, kv: KvSettings, speedup: float = 1000.0, name: str = "", dp_size: int = 1, **sizes: int
) -> Side:
    """A worker with a mock engine, not running."""
    engine = MockEngine(engine_config(**sizes), dp_size=dp_size, speedup=speedup, kv=kv)
    name = name or f"{role}-1"
    blocks = sizes.get("kv_blocks_total", 64)
    worker = scene.worker(
        engine=engine, dp_size=dp_size, name=name, token=f"t-{name}", role=role, kv_blocks_total=blocks
    )
    return Side(worker, engine, SLOTS[role])


@asynccontextmanager
async def serving(scene: Scene, one: Side) -> AsyncIterator[Side]:
    token = f"t-{one.worker.spec.worker_id}"
    async with scene.serving(one.worker, token, one.slot) as epoch:
        one.epoch = epoch
        yield one


@asynccontextmanager
async def pair_of(scene: Scene, prefill: Side, decode: Side) -> AsyncIterator[Pair]:
    async with serving(scene, prefill), serving(scene, decode):
        yield Pair(scene, prefill, decode)


async def aggregated(
    scene: Scene, name: str, prompt: list[int] = PROMPT, max_tokens: int = 6, **changes: Any
) -> list[int]:
    """Return the output of a worker that runs both stages."""
    async with serving(scene, side(scene, "aggregated", kv_settings(), name=f"one-{name}")) as one:
        await scene.send(work_item(name, prompt, max_tokens, worker_epoch=one.epoch, **changes), one.slot)
        await scene.ended(name)
    return scene.output(name)
