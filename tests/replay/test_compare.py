"""Differences between two moments of a recording, in order of importance."""

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from forebay.events.control import BusyThresholds, RouterConfig
from forebay.replay.at import seek
from forebay.replay.compare import CHANGES_MAX, MomentComparison, compare_moments
from forebay.replay.moment import HeldFacts, LossFacts, Moment
from forebay.replay.states import States
from forebay.transport.sqlite.log import SqliteLog
from tests.logs.record import FOLDER

replace = msgspec.structs.replace


def moment_of(name: str, offset: int | None = None) -> Moment:
    async def read() -> Moment:
        return await (await seek(States(log, 0), offset)).moment()

    log = SqliteLog.open(Path(FOLDER / f"{name}.rec"), readonly=True)
    try:
        return asyncio.run(read())
    finally:
        log.close()


@pytest.fixture(scope="module")
def moment() -> Moment:
    """Return a moment with active and queued requests on two workers."""
    return moment_of("queue", 5)


def rows(comparison: MomentComparison, kind: str = "") -> list[tuple[str, str, str]]:
    return [(one.subject, one.before, one.after) for one in comparison.changes if kind in ("", one.kind)]


def compared(moment: Moment, **changes: Any) -> MomentComparison:
    later = replace(moment, now_us=moment.now_us + 1_000_000, offset=moment.offset + 9, **changes)
    comparison = compare_moments(moment, later)
    assert comparison == compare_moments(later, moment), "the order of the arguments has no effect"
    assert (comparison.a.offset, comparison.b.offset) == (5, 14)
    return comparison


def test_a_moment_has_no_differences_from_itself(moment: Moment) -> None:
    comparison = compare_moments(moment, moment)
    assert (comparison.changes, comparison.omitted, comparison.a) == ([], {}, comparison.b)
    assert comparison.a.device_blocks == sum(rank.blocks["device"] for rank in moment.ranks)


def test_changes_of_a_recording_with_lost_workers() -> None:
    comparison = compare_moments(moment_of("lost-workers"), moment_of("lost-workers", 5))
    assert rows(comparison)[:8] == [
        ("w0", "ready, epoch 1", "lost, then ready, epoch 9"),
        ("w1", "ready, epoch 2", "lost"),
        ("w2", "ready, epoch 3", "lost"),
        ("w3", "ready, epoch 4", "lost"),
        ("workers of the pool default", "4", "1"),
        ("requests routed in the pool default", "5", "26"),
        ("active requests", "4", "0: 4 ended, 0 are new"),
        (
            "pool default",
            "4 active requests, 138 tokens to prefill, 16 KV blocks of active requests",
            "0 active requests, 0 tokens to prefill, 0 KV blocks of active requests",
        ),
    ]
    assert (comparison.a.workers, comparison.b.workers, comparison.a.active_requests) == (4, 1, 4)


def test_another_owner_comes_first(moment: Moment) -> None:
    comparison = compared(moment, owner_epoch=7, owner_id="second", workers=[], ranks=[])
    assert rows(comparison)[0] == ("owner", f"{moment.owner_id}, epoch {moment.owner_epoch}", "second, epoch 7")


def test_workers_in_another_state_and_workers_that_joined_in_between(moment: Moment) -> None:
    first, second = moment.workers
    lost = [
        LossFacts(worker_id="x", worker_epoch=9, reason="lease expired", at_us=0),
        LossFacts(worker_id=second.worker_id, worker_epoch=second.worker_epoch, reason="stopped", at_us=0),
    ]
    workers = [replace(first, phase="suspect"), replace(first, worker_id="y", worker_epoch=8)]
    ranks = [moment.ranks[0], replace(moment.ranks[0], worker_id="y")]
    comparison = compared(moment, workers=workers, ranks=ranks, lost=lost)
    epochs = [worker.worker_epoch for worker in moment.workers]
    assert rows(comparison, "worker") == [
        ("w1", f"ready, epoch {epochs[1]}", "lost (stopped)"),
        ("x", "", "joined in epoch 9, then lost (lease expired)"),
        ("w0", f"ready, epoch {epochs[0]}", f"suspect, epoch {epochs[0]}"),
        ("y", "", "ready, epoch 8, in the pool default"),
    ]
    assert rows(comparison, "size") == []
    comparison = compared(moment, workers=[first, replace(second, worker_epoch=99)], lost=lost[1:])
    assert [after for _, _, after in rows(comparison, "worker")] == ["lost (stopped), then ready, epoch 99"]
    earlier = replace(moment, lost=lost[:1])
    assert rows(compare_moments(earlier, replace(earlier, now_us=earlier.now_us + 1)), "worker") == []


def test_settings_are_listed_one_by_one(moment: Moment) -> None:
    (pool,) = moment.pools
    router = replace(pool.router, temperature=0.5, queue=replace(pool.router.queue, policy="lcfs"))
    busy = BusyThresholds(active_decode_blocks_threshold=0.9)
    comparison = compared(moment, pools=[replace(pool, router=router, busy=busy), replace(pool, pool="other")])
    assert rows(comparison, "pool") == [
        ("pool default: busy.active_decode_blocks_threshold", "unset", "0.9"),
        ("pool default: queue.policy", "fcfs", "lcfs"),
        ("pool default: temperature", "0.0", "0.5"),
        ("pool other", "", f"model {pool.model}"),
    ]
    assert pool.router != RouterConfig(), "the recording has settings of its own"


def test_requests_that_ended_began_and_moved(moment: Moment) -> None:
    (pool,) = moment.pools
    placed = next(request for request in moment.requests if request.worker_id)
    others = [request for request in moment.requests if request is not placed]
    requests = [
        replace(placed, worker_id="elsewhere"),
        *others[2:],
        *(replace(placed, request_id=f"new-{number}") for number in range(3)),
    ]
    comparison = compared(moment, requests=requests, pools=[replace(pool, routed=pool.routed + 1)])
    count = len(moment.requests)
    assert rows(comparison, "requests") == [
        ("requests routed in the pool default", f"{pool.routed}", f"{pool.routed + 1}"),
        ("active requests", f"{count}", f"{count + 1}: 2 ended, 3 are new"),
        ("requests that moved to another rank", "0", "1"),
    ]


def test_the_largest_change_of_a_queue_comes_first(moment: Moment) -> None:
    waiting = HeldFacts(request_id="r", waited_us=1, uncached_tokens=1, priority=0, strict_priority=0)
    assert [len(one.waiting) for one in moment.queues] == [1, 0, 1, 1]
    counts = (1, 4, 0, 3)
    classes = [replace(one, waiting=[waiting] * count) for one, count in zip(moment.queues, counts, strict=True)]
    found = [(change.before, change.after) for change in compared(moment, queues=classes).changes]
    assert found == [("0", "4"), ("1", "3"), ("1", "0")]


def test_small_changes_of_load_and_cache_are_omitted(moment: Moment) -> None:
    first, second = moment.ranks
    base = replace(moment, ranks=[replace(rank, prefill_tokens=100, blocks={"device": 50}) for rank in moment.ranks])
    later = [
        replace(first, prefill_tokens=109, blocks={"device": 70}),
        replace(second, prefill_tokens=100, blocks={"device": 52}),
    ]
    assert rows(compared(base, ranks=later)) == [
        ("pool default", "100 blocks in device memory", "122 blocks in device memory"),
        ("w0/0", "50 blocks in device memory", "70 blocks in device memory"),
    ]


def test_further_changes_are_counted(moment: Moment) -> None:
    rank = moment.ranks[0]
    ranks = [replace(rank, rank=number, prefill_tokens=10 + number) for number in range(CHANGES_MAX + 10)]
    comparison = compared(moment, ranks=ranks)
    assert len(comparison.changes) == CHANGES_MAX
    total = len(comparison.changes) + sum(comparison.omitted.values())
    assert set(comparison.omitted) == {"load"}
    assert total > CHANGES_MAX + 1
    assert rows(comparison, "load")[1][0] == f"w0/{CHANGES_MAX + 9}", "the largest change of a rank is kept"
