"""What the planner observes of workers and owners, and the bounds of an observation."""

import pytest

from forebay.core.scaling import observation as module
from forebay.core.scaling.observation import ORPHAN_US
from forebay.events.codec import decode, encode
from forebay.events.decisions import Advanced, OwnerClaimed
from forebay.events.fleet import IngressJoined, OwnershipAnnounced
from forebay.events.requests import RequestCancelled
from forebay.events.scaling import PoolObserved, ScalingObserved
from forebay.events.topics import SCALING
from tests.core.scaling.observing import (
    MS,
    Group,
    finish,
    prompt_tokens,
)
from tests.core.worlds import BLOCK

# Workers


def test_workers_are_counted_by_phase() -> None:
    group = Group()
    for name in ("a", "b", "c", "d"):
        group.join(name)
    group.fact("drain", "b")
    group.fact("suspect", "c")
    group.fact("lose", "d")
    seen = group.pool()
    assert (seen.ready, seen.draining) == (1, 1)
    assert [one.worker_id for one in seen.workers] == ["a"]
    group.fact("recover", "c")
    assert group.pool().ready == 2


def test_load_reports_of_all_ranks_add_up() -> None:
    group = Group()
    group.join("a", dp_size=2)
    group.report("a", running=3, waiting=1, blocks=10)
    group.report("a", running=2, waiting=0, blocks=5, rank=1)
    (worker,) = group.pool().workers
    assert (worker.running, worker.waiting) == (5, 1)
    assert (worker.kv_tokens, worker.kv_tokens_max) == (15 * BLOCK, 2 * 64 * BLOCK)


def test_the_newest_report_replaces_earlier_ones_and_impossible_values_are_limited() -> None:
    group = Group()
    group.join("a")
    group.report("a", running=3, waiting=1, blocks=10)
    group.report("a", running=1 << 60, waiting=1 << 60, blocks=1 << 60)
    (worker,) = group.pool().workers
    assert (worker.running, worker.waiting, worker.kv_tokens) == (8, 100_000, 64 * BLOCK)


def test_reports_of_unknown_workers_epochs_and_ranks_have_no_effect() -> None:
    group = Group()
    group.report("z", running=3)
    group.join("a")
    group.report("a", running=3, worker_epoch=99)
    group.report("a", running=3, rank=7)
    (worker,) = group.pool().workers
    assert worker.running == 0


def test_a_worker_that_comes_back_has_no_load_of_before() -> None:
    group = Group()
    group.join("a")
    group.report("a", running=3, blocks=9)
    group.fact("lose", "a")
    group.join("a")
    (worker,) = group.pool().workers
    assert (worker.running, worker.kv_tokens) == (0, 0)


def test_an_idle_worker_needs_no_report() -> None:
    group = Group()
    group.join("a")
    for _ in range(3):
        (worker,) = group.pool(1_000).workers
        assert (worker.running, worker.waiting, worker.kv_tokens) == (0, 0, 0)


def test_a_busy_worker_without_reports_is_missing() -> None:
    group = Group()
    group.join("a")
    group.join("b")
    group.report("a", running=1)
    group.submit("r")
    group.route("r", "b")
    assert len(group.pool(1_000).workers) == 2, "both may have had no time to report"
    seen = group.pool(1_000)
    assert (seen.ready, seen.workers) == (2, ())
    group.report("a", running=0)
    group.report("b", running=1)
    assert len(group.pool(1_000).workers) == 2


def test_load_of_a_huge_worker_can_be_encoded() -> None:
    group = Group()
    group.join("a", kv_blocks_total=(1 << 31) - 1, dp_size=1024, block_size=(1 << 31) - 1)
    group.report("a", blocks=1 << 40)
    event = ScalingObserved(interval_s=1, pools=(group.pool(),))
    assert decode(SCALING, encode(SCALING, event)) == event


# Owners


def test_decisions_of_a_replaced_owner_have_no_effect() -> None:
    group = Group()
    group.join("a")
    group.submit("r1")
    group.submit("r2")
    group(OwnerClaimed(owner_id="o2", core_version=1))
    group.route("r1", "a", owner_epoch=0)
    group.route("r2", "a", owner_epoch=group.offset - 2)
    group.route("r2", "a", owner_epoch=group.offset - 3)
    assert group.pool().requests == 1


def test_fleet_events_of_a_replaced_owner_have_no_effect() -> None:
    group = Group()
    group.join("a")
    group(OwnershipAnnounced(owner_epoch=5))
    group.fact("lose", "a")
    group(IngressJoined(owner_epoch=5, ingress_id="i", incarnation="1"))
    assert group.pool().ready == 1


def test_events_that_do_not_concern_the_observation_are_ignored() -> None:
    group = Group()
    group(Advanced(digest="0" * 16, owner_epoch=0))
    group(RequestCancelled(request_id="r"))
    assert group.pool() == PoolObserved(group="m", pool="default", ready=0)


# Bounds


def test_a_request_that_never_ends_is_forgotten_after_its_deadline() -> None:
    group = Group()
    group.join("a")
    group.submit("r", timeout_us=1_000 * MS)
    group.route("r", "a")
    group.report("a", running=1)
    assert group.pool().workers[0].prefill_tokens == prompt_tokens(2)
    group.report("a", running=1)
    group.now_us += 1_000 * MS + ORPHAN_US
    assert group.pool().workers[0].prefill_tokens == 0
    assert group.observation.forgotten == 1


def test_events_of_unknown_requests_are_forgotten() -> None:
    group = Group()
    group.join("a")
    group.hold("r1")
    finish(group, "r2", "a")
    assert group.pool().queued == 1
    assert group.pool(ORPHAN_US / MS).queued == 0
    assert group.observation.forgotten == 1
    group.submit("r2")
    group.route("r2", "a")
    assert group.pool().requests == 1, "nothing of the earlier request with this id is left"


def test_a_response_without_a_decision_is_forgotten() -> None:
    group = Group()
    group.join("a")
    finish(group, "r", "a")
    group.submit("r", timeout_us=10 * ORPHAN_US)
    group.pool(ORPHAN_US / MS)
    group.route("r", "a")
    assert group.pool().requests == 0


def test_the_number_of_requests_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ACTIVE_REQUESTS_MAX", 10)
    monkeypatch.setattr(module, "DROPPED", 4)
    group = Group()
    for number in range(14):
        group.submit(f"r{number}")
        group.hold(f"r{number}")
    assert group.pool().queued == 10
    assert group.observation.forgotten == 4
