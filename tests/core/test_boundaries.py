"""The edges of the core's rules: the very microsecond, the next rank, the phase, the order of names."""

from typing import Any

import msgspec
import pytest

from forebay.core.rederive import Rederivation
from forebay.core.restore import restore
from forebay.core.state.fleet import Fleet
from forebay.core.state.requests import REMEMBER_US
from forebay.core.step import advance, claim
from forebay.core.world import World
from forebay.events.base import pack_u32
from forebay.events.control import BusyThresholds, QueueClass, QueueConfig
from forebay.events.decisions import (
    ConsumedRun,
    OwnerClaimed,
    RequestAborted,
    RequestHeld,
    RequestRejected,
    RequestRouted,
    SnapshotTaken,
)
from forebay.events.fleet import (
    IngressJoined,
    IngressLost,
    OwnershipAnnounced,
    WorkerDraining,
    WorkerRecovered,
    WorkerSuspect,
)
from forebay.events.metrics import LoadReported
from forebay.events.progress import EngineFailed, FirstTokenEmitted, RequestFinished
from forebay.events.requests import RequestSubmitted, RoutingHints
from tests.core.worlds import PROMPTS, Driver, joined, pool, request


def about(drive: Driver, worker_id: str) -> dict[str, Any]:
    return {"owner_epoch": 0, "worker_id": worker_id, "worker_epoch": drive.epoch(worker_id)}


def routes(decided: list[Any]) -> list[tuple[str, str, int]]:
    return [(one.request_id, one.worker_id, one.attempt) for one in decided if isinstance(one, RequestRouted)]


def test_a_deadline_passes_in_its_microsecond_and_not_before() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r", timeout_us=1_000))
    assert drive.wait(999) == []
    (ended,) = drive.wait(1)
    assert isinstance(ended, RequestAborted)
    assert drive.world.requests.next_due_us() == drive.now_us + REMEMBER_US


def test_an_id_is_forgotten_in_its_microsecond_and_not_before() -> None:
    drive = Driver().fleet("a")
    drive("requests", request("r", nonce=1))
    drive.cancel("r")
    drive.wait(REMEMBER_US - 1)
    assert drive("requests", request("r", nonce=1), after_us=0) == []
    (routed,) = drive("requests", request("r", nonce=1), after_us=1)
    assert isinstance(routed, RequestRouted)


@pytest.mark.parametrize("fact", [WorkerSuspect, WorkerDraining])
def test_only_ready_workers_get_requests(fact: Any) -> None:
    drive = Driver().fleet("a", "b")
    drive.fact(fact, "a")
    for number in range(4):
        (routed,) = drive("requests", request(f"r{number}", PROMPTS[0]))
        assert isinstance(routed, RequestRouted)
        assert (routed.worker_id, routed.candidates) == ("b", 1)
    drive.fact(WorkerDraining, "b")
    if fact is WorkerSuspect:
        drive.lose("a")
    (rejected,) = drive("requests", request("late"))
    assert isinstance(rejected, RequestRejected)
    assert rejected.reason == "no_workers"


def test_a_request_that_only_suspect_workers_may_take_is_held_until_one_is_back() -> None:
    drive = Driver().fleet("a", "b")
    for name in ("a", "b"):
        drive.fact(WorkerSuspect, name)
    held = [drive("requests", request(f"r{number}", PROMPTS[0])) for number in range(3)]
    assert [type(one) for (one,) in held] == [RequestHeld] * 3
    routed = drive.fact(WorkerRecovered, "b")
    assert [(one.request_id, one.worker_id) for one in routed] == [(f"r{number}", "b") for number in range(3)]


def test_a_request_for_a_suspect_worker_alone_is_held_while_others_are_ready() -> None:
    drive = Driver().fleet("a", "b")
    drive.fact(WorkerSuspect, "a")
    hints = RoutingHints(worker_id="a")
    (held,) = drive("requests", request("r", PROMPTS[0], routing=hints))
    assert isinstance(held, RequestHeld)
    (routed,) = drive.fact(WorkerRecovered, "a")
    assert (routed.request_id, routed.worker_id) == ("r", "a")


def test_suspect_workers_hold_no_more_than_their_share_of_the_queue() -> None:
    queue = QueueConfig(classes=(QueueClass(requests_per_worker_max=2),))
    drive = Driver().fleet("a", queue=queue)
    drive.fact(WorkerSuspect, "a")
    made = [drive("requests", request(f"r{number}"))[0] for number in range(3)]
    assert [type(one) for one in made] == [RequestHeld, RequestHeld, RequestRejected]
    assert made[-1].reason == "queue_full"


@pytest.mark.parametrize("reason", ["busy", "unknown_worker"])
def test_a_request_no_suspect_worker_could_take_is_rejected_at_once(reason: str) -> None:
    drive = Driver().fleet("a", busy=BusyThresholds(active_prefill_tokens_threshold=0))
    hints = RoutingHints(worker_id="x") if reason == "unknown_worker" else RoutingHints()
    drive("requests", request("first", PROMPTS[0]))
    (rejected,) = drive("requests", request("r", routing=hints))
    assert rejected.reason == reason
    drive.fact(WorkerSuspect, "a")
    (rejected,) = drive("requests", request("s", routing=RoutingHints(required_taints=("none has it",))))
    assert rejected.reason == "no_workers"


def test_a_draining_worker_finishes_its_requests() -> None:
    drive = Driver().fleet("a")
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    assert drive.fact(WorkerDraining, "a") == []
    assert drive.world.requests.active()[0].on_worker
    drive("progress", RequestFinished(request_id="r", attempt=1, finish_reason="stop", **about(drive, "a")))
    assert not len(drive.world.requests)
    assert isinstance(routed, RequestRouted)


def test_stranded_requests_move_in_the_order_of_submission_when_a_worker_recovers() -> None:
    drive = Driver().fleet("a", "b")
    drive.fact(WorkerSuspect, "b")
    for name in ("z", "m", "a"):
        drive("requests", request(name, PROMPTS[0]))
    assert drive.lose("a") == []
    assert routes(drive.fact(WorkerRecovered, "b")) == [("z", "b", 2), ("m", "b", 2), ("a", "b", 2)]


def test_engine_failed_alone_moves_no_request() -> None:
    """The worker may have sent all of its output, so only an event of `fleet` reports that the worker is lost."""
    drive = Driver().fleet("a", "b")
    (routed,) = drive("requests", request("r", PROMPTS[0]))
    assert isinstance(routed, RequestRouted)
    before = drive.world.requests.digest()
    assert drive("progress", EngineFailed(worker_id=routed.worker_id, pool="default", engine="mock", error="x")) == []
    assert drive.world.counts == {"engine_failed": 1}
    assert drive.world.requests.digest() == before


def test_a_report_of_the_rank_after_the_last_is_foreign() -> None:
    drive = Driver().fleet("a")
    load = {"running": 1, "waiting": 0, "kv_blocks_used": 0, "kv_blocks_total": 1}
    drive("metrics", LoadReported(worker_id="a", worker_epoch=drive.epoch("a"), rank=1, **load))
    assert drive.world.counts == {"foreign_load_report": 1}


def test_more_hashes_than_tokens_book_no_negative_load() -> None:
    drive = Driver().fleet("a")
    drive.stored("a", PROMPTS[0])
    (routed,) = drive("requests", request("r", PROMPTS[0], token_ids=pack_u32([1, 2, 3])))
    assert isinstance(routed, RequestRouted)
    assert drive.world.load.rank_load("a", 0).prefill_tokens == 0
    assert routed.terms.cost == len(PROMPTS[0])


def test_events_of_the_announced_owner_stay_valid() -> None:
    fleet = Fleet()
    for offset in (1, 2):
        fleet.apply(OwnershipAnnounced(owner_epoch=7), offset)
    fleet.apply(msgspec.structs.replace(joined("a"), owner_epoch=7), 3)
    fleet.apply(WorkerSuspect(owner_epoch=7, worker_id="a", worker_epoch=3), 4)
    assert [worker.phase for worker in fleet.workers()] == ["suspect"]


def test_a_snapshot_must_match_its_seal() -> None:
    world = World()
    sealed = advance(world)
    followed = Rederivation(World())
    followed.apply(0, OwnerClaimed(owner_id="o", core_version=1), {})
    assert followed.apply(1, msgspec.structs.replace(sealed, owner_epoch=0), {}) is None
    elsewhere = SnapshotTaken(
        core_version=1, owner_epoch=0, seq=1, first_offset=0, chunks=1, digest=sealed.digest, journal_offset=3
    )
    divergence = followed.apply(2, elsewhere, {})
    assert divergence is not None
    assert "does not match the seal" in divergence.reason


def test_a_claim_must_not_consume_events() -> None:
    """What it consumed would be applied by nobody."""
    claimed = OwnerClaimed(owner_id="o", core_version=1, consumed=(ConsumedRun(topic="fleet", count=1, now_us=0),))
    divergence = Rederivation(World()).apply(0, claimed, {"fleet": [None]})
    assert divergence is not None
    assert (divergence.reason, divergence.derived) == ("an ownership claim must not consume events", None)


# Progress from a worker that never had the request is foreign; late progress is not


def first_token(name: str, worker_id: str, epoch: int, attempt: int = 1) -> FirstTokenEmitted:
    return FirstTokenEmitted(request_id=name, attempt=attempt, worker_id=worker_id, worker_epoch=epoch, owner_epoch=0)


def finished(name: str, worker_id: str, epoch: int, attempt: int = 1) -> RequestFinished:
    return RequestFinished(
        request_id=name,
        attempt=attempt,
        worker_id=worker_id,
        worker_epoch=epoch,
        owner_epoch=0,
        finish_reason="stop",
    )


def counts(drive: Driver) -> tuple[int, int]:
    """Return how many progress events had no effect, and how many of them were foreign."""
    return drive.world.counts["stale_progress"], drive.world.counts["foreign_progress"]


def routed(drive: Driver, name: str = "r") -> str:
    """Submit a request; return the worker that was selected for it."""
    (decided,) = drive("requests", request(name))
    return str(decided.worker_id)


@pytest.mark.parametrize("wrong", ["worker", "epoch", "attempt"])
def test_progress_of_a_worker_that_was_not_selected_is_foreign_and_has_no_effect(wrong: str) -> None:
    drive = Driver().fleet("a", "b")
    selected = routed(drive)
    other = "b" if selected == "a" else "a"
    epoch = drive.epoch(selected)
    event = {
        "worker": first_token("r", other, drive.epoch(other)),
        "epoch": first_token("r", selected, epoch + 1),
        "attempt": first_token("r", selected, epoch, attempt=2),
    }[wrong]
    before = drive.world.requests.digest()
    drive("progress", event)
    assert counts(drive) == (1, 1)
    assert drive.world.requests.digest() == before
    drive("progress", first_token("r", selected, epoch))
    assert counts(drive) == (1, 1)
    assert drive.world.requests.digest() != before


def test_late_progress_of_a_lost_worker_is_not_foreign() -> None:
    drive = Driver().fleet("a", "b")
    selected = routed(drive)
    epoch = drive.epoch(selected)
    drive.lose(selected)
    drive("progress", first_token("r", selected, epoch))
    assert counts(drive) == (1, 0)


def test_progress_on_a_request_that_ended_is_not_foreign() -> None:
    drive = Driver().fleet("a")
    epoch = drive.epoch("a")
    routed(drive)
    for _ in range(2):
        drive("progress", finished("r", "a", epoch))
    assert counts(drive) == (1, 0)


def test_progress_on_a_request_that_the_group_does_not_know_is_foreign_from_a_member() -> None:
    drive = Driver().fleet("a")
    epoch = drive.epoch("a")
    drive("progress", first_token("of another group", "a", epoch))
    assert counts(drive) == (1, 1)
    drive.lose("a")
    drive("progress", first_token("long forgotten", "a", epoch))
    assert counts(drive) == (2, 1)
    drive("fleet", joined("a"))
    drive("progress", first_token("long forgotten", "a", epoch))
    assert counts(drive) == (3, 1)


def test_attempts_before_a_snapshot_are_not_called_foreign() -> None:
    drive = Driver().fleet("a", "b")
    selected = routed(drive)
    epoch = drive.epoch(selected)
    drive.lose(selected)
    drive.world.stamp()  # a snapshot stands between journal records
    again = Driver(restore(list(drive.world.snapshot())))
    again("progress", first_token("r", selected, epoch))
    assert counts(again) == (1, 0)


# Ingresses that are lost, and what becomes of the requests whose HTTP clients waited there


def ingress_joined(name: str = "i", incarnation: str = "one", **changes: Any) -> IngressJoined:
    return IngressJoined(owner_epoch=0, ingress_id=name, incarnation=incarnation, **changes)


def ingress_lost(name: str = "i", incarnation: str = "one", **changes: Any) -> IngressLost:
    return IngressLost(owner_epoch=0, ingress_id=name, incarnation=incarnation, reason="its lease ran out", **changes)


def waiting_at(name: str, incarnation: str) -> Any:
    return request(name, ingress_incarnation=incarnation)


def test_a_lost_ingress_takes_its_requests_with_it_and_no_others() -> None:
    drive = Driver().fleet("a", "b")
    for name, incarnation in (("i", "one"), ("j", "two")):
        drive("fleet", ingress_joined(name, incarnation))
    for name, incarnation in (("r1", "one"), ("r2", "two"), ("by-kafka", ""), ("r3", "one"), ("older", "unknown")):
        drive("requests", waiting_at(name, incarnation))
    made = drive("fleet", ingress_lost())
    assert [type(one) for one in made] == [RequestAborted, RequestAborted]
    assert [(one.request_id, one.reason, one.worker_id != "") for one in made] == [
        ("r1", "ingress_lost", True),
        ("r3", "ingress_lost", True),
    ]
    assert made[0].message == "the ingress i of the request was lost: its lease ran out"
    assert [one.submitted.request_id for one in drive.world.requests.active()] == ["r2", "by-kafka", "older"]
    assert [one.ingress_id for one in drive.world.fleet.ingresses()] == ["j"]


def test_aborting_orphans_frees_room_for_queued_requests() -> None:
    drive = Driver()
    drive("fleet", ingress_joined())
    drive("control", pool(queue=QueueConfig(threshold=0.5)))
    drive("fleet", joined("a"))
    drive("requests", request("big", range(40), ingress_incarnation="one"))
    (held,) = drive("requests", request("next", range(100, 140)))
    made = drive("fleet", ingress_lost())
    assert [type(one) for one in made] == [RequestAborted, RequestRouted]
    assert made[1].request_id == held.request_id == "next"


def test_a_loss_of_another_incarnation_or_of_nobody_changes_nothing() -> None:
    drive = Driver().fleet("a")
    drive("fleet", ingress_joined())
    drive("requests", waiting_at("r", "one"))
    before = drive.world.fleet.digest()
    for fact in (ingress_lost(incarnation="two"), ingress_lost("j"), ingress_joined(incarnation="two")):
        assert drive("fleet", fact) == []
    assert drive.world.counts["stale_fleet_event"] == 3
    assert drive.world.fleet.digest() == before
    assert len(drive.world.requests) == 1


def test_a_restarted_ingress_is_another_incarnation() -> None:
    drive = Driver().fleet("a")
    drive("fleet", ingress_joined())
    drive("requests", waiting_at("old", "one"))
    (aborted,) = drive("fleet", ingress_lost())
    drive("fleet", ingress_joined(incarnation="two"))
    drive("requests", waiting_at("new", "two"))
    assert aborted.request_id == "old"
    assert [one.submitted.request_id for one in drive.world.requests.active()] == ["new"]


def test_ingresses_outlive_a_snapshot() -> None:
    drive = Driver().fleet("a")
    drive("fleet", ingress_joined(lease_ttl_ms=3_000))
    drive("requests", waiting_at("r", "one"))
    drive.world.take_consumed()
    after = restore(drive.world.snapshot())
    assert after.digest() == drive.world.digest()
    assert after.fleet.ingresses() == drive.world.fleet.ingresses()
    (aborted,) = Driver(after)("fleet", ingress_lost())
    assert aborted.request_id == "r"


# Events that the owner could not read


@pytest.mark.parametrize(("owner_events", "decisions"), [(1, 0), (2, 1), (3, 1)])
def test_the_version_of_the_owner_decides_whether_an_event_has_an_effect(
    monkeypatch: pytest.MonkeyPatch, owner_events: int, decisions: int
) -> None:
    drive = Driver().fleet("a")
    claim(drive.world, 7, (), owner_events)
    monkeypatch.setattr(RequestSubmitted, "SINCE", 2)
    assert len(drive("requests", request("one", ()))) == decisions
    assert drive.world.view["requests"] == 1
    assert drive.world.counts["undecodable"] == 1 - decisions


def test_a_snapshot_keeps_the_version_of_its_owner() -> None:
    world = World()
    claim(world, 7, (), 5)
    assert restore(world.snapshot()).owner_events == 5
    claim(world, 9)
    assert restore(world.snapshot()).owner_events == 1
