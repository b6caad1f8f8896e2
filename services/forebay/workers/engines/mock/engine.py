"""An engine without a GPU: `EngineModel` in real time, or faster; never sooner than the model says.

Probabilities and embeddings are made up from hashes; a structure that is asked of an answer is not kept to. With the
role prefill or decode it has KV of real bytes, which travels: the way there is opened with the first item of an epoch,
which names it; items wait for that.
"""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

import msgspec
from prometheus_client.registry import Collector
from xxhash import xxh3_64_intdigest

from forebay.engine_model.model import EngineConfig
from forebay.events.control import Command
from forebay.events.fleet import WorkerSpec
from forebay.events.tokens import ResponseError
from forebay.events.transfer import Prefilled
from forebay.events.work import WorkItem
from forebay.workers.engine import EngineError, EngineRefused, Publish
from forebay.workers.engines.mock.kv import KvSettings, MockKv, summed
from forebay.workers.engines.mock.outputs import TASKS
from forebay.workers.engines.mock.rank import Rank
from forebay.workers.engines.standin_encoder import MediaUnusable, StandInEncoder
from forebay.workers.kv_transfer.api import Stats
from forebay.workers.kv_transfer.nixl_agent import load_nixl

if TYPE_CHECKING:
    from forebay.workers.kv_transfer.embeddings import Array

logger = logging.getLogger(__name__)

KV_ROLES = frozenset(("prefill", "decode"))


class MockEngine:
    """`dp_size` independent ranks of `config` from `dp_start_rank` on, `speedup` times as fast as the real thing.

    `kv` is how KV travels, where the worker's role is prefill or decode. Like vLLM with its default scheduling policy
    it serves first come, first served, whatever an item's priority.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        dp_size: int = 1,
        dp_start_rank: int = 0,
        speedup: float = 1.0,
        kv: KvSettings | None = None,
    ) -> None:
        if not 0 < speedup < float("inf"):
            raise ValueError(f"speedup must be a positive number, not {speedup}")
        ranks = range(dp_start_rank, dp_start_rank + dp_size)
        self._config = config
        self._ranks = {rank: Rank(rank, config, speedup) for rank in ranks}
        self._loras: dict[str, str] = {}  # the directories of adapters; none of those that were there at the start
        self._kv_settings = kv or KvSettings()
        self._spec: WorkerSpec | None = None
        self._kv: MockKv | None = None  # of this epoch, once it is open
        self._life = 0  # counts resets
        self._opening = False
        self._held: dict[str, tuple[WorkItem, int]] = {}  # until it is
        self._ending: set[asyncio.Task[None]] = set()
        self._broken: EngineError | None = None
        self._past = Stats()  # of epochs that are over
        self._closing: list[Stats] = []

    async def start(self, spec: WorkerSpec) -> WorkerSpec:
        """There is no model to load. Raises EngineError when KV is to travel, and cannot."""
        self._loras = dict.fromkeys(spec.loras, "")
        spec = self._spec = msgspec.structs.replace(spec, tasks=TASKS)
        if spec.role not in KV_ROLES:
            return spec
        layout = self._kv_settings.layout(self._config.block_size)
        if self._kv_settings.transport == "nixl":
            await asyncio.to_thread(load_nixl, "KV blocks travel")
        elif find_spec("numpy") is None:
            raise EngineError("KV blocks are kept in arrays of numpy, which is not installed: pip install numpy")
        return msgspec.structs.replace(spec, kv_layout=layout)

    async def run(self, publish: Publish) -> None:
        """Run every rank until cancelled."""
        async with asyncio.TaskGroup() as group:
            for rank in self._ranks.values():
                group.create_task(rank.run(publish))

    async def stop(self) -> None:
        """Give back memory."""
        if self._kv is not None or self._opening:
            self.reset()
        await asyncio.gather(*self._ending)

    def warm(self, hashes: Sequence[int], rank: int = 0) -> None:
        """Start a rank with these blocks in its cache."""
        self._ranks[rank].model.warm(hashes)

    def held(self, rank: int) -> list[int]:
        """The blocks in a rank's cache."""
        return self._ranks[rank].model.held()

    def submit(self, item: WorkItem) -> None:
        """Queue an item on the rank that it names, which must be one of this engine's."""
        rank, lora = self._ranks[item.rank], item.lora_name
        if lora and lora not in self._loras:
            rank.refuse(item, ResponseError(status=404, code="adapter_not_loaded", message=_not_loaded(lora)))
        elif item.media and item.stage != "decode":
            try:
                self.submit_embedded(item, StandInEncoder().encode_all(item.media))
            except (MediaUnusable, EngineError) as error:
                status = 400 if isinstance(error, MediaUnusable) else 500
                rank.refuse(item, ResponseError(status=status, code="media_not_encoded", message=str(error)))
        else:
            self._submit(item, 0)

    def submit_embedded(self, item: WorkItem, embeddings: "Array") -> None:
        """As `submit`: what it says depends on every byte of the embeddings."""
        self._submit(item, xxh3_64_intdigest(embeddings.tobytes()))

    def cancel(self, request_id: str) -> None:
        """Drop a request, if it is under way, and what is kept for it."""
        self._held.pop(request_id, None)
        for rank in self._ranks.values():
            rank.cancel(request_id)

    def release(self, request_id: str) -> None:
        """Nobody will fetch what is kept for a request, if anything is."""
        if self._kv is not None:
            self._kv.release(request_id)

    def drop(self, prefilled: Prefilled) -> None:
        """Tell who keeps it that nobody here will fetch; its lease does where nothing is open yet."""
        if self._kv is not None:
            self._kv.drop(prefilled)

    def kept(self) -> int:
        """Requests whose KV is kept for others."""
        return 0 if self._kv is None else self._kv.kept

    def kv_stats(self) -> Stats:
        """Of all KV that travelled since the start."""
        return reduce(summed, (*self._closing, Stats() if self._kv is None else self._kv.transport.stats), self._past)

    async def command(self, command: Command) -> tuple[str, ...]:
        """As vLLM does it: the cache can be cleared while nothing runs; who is paused or asleep keeps its requests.

        Asleep it has no cache, so requests that ran are computed again when it wakes up.
        """
        ranks = self._ranks.values()
        match command.action:
            case "clear_kv_blocks":
                used = sum(rank.model.pool.used for rank in ranks)
                if used:
                    raise EngineRefused(f"{used} KV blocks are used by requests that run; try again when they are done")
                for rank in ranks:
                    rank.clear()
            case "load_lora":
                self._load(command.lora_name, command.lora_path)
            case "unload_lora":
                if command.lora_name not in self._loras:
                    raise EngineRefused(_not_loaded(command.lora_name))
                del self._loras[command.lora_name]
            case "list_loras":
                pass
            case "sleep":
                for rank in ranks:
                    rank.hold(asleep=True)
                    rank.clear()
            case "wake_up":
                for rank in ranks:
                    rank.hold(asleep=False)
            case "pause":
                for rank in ranks:
                    rank.hold(paused=True)
            case "resume":
                for rank in ranks:
                    rank.hold(paused=False)
            case _:
                assert_never(command.action)
        return tuple(self._loras)

    def _load(self, name: str, path: str) -> None:
        """Nothing is read from the adapter's directory, but it must be there."""
        if not name or not path:
            raise EngineRefused("an adapter needs a name and a directory")
        if name in self._loras and self._loras[name] != path:
            raise EngineRefused(f"another adapter {name} is loaded already; unload it first")
        if not Path(path).is_dir():
            raise EngineRefused(f"there is no directory {path}")
        self._loras[name] = path

    async def check(self) -> None:
        """It lives as long as its process, unless KV is to travel and cannot."""
        if self._broken is not None:
            raise self._broken

    def collectors(self) -> Sequence[Collector]:
        """It has no metrics of its own."""
        return ()

    def reset(self) -> None:
        """Drop every request and the caches, and what is kept for others."""
        self._life += 1
        self._held.clear()
        self._opening = False
        fetching = [task for rank in self._ranks.values() for task in rank.reset()]
        kv, self._kv = self._kv, None
        if kv is not None:
            self._closing.append(kv.transport.stats)
            self._spawn(self._close(kv, fetching))

    def _submit(self, item: WorkItem, seen: int) -> None:
        """To its rank, at once or when KV can travel."""
        rank = self._ranks[item.rank]
        if item.stage not in KV_ROLES or self._kv is not None:
            rank.submit(item, seen)
        elif self._spec is None or self._spec.role not in KV_ROLES:
            message = "this mock engine has neither the role prefill nor decode: its KV does not travel"
            rank.refuse(item, ResponseError(status=501, code="stage_not_supported", message=message))
        else:
            self._held[item.request_id] = item, seen
            if not self._opening:
                self._opening = True
                self._spawn(self._open(self._spec, item.worker_epoch, self._life))

    async def _open(self, spec: WorkerSpec, worker_epoch: int, life: int) -> None:
        broken: EngineError | None = None
        kv = MockKv(self._kv_settings, spec.model, spec.worker_id, worker_epoch, self._config.block_size)
        try:
            await kv.open(len(self._ranks) * self._config.kv_blocks_total, self._given_back)
        except Exception as error:  # NIXL raises its own kinds
            logger.error("KV cannot travel", exc_info=not isinstance(error, EngineError))  # noqa: TRY400
            broken = EngineError(f"KV cannot travel by {self._kv_settings.transport}: {error}")
        if life != self._life:
            await kv.close()
            return
        self._opening = False
        held, self._held = self._held, {}
        if broken is None:
            self._kv = kv
            for rank in self._ranks.values():
                rank.kv = kv
        else:
            self._broken = broken
        for item, seen in held.values():
            rank = self._ranks[item.rank]
            if broken is None:
                rank.submit(item, seen)
            elif item.stage == "decode":
                rank.lose(item, str(broken))
            else:
                rank.refuse(item, ResponseError(status=503, code="kv_not_kept", message=str(broken)))

    async def _close(self, kv: MockKv, fetching: Sequence[asyncio.Task[None]]) -> None:
        await asyncio.gather(*fetching, return_exceptions=True)
        await kv.close()
        self._closing.remove(kv.transport.stats)
        self._past = summed(self._past, kv.transport.stats)

    def _given_back(self, request_id: str, _: str) -> None:
        for rank in self._ranks.values():
            rank.given_back(request_id)

    def _spawn(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)


def _not_loaded(name: str) -> str:
    return f"the adapter {name} is not loaded"
