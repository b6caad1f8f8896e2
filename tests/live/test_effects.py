"""Effects of decisions: work items, responses, worker commands with their outcomes, and blocks of shared stores."""

import asyncio
import contextlib
import functools
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay.core.block_hashes import sequence_hashes
from forebay.events.base import U64_BYTES, pack_u32, pack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import Command, PoolConfigured, RouterConfig, WorkerCommanded
from forebay.events.decisions import (
    AbortReason,
    AdapterPlaced,
    CacheResyncRequested,
    CommandEnded,
    CommandRefusal,
    CommandSent,
    CommandTarget,
    CostTerms,
    KvReleased,
    RejectReason,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    RouteAnswered,
    ScoredCandidate,
)
from forebay.events.fleet import WorkerLost
from forebay.events.kv import BlocksStored, CacheCleared, StoreBlocksAdded, StoreBlocksRemoved
from forebay.events.progress import AttemptMoved, CommandDone, CommandRefused
from forebay.events.requests import RequestSubmitted, RoutingHints, Task
from forebay.events.tokens import CommandResponse, DestinationSelected, RouteResponse
from forebay.events.topics import CONTROL, DEAD_LETTERS, DECISIONS, FLEET, KV_EVENTS, PROGRESS, TOKENS, work_topic
from forebay.events.work import ReannounceCache, ReleaseKv, WorkCancelled, WorkerCommand, WorkItem
from forebay.ingress.metrics import IngressMetrics
from forebay.live.owner.effects import ABORTED, REJECTED, encode_effects
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import Owner, steady_clock
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.adapter_cache import AdapterCache
from tests.harness.faulty_log import Crashed, FaultyLog
from tests.live.shared import SteppedSystem, admit, background, flush, proven, samples
from tests.system import BLOCK, MODEL, SLOT, System, settings, submitted, until
from tests.workers.adapter_files import files, written

WORK = work_topic("default")
PROMPT = list(range(12))
HOUR_US = 3_600_000_000


class EffectsSystem(SteppedSystem):
    """A system whose workers receive work and commands."""

    def items(self, slot: int = 0) -> list[WorkItem]:
        return self.events(WORK, WorkItem, slot)

    def command(self, name: str, action: Any = "clear_kv_blocks", **changes: Any) -> None:
        lora = {key: changes.pop(key) for key in ("lora_name", "lora_path", "placement") if key in changes}
        fields: dict[str, Any] = {
            "command_id": name,
            "model": MODEL,
            "command": Command(action=action, **lora),
            "reply_slot": SLOT,
            "timeout_us": 60_000_000,
            **changes,
        }
        self.append(CONTROL, WorkerCommanded(**fields))

    def sent(self, slot: int = 0) -> list[WorkerCommand]:
        return self.events(WORK, WorkerCommand, slot)

    def complete(self, sent: WorkerCommand, worker_id: str, *loras: str) -> None:
        done = CommandDone(
            command_id=sent.command_id,
            action=sent.command.action,
            worker_id=worker_id,
            worker_epoch=sent.worker_epoch,
            owner_epoch=sent.owner_epoch,
            loras=loras,
        )
        self.append(PROGRESS, done)

    def responses(self, name: str) -> list[CommandResponse]:
        return [event for event in self.events(TOKENS, CommandResponse, SLOT) if event.command_id == name]

    async def outcomes(self, name: str) -> dict[str, tuple[str, tuple[str, ...]]]:
        """Wait for the response to a command, and return the status and the adapters by worker."""
        await until(lambda: self.responses(name))
        return {one.worker_id: (one.status, one.loras) for one in self.responses(name)[0].outcomes}


@pytest.fixture
def system(log: SqliteLog) -> EffectsSystem:
    return EffectsSystem(log)


def decoded(drafts: list[Draft], topic: Any) -> list[Any]:
    return [decode(topic, draft.value) for draft in drafts if draft.topic == topic.name]


def slot_of(owner: Owner, worker_id: str) -> int:
    worker = owner.world.fleet.get(worker_id)
    assert worker is not None
    return worker.slot


@pytest.mark.parametrize("reason", get_args(RejectReason))
def test_a_rejection_has_its_status_for_requests_and_route_queries(reason: RejectReason) -> None:
    refused = RequestRejected(owner_epoch=3, request_id="r", reply_slot=SLOT, reason=reason, message="no")
    (draft,) = encode_effects(MODEL, refused)
    (ended,) = decoded([draft], TOKENS)
    queried = RouteAnswered(owner_epoch=3, request_id="q", reply_slot=SLOT, reason=reason, message="no")
    (answered,) = decoded(encode_effects(MODEL, queried), TOKENS)
    for error in (ended.error, answered.error):
        assert (error.status, error.code, error.message) == (*REJECTED[reason], "no")
    assert (draft.partition, ended.request_id, ended.owner_epoch, answered.request_id) == (SLOT, "r", 3, "q")


@pytest.mark.parametrize(("can", "task"), [("generate", "embed"), ("embed", "generate")])
async def test_a_task_that_no_worker_can_do_is_an_error_of_the_client(
    system: EffectsSystem, can: Task, task: Task
) -> None:
    system.join("w0", tasks=(can,))
    async with system.owned(fleet=1):
        await system.serve("plain", PROMPT, task=task)
        await system.serve("hinted", PROMPT, task=task, lora_name="x")  # which a worker may load
    plain, hinted = (system.ends()[name][0].error for name in ("plain", "hinted"))
    assert plain is not None
    assert hinted is not None
    assert (plain.status, plain.code, hinted.status) == (400, "unsupported_task", 503)
    assert plain.message == f"no ready worker of the pool default can {task}; use another model"


@pytest.mark.parametrize("reason", get_args(AbortReason))
def test_an_aborted_request_has_its_status_and_its_work_is_cancelled(reason: AbortReason) -> None:
    aborted = RequestAborted(
        owner_epoch=3, request_id="r", reply_slot=SLOT, reason=reason, message="no", attempt=1, pool="default"
    )
    (ended,) = decoded(encode_effects(MODEL, aborted), TOKENS)
    assert (ended.error.status, ended.error.code) == ABORTED[reason]
    drafts = encode_effects(MODEL, msgspec.structs.replace(aborted, worker_id="w", worker_epoch=7, slot=2))
    (cancelled,) = decoded(drafts, WORK)
    assert cancelled == WorkCancelled(
        request_id="r", attempt=1, owner_epoch=3, worker_epoch=7, group=MODEL, worker_id="w"
    )


@pytest.mark.parametrize("reason", get_args(CommandRefusal))
def test_every_refused_command_is_reported_with_a_status(reason: CommandRefusal) -> None:
    refused = CommandSent(command_id="c", reply_slot=SLOT, action="sleep", reason=reason, message="no")
    (draft,) = encode_effects(MODEL, refused)
    responses = msgspec.msgpack.decode(draft.value)
    assert draft.partition == SLOT
    assert (responses["error"]["message"], 400 <= responses["error"]["status"] < 600) == ("no", True)
    assert encode_effects(MODEL, CommandSent(command_id="c", reply_slot=SLOT, action="sleep")) == []


def test_a_kv_release_is_sent_to_the_partition_of_the_holders_slot() -> None:
    holder = CommandTarget(worker_id="p", worker_epoch=7, pool="default", slot=2)
    released = KvReleased(owner_epoch=3, request_id="r", attempt=2, holder=holder, reason="not_fetched")
    release = ReleaseKv(request_id="r", attempt=2, owner_epoch=3, worker_epoch=7, group=MODEL, worker_id="p")
    assert encode_effects(MODEL, released) == [Draft(WORK.name, 2, encode(WORK, release))]


def test_a_route_query_is_answered_and_a_held_request_waits() -> None:
    terms = CostTerms(
        cost=1.0, prefill_blocks=1.0, overlap_credit=0.0, decode_blocks=0.0, active_requests=0, device_overlap=0
    )
    candidates = tuple(ScoredCandidate(worker_id=name, rank=rank, terms=terms) for rank, name in enumerate("ab"))
    answer: dict[str, Any] = {"owner_epoch": 3, "request_id": "q", "pool": "default", "mode": "kv"}
    answer |= {"choice": candidates[1], "candidates": candidates, "would_wait": True}
    (draft,) = encode_effects(MODEL, RouteAnswered(reply_slot=SLOT, **answer))
    assert (draft.topic, draft.partition) == (TOKENS.name, SLOT)
    assert decoded([draft], TOKENS) == [RouteResponse(group=MODEL, **answer)]
    held = RequestHeld(request_id="r", pool="default", queue_class="default", uncached_tokens=5, ahead=0)
    assert encode_effects(MODEL, held) == []


# Work items


@pytest.mark.parametrize("tracked", [False, True])
async def test_a_work_item_carries_the_options_of_its_engine(system: EffectsSystem, *, tracked: bool) -> None:
    system.join("w0", loras=("lora",))
    router = RouterConfig(track_output_blocks=tracked)
    pool = PoolConfigured(pool="default", model=MODEL, block_size=BLOCK, router=router)
    async with system.owned(pool=pool, dies=True, fleet=1):
        hints = RoutingHints(priority=-7)
        system.send(submitted("r", PROMPT, lora_name="lora", cache_namespace="mine", routing=hints, kv_pin_s=300))
        await until(system.items)
    async with system.owned(pool=pool):
        await until(lambda: len(system.items()) == 2)
        system.send(submitted("plain", PROMPT))
        await until(lambda: len(system.items()) == 3)
    *both, plain = system.items()
    for item in both:
        options = item.lora_name, item.cache_namespace, item.priority, item.report_output, item.kv_pin_s
        assert options == ("lora", "mine", -7, tracked, 300)
    assert (plain.kv_pin_s, plain.store_blocks) == (0, 0), "there is no shared store"


async def test_work_is_sent_again_only_if_the_owner_died(log: SqliteLog, system: EffectsSystem) -> None:
    def has_items(count: int) -> bool:
        return len(system.items()) == count

    system.join("w0")
    for dies, items in ((False, 1), (True, 1), (False, 2), (False, 2)):
        async with system.owned(dies=dies, fleet=1) as owner:
            if not system.decisions(RequestRouted):
                system.send(submitted("r", PROMPT))
                await until(system.items)
            await until(lambda: owner.journal.end == log.next_offset(DECISIONS.name, 0))
            await until(functools.partial(has_items, items))
    assert has_items(2)


async def test_a_cache_with_a_gap_is_requested_again_until_it_is_announced(system: EffectsSystem) -> None:
    system.join("w0")
    epochs = []

    def announce(event: type[BlocksStored | CacheCleared], seq: int, **fields: Any) -> None:
        system.append(KV_EVENTS, event(worker_id="w0", worker_epoch=worker.worker_epoch, seq=seq, **fields))

    async with system.owned(fleet=1) as owner:
        epochs.append(owner.journal.epoch)
        (worker,) = owner.world.fleet.workers()
        for seq, *blocks in ((1, 10, 11), (4, 12), (6, 13)):
            announce(BlocksStored, seq, sequence_hashes=pack_u64(blocks))
        await until(lambda: owner.world.index.blocks_held("w0", 0, "device") == 4)
        # The event is applied before its decision is journalled.
        await until(lambda: system.decisions(CacheResyncRequested))
        (resync,) = system.decisions(CacheResyncRequested)
        assert (resync.worker_id, resync.rank, resync.expected_seq, resync.found_seq) == ("w0", 0, 2, 4)
        await until(lambda: system.events(WORK, ReannounceCache))
    async with system.owned() as owner:
        epochs.append(owner.journal.epoch)
        await until(lambda: len(system.events(WORK, ReannounceCache)) == 2)
        announce(CacheCleared, 7)
        announce(BlocksStored, 8, sequence_hashes=pack_u64([20]))
        await until(lambda: owner.world.index.blocks_held("w0", 0, "device") == 1)
    async with system.owned():
        pass
    to: dict[str, Any] = {"worker_epoch": worker.worker_epoch, "rank": 0, "group": MODEL, "worker_id": "w0"}
    assert system.events(WORK, ReannounceCache) == [
        ReannounceCache(owner_epoch=epoch, above_seq=above_seq, **to)
        for epoch, above_seq in zip(epochs, (4, 6), strict=True)
    ]


class JumpingClock:
    """A clock that jumps ahead by an hour once it was read `reads` times."""

    def __init__(self) -> None:
        self.now_us = HOUR_US
        self.reads = -1

    def __call__(self) -> int:
        if self.reads == 0:
            self.now_us += HOUR_US
        self.reads -= 1
        return self.now_us


async def test_a_request_that_moves_and_ends_in_one_turn_sends_no_work(system: EffectsSystem) -> None:
    """The worker is lost, the request moves to another, and its deadline expires before the turn ends."""
    clock = JumpingClock()
    system.join("w0")
    system.join("w1")
    await system.own(clock)
    await system.turn(0, system.send, submitted("r", PROMPT, timeout_us=1_000_000))
    (routed,) = system.decisions(RequestRouted)
    clock.reads = 1  # jumps in the turn in which the worker is lost
    await system.turn(0, system.lose, routed.worker_id)
    await flush(system.log)
    _, moved = system.decisions(RequestRouted)
    (aborted,) = system.decisions(RequestAborted)
    assert (moved.attempt, aborted.attempt, aborted.reason) == (2, 2, "deadline")
    assert [item.attempt for slot in range(2) for item in system.items(slot)] == [1]
    assert [event.attempt for event in system.events(WORK, WorkCancelled, moved.slot)] == [2]
    await system.owner.close()


# A scrape contains Dynamo's metric names, so that a dashboard made for Dynamo works. Source: Dynamo's metrics catalog.
# docs/divergence.md lists the metrics that forebay does not export.

DYNAMO = {
    "dynamo_component_router_requests_total": {"model"},
    "dynamo_component_router_non_max_overlap_selections_total": {"model"},
    "dynamo_component_router_overlap_blocks_lost_sum": {"model"},
    "dynamo_component_router_overlap_blocks_lost_count": {"model"},
    "dynamo_component_kv_cache_events_applied": {"event_type", "status"},
    "dynamo_frontend_router_queue_pending_requests": {"model"},
    "dynamo_frontend_worker_active_decode_blocks": {"worker_id", "dp_rank"},
    "dynamo_frontend_worker_active_prefill_tokens": {"worker_id", "dp_rank"},
    "dynamo_frontend_model_total_kv_blocks": {"model"},
    "dynamo_frontend_model_max_num_seqs": {"model"},
    "dynamo_frontend_model_max_num_batched_tokens": {"model"},
    "dynamo_frontend_model_kv_cache_block_size": {"model"},
    "dynamo_frontend_requests_total": {"model", "endpoint", "request_type", "status"},
    "dynamo_frontend_model_rejection_total": {"model", "endpoint"},
    "dynamo_frontend_inflight_requests": {"model"},
    "dynamo_frontend_disconnected_clients": {"model"},
    "dynamo_frontend_time_to_first_token_seconds_bucket": {"model", "le"},
    "dynamo_frontend_inter_token_latency_seconds_bucket": {"model", "le"},
    "dynamo_frontend_request_duration_seconds_bucket": {"model", "le"},
    "dynamo_frontend_input_sequence_tokens_bucket": {"model", "le"},
    "dynamo_frontend_output_sequence_tokens_bucket": {"model", "le"},
    "dynamo_frontend_cached_tokens_bucket": {"model", "le"},
}


async def test_metrics_are_exported_under_dynamos_names(system: EffectsSystem) -> None:
    registry = CollectorRegistry()
    frontend = IngressMetrics(registry, MODEL)
    frontend.ended("completions", stream=True, status="success")
    frontend.rejected("completions")
    async with system.started(workers=1), system.owned(fleet=1) as owner:
        system.send(submitted("r", PROMPT))
        system.send(submitted("wrong", PROMPT, model="another"))
        await until(lambda: len(system.ends()) == 2 and not len(owner.world.requests))
        owner.world.counts.update(non_max_overlap_selections=2, overlap_blocks_lost=5)
        metrics = samples(owner)
        registry.register(OwnerMetrics(owner, MODEL))
        text = generate_latest(registry).decode()
    shown: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            shown.setdefault(sample.name, set()).update(sample.labels)
    assert {name: labels for name, labels in DYNAMO.items() if not labels <= shown.get(name, set())} == {}
    assert metrics["dynamo_component_router_requests_total",] == 1
    assert metrics["forebay_router_requests_rejected_total", "wrong_model"] == 1
    assert ("forebay_owner_events_total", "rejected_wrong_model") not in metrics
    assert metrics["dynamo_component_router_non_max_overlap_selections_total",] == 2
    assert metrics["dynamo_component_router_overlap_blocks_lost_sum",] == 5
    assert metrics["dynamo_component_router_overlap_blocks_lost_count",] == 2
    assert metrics["dynamo_component_kv_cache_events_applied", "stored", "ok"] >= 1
    assert metrics["dynamo_component_kv_cache_events_applied", "cleared", "ok"] == 0
    assert metrics["dynamo_frontend_router_queue_pending_requests", "default", "default", "0"] == 0
    assert metrics["dynamo_frontend_model_total_kv_blocks",] == 256
    assert metrics["dynamo_frontend_model_kv_cache_block_size",] == BLOCK
    assert metrics["forebay_owner_snapshots_total",] == 0
    assert metrics["forebay_owner_snapshot_age_seconds",] >= 0


# Worker commands: sent once to each worker, sent again after a takeover, always with an outcome


async def test_a_new_owner_resends_pending_commands_and_reports_the_outcome(
    log: SqliteLog, system: EffectsSystem
) -> None:
    system.join("w0")
    system.join("w1")
    async with system.owned(fleet=2) as owner:
        first_epoch = owner.journal.epoch
        system.command("c", "load_lora", lora_name="x", lora_path="/x", nonce=7)
        slots = slot_of(owner, "w0"), slot_of(owner, "w1")
        await until(lambda: system.sent(0) and system.sent(1))
        system.complete(system.sent(slots[0])[0], "w0", "x")
        await until(lambda: log.next_offset(PROGRESS.name, 0) == owner.world.view.get(PROGRESS.name))
        assert system.responses("c") == []
    async with system.owned() as owner:
        await until(lambda: len(system.sent(slots[1])) == 2)
        assert len(system.sent(slots[0])) == 1, "a worker that has answered receives the command only once"
        first, again = system.sent(slots[1])
        assert (first.owner_epoch, again.owner_epoch) == (first_epoch, owner.journal.epoch)
        assert (again.command_id, again.nonce, again.command) == ("c", 7, first.command)
        assert again.worker_epoch == first.worker_epoch
        assert 0 < again.timeout_us <= first.timeout_us
        worker = owner.world.fleet.get("w0")
        assert worker is not None
        assert worker.spec.loras == ("x",)
        system.complete(again, "w1", "x")
        assert await system.outcomes("c") == {"w0": ("done", ("x",)), "w1": ("done", ("x",))}
    assert len(system.decisions(CommandEnded)) == 1


async def test_an_outcome_that_may_be_unreported_is_reported_again(system: EffectsSystem) -> None:
    async with system.owned(dies=True):
        system.command("nobody")
        await system.outcomes("nobody")
    async with system.owned():
        pass
    first, again = system.responses("nobody")
    assert first.error is not None
    assert first.error.code == "no_workers"
    assert msgspec.structs.replace(again, owner_epoch=first.owner_epoch) == first


@pytest.mark.parametrize("has_owner", [True, False])
async def test_a_command_to_a_worker_that_leaves_has_the_outcome_left(system: EffectsSystem, has_owner: bool) -> None:
    """The worker leaves while its owner runs, or while nobody owns the group."""
    system.join("w0")
    async with system.owned(fleet=1):
        system.command("c", "sleep")
        await until(system.sent)
        if has_owner:
            system.leases.release(MODEL, "w0", "w0-1")
            await system.outcomes("c")
            assert system.events(FLEET, WorkerLost)
    system.leases.release(MODEL, "w0", "w0-1")
    async with system.owned():
        assert await system.outcomes("c") == {"w0": ("left", ())}
    (outcome,) = system.responses("c")[0].outcomes
    assert outcome.message == "the worker was lost before it responded"


async def test_a_command_times_out_without_other_events(system: EffectsSystem) -> None:
    system.join("w0")
    async with system.owned(fleet=1):
        system.command("c", timeout_us=1_000)
        assert await system.outcomes("c") == {"w0": ("timed_out", ())}


async def test_a_command_that_ends_in_the_turn_of_its_dispatch_is_not_sent(system: EffectsSystem) -> None:
    """The deadline of the command expires before the turn ends."""
    system.join("w0")
    await system.own(steady_clock())
    system.command("c", timeout_us=1)
    while not system.responses("c"):
        await system.owner.turn()
        await asyncio.sleep(0)
    await system.owner.close()
    assert len(system.decisions(CommandSent)) == 1
    assert system.sent() == []


async def test_command_outcomes_are_counted(system: EffectsSystem) -> None:
    system.join("w0")
    async with system.owned(fleet=1) as owner:
        system.command("waits")
        system.command("late", timeout_us=1)
        system.command("nowhere", worker_ids=("w9",))
        await until(lambda: system.responses("late") and system.responses("nowhere"))
        metrics = samples(owner)
    assert metrics["forebay_owner_commands_total", "timed_out"] == 1
    assert metrics["forebay_owner_commands_total", "unknown_worker"] == 1
    assert metrics["forebay_owner_commands_in_flight",] == 1
    assert not [name for name in metrics if name[-1].startswith("command_")]


async def test_an_unknown_command_is_a_dead_letter(log: SqliteLog, system: EffectsSystem) -> None:
    event = WorkerCommanded(
        command_id="c", model=MODEL, command=Command(action="sleep"), reply_slot=SLOT, timeout_us=1_000_000
    )
    value = encode(CONTROL, event).replace(b'"sleep"', b'"dream"')
    async with system.owned() as owner:
        log.append_soon([Draft(CONTROL.name, 0, value)])
        await until(lambda: log.records(DEAD_LETTERS.name, 0, 0, 10))
        assert owner.dead_letters == 1
    (letter,) = log.records(DEAD_LETTERS.name, 0, 0, 10)
    assert letter.value == value
    assert "dream" in (letter.headers or {})["reason"]
    assert system.decisions(CommandSent) == []


async def test_an_engine_refusal_does_not_stop_other_commands(system: EffectsSystem) -> None:
    async with system.started(1), system.owned(fleet=1):
        system.command("load", "load_lora", lora_name="x", lora_path="/there/is/none")
        await system.outcomes("load")
        (refused,) = system.events(PROGRESS, CommandRefused)
        assert refused.error == "no such directory: /there/is/none"
        await system.serve("r", PROMPT)
    (outcome,) = system.responses("load")[0].outcomes
    assert (outcome.status, outcome.message) == ("refused", refused.error)


async def test_owner_loads_the_adapters_of_requests(log: SqliteLog, system: EffectsSystem, tmp_path: Path) -> None:
    async with system.started(1), system.owned(fleet=1) as owner:
        for worker in system.workers.values():
            worker.commands.adapters = AdapterCache(tmp_path / "cache")
        for name in ("x", "y"):
            path = written(tmp_path / name, files(name.encode()))
            system.command(f"add-{name}", "load_lora", lora_name=name, lora_path=path, placement="auto")
        await until(lambda: system.responses("add-x") and system.responses("add-y"))
        for name in ("x", "y", "x"):
            await system.serve(f"r-{name}-{len(system.decisions(RequestRouted))}", PROMPT, lora_name=name)
        metrics = samples(owner)
    assert [one.lora_name for one in system.decisions(AdapterPlaced)] == ["x", "y"]
    assert metrics["forebay_owner_adapters_total", "loaded"] == 2
    done = [one for one in system.events(PROGRESS, CommandDone) if one.lora_digest]
    assert [one.loras for one in done] == [("x",), ("x", "y")]
    await proven(log)


async def test_new_owner_sends_a_load_again(system: EffectsSystem) -> None:
    system.join("w0", max_loras=2)
    async with system.owned(fleet=1):
        system.command("add", "load_lora", lora_name="x", lora_path="s3://b/x", placement="auto")
        await until(lambda: system.responses("add"))
        system.send(submitted("r", PROMPT, lora_name="x"))
        await until(system.sent)
    async with system.owned(fleet=1):
        await until(lambda: len(system.sent()) == 2)
    first, again = system.sent()
    assert (first.command_id, first.command) == (again.command_id, again.command)
    assert again.owner_epoch > first.owner_epoch


# Shared stores: hints to workers, a store that survives everybody, and metrics

STORED_PROMPT = list(range(5 * BLOCK))
STORED = sequence_hashes(pack_u32(STORED_PROMPT), BLOCK)


def added(count: int, store: str = "s") -> StoreBlocksAdded:
    return StoreBlocksAdded(store=store, worker_id="w0", sequence_hashes=STORED[: count * U64_BYTES])


async def known(owner: Owner, **sizes: int) -> None:
    await until(lambda: owner.world.index.stores.sizes() == sizes)


async def test_the_work_item_says_how_many_blocks_the_store_should_have(system: EffectsSystem) -> None:
    system.join("w0", kv_store="s")
    async with system.owned(dies=True, fleet=1) as owner:
        system.append(KV_EVENTS, added(3))
        await known(owner, s=3)
        system.send(submitted("r", STORED_PROMPT))
        await until(system.items)
    async with system.owned():
        await until(lambda: len(system.items()) == 2)
    # The hint is lost with the owner that made the decision: the worker only looks less far.
    assert [item.store_blocks for item in system.items()] == [3, 0]
    (routed,) = system.decisions(RequestRouted)
    assert (routed.terms.store_overlap, routed.terms.overlap_credit) == (3, 1.5)


async def test_the_owner_counts_stale_blocks_and_unused_stores(system: EffectsSystem) -> None:
    system.join("w0", kv_store="s")
    async with system.owned(fleet=1) as owner:
        stale = StoreBlocksRemoved(store="s", worker_id="w0", sequence_hashes=STORED[: 2 * U64_BYTES], stale=True)
        system.append(KV_EVENTS, added(4), stale, added(1, "unknown"))
        await known(owner, s=2, unknown=1)
        metrics = samples(owner)
    assert metrics["forebay_index_store_blocks", "s"] == 2
    assert metrics["forebay_index_store_blocks", "unknown"] == 1
    assert metrics["forebay_index_stale_store_blocks_total",] == 2
    assert metrics["forebay_index_store_events_total", "unused"] == 1
    assert metrics["dynamo_component_kv_cache_events_applied", "store_added", "ok"] == 2
    assert metrics["dynamo_component_kv_cache_events_applied", "store_removed", "ok"] == 1


def destinations(system: System) -> list[DestinationSelected]:
    return system.events(TOKENS, DestinationSelected, SLOT)


def send_external(system: System, name: str = "r", **changes: Any) -> RequestSubmitted:
    event = msgspec.structs.replace(submitted(name, PROMPT), delivery="external", **changes)
    system.send(event)
    return event


async def test_a_gateway_gets_the_server_of_the_worker_and_no_work_is_sent(system: EffectsSystem) -> None:
    for number in range(2):
        system.join(f"w{number}", endpoint=f"h{number}:1", kv_events=False)
    await system.own()
    event = send_external(system)
    await system.turn(1, lambda: None)
    await flush(system.log)
    (sent,) = destinations(system)
    assert {sent.endpoint, sent.fallback} == {"h0:1", "h1:1"}
    assert (sent.request_id, sent.reply_key, sent.attempt, sent.group) == ("r", event.reply_key, 1, MODEL)
    ids: dict[str, Any] = {name: getattr(sent, name) for name in ("request_id", "attempt", "owner_epoch")}
    moved = AttemptMoved(**ids, worker_id=sent.worker_id, worker_epoch=sent.worker_epoch, endpoint=sent.fallback)
    await system.turn(1, system.append, PROGRESS, moved)
    await flush(system.log)
    other = destinations(system)[-1]
    assert (other.attempt, other.endpoint, other.fallback) == (2, sent.fallback, "")
    await system.turn(1, system.lose, other.worker_id)
    await flush(system.log)
    assert [one.error.code for one in system.ends()["r"] if one.error is not None] == ["pinned_worker_lost"]
    assert [system.events(WORK, kind, slot) for kind in (WorkItem, WorkCancelled) for slot in range(2)] == [[]] * 4
    await proven(system.log)


async def test_a_new_owner_sends_the_destination_that_its_predecessor_did_not_send(log: SqliteLog) -> None:
    system = EffectsSystem(log)
    system.join("w0", endpoint="h0:1")
    await admit(system, 1)
    send_external(system)

    def has_ended(running: asyncio.Task[None]) -> bool:
        return running.done() or bool(destinations(system))

    for appends in range(20):  # until one dies between the journal record and the effect
        owner = Owner(FaultyLog(log, appends), system.leases, settings())
        with contextlib.suppress(Crashed):
            await owner.start()
            async with background(owner.run()) as running:
                await until(functools.partial(has_ended, running))
    (routed,) = system.events(DECISIONS, RequestRouted, 0)
    assert {(one.endpoint, one.attempt) for one in destinations(system)} == {("h0:1", 1)}
    assert destinations(system)[0].owner_epoch > routed.owner_epoch
