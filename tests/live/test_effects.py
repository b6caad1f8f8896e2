"""Effects of decisions: work items with their options, responses with a status, requests to re-announce a cache."""

import functools
from typing import Any, get_args

import msgspec
import pytest

from forebay.events.base import pack_u64
from forebay.events.codec import decode, encode
from forebay.events.control import PoolConfigured, RouterConfig
from forebay.events.decisions import (
    AbortReason,
    CacheResyncRequested,
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
from forebay.events.kv import AnyKvEvent, BlocksStored, CacheCleared
from forebay.events.requests import RoutingHints
from forebay.events.tokens import RouteResponse
from forebay.events.topics import DECISIONS, FLEET, KV_EVENTS, TOKENS, Topic, work_topic
from forebay.events.work import ReannounceCache, ReleaseKv, WorkCancelled, WorkItem
from forebay.live.owner.effects import ABORTED, REJECTED, encode_effects
from forebay.live.owner.owner import Owner
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.live.shared import samples
from tests.system import BLOCK, MODEL, SLOT, System, settings, submitted, until

WORK = work_topic("default")
PROMPT = list(range(12))
HOUR_US = 3_600_000_000


def decoded(drafts: list[Draft], topic: Topic) -> list[Any]:
    return [decode(topic, draft.value) for draft in drafts if draft.topic == topic.name]


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


def test_a_kv_release_is_sent_to_the_partition_of_the_holders_slot() -> None:
    holder = CommandTarget(worker_id="p", worker_epoch=7, pool="default", slot=2)
    released = KvReleased(owner_epoch=3, request_id="r", attempt=2, holder=holder, reason="not_fetched")
    release = ReleaseKv(request_id="r", attempt=2, owner_epoch=3, worker_epoch=7, group=MODEL, worker_id="p")
    assert encode_effects(MODEL, released) == [Draft(WORK.name, 2, encode(WORK, release))]


def test_a_route_query_is_answered_and_a_held_request_waits() -> None:
    terms = CostTerms(
        cost=1.0, prefill_blocks=1.0, overlap_credit=0.0, decode_blocks=0.0, active_requests=0, device_overlap=0
    )
    candidates = (
        ScoredCandidate(worker_id="a", rank=0, terms=terms),
        ScoredCandidate(worker_id="b", rank=1, terms=terms),
    )
    answered = RouteAnswered(
        owner_epoch=3,
        request_id="q",
        reply_slot=SLOT,
        pool="default",
        mode="kv",
        choice=candidates[1],
        candidates=candidates,
        would_wait=True,
    )
    (draft,) = encode_effects(MODEL, answered)
    assert (draft.topic, draft.partition) == (TOKENS.name, SLOT)
    assert decoded([draft], TOKENS) == [
        RouteResponse(
            request_id="q",
            owner_epoch=3,
            pool="default",
            mode="kv",
            choice=candidates[1],
            candidates=candidates,
            would_wait=True,
            group=MODEL,
        )
    ]
    held = RequestHeld(request_id="r", pool="default", queue_class="default", uncached_tokens=5, ahead=0)
    assert encode_effects(MODEL, held) == []


@pytest.mark.parametrize("tracked", [False, True])
async def test_a_work_item_carries_the_options_of_its_engine(log: SqliteLog, *, tracked: bool) -> None:
    system = System(log)
    system.join("w0", loras=("lora",))
    router = RouterConfig(track_output_blocks=tracked)
    pool = PoolConfigured(pool="default", model=MODEL, block_size=BLOCK, router=router)
    async with system.owned(pool=pool, dies=True, fleet=1):
        hints = RoutingHints(priority=-7)
        system.send(submitted("r", PROMPT, lora_name="lora", cache_namespace="mine", routing=hints))
        await until(lambda: system.events(WORK, WorkItem))
    async with system.owned(pool=pool):
        await until(lambda: len(system.events(WORK, WorkItem)) == 2)
    for item in system.events(WORK, WorkItem):
        options = item.lora_name, item.cache_namespace, item.priority, item.report_output
        assert options == ("lora", "mine", -7, tracked)


def has_items(system: System, count: int) -> bool:
    return len(system.events(WORK, WorkItem)) == count


async def test_work_is_sent_again_only_if_the_owner_died(log: SqliteLog) -> None:
    system = System(log)
    system.join("w0")
    for dies, items in ((False, 1), (True, 1), (False, 2), (False, 2)):
        async with system.owned(dies=dies, fleet=1) as owner:
            if not system.decisions(RequestRouted):
                system.send(submitted("r", PROMPT))
                await until(lambda: system.events(WORK, WorkItem))
            await until(lambda: owner.journal.end == log.next_offset(DECISIONS.name, 0))
            await until(functools.partial(has_items, system, items))
    assert len(system.events(WORK, WorkItem)) == 2


class CacheEvents:
    """Emits the KV events of a simulated worker."""

    def __init__(self, system: System, owner: Owner) -> None:
        self._log = system.log
        worker = owner.world.fleet.get("w0")
        assert worker is not None
        self.epoch = worker.worker_epoch

    def append(self, event: AnyKvEvent) -> None:
        self._log.append_soon([Draft(KV_EVENTS.name, 0, encode(KV_EVENTS, event))])

    def stored(self, seq: int, *blocks: int) -> None:
        hashes = pack_u64(blocks)
        self.append(BlocksStored(worker_id="w0", worker_epoch=self.epoch, seq=seq, sequence_hashes=hashes))

    def cleared(self, seq: int) -> None:
        self.append(CacheCleared(worker_id="w0", worker_epoch=self.epoch, seq=seq))


async def test_a_cache_with_a_gap_is_requested_again_until_it_is_announced(log: SqliteLog) -> None:
    system = System(log)
    system.join("w0")
    epochs = []
    async with system.owned() as owner:
        epochs.append(owner.journal.epoch)
        await until(lambda: len(owner.world.fleet) == 1)
        cache = CacheEvents(system, owner)
        cache.stored(1, 10, 11)
        cache.stored(4, 12)
        cache.stored(6, 13)
        await until(lambda: owner.world.index.blocks_held("w0", 0, "device") == 4)
        await until(
            lambda: system.decisions(CacheResyncRequested)
        )  # the event is applied before its decision is journalled
        (resync,) = system.decisions(CacheResyncRequested)
        assert (resync.worker_id, resync.rank, resync.expected_seq, resync.found_seq) == ("w0", 0, 2, 4)
        await until(lambda: system.events(WORK, ReannounceCache))
    async with system.owned() as owner:
        epochs.append(owner.journal.epoch)
        await until(lambda: len(system.events(WORK, ReannounceCache)) == 2)
        cache.cleared(7)
        cache.stored(8, 20)
        await until(lambda: owner.world.index.blocks_held("w0", 0, "device") == 1)
    async with system.owned():
        pass
    wanted = [
        ReannounceCache(
            owner_epoch=epoch, worker_epoch=cache.epoch, rank=0, above_seq=above_seq, group=MODEL, worker_id="w0"
        )
        for epoch, above_seq in zip(epochs, (4, 6), strict=True)
    ]
    assert system.events(WORK, ReannounceCache) == wanted


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


async def test_a_request_that_moves_and_ends_in_one_turn_sends_no_work(log: SqliteLog) -> None:
    """The worker is lost, the request moves to another, and its deadline expires before the turn ends."""
    system = System(log)
    clock = JumpingClock()
    owner = Owner(log, system.leases, settings(), clock)
    system.join("w0")
    system.join("w1")
    await owner.start()
    assert owner.admission is not None
    await owner.admission.update(
        system.leases.poll(MODEL), owner.world.pools, owner.world.fleet, owner.world.view["fleet"]
    )
    await owner.turn()
    system.send(submitted("r", PROMPT, timeout_us=1_000_000))
    await flush(log)
    await owner.turn()
    (routed,) = system.decisions(RequestRouted)
    lost = WorkerLost(
        owner_epoch=owner.journal.epoch, worker_id=routed.worker_id, worker_epoch=routed.worker_epoch, reason="test"
    )
    await log.append([Draft(FLEET.name, 0, encode(FLEET, lost))])
    clock.reads = 1  # jumps in the turn in which the worker is lost
    await owner.turn()
    await flush(log)
    _, moved = system.decisions(RequestRouted)
    (aborted,) = system.decisions(RequestAborted)
    assert (moved.attempt, aborted.attempt, aborted.reason) == (2, 2, "deadline")
    assert [item.attempt for slot in range(2) for item in system.events(WORK, WorkItem, slot)] == [1]
    assert [event.attempt for event in system.events(WORK, WorkCancelled, moved.slot)] == [2]
    await owner.close()


async def flush(log: SqliteLog) -> None:
    """Wait until every pending append is in the log."""
    await log.append([Draft("dead-letters", 0, b"after it")])


async def test_router_metrics_are_exported_to_prometheus(log: SqliteLog) -> None:
    async with System(log).started(workers=1) as system, system.owned(fleet=1) as owner:
        system.send(submitted("r", PROMPT))
        system.send(submitted("wrong", PROMPT, model="another"))
        await until(lambda: len(system.ends()) == 2 and not len(owner.world.requests))
        owner.world.counts.update(non_max_overlap_selections=2, overlap_blocks_lost=5)
        metrics = samples(owner)
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
