"""Worlds for tests: a driver that applies events as an owner does, and histories that are drawn."""

import random
from collections.abc import Iterable, Sequence
from typing import Any, Self

import msgspec
from hypothesis import strategies as st

from forebay.core.block_hashes import extend_chain
from forebay.core.restore import restore
from forebay.core.routing.eligibility import Ineligible
from forebay.core.routing.policies import ONLY_BUILT_IN, CustomPolicies
from forebay.core.selection.candidates import find_candidates, must_queue
from forebay.core.selection.disaggregation import locate_prompt
from forebay.core.state.active_request import ActiveRequest
from forebay.core.state.load import FleetLoad
from forebay.core.state.prefix_index import TIERS
from forebay.core.step import AnyDecision, InputEvent, claim, open_run, step
from forebay.core.world import World
from forebay.events.base import pack_u32, pack_u64
from forebay.events.control import (
    BusyThresholds,
    BusyThresholdsSet,
    Command,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    PoolSetting,
    QueueClass,
    QueueConfig,
    Role,
    RouterConfig,
    WorkerCommanded,
)
from forebay.events.decisions import JournalRecord, RequestRouted
from forebay.events.fleet import (
    OwnershipAnnounced,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSpec,
    WorkerSuspect,
)
from forebay.events.kv import BlocksRemoved, BlocksStored, CacheCleared, StoreBlocksAdded, StoreBlocksRemoved
from forebay.events.media import Encoded, Media
from forebay.events.metrics import LoadReported, TierCost, TierCosts, TierCostsMeasured
from forebay.events.pools import (
    GridPool,
    PoolCanarySet,
    PoolDrainSet,
    PoolGrid,
    PoolRouting,
    PoolRoutingConfigured,
    PoolRule,
)
from forebay.events.progress import (
    AttemptMoved,
    AttemptRejected,
    CommandDone,
    CommandRefused,
    EncodeFailed,
    EncodeFinished,
    FirstTokenEmitted,
    OutputGrown,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.requests import (
    RequestCancelled,
    RequestResumed,
    RequestSubmitted,
    RouteQueried,
    RouterOverride,
    RoutingHints,
    Sampling,
    TaintWeight,
)
from forebay.events.transfer import Prefilled
from forebay.events.versions import EVENTS_VERSION

BLOCK = 4
LEASE_US = 500_000
WORKERS = ("a", "b", "c")
ENCODERS = ("e", "f")
PREFILLERS = ("p", "q")
PROGRESS_KINDS = frozenset(("first", "finish", "fail", "reject", "moved", "grow", "not_fetched")).union(
    ("encoded", "not_encoded", "prefilled", "not_prefilled")
)
MEDIA = Media(kind="image", digest="ab" * 32, mime="image/png", first_token=1, tokens=4, content=b"pixels")
ENCODED = Encoded(descriptor=b"there", shape=(4, 8), dtype="float32", checksum="0123456789abcdef")
PREFILLED = Prefilled(
    worker_id="p", worker_epoch=0, model="m", connector="nixl", descriptor=b"there", tokens=10, lease_us=LEASE_US
)
PROMPTS = [extend_chain(None, [family * 100 + at for at in range(8)]) for family in range(3)]
STORES = ("", "s", "t")
ONE_EACH = QueueConfig(run_ahead=0.0)  # with max_num_seqs 1, a worker runs one request and queues none
FACTS: dict[str, type[WorkerLost | WorkerSuspect | WorkerRecovered | WorkerDraining]] = {
    "lose": WorkerLost,
    "suspect": WorkerSuspect,
    "recover": WorkerRecovered,
    "drain": WorkerDraining,
}

INGRESSES = ("", "one", "two")
TENANTS = ("", "zeta", "acme")
DELIVERIES = ("worker", "external", "worker")
HINTS = (
    *(RoutingHints() for _ in range(4)),
    RoutingHints(session_id="s1"),
    RoutingHints(session_id="s2", expected_output_tokens=100, priority=3),
    RoutingHints(worker_id="a", strict_priority=1),
    RoutingHints(allowed_workers=("b", "c"), preferred_taints=(TaintWeight(taint="t", weight=1.0),)),
    RoutingHints(override=RouterOverride(mode="least-loaded", assume_kv_reuse=False)),
    RoutingHints(policy_class="batch"),
)
ENDPOINTS = ("demo.scores.rank", "demo.scores.close")
CALLS = (
    *(RoutingHints(endpoint=name) for name in ENDPOINTS),
    RoutingHints(endpoint=ENDPOINTS[0], override=RouterOverride(mode="round-robin")),
)
QUEUE = QueueConfig(
    threshold=0.25,
    policy="wspt",
    classes=(
        QueueClass(quantum=16),
        QueueClass(name="batch", quantum=8, policy="lcfs", requests_per_worker_max=2),
        QueueClass(uncached_tokens_min=20, quantum=8),
    ),
)
CONFIGS: tuple[dict[str, Any], ...] = (
    {"mode": "round-robin"},
    {"temperature": 2.0},
    {"queue": QUEUE},
    {"queue": QueueConfig(threshold=0.1), "session_ttl_s": 0.0005},
    {"use_kv_events": False, "ttl_s": 0.0005, "approximate_blocks_max": 20},
    {"predicted_ttl_s": 0.0003, "session_ttl_s": 10.0},
    {"track_output_blocks": True, "session_ttl_s": 10.0, "session_mode": "soft", "queue": QUEUE},
    {"assume_kv_reuse": False, "track_output_blocks": True},
    {"tier_credit": "measured", "shared_cache_hit_weight": 0.25},
    {"track_active_blocks": False, "busy": BusyThresholds(active_decode_blocks_threshold=0.1)},
    {},
)

DISAGGS = (
    DisaggConfig(),
    DisaggConfig(enforce=True),
    DisaggConfig(policy="never"),
    DisaggConfig(policy="classic", max_local_prefill_length=10, max_prefill_queue_size=1),
    DisaggConfig(policy="isl_or_load", eff_isl_threshold=16, decode_busy_threshold=0.2),
    DisaggConfig(policy="prefill_load", enforce=True),
)

Applied = tuple[str, InputEvent | None, int]


def spec(worker_id: str, **changes: Any) -> WorkerSpec:
    sizes: dict[str, Any] = {"kv_blocks_total": 64, "max_num_seqs": 8, "max_num_batched_tokens": 64}
    sizes |= {"block_size": BLOCK, "endpoints": ENDPOINTS[:1]}
    return WorkerSpec(**{"worker_id": worker_id, "model": "m", **sizes, **changes})


def joined(worker_id: str, slot: int = 0, **changes: Any) -> WorkerJoined:
    return WorkerJoined(owner_epoch=0, spec=spec(worker_id, **changes), lease="l", slot=slot, from_offset=0)


def pool(**router: Any) -> PoolConfigured:
    return PoolConfigured(pool="default", model="m", block_size=BLOCK, router=RouterConfig(**router))


def encode_pool(**changes: Any) -> PoolConfigured:
    fields: dict[str, Any] = {"pool": "encoders", "model": "m", "block_size": BLOCK, "role": "encode", **changes}
    return PoolConfigured(**fields)


def encoder(worker_id: str, slot: int = 0) -> WorkerJoined:
    return joined(worker_id, slot, pool="encoders", role="encode", kv_events=False)


def decode_pool(**router: Any) -> PoolConfigured:
    return msgspec.structs.replace(pool(**router), role="decode")


def prefill_pool(**router: Any) -> PoolConfigured:
    return msgspec.structs.replace(pool(**router), pool="prefillers", role="prefill")


def prefiller(worker_id: str, slot: int = 0, **changes: Any) -> WorkerJoined:
    return joined(worker_id, slot, pool="prefillers", role="prefill", **changes)


def pool_of(name: str, role: Any = "aggregated", block_size: int = BLOCK, **router: Any) -> PoolConfigured:
    """A pool whose workers `worker_of` run one request each."""
    config = RouterConfig(**{"queue": ONE_EACH, **router})
    return PoolConfigured(pool=name, model="m", block_size=block_size, role=role, router=config)


def worker_of(pool: str, role: Any = "aggregated", slot: int = 0, **changes: Any) -> WorkerJoined:
    return joined(f"w-{pool}", slot, **{"pool": pool, "role": role, "max_num_seqs": 1, **changes})


def one_cell(*names: str, **changes: Any) -> PoolGrid:
    """A grid with one cell, which names the first pool. Each further pool is faster than the one before it."""
    pools = tuple(GridPool(pool=name, priority=-at) for at, name in enumerate(names))
    fields: dict[str, Any] = {"isl_max": 100, "target_max_ms": 100.0, "pools": pools, "cells": ((names[0],),)}
    return PoolGrid(**{**fields, **changes})


def prefilled_by(worker_id: str, worker_epoch: int, **changes: Any) -> Prefilled:
    return msgspec.structs.replace(PREFILLED, worker_id=worker_id, worker_epoch=worker_epoch, **changes)


def request(name: str, blocks: Iterable[int] = (), **changes: Any) -> RequestSubmitted:
    hashes = list(blocks)
    fields: dict[str, Any] = {
        "request_id": name,
        "model": "m",
        "token_ids": pack_u32([7] * (len(hashes) * BLOCK + 2)),
        "sequence_hashes": pack_u64(hashes),
        "reply_slot": 1,
        "timeout_us": 1_000_000,
        "tie_seed": sum(name.encode()),
        "sampling": Sampling(max_tokens=2),
        **changes,
    }
    return RequestSubmitted(**fields)


def query(name: str, blocks: Iterable[int] = (), **changes: Any) -> RouteQueried:
    submitted = request(name, blocks)
    fields: dict[str, Any] = {
        "request_id": name,
        "model": "m",
        "prompt_tokens": submitted.prompt_tokens,
        "sequence_hashes": submitted.sequence_hashes,
        "reply_slot": 1,
        "tie_seed": submitted.tie_seed,
        **changes,
    }
    return RouteQueried(**fields)


def commanded(name: str, action: Any = "clear_kv_blocks", lora_name: str = "", **changes: Any) -> WorkerCommanded:
    of_adapter = {key: changes.pop(key) for key in ("lora_path", "lora_digest", "placement") if key in changes}
    command = Command(action=action, lora_name=lora_name, **of_adapter)
    fields: dict[str, Any] = {"model": "m", "reply_slot": 1, "timeout_us": 1_000_000, **changes}
    return WorkerCommanded(command_id=name, command=command, **fields)


def obeyed(name: str, worker_id: str, epoch: int, action: Any = "clear_kv_blocks", *loras: str) -> CommandDone:
    return CommandDone(
        command_id=name, action=action, worker_id=worker_id, worker_epoch=epoch, owner_epoch=0, loras=loras
    )


def declined(name: str, worker_id: str, epoch: int, error: str = "no") -> CommandRefused:
    return CommandRefused(
        command_id=name, action="clear_kv_blocks", worker_id=worker_id, worker_epoch=epoch, owner_epoch=0, error=error
    )


class Driver:
    """Applies events to a world and keeps the order, as an owner would journal it."""

    def __init__(self, world: World | None = None, custom: CustomPolicies = ONLY_BUILT_IN) -> None:
        self.world = world or World(custom)
        self.now_us = self.world.now_us
        self.applied: list[Applied] = []
        self.decided: list[AnyDecision] = []
        if world is None:
            claim(self.world, 0, tuple(sorted(custom)), EVENTS_VERSION)

    def __call__(self, topic: str, event: InputEvent | None, after_us: int = 10) -> list[Any]:
        self.now_us += after_us
        made = open_run(self.world, self.now_us)
        self.applied.append((topic, event, self.now_us))
        made += step(self.world, topic, event, self.now_us)
        self.decided += made
        return made

    def wait(self, us: int) -> list[Any]:
        self.now_us += us
        made = open_run(self.world, self.now_us)
        self.decided += made
        return made

    def fleet(self, *names: str, **changes: Any) -> Self:
        self("control", pool(**changes))
        for slot, name in enumerate(names):
            self("fleet", joined(name, slot))
        return self

    def encoders(self, *names: str, **changes: Any) -> Self:
        self("control", encode_pool(**changes))
        for slot, name in enumerate(names):
            self("fleet", encoder(name, slot))
        return self

    def disagg(self, prefillers: Iterable[str], decoders: Iterable[str], **router: Any) -> Self:
        """A decode pool, and the prefill pool of its model, whose router is as by default."""
        self("control", decode_pool(**router))
        self("control", prefill_pool())
        for slot, name in enumerate(decoders):
            self("fleet", joined(name, slot, role="decode"))
        for slot, name in enumerate(prefillers):
            self("fleet", prefiller(name, slot))
        return self

    def pools(self, *names: str, role: Any = "aggregated", **router: Any) -> Self:
        """Add pools of the model m, each with one worker `w-NAME` that runs one request."""
        for name in names:
            self("control", pool_of(name, role, **router))
            self("fleet", worker_of(name, role))
        return self

    def rules(self, *grids: PoolGrid, retry: bool = False) -> list[Any]:
        return self("control", PoolRoutingConfigured(model="m", routing=PoolRouting(grids=grids, retry=retry)))

    def drain(self, pool: str, *, drained: bool = True) -> list[Any]:
        return self("control", PoolDrainSet(model="m", pool=pool, drained=drained))

    def canary(self, pool: str, base: str, share: float = 1.0) -> None:
        self("control", PoolCanarySet(model="m", pool=pool, base=base, share=share))

    def ask(self, name: str = "r", blocks: Iterable[int] = PROMPTS[0], **changes: Any) -> Any:
        """Submit a request and return what was decided about it. Names of routing hints are its hints."""
        hints = {key: changes.pop(key) for key in list(changes) if key in RoutingHints.__struct_fields__}
        if hints:
            changes["routing"] = RoutingHints(**hints)
        return self("requests", request(name, blocks, **changes))[-1]

    def query(self, name: str = "q", blocks: Iterable[int] = (), **changes: Any) -> Any:
        (answered,) = self("requests", query(name, blocks, **changes))
        return answered

    def cancel(self, name: str = "r") -> list[Any]:
        return self("requests", RequestCancelled(request_id=name))

    def emit(self, kind: Any, of: RequestRouted | str, **fields: Any) -> list[Any]:
        """Apply a progress event of the worker that has a request, given by its name or its routing."""
        return self("progress", kind(**{**ids_of(self.active(of) if isinstance(of, str) else of), **fields}))

    def active(self, name: str = "r") -> ActiveRequest:
        one = self.world.requests.get(name)
        assert one is not None
        return one

    def finish(self, of: RequestRouted | str, **fields: Any) -> list[Any]:
        return self.emit(RequestFinished, of, **{"finish_reason": "stop", **fields})

    def encoded(self, routed: RequestRouted) -> list[Any]:
        return self.emit(EncodeFinished, routed, encoded=ENCODED)

    def prefilled(self, of: RequestRouted | str, **changes: Any) -> list[Any]:
        one = self.active(of) if isinstance(of, str) else of
        return self.emit(PrefillFinished, of, prefilled=prefilled_by(one.worker_id, one.worker_epoch, **changes))

    def fact(self, kind: Any, worker_id: str, **fields: Any) -> list[Any]:
        """Apply an event of the topic `fleet` about a worker in its epoch."""
        return self("fleet", kind(owner_epoch=0, worker_id=worker_id, worker_epoch=self.epoch(worker_id), **fields))

    def lose(self, worker_id: str, **fields: Any) -> list[Any]:
        return self.fact(WorkerLost, worker_id, **fields)

    def stored(self, worker_id: str, blocks: Iterable[int] = PROMPTS[0], seq: int = 1, **changes: Any) -> list[Any]:
        """Apply the KV event of blocks that a worker has stored."""
        fields: dict[str, Any] = {"worker_epoch": self.epoch(worker_id), "seq": seq, **changes}
        return self("kv-events", BlocksStored(worker_id=worker_id, sequence_hashes=pack_u64(blocks), **fields))

    def report(self, worker_id: str, running: int = 1, waiting: int = 0, used: int = 0, **changes: Any) -> list[Any]:
        load: dict[str, Any] = {"running": running, "waiting": waiting, "kv_blocks_used": used, "kv_blocks_total": 64}
        fields = {"worker_id": worker_id, "worker_epoch": self.epoch(worker_id), **load, **changes}
        return self("metrics", LoadReported(**fields))

    def copy(self) -> "Driver":
        """Return a driver of the world restored from a snapshot, whose digest is that of the original."""
        self.world.take_consumed()  # a snapshot is taken between journal records
        copied = Driver(restore(self.world.snapshot()))
        assert copied.world.digest() == self.world.digest()
        copied.now_us = self.now_us
        return copied

    def epoch(self, worker_id: str) -> int:
        worker = self.world.fleet.get(worker_id)
        return 0 if worker is None else worker.worker_epoch


def ids_of(one: RequestRouted | ActiveRequest) -> dict[str, Any]:
    """Return the fields by which a worker names the request that was routed to it."""
    if isinstance(one, RequestRouted):
        ids: dict[str, Any] = {"request_id": one.request_id, "attempt": one.attempt, "owner_epoch": one.owner_epoch}
    else:
        ids = {"request_id": one.submitted.request_id, "attempt": one.stage_attempt, "owner_epoch": 0}
    return {**ids, "worker_id": one.worker_id, "worker_epoch": one.worker_epoch}


class Recorded:
    """The events of a history, given out as journal records consume them."""

    def __init__(self, applied: Iterable[Applied]) -> None:
        self._left: dict[str, list[InputEvent | None]] = {}
        for topic, event, _ in applied:
            self._left.setdefault(topic, []).append(event)

    def events_of(self, record: JournalRecord) -> dict[str, list[InputEvent | None]]:
        taken: dict[str, list[InputEvent | None]] = {}
        for run in record.consumed:
            if run.count:
                left = self._left[run.topic]
                taken.setdefault(run.topic, []).extend(left[: run.count])
                del left[: run.count]
        return taken


def may_go(world: World, request: ActiveRequest) -> bool:
    config = world.pools[request.submitted.pool]
    try:
        roster = find_candidates(world, config, request.submitted)
        computing = locate_prompt(world, config, request, roster)
        return not must_queue(computing.pool, computing.roster)
    except Ineligible:
        return False


def disagg_policy_of(world: World, request: ActiveRequest) -> str:
    return world.settings.disagg_of(world.pools[request.submitted.pool]).policy


TWICE = ("stored", "command", "obey", "in_store", "prefilled", "rules", "media", "encoded", "call")
ONCE = (
    *sorted(PROGRESS_KINDS - set(TWICE)),
    *("busy", "query", "removed", "cleared", "report", "cancel", "resume", "wait", "decline", "costs"),
    *("not_in_store", "join", "lose", "suspect", "recover", "drain", "announce", "garbage", "pool", "again", "disagg"),
    *("join_prefiller", "lose_prefiller", "join_other", "lose_other", "join_encoder", "lose_encoder"),
)
ACTIONS = ("request",) * 5 + TWICE * 2 + ONCE


@st.composite
def actions(draw: st.DrawFn) -> tuple[str, Any]:
    """One thing that may happen; names and numbers are filled in from the world as it is then."""
    kind = draw(st.sampled_from(ACTIONS))
    numbers = draw(st.tuples(st.integers(0, 9), st.integers(0, 8), st.integers(0, 2)))
    return kind, numbers


histories = st.lists(actions(), max_size=120)


def said_of(one: ActiveRequest, kind: str, number: int) -> InputEvent:
    fields = {**ids_of(one), "worker_id": one.worker_id or "a"}
    match kind:
        case "grow":
            return OutputGrown(**fields, output_tokens=number)
        case "finish":
            return RequestFinished(**fields, finish_reason="length")
        case "fail":
            return RequestFailed(**fields, error="broken")
        case "reject":
            error: dict[str, Any] = {"error": "not now", "status": 503, "code": "engine_overloaded"}
            return AttemptRejected(**fields, **error, retry_after_s=number % 3)
        case "moved":
            return AttemptMoved(**fields, endpoint=WORKERS[number % 3])
        case "encoded":
            return EncodeFinished(**fields, encoded=ENCODED)
        case "not_encoded":
            return EncodeFailed(**fields, error="too large")
        case "not_fetched":
            return TransferFailed(**fields, error="it is gone")
        case "prefilled":
            whose = one.worker_epoch if number % 5 else one.worker_epoch + 1
            kept = prefilled_by(fields["worker_id"], whose, lease_us=1_000 if number % 3 else LEASE_US)
            return PrefillFinished(**fields, prefilled=kept)
        case "not_prefilled":
            return PrefillFailed(**fields, error="no room", status=500 if number % 4 else 400)
        case _:
            return FirstTokenEmitted(**fields, unfetched=number % 4 == 0)


def perform(drive: Driver, number: int, action: tuple[str, Any]) -> None:
    """Turn an action into an event and apply it."""
    kind, (first, depth, third) = action
    worker = WORKERS[third]
    epoch = drive.epoch(worker)
    under_way = drive.world.requests.active()
    one = under_way[first % len(under_way)] if under_way else None
    blocks = PROMPTS[third][:depth]
    match kind:
        case "request":
            timeout = 1_000 if first == 0 else 1_000_000
            fields: dict[str, Any] = {"timeout_us": timeout, "nonce": number, "weight": 1 + third}
            fields |= {"idempotency_key": max(0, depth - 6), "ingress_incarnation": INGRESSES[third]}
            fields |= {"routing": HINTS[(first + depth) % len(HINTS)], "delivery": DELIVERIES[first % 3]}
            drive("requests", request(f"r{number}", blocks, tenant=TENANTS[number % 3], **fields))
        case "media" | "call":
            media, call = {"media": (MEDIA,) * (1 + first % 2)}, {"task": "call", "routing": CALLS[first % 3]}
            drive("requests", request(f"r{number}", blocks, nonce=number, **(media if kind == "media" else call)))
        case "query":
            drive("requests", query(f"q{number}", blocks, routing=HINTS[first % len(HINTS)]))
        case "again":
            drive("requests", request(f"r{first}", blocks, nonce=first))
        case "join_encoder" | "join_prefiller" | "join_other":
            join_another(drive, kind, first, depth, third)
        case "lose_encoder" | "lose_prefiller":
            drive.lose((ENCODERS if kind == "lose_encoder" else PREFILLERS)[third % 2])
        case "lose_other":
            drive.lose("o" if third == 2 else "n")
        case "disagg" if first < 5:
            drive("control", decode_pool(**CONFIGS[depth], disagg=DISAGGS[third]))
        case "disagg":
            drive("control", DisaggregationSet(model="m", disagg=DISAGGS[depth % len(DISAGGS)]))
        case "rules":
            drive("control", pool_rule(first, depth, third))
        case _ if kind in PROGRESS_KINDS and one is not None:
            drive("progress", said_of(one, kind, number))
        case "stored" | "removed" | "cleared" | "in_store" | "not_in_store" | "costs":
            drive(*tier_event(kind, (worker, epoch, number + 1), blocks, first))
        case "report":
            drive.report(worker, first, used=1, kv_blocks_total=9)
        case "cancel" | "resume":
            name, ingress = one.submitted.request_id if one else "nobody", INGRESSES[depth % 3]
            cancelled = RequestCancelled(request_id=name, ingress_incarnation=ingress, is_complete=bool(first % 2))
            resumed = RequestResumed(request_id=name, ingress_incarnation=ingress)
            drive("requests", cancelled if kind == "cancel" else resumed)
        case "wait":
            drive.wait(first * 1_000)
        case "join":
            odd = bool(first % 2)
            ranks: dict[str, Any] = {"dp_size": 1 + odd, "dp_start_rank": 3 * odd}
            addresses = {"kv_store": STORES[depth % 3], "endpoint": worker if depth % 3 else ""}
            ranks |= {"endpoints": ENDPOINTS[: first % 3]}
            drive("fleet", joined(worker, third, **ranks, kv_events=first != 4, **addresses))
        case "lose" | "suspect" | "recover" | "drain":
            drive.fact(FACTS[kind], worker)
        case "announce":
            drive("fleet", OwnershipAnnounced(owner_epoch=0))
        case "garbage":
            drive("requests", None)
        case "pool":
            drive("control", pool(**CONFIGS[first % len(CONFIGS)]))
        case "busy":
            if first == 2:
                drive("control", PolicySet(model="m", pool="default", mode=("kv", "random", "round-robin")[third]))
            thresholds = BusyThresholds(active_prefill_tokens_threshold=depth * 8 if first % 2 else None)
            drive("control", BusyThresholdsSet(model="m", thresholds=thresholds))
        case "command" | "obey" | "decline":
            operate(drive, kind, first, depth, third)
        case _:
            pass


def tier_event(kind: str, position: tuple[str, int, int], blocks: list[int], first: int) -> tuple[str, InputEvent]:
    """Return an event of a worker in an epoch and with a number, with its topic."""
    worker, epoch, seq = position
    of_store: dict[str, Any] = {"store": STORES[1 + first % 2], "worker_id": worker}
    of_cache: dict[str, Any] = {"worker_id": worker, "worker_epoch": epoch, "seq": seq}
    match kind:
        case "costs":
            store = TierCost(tier="store", fixed_us=100.0 * first, block_us=20.0)
            tiers = (store, TierCost(tier="host", fixed_us=5.0, block_us=1.0))
            costs = TierCosts(prefill_block_us=40.0 * (first % 4), tiers=tiers[: first % 3])
            return "metrics", TierCostsMeasured(worker_id=worker, worker_epoch=epoch, costs=costs)
        case "in_store":
            return "kv-events", StoreBlocksAdded(**of_store, sequence_hashes=pack_u64(blocks))
        case "not_in_store":
            stale = first > 4
            return "kv-events", StoreBlocksRemoved(**of_store, sequence_hashes=pack_u64(blocks[first:]), stale=stale)
        case "cleared":
            return "kv-events", CacheCleared(**of_cache)
        case "removed":
            return "kv-events", BlocksRemoved(**of_cache, sequence_hashes=pack_u64(blocks[:2]))
    parent, tier = blocks[first] if first < len(blocks) else None, TIERS[first % 3]
    hashes = pack_u64(blocks[first:])
    return "kv-events", BlocksStored(**of_cache, sequence_hashes=hashes, parent_hash=parent, tier=tier)


def pool_rule(first: int, depth: int, third: int) -> PoolRule:
    """A rule for the choice of pools of the model m."""
    names = ("default", "other", "prefillers")
    if first < 4:
        order = ("default", "other") if depth % 2 else ("other", "default")
        prefill = one_cell("prefillers", "more", role="prefill") if depth < 4 else one_cell("more", role="prefill")
        grids = (one_cell(*order), one_cell(*order, role="decode"), prefill)[: 1 + third]
        return PoolRoutingConfigured(model="m", routing=PoolRouting(grids=grids, retry=first % 2 == 0))
    if first < 7:
        base = ("", "default", "other")[third]
        return PoolCanarySet(model="m", pool="other" if base == "default" else "default", base=base, share=depth / 8)
    return PoolDrainSet(model="m", pool=names[third], drained=depth % 2 == 0)


def join_another(drive: Driver, kind: str, first: int, depth: int, third: int) -> None:
    """A worker of another pool comes, perhaps before its pool."""
    match kind:
        case "join_encoder":
            if first == 0:
                drive("control", encode_pool())
            drive("fleet", encoder(ENCODERS[third % 2], third))
        case "join_prefiller":
            if first < 5:
                drive("control", prefill_pool(**CONFIGS[depth]))
            drive("fleet", prefiller(PREFILLERS[third % 2], third))
        case _:
            role: Any = "prefill" if third == 2 else ("decode" if first % 4 == 0 else "aggregated")
            name, where = ("o", "more") if role == "prefill" else ("n", "other")
            drive("control", PoolConfigured(pool=where, model="m", block_size=BLOCK, role=role))
            drive("fleet", joined(name, first, pool=where, role=role, max_num_seqs=1))


def operate(drive: Driver, kind: str, first: int, depth: int, third: int) -> None:
    """A command, or a worker's answer to one that it has or has not."""
    worker = WORKERS[third]
    if kind == "command":
        # Of ten ids: some come again, with the same nonce and with others.
        name, wanted = f"c{(first + third) % 10}", ("load_lora", "unload_lora", "sleep")[third]
        whom = (worker,) if depth < 2 else ()
        timeout = 1_000 if first == 0 else 1_000_000
        drive("control", commanded(name, wanted, worker_ids=whom, timeout_us=timeout, nonce=depth % 2))
        return
    under_way = drive.world.commands.pending()
    one = under_way[first % len(under_way)] if under_way else None
    name = one.command_id if one is not None and depth < 7 else f"c{first}"
    epoch = drive.epoch(worker) if depth < 6 else first
    if kind == "decline":
        drive("progress", declined(name, worker, epoch))
        return
    action = "sleep" if one is None else one.command.action
    drive("progress", obeyed(name, worker, epoch, action, *("x", "y", "z")[: depth % 3]))


def perform_all(drive: Driver, history: list[tuple[str, Any]], start: int = 0) -> Driver:
    for number, action in enumerate(history, start):
        perform(drive, number, action)
    return drive


ROLES: dict[str, Role] = {"a": "aggregated", "b": "aggregated", "d": "decode", "e": "decode", "p": "prefill"}
OTHER_POLICY = "mine.Policy"


def setting(chance: random.Random) -> PoolSetting:
    """Return a random change of settings of one of two models."""
    model, name = chance.choice(("m", "n")), chance.choice(list(ROLES))
    pool = f"{name}-{model}"
    router = RouterConfig(mode=chance.choice(("kv", "random")))
    busy = BusyThresholds(active_prefill_tokens_threshold=chance.choice((None, 5, 7)))
    changes: list[PoolSetting] = [
        PoolConfigured(pool=pool, model=model, block_size=16, role=ROLES[name], router=router),
        BusyThresholdsSet(model=model, thresholds=busy),
        DisaggregationSet(model=model, disagg=DisaggConfig(eff_isl_threshold=chance.randint(1, 3)), operator="ann"),
        PolicySet(model=model, pool=pool, mode=chance.choice(("kv", "random", "round-robin", OTHER_POLICY))),
        PoolRoutingConfigured(model=model, routing=PoolRouting(retry=chance.random() < 0.5)),
        PoolCanarySet(model=model, pool=pool, base=chance.choice(("", "a-m", "b-n")), share=0.25),
        PoolDrainSet(model=model, pool=pool, drained=chance.random() < 0.7),
    ]
    return chance.choice(changes)


def depths_by_rank(load: FleetLoad, prompt: Sequence[int]) -> dict[tuple[str, int], int]:
    """Return `active_depths` by worker id and rank."""
    return {
        (rank.worker_id, rank.rank): depth
        for mask, depth in load.active_depths(prompt)
        for rank in load.ranks()
        if mask >> rank.slot & 1
    }
