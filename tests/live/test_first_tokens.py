"""Metrics that split the time to first token of disaggregated requests into parts, as an owner exports them."""

from collections.abc import Callable
from typing import Any, get_args

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from forebay.core.ttft_parts import Part
from forebay.events.codec import encode
from forebay.events.control import QueueConfig, RouterConfig
from forebay.events.decisions import RequestRouted
from forebay.events.fleet import WorkerLost
from forebay.events.progress import (
    EncodeFinished,
    FirstTokenEmitted,
    PrefillFailed,
    PrefillFinished,
    RequestFailed,
    TransferFailed,
)
from forebay.events.topics import FLEET
from forebay.live.owner.metrics import OwnerMetrics
from forebay.live.owner.owner import Owner
from forebay.live.owner.ttft_metrics import DurationHistogram
from forebay.transport.base import Draft
from forebay.transport.sqlite.log import SqliteLog
from tests.core.worlds import ENCODED, MEDIA
from tests.live.disagg import PROMPT, IdleWorkers, flush, prefilled_by
from tests.live.shared import proven
from tests.system import MODEL, settings, submitted

QUEUED = RouterConfig(queue=QueueConfig(threshold=0.5))  # one prompt of 34 tokens is above half a step of 64
SINCE = "forebay_router_prefill_to_first_token_seconds"
PART = "forebay_router_time_to_first_token_part_seconds"


class SteppedOwner(IdleWorkers):
    """A system whose owner takes a turn only when a test calls `turn`, at the clock of the test."""

    def __init__(self, log: SqliteLog) -> None:
        super().__init__(log)
        self.now_us = 1_000_000
        self.owner: Owner

    async def own(self, router: RouterConfig | None = None) -> None:
        router = router or RouterConfig()
        self.owner = Owner(self.log, self.leases, settings(pool=None, router=router), lambda: self.now_us)
        await self.owner.start()
        await self.joined()

    async def joined(self, *roles: str) -> None:
        """Admit a worker for each role, named after the role, and every other worker that holds a lease."""
        for role in roles:
            self.join_pool(role, role)
        owner = self.owner
        assert owner.admission is not None
        for _ in range(2):  # pools come first, then their workers
            await owner.admission.update(
                self.leases.poll(MODEL), owner.world.pools, owner.world.fleet, owner.world.view["fleet"]
            )
            await owner.turn()

    async def turn(self, passed_ms: int, emit: Callable[..., None], *arguments: Any, **fields: Any) -> None:
        """Advance the clock by `passed_ms`, call `emit`, and take a turn of the owner."""
        self.now_us += passed_ms * 1_000
        emit(*arguments, **fields)
        await flush(self.log)
        await self.owner.turn()

    async def progress(self, passed_ms: int, name: str, kind: Any, **fields: Any) -> None:
        """Advance the clock, emit a progress event of the worker last routed to, and take a turn."""
        routed = [one for one in self.decisions(RequestRouted) if one.request_id == name][-1]
        if kind is PrefillFinished:
            fields = {"prefilled": prefilled_by(routed, bytes=1_000)}
        await self.turn(passed_ms, self.emit, routed, kind, **fields)

    def lose(self, name: str) -> None:
        worker = self.owner.world.fleet.get(name)
        assert worker is not None
        self.leases.release(MODEL, name, f"{name}-1")
        epoch = self.owner.journal.epoch
        lost = WorkerLost(owner_epoch=epoch, worker_id=name, worker_epoch=worker.worker_epoch)
        self.log.append_soon([Draft(FLEET.name, 0, encode(FLEET, lost))])

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


@pytest.fixture
async def system(log: SqliteLog) -> SteppedOwner:
    made = SteppedOwner(log)
    for role in ("prefill", "decode"):
        made.join_pool(role, role)
    return made


def test_disagg_a_time_equal_to_a_bucket_bound_is_inside_the_bucket() -> None:
    times = DurationHistogram()
    for us in (1_000, 1_001, 60_000_000, 60_000_001):
        times.add(us)
    assert (times.buckets[:2], times.buckets[-2:], times.sum_us) == ([1, 1], [1, 1], 120_002_002)


async def test_disagg_the_parts_add_up_to_the_time_to_first_token(system: SteppedOwner) -> None:
    await system.own(QUEUED)
    await system.turn(0, system.send, submitted("a", PROMPT))
    await system.turn(0, system.send, submitted("b", PROMPT))
    await system.progress(20, "a", PrefillFinished)  # request `b` leaves the queue
    await system.progress(30, "b", PrefillFinished)
    await system.progress(7, "a", FirstTokenEmitted, transferred_bytes=1_000, transfer_us=2_000)
    scrape = system.scraped()
    assert system.milliseconds() == {"prefill": 20, "transfer": 2, "decode": 35}
    assert scrape[f"{SINCE}_count",] == 1
    assert scrape[f"{SINCE}_sum",] == pytest.approx(0.037)
    assert (scrape[f"{SINCE}_bucket", "0.025"], scrape[f"{SINCE}_bucket", "0.05"]) == (0, 1)
    assert (scrape[f"{PART}_bucket", "0.001", "queue"], scrape[f"{PART}_bucket", "0.01", "prefill"]) == (1, 0)
    await system.progress(5, "b", TransferFailed, error="gone")
    await system.progress(10, "b", PrefillFinished)
    await system.progress(8, "b", FirstTokenEmitted, transferred_bytes=250, transfer_us=3_000)
    await system.progress(9, "b", FirstTokenEmitted, transferred_bytes=250, transfer_us=3_000)  # a repeated event
    scrape = system.scraped()
    b = {"queue": 20, "prefill": 30 + 10, "transfer": 3, "decode": 7 + 5 + 8 - 3}
    assert system.milliseconds() == {"queue": 20, "prefill": 60, "transfer": 5, "decode": 35 + 17}
    assert sum(b.values()) == 20 + 30 + 7 + 5 + 10 + 8, "the time to its first token"
    assert scrape[f"{SINCE}_sum",] == pytest.approx(0.037 + 0.008)
    assert (scrape["forebay_router_kv_kept_bytes_total",], scrape["forebay_router_kv_fetched_bytes_total",]) == (
        2_000,
        1_250,
    )
    assert len(system.owner.first_tokens) == 0
    await system.owner.close()
    await proven(system.log)


async def test_disagg_a_request_of_a_lost_worker_waits_for_another(system: SteppedOwner) -> None:
    await system.own()
    await system.turn(0, system.send, submitted("r", PROMPT))
    await system.progress(20, "r", PrefillFinished)
    await system.turn(10, system.lose, "decode")
    system.now_us += 40_000
    system.join_pool("another", "decode")
    await system.joined()
    await system.progress(20, "r", PrefillFinished)
    await system.progress(5, "r", FirstTokenEmitted)
    assert system.milliseconds() == {"prefill": 40, "wait": 40, "decode": 15}
    scrape = system.scraped()
    assert scrape[f"{SINCE}_sum",] == pytest.approx(0.005), "from the last prefill on"
    assert scrape["forebay_router_kv_kept_bytes_total",] == 0, "the fetched bytes were not reported"
    await system.owner.close()


async def test_disagg_the_encode_stage_is_a_part_of_its_own(system: SteppedOwner) -> None:
    system.join_pool("encode", "encode")
    await system.own()
    await system.turn(0, system.send, submitted("r", PROMPT, media=(MEDIA,)))
    await system.progress(4, "r", EncodeFinished, encoded=ENCODED)
    await system.progress(6, "r", PrefillFinished)
    await system.progress(2, "r", FirstTokenEmitted)
    assert system.milliseconds() == {"encode": 4, "prefill": 6, "decode": 2}
    await system.owner.close()


async def test_disagg_requests_that_end_before_their_first_token_are_dropped(system: SteppedOwner) -> None:
    await system.own()
    for name in ("cancelled", "failed", "late"):
        timeout_us = 50_000 if name == "late" else 60_000_000
        await system.turn(0, system.send, submitted(name, PROMPT, timeout_us=timeout_us))
        await system.progress(0, name, PrefillFinished)
    assert len(system.owner.first_tokens) == 3
    await system.turn(0, system.cancel, "cancelled")
    await system.progress(0, "failed", RequestFailed, error="out of memory")
    assert len(system.owner.first_tokens) == 1
    system.now_us += 60_000
    await system.owner.turn()
    assert len(system.owner.first_tokens) == 0
    assert system.scraped()[f"{SINCE}_count",] == 0
    await system.owner.close()


async def test_disagg_only_responses_that_fetched_kv_are_counted(system: SteppedOwner) -> None:
    """Local prefills and requests that began under an earlier owner are not counted."""
    await system.own()
    await system.turn(0, system.send, submitted("r", PROMPT))
    for _ in range(3):
        await system.progress(5, "r", PrefillFailed, error="no room")
    await system.progress(5, "r", FirstTokenEmitted)
    assert (system.scraped()[f"{SINCE}_count",], len(system.owner.first_tokens)) == (0, 0)
    await system.joined("encode")
    for name in "stu":
        await system.turn(0, system.send, submitted(name, PROMPT, media=(MEDIA,) if name == "u" else ()))
    await system.progress(5, "t", PrefillFinished)
    await system.owner.close()
    await system.own()
    await system.progress(5, "s", PrefillFailed, error="no room")
    await system.progress(5, "u", EncodeFinished, encoded=ENCODED)
    for name in "su":
        await system.progress(5, name, PrefillFinished)
    for name in "stu":
        await system.progress(5, name, FirstTokenEmitted)
    assert (system.scraped()[f"{SINCE}_count",], len(system.owner.first_tokens)) == (0, 0)
    await system.owner.close()
    await proven(system.log)


async def test_disagg_a_prompt_first_prefilled_locally_is_not_counted(log: SqliteLog) -> None:
    """Otherwise the time to first token would start when the first worker was lost."""
    system = SteppedOwner(log)
    system.join_pool("decode", "decode")
    await system.own()
    await system.turn(0, system.send, submitted("r", PROMPT))
    await system.joined("prefill")
    await system.turn(70, system.lose, "decode")
    system.join_pool("another", "decode")
    await system.joined()
    assert [one.stage for one in system.decisions(RequestRouted)] == ["aggregated", "prefill"]
    await system.progress(20, "r", PrefillFinished)
    await system.progress(5, "r", FirstTokenEmitted)
    assert (system.scraped()[f"{SINCE}_count",], len(system.owner.first_tokens)) == (0, 0)
    await system.owner.close()


async def test_disagg_without_a_decode_pool_the_series_are_absent(log: SqliteLog) -> None:
    system = SteppedOwner(log)
    system.join_pool("w", "aggregated")
    await system.own()
    await system.turn(0, system.send, submitted("r", PROMPT))
    await system.progress(5, "r", FirstTokenEmitted)
    assert not [name for name in system.scraped() if name[0].startswith((SINCE, PART))]
    await system.owner.close()
