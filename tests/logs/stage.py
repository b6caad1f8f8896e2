"""Small system in virtual time, with the real owner on a log in memory and engine models as workers.

The system does not wait for a clock or another thread, so a scenario always gives the same decisions. Only the append
times of log records come from the wall clock.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from forebay.core.block_hashes import hash_seed, sequence_hashes
from forebay.core.state.submitted_request import id_hash
from forebay.engine_model.model import EngineConfig, EngineModel, EngineRequest, Stored
from forebay.events.base import Event, pack_u32, pack_u64, unpack_u32, unpack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import Action, Command, PoolConfigured, Role, RouterConfig, WorkerCommanded
from forebay.events.decisions import Decision
from forebay.events.fleet import WorkerFact, WorkerJoined, WorkerSpec
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, Tier
from forebay.events.media import Encoded
from forebay.events.metrics import LoadReported
from forebay.events.progress import (
    CommandDone,
    CommandRefused,
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFinished,
    TransferFailed,
)
from forebay.events.requests import NO_HINTS, RequestCancelled, RequestSubmitted, RouteQueried, RoutingHints, Sampling
from forebay.events.topics import CONTROL, DECISIONS, FLEET, KV_EVENTS, METRICS, PROGRESS, REQUESTS, Topic, work_topic
from forebay.events.transfer import Prefilled
from forebay.events.work import AnyWorkEvent, ReannounceCache, WorkCancelled, WorkerCommand, WorkItem
from forebay.live.owner.owner import GroupSettings, Owner
from forebay.replay.policies import load_policies
from forebay.runtime.system import SystemRuntime
from forebay.transport.base import Draft, Log
from forebay.transport.redis.leases import embedded_leases
from forebay.transport.sqlite.log import SqliteLog

MODEL = "model"
POOL = "default"
BLOCK = 16
TICK_US = 2_000
BEGINS_US = 1_750_000_000_000_000
READ_MAX = 100_000
TICKS_MAX = 10_000
TOKEN_BYTES = 1_024  # of KV
LEASE_US = 500_000
NEVER = 1 << 40  # journal records: snapshots are taken when a scenario says so


class StoppedTime(SystemRuntime):
    """Runtime with a stopped clock, so that owner turns do not reach their time limit on a busy machine."""

    def monotonic_ns(self) -> int:
        return 0


class StageWorker:
    """Worker with one engine model per rank, run step by step."""

    def __init__(self, stage: "Stage", spec: WorkerSpec, epoch: int, slot: int) -> None:
        config = EngineConfig(
            vocabulary=tuple(range(64)),
            block_size=spec.block_size,
            kv_blocks_total=spec.kv_blocks_total,
            max_num_seqs=spec.max_num_seqs,
            max_num_batched_tokens=spec.max_num_batched_tokens,
        )
        self.spec = spec
        self.epoch = epoch
        self.loses = 0  # number of KV events that do not reach the log
        self.fails = 0  # number of encodes, prefills or transfers that fail
        self.refuses = 0  # number of prompts that are refused
        self.obeys = True  # whether commands are executed
        self.loras = spec.loras
        self.step_us = 0  # duration of the last step, of the slowest rank
        self._stage = stage
        self._slot = slot
        self._read = 0
        self._engines = {rank: EngineModel(config) for rank in spec.ranks}
        self._seqs = dict.fromkeys(spec.ranks, 0)
        self._items: dict[str, WorkItem] = {}
        self._to_encode: list[str] = []
        self._fetched: dict[str, int] = {}  # bytes of KV by request, until the first token

    def take_work(self) -> bool:
        """Process new work events. Return whether there were any."""
        topic = work_topic(self.spec.pool)
        records = self._stage.log.records(topic.name, self._slot, self._read, READ_MAX)
        for record in records:
            self._handle_work(decode(topic, record.value))
        self._read += len(records)
        return bool(records)

    def step(self) -> bool:
        """Run one iteration of each engine. Return whether any engine had work."""
        encoded = self._encode()
        self.step_us = 0
        stepped = [self._step(rank, engine) for rank, engine in self._engines.items()]
        return encoded or any(stepped)

    def stored(self, hashes: Sequence[int], parent: int | None = None, tier: Tier = "device", rank: int = 0) -> None:
        packed = pack_u64(hashes)
        self._report_cache(BlocksStored, rank, sequence_hashes=packed, parent_hash=parent, tier=tier)

    def removed(self, hashes: Sequence[int], tier: Tier = "device", rank: int = 0) -> None:
        self._report_cache(BlocksRemoved, rank, sequence_hashes=pack_u64(hashes), tier=tier)

    def held(self, rank: int = 0) -> list[int]:
        """Return the blocks cached on the device."""
        return self._engines[rank].held()

    def release_kv(self, request_id: str) -> bool:
        """Release the retained KV of a prompt. Return whether there was any."""
        return any(engine.release(request_id) for engine in self._engines.values())

    def _fetch(self, engine: EngineModel, request_id: str) -> None:
        kept = self._items[request_id].prefilled
        assert kept is not None, "it is decoded"
        holder = self._stage.workers.get(kept.worker_id)
        if self._succeeds() and holder is not None and holder.release_kv(request_id):
            engine.fetched(request_id)
            self._fetched[request_id] = kept.bytes
            return
        engine.cancel(request_id)
        self._report(TransferFailed, request_id, error="its memory is gone")
        del self._items[request_id]

    def _keep(self, request_id: str, cached_tokens: int) -> None:
        tokens = len(unpack_u32(self._items[request_id].token_ids))
        kept = Prefilled(
            worker_id=self.spec.worker_id,
            worker_epoch=self.epoch,
            model=MODEL,
            connector="nixl",
            descriptor=b"there",
            tokens=tokens,
            lease_us=LEASE_US,
            bytes=tokens * TOKEN_BYTES,
            checksum="0123456789abcdef",
            cached_tokens=cached_tokens,
        )
        self._report(PrefillFinished, request_id, prefilled=kept)
        del self._items[request_id]

    def _encode(self) -> bool:
        for request_id in self._to_encode:
            if request_id in self._items:
                if self._succeeds():
                    rows = sum(one.tokens for one in self._items[request_id].media)
                    lies = Encoded(descriptor=b"there", shape=(rows, 8), dtype="float32", checksum="0123456789abcdef")
                    self._report(EncodeFinished, request_id, encoded=lies)
                else:
                    self._report(EncodeFailed, request_id, error="out of memory")
                del self._items[request_id]
        encoded = bool(self._to_encode)
        self._to_encode.clear()
        return encoded

    def _succeeds(self) -> bool:
        fails = self.fails > 0
        self.fails -= fails
        return not fails

    def _step(self, rank: int, engine: EngineModel) -> bool:
        for fetch in engine.fetches():
            self._fetch(engine, fetch.request_id)
        step = engine.step()
        if step is None:
            return False
        self.step_us = max(self.step_us, step.duration_us)
        for done in step.computed:
            self._keep(done.request_id, done.cached_tokens)
        for change in step.cache_changes:
            if isinstance(change, Stored):
                self.stored(change.hashes, change.parent, rank=rank)
            else:
                self.removed(change.hashes, rank=rank)
        for first in step.first_tokens:
            moved = self._fetched.pop(first.request_id, 0)
            facts = {"transferred_bytes": moved, "transfer_us": moved // 100}
            self._report(FirstTokenEmitted, first.request_id, cached_tokens=first.cached_tokens, **facts)
        for delta in step.emitted:
            if self._items[delta.request_id].report_output and delta.first_index % BLOCK == BLOCK - 1:
                self._report(OutputGrown, delta.request_id, output_tokens=delta.first_index + 1)
        for end in step.finished:
            self._report(RequestFinished, end.request_id, finish_reason=end.reason, output_tokens=end.output_tokens)
            del self._items[end.request_id]
        load = step.load
        report = LoadReported(
            worker_id=self.spec.worker_id,
            worker_epoch=self.epoch,
            running=load.running,
            waiting=load.waiting,
            kv_blocks_used=load.kv_blocks_used,
            kv_blocks_total=load.kv_blocks_total,
            rank=rank,
        )
        if step.first_tokens or step.finished:  # engines report at most ten times per second
            self._stage.put(METRICS, report)
        return True

    def _handle_work(self, event: AnyWorkEvent) -> None:
        if event.worker_epoch != self.epoch:
            return
        match event:
            case WorkItem() if event.request_id not in self._items:
                self._items[event.request_id] = event
                if event.stage == "encode":
                    self._to_encode.append(event.request_id)
                    return
                if event.encoded is not None and not self._succeeds():
                    self._report(TransferFailed, event.request_id, error="its memory is gone")
                    del self._items[event.request_id]
                    return
                if event.stage == "prefill" and (self.refuses or not self._succeeds()):
                    refused = {"status": 400, "code": "context_length_exceeded"} if self.refuses else {}
                    self.refuses -= self.refuses > 0
                    self._report(PrefillFailed, event.request_id, error="no room", **refused)
                    del self._items[event.request_id]
                    return
                self._engines[event.rank].submit(
                    EngineRequest(
                        request_id=event.request_id,
                        attempt=event.attempt,
                        token_ids=event.token_ids,
                        sequence_hashes=event.sequence_hashes,
                        token_seed=len(event.token_ids),
                        max_tokens=event.sampling.max_tokens,
                        hash_seed=hash_seed(event.lora_name, event.cache_namespace),
                        stage=event.stage,
                    )
                )
            case WorkCancelled() if event.request_id in self._items:
                item = self._items.pop(event.request_id)
                self._engines[item.rank].cancel(item.request_id)
            case WorkCancelled():
                self.release_kv(event.request_id)
            case ReannounceCache():
                self._seqs[event.rank] = max(self._seqs[event.rank], event.above_seq)
                self._report_cache(CacheCleared, event.rank)
                self.stored(self.held(event.rank), rank=event.rank)
            case WorkerCommand() if self.obeys:
                self._command(event)
            case _:
                pass  # dispatched again by a new owner, or already ended

    def _command(self, sent: WorkerCommand) -> None:
        command, fields = sent.command, {"worker_id": self.spec.worker_id, "worker_epoch": self.epoch}
        outcome: Any = {
            **fields, "command_id": sent.command_id, "action": command.action, "owner_epoch": sent.owner_epoch
        }  # fmt: skip
        if command.action == "unload_lora" and command.lora_name not in self.loras:
            self._stage.put(PROGRESS, CommandRefused(**outcome, error=f"{command.lora_name} is not loaded"))
            return
        others = tuple(name for name in self.loras if name != command.lora_name)
        if command.action in ("load_lora", "unload_lora"):
            self.loras = (*others, command.lora_name) if command.action == "load_lora" else others
        self._stage.put(PROGRESS, CommandDone(**outcome, loras=self.loras))

    def _report(self, kind: Any, request_id: str, **fields: Any) -> None:
        item = self._items[request_id]
        event = kind(
            request_id=request_id,
            attempt=item.attempt,
            worker_id=self.spec.worker_id,
            worker_epoch=self.epoch,
            owner_epoch=item.owner_epoch,
            **fields,
        )
        self._stage.put(PROGRESS, event)

    def _report_cache(self, kind: Any, rank: int, **fields: Any) -> None:
        if not self.spec.kv_events:
            return
        self._seqs[rank] += 1
        if self.loses:
            self.loses -= 1
            return
        event = kind(worker_id=self.spec.worker_id, worker_epoch=self.epoch, seq=self._seqs[rank], rank=rank, **fields)
        self._stage.put(KV_EVENTS, event)


class Stage:
    """Simulated group. `owner` is the current owner."""

    owner: Owner
    owner_id = "owner"  # of the next owner

    def __init__(self, attempts_max: int = 3, role: Role = "aggregated", **router: Any) -> None:
        self.log = SqliteLog.open(None)
        self.now_us = BEGINS_US
        self.workers: dict[str, StageWorker] = {}
        self._leases = embedded_leases()
        self._pool = PoolConfigured(
            pool=POOL,
            model=MODEL,
            block_size=BLOCK,
            router=RouterConfig(**router),
            attempts_max=attempts_max,
            role=role,
        )
        self._fleet_end = 0

    async def begin(self, *workers: str, log: Log | None = None, **spec: Any) -> "Stage":
        """Start an owner, then let `workers` join."""
        settings = GroupSettings(
            group=MODEL,
            partition=0,
            owner_id=self.owner_id,
            pools=(self._pool,),
            policies=load_policies([self._pool.router.mode]),
            snapshot_every=NEVER,
            snapshot_age_s=float(NEVER),
        )
        self.owner = Owner(log or self.log, self._leases, settings, clock_us=lambda: self.now_us)
        await self.owner.start()
        for name in workers:
            await self.join(name, **spec)
        return self

    async def join(self, name: str, **spec: Any) -> StageWorker:
        fields: dict[str, Any] = {"kv_blocks_total": 256, "max_num_seqs": 8, "max_num_batched_tokens": 512, **spec}
        described = WorkerSpec(worker_id=name, model=MODEL, block_size=BLOCK, **{"pool": POOL, **fields})
        slot = len(self.workers)
        event = WorkerJoined(
            owner_epoch=self.owner.journal.epoch, spec=described, lease=f"{name}-lease", slot=slot, from_offset=0
        )
        (epoch,) = await self.log.append([Draft(FLEET.name, 0, encode(FLEET, event))])
        self.workers[name] = StageWorker(self, described, epoch, slot)
        await self.settle()
        return self.workers[name]

    async def fact(self, kind: type[WorkerFact], name: str, reason: str = "seen") -> None:
        """Append a fact about a worker. Lost workers stop."""
        worker = self.workers[name]
        epoch = self.owner.journal.epoch
        self.put(FLEET, kind(owner_epoch=epoch, worker_id=name, worker_epoch=worker.epoch, reason=reason))
        if kind.__name__ == "WorkerLost":
            del self.workers[name]
        await self.settle()

    def put(self, topic: Topic, event: Event) -> None:
        self.log.append_soon([Draft(topic.name, 0, encode(topic, event))])

    def put_bytes(self, topic: Topic, value: bytes) -> None:
        """Append a record that need not be an event."""
        self.log.append_soon([Draft(topic.name, 0, value)])

    def submit(
        self, name: str, prompt: Sequence[int], max_tokens: int = 4, hints: RoutingHints = NO_HINTS, **changes: Any
    ) -> RequestSubmitted:
        event = submission(name, prompt, max_tokens, hints, **changes)
        self.put(REQUESTS, event)
        return event

    def route_query(
        self, name: str, prompt: Sequence[int], hints: RoutingHints = NO_HINTS, lora_name: str = ""
    ) -> None:
        like = submission(name, prompt, 1, hints, lora_name=lora_name)
        query = RouteQueried(
            request_id=name,
            model=MODEL,
            prompt_tokens=like.prompt_tokens,
            sequence_hashes=like.sequence_hashes,
            reply_slot=like.reply_slot,
            tie_seed=like.tie_seed,
            lora_name=lora_name,
            routing=hints,
        )
        self.put(REQUESTS, query)

    def cancel(self, name: str) -> None:
        self.put(REQUESTS, RequestCancelled(request_id=name))

    def command(self, name: str, action: Action, lora_name: str = "", **changes: Any) -> None:
        """Send a worker command as an operator."""
        fields: dict[str, Any] = {
            "command_id": name,
            "model": MODEL,
            "command": Command(action=action, lora_name=lora_name, lora_path=f"/adapters/{lora_name}"),
            "reply_slot": 3,
            "timeout_us": 60_000_000,
            "nonce": id_hash(name) >> 1,
            **changes,
        }
        self.put(CONTROL, WorkerCommanded(**fields))

    def configure(self, **router: Any) -> None:
        """Change the router configuration of the pool."""
        self.put(CONTROL, PoolConfigured(pool=POOL, model=MODEL, block_size=BLOCK, router=RouterConfig(**router)))

    async def settle(self) -> None:
        """Let the owner apply all events without running engines."""
        await asyncio.sleep(0)  # the log commits appended records
        self.now_us += TICK_US
        await self.owner.turn()
        await asyncio.sleep(0)

    async def pass_time(self, seconds: float) -> None:
        """Advance the clock without events."""
        self.now_us += round(seconds * 1e6)
        await self.settle()

    async def play(self, ticks: int = TICKS_MAX) -> None:
        """Run owner and workers until they are idle or for `ticks` steps."""
        for _ in range(ticks):
            await self.settle()
            took = [worker.take_work() for worker in self.workers.values()]
            stepped = [worker.step() for worker in self.workers.values()]
            if not any(took) and not any(stepped):
                await self.settle()
                return

    async def serve(self, *requests: tuple[str, Sequence[int]], **changes: Any) -> None:
        """Run requests one after another, each until it has ended."""
        for name, prompt in requests:
            self.submit(name, prompt, **changes)
            await self.play()

    def decided(self, kind: type[Decision]) -> list[Any]:
        records = self.log.records(DECISIONS.name, 0, 0, READ_MAX)
        events = [decode(DECISIONS, record.value) for record in records]
        return [event for event in events if isinstance(event, kind)]


def prompt(family: int, blocks: int, tail: int = 0) -> list[int]:
    """Return a prompt of whole blocks shared within its family, and a few tokens of its own."""
    return [family * 10_000 + at for at in range(blocks * BLOCK)] + [tail * 100 + at for at in range(5)]


def hashes(prompt: Sequence[int]) -> list[int]:
    return unpack_u64(sequence_hashes(pack_u32(prompt), BLOCK))


def submission(
    name: str, prompt: Sequence[int], max_tokens: int = 4, hints: RoutingHints = NO_HINTS, **changes: Any
) -> RequestSubmitted:
    """Return a request as an ingress would submit it."""
    packed = pack_u32(prompt)
    seed = hash_seed(changes.get("lora_name", ""), changes.get("cache_namespace", ""))
    fields: dict[str, Any] = {
        "request_id": name,
        "model": MODEL,
        "token_ids": packed,
        "sequence_hashes": sequence_hashes(packed, BLOCK, seed),
        "reply_slot": 3,
        "timeout_us": 60_000_000,
        "tie_seed": id_hash(name),
        "sampling": Sampling(max_tokens=max_tokens),
        "nonce": id_hash(name + "?"),
        "ingress_id": "ingress",
        "routing": hints,
        **changes,
    }
    return RequestSubmitted(**fields)
