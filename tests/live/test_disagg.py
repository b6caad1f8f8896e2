"""Disaggregation in a live owner: work of each stage, takeovers, released KV, and parts of the time to first token."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, get_args

import msgspec
import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay.core.state import requests as lifecycle
from forebay.core.ttft_parts import Part
from forebay.engine_model.model import EngineConfig
from forebay.events.codec import decode
from forebay.events.control import QueueConfig, RouterConfig
from forebay.events.decisions import CommandTarget, KvReleased, RequestAborted, RequestRouted
from forebay.events.fleet import WorkerSpec
from forebay.events.progress import (
    AnyProgressEvent,
    EncodeFinished,
    FirstTokenEmitted,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    RequestFinished,
    TransferFailed,
)
from forebay.events.requests import RoutingHints
from forebay.events.topics import DECISIONS, PROGRESS, TOKENS, work_topic
from forebay.events.trace_ids import trace_id_of
from forebay.events.transfer import Prefilled
from forebay.events.work import ReleaseKv, WorkCancelled, WorkItem
from forebay.journal.folds import begin_of
from forebay.journal.traces import TraceReader
from forebay.live import standby
from forebay.live.owner.effects import encode_effects
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.ttft_metrics import DurationHistogram
from forebay.transport.sqlite.log import SqliteLog
from forebay.workers.engines.mock.engine import MockEngine
from forebay.workers.engines.mock.kv import KvSettings
from forebay.workers.runtime.worker import Worker
from tests.core.worlds import ENCODED, MEDIA
from tests.live.shared import SteppedSystem, flush, proven, samples
from tests.system import BLOCK, MODEL, SLOT, SPEEDUP, submitted, until, until_ended

ROLES = ("encode", "prefill", "decode")
PROMPT = list(range(34))
BLOCKS = 9  # of the prompt
QUEUED = RouterConfig(queue=QueueConfig(threshold=0.5))  # one prompt of 34 tokens is above half a step of 64
SINCE = "forebay_router_prefill_to_first_token_seconds"
PART = "forebay_router_time_to_first_token_part_seconds"


class IdleWorkers(SteppedSystem):
    """A system whose workers hold leases and do nothing; a test emits their events."""

    def join_pool(self, name: str, role: str, **offers: Any) -> None:
        self.join(name, **{"pool": role, "role": role, **offers})

    def work(self, kind: type) -> list[Any]:
        places = [(role, slot) for role in (*ROLES, "aggregated") for slot in range(2)]
        return [one for role, slot in places for one in self.events(work_topic(role), kind, slot)]

    async def routed(self, count: int, stage: str) -> RequestRouted:
        """Wait for `count` routings and their work items; return the newest, which must be of `stage`."""
        await until(lambda: len(self.decisions(RequestRouted)) == count and len(self.work(WorkItem)) >= count)
        newest: RequestRouted = self.decisions(RequestRouted)[-1]
        assert newest.stage == stage
        return newest

    def item(self, routed: RequestRouted) -> WorkItem:
        found = self.events(work_topic(routed.pool), WorkItem, routed.slot)
        item: WorkItem = [one for one in found if (one.stage, one.attempt) == (routed.stage, routed.attempt)][-1]
        return item

    def emit(self, routed: RequestRouted, kind: type[AnyProgressEvent], **fields: Any) -> None:
        """Append a progress event of the routing's worker."""
        names = ("request_id", "attempt", "worker_id", "worker_epoch", "owner_epoch")
        self.append(PROGRESS, kind(**{name: getattr(routed, name) for name in names}, **fields))

    async def admitted(self, *roles: str) -> None:
        """Admit a worker for each role, named after the role, and every other worker that holds a lease."""
        for role in roles:
            self.join_pool(role, role)
        await super().admitted()

    async def progress(self, passed_ms: int, name: str, kind: Any, **fields: Any) -> None:
        """Advance the clock, emit a progress event of the worker last routed to, and take a turn."""
        routed = [one for one in self.decisions(RequestRouted) if one.request_id == name][-1]
        if kind is PrefillFinished:
            fields = {"prefilled": prefilled_by(routed, bytes=1_000)}
        await self.turn(passed_ms, self.emit, routed, kind, **fields)

    def scraped(self) -> dict[tuple[str, ...], float]:
        """Return each sample, parsed by the Prometheus client, by its name and its label values except `model`."""
        registry = CollectorRegistry()
        registry.register(OwnerMetrics(self.owner, MODEL))
        families = text_string_to_metric_families(generate_latest(registry).decode())
        samples = (sample for family in families for sample in family.samples)
        return {(one.name, *(v for k, v in one.labels.items() if k != "model")): one.value for one in samples}

    def milliseconds(self) -> dict[str, float]:
        """Return the non-zero sums of the parts of the time to first token, in milliseconds."""
        scrape = self.scraped()
        parts = {part: scrape[f"{PART}_sum", part] for part in get_args(Part)}
        return {part: round(1_000 * sum_s, 6) for part, sum_s in parts.items() if sum_s}

    def require_uncounted(self) -> None:
        """Check that no time to first token was counted, and that none will be."""
        assert (self.scraped()[f"{SINCE}_count",], len(self.owner.first_tokens)) == (0, 0)


@pytest.fixture
def system(log: SqliteLog) -> IdleWorkers:
    return IdleWorkers(log)


def prefilled_by(routed: RequestRouted, **changes: Any) -> Prefilled:
    """Return the descriptor of the KV that a prefill worker keeps."""
    fields: dict[str, Any] = {
        "worker_id": routed.worker_id,
        "worker_epoch": routed.worker_epoch,
        "model": MODEL,
        "connector": "nixl",
        "descriptor": b"there",
        "tokens": len(PROMPT),
        "lease_us": 60_000_000,
        **changes,
    }
    return Prefilled(**fields)


# The work of each stage


async def test_disagg_each_stage_gets_its_work_and_a_new_owner_sends_it_again(system: IdleWorkers) -> None:
    for role in ROLES:
        system.join_pool(role, role)
    async with system.owned(pool=None, dies=True, fleet=3) as owner:
        assert {name: pool.role for name, pool in owner.world.pools.items()} == {role: role for role in ROLES}
        system.send(submitted("r", PROMPT, media=(MEDIA,)))
        system.emit(await system.routed(1, "encode"), EncodeFinished, encoded=ENCODED)
        prefilling = await system.routed(2, "prefill")
        item = system.item(prefilling)
        assert item.media == (msgspec.structs.replace(MEDIA, content=b""),)
        assert (item.encoded, item.prefilled, len(item.token_ids)) == (ENCODED, None, 4 * len(PROMPT))
        kept = prefilled_by(prefilling)
        system.emit(prefilling, PrefillFinished, prefilled=kept)
        decoding = await system.routed(3, "decode")
        item = system.item(decoding)
        assert (item.media, item.encoded, item.prefilled) == ((MEDIA,), None, kept)
        assert (item.stage, item.attempt, len(item.token_ids)) == ("decode", 1, 4 * len(PROMPT))
        metrics = samples(owner)
    assert metrics["forebay_owner_requests", "transfer"] == 1
    assert metrics["forebay_owner_requests", "decode"] == 0
    assert [metrics["forebay_router_stages_total", stage] for stage in (*ROLES, "aggregated")] == [1, 1, 1, 0]
    assert metrics["forebay_router_prefills_total", "remote", "always"] == 1
    assert metrics["forebay_router_prefills_total", "local", "no_prefill_worker"] == 0, "a series from the start"
    assert ("dynamo_frontend_worker_active_decode_blocks", "decode", "0", "decode") in metrics
    async with system.owned(pool=None):
        await until(lambda: len(system.work(WorkItem)) == 4)
        again = system.item(decoding)
    assert again.owner_epoch > item.owner_epoch
    assert msgspec.structs.replace(again, owner_epoch=item.owner_epoch) == item


@pytest.mark.parametrize("stage", ["encode", "aggregated"])
async def test_a_new_owner_sends_an_unfinished_encode_or_aggregated_stage_again(
    system: IdleWorkers, stage: str
) -> None:
    for role in ("encode", "aggregated"):
        system.join_pool(role, role)
    async with system.owned(pool=None, dies=True, fleet=2):
        system.send(submitted("r", PROMPT, media=(MEDIA,)))
        routed = await system.routed(1, "encode")
        if stage == "aggregated":
            system.emit(routed, EncodeFinished, encoded=ENCODED)
            routed = await system.routed(2, "aggregated")
        sent = len(system.work(WorkItem))
        first = system.item(routed)
    async with system.owned(pool=None):
        await until(lambda: len(system.work(WorkItem)) == sent + 1)
        again = system.item(routed)
    assert msgspec.structs.replace(again, owner_epoch=first.owner_epoch) == first
    if stage == "encode":
        assert (again.media, again.encoded, again.token_ids, again.sequence_hashes) == ((MEDIA,), None, b"", b"")
    else:
        without_content = (msgspec.structs.replace(MEDIA, content=b""),)
        assert (again.media, again.encoded, len(again.token_ids)) == (without_content, ENCODED, 4 * len(PROMPT))


async def test_disagg_cancelling_a_request_releases_its_kept_kv(system: IdleWorkers) -> None:
    """The first prefill worker fails, so the second keeps the KV, as attempt 2."""
    for name in ("p0", "p1"):
        system.join_pool(name, "prefill")
    system.join_pool("d", "decode")
    async with system.owned(pool=None, fleet=3):
        system.send(submitted("r", PROMPT))
        first = await system.routed(1, "prefill")
        system.emit(first, PrefillFailed, error="out of memory")
        second = await system.routed(2, "prefill")
        assert (second.attempt, second.worker_id != first.worker_id) == (2, True)
        system.emit(second, PrefillFinished, prefilled=prefilled_by(second))
        decoding = await system.routed(3, "decode")
        system.cancel("r")
        await until(lambda: len(system.work(WorkCancelled)) == 2)
    cancelled = {(one.worker_epoch, one.attempt) for one in system.work(WorkCancelled)}
    assert cancelled == {(second.worker_epoch, 2), (decoding.worker_epoch, 2)}
    (ended,) = system.ends()["r"]
    assert (ended.error and ended.error.code) == "cancelled"


def test_disagg_a_prefill_rejection_ends_the_response() -> None:
    holder = CommandTarget(worker_id="p", worker_epoch=9, pool="prefill", slot=5)
    fields: dict[str, Any] = {"request_id": "r", "reply_slot": SLOT, "message": "no", "attempt": 2, "pool": "decode"}
    refused = RequestAborted(owner_epoch=3, reason="prefill_refused", status=422, code="too_long", **fields)
    (draft,) = encode_effects(MODEL, refused)
    error = decode(TOKENS, draft.value).error
    assert (error.status, error.code, error.message) == (422, "too_long", "no")
    given_up = RequestAborted(owner_epoch=3, reason="prefill_failed", holder=holder, **fields)
    at_holder, answer = encode_effects(MODEL, given_up)
    assert (at_holder.topic, at_holder.partition) == (work_topic("prefill").name, 5)
    assert decode(work_topic("prefill"), at_holder.value) == WorkCancelled(
        request_id="r", attempt=2, owner_epoch=3, worker_epoch=9, group=MODEL, worker_id="p"
    )
    assert decode(TOKENS, answer.value).error.code == "prefill_failed"


async def test_disagg_work_moved_within_one_turn_is_sent_only_to_its_last_worker(system: IdleWorkers) -> None:
    """Both prefill workers are lost in the turn that routes to them, so the request is prefilled locally."""
    for name, role in (("p0", "prefill"), ("p1", "prefill"), ("d", "decode")):
        system.join_pool(name, role)
    await system.own(pool=None)
    system.send(submitted("r", PROMPT))
    await system.turn(0, system.lose, "p0", "p1")
    await flush(system.log)
    made = [(one.stage, one.attempt) for one in system.decisions(RequestRouted)]
    assert made[0] == ("prefill", 1)
    assert made[-1] == ("aggregated", 1)
    assert [(one.stage, one.attempt) for one in system.work(WorkItem)] == [("aggregated", 1)]
    await system.owner.close()


async def test_disagg_disaggregated_pools_replace_aggregated_ones_live(system: IdleWorkers) -> None:
    system.join_pool("whole", "aggregated", pool="a-pool-whose-name-comes-first")
    async with system.owned(pool=None, fleet=1) as owner:
        system.leases.release("model", "whole", "whole-1")
        await until(lambda: len(owner.world.fleet) == 0)
        system.join_pool("p", "prefill")
        system.join_pool("d", "decode")
        await until(lambda: len(owner.world.fleet) == 2)
        system.send(submitted("r", PROMPT))
        await until(lambda: system.decisions(RequestRouted))
    (routed,) = system.decisions(RequestRouted)
    assert (routed.stage, routed.worker_id) == ("prefill", "p")


# The owner releases kept KV that no worker will fetch, however the decode attempt ended

SIZES: dict[str, Any] = {
    "block_size": BLOCK, "kv_blocks_total": 256, "max_num_seqs": 16, "max_num_batched_tokens": 256,
}  # fmt: skip


class PrefillingSystem(IdleWorkers):
    """A prefill worker with a mock engine that keeps KV for an hour, and decode workers whose events a test emits."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log)
        config = EngineConfig(**SIZES, vocabulary=(7,))
        self.engine = MockEngine(config, speedup=SPEEDUP, kv=KvSettings(lease_s=3600.0))

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        async with self.started(0):
            assert self._group is not None
            spec = WorkerSpec(worker_id="p", model=MODEL, pool="prefill", role="prefill", **SIZES)
            worker = Worker(self.log, self.keeper, spec, self.engine, token="p-1", group=MODEL)
            self._tasks["p"] = self._group.create_task(worker.run())
            for name in ("d", "e"):
                self.join_pool(name, "decode", **SIZES)
            yield

    @asynccontextmanager
    async def replaced(self) -> AsyncIterator[list[ReleaseKv]]:
        """Own the group after a dead owner. Nobody knows which releases that one sent, so they are sent again."""
        async with self.owned(pool=None):
            self.send(submitted("beside", list(range(100, 110))))
            await until(lambda: [one for one in self.events(PROGRESS, PrefillFinished) if one.request_id == "beside"])
            yield self.work(ReleaseKv)

    def leave(self, name: str) -> None:
        self.leases.release(MODEL, name, f"{name}-1")

    async def decoding(self, attempt: int) -> RequestRouted:
        """Wait until the prefill of `attempt` has finished; return the routing to its decode worker."""

        def found() -> list[RequestRouted]:
            routed = self.decisions(RequestRouted)
            return [one for one in routed if (one.stage, one.attempt) == ("decode", attempt)]

        await until(found)
        stats = self.engine.kv_stats()
        assert (stats.held_offers, stats.held_blocks) == (1, BLOCKS)
        return found()[0]

    def decoders(self) -> list[tuple[str, str]]:
        """Return each request and its decode worker, in routing order."""
        return [(one.request_id, one.worker_id) for one in self.decisions(RequestRouted) if one.stage == "decode"]

    async def freed(self, released: int) -> None:
        """Wait until `released` offers were released and none is held; no lease expired."""
        await until(lambda: self.engine.kv_stats().freed.get("released") == released)
        stats = self.engine.kv_stats()
        assert stats.freed == {"released": released} | {reason: 0 for reason in stats.freed if reason != "released"}
        assert (stats.held_offers, stats.held_blocks, self.engine.kept()) == (0, 0, 0)
        await until(lambda: not self.engine.ranks[0].model.pool.used)


@pytest.fixture
def prefilling(log: SqliteLog) -> PrefillingSystem:
    return PrefillingSystem(log)


Way = Callable[[PrefillingSystem, RequestRouted], None]
ENDING: dict[str, tuple[Way, list[str]]] = {
    "failed": (lambda system, to: system.emit(to, RequestFailed, error="out of memory"), ["request_ended"]),
    "finished": (lambda system, to: system.emit(to, RequestFinished, finish_reason="stop"), ["request_ended"]),
    "local": (lambda system, to: system.emit(to, FirstTokenEmitted, unfetched=True), ["not_needed"]),
    "cancelled": (lambda system, to: system.cancel(to.request_id), []),
}
TRYING_AGAIN: dict[str, Way] = {
    "worker_lost": lambda system, to: system.leave(to.worker_id),
    "not_fetched": lambda system, to: system.emit(to, TransferFailed, error="the network is gone"),
}


@pytest.mark.parametrize("way", ENDING)
async def test_disagg_kv_of_an_ended_response_is_released_before_its_lease_expires(
    prefilling: PrefillingSystem, way: str
) -> None:
    system, (end, reasons) = prefilling, ENDING[way]
    async with system.serving(), system.owned(pool=None, fleet=3):
        system.send(submitted("r", PROMPT))
        end(system, await system.decoding(1))
        await system.freed(1)
    assert [one.reason for one in system.decisions(KvReleased)] == reasons
    assert bool(system.decisions(RequestAborted)) == (way == "cancelled")


@pytest.mark.parametrize("reason", TRYING_AGAIN)
async def test_disagg_only_the_kv_of_the_stale_attempt_is_released(prefilling: PrefillingSystem, reason: str) -> None:
    system = prefilling
    async with system.serving():
        async with system.owned(pool=None, fleet=3, dies=True):
            system.send(submitted("r", PROMPT))
            first = await system.decoding(1)
            TRYING_AGAIN[reason](system, first)
            second = await system.decoding(2)
            assert system.engine.kv_stats().freed["released"] == 1
            assert second.worker_id != first.worker_id
            (released,) = system.decisions(KvReleased)
        async with system.replaced() as releases:
            assert [(one.attempt, one.worker_epoch) for one in releases] == [(1, released.holder.worker_epoch)] * 2
            assert system.engine.kv_stats().held_offers == 2, "the KV of the second attempt is still held"
            for name in ("r", "beside"):
                system.cancel(name)
            await system.freed(3)
    assert released.reason == reason


async def test_disagg_all_releases_of_one_event_are_sent_again_after_a_takeover(
    prefilling: PrefillingSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "UNCONFIRMED_MAX", 1)  # so that the limit applies to a few releases already
    system = prefilling
    async with system.serving():
        async with system.owned(pool=None, fleet=3, dies=True):
            for name in "mnopq":
                system.send(submitted(name, PROMPT))
            await until(lambda: len(system.decoders()) == 5)
            lost = sorted(name for name, worker_id in system.decoders() if worker_id == "d")
            assert len(lost) > 1
            system.leave("d")
            await until(lambda: system.engine.kv_stats().freed.get("released") == len(lost))
        async with system.replaced() as releases:
            assert sorted(one.request_id for one in releases) == sorted(lost * 2)


async def test_disagg_releases_of_an_earlier_request_with_the_same_id_are_not_repeated(
    monkeypatch: pytest.MonkeyPatch, prefilling: PrefillingSystem
) -> None:
    monkeypatch.setattr(lifecycle, "REMEMBER_US", 0)  # an id may be used again at once, also when `log` is verified
    system = prefilling
    async with system.serving():
        async with system.owned(pool=None, fleet=3, dies=True):
            system.send(submitted("r", PROMPT))
            ENDING["failed"][0](system, await system.decoding(1))
            await system.freed(1)
            system.send(submitted("r", list(range(200, 234)), reply_from=100))
            await until(lambda: len(system.decoders()) == 2)
        async with system.replaced() as releases:
            assert [one.request_id for one in releases] == ["r"]
            assert system.engine.kv_stats().held_offers == 2, "both offers are still held"


async def test_disagg_a_request_pinned_to_a_lost_decode_worker_ends_and_its_kv_is_released(
    prefilling: PrefillingSystem,
) -> None:
    system = prefilling
    async with system.serving(), system.owned(pool=None, fleet=3):
        system.send(submitted("r", PROMPT, routing=RoutingHints(worker_id="d")))
        system.leave((await system.decoding(1)).worker_id)
        await system.freed(1)
        await until_ended(system, "r")
    (ended,) = system.ends()["r"]
    assert ended.error is not None
    assert (ended.error.status, ended.error.code) == (503, "pinned_worker_lost")
    assert ended.error.message == "worker d was lost, and the request is pinned to it"


# Metrics that split the time to first token into parts


@pytest.fixture
def pair(system: IdleWorkers) -> IdleWorkers:
    """Return a system with a prefill and a decode worker."""
    for role in ("prefill", "decode"):
        system.join_pool(role, role)
    return system


def test_disagg_a_time_equal_to_a_bucket_bound_is_inside_the_bucket() -> None:
    times = DurationHistogram()
    for us in (1_000, 1_001, 60_000_000, 60_000_001):
        times.add(us)
    assert (times.buckets[:2], times.buckets[-2:], times.sum_us) == ([1, 1], [1, 1], 120_002_002)


async def test_disagg_the_parts_add_up_to_the_time_to_first_token(pair: IdleWorkers) -> None:
    await pair.own(pool=None, router=QUEUED)
    await pair.turn(0, pair.send, submitted("a", PROMPT))
    await pair.turn(0, pair.send, submitted("b", PROMPT))
    await pair.progress(20, "a", PrefillFinished)  # request `b` leaves the queue
    await pair.progress(30, "b", PrefillFinished)
    await pair.progress(7, "a", FirstTokenEmitted, transferred_bytes=1_000, transfer_us=2_000)
    scrape = pair.scraped()
    assert pair.milliseconds() == {"prefill": 20, "transfer": 2, "decode": 35}
    assert scrape[f"{SINCE}_count",] == 1
    assert scrape[f"{SINCE}_sum",] == pytest.approx(0.037)
    assert (scrape[f"{SINCE}_bucket", "0.025"], scrape[f"{SINCE}_bucket", "0.05"]) == (0, 1)
    assert (scrape[f"{PART}_bucket", "0.001", "queue"], scrape[f"{PART}_bucket", "0.01", "prefill"]) == (1, 0)
    await pair.progress(5, "b", TransferFailed, error="gone")
    await pair.progress(10, "b", PrefillFinished)
    await pair.progress(8, "b", FirstTokenEmitted, transferred_bytes=250, transfer_us=3_000)
    await pair.progress(9, "b", FirstTokenEmitted, transferred_bytes=250, transfer_us=3_000)  # a repeated event
    scrape = pair.scraped()
    b = {"queue": 20, "prefill": 30 + 10, "transfer": 3, "decode": 7 + 5 + 8 - 3}
    assert pair.milliseconds() == {"queue": 20, "prefill": 60, "transfer": 5, "decode": 35 + 17}
    assert sum(b.values()) == 20 + 30 + 7 + 5 + 10 + 8, "the time to its first token"
    assert scrape[f"{SINCE}_sum",] == pytest.approx(0.037 + 0.008)
    assert scrape["forebay_router_kv_kept_bytes_total",] == 2_000
    assert scrape["forebay_router_kv_fetched_bytes_total",] == 1_250
    assert len(pair.owner.first_tokens) == 0
    await pair.owner.close()
    await proven(pair.log)


async def test_disagg_a_request_of_a_lost_worker_waits_for_another(pair: IdleWorkers) -> None:
    await pair.own(pool=None)
    await pair.turn(0, pair.send, submitted("r", PROMPT))
    await pair.progress(20, "r", PrefillFinished)
    await pair.turn(10, pair.lose, "decode")
    pair.now_us += 40_000
    pair.join_pool("another", "decode")
    await pair.admitted()
    await pair.progress(20, "r", PrefillFinished)
    await pair.progress(5, "r", FirstTokenEmitted)
    assert pair.milliseconds() == {"prefill": 40, "wait": 40, "decode": 15}
    scrape = pair.scraped()
    assert scrape[f"{SINCE}_sum",] == pytest.approx(0.005), "from the last prefill on"
    assert scrape["forebay_router_kv_kept_bytes_total",] == 0, "the fetched bytes were not reported"
    await pair.owner.close()


async def test_disagg_the_encode_stage_is_a_part_of_its_own(pair: IdleWorkers) -> None:
    pair.join_pool("encode", "encode")
    await pair.own(pool=None)
    await pair.turn(0, pair.send, submitted("r", PROMPT, media=(MEDIA,)))
    await pair.progress(4, "r", EncodeFinished, encoded=ENCODED)
    await pair.progress(6, "r", PrefillFinished)
    await pair.progress(2, "r", FirstTokenEmitted)
    assert pair.milliseconds() == {"encode": 4, "prefill": 6, "decode": 2}
    await pair.owner.close()


async def test_disagg_requests_that_end_before_their_first_token_are_dropped(pair: IdleWorkers) -> None:
    await pair.own(pool=None)
    for name in ("cancelled", "failed", "late"):
        timeout_us = 50_000 if name == "late" else 60_000_000
        await pair.turn(0, pair.send, submitted(name, PROMPT, timeout_us=timeout_us))
        await pair.progress(0, name, PrefillFinished)
    assert len(pair.owner.first_tokens) == 3
    await pair.turn(0, pair.cancel, "cancelled")
    await pair.progress(0, "failed", RequestFailed, error="out of memory")
    assert len(pair.owner.first_tokens) == 1
    pair.now_us += 60_000
    await pair.owner.turn()
    pair.require_uncounted()
    await pair.owner.close()


async def test_disagg_only_responses_that_fetched_kv_are_counted(pair: IdleWorkers) -> None:
    """Local prefills and requests that began under an earlier owner are not counted."""
    await pair.own(pool=None)
    await pair.turn(0, pair.send, submitted("r", PROMPT))
    for _ in range(3):
        await pair.progress(5, "r", PrefillFailed, error="no room")
    await pair.progress(5, "r", FirstTokenEmitted)
    pair.require_uncounted()
    await pair.admitted("encode")
    for name in "stu":
        await pair.turn(0, pair.send, submitted(name, PROMPT, media=(MEDIA,) if name == "u" else ()))
    await pair.progress(5, "t", PrefillFinished)
    await pair.owner.close()
    await pair.own(pool=None)
    await pair.progress(5, "s", PrefillFailed, error="no room")
    await pair.progress(5, "u", EncodeFinished, encoded=ENCODED)
    for name in "su":
        await pair.progress(5, name, PrefillFinished)
    for name in "stu":
        await pair.progress(5, name, FirstTokenEmitted)
    pair.require_uncounted()
    await pair.owner.close()
    await proven(pair.log)


async def test_disagg_a_prompt_first_prefilled_locally_is_not_counted(system: IdleWorkers) -> None:
    """Otherwise the time to first token would start when the first worker was lost."""
    system.join_pool("decode", "decode")
    await system.own(pool=None)
    await system.turn(0, system.send, submitted("r", PROMPT))
    await system.admitted("prefill")
    await system.turn(70, system.lose, "decode")
    system.join_pool("another", "decode")
    await system.admitted()
    assert [one.stage for one in system.decisions(RequestRouted)] == ["aggregated", "prefill"]
    await system.progress(20, "r", PrefillFinished)
    await system.progress(5, "r", FirstTokenEmitted)
    system.require_uncounted()
    await system.owner.close()


async def test_an_aggregated_worker_gets_the_media_and_exports_no_series_of_disaggregation(
    system: IdleWorkers,
) -> None:
    system.join_pool("w", "aggregated")
    await system.own(pool=None)
    await system.turn(0, system.send, submitted("r", PROMPT, media=(MEDIA,)))
    await flush(system.log)
    (item,) = system.work(WorkItem)
    assert (item.encoded, item.media) == (None, (MEDIA,)), "an aggregated worker encodes by itself"
    await system.progress(5, "r", FirstTokenEmitted)
    assert not [name for name in system.scraped() if name[0].startswith((SINCE, PART))]
    await system.owner.close()


async def test_each_attempt_has_the_trace_of_the_client_or_its_own_with_the_span_of_the_attempt(
    system: IdleWorkers,
) -> None:
    await system.own(pool=None)
    await system.admitted("prefill", "decode")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    await system.turn(0, system.send, submitted("r", PROMPT, traceparent=trace))
    await system.progress(5, "r", PrefillFinished)
    await system.progress(5, "r", FirstTokenEmitted)
    await system.progress(5, "r", RequestFinished, finish_reason="stop")
    await system.turn(0, system.send, submitted("other", PROMPT))
    await flush(system.log)
    items = [item for item in system.work(WorkItem) if item.request_id == "r"]
    (other,) = (item for item in system.work(WorkItem) if item.request_id == "other")
    reader = TraceReader(system.log, 0, await begin_of(system.log, 0), 0)
    await reader.read(await system.log.end(DECISIONS.name, 0))
    attempts = [span.span_id for span in reader.take()[0].spans if span.name == "attempt"]
    assert sorted(item.traceparent for item in items) == sorted(f"{trace[:36]}{span_id}-01" for span_id in attempts)
    assert other.traceparent[3:35] == trace_id_of(other.request_id, other.reply_key, "")
    assert items[0].log_extra == {"fields": {"trace_id": "0af7651916cd43dd8448eb211c80319c"}}
    await system.owner.close()
