"""Describe input events in one short line each, for reports."""

from typing import assert_never

import msgspec

from forebay.core.step import InputEvent
from forebay.events.base import U64_BYTES
from forebay.events.control import (
    BusyThresholdsSet,
    Command,
    DisaggConfig,
    DisaggregationSet,
    PolicySet,
    PoolConfigured,
    RouterConfig,
    WorkerCommanded,
)
from forebay.events.fleet import (
    IngressJoined,
    IngressLost,
    OwnershipAnnounced,
    WorkerDraining,
    WorkerJoined,
    WorkerLost,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.kv import (
    AnyKvEvent,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    StoreBlocksAdded,
    StoreBlocksRemoved,
)
from forebay.events.metrics import LoadReported, TierCostsMeasured
from forebay.events.pools import PoolCanarySet, PoolDrainSet, PoolRouting, PoolRoutingConfigured
from forebay.events.progress import (
    CommandDone,
    CommandRefused,
    EngineFailed,
    ProgressEvent,
)
from forebay.events.requests import RequestCancelled, RequestSubmitted, RouteQueried

UNDECODED = "undecodable"


class EventSummary(msgspec.Struct, kw_only=True):
    """One input event in a report.

    Attributes:
        offset: offset of the event; None for a clock tick, which is not on a topic.
        now_us: the owner's clock when the event was applied, in microseconds; None if unknown.
    """

    topic: str
    offset: int | None
    type: str
    text: str
    now_us: int | None = None


def event_tag(event: InputEvent | None) -> str:
    """Return the wire tag of an event, or `UNDECODED` for a record that did not decode."""
    return UNDECODED if event is None else str(type(event).__struct_config__.tag)


def describe_event(event: InputEvent | None) -> str:
    """Return a one-line description of an event, with the operator who caused it."""
    operator = getattr(event, "operator", "")
    return _describe(event) + (f", by {operator}" if operator else "")


def _describe(event: InputEvent | None) -> str:
    match event:
        case None:
            return "a record that did not decode and had no effect"
        case BlocksStored() | BlocksRemoved() | CacheCleared() | StoreBlocksAdded() | StoreBlocksRemoved():
            return _describe_cache(event)
        case RequestSubmitted():
            pin = f", KV pinned for {event.kv_pin_s} s" if event.kv_pin_s else ""
            return f"{event.request_id}: {event.prompt_tokens} tokens, {_blocks(event.sequence_hashes)}{pin}"
        case RouteQueried():
            return f"{event.request_id}: route query, {event.prompt_tokens} tokens, {_blocks(event.sequence_hashes)}"
        case RequestCancelled():
            return f"{event.request_id}: {event.reason}"
        case ProgressEvent():
            return f"{event.request_id}, attempt {event.attempt}: {event.SUMMARY.format(event)} at {event.worker_id}"
        case LoadReported():
            used = f"{event.kv_blocks_used} of {event.kv_blocks_total} blocks"
            return f"{event.worker_id}/{event.rank}: {event.running} running, {event.waiting} waiting, {used}"
        case TierCostsMeasured():
            tiers = ", ".join(f"{one.tier} {one.fixed_us:g} + {one.block_us:g}" for one in event.costs.tiers) or "none"
            computed = f"{event.costs.prefill_block_us:g} µs to compute a block"
            return f"{event.worker_id}/{event.rank}: {computed}; µs to load, and per block: {tiers}"
        case WorkerJoined():
            return f"{event.spec.worker_id} joins {event.spec.pool}, slot {event.slot}, {event.spec.dp_size} ranks"
        case WorkerSuspect() | WorkerRecovered() | WorkerDraining() | WorkerLost():
            reason = f": {event.reason}" if event.reason else ""
            return f"{event.worker_id}, epoch {event.worker_epoch}{reason}"
        case IngressJoined():
            return f"the ingress {event.ingress_id} joins as {event.incarnation}"
        case IngressLost():
            return f"the ingress {event.ingress_id} ({event.incarnation}) is lost: {event.reason}"
        case OwnershipAnnounced():
            return f"the owner of epoch {event.owner_epoch}"
        case PoolConfigured():
            return f"the pool {event.pool} of {event.model} routes by {_router(event.router)}"
        case BusyThresholdsSet():
            return f"busy thresholds of {event.model}"
        case DisaggregationSet():
            return f"disaggregation of {event.model}: {_disagg(event.disagg)}"
        case PolicySet():
            return f"the pool {event.pool} of {event.model} routes by {event.mode}"
        case PoolRoutingConfigured():
            return f"pools of {event.model} are chosen {_pool_rules(event.routing)}"
        case PoolCanarySet(base=""):
            return f"the pool {event.pool} of {event.model} is no canary any more"
        case PoolCanarySet():
            return f"the pool {event.pool} of {event.model} gets {event.share:.1%} of the requests for {event.base}"
        case PoolDrainSet():
            gets = "no new requests" if event.drained else "requests again"
            return f"the pool {event.pool} of {event.model} gets {gets}"
        case WorkerCommanded():
            pool = f" in the pool {event.pool}" if event.pool else ""
            whom = ", ".join(event.worker_ids) or f"every worker of {event.model}"
            return f"{event.command_id}: {_command(event.command)}, sent to {whom}{pool}"
        case CommandDone():
            return f"{event.command_id}: {event.worker_id} executed {event.action}"
        case CommandRefused():
            return f"{event.command_id}: {event.worker_id} refused {event.action} ({event.error})"
        case EngineFailed():
            return f"{event.worker_id}: its engine {event.engine} failed ({event.error})"
        case _:
            assert_never(event)


def _describe_cache(event: AnyKvEvent) -> str:
    match event:
        case BlocksStored():
            after = "a new sequence" if event.parent_hash is None else f"after {event.parent_hash:016x}"
            where = f"{event.worker_id}/{event.rank}"
            return f"{where} stores {_blocks(event.sequence_hashes)} on {event.tier}, {after} (seq {event.seq})"
        case BlocksRemoved():
            where = f"{event.worker_id}/{event.rank}"
            return f"{where} removes {_blocks(event.sequence_hashes)} from {event.tier} (seq {event.seq})"
        case CacheCleared():
            return f"{event.worker_id}/{event.rank} cleared its cache (seq {event.seq})"
        case StoreBlocksAdded():
            return f"the shared store {event.store} has {_blocks(event.sequence_hashes)}, from {event.worker_id}"
        case StoreBlocksRemoved():
            why = "lacks" if event.stale else "lost"
            return f"the shared store {event.store} {why} {_blocks(event.sequence_hashes)}, from {event.worker_id}"
        case _:
            assert_never(event)


def _pool_rules(routing: PoolRouting) -> str:
    grids = [f"by a grid of {grid.role} pools {', '.join(one.pool for one in grid.pools)}" for grid in routing.grids]
    retry = ", failed requests move to faster pools" if routing.retry else ""
    return ("; ".join(grids) or "by name") + retry


def _command(command: Command) -> str:
    return f"{command.action} {command.lora_name}" if command.lora_name else command.action


def _router(config: RouterConfig) -> str:
    """Return the routing mode and every setting that is not at its default."""
    return ", ".join([config.mode, *_changed(config, RouterConfig(), "mode")])


def _disagg(config: DisaggConfig) -> str:
    return ", ".join([config.policy, *_changed(config, DisaggConfig(), "policy")])


def _changed(config: msgspec.Struct, defaults: msgspec.Struct, skipped: str) -> list[str]:
    names = [name for name in config.__struct_fields__ if getattr(config, name) != getattr(defaults, name)]
    return [f"{name} {getattr(config, name)}" for name in names if name != skipped]


def _blocks(packed: bytes) -> str:
    count = len(packed) // U64_BYTES
    return f"{count} block{'' if count == 1 else 's'}"
